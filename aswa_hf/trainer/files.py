"""Where `ASWACallback` saves its state beside the Trainer's checkpoints, so that no crash loses it.

The Trainer deletes old checkpoints before it calls `on_save` for a new one. The state is therefore written
first, to `_aswa-<step>` beside the checkpoints, and moved into `checkpoint-<step>/aswa` when that folder is complete.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import TrainerState, TrainingArguments

from aswa_hf.checkpoint import AVERAGE_FILE
from aswa_hf.run_folder import STATE_FOLDER, TRAINER_STATE, checkpoint_folder, checkpoints


def pending_folder(output_dir: str | Path, step: int) -> Path:
    """Returns the folder of a state until the checkpoint of `step` exists; the underscore keeps it out of a push."""
    return Path(output_dir) / f"_aswa-{step}"


def move_into_checkpoint(output_dir: str | Path, step: int) -> None:
    """Moves the pending state of `step` into its checkpoint, and removes all other pending states."""
    pending, checkpoint = pending_folder(output_dir, step), checkpoint_folder(output_dir, step)
    if pending.is_dir() and checkpoint.is_dir():
        shutil.rmtree(checkpoint / STATE_FOLDER, ignore_errors=True)
        pending.rename(checkpoint / STATE_FOLDER)
    remove_pending(output_dir, but=step)


def remove_pending(output_dir: str | Path, but: int | None = None) -> None:
    """Removes the states of checkpoints that were never written."""
    for folder in Path(output_dir).glob("_aswa-*"):
        if folder != pending_folder(output_dir, -1 if but is None else but):
            shutil.rmtree(folder, ignore_errors=True)


def saved_state(checkpoint: Path, step: int) -> Path | None:
    """Returns the folder with the state of a checkpoint, also if the process ended before the state was moved."""
    for folder in (checkpoint / STATE_FOLDER, pending_folder(checkpoint.parent, step)):
        if (folder / AVERAGE_FILE).exists():
            return folder
    return None


def complete_checkpoints(folder: Path) -> list[str]:
    """Returns the names of the checkpoints that have a state, oldest first."""
    return [path.name for path in checkpoints(folder) if (path / STATE_FOLDER / AVERAGE_FILE).exists()]


def resumed_checkpoint(resume_from: str | Path | None, args: TrainingArguments, state: TrainerState) -> Path:
    """Returns the checkpoint that a run resumes from, which the Trainer does not report."""
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
        "checkpoint it resumes from. The Trainer does not report that path to callbacks: pass "
        "resume_from=your_checkpoint to ASWACallback."
    )
