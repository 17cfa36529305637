"""Saves that go wrong, in a process of their own: `failing_saves.py killed|too-large FOLDER`; prints a JSON report."""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import sys
from pathlib import Path

import torch
from safetensors.torch import save
from torch import nn

from aswa_hf import ASWA, LastCheckpoint
from aswa_hf._utils import shard_files
from aswa_hf.checkpoint import load_state, save_state

# Of the events that Python reports before they happen.
ACCESSES = {"open", "half written", "os.rename", "os.remove", "os.mkdir"}


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


def killed(folder: Path) -> dict:
    """Forks a process that saves, and dies before its first access to a file; another one, before its second; …"""
    torch.set_num_threads(1)
    model = nn.Linear(600, 600)
    running = strategies(model)
    advance(model, running, 0)
    save_state(folder, running, value=0)
    moments, values, in_the_middle = [], [0], 0
    status = -signal.SIGKILL
    while status == -signal.SIGKILL:
        left_before = set(folder.iterdir())
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            advance(model, running, len(values))
            die_before(len(values), folder, writer)
            save_state(folder, running, value=len(values))
            os._exit(0)
        os.close(writer)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with os.fdopen(reader) as told:
            moments.append(told.read())
        in_the_middle += any(path.suffix == ".tmp" for path in set(folder.iterdir()) - left_before)
        values.append(loaded_value(folder))
        json.loads((folder / "state.json").read_text())
    return {"moments": moments, "values": values, "in_the_middle": in_the_middle, "status": status}


def die_before(number: int, folder: Path, writer: int) -> None:
    """Kills this process before its access of that number to a file in `folder`, which it names to `writer`."""
    accesses = itertools.count(1)

    def listen(event: str, args: tuple) -> None:
        if event in ACCESSES and str(args[0]).startswith(str(folder)) and next(accesses) == number:
            os.write(writer, event.encode())
            os.kill(os.getpid(), signal.SIGKILL)

    def save_in_two_halves(tensors: dict, path: Path, metadata: dict) -> None:
        content = save(tensors, metadata)
        with path.open("wb") as file:
            file.write(content[: len(content) // 2])
            file.flush()
            sys.audit("half written", str(path))
            file.write(content[len(content) // 2 :])

    shard_files.save_file = save_in_two_halves  # which safetensors does without Python
    sys.addaudithook(listen)


def too_large(folder: Path) -> dict:
    """Saves once, then again with a limit on the size of files that the second save runs into."""
    model = nn.Linear(600, 600)
    running = strategies(model)
    advance(model, running, 1)
    save_state(folder, running, value=1)
    saved = sorted(folder.iterdir())
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
        "same files": sorted(folder.iterdir()) == saved,
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
