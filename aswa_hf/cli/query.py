"""`aswa-hf query`: answers multi-hop queries with a trained link predictor."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from aswa_hf._utils.checks import check_choice
from aswa_hf.cli.options import AsJson, loading

TNORMS, TRUTHS = ("product", "min", "lukasiewicz"), ("sigmoid", "minmax", "softmax")

BEAM = Annotated[int, typer.Option(metavar="N", min=1, help="Entities kept for a variable between two hops.")]
TNORM = Annotated[str, typer.Option(metavar="NAME", help="How parts are combined: product, min or lukasiewicz.")]
TRUTH = Annotated[
    str, typer.Option(metavar="NAME", help="How logits become truth values: sigmoid, minmax or softmax.")
]


def query(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A run folder, a saved model or a Hub repository.")],
    text: Annotated[str, typer.Argument(metavar="QUERY", help="A shape and its labels, or paths joined by & and |.")],
    k: Annotated[int, typer.Option("--k", "-k", metavar="N", min=1, help="Number of answers.")] = 10,
    beam: BEAM = 10,
    tnorm: TNORM = "product",
    truth: TRUTH = "sigmoid",
    chains: Annotated[
        bool, typer.Option("--chains", metavar="", help="Show the steps that led to each answer.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Answer a multi-hop query with the most likely entities.

    The shapes are 1p, 2p, 3p (hops), 2i, 3i, ip, pi (intersections), 2u, up (unions). Queries of any other form are
    paths: `(france, neighbor & spain, neighbor), locatedin`; ^ follows a relation backwards: `europe, ^locatedin`.

    Example:

    `aswa-hf query runs/countries "2p: france, neighbor, locatedin" -k 3 --chains`
    """
    check_choice("--tnorm", tnorm, TNORMS)
    check_choice("--truth", truth, TRUTHS)
    with loading(model):
        from aswa_hf.kge import LinkPredictor, Query, answer_query

        parsed = Query.parse(text)
        predictor = LinkPredictor.from_pretrained(model)
    answers = answer_query(predictor, parsed, k, beam=beam, tnorm=tnorm, truth=truth, chains=chains)
    chain = answers.pop("chain") if chains else [[]] * len(answers)
    if as_json:
        if chains:
            answers["chain"] = [[step._asdict() for step in steps] for steps in chain]
        typer.echo(json.dumps(answers.to_dict("records"), ensure_ascii=False))
        return
    table = answers.drop(columns="query").to_string(index=False, float_format="{:#.4g}".format)
    header, *lines = table.split("\n")  # labels may contain other line ends
    typer.echo(header)
    for line, steps in zip(lines, chain, strict=True):
        typer.echo("\n".join([line, *(f"    {step}" for step in steps)]))
