"""What a knowledge-graph embedding costs to train and to rank, beside the machine's limit and the peers.

    python benchmarks/kge.py
    python benchmarks/kge.py --data path/to/UMLS path/to/KINSHIP path/to/FB15k-237 --json kge.json

Measured: an epoch with inverse relations through `KGETrainer` (all that a run costs but its evaluations), KvsAll with
the binary loss ("ours"), 1vsAll grouped by query ("softmax") and row by row ("1vsall"); and the filtered ranking of
the validation triples by head and tail. The peers are pykeen (`pip install "aswa-hf[bench]"`; its LCWA loop and its
rank-based evaluator; it is left out where it would take hours) and a plain loop with a matrix of labels and
`binary_cross_entropy_with_logits`. The limit is the matrix products alone: three for a batch of training, timed
between the steps of the very run they are compared with, and one for a batch of ranking. The plain loop does a part
of an epoch, whose time is scaled up; with `--steps` so do all of ours. Every row is measured in a process of its own,
whose peak memory is given, with the libraries and without; the matrices of the limit are in it. On a busy machine the
figures say little; `--cpu-time` then measures one thread by the time it had a processor.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from aswa_hf._utils.memory import peak_memory
from aswa_hf.kge import KGEModel, KGETrainer, evaluate_link_prediction, load_kg, paper_arguments
from aswa_hf.kge.graph import TailsByQuery, with_inverses
from aswa_hf.kge.training import training_examples

MODELS = ("distmult", "complex", "qmult", "keci")
# pykeen's names; it does not have Keci, and its DistMult and QuatE build a tensor of batch × entities × dimension.
PYKEEN = {"complex": ("ComplEx", 2), "distmult": ("DistMult", 1), "qmult": ("QuatE", 4)}
SMALL = 1000  # entities, up to which every peer runs
LR = 0.1
PEER_BATCHES = 12
WARM_UP = 3  # steps
PEER_TRIPLES = 500
clock = time.perf_counter
LINE = "{:<14} {:<13} {:<9} {:>9} {:>8} {:>8} {:>10} {:>8} {:>9}"


class Limit:
    """The matrix products of a training batch, timed between the steps of what they are compared with."""

    def __init__(self, batch: int, entities: int, dim: int):
        self.queries, self.entities = torch.randn(batch, dim), torch.randn(entities, dim)
        self.logits = torch.empty(batch, entities)
        self.seconds: list[float] = []

    def __call__(self) -> float:
        start = clock()
        torch.mm(self.queries, self.entities.T, out=self.logits)
        torch.mm(self.logits, self.entities)
        torch.mm(self.logits.T, self.queries)
        self.seconds.append(clock() - start)
        return self.seconds[-1]

    def of(self, queries: int) -> float:
        """The seconds for so many queries; the last batch of an epoch is not a full one."""
        return queries / len(self.queries) * median(self.seconds)


def train_ours(
    data: str, scorer: str, dim: int, batch: int, epochs: int, steps: int = 0, *, loss: str = "binary", **scheme: str
) -> dict[str, Any]:
    """Epochs through the Trainer, of which the first is for warming up; or `steps` steps, after some to warm up."""
    from transformers import TrainerCallback

    kg = load_kg(data)
    model = build(kg, scorer, dim, loss)
    queries = len(training_examples(kg, inverses=True))
    examples = len(training_examples(kg, inverses=True, **scheme))
    batches = -(-examples // batch)
    # Grouped or not, an epoch needs the products of every query once.
    limit = Limit(min(batch, queries), kg.num_entities, dim)
    seconds: list[float] = []
    of_steps: list[float] = []

    class Clock(TrainerCallback):
        def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
            self.start = self.last = clock()

        def on_step_end(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
            of_steps.append(clock() - self.last)
            if steps or state.global_step % max(1, batches // 16) == 0:
                self.start += limit()
            self.last = clock()

        def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
            seconds.append(clock() - self.start)

    with tempfile.TemporaryDirectory() as folder:
        options = {"num_train_epochs": epochs, "per_device_train_batch_size": batch, "eval_strategy": "no"}
        if steps:  # the value of the loss is measured as often as in a whole epoch
            options |= {"max_steps": WARM_UP + steps, "logging_strategy": "steps", "logging_steps": batches}
        trainer = KGETrainer(model, paper_arguments(folder, **options, disable_tqdm=True), kg, **scheme)
        trainer.add_callback(Clock())
        trainer.train()
    if steps:
        limit.seconds = limit.seconds[WARM_UP:]
        return {"seconds": examples / batch * median(of_steps[WARM_UP:]), "limit": limit.of(queries)}
    return {"seconds": median(seconds[1:]), "limit": limit.of(queries)}


def train_softmax(*args: Any) -> dict[str, Any]:
    return train_ours(*args, loss="softmax")


def train_one_vs_all(*args: Any) -> dict[str, Any]:
    return train_ours(*args, loss="softmax", scheme="1vsall")


def train_dense(data: str, scorer: str, dim: int, batch: int, epochs: int, steps: int = 0) -> dict[str, Any]:
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

    seconds = []
    for rows in order[: (steps or 2 * PEER_BATCHES) * batch].split(batch):
        start = clock()
        step(rows)
        seconds.append(clock() - start)
        limit()
    return {"seconds": batches * mean(seconds[len(seconds) // 4 :]), "limit": limit.of(len(examples))}


def train_pykeen(data: str, scorer: str, dim: int, batch: int, epochs: int, steps: int = 0) -> dict[str, Any]:
    """Epochs of pykeen's LCWA loop with inverse triples; of a large graph one."""
    from pykeen.training import LCWATrainingLoop

    kg = load_kg(data)
    factory = pykeen_triples(kg)
    model = pykeen_model(factory, scorer, dim)
    loop = LCWATrainingLoop(model=model, triples_factory=factory, optimizer=torch.optim.Adam(model.parameters(), LR))
    queries = len(training_examples(kg, inverses=True))
    limit = Limit(min(batch, queries), kg.num_entities, dim)
    epochs = epochs if kg.num_entities <= SMALL else 1
    for _ in range(3):
        limit()
    start = clock()
    loop.train(factory, num_epochs=epochs, batch_size=batch, use_tqdm=False, use_tqdm_batch=False)
    seconds = (clock() - start) / epochs
    for _ in range(3):
        limit()
    return {"seconds": seconds, "limit": limit.of(queries)}


