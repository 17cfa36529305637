"""`aswa-hf predict`: the most likely heads or tails, by a trained link predictor."""

from __future__ import annotations

from typing import Annotated

import typer

from aswa_hf.cli.options import AsJson, loading


def predict(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A run folder, a saved model or a Hub repository.")],
    head: Annotated[str | None, typer.Option(metavar="LABEL", help="Predict tails of (head, relation, ?).")] = None,
    relation: Annotated[str | None, typer.Option(metavar="LABEL", help="The relation of the question.")] = None,
    tail: Annotated[str | None, typer.Option(metavar="LABEL", help="Predict heads of (?, relation, tail).")] = None,
    k: Annotated[int, typer.Option("--k", "-k", metavar="N", min=1, help="Number of answers.")] = 10,
    known: Annotated[
        str | None, typer.Option(metavar="NAME", help="A graph (as for train) whose triples are left out.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Answer (head, relation, ?) or (?, relation, tail) with the most likely entities.

    Example:

    `aswa-hf predict runs/countries --head france --relation locatedin -k 3`
    """
    if relation is None or (head is None) == (tail is None):
        raise ValueError("Give --head and --relation to predict tails, or --relation and --tail to predict heads.")
    with loading(model):
        from aswa_hf.kge import LinkPredictor

        kg = None
        if known:
            from aswa_hf.kge import load_kg

            kg = load_kg(known)
        predictor = LinkPredictor.from_pretrained(model, kg=kg)
    answers = predictor.predict(head, relation, tail, k=k, exclude_known=known is not None)
    if as_json:
        typer.echo(answers.to_json(orient="records"))
    else:
        typer.echo(answers.to_string(index=False, float_format="%.4f"))
