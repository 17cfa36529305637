"""The command line `aswa-hf`: one file per command."""

from __future__ import annotations

import io
import os
import re
import sys
import traceback
import warnings
from importlib import metadata
from typing import Annotated, Any

import typer

from aswa_hf._utils.process_group import closing_process_group
from aswa_hf.cli.average import average
from aswa_hf.cli.demo import demo
from aswa_hf.cli.evaluate import evaluate
from aswa_hf.cli.options import Command, Group
from aswa_hf.cli.predict import predict
from aswa_hf.cli.push import push
from aswa_hf.cli.query import query
from aswa_hf.cli.report import report
from aswa_hf.cli.reproduce import reproduce
from aswa_hf.cli.space import serve, space
from aswa_hf.cli.train import train

DEBUG = "--debug"
INTERRUPTED = 130  # typer's exit status for Ctrl-C
HOW_TO_RESUME = {"train": "; --resume continues from the last checkpoint", "reproduce": "; the same command resumes"}
OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "not enough memory", "Storage size calculation overflowed")
LOST = ("gloo/transport", "remote process exited")  # gloo's and NCCL's words
UNWRITABLE = ("PytorchStreamWriter failed", "file write failed", "No space left on device")


class _InOrder(Group):
    """Lists commands in the order of work; typer puts those with subcommands last."""

    def list_commands(self, context: Any) -> list[str]:
        return sorted(super().list_commands(context), key=lambda name: name not in ("demo", "train"))


app = typer.Typer(
    cls=_InOrder,
    help="Better weights from the training run you already do: Adaptive Stochastic Weight Averaging.",
    epilog="Exit status: 0 for success, 1 for an error, 2 for wrong usage, 130 after Ctrl-C, 143 after SIGTERM.",
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
    debug: Annotated[  # taken out of the arguments by `main`, so that it may be anywhere in them
        bool, typer.Option(DEBUG, metavar="", help="Show the traceback of an error; works with every command.")
    ] = False,
) -> None:
    """Better weights from the training run you already do: Adaptive Stochastic Weight Averaging."""


app.command(cls=Command)(demo)
app.add_typer(train, name="train")
app.command(cls=Command)(evaluate)
app.command(cls=Command)(predict)
app.command(cls=Command)(query)
app.command(cls=Command)(average)
app.command(cls=Command)(push)
app.command(cls=Command)(report)
app.command(cls=Command)(reproduce)
app.command(cls=Command)(serve)
app.command(cls=Command)(space)


def main() -> None:
    """Runs a command; any error is one line on standard error and a non-zero exit status, with --debug a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an arrow that cannot be shown must not end a run
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    arguments = [argument for argument in sys.argv[1:] if argument != DEBUG]
    # The library's own bars for every file it reads or writes; a run has its own bar, an upload does not.
    if arguments[:1] not in (["push"], ["space"]) or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if DEBUG not in sys.argv:
        # Its report on the tensors of a file comes before our one line, and says that random weights were taken.
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("DATASETS_VERBOSITY", "critical")  # its errors are raised too
    warnings.showwarning = _show_warning
    how_to_resume = HOW_TO_RESUME.get("".join(arguments[:1]), "")
    try:
        with closing_process_group():
            status = app(arguments, standalone_mode=False)  # typer itself would draw a box around wrong usage
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # also the panics of libraries written in Rust
        if DEBUG in sys.argv:
            traceback.print_exc()
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            _show_usage(error)
            sys.exit(error.exit_code)
        sys.exit(f"aswa-hf: {_line(error, how_to_resume)}")
    if status == INTERRUPTED:
        sys.stderr.write(f"\naswa-hf: interrupted{how_to_resume}\n")
    sys.exit(status if isinstance(status, int) else 0)


def _line(error: BaseException, how_to_resume: str = "") -> str:
    """An error in one line; an unexpected one is shown with its type."""
    text = " ".join(str(error).split())
    if reason := _exhausted(error):
        return reason
    if isinstance(error, RuntimeError) and any(sign in text for sign in LOST):
        what = re.sub(r"^\[\S+\] ", "", text).partition(". ")[0]
        return f"Another process of this run has ended or cannot be reached ({what}): see its output{how_to_resume}"
    # An import that fails has the name of the module; an error of our own says what to install.
    is_ours = isinstance(error, ImportError) and error.name is None
    if (isinstance(error, (ValueError, TypeError, OSError)) or is_ours) and text:
        return text
    return f"unexpected {type(error).__name__}: {text} (use {DEBUG} to see where)"


def _show_usage(error: Any) -> None:
    """Shows wrong usage in one line; a command without arguments has already shown its help."""
    context: Any = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        return  # printed when the error was made
    hint = f" See {context.command_path} --help." if context else ""
    message = " ".join(error.format_message().split())
    message = re.sub(r" \(Possible options: ([^,)]+).*\)$", r". Did you mean \1?", message)
    sys.stderr.write(f"aswa-hf: {message}{'' if message[-1:] in '.?)' else '.'}{hint}\n")


def _show_warning(message: Warning | str, *_place: Any, **_more: Any) -> None:
    """Shows a warning without the line of code it came from, which does not help a user of commands."""
    sys.stderr.write(f"warning: {' '.join(str(message).split())}\n")


def _exhausted(error: BaseException) -> str | None:
    """What the machine ran out of, if that is the error; torch has no error classes of its own for this."""
    text = str(error)
    what = text.splitlines()[0] if text else type(error).__name__
    if isinstance(error, MemoryError) or any(sign in text for sign in OUT_OF_MEMORY):
        return f"There is not enough memory for this ({what}). Choose a smaller model or batch."
    if any(sign in text for sign in UNWRITABLE):
        return f"A file could not be written ({what}). Is the disk full? What was written before is kept."
    return None