def rank_ours(data: str, scorer: str, dim: int, batch: int, epochs: int, steps: int = 0) -> dict[str, Any]:
    kg = load_kg(data)
    model = build(kg, scorer, dim)
    triples = len(kg["validation"])
    queries = len(TailsByQuery.of(with_inverses(kg.triples("validation"), kg.num_relations)))
    vectors = torch.randn(queries, dim)
    space = torch.empty(batch, kg.num_entities)
    seconds, limit = [], []
    for _ in range(1 + epochs):
        start = clock()
        evaluate_link_prediction(model, kg, "validation")
        seconds.append(clock() - start)
        start = clock()
        for part in vectors.split(batch):
            torch.mm(part, model.entity_embeddings.weight.detach().T, out=space[: len(part)])
        limit.append(clock() - start)
    return {"seconds": median(seconds[1:]), "limit": median(limit[1:]), "triples": triples}


def rank_pykeen(data: str, scorer: str, dim: int, batch: int, epochs: int, steps: int = 0) -> dict[str, Any]:
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
        start = clock()
        evaluator.evaluate(model, some, **options)
        seconds.append(clock() - start)
    return {"seconds": min(seconds) * len(triples) / len(some), "limit": math.nan, "triples": len(triples)}


def build(kg: Any, scorer: str, dim: int, loss: str = "binary") -> KGEModel:
    torch.manual_seed(0)
    return KGEModel(kg.config(scorer=scorer, dim=dim, loss=loss))


def pykeen_triples(kg: Any) -> Any:
    from pykeen.triples import CoreTriplesFactory

    triples = torch.from_numpy(kg.triples("train")).long()
    return CoreTriplesFactory(triples, kg.num_entities, kg.num_relations, create_inverse_triples=True)


