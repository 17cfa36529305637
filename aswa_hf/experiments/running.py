"""Shared by both kinds of runs: the lock of the folder, resuming, logging, results of all strategies."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from rich.console import Console
from transformers import Trainer, TrainerCallback, TrainingArguments

from aswa_hf._utils.distributed import on_every_rank, wait_for_all
from aswa_hf._utils.files import make_folder, remove_temporary, write_failure, write_json, write_text
from aswa_hf._utils.locks import LOCK_FILE, locked
from aswa_hf._utils.memory import peak_memory, reset_peak_memory
from aswa_hf._utils.random_state import preserved_rng
from aswa_hf._utils.sharding import is_sharded
from aswa_hf.checkpoint import library_versions
from aswa_hf.comparison import AUTO, why_empty
from aswa_hf.experiments.progress import decisions_shown, progress_bar
from aswa_hf.experiments.settings import TrainingRun, read_run, read_settings
from aswa_hf.loop.checks import Stop
from aswa_hf.plotting import plot_trajectories
from aswa_hf.run_folder import (
    LOG,
    PICTURE,
    RESULTS,
    SETTINGS,
    checkpoint_folder,
    checkpoints,
    commit_run,
    epochs_done,
    last_trainer_checkpoint,
    newest_checkpoint,
    reopen_run,
    write_trajectory,
)
from aswa_hf.strategies import Strategy
from aswa_hf.trainer import ASWACallback
from aswa_hf.trainer.files import LOCK, commit_saved
from aswa_hf.trajectory import encode_number

logger = get_logger(__name__)

SPLITS = ("validation", "test")

# The Trainer warns about checkpoints that are written within a second; they are distinguished by their numbers.
logging.getLogger("transformers.trainer_utils").addFilter(lambda record: "mtime" not in record.getMessage())


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: its folder, the content of results.json, and the model with the saved weights."""

    folder: Path
    results: dict[str, Any]
    model: Any
    strategies: dict[str, Strategy]


def is_main_process() -> bool:
    """Whether this process prints and writes files; of those that a launcher started, only one does."""
    return os.environ.get("RANK", "0") == "0"


def run_console() -> Console:
    """A console that prints only in the main process."""
    return Console(quiet=not is_main_process(), markup=False, emoji=False)  # names may have brackets and colons


@contextmanager
def sole_run(output_dir: Path) -> Iterator[None]:
    """Prevents other processes from starting a run in the same folder; the lock of a killed process is released."""
    if not is_main_process():
        yield
        return
    is_new = not output_dir.exists()
    make_folder(output_dir)
    with ExitStack() as held:
        try:
            held.enter_context(locked(output_dir))
        except BlockingIOError:
            raise ValueError(
                f"Another process is training in {output_dir}. Wait for it to end, or choose another --output-dir."
            ) from None
        remove_temporary(output_dir)
        try:
            yield
        finally:
            if {entry.name for entry in output_dir.iterdir()} <= {LOCK_FILE, LOCK}:  # a refused run leaves no files
                # Not those of a Trainer of another process, which holds the second lock and has written nothing yet.
                with suppress(OSError), locked(output_dir, LOCK):
                    for name in (LOCK_FILE, LOCK):
                        (output_dir / name).unlink(missing_ok=True)
                    if is_new:
                        output_dir.rmdir()


def checkpoint_to_resume(run: TrainingRun, output_dir: Path, resume: bool) -> Path | None:
    """The checkpoint to resume from, or None; raises ValueError if another run in the folder would be overwritten."""
    if resume and (settings := output_dir / SETTINGS).is_file():
        kind = read_run(settings).kind
        if kind != run.kind:
            raise ValueError(
                f"--resume: {output_dir} holds a run of `aswa-hf train {kind}`, not of `aswa-hf train {run.kind}`. "
                "Choose another --output-dir."
            )
    last = newest_checkpoint(output_dir, clean=is_main_process()) if resume else None
    if resume and last is None:
        raise ValueError(f"--resume: there is no checkpoint in {output_dir}. Start the run without --resume.")
    if not resume and (last_trainer_checkpoint(output_dir) is not None or (output_dir / RESULTS).exists()):
        raise ValueError(f"{output_dir} already holds a run. Choose another --output-dir, or resume it with --resume.")
    return last


