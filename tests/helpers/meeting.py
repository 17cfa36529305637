"""Where the processes of a test find each other: a store in the process that starts them, as launchers do it."""

from __future__ import annotations

import torch.distributed as dist


def meeting_place(processes: int) -> tuple[dist.TCPStore, dict[str, str]]:
    """A store on a port that the system chooses, to be kept until all ranks have ended, and their environment."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 opens no port of its own
        "ACCELERATE_USE_CPU": "true",
    }
