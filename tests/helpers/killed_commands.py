"""Runs `aswa-hf` commands in processes of their own, which may be killed with SIGKILL in the middle.

    python killed_commands.py FOLDER KILL_AT… -- ARGUMENT…

Runs the command with `--output-dir FOLDER/straight`; then with `--output-dir FOLDER/killed`, where it is killed each
time it logs one of the epochs KILL_AT, and resumed with `--resume`. The processes are forked, since importing the
libraries takes longer than training.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from moments import at, die

import aswa_hf.experiments.kge  # noqa: F401  here and not in every process
from aswa_hf.cli import main as aswa_hf_main


def run(arguments: list[str], kill_at: int | None = None) -> int:
    """The exit status of a command; the number of a signal, negative, if that ended it."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if kill_at is not None:
        at("on_log", lambda args, state: die() if state.epoch >= kill_at else None)
    try:
        sys.argv = ["aswa-hf", *arguments]
        aswa_hf_main()
    except SystemExit as ended:
        sys.stderr.write(ended.code if isinstance(ended.code, str) else "")
        os._exit(1 if ended.code else 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(2)
    os._exit(0)


def main() -> None:
    here = sys.argv.index("--")
    root, *kills = sys.argv[1:here]
    command = sys.argv[here + 1 :]
    torch.set_num_threads(1)
    straight, killed = ([*command, "--output-dir", f"{root}/{name}"] for name in ("straight", "killed"))
    assert run(straight) == 0
    for count, epoch in enumerate(map(int, kills)):
        status = run([*killed, "--resume"] if count else killed, kill_at=epoch)
        assert status == -signal.SIGKILL, f"expected the process to be killed, it ended with {status}"
        assert not (Path(root) / "killed" / "results.json").exists()
    assert run([*killed, "--resume"]) == 0


if __name__ == "__main__":
    main()
