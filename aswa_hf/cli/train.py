"""`aswa-hf train`: one training run with all strategies."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from aswa_hf.cli.options import AsJson, Command, Group, from_settings, loading
from aswa_hf.experiments.settings import ImageRun, KGERun

train = typer.Typer(
    cls=Group, help="Train a model and compare several averaging strategies in the same run.", no_args_is_help=True
)

OutputDir = Annotated[Path, typer.Option(metavar="PATH", help="Folder for weights, checkpoints and results.")]
Resume = Annotated[bool, typer.Option("--resume", metavar="", help="Resume the run from its last checkpoint.")]


def _run(work: Callable[[], Any], output_dir: Path, as_json: bool) -> None:
    """Trains, and prints what results.json contains if a program asked for it."""
    if not as_json:
        work()
        return
    with redirect_stdout(sys.stderr):
        work()
    from aswa_hf._utils.files import read_object
    from aswa_hf.experiments.running import is_main_process
    from aswa_hf.run_folder import RESULTS

    if is_main_process():
        typer.echo(json.dumps(read_object(output_dir / RESULTS), allow_nan=False))


@train.callback()
def _kinds() -> None:
    """Train a model and compare several averaging strategies in the same run."""


def _of_recipe(name: str, **settings: Any) -> KGERun:
    from aswa_hf.experiments.recipes import find_recipe

    return find_recipe(name).run(**settings)


def _list_recipes(wanted: bool) -> None:
    if not wanted:
        return
    from rich.console import Console

    from aswa_hf.experiments.recipes import recipes_listed

    Console(highlight=False).print(recipes_listed())
    raise typer.Exit


ListRecipes = Annotated[
    bool, typer.Option("--recipes", metavar="", is_eager=True, callback=_list_recipes, help="List the recipes.")
]


@train.command(cls=Command)
@from_settings(KGERun, recipe=_of_recipe)
def kge(
    run: KGERun,
    output_dir: OutputDir,
    resume: Resume = False,
    as_json: AsJson = False,
    recipes: ListRecipes = False,  # noqa: ARG001  its callback lists them
) -> None:
    """Train a link predictor on a knowledge graph and rank the test triples with each strategy's weights.

    Example:

    `aswa-hf train kge --dataset countries --model keci --output-dir runs/keci`
    """
    with loading("the libraries"):
        from aswa_hf.experiments.kge import train_kge

    _run(lambda: train_kge(run, output_dir, resume=resume), output_dir, as_json)


@train.command(cls=Command)
@from_settings(ImageRun)
def image(run: ImageRun, output_dir: OutputDir, resume: Resume = False, as_json: AsJson = False) -> None:
    """Train a timm model on images and test it with each strategy's weights.

    Example:

    `aswa-hf train image --dataset digits --epochs 20 --output-dir runs/digits`
    """
    with loading("the libraries"):
        from aswa_hf.experiments.image import train_image

    _run(lambda: train_image(run, output_dir, resume=resume), output_dir, as_json)
