"""Where `ASWACallback` saves its state beside the Trainer's checkpoints, so that no crash loses it.

The Trainer deletes old checkpoints before it calls `on_save` for a new one. The state is therefore written
first, to `_aswa-<step>` beside the checkpoints, and moved into `checkpoint-<step>/aswa` when that folder is complete.
`checkpoint-<step>/aswa/commit.json` is written last, with the size and a checksum of every file of the checkpoint.
"""

from __future__ import annotations

import functools
import inspect
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerState, TrainingArguments

from aswa_hf._utils.distributed import succeeding_together, wait_for_all
from aswa_hf._utils.files import remove_temporary, sync
from aswa_hf._utils.locks import hold, release
from aswa_hf._utils.sharding import row_sharded
from aswa_hf.checkpoint import AVERAGE_FILE
from aswa_hf.run_folder import (
    STATE_FOLDER,
    TRAINER_STATE,
    checkpoint_damage,
    checkpoint_folder,
    commit_checkpoint,
    commit_marker,
    refuse_other_sharding,
    valid_checkpoint,
)

LOCK = "_aswa.lock"  # the underscore keeps it out of a push


@dataclass
class SavedRun:
    """The schema of what `ASWACallback` saves beside its strategies."""

    metric_description: Any
    epoch_steps: int
    metrics: dict[str, dict[str, Any]]


def pending_folder(output_dir: str | Path, step: int) -> Path:
    """Returns the folder of a state until the checkpoint of `step` exists; the underscore keeps it out of a push."""
    return Path(output_dir) / f"_aswa-{step}"


def move_into_checkpoint(output_dir: str | Path, step: int) -> None:
    """Moves the pending state of `step` into its checkpoint, and removes all other pending states."""
    pending, checkpoint = pending_folder(output_dir, step), checkpoint_folder(output_dir, step)
    if pending.is_dir() and checkpoint.is_dir():
        commit_marker(checkpoint).unlink(missing_ok=True)  # first: from now on the pending state counts
        shutil.rmtree(checkpoint / STATE_FOLDER, ignore_errors=True)
        pending.rename(checkpoint / STATE_FOLDER)
        sync(checkpoint)
    remove_pending(output_dir, but=step)


def lock_output(args: TrainingArguments) -> None:
    """Locks a folder; raises BlockingIOError on all ranks if another Trainer is training in it."""
    with succeeding_together(args.device):
        if args.process_index == 0:
            folder = Path(args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            try:
                hold(folder, LOCK)
            except BlockingIOError:
                raise BlockingIOError(
                    f"Another Trainer with ASWACallback is training in {folder}: they would overwrite each other's "
                    "checkpoints. Wait for it to end, or choose another output_dir."
                ) from None
            remove_temporary(folder)


def unlock_output(args: TrainingArguments) -> None:
    """Releases the lock on the folder."""
    if args.process_index == 0:
        release(Path(args.output_dir), LOCK)


def commit_saved(args: TrainingArguments, step: int) -> None:
    """Marks the checkpoint of `step` as complete; all ranks must call it."""
    wait_for_all()  # each rank writes its own random state
    with succeeding_together(args.device):
        checkpoint = checkpoint_folder(args.output_dir, step)
        if args.should_save and checkpoint.is_dir():
            commit_checkpoint(checkpoint)


def remove_pending(output_dir: str | Path, but: int | None = None) -> None:
    """Removes the states of checkpoints that were never written."""
    for folder in Path(output_dir).glob("_aswa-*"):
        if folder != pending_folder(output_dir, -1 if but is None else but):
            shutil.rmtree(folder, ignore_errors=True)


def saved_state(checkpoint: Path, step: int) -> Path | None:
    """Returns the folder with the state of a checkpoint, also if the process ended before the state was moved."""
    folders = [pending_folder(checkpoint.parent, step), checkpoint / STATE_FOLDER]
    if commit_marker(checkpoint).exists():
        folders.reverse()  # the pending state belongs to a later save of the same step, which was not completed
    return next((folder for folder in folders if (folder / AVERAGE_FILE).exists()), None)


def _refuse_damaged(checkpoint: Path, trainer: Trainer) -> None:
    """Raises ValueError on all ranks if a checkpoint is damaged, or was saved by another kind of run."""
    args, processes = trainer.args, None
    sharding = "fsdp" if trainer.is_fsdp_enabled else "rows" if row_sharded(trainer.model) else "complete"
    if trainer.is_deepspeed_enabled:
        plugin = trainer.accelerator.state.deepspeed_plugin
        sharding = "zero-3" if plugin.zero_stage == 3 else "zero"
        if not plugin.deepspeed_config.get("checkpoint", {}).get("load_universal", False):
            processes = args.world_size
    with succeeding_together(args.device, (ValueError,)):
        if args.process_index == 0:
            if reason := checkpoint_damage(checkpoint):
                raise ValueError(f"{checkpoint} is damaged: {reason}. {what_to_resume_from(checkpoint.parent)}")
            refuse_other_sharding(checkpoint, sharding, processes=processes)


def what_to_resume_from(folder: Path) -> str:
    """Returns a sentence that names the newest valid checkpoint with a state."""
    valid, _ = valid_checkpoint(folder, f"{STATE_FOLDER}/{AVERAGE_FILE}")
    if valid is None:
        return "There is no other valid checkpoint beside it: start a new run."
    return f"Resume from the newest valid one: trainer.train(resume_from_checkpoint={str(valid)!r})."


def check_before_loading(trainer: Trainer) -> None:
    """Makes the trainer check a checkpoint before it loads it; no callback is called that early."""
    # DeepSpeed loads its checkpoints itself, at the end of the preparation.
    name = "_prepare_for_training" if trainer.is_deepspeed_enabled else "_load_from_checkpoint"
    if name in vars(trainer):
        return
    load = getattr(trainer, name)
    signature = inspect.signature(load)

    @functools.wraps(load)
    def checked(*args: Any, **kwargs: Any) -> Any:
        checkpoint = signature.bind(*args, **kwargs).arguments["resume_from_checkpoint"]
        if checkpoint is not None:
            _refuse_damaged(Path(checkpoint), trainer)
        return load(*args, **kwargs)

    setattr(trainer, name, checked)


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
