"""What multi-hop queries cost: sampling them, and answering them in batches, beside one at a time and the limit.

    python benchmarks/queries.py
    python benchmarks/queries.py --data path/to/UMLS path/to/FB15k-237 --json queries.json

For each shape, queries sampled from the graph are answered with the ten best entities each: all together, as
evaluation does, and some of them one at a time. The limit is the matrix products alone, with as many rows at a time,
into memory that is used again: one row for every atom with a known source, `beam` rows for every other hop. Batches,
single queries and products are timed in turn in one process, and the best of several times is given for each. The
weights are random, which changes nothing about the work. On a busy machine only the ratios are reliable.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from aswa_hf.kge import KGEModel, LinkPredictor, Query, generate_queries, load_kg
from aswa_hf.kge.queries.answering import BeamSearch, by_structure
from aswa_hf.kge.queries.language import SHAPES, Structure
from aswa_hf.kge.queries.truth import lowest

K = 10
ONE_BY_ONE = 50
LINE = "{:<14} {:<6} {:>9} {:>11} {:>12} {:>11} {:>8} {:>12} {:>11}"


def products(structure: Structure, beam: int) -> list[int]:
    """The rows of the matrix products of one query."""
    if structure == "e":
        return []
    rows = [count for part in structure[1:] for count in products(part, beam)]
    if structure[0] == "p":
        rows.append(1 if structure[1] == "e" else beam)
    return rows


def answer(search: BeamSearch, structure: Structure, ids: Tensor) -> None:
    for some in ids.split(search.rows):
        odds = search.odds(search.tree(structure, some))
        lowest(odds, K)
        search.memory.release(odds)


def multiply(search: BeamSearch, structure: Structure, queries: int, vectors: Tensor, space: Tensor) -> None:
    for rows in products(structure, search.beam):
        for first in range(0, rows * queries, search.rows):
            some = min(rows * queries - first, search.rows)
            torch.mm(vectors[:some], search.entities.T, out=space[:some])


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(data: str, shape: str, options: argparse.Namespace) -> dict[str, Any]:
    kg = load_kg(data)
    torch.manual_seed(0)
    predictor = LinkPredictor(KGEModel(kg.config(scorer=options.model, dim=options.dim)), kg.vocab)
    start = time.perf_counter()
    texts = generate_queries(kg, shape, options.queries)["query"]
    sampling = time.perf_counter() - start
    search = BeamSearch(predictor.model, beam=options.beam)
    ((structure, _, ids),) = by_structure([Query.parse(text) for text in texts], kg.vocab)
    vectors, space = torch.randn(search.rows, options.dim), torch.empty(search.rows, kg.num_entities)
    some = ids[:ONE_BY_ONE].split(1)
    times: dict[str, list[float]] = {"together": [], "apart": [], "limit": []}
    with search.evaluating():
        for _ in range(options.repeat):
            times["together"].append(seconds(lambda: answer(search, structure, ids)) / len(ids))
            times["limit"].append(seconds(lambda: multiply(search, structure, len(ids), vectors, space)) / len(ids))
            times["apart"].append(seconds(lambda: [answer(search, structure, one) for one in some]) / len(some))
    rates = {what: 1 / min(of) for what, of in times.items()}
    return {"data": data, "shape": shape, "queries": len(ids), "sampling": sampling, **rates}


def text(row: dict[str, Any]) -> str:
    cells = [Path(row["data"]).name, row["shape"], row["queries"], f"{row['sampling']:.2f}", f"{row['together']:.0f}"]
    cells += [f"{row['limit']:.0f}", f"{row['limit'] / row['together']:.2f}"]
    return LINE.format(*cells, f"{row['apart']:.0f}", f"{row['together'] / row['apart']:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", nargs="+", default=["countries"], help="folders of triples (countries)")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--queries", type=int, default=500, help="of each shape, if the graph has so many")
    parser.add_argument("--beam", type=int, default=10)
    parser.add_argument("--model", default="complex")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the measurements to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")  # graphs with fewer queries: the table shows how many
    header = {"torch": torch.__version__, "model": options.model, "dim": options.dim, "beam": options.beam}
    header |= {"threads": options.threads, "load before": round(os.getloadavg()[0], 2)}
    print(", ".join(f"{key} {value}" for key, value in header.items()))
    columns = ["graph", "shape", "queries", "sampling s", "queries/s", "limit/s", "x limit", "one by one", "x one"]
    print(LINE.format(*columns))
    rows = []
    with tqdm([(d, s) for d in options.data for s in options.shapes], unit="row", leave=False, disable=None) as plan:
        for data, shape in plan:
            plan.set_description(f"{Path(data).name}, {shape}")
            rows.append(measure(data, shape, options))
            plan.write(text(rows[-1]))
    if options.json:
        options.json.write_text(json.dumps({"header": header, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
