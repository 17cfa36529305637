"""Starts examples as a user does."""

from __future__ import annotations

import os
from pathlib import Path

import warm
from places import HELPERS, ROOT

EXAMPLES = ROOT / "examples"
# Port 0: the launcher chooses one when it opens it.
LAUNCH = ["-m", "accelerate.commands.launch", "--main_process_port", "0", "--config_file"]
LAUNCHERS = {
    "one process": [],
    # `accelerate launch --cpu --num_processes 2` would start one process.
    "ddp": [*LAUNCH, EXAMPLES / "configs" / "ddp_2cpu.yaml"],
    "fsdp2": [
        *LAUNCH, EXAMPLES / "configs" / "fsdp2_8gpu.yaml", "--num_processes", "2", HELPERS / "sharded_on_cpu.py",
    ],
}  # fmt: skip


def run_example(example: str, *arguments: str, cwd: Path, launcher: str = "one process") -> str:
    """What an example prints; it must exit with status 0."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    result = warm.run(*LAUNCHERS[launcher], EXAMPLES / example, *arguments, cwd=cwd, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout
