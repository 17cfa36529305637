"""`aswa-hf reproduce`: the paper's tables, run and shown beside its figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def reproduce(
    table: Annotated[
        str,
        typer.Argument(
            help="cifar, cifar-epochs, cifar-ratios, link-prediction, nell, multi-hop or train-fit.", metavar="TABLE"
        ),
    ],
    models: Annotated[str | None, typer.Option(help="Only these, such as distmult,keci or vgg16_bn.")] = None,
    datasets: Annotated[
        str | None, typer.Option(help="Only these, or others: UMLS, a built-in name, a Hub dataset.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="A run for each: 0,1,2 or 0-2.")] = "0-2",
    epochs: Annotated[str | None, typer.Option(help="Another length of the runs than the paper's.")] = None,
    train_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Images: train on so many of them.")
    ] = None,
    bn_batches: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Images: batches to recalibrate BatchNorm on.")
    ] = None,
    data_dir: Annotated[Path, typer.Option(help="Where the folders of the datasets are.")] = Path("data"),
    output_dir: Annotated[Path, typer.Option(help="Where the folders of the runs are.")] = Path("runs"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and what is done, run nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")] = False,
) -> None:
    """Run what one of the paper's tables needs, and show it beside the paper's figures.

    A run serves all strategies and all tables that need it. Those that are done are skipped, those that were
    interrupted go on; one that fails is reported, and the others go on. The paper's setting is the default.

    Example: `aswa-hf reproduce link-prediction --datasets UMLS,KINSHIP --models complex --data-dir data`
    """
    from rich.console import Console
    from transformers.utils import logging

    from aswa_hf.reproduce.grid import run_grid, state
    from aswa_hf.reproduce.runs import plan
    from aswa_hf.reproduce.show import as_terminal_tables, rows, title
    from aswa_hf.reproduce.tables import IMAGES, find_dataset, find_models, find_table

    logging.set_verbosity_error()
    chosen = find_table(table)
    asked = _names(datasets) if datasets else list(chosen.datasets)
    lengths = None if epochs is None else _numbers(epochs, "--epochs", least=1)
    for option, value in (("--train-size", train_size), ("--bn-batches", bn_batches)):
        if value is not None and chosen.task != IMAGES:
            raise ValueError(f"{option} {value} is for tables of images; table {table} is about knowledge graphs.")
    if lengths and len(lengths) > 1 and not chosen.by_epochs:
        raise ValueError(f"--epochs {epochs}: the runs of table {table} have one length. Give one number.")
    runs = plan(
        chosen,
        find_models(chosen, _names(models) if models else None),
        asked,
        _numbers(seeds, "--seeds", least=0),
        lengths,
        **({} if chosen.task != IMAGES else {"train_size": train_size, "bn_batches": bn_batches}),
    )
    console = Console(file=sys.stderr)  # this very stream, also while runs speak to files of their own
    sources, missing = {}, {}
    for dataset in asked:
        try:
            sources[dataset] = find_dataset(chosen, dataset, data_dir)
        except ValueError as error:
            missing[dataset] = str(error)
            console.print(str(error), style="red", soft_wrap=True, markup=False)
    possible = [run for run in runs if run.dataset in sources]
    if dry_run:
        states = {run.name: state(chosen, run, output_dir) if run in possible else "no data" for run in runs}
        typer.echo(json.dumps(states) if as_json else "\n".join(f"{name}: {what}" for name, what in states.items()))
        return
    failed = run_grid(chosen, possible, sources, output_dir, console)
    content = rows(chosen, runs, output_dir)
    heading = title(chosen, runs)
    if as_json:
        failures = {run.name: reason for run, reason in failed.items()}
        typer.echo(
            json.dumps(
                {"table": table, "title": heading, "rows": content, "failed": failures, "missing": missing},
                ensure_ascii=False,
                allow_nan=False,
            )
        )
    elif possible:
        out = Console()
        out.print(heading, style="bold")
        for part in as_terminal_tables(chosen, content):
            out.print(part)
    if failed or missing:
        raise typer.Exit(1)


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _numbers(text: str, option: str, *, least: int) -> list[int]:
    """The numbers of `0,1,2` or `0-2`."""
    found: list[int] = []
    for part in _names(text):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(first) < least:
            raise ValueError(f"{option} {text}: expected whole numbers from {least} on, such as 1,2 or 1-3.")
        found += range(int(first), int(last if dash else first) + 1)
    if not found:
        raise ValueError(f"{option} {text!r} names no number.")
    return list(dict.fromkeys(found))
