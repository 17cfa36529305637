"""What a knowledge-graph embedding costs to train and to rank, beside the machine's limit and the peers.

    python benchmarks/kge.py
    python benchmarks/kge.py --data path/to/UMLS path/to/KINSHIP path/to/FB15k-237 --json kge.json

Measured: a KvsAll epoch with inverse relations through `KGETrainer` (all that a run costs but its evaluations), and
the filtered ranking of the validation triples by head and tail. The peers are pykeen (`pip install "aswa-hf[bench]"`;
its LCWA loop and its rank-based evaluator; it is left out where it would take hours) and a plain loop with a matrix of
labels and `binary_cross_entropy_with_logits`. The limit is the matrix products alone: three for a batch of training,
timed between the steps of the very run they are compared with, and one for a batch of ranking. Slow peers do a part of
an epoch, whose time is scaled up. Every row is measured in a process of its own, whose peak memory is given, the
libraries included. On a busy machine the figures say little.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from aswa_hf.kge import KGEConfig, KGEModel, KGETrainer, evaluate_link_prediction, load_kg, paper_arguments
from aswa_hf.kge.graph import TailsByQuery, with_inverses
from aswa_hf.kge.ranking import SCORES_ON_CPU
from aswa_hf.kge.training import training_examples

MODELS = ("distmult", "complex", "qmult", "keci")
# pykeen's names; Keci it does not have, and its DistMult and QuatE build a tensor of batch × entities × dimension.
PYKEEN = {"complex": ("ComplEx", 2), "distmult": ("DistMult", 1), "qmult": ("QuatE", 4)}
PYKEEN_ALL_UP_TO = 1000  # entities
LR = 0.1
PEER_BATCHES = 12
PEER_TRIPLES = 500


class Limit:
    """The matrix products of a training batch, timed between the steps of what they are compared with."""

    def __init__(self, batch: int, entities: int, dim: int):
        self.queries, self.entities = torch.randn(batch, dim), torch.randn(entities, dim)
        self.logits = torch.empty(batch, entities)
        self.seconds: list[float] = []

    def __call__(self) -> float:
        start = time.perf_counter()
        torch.mm(self.queries, self.entities.T, out=self.logits)
        torch.mm(self.logits, self.entities)
        torch.mm(self.logits.T, self.queries)
        self.seconds.append(time.perf_counter() - start)
        return self.seconds[-1]


def train_ours(data: str, scorer: str, dim: int, batch: int, epochs: int) -> dict[str, Any]:
    """Epochs through the Trainer; the first is for warming up."""
    from transformers import TrainerCallback

    kg = load_kg(data)
    model = build(kg, scorer, dim)
    batches = -(-len(training_examples(kg, inverses=True)) // batch)
    limit = Limit(min(batch, len(training_examples(kg, inverses=True))), kg.num_entities, dim)
    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
            if state.global_step % max(1, batches // 16) == 0:
                self.start += limit()

        def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
            seconds.append(time.perf_counter() - self.start)

    with tempfile.TemporaryDirectory() as folder:
        options = {"num_train_epochs": epochs, "per_device_train_batch_size": batch, "eval_strategy": "no"}
        trainer = KGETrainer(model, paper_arguments(folder, **options, disable_tqdm=True), kg)
        trainer.add_callback(Clock())
        trainer.train()
    return {"seconds": median(seconds[1:]), "limit": batches * median(limit.seconds)}


def train_dense(data: str, scorer: str, dim: int, batch: int, epochs: int) -> dict[str, Any]:
    """A plain loop with dense labels, over some batches."""
    kg = load_kg(data)
    model = build(kg, scorer, dim)
    examples = training_examples(kg, inverses=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    limit = Limit(min(batch, len(examples)), kg.num_entities, dim)
    order = torch.randperm(len(examples))
    batches = -(-len(examples) // batch)

    def step(rows: Tensor) -> None:
        inputs = examples.__getitems__(rows.tolist())
        counts = inputs["label_offsets"].diff()
        labels = torch.zeros(len(rows), kg.num_entities)
        labels[torch.repeat_interleave(torch.arange(len(rows)), counts), inputs["labels"]] = 1
        loss = F.binary_cross_entropy_with_logits(model.score_tails(inputs["heads"], inputs["relations"]), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def some_batches() -> float:
        rows = order[: min(batches, PEER_BATCHES) * batch].split(batch)
        start = time.perf_counter()
        for part in rows:
            step(part)
        return (time.perf_counter() - start) * batches / len(rows)

    return alternate(some_batches, limit, epochs, batches)


def train_pykeen(data: str, scorer: str, dim: int, batch: int, epochs: int) -> dict[str, Any]:
    """pykeen's LCWA loop with inverse triples, on a part of the queries of a large graph."""
    from pykeen.training import LCWATrainingLoop

    kg = load_kg(data)
    queries = TailsByQuery.of(with_inverses(kg.triples("train"), kg.num_relations))
    batches = -(-len(queries) // batch)
    share = min(1.0, PEER_BATCHES / batches)
    factory = pykeen_triples(kg, share)
    model = pykeen_model(factory, scorer, dim)
    loop = LCWATrainingLoop(model=model, triples_factory=factory, optimizer=torch.optim.Adam(model.parameters(), LR))
    limit = Limit(min(batch, len(queries)), kg.num_entities, dim)

    def some_batches() -> float:
        start = time.perf_counter()
        options = {"use_tqdm": False, "use_tqdm_batch": False, "clear_optimizer": False}
        loop.train(factory, num_epochs=1, batch_size=batch, **options)
        # Its examples are queries too, so that a part of them takes its part of the batches.
        return (time.perf_counter() - start) * len(queries) / len(TailsByQuery.of(inverted(factory, kg)))

    return alternate(some_batches, limit, epochs, batches)


def rank_ours(data: str, scorer: str, dim: int, batch: int, epochs: int) -> dict[str, Any]:
    kg = load_kg(data)
    model = build(kg, scorer, dim)
    triples = len(kg["validation"])
    queries = len(TailsByQuery.of(with_inverses(kg.triples("validation"), kg.num_relations)))
    best: dict[str, list[float]] = {"ours": [], "limit": []}
    vectors = torch.randn(queries, dim)
    for _ in range(epochs):
        start = time.perf_counter()
        evaluate_link_prediction(model, kg, "validation")
        best["ours"].append(time.perf_counter() - start)
        # The better of a product of 1024 rows, and one that stays in the cache.
        limits = []
        for rows in (1024, max(1, SCORES_ON_CPU // kg.num_entities)):
            space = torch.empty(rows, kg.num_entities)
            start = time.perf_counter()
            for part in vectors.split(rows):
                torch.mm(part, model.entity_embeddings.weight.detach().T, out=space[: len(part)])
            limits.append(time.perf_counter() - start)
        best["limit"].append(min(limits))
    return {"seconds": median(best["ours"][1:]), "limit": median(best["limit"][1:]), "triples": triples}


def rank_pykeen(data: str, scorer: str, dim: int, batch: int, epochs: int) -> dict[str, Any]:
    from pykeen.evaluation import RankBasedEvaluator

    kg = load_kg(data)
    model = pykeen_model(pykeen_triples(kg), scorer, dim)
    evaluator = RankBasedEvaluator()
    triples = torch.from_numpy(kg.triples("validation")).long()
    known = [torch.from_numpy(kg.triples(split)).long() for split in kg]
    some = triples[torch.randperm(len(triples))[:PEER_TRIPLES]]
    options = {"additional_filter_triples": known, "use_tqdm": False, "batch_size": 32}
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        evaluator.evaluate(model, some, **options)
        seconds.append(time.perf_counter() - start)
    return {"seconds": min(seconds) * len(triples) / len(some), "limit": math.nan, "triples": len(triples)}


def alternate(some_batches: Callable[[], float], limit: Limit, rounds: int, batches: int) -> dict[str, Any]:
    some_batches()
    seconds = []
    for _ in range(min(3, rounds)):
        limit(), limit()
        seconds.append(some_batches())
    return {"seconds": median(seconds), "limit": batches * median(limit.seconds)}


def build(kg: Any, scorer: str, dim: int) -> KGEModel:
    torch.manual_seed(0)
    config = KGEConfig(num_entities=kg.num_entities, num_relations=kg.num_relations, dim=dim, scorer=scorer)
    return KGEModel(config)


def pykeen_triples(kg: Any, share: float = 1.0) -> Any:
    from pykeen.triples import CoreTriplesFactory

    triples = torch.from_numpy(kg.triples("train")).long()
    torch.manual_seed(0)
    some = triples[torch.randperm(len(triples))[: max(1, int(share * len(triples)))]]
    return CoreTriplesFactory(some, kg.num_entities, kg.num_relations, create_inverse_triples=True)


def inverted(factory: Any, kg: Any) -> Any:
    return with_inverses(factory.mapped_triples.numpy(), kg.num_relations)


def pykeen_model(factory: Any, scorer: str, dim: int) -> Any:
    import pykeen.models

    name, blocks = PYKEEN[scorer]
    model = getattr(pykeen.models, name)
    return model(triples_factory=factory, embedding_dim=dim // blocks, loss="BCEWithLogitsLoss", random_seed=0)


TASKS = {"train ours": train_ours, "train dense": train_dense, "train pykeen": train_pykeen}
TASKS |= {"rank ours": rank_ours, "rank pykeen": rank_pykeen}


def plan(datasets: list[str], peers: bool) -> list[tuple[str, str, str]]:
    rows = []
    for data in datasets:
        entities = load_kg(data).num_entities
        for scorer in MODELS:
            rows += [(task, data, scorer) for task in ("train ours", "train dense") if scorer == "complex" or "o" in task]
            if peers and scorer in PYKEEN and (entities <= PYKEEN_ALL_UP_TO or scorer == "complex"):
                rows.append(("train pykeen", data, scorer))
        rows.append(("rank ours", data, "complex"))
        if peers:
            rows.append(("rank pykeen", data, "complex"))
    return rows


def in_its_own_process(task: str, data: str, scorer: str, options: argparse.Namespace) -> dict[str, Any]:
    request = {"task": task, "data": data, "scorer": scorer, "dim": options.dim, "batch": options.batch_size}
    request |= {"threads": options.threads, "epochs": options.epochs}
    command = [sys.executable, __file__, "--measure", json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{task} {scorer} on {data} failed:\n{done.stderr}")
    return request | json.loads(done.stdout.splitlines()[-1])


def measure(request: dict[str, Any]) -> None:
    torch.set_num_threads(request["threads"])
    epochs = request["epochs"] * (1 if load_kg(request["data"]).num_entities > PYKEEN_ALL_UP_TO else 10)
    found = TASKS[request["task"]](request["data"], request["scorer"], request["dim"], request["batch"], epochs)
    found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(found))


def text(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    kind = row["task"].split()[0]
    ours = next(
        (
            other["seconds"]
            for other in rows
            if (other["task"], other["data"], other["scorer"]) == (f"{kind} ours", row["data"], row["scorer"])
        ),
        math.nan,
    )
    cells = [Path(row["data"]).name, row["task"], row["scorer"], f"{row['seconds']:.3f}"]
    cells.append("" if math.isnan(row["limit"]) else f"{row['seconds'] / row['limit']:.2f}")
    cells.append(f"{row['seconds'] / ours:.2f}")
    cells.append(f"{row['triples'] / row['seconds']:.0f}" if "triples" in row else "")
    cells.append(f"{row['peak'] / 1e9:.2f}")
    return "{:<14} {:<13} {:<9} {:>9} {:>8} {:>8} {:>10} {:>8}".format(*cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", nargs="+", default=["countries"], help="folders of triples (countries)")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=3, help="epochs through the Trainer; ten times as many when small")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-peers", action="store_true", help="without pykeen")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the measurements to this file")
    parser.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        return measure(options.measure)
    peers = not options.no_peers
    if peers:
        try:
            metadata.version("pykeen")
        except metadata.PackageNotFoundError:
            raise SystemExit('pykeen is not installed: pip install "aswa-hf[bench]", or --no-peers') from None
    header = {"torch": torch.__version__, "pykeen": metadata.version("pykeen") if peers else "none"}
    header |= {"threads": options.threads, "dim": options.dim, "batch": options.batch_size}
    header |= {"load before": round(os.getloadavg()[0], 2)}
    print(", ".join(f"{key} {value}" for key, value in header.items()))
    columns = ("graph", "what", "model", "seconds", "x limit", "x ours", "triples/s", "peak GB")
    print("{:<14} {:<13} {:<9} {:>9} {:>8} {:>8} {:>10} {:>8}".format(*columns))
    rows: list[dict[str, Any]] = []
    with tqdm(plan(options.data, peers), unit="row", leave=False, disable=None) as progress:
        for task, data, scorer in progress:
            progress.set_description(f"{Path(data).name}, {task}, {scorer}")
            rows.append(in_its_own_process(task, data, scorer, options))
            progress.write(text(rows[-1], rows))
    if options.json:
        options.json.write_text(json.dumps({"header": header, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