def pykeen_model(factory: Any, scorer: str, dim: int) -> Any:
    import pykeen.models

    name, blocks = PYKEEN[scorer]
    model = getattr(pykeen.models, name)
    return model(triples_factory=factory, embedding_dim=dim // blocks, loss="BCEWithLogitsLoss", random_seed=0)


TASKS = {"train ours": train_ours, "train dense": train_dense, "train pykeen": train_pykeen}
TASKS |= {"train softmax": train_softmax, "train 1vsall": train_one_vs_all}
TASKS |= {"rank ours": rank_ours, "rank pykeen": rank_pykeen}


def plan(datasets: list[str], peers: bool) -> list[tuple[str, str, str]]:
    rows = []
    for data in datasets:
        entities = load_kg(data).num_entities
        for scorer in MODELS:
            rows.append(("train ours", data, scorer))
            if scorer in ("distmult", "complex"):
                rows.append(("train softmax", data, scorer))
            if scorer == "distmult":
                rows.append(("train 1vsall", data, scorer))
            if scorer == "complex":
                rows.append(("train dense", data, scorer))
            if peers and scorer in PYKEEN and (entities <= SMALL or scorer == "complex"):
                rows.append(("train pykeen", data, scorer))
        rows.append(("rank ours", data, "complex"))
        if peers:
            rows.append(("rank pykeen", data, "complex"))
    return rows


def in_its_own_process(task: str, data: str, scorer: str, options: argparse.Namespace) -> dict[str, Any]:
    request = {"task": task, "data": data, "scorer": scorer, "dim": options.dim, "batch": options.batch_size}
    request |= {"threads": options.threads, "epochs": options.epochs, "steps": options.steps}
    request["cpu_time"] = options.cpu_time
    command = [sys.executable, __file__, "--measure", json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{task} {scorer} on {data} failed:\n{done.stderr}")
    return request | json.loads(done.stdout.splitlines()[-1])


def measure(request: dict[str, Any]) -> None:
    global clock
    if request["cpu_time"]:
        clock = time.process_time
    torch.set_num_threads(request["threads"])
    imported = peak_memory()
    epochs = request["epochs"] * (1 if load_kg(request["data"]).num_entities > SMALL else 10)
    arguments = [request[name] for name in ("data", "scorer", "dim", "batch")]
    found = TASKS[request["task"]](*arguments, epochs, request["steps"])
    found |= {"peak": peak_memory(), "imported": imported}
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
    cells += [f"{row['peak'] / 1e9:.2f}", f"{(row['peak'] - row['imported']) / 1e9:.2f}"]
    return LINE.format(*cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", nargs="+", default=["countries"], help="folders of triples (countries)")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument(
        "--epochs", type=int, default=3, help="epochs through the Trainer; ten times as many when small"
    )
    parser.add_argument("--steps", type=int, default=0, help="measure so many steps and scale them up to an epoch")
    parser.add_argument("--cpu-time", action="store_true", help="one thread, and its CPU time: for a busy machine")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="rows to measure: train-softmax rank-ours …")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-peers", action="store_true", help="without pykeen")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the measurements to this file")
    parser.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.epochs < 2:
        parser.error(f"--epochs must be at least 2, since the first one is not counted, got {options.epochs}.")
    if options.measure:
        measure(options.measure)
        return
    peers = not options.no_peers
    if options.cpu_time:
        options.threads = 1
    if peers:
        try:
            metadata.version("pykeen")
        except metadata.PackageNotFoundError:
            raise SystemExit('pykeen is not installed: pip install "aswa-hf[bench]", or --no-peers') from None
    header = {"torch": torch.__version__, "pykeen": metadata.version("pykeen") if peers else "none"}
    header |= {"threads": options.threads, "dim": options.dim, "batch": options.batch_size}
    header |= {"load before": round(os.getloadavg()[0], 2)}
    print(", ".join(f"{key} {value}" for key, value in header.items()))
    print(LINE.format("graph", "what", "model", "seconds", "x limit", "x ours", "triples/s", "peak GB", "- import"))
    rows: list[dict[str, Any]] = []
    only = {name.replace("-", " ") for name in options.only or TASKS}
    wanted = [row for row in plan(options.data, peers) if row[0] in only]
    with tqdm(wanted, unit="row", leave=False, disable=None) as progress:
        for task, data, scorer in progress:
            progress.set_description(f"{Path(data).name}, {task}, {scorer}")
            rows.append(in_its_own_process(task, data, scorer, options))
            progress.write(text(rows[-1], rows))
    if options.json:
        options.json.write_text(json.dumps({"header": header, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
