"""A run folder: the ensemble as a loadable model, checkpoints, trajectory, log and results."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from transformers import TrainerCallback, TrainingArguments

from aswa_hf.checkpoint import library_versions
from aswa_hf.files import write_text
from aswa_hf.strategy import Strategy
from aswa_hf.trainer_files import TRAJECTORY_FILE
from aswa_hf.trajectory import plot_trajectories

RESULTS, LOG, PICTURE = "results.json", "train.log", "trajectory.png"


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


def save_every_tenth(args: TrainingArguments, examples: int) -> None:
    """About ten checkpoints a run, each at the end of an epoch: the evaluations cost more than a lost tenth."""
    steps_per_epoch = -(-examples // args.per_device_train_batch_size)
    args.save_steps = steps_per_epoch * max(1, int(args.num_train_epochs) // 10)


class LogFile(TrainerCallback):
    """Everything the Trainer logs, a JSON object a line."""

    def __init__(self, path: Path):
        self.path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, **logs}) + "\n")


def evaluate_strategies(
    strategies: Mapping[str, Strategy], evaluate: Callable[[str], dict[str, float]], console: Console
) -> dict[str, Any]:
    """The metrics of each strategy's weights on the validation and the test split."""
    results: dict[str, Any] = {}
    columns = TextColumn("evaluating {task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=console, transient=True) as progress:
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
    content = {
        **about,
        "strategies": results,
        "seconds": seconds,
        "versions": library_versions(),
        "command": shlex.join(["aswa-hf", *sys.argv[1:]]),
    }
    write_text(output_dir / RESULTS, json.dumps(content, indent=2) + "\n")
    # The trajectory file tells everything of the run: a card is made of it alone.
    trajectory = json.loads((output_dir / TRAJECTORY_FILE).read_text(encoding="utf-8"))
    write_text(output_dir / TRAJECTORY_FILE, json.dumps(trajectory | {"run": content}, indent=2) + "\n")
    return content


def draw(output_dir: Path, strategies: Mapping[str, Strategy], metric: str, title: str) -> None:
    """The picture of a run: the validation scores of all strategies."""
    trajectories = {name: strategy.trajectory for name, strategy in strategies.items()}
    plot_trajectories(trajectories, output_dir / PICTURE, metric=metric, title=title)


def results_table(
    results: dict[str, Any], metrics: Sequence[str], *, title: str, label: str, percent: bool = False
) -> Table:
    """Validation and test metrics of each strategy, the best in the first test metric bold."""

    def shown(value: float) -> str:
        return f"{100 * value:.2f}" if percent else f"{value:.4f}"

    table = Table(title=title)
    for column in ("strategy", f"validation {label}", *(f"test {name}" for name in metrics)):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    best = max(result["test"][metrics[0]] for result in results.values())
    for name, result in results.items():
        test = [shown(result["test"][metric]) for metric in metrics]
        style = "bold" if result["test"][metrics[0]] == best else None
        table.add_row(name, shown(result["validation"][metrics[0]]), *test, style=style)
    return table
