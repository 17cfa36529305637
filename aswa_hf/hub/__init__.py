"""The Hub: pushes a run as a repository with its card, in one commit."""

from aswa_hf.hub.push import push_to_hub
from aswa_hf.hub.repository import read_history, save_run, write_repository
from aswa_hf.hub_requests import HubError

__all__ = ["HubError", "push_to_hub", "read_history", "save_run", "write_repository"]