def keep_settings(
    run: TrainingRun, sizes: Mapping[str, int], args: TrainingArguments, checkpoint: Path | None
) -> None:
    """Writes the settings of a run to its folder; a resumed run must have the same ones."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != args.world_size:  # all of them would write the same files
        raise ValueError(
            f"{started} processes were started, but each trains alone. On CPUs set ACCELERATE_USE_CPU=true, or start "
            "a single process."
        )
    settings = run.to_settings(sizes, started)
    path = Path(args.output_dir) / SETTINGS
    if checkpoint is not None:
        _check_settings(path, run, json.loads(json.dumps(settings)), checkpoint)
    if is_main_process():
        path.parent.mkdir(parents=True, exist_ok=True)
        reopen_run(path.parent)
        write_json(path, settings)


def _check_settings(path: Path, run: TrainingRun, new: dict[str, Any], checkpoint: Path) -> None:
    if not path.exists():
        raise ValueError(
            f"--resume: {path} is missing, so the settings of the run are unknown. Start a new run in another "
            "--output-dir."
        )
    # Settings that an older version did not have were at their defaults.
    old = {one.name: one.default for one in run.settings() if one.fixed} | read_settings(path)
    # Sharded entities may be spread over another number of processes.
    flexible = ("epochs", "num_processes") if new.get("shard_entities") else ("epochs",)
    differences = [
        f"--{name.replace('_', '-')} was {_shown(old.get(name))}, is {_shown(new.get(name))}"
        for name in dict.fromkeys([*old, *new])
        if name not in flexible and _compared(old.get(name)) != _compared(new.get(name))
    ]
    if differences:
        raise ValueError(
            f"--resume: the run in {path.parent} has different settings: {'; '.join(differences)}. Use the same ones, "
            "or start a new run in another --output-dir."
        )
    if new["epochs"] < epochs_done(checkpoint):
        raise ValueError(
            f"--resume: the run in {path.parent} is at epoch {epochs_done(checkpoint):g}, so it cannot end after "
            f"--epochs {new['epochs']}."
        )


def _compared(value: Any) -> Any:
    """A setting without the location of the data, which may have been moved."""
    if isinstance(value, Mapping):
        return {key: item for key, item in value.items() if key != "source"}
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else str(_compared(value))


def steps_per_epoch(trainer: Trainer) -> int:
    """The number of batches, each of them a step, in an epoch."""
    with preserved_rng():
        return len(trainer.get_train_dataloader())


class SaveEveryTenth(TrainerCallback):
    """Saves about ten checkpoints per run, each at the end of an epoch, and one when the run is asked to stop.

    Within an epoch the Trainer could not resume exactly: it would draw the remaining batches again.
    """

    def __init__(self, stop: Stop, *, commits: bool = False):
        self.stop = stop
        self.commits = commits
        self._announced = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stop.check()
        if self.stop.agreed and not self._announced:
            self._announced = True
            logger.warning(f"{self.stop.name}: the run ends after this epoch, with a checkpoint.")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stop.check(now=True)
        every = max(1, int(args.num_train_epochs) // 10)
        is_last = state.global_step >= state.max_steps
        control.should_save = bool(self.stop.agreed or is_last or round(state.epoch) % every == 0)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.commits:
            commit_saved(args, state.global_step)
        checkpoint = checkpoint_folder(args.output_dir, state.global_step)
        self.stop.end_run(checkpoint, "the same command with --resume")


class LogFile(TrainerCallback):
    """Writes everything the Trainer logs, one JSON object per line."""

    def __init__(self, path: Path):
        self.path = path

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.should_save:
            # A resumed run begins with what was logged up to its checkpoint, and logs the rest again.
            write_text(self.path, "".join(_line(entry["step"], entry) for entry in state.log_history))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if args.should_save:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line(state.global_step, logs))


def _line(step: int, logs: Mapping[str, Any]) -> str:
    ordered = dict(sorted(logs.items()))  # as in a checkpoint, so that a resumed run writes the same lines
    return json.dumps(encode_number({"step": step} | ordered), allow_nan=False) + "\n"


def train_to_the_end(
    trainer: Trainer, checkpoint: Path | None, shown: AbstractContextManager[Any], *, commits: bool = False
) -> None:
    """Trains, logging to a file; SIGTERM and Ctrl-C end the run after a checkpoint."""
    folder = Path(trainer.args.output_dir)
    with Stop(trainer.accelerator, enabled=True) as stop, shown:
        trainer.add_callback(SaveEveryTenth(stop, commits=commits))
        trainer.add_callback(LogFile(folder / LOG))
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except (ValueError, BlockingIOError):
            if checkpoint is None and trainer.state.global_step == 0 and trainer.args.should_save:
                (folder / SETTINGS).unlink(missing_ok=True)  # a refused run leaves no files
            raise
        except RuntimeError as error:
            if reason := write_failure(error):
                raise OSError(
                    f"A checkpoint could not be saved in {folder}: {reason}. Earlier ones are unchanged: free some "
                    "space, and resume with --resume."
                ) from error
            raise
    if trainer.args.should_save and (limit := trainer.args.save_total_limit):
        # The Trainer deletes older ones when it saves; a run that was killed then may have nothing more to save.
        for older in checkpoints(folder)[:-limit]:
            shutil.rmtree(older)


def train_and_evaluate(
    trainer: Trainer,
    callback: ASWACallback,
    checkpoint: Path | None,
    evaluate: Callable[[str], dict[str, float]],
    console: Console,
) -> tuple[dict[str, Any], dict[str, float]]:
    """Trains, saves the model to the run folder, and returns the metrics of each strategy and the seconds.

    "cpu" is the CPU time over all threads, which depends less on what else the machine is doing.
    """
    folder = Path(trainer.args.output_dir)
    callback.writes_history = False  # it is written once, with the results
    trainer.add_callback(callback)
    reset_peak_memory()
    start, start_cpu = time.perf_counter(), time.process_time()
    train_to_the_end(trainer, checkpoint, decisions_shown(trainer, callback, console, show="changes"))
    trained = time.perf_counter()
    _check_weights(callback, trainer)
    if trainer.args.should_save or is_sharded(trainer.model):
        trainer.model.save_pretrained(folder)
    if trainer.args.should_save and trainer.processing_class is not None:
        trainer.processing_class.save_pretrained(folder)
    sizes = {name: strategy.nbytes / 1e6 for name, strategy in callback.strategies.items()}
    taken = ", ".join(f"{name} {size:.{1 if size >= 1 else 3}f}" for name, size in sizes.items())
    console.print(f"Memory of the averages at the end, in MB: {taken}", soft_wrap=True)
    results = evaluate_strategies(callback.strategies, evaluate, console)
    seconds = {"train": trained - start, "evaluate": time.perf_counter() - trained}
    return results, {**seconds, "cpu": time.process_time() - start_cpu}


def _check_weights(callback: ASWACallback, trainer: Trainer) -> None:
    """Raises ValueError if the run has no usable weights to save."""
    applied = str(callback.applied or callback.apply)
    if callback.applied is None:
        strategy = callback.strategies.get(applied) or next(iter(callback.strategies.values()))
        reason = why_empty(strategy, callback.score.label, "the run had no decision point")
    elif not on_every_rank(all(p.isfinite().all() for p in trainer.model.parameters()), trainer.args.device):
        reason = "they are not finite numbers"
    else:
        return
    raise ValueError(
        f"Training ended without {'weights of any strategy' if applied == AUTO else f'{applied} weights'} to save: "
        f"{reason}. Choose a smaller --lr, more --epochs or other --strategies."
    )


def evaluate_strategies(
    strategies: Mapping[str, Strategy], evaluate: Callable[[str], dict[str, float]], console: Console
) -> dict[str, Any]:
    """The metrics of each strategy that has weights, on the validation and the test split."""
    results: dict[str, Any] = {}
    for name in [name for name, strategy in strategies.items() if strategy.members == 0]:
        console.print(f"{name} has taken no snapshot and is left out.")
    strategies = {name: strategy for name, strategy in strategies.items() if strategy.members}
    with progress_bar(console) as progress:
        task = progress.add_task("evaluating", total=len(SPLITS) * len(strategies))
        for name, strategy in strategies.items():
            with strategy.swapped():
                results[name] = {}
                for split in SPLITS:
                    progress.update(task, description=f"evaluating {name}, {split}")
                    results[name][split] = evaluate(split)
                    progress.advance(task)
    return results


def write_results(
    folder: Path, callback: ASWACallback, results: dict[str, Any], seconds: dict[str, float], **about: Any
) -> dict[str, Any]:
    """Writes the trajectory file, its picture and results.json; returns the content of results.json.

    `about` describes the run: `model`, `dataset`, and anything else for its card.
    """
    content: dict[str, Any] = encode_number(
        {
            **about,
            "applied": callback.applied,
            "strategies": results,
            "seconds": seconds,
            "memory": {name: strategy.nbytes for name, strategy in callback.strategies.items()},
            "peak_memory": peak_memory(),
            "versions": library_versions(),
        }
    )
    wait_for_all()  # ranks with sharded weights write files of their own
    if is_main_process():
        # A card is built from the trajectory file alone: it contains everything about the run.
        write_trajectory(
            folder,
            callback.strategies,
            metric=callback.score.label,
            greater_is_better=callback.greater_is_better,
            applied=callback.applied,
            run=content,
        )
        trajectories = {name: strategy.trajectory for name, strategy in callback.strategies.items()}
        title = f"{about['model']} on {about['dataset']}"
        plot_trajectories(trajectories, folder / PICTURE, metric=callback.score.label, title=title)
        write_json(folder / RESULTS, content)  # the last file: the run is finished
        commit_run(folder)
    return content
