"""The command line `aswa-hf`: one file per command."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from typing import Annotated

import typer

from aswa_hf.cli.demo import demo
from aswa_hf.cli.evaluate import evaluate
from aswa_hf.cli.predict import predict
from aswa_hf.cli.push import push
from aswa_hf.cli.query import query
from aswa_hf.cli.train import train

app = typer.Typer(
    help="Better weights from the training run you already do: Adaptive Stochastic Weight Averaging.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"aswa-hf {metadata.version('aswa-hf')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Better weights from the training run you already do: Adaptive Stochastic Weight Averaging."""


app.command()(demo)
app.add_typer(train, name="train")
app.command()(evaluate)
app.command()(predict)
app.command()(query)
app.command()(push)


def main() -> None:
    """Runs a command; bad input is one line on standard error and a non-zero exit status."""
    # The library's own bars for every file it reads or writes; a run has a bar of its own.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        app()
    except KeyboardInterrupt:
        sys.exit("aswa-hf: interrupted")
    except (ValueError, TypeError, OSError) as error:
        sys.exit(f"aswa-hf: {' '.join(str(error).split())}")
