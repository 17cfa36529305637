"""`aswa-hf train`: one training run, all strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

train = typer.Typer(help="Train a model, shadowed by several averaging strategies.", no_args_is_help=True)


@train.callback()
def _kinds() -> None:
    """Train a model, shadowed by several averaging strategies."""


def _names(strategies: str) -> list[str]:
    names = [name.strip() for name in strategies.split(",")]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"--strategies names {twice!r} twice.")
    return names


@train.command()
def kge(
    dataset: Annotated[str, typer.Option(help="countries[-s1|-s2|-s3], a folder of triples, or a Hub dataset.")],
    output_dir: Annotated[Path, typer.Option(help="The run's folder: weights, checkpoints, results.")],
    model: Annotated[str, typer.Option(help="distmult, complex, qmult, keci, rescal or tucker.")] = "complex",
    dim: Annotated[int, typer.Option(metavar="N", min=1, help="Real numbers per entity.")] = 128,
    epochs: Annotated[int, typer.Option(metavar="N", min=1, help="How long to train.")] = 256,
    batch_size: Annotated[
        int, typer.Option(metavar="N", min=1, help="Queries (or triples) per step and process.")
    ] = 1024,
    lr: Annotated[float, typer.Option(metavar="X", min=0, help="Learning rate of Adam.")] = 0.1,
    scheme: Annotated[str, typer.Option(help="kvsall, 1vsall or negative_sampling.")] = "kvsall",
    p: Annotated[int, typer.Option(metavar="N", min=0, help="Keci: base vectors that square to +1.")] = 0,
    q: Annotated[int, typer.Option(metavar="N", min=0, help="Keci: base vectors that square to −1.")] = 1,
    strategies: Annotated[str, typer.Option(help="Which to keep, the first to ship.")] = "aswa,swa,ema,best,last",
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the weights and the batches.")] = 0,
    keep: Annotated[
        int, typer.Option(metavar="N", min=1, help="Checkpoints to keep, one for each tenth of the run.")
    ] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint of the run.")] = False,
) -> None:
    """Train a link predictor on a knowledge graph and rank the test triples with each strategy's weights.

    Example: `aswa-hf train kge --dataset countries --model keci --epochs 100 --output-dir runs/countries`
    """
    from aswa_hf.experiments.kge import train_kge
    from aswa_hf.experiments.running import sole_run

    with sole_run(output_dir):
        train_kge(
            dataset=dataset,
            output_dir=output_dir,
            scorer=model,
            dim=dim,
            epochs=epochs,
            batch_size=batch_size,
            lr=lr,
            scheme=scheme,
            p=p,
            q=q,
            strategies=_names(strategies),
            seed=seed,
            keep=keep,
            resume=resume,
        )


@train.command()
def image(
    dataset: Annotated[str, typer.Option(help="digits, a folder of parquet files or images, or a Hub dataset.")],
    output_dir: Annotated[Path, typer.Option(help="The run's folder: weights, checkpoints, results.")],
    model: Annotated[str, typer.Option(help="A timm model; also vgg16_bn_cifar, …")] = "preresnet20_cifar",
    recipe: Annotated[str | None, typer.Option(help="vgg16, wrn28_10, … (the model's).")] = None,
    epochs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="How long to train (as the recipe says).")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Images per step and process (recipe).")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(metavar="X", min=0, help="First rate of SGD (recipe); SWA's and FGE's follow.")
    ] = None,
    strategies: Annotated[str, typer.Option(help="Which to keep, the first to ship.")] = "aswa,swa,ema,best,last",
    fge: Annotated[bool, typer.Option("--fge", help="Fast Geometric Ensembling too.")] = False,
    fge_cycle: Annotated[
        float | None, typer.Option(metavar="X", min=0, help="Epochs between FGE's snapshots (recipe).")
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(metavar="N", min=8, help="Resize images (to the model's size).")
    ] = None,
    augment: Annotated[bool | None, typer.Option(help="Random crops and flips (but for digits).")] = None,
    val_ratio: Annotated[
        float, typer.Option(metavar="X", help="The part of the training images kept for validation.")
    ] = 0.05,
    train_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Train on so many images, stratified.")
    ] = None,
    bn_batches: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Batches to recalibrate BatchNorm on (all).")
    ] = None,
    precision: Annotated[str, typer.Option(help="auto, fp32, bf16 or fp16.")] = "auto",
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the split, the weights and the batches.")] = 0,
    keep: Annotated[
        int, typer.Option(metavar="N", min=1, help="Checkpoints to keep, one for each tenth of the run.")
    ] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint of the run.")] = False,
) -> None:
    """Train a timm model on images and test it with each strategy's weights.

    Example: `aswa-hf train image --dataset digits --epochs 20 --val-ratio 0.3 --fge --output-dir runs/digits`
    """
    from aswa_hf.experiments.image import train_image
    from aswa_hf.experiments.running import sole_run

    with sole_run(output_dir):
        train_image(
            dataset=dataset,
            output_dir=output_dir,
            model_name=model,
            recipe_name=recipe,
            epochs=epochs,
            batch_size=batch_size,
            lr=lr,
            strategies=_names(strategies),
            fge=fge,
            fge_cycle=fge_cycle,
            image_size=image_size,
            augment=augment,
            val_ratio=val_ratio,
            train_size=train_size,
            bn_batches=bn_batches,
            precision=precision,
            seed=seed,
            keep=keep,
            resume=resume,
        )
