"""`aswa-hf train`: one training run with all strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aswa_hf.cli.options import from_settings
from aswa_hf.experiments.settings import ImageRun, KGERun

train = typer.Typer(
    help="Train a model and compare several averaging strategies in the same run.", no_args_is_help=True
)

OutputDir = Annotated[Path, typer.Option(metavar="PATH", help="Folder for weights, checkpoints and results.")]
Resume = Annotated[bool, typer.Option("--resume", metavar="", help="Resume the run from its last checkpoint.")]


@train.callback()
def _kinds() -> None:
    """Train a model and compare several averaging strategies in the same run."""


@train.command()
@from_settings(KGERun)
def kge(run: KGERun, output_dir: OutputDir, resume: Resume = False) -> None:
    """Train a link predictor on a knowledge graph and rank the test triples with each strategy's weights.

    Example: `aswa-hf train kge --dataset countries --model keci --epochs 100 --output-dir runs/countries`
    """
    from aswa_hf.experiments.kge import train_kge

    train_kge(run, output_dir, resume=resume)


@train.command()
@from_settings(ImageRun)
def image(run: ImageRun, output_dir: OutputDir, resume: Resume = False) -> None:
    """Train a timm model on images and test it with each strategy's weights.

    Example: `aswa-hf train image --dataset digits --epochs 20 --val-ratio 0.3 --fge --output-dir runs/digits`
    """
    from aswa_hf.experiments.image import train_image

    train_image(run, output_dir, resume=resume)
