"""A run folder: the names of its files, and reading and writing them as JSON.

model.safetensors, config.json, …    the shipped weights as an ordinary checkpoint
checkpoint-<step>/                   the running model's checkpoints, each with the averages in aswa/
checkpoint-<step>/aswa/commit.json   written last: sizes and checksums of the checkpoint's files
aswa/                                the weights of all strategies at the end
aswa/commit.json                     written last: sizes and checksums of the files of the finished run
settings.json, results.json          how the run was configured, what each strategy reached
aswa_trajectory.json, trajectory.png every decision, and a plot of them
train.log, console.log               what was logged, and what a grid of runs printed
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aswa_hf._utils.commits import changed, commit, damage
from aswa_hf._utils.files import read_json
from aswa_hf._utils.warnings import warn_caller
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
TRAINING = "training.safetensors"  # weights and optimizer state of a model with sharded entities
COMMIT = "commit.json"
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
    dtype: str | None = None


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


def commit_marker(checkpoint: Path) -> Path:
    """Returns the file that marks a checkpoint as complete."""
    return checkpoint / STATE_FOLDER / COMMIT


def commit_checkpoint(checkpoint: Path) -> None:
    """Marks a checkpoint as complete, with the files that are in it now; later ones do not count."""
    commit(checkpoint, commit_marker(checkpoint))


def commit_run(run: Path) -> None:
    """Marks a run as finished: what is read from its folder later must be what is in it now."""
    notes = (LOG, CONSOLE, CARD)
    files = [path for path in run.iterdir() if path.name not in notes and not path.name.startswith("_")]
    commit(run, commit_marker(run), [*files, *(run / STATE_FOLDER).glob("*")])


def reopen_run(run: Path) -> None:
    """Removes the mark of a finished run, before files of the run are written again."""
    commit_marker(run).unlink(missing_ok=True)


def check_unchanged(run: Path, *patterns: str) -> None:
    """Raises ValueError if a file of a finished run is not the one that the run wrote.

    A flipped bit in the weights, or another value in a configuration, would only show as wrong results. Folders
    without a marker, which other programs or older versions wrote, cannot be checked.
    """
    marker = commit_marker(run)
    if not marker.is_file():
        return
    files = [path for pattern in patterns for path in run.glob(pattern) if path != marker]
    if reason := changed(run, marker, files):
        raise ValueError(
            f"{run} has changed since it was written: {reason}. Restore the file or train again; if it was changed on "
            f"purpose, delete {marker}."
        )


def checkpoint_damage(checkpoint: Path, required: str = TRAINER_STATE) -> str | None:
    """Returns what is wrong with a checkpoint, or None if it is valid.

    A checkpoint without a marker is valid if it has the `required` file and no truncated one: older versions wrote
    none, and a run may be killed before it writes the marker.
    """
    return damage(checkpoint, commit_marker(checkpoint), required)


def valid_checkpoint(folder: str | Path, required: str = TRAINER_STATE) -> tuple[Path | None, dict[Path, str]]:
    """Returns the newest valid checkpoint, and those that are newer, with what is wrong with each."""
    damaged: dict[Path, str] = {}
    for checkpoint in reversed(checkpoints(folder)):
        reason = checkpoint_damage(checkpoint, required)
        if reason is None:
            return checkpoint, damaged
        damaged[checkpoint] = reason
    return None, damaged


def newest_checkpoint(folder: str | Path, required: str = TRAINER_STATE, *, clean: bool = True) -> Path | None:
    """Returns the newest valid checkpoint, or None if there is none; raises ValueError if all are damaged.

    Newer ones are named in a warning and renamed (`clean`), since the resumed run will write them again; those that
    were never complete are removed.
    """
    valid, damaged = valid_checkpoint(folder, required)
    skipped = ", ".join(f"{checkpoint.name} ({reason})" for checkpoint, reason in damaged.items())
    if valid is None and any((checkpoint / required).exists() for checkpoint in damaged):
        raise ValueError(f"No checkpoint in {folder} is valid: {skipped}. Start a new run in another folder.")
    if not damaged or not clean:
        return valid
    for checkpoint in damaged:
        aside = checkpoint.with_name(f"_damaged-{checkpoint.name}")  # the underscore keeps it out of a push
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.rename(aside)
        if not (aside / required).exists():
            shutil.rmtree(aside, ignore_errors=True)
    resumed = f"The run resumes from {valid.name}." if valid else "There was no complete one before."
    warn_caller(f"Skipped damaged checkpoints in {folder}: {skipped}. {resumed}")
    return valid


def refuse_other_sharding(checkpoint: Path, sharding: str, *, processes: int | None = None) -> None:
    """Raises ValueError if a run resumes from a checkpoint of weights that are not sharded like its own.

    `sharding` is "complete", "fsdp", "rows" (a table whose rows are spread over processes), "zero" or "zero-3"
    (DeepSpeed). DeepSpeed's own files are for one number of `processes`; None is for files of any number.
    """
    kinds = {
        "complete": "with complete weights on every process",
        "fsdp": "with sharded weights (FSDP)",
        "rows": "with sharded entities",
        "zero": "with DeepSpeed and complete weights on every process",
        "zero-3": "with DeepSpeed ZeRO-3",
    }
    # As accelerate and DeepSpeed name them.
    saved = "fsdp" if any(checkpoint.glob("pytorch_model_fsdp*")) else "complete"
    if any(checkpoint.glob("*/mp_rank_*_model_states.pt")):
        saved = "zero"
    if any(checkpoint.glob("*/zero_pp_rank_*_model_states.pt")):
        saved = "zero-3"
    if (checkpoint / TRAINING).exists():
        saved = "rows"
    before = len(list(checkpoint.glob("*/*zero_pp_rank_*_optim_states.pt")))
    if saved == sharding and processes is not None and before not in (0, processes):
        raise ValueError(
            f"{checkpoint} was saved by DeepSpeed on {before} processes, and this run has {processes}, for which its "
            f"files cannot be used. Resume on {before} processes, or convert them with DeepSpeed's ds_to_universal "
            "and set {'checkpoint': {'load_universal': True}} in the DeepSpeed config."
        )
    if saved != sharding:
        raise ValueError(
            f"{checkpoint} was saved by a run {kinds[saved]}, and this run is one {kinds[sharding]}. Resume with the "
            "same kind of run, or start a new one in another folder."
        )


def is_finished(checkpoint: Path) -> bool:
    """Whether a Trainer completed a checkpoint: its state is the last file written. The others are not checked."""
    try:
        return bool(read_trainer_state(checkpoint))
    except (OSError, ValueError):
        return False


def last_trainer_checkpoint(folder: str | Path) -> Path | None:
    """Returns the last checkpoint that a Trainer completed."""
    return next((path for path in reversed(checkpoints(folder)) if is_finished(path)), None)


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
