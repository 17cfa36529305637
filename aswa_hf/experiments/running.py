"""A run folder: the ensemble as a loadable model, checkpoints, settings, trajectory, log and results."""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from transformers import Trainer, TrainerCallback, TrainingArguments

from aswa_hf._utils.files import LOCK_FILE, only_user, write_text
from aswa_hf._utils.random_state import preserved_rng
from aswa_hf.checkpoint import library_versions
from aswa_hf.comparison import why_empty
from aswa_hf.experiments.progress import narrated
from aswa_hf.plotting import plot_trajectories
from aswa_hf.strategies import Strategy
from aswa_hf.trainer import ASWACallback
from aswa_hf.trainer.files import TRAJECTORY_FILE
from aswa_hf.trajectory import encode_number

RESULTS, LOG, PICTURE, SETTINGS = "results.json", "train.log", "trajectory.png", "settings.json"

# Checkpoints that follow each other within a second are told apart by their numbers; the Trainer warns of each.
logging.getLogger("transformers.trainer_utils").addFilter(lambda record: "mtime" not in record.getMessage())


def is_main_process() -> bool:
    """Whether this is the process that prints and writes, of those that a launcher started."""
    return os.environ.get("RANK", "0") == "0"


def run_console() -> Console:
    """The terminal, for the main process alone."""
    return Console(quiet=not is_main_process())


@contextmanager
def sole_run(output_dir: Path) -> Iterator[None]:
    """Keeps other processes from starting a run in the same folder; a process that is killed lets go of it."""
    if not is_main_process():
        yield
        return
    output_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        try:
            held.enter_context(only_user(output_dir))
        except BlockingIOError:
            raise ValueError(
                f"Another process is training in {output_dir}. Wait for it to end, or choose another --output-dir."
            ) from None
        try:
            yield
        finally:
            held.close()
            if {entry.name for entry in output_dir.iterdir()} <= {LOCK_FILE}:  # a run that was refused leaves nothing
                (output_dir / LOCK_FILE).unlink(missing_ok=True)
                output_dir.rmdir()


def checked_folder(output_dir: Path, resume: bool) -> str | None:
    """The checkpoint to resume from, if asked for; a folder with another run in it is not written over."""
    last = last_whole_checkpoint(output_dir)
    if resume:
        if last is None:
            raise ValueError(f"--resume: there is no checkpoint in {output_dir}. Start the run without --resume.")
        return last
    if last is not None or (output_dir / RESULTS).exists():
        raise ValueError(f"{output_dir} holds a run already. Choose another --output-dir, or go on with --resume.")
    return None


def last_whole_checkpoint(folder: Path) -> str | None:
    """The last checkpoint that was written to its end, which is the Trainer's state."""
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return str(max(whole, key=lambda path: int(path.name.rpartition("-")[2]))) if whole else None


def epochs_done(checkpoint: str | None) -> float:
    """After how many epochs a checkpoint was written."""
    if checkpoint is None:
        return 0
    return float(json.loads((Path(checkpoint) / "trainer_state.json").read_text(encoding="utf-8"))["epoch"])


def keep_settings(args: TrainingArguments, settings: Mapping[str, Any], checkpoint: str | None) -> None:
    """Writes down with which options a run is begun; to be resumed, it must be given the same ones."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != args.world_size:  # and all of them would write the same files
        raise ValueError(
            f"{started} processes were started, but each trains alone. On CPUs set ACCELERATE_USE_CPU=true, or start "
            "a single process."
        )
    settings = {**settings, "num_processes": started}
    path = Path(args.output_dir) / SETTINGS
    if checkpoint is not None:
        _check_settings(path, json.loads(json.dumps(settings)), checkpoint)
    if is_main_process():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(settings, indent=2) + "\n")


def _check_settings(path: Path, new: dict[str, Any], checkpoint: str) -> None:
    if not path.exists():
        raise ValueError(
            f"--resume: {path} is missing, so it cannot be told whether the run was begun with the same options. It "
            "is a run of an older version; start it anew in another --output-dir."
        )
    try:
        old = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--resume: {path} is not a JSON file ({error}).") from None
    differences = [
        f"--{name.replace('_', '-')} was {old.get(name)}, is {new.get(name)}"
        for name in dict.fromkeys([*old, *new])
        if name != "epochs" and old.get(name) != new.get(name)
    ]
    if differences:
        raise ValueError(
            f"--resume: these are not the options of the run in {path.parent}: {'; '.join(differences)}. Give the old "
            "ones, or start anew in another --output-dir."
        )
    if new["epochs"] < epochs_done(checkpoint):
        raise ValueError(
            f"--resume: the run in {path.parent} is at epoch {epochs_done(checkpoint):g}, so it cannot end after "
            f"--epochs {new['epochs']}."
        )


def save_every_tenth(trainer: Trainer) -> None:
    """About ten checkpoints a run, each at the end of an epoch: the evaluations cost more than a lost tenth."""
    with preserved_rng():
        steps_per_epoch = len(trainer.get_train_dataloader())
    trainer.args.save_steps = steps_per_epoch * max(1, int(trainer.args.num_train_epochs) // 10)


class LogFile(TrainerCallback):
    """Everything the Trainer logs, a JSON object a line; of a resumed run, once."""

    def __init__(self, path: Path):
        self.path = path

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not args.should_save or not self.path.exists():
            return
        text = self.path.read_text(encoding="utf-8")
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("}\n")]  # the last may be torn
        kept = "".join(line for line in lines if _is_before(json.loads(line), state.global_step))
        if kept != text:
            write_text(self.path, kept)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if args.should_save:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(encode_number({"step": state.global_step, **logs}), allow_nan=False) + "\n")


def _is_before(entry: dict[str, Any], step: int) -> bool:
    return entry["step"] <= step and "train_runtime" not in entry  # the summary is of a training that had ended


def train_and_evaluate(
    trainer: Trainer,
    callback: ASWACallback,
    checkpoint: str | None,
    evaluate: Callable[[str], dict[str, float]],
    console: Console,
) -> tuple[dict[str, Any], dict[str, float]]:
    """Trains, saves the model at the root of the run folder, and gives each strategy's metrics, and the seconds."""
    save_every_tenth(trainer)
    folder = Path(trainer.args.output_dir)
    trainer.add_callback(callback)
    trainer.add_callback(LogFile(folder / LOG))
    start = time.perf_counter()
    with narrated(trainer, callback, console, show="changes"):
        trainer.train(resume_from_checkpoint=checkpoint)
    trained = time.perf_counter()
    _refuse_useless_weights(callback, trainer)
    if trainer.args.should_save:
        for part in (trainer.model, trainer.processing_class):
            if part is not None:
                part.save_pretrained(folder)
    results = evaluate_strategies(callback.strategies, evaluate, console)
    return results, {"train": trained - start, "evaluate": time.perf_counter() - trained}


