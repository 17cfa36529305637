"""The command line `aswa-hf`: one file per command."""

from __future__ import annotations

import sys

import typer

from aswa_hf.cli.demo import demo

app = typer.Typer(
    help="Better weights from the training run you already do: Adaptive Stochastic Weight Averaging.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command()(demo)


@app.callback()
def _commands() -> None:
    """Keeps `aswa-hf demo` a subcommand while there is only one."""


def main() -> None:
    """Runs a command; bad input is one line on standard error and a non-zero exit status."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit("aswa-hf: interrupted")
    except (ValueError, TypeError, OSError) as error:
        sys.exit(f"aswa-hf: {error}")
