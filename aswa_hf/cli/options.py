"""Flags of the command line, built from the settings of a run."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from aswa_hf.experiments.settings import Setting, SettingError, TrainingRun

T = TypeVar("T")
Recipe = Annotated[str | None, typer.Option(metavar="NAME", help="Settings to start from; --recipes lists them.")]
AsJson = Annotated[
    bool, typer.Option("--json", metavar="", help="Print the results as JSON; all else goes to standard error.")
]
# The placeholders of values in help texts; a switch has none.
METAVARS = {int: "N", float: "X", str: "NAME", tuple: "NAMES", bool: ""}


class _OneStyle:
    """Help in which a value is named in capitals, and in no other way; typer adds <str>, <bool> and {braces}."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for one in found:
            if one.param_type_name == "argument":
                one.display_type_rich = lambda **_: None
                one.get_usage_pieces = lambda *_, name=f"{one.metavar}{'...' if one.nargs != 1 else ''}": [name]
            elif one.is_flag and one.metavar is None:
                one.metavar = ""
        return found


class Command(_OneStyle, TyperCommand):
    """A command of `aswa-hf`."""


class Group(_OneStyle, TyperGroup):
    """Commands of `aswa-hf`."""


@contextmanager
def loading(what: str) -> Iterator[Callable[[], None]]:
    """Shows on a terminal what is being loaded until the block ends: importing the libraries alone takes seconds.

    Yields a function that clears the line before the end.
    """
    shown = sys.stderr.isatty()
    if shown:
        sys.stderr.write(f"loading {what} …")
        sys.stderr.flush()

    def clear() -> None:
        if shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    try:
        yield clear
    finally:
        clear()


def without_bars_of_reading() -> None:
    """Turns off the bar that transformers shows for every file of weights that it reads."""
    from transformers.utils import logging

    logging.disable_progress_bar()


@contextmanager
def uploading(repo: str) -> Iterator[None]:
    """Shows on a terminal where files are being pushed; the library's own bars show how much is left."""
    without_bars_of_reading()
    if sys.stderr.isatty():
        sys.stderr.write(f"pushing to {repo} …\n")
    yield


def tracked(items: Iterable[T], what: str, total: int | None = None) -> Iterable[T]:
    """Shows a progress bar with the remaining time; nothing if the output is not a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(items, what, total=total, transient=True, console=console, disable=not console.is_terminal)


@contextmanager
def named_as_flags(*arguments: str, **others: str) -> Iterator[None]:
    """Replaces the name of an argument at the start of an error message by its flag: --decay, not decay.

    `others` are arguments whose flag has another name, and no value.
    """
    try:
        yield
    except ValueError as error:
        for name, flag in others.items():
            if str(error).startswith(f"{name}="):
                _, _, rest = str(error).partition(" ")
                raise ValueError(f"{flag} {rest}") from error
        pattern = rf"({'|'.join(arguments)})(?= must |=)"
        if re.match(pattern, str(error)) is None:
            raise
        raise ValueError(
            re.sub(pattern, lambda name: f"--{name[1].replace('_', '-')}", str(error), count=1)
        ) from error


def from_settings(
    kind: type[TrainingRun], recipe: Callable[..., TrainingRun] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds a flag to a command for each setting of a kind of run; the command's first argument is the run.

    With `recipe`, a function from the name of a recipe and settings to a run, there is also `--recipe`: its settings
    take the place of the defaults.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        settings = list(kind.settings())
        _, *others = inspect.signature(command, eval_str=True).parameters.values()
        required = [_parameter(one) for one in settings if one.required]
        required += [one for one in others if one.default is inspect.Parameter.empty]
        optional = [_parameter(one) for one in settings if not one.required]
        optional += [one for one in others if one.default is not inspect.Parameter.empty]

        if recipe is not None:
            optional += [_keyword("recipe", None, Recipe), _keyword("ctx", inspect.Parameter.empty, typer.Context)]

        @functools.wraps(command)
        def run_command(**given: Any) -> None:
            values = {one.name: given.pop(one.name) for one in settings}
            chosen, context = given.pop("recipe", None), given.pop("ctx", None)
            try:
                if recipe is None or chosen is None:
                    run = kind(**values)
                else:
                    typed = {name for name in values if context.get_parameter_source(name).name != "DEFAULT"}
                    run = recipe(chosen, **{name: value for name, value in values.items() if name in typed})
            except SettingError as error:
                flag = next(one.flag for one in settings if one.name == error.name)
                raise ValueError(f"{flag} {error.problem}") from None
            command(run, **given)

        # typer builds the flags from these.
        parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*required, *optional)]
        run_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run_command.__annotations__ = {one.name: one.annotation for one in parameters}
        return run_command

    return decorate


def _parameter(one: Setting) -> inspect.Parameter:
    kind: Any = str if one.kind is tuple else one.kind
    names = [one.flag] if one.only_on else []
    option = typer.Option(*names, help=one.help, metavar=METAVARS[one.kind], min=one.least)
    default = ",".join(one.default) if isinstance(one.default, tuple) else one.default
    default = inspect.Parameter.empty if one.required else default
    return _keyword(one.name, default, Annotated[kind | None if one.optional else kind, option])


def _keyword(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
