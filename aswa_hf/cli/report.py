"""`aswa-hf report`: one page about one or more runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Run folders, or results.json files under any name.")
    ],
    output: Annotated[
        Path, typer.Option(metavar="PATH", help="The page; its pictures are also written to a folder beside it.")
    ] = Path("report.html"),
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print the content of the page as JSON.")
    ] = False,
) -> None:
    """Compare the strategies of runs on one page: results over seeds, trajectories, and a test of ASWA's gains.

    Example: `aswa-hf report runs/* --output report.html`
    """
    from aswa_hf.report import write_report

    content = write_report(runs, output, _progress)
    if as_json:
        typer.echo(json.dumps(content, allow_nan=False))
        return
    for note in content["notes"]:
        typer.echo(f"Note: {note}")
    for task in content["tasks"]:
        for comparison in task["comparisons"]:
            if comparison["metric"] == task["metric"]:
                typer.echo(_line(task, comparison))
    typer.echo(f"Written: {content['report']}, its pictures also in {output.with_name(f'{output.stem}_files')}")


def _line(task: dict[str, Any], c: dict[str, Any]) -> str:
    counts = f"better {c['wins']}, equal {c['ties']}, worse {c['losses']}"
    test = f", median {c['median']:+.4f}, p {c['p']:.2g} (n {c['n']})" if len(c["gains"]) > 1 else ""
    return f"{task['task']}, {task['split']} {task['metric']}: ASWA against {c['other']}: {counts}{test}"


def _progress(jobs: list[Any]) -> Iterable[Any]:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(jobs, "drawing", transient=True, console=console, disable=not console.is_terminal)
