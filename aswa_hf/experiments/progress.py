"""What a training run shows in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PrinterCallback, Trainer, TrainerCallback

from aswa_hf.strategies import Strategy
from aswa_hf.trainer import ASWACallback


@contextmanager
def narrated(
    trainer: Trainer, callback: ASWACallback, console: Console, *, show: Literal["all", "changes", "none"] = "all"
) -> Iterator[None]:
    """Shows a progress bar and a line for every decision, or every change, instead of the Trainer's own output."""
    width = len(str(int(trainer.args.num_train_epochs)))
    colors = {"init": "blue", "soft": "green", "hard": "yellow", "reject": "red"}

    def strategy() -> Strategy:
        return callback.strategies.get("aswa") or next(iter(callback.strategies.values()))

    class Narrator(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            record = strategy().trajectory[-1]
            decision = record.decision.value
            if show == "none" or (show == "changes" and decision == "reject"):
                return
            console.print(
                f"epoch {record.index + 1:{width}d}   running {100 * (record.running_score or 0):6.2f}   "
                f"ensemble {100 * (record.score or 0):6.2f}   [{colors[decision]}]{decision}[/]"
            )

    trainer.add_callback(Narrator())
    try:
        with steps_shown(trainer, console):
            yield
    finally:
        trainer.remove_callback(Narrator)


@contextmanager
def steps_shown(trainer: Trainer, console: Console, description: str = "steps") -> Iterator[None]:
    """Shows a progress bar instead of the Trainer's own output."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

    class Bar(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            progress.add_task(description, total=state.max_steps, completed=state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            progress.update(progress.task_ids[0], completed=state.global_step)

    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Bar())
    try:
        with progress:
            yield
    finally:
        trainer.remove_callback(Bar)


def story(strategy: Strategy) -> str:
    """What a run decided, in a sentence."""
    decisions = [decision.value for decision in strategy.trajectory.decisions]
    return (
        f"ASWA decided {len(decisions)} times: {decisions.count('soft')} soft, {decisions.count('hard')} hard, "
        f"{decisions.count('reject')} rejected; {strategy.members} of {len(decisions)} snapshots are in the final "
        "weights."
    )
