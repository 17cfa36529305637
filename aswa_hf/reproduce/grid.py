"""Running what a table still needs, with the time it will take."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from aswa_hf.reproduce.parts import is_measured, measure
from aswa_hf.reproduce.runs import CONSOLE, Run, epochs_behind, epochs_logged, is_trained, seconds_taken, train
from aswa_hf.reproduce.tables import Table


def state(table: Table, run: Run, output_dir: Path) -> str:
    """What is left to do of a run, in a few words; "done" if nothing."""
    if is_trained(run, output_dir):
        return "done" if is_measured(table.name, run, output_dir) else "trained, to be evaluated"
    saved = epochs_behind(run, output_dir)
    return f"at epoch {saved:g} of {run.epochs}" if saved else "to do"


def run_grid(
    table: Table, runs: Sequence[Run], sources: dict[str, str], output_dir: Path, console: Console
) -> dict[Run, str]:
    """Does every run that is not done; gives those that failed, and why. The others go on."""
    clock = Clock(runs, output_dir)
    failed: dict[Run, str] = {}
    columns = TextColumn("{task.description}"), BarColumn(), _Left(clock)
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(runs))
        for number, run in enumerate(runs, 1):
            place = f"{number}/{len(runs)} {run}"
            progress.update(bar, description=place, completed=number - 1)
            try:
                if state(table, run, output_dir) != "done":
                    clock.start(run)
                    _do(table, run, sources[run.dataset], output_dir)
            except Exception as error:
                failed[run] = " ".join(str(error).split()) or type(error).__name__
                _keep_traceback(output_dir / run.name)
                console.print(f"[red]failed[/] {place}: {escape(failed[run])}", soft_wrap=True)
                clock.settle(run)
            else:
                if taken := clock.settle(run):
                    console.print(f"{place}: {shown(taken)}, {clock.left_text()}", soft_wrap=True)
            gc.collect()  # a trainer and its callbacks hold each other
    return failed


def _do(table: Table, run: Run, source: str, output_dir: Path) -> None:
    if not is_trained(run, output_dir):
        train(run, source, output_dir)
    if not is_measured(table.name, run, output_dir):
        measure(table.name, run, source, output_dir)


def _keep_traceback(folder: Path) -> None:
    if folder.is_dir():
        with (folder / CONSOLE).open("a", encoding="utf-8") as file:
            traceback.print_exc(file=file)


class Clock:
    """How long the rest of a grid will take, judged by the runs that are over."""

    def __init__(self, runs: Sequence[Run], output_dir: Path):
        self.output_dir = output_dir
        self.waiting = list(runs)
        self.current: Run | None = None
        self.began = 0.0
        self.logged = 0.0
        # Of runs that earlier calls have done, too.
        self.taken = {run: taken for run in runs if (taken := seconds_taken(run, output_dir)) is not None}

    def start(self, run: Run) -> None:
        self.current, self.began = run, time.monotonic()
        self.logged = epochs_behind(run, self.output_dir)

    def seconds(self) -> float:
        """How long the current run has taken."""
        return time.monotonic() - self.began

    def settle(self, run: Run) -> float:
        """The run is over, well or not; gives the seconds it took if it was started."""
        self.waiting.remove(run)
        if self.current != run:
            return 0.0
        spent, self.current = self.seconds(), None
        if seconds_taken(run, self.output_dir) is not None:
            self.taken.setdefault(run, spent)
        return spent

    def expected(self, run: Run) -> float | None:
        """The seconds of a run, from the most similar ones there are: an epoch costs what it did there."""
        for names in (("dataset", "model"), ("dataset",), ()):
            rates = [
                taken / other.epochs
                for other, taken in self.taken.items()
                if all(getattr(other, name) == getattr(run, name) for name in names)
            ]
            if rates:
                return run.epochs * sum(rates) / len(rates)
        return None

    def left(self) -> float | None:
        """The seconds till the end of the grid, or None as long as nothing is known."""
        unfinished = [run for run in self.waiting if run not in self.taken and run != self.current]
        total = sum(self.expected(run) or 0 for run in unfinished)
        if self.current is None:
            return total if self.taken or not unfinished else None
        spent = self.seconds()
        whole = self.expected(self.current)
        if (done := epochs_logged(self.current, self.output_dir) - self.logged) > 0:
            whole = spent / done * (self.current.epochs - self.logged)
            total = total or whole / self.current.epochs * sum(run.epochs for run in unfinished)
        return None if whole is None else total + max(0.0, whole - spent)

    def left_text(self) -> str:
        left = self.left()
        return "time left unknown" if left is None else f"about {shown(left)} left" if left else "nothing left"


def shown(seconds: float) -> str:
    """A duration as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class _Left(ProgressColumn):
    max_refresh = 1.0  # it reads a file

    def __init__(self, clock: Clock):
        super().__init__()
        self.clock = clock

    def render(self, task: Task) -> Text:
        return Text(self.clock.left_text(), style="progress.remaining")
