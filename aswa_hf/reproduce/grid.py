"""Running what a table still needs, with the time it will take."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from aswa_hf.reproduce.clock import Clock, shown
from aswa_hf.reproduce.parts import is_measured, measure
from aswa_hf.reproduce.runs import CONSOLE, Run, epochs_behind, is_trained, train
from aswa_hf.reproduce.tables import Table


def state(table: Table, run: Run, output_dir: Path) -> str:
    """What is left to do of a run, in a few words; "done" if nothing."""
    if is_trained(run, output_dir):
        return "done" if is_measured(table.name, run, output_dir) else "trained, to be evaluated"
    saved = epochs_behind(run, output_dir)
    return f"at epoch {saved:g} of {run.epochs}" if saved else "to do"


def run_grid(
    table: Table, runs: Sequence[Run], sources: Mapping[str, str], output_dir: Path, console: Console
) -> dict[Run, str]:
    """Does every run that is not done; gives those that failed, and why. The others go on."""
    failed: dict[Run, str] = {}
    waiting = []
    for run in runs:
        try:
            if state(table, run, output_dir) != "done":
                waiting.append(run)
        except ValueError as error:
            _report(run, error, failed, console)
    if len(waiting) < len(runs):
        console.print(f"{len(runs) - len(waiting) - len(failed)} of {len(runs)} runs are done already.")
    clock = Clock(waiting, output_dir, earlier=runs)
    columns = TextColumn("{task.description}"), BarColumn(), _Left(clock)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(waiting))
        for number, run in enumerate(waiting, 1):
            place = f"{number}/{len(waiting)} {run}"
            progress.update(bar, description=place, completed=number - 1)
            clock.start(run)
            try:
                _do(table, run, sources[run.dataset], output_dir)
            except Exception as error:
                clock.stop(well=False)
                _keep_traceback(output_dir / run.name)
                _report(run, error, failed, console)
            else:
                taken = shown(clock.stop())
                console.print(f"{place}: {taken}, {clock.left_text()}", soft_wrap=True)
            gc.collect()  # a trainer and its callbacks hold each other
    return failed


def _report(run: Run, error: Exception, failed: dict[Run, str], console: Console) -> None:
    failed[run] = " ".join(str(error).split()) or type(error).__name__
    console.print(f"[red]failed[/] {run}: {escape(failed[run])}", soft_wrap=True)


def _do(table: Table, run: Run, source: str, output_dir: Path) -> None:
    if not is_trained(run, output_dir):
        train(run, source, output_dir)
    if not is_measured(table.name, run, output_dir):
        measure(table.name, run, source, output_dir)


def _keep_traceback(folder: Path) -> None:
    if folder.is_dir():
        with (folder / CONSOLE).open("a", encoding="utf-8") as file:
            traceback.print_exc(file=file)


class _Left(ProgressColumn):
    max_refresh = 1.0  # it reads a file

    def __init__(self, clock: Clock):
        super().__init__()
        self.clock = clock

    def render(self, task: Task) -> Text:
        return Text(self.clock.left_text(), style="progress.remaining")
