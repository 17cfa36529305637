"""`aswa-hf evaluate`: how well a trained link predictor ranks the triples of a graph."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def evaluate(
    model: Annotated[str, typer.Argument(help="A run folder, a saved model or a Hub repository.")],
    dataset: Annotated[str, typer.Option(help="countries[-s1|-s2|-s3], a folder of triples, or a Hub dataset.")],
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    batch_size: Annotated[int | None, typer.Option(min=1, help="Queries at a time; bounds the memory.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")] = False,
) -> None:
    """Rank the triples of a split: filtered MRR, Hits@k and mean rank over heads and tails.

    Example: `aswa-hf evaluate runs/countries --dataset countries`
    """
    from aswa_hf.kge import LinkPredictor, evaluate_link_prediction, load_kg

    kg = load_kg(dataset)
    predictor = LinkPredictor.from_pretrained(model, kg=kg)
    metrics = evaluate_link_prediction(predictor.model, kg, split, batch_size)
    if as_json:
        typer.echo(json.dumps(metrics))
    else:
        for name, value in metrics.items():
            typer.echo(f"{name:10s} {value:.4f}")
