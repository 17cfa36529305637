"""`aswa-hf evaluate`: ranks the triples of a graph, or answers queries over it, with a trained link predictor."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aswa_hf.cli.query import BEAM, TNORM, TRUTH

if TYPE_CHECKING:
    from datasets import Dataset

    from aswa_hf.kge import KnowledgeGraph


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A run folder, a saved model or a Hub repository.")],
    dataset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="countries[-s1|-s2|-s3], a folder of triples, or a Hub dataset."),
    ] = None,
    split: Annotated[str, typer.Option(metavar="NAME", help="train, validation or test.")] = "test",
    queries: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Answer multi-hop queries instead: all, shapes such as 2p,3i to sample from the dataset, or a "
            ".parquet or .json file of queries.",
        ),
    ] = None,
    per_shape: Annotated[int, typer.Option(metavar="N", min=1, help="Queries sampled for each shape.")] = 500,
    beam: BEAM = 10,
    tnorm: TNORM = "product",
    truth: TRUTH = "sigmoid",
    strategies: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Compare the weights of a run's strategies, such as last,swa,aswa."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed for the sampled queries.")] = 0,
    batch_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Queries per batch; limits the memory.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print machine-readable JSON.")] = False,
) -> None:
    """Rank the triples of a split: filtered MRR, Hits@k and mean rank over heads and tails.

    With `--queries`, rank the hard answers of multi-hop queries: filtered MRR and Hits@k by shape and on average.

    Example: `aswa-hf evaluate runs/countries --dataset countries`

    Example: `aswa-hf evaluate runs/umls --dataset data/UMLS --queries all --strategies last,swa,aswa`
    """
    from aswa_hf.experiments.evaluation import each_strategy, strategy_weights
    from aswa_hf.kge import LinkPredictor, evaluate_link_prediction, evaluate_queries, load_kg

    if dataset is None and (queries is None or not _is_file(queries)):
        raise ValueError("Give the graph with --dataset: a folder of triples, countries, or a Hub dataset.")
    if queries is not None and split != "test":
        raise ValueError(f"--split {split} is for ranking triples; --queries have their own answers.")
    kg = None if dataset is None else load_kg(dataset)
    predictor = LinkPredictor.from_pretrained(model, kg=kg)
    query_set = None if queries is None else _queries(queries, kg, per_shape, seed)

    def measured() -> dict[str, Any]:
        if query_set is None:
            return evaluate_link_prediction(predictor.model, kg, split, batch_size)  # type: ignore[arg-type]
        return evaluate_queries(predictor, query_set, beam=beam, tnorm=tnorm, truth=truth, batch_size=batch_size)

    found: dict[str, Any]
    if strategies is None:
        found = measured()
    else:
        names = list(dict.fromkeys(name.strip() for name in strategies.split(",")))
        if (checkpoint := strategy_weights(Path(model)).parent.parent) != Path(model):
            typer.echo(f"These are the weights in {checkpoint.name}, before the decision of its own epoch.", err=True)
        weights = each_strategy(predictor.model, model, names)
        found = {name: measured() for name in _progress(weights, "evaluating", len(names))}
    if as_json:
        typer.echo(json.dumps(found))
    elif strategies and query_set is not None:
        mrr = {name: {shape: metrics["mrr"] for shape, metrics in row.items()} for name, row in found.items()}
        typer.echo(_table(mrr, "MRR"))
    elif strategies or query_set is not None:
        typer.echo(_table(found))
    else:
        for name, value in found.items():
            typer.echo(f"{name:10s} {value:.4f}")


def _is_file(queries: str) -> bool:
    return Path(queries).suffix in (".parquet", ".json", ".jsonl")


def _queries(names: str, kg: KnowledgeGraph | None, per_shape: int, seed: int) -> Dataset:
    """The queries of a file, or of some shapes."""
    from datasets import concatenate_datasets

    from aswa_hf.kge import generate_queries, load_queries
    from aswa_hf.kge.queries.language import SHAPES, shape_structure

    if kg is None or _is_file(names):
        return load_queries(names)
    shapes = list(SHAPES) if names == "all" else [name.strip() for name in names.split(",")]
    for shape in shapes:
        shape_structure(shape)
    return concatenate_datasets(
        [generate_queries(kg, shape, per_shape, seed) for shape in _progress(shapes, "sampling queries", len(shapes))]
    )


def _progress(items: Iterable[str], what: str, total: int) -> Iterable[str]:
    from rich.console import Console
    from rich.progress import track

    return track(items, what, total=total, transient=True, console=Console(stderr=True))


def _table(rows: dict[str, dict[str, float]], title: str = "") -> str:
    """Numbers in columns, a line for each name."""
    columns = list(next(iter(rows.values())))
    lines = [f"{title:10s}" + "".join(f" {column:>9s}" for column in columns)]
    lines += [f"{name:10s}" + "".join(f" {row[column]:9.4f}" for column in columns) for name, row in rows.items()]
    return "\n".join(lines)
