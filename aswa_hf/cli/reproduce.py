"""`aswa-hf reproduce`: runs the paper's tables and shows the results beside the paper's figures."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aswa_hf._utils.files import make_folder
from aswa_hf.cli.options import AsJson, loading

if TYPE_CHECKING:
    from aswa_hf.reproduce.tables import Table


def reproduce(
    table: Annotated[
        str,
        typer.Argument(
            help="cifar, cifar-epochs, cifar-ratios, link-prediction, nell, multi-hop, train-fit; strategies, "
            "strategies-images, robustness, robustness-images, tuned.",
            metavar="TABLE",
        ),
    ],
    models: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Only these, such as distmult,keci or vgg16_bn.")
    ] = None,
    datasets: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Only these, or others: UMLS, a built-in name, a Hub dataset."),
    ] = None,
    seeds: Annotated[str, typer.Option(metavar="N,N|N-N", help="One run per seed: 0,1,2 or 0-2.")] = "0-2",
    epochs: Annotated[
        str | None, typer.Option(metavar="N,N|N-N", help="Number of epochs (default: the paper's).")
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option(metavar="X,X", help="Robustness: learning rates (default: five, over a factor of 100)."),
    ] = None,
    train_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Images: number of training images (default: all).")
    ] = None,
    val_ratio: Annotated[
        float | None,
        typer.Option(metavar="X", help="Images: fraction of them used for validation (default: the paper's)."),
    ] = None,
    bn_batches: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Images: batches to recalibrate BatchNorm on (0: all)."),
    ] = None,
    precision: Annotated[
        str | None, typer.Option(metavar="NAME", help="Images: fp32, bf16 or fp16 (default: the device's best).")
    ] = None,
    data_dir: Annotated[Path, typer.Option(metavar="PATH", help="Folder with the datasets.")] = Path("data"),
    output_dir: Annotated[Path, typer.Option(metavar="PATH", help="Folder for the runs.")] = Path("runs"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", metavar="", help="List the runs and their state; run nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run what one of the paper's tables needs, and show the results beside the paper's figures.

    `tuned` runs recipes (--models: their names) and shows the published MRR beside them.

    A run is shared by all strategies and by all tables that need it. Finished runs are skipped, interrupted ones are
    resumed; a run that fails is reported, and the others continue. The paper's settings are the default.

    Example:

    `aswa-hf reproduce link-prediction --datasets UMLS,KINSHIP --models complex`
    """
    with loading("the libraries"):
        from rich.console import Console
        from transformers.utils import logging

        from aswa_hf.plotting import plot_panels
        from aswa_hf.reproduce import robustness, tuned
        from aswa_hf.reproduce.grid import run_grid, state
        from aswa_hf.reproduce.ranks import as_terminal_table, rankings
        from aswa_hf.reproduce.runs import plan
        from aswa_hf.reproduce.show import as_terminal_tables, rows, title
        from aswa_hf.reproduce.tables import IMAGES, MODELS, find_dataset, find_models, find_table

    logging.set_verbosity_error()
    chosen = find_table(table)
    names = _names(datasets) if datasets else list(chosen.datasets)
    lengths = None if epochs is None else _numbers(epochs, "--epochs", least=1)
    images = {"train_size": train_size, "val_ratio": val_ratio, "bn_batches": bn_batches, "precision": precision}
    for option, value in images.items():
        if value is not None and chosen.task != IMAGES:
            flag = f"--{option.replace('_', '-')} {value}"
            raise ValueError(f"{flag} is for tables of images; table {table} is about knowledge graphs.")
    if lengths and len(lengths) > 1 and not chosen.by_epochs:
        raise ValueError(f"--epochs {epochs}: the runs of table {table} have one length. Give one number.")
    numbers = _numbers(seeds, "--seeds", least=0)
    asked = _names(models) if models else None
    learning_rates = None if rates is None else _rates(rates, chosen)
    if chosen.of_recipes:
        runs = tuned.plan_recipes(tuned.find_recipes(asked, names), numbers, lengths[0] if lengths else None)
        names = list(dict.fromkeys(run.dataset for run in runs))
    else:
        given = {option: value for option, value in images.items() if value is not None}
        runs = plan(chosen, find_models(chosen, asked), names, numbers, lengths, learning_rates, **given)
    # This stream, also while the output of runs is redirected to files.
    console = Console(file=sys.stderr, markup=False, emoji=False)
    sources, missing = {}, {}
    for dataset in names:
        try:
            sources[dataset] = find_dataset(chosen, dataset, data_dir)
        except ValueError as error:
            missing[dataset] = str(error)
            console.print(str(error), style="red", soft_wrap=True)
    possible = [run for run in runs if run.dataset in sources]
    if dry_run:
        states = {run.name: state(chosen, run, output_dir) if run in possible else "no data" for run in runs}
        typer.echo(json.dumps(states) if as_json else "\n".join(f"{name}: {what}" for name, what in states.items()))
        return
    make_folder(output_dir)
    failed = run_grid(chosen, possible, sources, output_dir, console)
    finished = robustness.finished(runs, output_dir) if chosen.by_rates else []
    swept = robustness.with_every_rate(finished)
    kept = {(one.dataset, one.model, one.seed) for one in swept}
    left_out = dict.fromkeys(key for one in finished if (key := (one.dataset, one.model, one.seed)) not in kept)
    for dataset, model, seed in left_out:
        console.print(
            f"Seed {seed} of {model} on {dataset} is left out: it lacks some of the learning rates.", soft_wrap=True
        )
    content = rows(chosen, [run for run in runs if (run.dataset, run.model, run.seed) not in left_out], output_dir)
    heading = title(chosen, runs)
    ranks = rankings(content) if chosen.all_strategies else []
    picture = output_dir / f"{table}.png"
    if swept:
        plot_panels(list(robustness.panels(swept, MODELS[chosen.task])), picture)
    taken = tuned.costs(runs, output_dir) if chosen.of_recipes else []
    if as_json:
        failures = {run.name: reason for run, reason in failed.items()}
        typer.echo(
            json.dumps(
                {
                    "table": table,
                    "title": heading,
                    "rows": content,
                    "ranks": ranks,
                    "times": robustness.as_json(swept),
                    "costs": taken,
                    "failed": failures,
                    "missing": missing,
                },
                ensure_ascii=False,
                allow_nan=False,
            )
        )
    elif possible:
        out = Console(markup=False, emoji=False)
        out.print(heading, style="bold")
        for part in (
            *as_terminal_tables(chosen, content),
            *as_terminal_table(ranks),
            *robustness.as_terminal_tables(swept, MODELS[chosen.task]),
            *tuned.as_terminal_tables(taken),
        ):
            out.print(part)
        if swept:
            out.print(f"\nDrawn in {picture}", soft_wrap=True)
    if failed or missing:
        raise typer.Exit(1)


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _rates(text: str, table: Table) -> list[float]:
    """The learning rates of `0.01,0.1`."""
    if not table.by_rates:
        raise ValueError(f"--rates {text} is for tables of robustness; the runs of table {table.name} have one rate.")
    try:
        found = [float(part) for part in _names(text)]
    except ValueError:
        found = []
    if not found or not all(0 < rate < math.inf for rate in found):
        raise ValueError(f"--rates {text}: expected numbers above 0, such as 0.01,0.1.")
    return list(dict.fromkeys(found))


def _numbers(text: str, option: str, *, least: int) -> list[int]:
    """The numbers of `0,1,2` or `0-2`."""
    found: list[int] = []
    for part in _names(text):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(first) < least:
            raise ValueError(f"{option} {text}: expected whole numbers of at least {least}, such as 1,2 or 1-3.")
        found += range(int(first), int(last if dash else first) + 1)
    if not found:
        raise ValueError(f"{option} {text!r} contains no number.")
    return list(dict.fromkeys(found))
