"""Where the processes of a test find each other: a store in the process that starts them, as launchers do it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def meeting_place(processes: int) -> Iterator[dict[str, str]]:
    """The environment of the ranks of a process group; their store has a port that the system chooses."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 opens no port of its own
        "ACCELERATE_USE_CPU": "true",
    }
