"""What the tests of pushing share: a Hub that clients in this very process use, and runs to push."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hub_server import HubServer
from typer.testing import CliRunner

from aswa_hf.cli import app

TOKEN = "hf_loopback_secret"


def run_command(*arguments: object) -> str:
    """What `aswa-hf` prints."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.output


def kge_run(folder: Path) -> Path:
    run_command(
        *("train", "kge", "--dataset", "countries", "--model", "keci", "--dim", 8, "--epochs", 6),
        *("--lr", 0.05, "--apply", "aswa", "--output-dir", folder),
    )
    return folder


def image_run(folder: Path) -> Path:
    run_command(
        *("train", "image", "--dataset", "digits", "--model", "test_resnet", "--image-size", 16, "--epochs", 2),
        *("--train-size", 100, "--val-ratio", 0.1, "--apply", "aswa", "--output-dir", folder),
    )
    return folder


@contextmanager
def hub_in_process(monkeypatch: pytest.MonkeyPatch, *, lfs: bool = False) -> Iterator[HubServer]:
    """A Hub for the clients of this process, logged in by a token in the environment."""
    # Clients in this process keep Xet switched on, which this Hub answers by taking all files in the commit itself.
    with HubServer(token=TOKEN, lfs=lfs) as server:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.endpoint)
        monkeypatch.setattr("transformers.utils.hub._hf_api", None)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between its repetitions
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


def files(hub: HubServer, repo: str = "user/model", revision: str = "main") -> dict[str, bytes]:
    """The files of a repository that were pushed."""
    found = hub.repos[repo].files(revision)
    return {path: content for path, content in found.items() if path != ".gitattributes"}


def steps(hub: HubServer, step: str) -> int:
    """How often a step was asked for."""
    return sum(request.step == step for request in hub.log)


def assert_nothing_pickled(contents: dict[str, bytes]) -> None:
    for path, content in contents.items():
        assert Path(path).suffix not in (".bin", ".pt", ".pth", ".pkl", ".ckpt"), path
        # A pickle begins with its protocol, what torch.save writes with that of a zip file.
        assert content[:1] != b"\x80", path
        assert content[:2] != b"PK", path


def numbers_of(value: Any) -> list[float]:
    """All numbers of a JSON value."""
    if isinstance(value, dict):
        return [number for item in value.values() for number in numbers_of(item)]
    if isinstance(value, list):
        return [number for item in value for number in numbers_of(item)]
    return [value] if isinstance(value, (int, float)) and not isinstance(value, bool) else []
