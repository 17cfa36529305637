"""`aswa-hf evaluate`: metrics of a trained model: ranks of triples, answers to queries, or classes of images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aswa_hf._utils.checks import check_choice
from aswa_hf._utils.files import refuse_mistyped
from aswa_hf.cli.options import AsJson, loading, tracked
from aswa_hf.cli.query import BEAM, TNORM, TNORMS, TRUTH, TRUTHS
from aswa_hf.experiments.settings import ImageRun, read_run, read_settings
from aswa_hf.run_folder import SETTINGS

if TYPE_CHECKING:
    from datasets import Dataset

    from aswa_hf.kge import KnowledgeGraph


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A run folder, a saved model or a Hub repository.")],
    dataset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Dataset, as for train (default: that of the run)."),
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
    as_json: AsJson = False,
) -> None:
    """Rank the triples of a split: filtered MRR, Hits@k and mean rank over heads and tails.

    With `--queries`, rank the hard answers of multi-hop queries: filtered MRR and Hits@k by shape and on average.
    For a run of images: accuracy and loss.

    Example:

    `aswa-hf evaluate runs/countries --split validation`

    `aswa-hf evaluate runs/umls --queries all --strategies last,swa,aswa`
    """
    check_choice("--split", split, ("train", "validation", "test"))
    check_choice("--tnorm", tnorm, TNORMS)
    check_choice("--truth", truth, TRUTHS)
    if queries is not None and split != "test":
        raise ValueError(f"--split {split} is for ranking triples and has no effect with --queries: leave it out.")
    refuse_mistyped(model)
    settings = Path(model) / SETTINGS
    run = read_run(settings) if settings.is_file() else None
    if isinstance(run, ImageRun):
        for flag, value in (("--queries", queries), ("--strategies", strategies)):
            if value is not None:
                raise ValueError(f"{flag} is for knowledge graphs; {model} is a run of images.")
        with loading(model) as loaded:
            from aswa_hf.checkpoints.evaluation import evaluate_images

            def track(batches: Any) -> Any:
                loaded()
                return tracked(batches, "evaluating", len(batches))

            metrics = evaluate_images(Path(model), split, dataset, track)
        _show(metrics, as_json)
        return
    own = dataset is None and run is not None  # then its size is known too
    if dataset is None and run is not None:
        dataset = run.dataset
    if dataset is None and (queries is None or not _is_file(queries)):
        raise ValueError("Give the graph with --dataset: a folder of triples, countries, or a Hub dataset.")
    names = [] if strategies is None else list(dict.fromkeys(name.strip() for name in strategies.split(",")))
    with loading(model):
        from aswa_hf.experiments.evaluation import (
            check_sizes,
            check_strategies,
            each_strategy,
            sizes_of,
            strategy_weights,
        )
        from aswa_hf.kge import LinkPredictor, evaluate_link_prediction, evaluate_queries, load_kg

        if names:
            check_strategies(Path(model), names)
        if queries is not None and not _is_file(queries):
            _shapes(queries)
        kg = None if dataset is None else load_kg(dataset)
        if kg is not None and own:
            check_sizes(sizes_of(read_settings(settings)), str(dataset), {split: len(kg[split]) for split in kg})
        predictor = LinkPredictor.from_pretrained(model, kg=kg)
    query_set = None if queries is None else _queries(queries, kg, per_shape, seed)

    def measured(track: Any = iter) -> dict[str, Any]:
        if query_set is None:
            return evaluate_link_prediction(predictor.model, kg, split, batch_size, track=track)  # type: ignore[arg-type]
        options: dict[str, Any] = {"beam": beam, "tnorm": tnorm, "truth": truth, "batch_size": batch_size}
        return evaluate_queries(predictor, query_set, track=track, **options)

    found: dict[str, Any]
    if strategies is None:
        found = measured(lambda batches: tracked(batches, "evaluating", len(batches)))
    else:
        if (checkpoint := strategy_weights(Path(model)).parent.parent) != Path(model):
            typer.echo(f"These are the weights in {checkpoint.name}, before the decision of its own epoch.", err=True)
        weights = each_strategy(predictor.model, model, names)
        found = {name: measured() for name in tracked(weights, "evaluating", len(names))}
    if as_json:
        _show(found, as_json)
    elif strategies and query_set is not None:
        mrr = {name: {shape: metrics["mrr"] for shape, metrics in row.items()} for name, row in found.items()}
        typer.echo(_table(mrr, "MRR"))
    elif strategies or query_set is not None:
        typer.echo(_table(found))
    else:
        _show(found, as_json)


def _show(metrics: dict[str, Any], as_json: bool) -> None:
    """Prints metrics, a line for each or as JSON."""
    lines = (f"{name:10s} {value:.4f}" for name, value in metrics.items())
    typer.echo(json.dumps(metrics) if as_json else "\n".join(lines))


def _shapes(names: str) -> list[str]:
    """The shapes of queries; raises ValueError for an unknown one."""
    from aswa_hf.kge.queries.language import SHAPES, shape_structure

    shapes = list(SHAPES) if names == "all" else [name.strip() for name in names.split(",")]
    for shape in shapes:
        shape_structure(shape)
    return shapes


def _is_file(queries: str) -> bool:
    return Path(queries).suffix in (".parquet", ".json", ".jsonl")


def _queries(names: str, kg: KnowledgeGraph | None, per_shape: int, seed: int) -> Dataset:
    """The queries of a file, or of some shapes."""
    from datasets import concatenate_datasets

    from aswa_hf.kge import generate_queries, load_queries

    if kg is None or _is_file(names):
        return load_queries(names)
    shapes = _shapes(names)
    return concatenate_datasets(
        [generate_queries(kg, shape, per_shape, seed) for shape in tracked(shapes, "sampling queries", len(shapes))]
    )


def _table(rows: dict[str, dict[str, float]], title: str = "") -> str:
    """Numbers in columns, a line for each name."""
    columns = list(next(iter(rows.values())))
    lines = [f"{title:10s}" + "".join(f" {column:>9s}" for column in columns)]
    lines += [f"{name:10s}" + "".join(f" {row[column]:9.4f}" for column in columns) for name, row in rows.items()]
    return "\n".join(lines)
