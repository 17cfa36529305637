"""A run folder: the names of its files, and reading and writing them as JSON.

model.safetensors, config.json, …    the shipped weights as an ordinary checkpoint
checkpoint-<step>/                   the running model's checkpoints, each with the averages in aswa/
aswa/                                the weights of all strategies at the end
settings.json, results.json          how the run was configured, what each strategy reached
aswa_trajectory.json, trajectory.png every decision, and a plot of them
train.log, console.log               what was logged, and what a grid of runs printed
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aswa_hf._utils.files import read_json, write_text
from aswa_hf.trajectory import Number, save_trajectories

if TYPE_CHECKING:
    from aswa_hf.strategies import Strategy

SETTINGS, RESULTS = "settings.json", "results.json"
TRAJECTORY, PICTURE = "aswa_trajectory.json", "trajectory.png"
LOG, CONSOLE = "train.log", "console.log"
CONFIG, ADAPTER_CONFIG, CARD = "config.json", "adapter_config.json", "README.md"
WEIGHTS, ADAPTER_WEIGHTS, WEIGHTS_INDEX = (
    "model.safetensors",
    "adapter_model.safetensors",
    "model.safetensors.index.json",
)
TRAINER_STATE = "trainer_state.json"
STATE_FOLDER = "aswa"
CHECKPOINT_PREFIX = "checkpoint-"

# What the package reads of each file; other fields may have any value.
Metrics = dict[str, Number | dict[str, Number]]


@dataclass
class Measured:
    """The schema of files with the metrics of strategies by split."""

    strategies: dict[str, dict[str, Metrics | int]]


@dataclass
class Results(Measured):
    """The schema of results.json."""

    task: str
    dataset: str
    model: str
    seed: int | None = None
    settings: dict[str, Any] | None = None


@dataclass
class Config:
    """The schema of config.json, whichever library wrote it."""

    model_type: str | None = None
    architectures: list[str] | None = None
    architecture: str | None = None
    auto_map: dict[str, Any] | None = None


@dataclass
class WeightsIndex:
    """The schema of model.safetensors.index.json."""

    weight_map: dict[str, str]


@dataclass
class TrainerProgress:
    """The schema of trainer_state.json."""

    epoch: float
    global_step: int


def checkpoint_folder(folder: str | Path, step: int) -> Path:
    """Returns the folder of the checkpoint of a step."""
    return Path(folder) / f"{CHECKPOINT_PREFIX}{step}"


def checkpoint_step(checkpoint: str | Path) -> int:
    """Returns the step in the name of a checkpoint folder."""
    return int(Path(checkpoint).name.removeprefix(CHECKPOINT_PREFIX))


def checkpoints(folder: str | Path) -> list[Path]:
    """Returns the checkpoint folders in a run folder, oldest first."""
    found = Path(folder).glob(f"{CHECKPOINT_PREFIX}*")
    return sorted((path for path in found if _is_step(path.name) and path.is_dir()), key=checkpoint_step)


def _is_step(name: str) -> bool:
    return name.removeprefix(CHECKPOINT_PREFIX).isdecimal()


def last_trainer_checkpoint(folder: str | Path) -> Path | None:
    """Returns the last checkpoint that a Trainer wrote completely: its state is the last file it writes."""
    complete = [path for path in checkpoints(folder) if (path / TRAINER_STATE).is_file()]
    return complete[-1] if complete else None


def epochs_done(checkpoint: Path | None) -> float:
    """Returns the number of epochs after which a Trainer wrote a checkpoint."""
    return 0.0 if checkpoint is None else float(read_trainer_state(checkpoint)["epoch"])


def read_trainer_state(checkpoint: Path) -> dict[str, Any]:
    """Returns the state of a Trainer in one of its checkpoints."""
    state: dict[str, Any] = read_json(checkpoint / TRAINER_STATE, TrainerProgress, finite=False)
    return state


def read_config(path: Path) -> dict[str, Any]:
    """Returns the configuration of a model."""
    config: dict[str, Any] = read_json(path, Config, finite=False)
    return config


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes an object as strict JSON, in one atomic write."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_trajectory(
    folder: Path,
    strategies: Mapping[str, Strategy],
    *,
    metric: str,
    greater_is_better: bool,
    applied: str | None,
    **more: Any,
) -> None:
    """Writes the decisions of all strategies of a run; `more` is added to the file."""
    save_trajectories(
        folder / TRAJECTORY,
        {name: strategy.trajectory for name, strategy in strategies.items()},
        alphas={name: strategy.alphas for name, strategy in strategies.items()},
        metric=metric,
        greater_is_better=greater_is_better,
        applied=applied,
        **more,
    )
