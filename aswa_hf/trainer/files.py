"""Where `ASWACallback` keeps its state beside the Trainer's checkpoints, so that no crash loses it.

The Trainer deletes old checkpoints before it tells callbacks that a new one was saved. The state is therefore written
first, to `_aswa-<step>` beside the checkpoints, and moved into `checkpoint-<step>/aswa` when that folder is complete.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import TrainerState, TrainingArguments

from aswa_hf.checkpoint import AVERAGE_FILE
from aswa_hf.run_folder import STATE_FOLDER, TRAINER_STATE, checkpoint_folder, checkpoints


def folder_ahead(output_dir: str | Path, step: int) -> Path:
    """Where the state waits for the checkpoint of `step`; the leading underscore keeps it out of a push."""
    return Path(output_dir) / f"_aswa-{step}"


def move_into_checkpoint(output_dir: str | Path, step: int) -> None:
    """Gives a checkpoint the state that was written ahead of it, and drops those no checkpoint was made for."""
    ahead, checkpoint = folder_ahead(output_dir, step), checkpoint_folder(output_dir, step)
    if ahead.is_dir() and checkpoint.is_dir():
        shutil.rmtree(checkpoint / STATE_FOLDER, ignore_errors=True)
        ahead.rename(checkpoint / STATE_FOLDER)
    drop_waiting(output_dir, but=step)


def drop_waiting(output_dir: str | Path, but: int | None = None) -> None:
    """Removes states that wait for checkpoints which were never made."""
    for folder in Path(output_dir).glob("_aswa-*"):
        if folder != folder_ahead(output_dir, -1 if but is None else but):
            shutil.rmtree(folder, ignore_errors=True)


def saved_state(checkpoint: Path, step: int) -> Path | None:
    """The folder with the state of a checkpoint, also if the process ended before it was moved there."""
    for folder in (checkpoint / STATE_FOLDER, folder_ahead(checkpoint.parent, step)):
        if (folder / AVERAGE_FILE).exists():
            return folder
    return None


def complete_checkpoints(folder: Path) -> list[str]:
    """The names of the checkpoints that have a state, oldest first."""
    return [path.name for path in checkpoints(folder) if (path / STATE_FOLDER / AVERAGE_FILE).exists()]


def resumed_checkpoint(resume_from: str | Path | None, args: TrainingArguments, state: TrainerState) -> Path:
    """The folder a resumed run starts from; the Trainer does not tell."""
    given = args.resume_from_checkpoint
    candidates = [Path(given)] if isinstance(given, str) else []
    candidates.append(checkpoint_folder(args.output_dir, state.global_step))
    if resume_from is not None:
        candidates = [Path(resume_from)]
    for candidate in candidates:
        if (candidate / TRAINER_STATE).is_file():
            saved = TrainerState.load_from_json(str(candidate / TRAINER_STATE))
            # Another run may have a checkpoint of the same step, but not the same history.
            if (saved.global_step, saved.log_history) == (state.global_step, state.log_history):
                return candidate
    raise FileNotFoundError(
        f"The run resumes at step {state.global_step}, but {' and '.join(map(str, candidates))} is not the "
        "checkpoint it resumes from. The Trainer does not tell callbacks where that is: pass "
        "resume_from=your_checkpoint to ASWACallback."
    )
