"""Runs a script on gloo processes, two unless RANKS says otherwise.

They are forked from one that has imported the libraries: that takes most of the time.

python forked_ranks.py SCRIPT ARGUMENT…
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import traceback

import accelerate  # noqa: F401
import datasets  # noqa: F401
import torch
import training  # noqa: F401
from meeting import meeting_place
from transformers import Trainer  # noqa: F401

import aswa_hf.trainer.callback  # noqa: F401

WORLD = int(os.environ.get("RANKS", "2"))


def work(rank: int) -> None:
    """One rank: never returns."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        os._exit(int(ended.code or 0) if not isinstance(ended.code, str) else 1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main() -> None:
    sys.argv = sys.argv[1:]
    torch.set_num_threads(1)
    ranks = []

    def end(*_: object) -> None:
        for child in ranks:
            os.kill(child, signal.SIGKILL)
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    with meeting_place(WORLD) as addresses:
        os.environ.update(addresses)
        for rank in range(WORLD):
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                work(rank)
            ranks.append(child)
        while ranks:
            child, status = os.wait()
            ranks.remove(child)
            if os.waitstatus_to_exitcode(status) != 0:
                end()


if __name__ == "__main__":
    main()
