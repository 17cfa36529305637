"""Kills runs at moments drawn by a seeded generator, resumes them, and compares every bit with a run let through.

    python kills.py KIND FOLDER SEED COUNT

KIND is "trainer", "fit", "kge" or "image". A moment is before or after a call that changes the disk, or after an
optimizer step. The processes are forked, since importing the libraries takes longer than training. Prints what
happened as JSON: the moments, and the files that differ.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import killed_runs
import loop_jobs
import torch
from safetensors.torch import load_file
from training import make_trainer, with_aswa

import aswa_hf.experiments.image
import aswa_hf.experiments.kge  # noqa: F401  here and not in every process
from aswa_hf._utils import shard_files
from aswa_hf.cli import main as aswa_hf_main
from aswa_hf.run_folder import last_trainer_checkpoint, newest_checkpoint

COMMANDS = {
    "kge": "train kge --dataset countries --dim 8 --lr 0.02 --batch-size 512 --scheme negative_sampling --epochs 6",
    "image": "train image --dataset digits --model test_resnet --image-size 16 --train-size 80 --batch-size 20"
    " --augment --epochs 4 --fge",
}
CALLS = [(os, "fsync"), (os, "replace"), (os, "rename"), (os, "unlink"), (os, "rmdir"), (shutil, "rmtree")]
CALLS += [(torch, "save"), (shard_files, "save_file"), (torch.optim.Optimizer, "zero_grad")]


def counted(at: int | None) -> list[int]:
    """Counts the moments from now on; ends the process at one of them."""
    moments = [0]

    def moment() -> None:
        moments[0] += 1
        if moments[0] == at:
            os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **more: Any) -> Any:
            moment()
            result = function(*args, **more)
            moment()
            return result

        return call

    for owner, name in CALLS:
        setattr(owner, name, wrapped(getattr(owner, name)))
    return moments


def train(kind: str, folder: Path) -> None:
    """Starts a run, or resumes it as its user would."""
    if kind == "trainer":
        valid = newest_checkpoint(folder) if folder.exists() else None
        trainer = make_trainer("conv", folder, num_train_epochs=4, save_total_limit=1)
        callback = with_aswa(trainer, strategies=("aswa", "swa", "ema", "best", "last"))
        trainer.train(resume_from_checkpoint=None if valid is None else str(valid))
        killed_runs.write_result(trainer, callback, folder)
    elif kind == "fit":
        loop_jobs.train("conv", str(folder), epochs=3, save_steps=2, save_total_limit=1)
    else:
        resume = ["--resume"] if last_trainer_checkpoint(folder) else []
        sys.argv = ["aswa-hf", *COMMANDS[kind].split(), "--output-dir", str(folder), *resume]
        aswa_hf_main()


def ended(kind: str, folder: Path) -> dict[str, Any]:
    """What a finished run has left, without times and places."""
    if kind in ("trainer", "fit"):
        name = "result" if kind == "trainer" else "rank0"
        return {
            "tensors": load_file(folder / f"{name}.safetensors"),
            **json.loads((folder / f"{name}.json").read_text()),
        }
    lines = [json.loads(line) for line in (folder / "train.log").read_text().splitlines()]
    return {
        "tensors": load_file(folder / "model.safetensors"),
        "results": json.loads((folder / "results.json").read_text())["strategies"],
        "decisions": json.loads((folder / "aswa_trajectory.json").read_text())["strategies"],
        "log": [without_times(line) for line in lines if "train_runtime" not in line],
        "checkpoints": sorted(path.name for path in folder.glob("checkpoint-*")),
        "left": sorted(
            path.name for path in folder.iterdir() if path.name.startswith(("_", ".")) and path.name != ".lock"
        ),
    }


def without_times(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if not key.endswith(("runtime", "per_second"))}


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    tensors, others = ours.pop("tensors"), theirs.pop("tensors")
    found = [key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)]
    names = tensors.keys() | others.keys()
    return found + [n for n in names if n not in tensors or n not in others or not torch.equal(tensors[n], others[n])]


def in_own_process(kind: str, folder: Path, at: int | None, report: Path | None = None) -> int:
    """The exit status of a run; the number of a signal, negative, if that ended it."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.dup2(2, 1)
    status = 1
    try:
        moments = counted(at)
        try:
            train(kind, folder)
            status = 0
        except SystemExit as exited:
            sys.stderr.write(exited.code if isinstance(exited.code, str) else "")
            status = 1 if exited.code else 0
        if report is not None:
            report.write_text(str(moments[0]))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    os._exit(status)


def main() -> None:
    kind, root, seed, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    root.mkdir(parents=True, exist_ok=True)
    assert in_own_process(kind, root / "straight", None, root / "moments") == 0
    moments = int((root / "moments").read_text())
    chance = random.Random(seed)
    kills = []
    for number in range(count):
        at, folder = chance.randrange(1, moments + 1), root / f"run-{number}"
        status = in_own_process(kind, folder, at)
        assert status == -signal.SIGKILL, f"expected a kill at moment {at}, it ended with {status}"
        status = in_own_process(kind, folder, None)
        differ = (
            differences(ended(kind, folder), ended(kind, root / "straight")) if status == 0 else [f"status {status}"]
        )
        kills.append({"at": at, "differ": differ})
        if not differ:
            shutil.rmtree(folder)
    sys.stdout.write(json.dumps({"moments": moments, "kills": kills}) + "\n")


if __name__ == "__main__":
    main()
