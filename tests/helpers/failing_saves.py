"""Saves that go wrong, in a process of their own: `failing_saves.py killed|too-large FOLDER`; prints a JSON report."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from aswa_hf import ASWA, LastCheckpoint
from aswa_hf.checkpoint import load_state, save_state


def strategies(model: nn.Module) -> dict:
    return {"aswa": ASWA(model), "last": LastCheckpoint(model)}


def advance(model: nn.Module, of: dict, value: int) -> None:
    """One decision point at which all weights and all scores are `value`: a mixture of two would show."""
    for parameter in model.parameters():
        parameter.data.fill_(value)
    for strategy in of.values():
        strategy.update(lambda: -1.0, running_score=float(value))


def loaded_value(folder: Path) -> int:
    """The one value that a saved state consists of, or an error."""
    fresh = strategies(nn.Linear(600, 600))
    value = load_state(folder, fresh)["value"]
    for name, strategy in fresh.items():
        assert strategy.score == value, (name, strategy.score, value)
        for tensor in strategy.average.averaged.values():
            assert tensor.eq(value).all(), (name, value)
    return value


def killed(folder: Path, kills: int = 25) -> dict:
    """Forks a process that saves again and again, and kills it at a random moment; every time."""
    random.seed(0)
    torch.set_num_threads(1)
    model = nn.Linear(600, 600)
    running = strategies(model)
    values, in_the_middle = [0], 0
    advance(model, running, 0)
    save_state(folder, running, value=0)
    start = time.perf_counter()
    save_state(folder, running, value=0)
    duration = time.perf_counter() - start
    for _ in range(kills):
        left_before = set(os.listdir(folder))
        if (child := os.fork()) == 0:
            try:
                for value in range(values[-1] + 1, values[-1] + 10_000):
                    advance(model, running, value)
                    save_state(folder, running, value=value)
            finally:
                os._exit(1)
        time.sleep(random.uniform(0.2, 4.0) * duration + 0.005)
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        in_the_middle += any(name.endswith(".tmp") for name in set(os.listdir(folder)) - left_before)
        values.append(loaded_value(folder))
        json.loads((folder / "state.json").read_text())
    return {"values": values, "in_the_middle": in_the_middle}


def too_large(folder: Path) -> dict:
    """Saves once, then again with a limit on the size of files that the second save runs into."""
    model = nn.Linear(600, 600)
    running = strategies(model)
    advance(model, running, 1)
    save_state(folder, running, value=1)
    saved = sorted(os.listdir(folder))
    advance(model, running, 2)
    model.weight.data.fill_(7)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        save_state(folder, running, value=2)
        error = None
    except OSError as caught:
        error = str(caught)
    report = {
        "error": error,
        "same files": sorted(os.listdir(folder)) == saved,
        "loaded": loaded_value(folder),
        "running weights": model.weight.unique().tolist(),
        "score": running["aswa"].score,
    }
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    save_state(folder, running, value=2)
    return report | {"loaded with room": loaded_value(folder)}


if __name__ == "__main__":
    scenario = {"killed": killed, "too-large": too_large}[sys.argv[1]]
    print(json.dumps(scenario(Path(sys.argv[2]))))
