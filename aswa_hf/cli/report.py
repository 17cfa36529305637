"""`aswa-hf report`: one page about one or more runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from aswa_hf.cli.options import AsJson, loading, tracked


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Run folders, or results.json files under any name.")
    ],
    output: Annotated[
        Path, typer.Option(metavar="PATH", help="The page; its pictures are also written to a folder beside it.")
    ] = Path("report.html"),
    as_json: AsJson = False,
) -> None:
    """Compare the strategies of runs on one page: results over seeds, trajectories, and a test of ASWA's gains.

    Example:

    `aswa-hf report runs/* --output report.html`
    """
    with loading("the libraries"):
        from aswa_hf.report import write_report

    content = write_report(runs, output, lambda jobs: tracked(jobs, "drawing"))
    if as_json:
        typer.echo(json.dumps(content, allow_nan=False))
        return
    for note in content["notes"]:
        typer.echo(f"Note: {note}")
    for task in content["tasks"]:
        for line in _table(task):
            typer.echo(line)
    typer.echo(f"Written: {content['report']}, its pictures also in {output.with_name(f'{output.stem}_files')}")


def _table(task: dict[str, Any]) -> list[str]:
    """Returns ASWA's results against each strategy in the main metric as lines of text."""
    rows = [one for one in task["comparisons"] if one["metric"] == task["metric"]]
    if not rows:
        return []
    tested = any(one["p"] is not None for one in rows)
    names = ["ASWA against", "better", "equal", "worse", "median gain", *(["p"] if tested else [])]
    cells = [
        [one["other"], *(str(one[key]) for key in ("wins", "ties", "losses")), f"{one['median']:+.4f}"]
        + ([f"{one['p']:.2g}" if one["p"] is not None else "–"] if tested else [])
        for one in rows
    ]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    return [
        f"{task['task']}, {task['split']} {task['metric']}, (dataset, model) pairs:",
        *(
            "  " + "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in [names, *cells]
        ),
    ]
