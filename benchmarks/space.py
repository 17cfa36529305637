"""What a question to the application of a link predictor costs, beside the scores alone.

    python benchmarks/space.py
    python benchmarks/space.py --data path/to/UMLS path/to/FB15k-237 --json space.json

A question is `ask` and `neighbourhood`: what the page "Ask" computes for one press of its button. The limit is the
one row of scores that the answers are taken from. Both are timed in turn in one process, and the median of several
times is given for each. The weights are random, which changes nothing about the work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aswa_hf.kge import KGEModel, load_kg
from aswa_hf.space.links import Links
from aswa_hf.space.source import open_source

LINE = "{:<14} {:>9} {:>9} {:>12} {:>10} {:>8}"


def milliseconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - start)


@torch.no_grad()
def measure(data: str, options: argparse.Namespace) -> dict[str, Any]:
    kg = load_kg(data)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary)
        KGEModel(kg.config(scorer=options.model, dim=options.dim)).save_pretrained(run)
        kg.vocab.save_pretrained(run)
        (run / "settings.json").write_text(json.dumps({"dataset": {"name": kg.name, "source": data}}))
        links = Links(open_source(run))
        times: dict[str, list[float]] = {"question": [], "limit": []}
        for head, relation, _ in kg.triples("test")[: options.repeat]:
            labels = kg.vocab.entities[head], kg.vocab.relations[relation]
            ids = np.array([head]), np.array([relation])
            times["question"].append(milliseconds(lambda: (links.ask(*labels), links.neighbourhood(labels[0]))))  # noqa: B023
            times["limit"].append(milliseconds(lambda: links.predictor.score_all(*ids, "tail")))  # noqa: B023
    found = {what: statistics.median(of[1:]) for what, of in times.items()}  # the first one loads the model
    return {"data": data, "entities": kg.num_entities, "relations": kg.num_relations, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", nargs="+", default=["countries"], help="folders of triples (countries)")
    parser.add_argument("--model", default="complex")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the measurements to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    header = {"torch": torch.__version__, "model": options.model, "dim": options.dim}
    header |= {"threads": options.threads, "load before": round(os.getloadavg()[0], 2)}
    print(", ".join(f"{key} {value}" for key, value in header.items()))
    print(LINE.format("graph", "entities", "relations", "question ms", "limit ms", "x limit"))
    rows = []
    for data in options.data:
        row = measure(data, options)
        rows.append(row)
        ratio = row["question"] / row["limit"]
        sizes = f"{row['entities']:,}", f"{row['relations']:,}"
        print(LINE.format(Path(data).name, *sizes, f"{row['question']:.1f}", f"{row['limit']:.2f}", f"{ratio:.1f}"))
    if options.json:
        options.json.write_text(json.dumps({"header": header, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
