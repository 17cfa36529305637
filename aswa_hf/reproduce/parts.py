"""The measurements of two tables, with the saved weights of finished link-prediction runs."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from aswa_hf._utils.files import write_json
from aswa_hf.checkpoint import library_versions
from aswa_hf.experiments.evaluation import each_strategy
from aswa_hf.reproduce.runs import GridRun, printed_to, results
from aswa_hf.reproduce.tables import SHAPES
from aswa_hf.run_folder import CONSOLE

# The paper's settings: 500 queries of every shape, and the ten best entities kept between two hops.
QUERIES: dict[str, Any] = {"per_shape": 500, "seed": 0, "beam": 10}


def part_file(table: str) -> str | None:
    """The file in a run's folder with the numbers of a table, if they are not in results.json."""
    return f"{table}.json" if table in MEASURED else None


def is_measured(table: str, run: GridRun, output_dir: Path) -> bool:
    name = part_file(table)
    if name is None:
        return True
    found = results(run, output_dir, name)
    return found is not None and found.get("settings") == _settings(table)


def measure(table: str, run: GridRun, source: str, output_dir: Path) -> None:
    """Evaluates the final weights of all strategies of a run, and writes the metrics to its folder."""
    from aswa_hf.kge import LinkPredictor

    name = part_file(table)
    if name is None:
        return
    folder = output_dir / run.name
    start = time.perf_counter()
    evaluate = MEASURED[table]
    with printed_to(folder / CONSOLE):
        kg = _graph(source)
        predictor = LinkPredictor.from_pretrained(folder, kg=kg)
        weights = each_strategy(predictor.model, folder, run.settings.strategy_names)
        found = {strategy: evaluate(predictor, source) for strategy in weights}
    about = {"dataset": kg.name, "model": run.model, "seed": run.seed, "epochs": run.epochs}
    content = {
        "task": table,
        **about,
        "settings": _settings(table),
        **({"queries": Counter(_queries(source)["shape"])} if table == "multi-hop" else {}),
        "strategies": found,
        "seconds": {"evaluate": time.perf_counter() - start},
        "versions": library_versions(),
    }
    write_json(folder / name, content)


def _settings(table: str) -> dict[str, Any]:
    return QUERIES if table == "multi-hop" else {}


def _train_fit(predictor: Any, source: str) -> dict[str, Any]:
    from aswa_hf.kge import evaluate_link_prediction

    return {"train": evaluate_link_prediction(predictor.model, _graph(source), "train")}


def _multi_hop(predictor: Any, source: str) -> dict[str, Any]:
    from aswa_hf.kge import evaluate_queries

    return {"queries": evaluate_queries(predictor, _queries(source), beam=QUERIES["beam"])}


MEASURED = {"train-fit": _train_fit, "multi-hop": _multi_hop}


@lru_cache(maxsize=1)
def _graph(source: str) -> Any:
    from aswa_hf.kge import load_kg

    return load_kg(source)


@lru_cache(maxsize=1)
def _queries(source: str) -> Any:
    """The queries of all shapes, except those of which a small graph has none."""
    from datasets import concatenate_datasets

    from aswa_hf.kge import generate_queries

    kg = _graph(source)
    found = []
    for shape in SHAPES:
        with suppress(ValueError):
            found.append(generate_queries(kg, shape, QUERIES["per_shape"], QUERIES["seed"]))
    if not found:
        raise ValueError(f"{kg.name} has no multi-hop queries with a hard answer.")
    return concatenate_datasets(found)
