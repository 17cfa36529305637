"""The terminal output of a training run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers import PrinterCallback, Trainer, TrainerCallback

from aswa_hf.strategies import Strategy
from aswa_hf.trainer import ASWACallback

COLORS = {"init": "blue", "soft": "green", "hard": "yellow", "reject": "red"}


def progress_bar(console: Console) -> Progress:
    """A progress bar with the remaining time, removed at the end; disabled if the output is not a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


class OnStep(TrainerCallback):
    """Calls a function with the number of optimizer steps done and their total, at the start and after each step.

    `describe` is called with the best score so far as text, whenever `decisions_shown` sees a decision.
    """

    def __init__(self, report: Callable[[int, int], None], describe: Callable[[str], object] = str):
        self.report, self.describe = report, describe

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.report(state.global_step, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.report(state.global_step, state.max_steps)


@contextmanager
def steps_shown(trainer: Trainer, console: Console, description: str = "steps") -> Iterator[None]:
    """Shows a progress bar instead of the Trainer's own output."""
    progress = progress_bar(console)
    task = progress.add_task(description, total=None)
    bar = OnStep(
        lambda done, total: progress.update(task, completed=done, total=total),
        lambda words: progress.update(task, description=f"{description}{words}"),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(bar)
    try:
        with progress:
            yield
    finally:
        trainer.remove_callback(bar)


@contextmanager
def decisions_shown(
    trainer: Trainer, callback: ASWACallback, console: Console, *, show: Literal["all", "changes", "none"] = "all"
) -> Iterator[None]:
    """Shows a progress bar and a line for every decision, or every change, instead of the Trainer's own output."""
    width = len(str(int(trainer.args.num_train_epochs)))

    class Decisions(TrainerCallback):
        best: float | None = None  # of the scores seen; those of strategies other than ASWA can get worse

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            strategy = callback.strategies.get("aswa") or next(iter(callback.strategies.values()))
            record = strategy.trajectory[-1]
            decision = record.decision.value
            scores = [self.best, record.score]
            known = [score for score in scores if score is not None and not math.isnan(score)]
            if known:
                self.best = max(known) if callback.greater_is_better else min(known)
                words = f", best {callback.score.label} {100 * self.best:.2f} %"
                for bar in trainer.callback_handler.callbacks:
                    if isinstance(bar, OnStep):
                        bar.describe(words)
            if show == "none" or (show == "changes" and decision == "reject"):
                return
            epoch = record.index + 1 if record.epoch is None else record.epoch
            console.print(
                f"epoch {epoch:{width}g}   {callback.score.label} (%): "
                f"running {_percent(record.running_score)}   "
                f"ensemble {_percent(record.score)}   [{COLORS[decision]}]{decision}[/]",
                markup=True,
            )

    decisions = Decisions()
    trainer.add_callback(decisions)
    try:
        with steps_shown(trainer, console):
            yield
    finally:
        trainer.remove_callback(decisions)


def _percent(score: float | None) -> str:
    return f"{'–':>6s}" if score is None else f"{100 * score:6.2f}"


def decision_summary(strategy: Strategy) -> str:
    """One sentence about the decisions of a run."""
    decisions = [decision.value for decision in strategy.trajectory.decisions]
    return (
        f"ASWA decided {len(decisions)} times: {decisions.count('soft')} soft, {decisions.count('hard')} hard, "
        f"{decisions.count('reject')} rejected; {strategy.members} of {len(decisions)} snapshots are in the final "
        "weights."
    )


def results_table(results: Mapping[str, Any], metrics: Mapping[str, str], title: str, saved: str) -> Table:
    """Validation and test metrics of each strategy in percent, under their labels; marks the saved and the best."""
    first, *_ = metrics
    table = Table(title=title, caption="→ saved   * best test value", caption_justify="left")
    table.add_column("strategy")
    for split, labels in (("validation", [metrics[first]]), ("test", metrics.values())):
        for label in labels:
            table.add_column(f"{split}\n{label}".strip(), justify="right")
    finite = [result["test"][first] for result in results.values() if math.isfinite(result["test"][first])]
    for name, result in results.items():
        shown = [result["validation"][first], *(result["test"][metric] for metric in metrics)]
        cells = [f"{100 * value:.2f}" for value in shown]
        is_best = bool(finite) and result["test"][first] == max(finite)
        if is_best:
            cells[1] = f"* {cells[1]}"
        table.add_row(f"{name} →" if name == saved else name, *cells, style="bold" if is_best else None)
    return table


def verdict(results: Mapping[str, Any], metric: str, label: str, saved: str) -> str:
    """One sentence: whether another strategy did better than the saved one on the test split."""
    scores = {name: result["test"][metric] for name, result in results.items()}
    own = scores[saved]
    better = [name for name, score in scores.items() if score > own or (math.isnan(own) and not math.isnan(score))]
    if better:
        return f"On the test split {saved} did not win: {', '.join(better)} did better in {label}."
    return f"On the test split no strategy did better in {label} than {saved}, which is saved."
