"""Runs `aswa-hf` commands in processes of their own, which may be killed with SIGKILL in the middle.

    python killed_commands.py FOLDER SIGNAL@EPOCH… -- ARGUMENT…

Runs the command with `--output-dir FOLDER/straight`; then with `--output-dir FOLDER/killed`, where it sends itself a
signal each time it has logged one of the epochs, and is resumed with `--resume`. The processes are forked, since
importing the libraries takes longer than training.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from moments import at

import aswa_hf.experiments.kge  # noqa: F401  here and not in every process
from aswa_hf.cli import main as aswa_hf_main

ENDS = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143, signal.SIGINT: 130}


def run(arguments: list[str], number: int = 0, epoch: int = 0) -> int:
    """The exit status of a command; the number of a signal, negative, if that ended it."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if number:
        # The first line of an epoch has its loss.
        at("on_log", lambda args, state: signal.raise_signal(number) if is_first(state, epoch) else None)
    try:
        sys.argv = ["aswa-hf", *arguments]
        aswa_hf_main()
    except SystemExit as ended:
        sys.stderr.write(ended.code if isinstance(ended.code, str) else "")
        os._exit(ended.code if isinstance(ended.code, int) else bool(ended.code))
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(2)
    os._exit(0)


def is_first(state: Any, epoch: int) -> bool:
    """Whether the last line that was logged is the first one of an epoch."""
    return state.epoch == epoch and [entry["epoch"] for entry in state.log_history].count(epoch) == 1


def main() -> None:
    here = sys.argv.index("--")
    root, *kills = sys.argv[1:here]
    command = sys.argv[here + 1 :]
    torch.set_num_threads(1)
    straight, killed = ([*command, "--output-dir", f"{root}/{name}"] for name in ("straight", "killed"))
    assert run(straight) == 0
    for count, kill in enumerate(kills):
        name, _, epoch = kill.partition("@")
        status = run([*killed, "--resume"] if count else killed, signal.Signals[name], int(epoch))
        assert status == ENDS[signal.Signals[name]], f"{kill}: it ended with {status}"
        assert not (Path(root) / "killed" / "results.json").exists()
    assert run([*killed, "--resume"]) == 0


if __name__ == "__main__":
    main()