def _refuse_useless_weights(callback: ASWACallback, trainer: Trainer) -> None:
    """An error if the run has not come to the weights it is to ship."""
    shipped = str(callback.apply)
    if callback.strategies[shipped].members == 0:
        reason = why_empty(callback.strategies[shipped], callback.score.label, "the run had no decision point")
    elif not all(parameter.isfinite().all() for parameter in trainer.model.parameters()):
        reason = "they are not finite numbers"
    else:
        return
    raise ValueError(
        f"Training ended without {shipped} weights to save: {reason}. Choose a smaller --lr, more --epochs or other "
        "--strategies."
    )


def evaluate_strategies(
    strategies: Mapping[str, Strategy], evaluate: Callable[[str], dict[str, float]], console: Console
) -> dict[str, Any]:
    """The metrics of each strategy's weights on the validation and the test split, if it has any weights."""
    results: dict[str, Any] = {}
    for name in [name for name, strategy in strategies.items() if strategy.members == 0]:
        console.print(f"{name} has taken no snapshot and is left out.")
    strategies = {name: strategy for name, strategy in strategies.items() if strategy.members}
    columns = TextColumn("evaluating {task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=2 * len(strategies))
        for name, strategy in strategies.items():
            with strategy.swapped():
                results[name] = {}
                for split in ("validation", "test"):
                    progress.update(task, description=f"{name}, {split}")
                    results[name][split] = evaluate(split)
                    progress.advance(task)
    return results


def write_results(
    output_dir: Path, results: dict[str, Any], seconds: dict[str, float], **about: Any
) -> dict[str, Any]:
    """Writes what came of a run to results.json and into the trajectory file, and gives it."""
    content: dict[str, Any] = encode_number(
        {
            **about,
            "strategies": results,
            "seconds": seconds,
            "versions": library_versions(),
            "command": shlex.join(["aswa-hf", *sys.argv[1:]]),
        }
    )
    if is_main_process():
        write_text(output_dir / RESULTS, json.dumps(content, indent=2, allow_nan=False) + "\n")
        # The trajectory file tells everything of the run: a card is made of it alone.
        trajectory = json.loads((output_dir / TRAJECTORY_FILE).read_text(encoding="utf-8"))
        text = json.dumps(trajectory | {"run": content}, indent=2, allow_nan=False)
        write_text(output_dir / TRAJECTORY_FILE, text + "\n")
    return content


def draw(output_dir: Path, strategies: Mapping[str, Strategy], metric: str, title: str) -> None:
    """The picture of a run: the validation scores of all strategies."""
    if is_main_process():
        trajectories = {name: strategy.trajectory for name, strategy in strategies.items()}
        plot_trajectories(trajectories, output_dir / PICTURE, metric=metric, title=title)


def results_table(results: dict[str, Any], metrics: Mapping[str, str], title: str) -> Table:
    """Validation and test metrics of each strategy in percent, under their labels; the best in the first is bold."""
    first, *_ = metrics
    table = Table(title=title)
    table.add_column("strategy")
    for split, labels in (("validation", [metrics[first]]), ("test", metrics.values())):
        for label in labels:
            table.add_column(f"{split}\n{label}".strip(), justify="right")
    scores = [result["test"][first] for result in results.values()]
    best = max((score for score in scores if math.isfinite(score)), default=None)
    for name, result in results.items():
        shown = [result["validation"][first], *(result["test"][metric] for metric in metrics)]
        style = "bold" if result["test"][first] == best else None
        table.add_row(name, *(f"{100 * value:.2f}" for value in shown), style=style)
    return table
