"""Runs `aswa-hf` commands in processes of their own, which may be killed with SIGKILL in the middle.

    python killed_commands.py FOLDER KILL_AT… -- ARGUMENT…

Runs the command with `--output-dir FOLDER/straight`; then with `--output-dir FOLDER/killed`, where it is killed each
time its log tells of one of the epochs KILL_AT, and taken up again with `--resume`. The processes are forked, since
importing the libraries takes longer than training.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import aswa_hf.experiments.kge  # noqa: F401  here and not in every process
from aswa_hf.cli import main as aswa_hf_main
from aswa_hf.experiments.running import LOG, RESULTS


def start(arguments: list[str]) -> int:
    """The id of a process that runs the command."""
    child = os.fork()
    if child:
        return child
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


def kill_at(epoch: int, child: int, log: Path) -> None:
    """Kills the process as soon as its log has an entry of this epoch or a later one."""
    while True:
        lines = log.read_text().splitlines() if log.exists() else []
        epochs = [json.loads(line).get("epoch", 0) for line in lines if line.endswith("}")]
        if epochs and epochs[-1] >= epoch:
            break
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the process ended before it could be killed"
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == -signal.SIGKILL, f"expected the process to be killed, it ended with {status}"


def main() -> None:
    here = sys.argv.index("--")
    root, *kills = sys.argv[1:here]
    command = sys.argv[here + 1 :]
    torch.set_num_threads(1)

    def finish(child: int) -> None:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == 0, f"the command ended with {status}"

    finish(start([*command, "--output-dir", f"{root}/straight"]))
    killed = [*command, "--output-dir", f"{root}/killed"]
    log = Path(root) / "killed" / LOG
    for count, epoch in enumerate(map(int, kills)):
        kill_at(epoch, start([*killed, "--resume"] if count else killed), log)
        assert not (Path(root) / "killed" / RESULTS).exists()
    finish(start([*killed, "--resume"]))


if __name__ == "__main__":
    main()
