"""Trains and evaluates the runs that a table still needs, with an estimate of the remaining time."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from aswa_hf.experiments.progress import OnStep, progress_bar
from aswa_hf.reproduce.parts import is_measured, measure
from aswa_hf.reproduce.runs import GridRun, epochs_saved, is_trained, train
from aswa_hf.reproduce.tables import Table
from aswa_hf.run_folder import CONSOLE


def state(table: Table, run: GridRun, output_dir: Path) -> str:
    """The state of a run in a few words: "done" if nothing is left to do."""
    if is_trained(run, output_dir):
        return "done" if is_measured(table.name, run, output_dir) else "trained, to be evaluated"
    saved = epochs_saved(run, output_dir)
    return f"at epoch {saved:g} of {run.epochs}" if saved else "to do"


def run_grid(
    table: Table, runs: Sequence[GridRun], sources: Mapping[str, str], output_dir: Path, console: Console
) -> dict[GridRun, str]:
    """Completes every run that is not done; returns those that failed, and why. A failure does not stop the others."""
    failed: dict[GridRun, str] = {}
    waiting: list[GridRun] = []
    for run in runs:
        try:
            if state(table, run, output_dir) != "done":
                waiting.append(run)
        except ValueError as error:
            _report(run, error, failed, console)
    if len(waiting) < len(runs):
        console.print(f"{len(runs) - len(waiting) - len(failed)} of {len(runs)} runs are already done.")
    with progress_bar(console) as progress:
        # Progress is counted in epochs, although some take longer than others.
        bar = progress.add_task("", total=sum(run.epochs for run in waiting))
        before = 0
        for number, run in enumerate(waiting, 1):
            place = f"{number}/{len(waiting)} {run}"
            progress.update(bar, description=place, completed=before)

            def advance(step: int, steps: int, run: GridRun = run, before: int = before) -> None:
                progress.update(bar, completed=before + run.epochs * step // max(1, steps))

            def describe(words: str, place: str = place) -> None:
                progress.update(bar, description=f"{place}{words}")

            start = time.monotonic()
            try:
                if not is_trained(run, output_dir):
                    train(run, sources[run.dataset], output_dir, [OnStep(advance, describe)])
                if not is_measured(table.name, run, output_dir):
                    measure(table.name, run, sources[run.dataset], output_dir)
            except Exception as error:
                _keep_traceback(output_dir / run.name)
                _report(run, error, failed, console)
            else:
                console.print(f"{place}: {shown(time.monotonic() - start)}", soft_wrap=True)
            before += run.epochs
            gc.collect()  # a trainer and its callbacks refer to each other
    return failed


def shown(seconds: float) -> str:
    """A duration in a suitable unit."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _report(run: GridRun, error: Exception, failed: dict[GridRun, str], console: Console) -> None:
    failed[run] = " ".join(str(error).split()) or type(error).__name__
    console.print(f"[red]failed[/] {escape(f'{run}: {failed[run]}')}", markup=True, soft_wrap=True)


def _keep_traceback(folder: Path) -> None:
    if folder.is_dir():
        with (folder / CONSOLE).open("a", encoding="utf-8") as file:
            traceback.print_exc(file=file)
