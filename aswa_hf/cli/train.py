"""`aswa-hf train`: one training run, all strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

train = typer.Typer(help="Train a model, shadowed by several averaging strategies.", no_args_is_help=True)


@train.callback()
def _kinds() -> None:
    """Train a model, shadowed by several averaging strategies."""


@train.command()
def kge(
    dataset: Annotated[str, typer.Option(help="countries[-s1|-s2|-s3], a folder of triples, or a Hub dataset.")],
    output_dir: Annotated[Path, typer.Option(help="The run's folder: weights, checkpoints, results.")],
    model: Annotated[str, typer.Option(help="distmult, complex, qmult, keci, rescal or tucker.")] = "complex",
    dim: Annotated[int, typer.Option(min=1, help="Real numbers per entity.")] = 128,
    epochs: Annotated[int, typer.Option(min=1, help="How long to train.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Queries (or triples) per step.")] = 1024,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate of Adam.")] = 0.1,
    scheme: Annotated[str, typer.Option(help="kvsall, 1vsall or negative_sampling.")] = "kvsall",
    p: Annotated[int, typer.Option(min=0, help="Keci: base vectors that square to +1.")] = 0,
    q: Annotated[int, typer.Option(min=0, help="Keci: base vectors that square to −1.")] = 1,
    strategies: Annotated[str, typer.Option(help="Which to keep, the first to ship.")] = "aswa,swa,ema,best,last",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights and the batches.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint of the run.")] = False,
) -> None:
    """Train a link predictor on a knowledge graph and rank the test triples with each strategy's weights.

    Example: `aswa-hf train kge --dataset countries --model keci --epochs 100 --output-dir runs/countries`
    """
    from aswa_hf.cli.runs import train_kge

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
        strategies=strategies.split(","),
        seed=seed,
        resume=resume,
    )
