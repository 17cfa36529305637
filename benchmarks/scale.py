"""How a sharded entity table grows: train, decide, save, die, resume and rank with 1, 10 and 100 million entities.

    python benchmarks/scale.py
    python benchmarks/scale.py --entities 1000000 10000000 100000000 --json scale.json

For each size, on gloo processes of one thread each: a synthetic graph whose entities occur by a power law, with its
ids on disk; balanced sampling with row-wise Adagrad; ASWA at two decision points, each after half of the steps and
with a ranking of 200 triples; a checkpoint; SIGKILL of all processes; new ones load the checkpoint and rank 1,000
triples, filtered by the graph. Bytes are those of the tensors that a process hands to collective calls in a step. The
peak is the resident memory of a process, with the pages of files that it has mapped; the least is weights, average
and one sum per row.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from averaging import cpu_name, positive

from aswa_hf import ASWA
from aswa_hf._utils.training_state import load_optimizer, load_weights, save_training
from aswa_hf.checkpoint import load_state, save_state
from aswa_hf.kge import KGEConfig, evaluate_link_prediction, load_kg
from aswa_hf.kge.data import ABOUT
from aswa_hf.kge.optimizers import RowwiseAdagrad
from aswa_hf.kge.sharded import BalancedBatches, build_sharded

RELATIONS = 50
RANKED = {"validation": 200, "test": 1000}
ROWS = (
    ("load_s", "open the graph, build the model, arrange the triples, s"),
    ("triples_per_s", "triples per second, all processes"),
    ("bytes_per_step", "bytes per step and process"),
    ("evaluate_s", "one evaluation of 200 triples, s"),
    ("decide_s", "a decision: one evaluation and the averages, s"),
    ("averages_s", "of that, the averages, s"),
    ("save_s", "a checkpoint, s"),
    ("resume_s", "resume from it, s"),
    ("rank_s", "rank 1,000 triples by head and tail, s"),
    ("peak_gb", "peak memory of a process, GB"),
    ("idle_gb", "of that, before the model, GB"),
    ("least_gb", "weights + average + row-wise state, GB"),
)


def write_graph(folder: Path, entities: int, triples: int) -> None:
    """A graph of ids in the format of `number_graph`; frequent entities lie anywhere in the table."""
    random = np.random.default_rng(0)
    stride = next(k for k in range(int(entities * 0.618), 2 * entities) if np.gcd(k, entities) == 1)
    folder.mkdir(parents=True)
    counts = {"train": triples, **RANKED}
    for split, count in counts.items():
        # Floor(n·u³): the density of the k-th most frequent entity falls as k^(−2/3).
        ends = [(entities * random.random(count) ** 3).astype(np.int64) * stride % entities for _ in range(2)]
        columns = [ends[0], random.integers(0, RELATIONS, count), ends[1]]
        batch = pa.record_batch([pa.array(c.astype(np.int32)) for c in columns], ["head", "relation", "tail"])
        with pa.ipc.new_stream(str(folder / f"{split}.arrow"), batch.schema) as file:
            file.write_batch(batch)
    about = {"entities": entities, "relations": RELATIONS, "splits": counts}
    (folder / ABOUT).write_text(json.dumps(about))


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


class Counting:
    """Counts the bytes of the tensors that collective calls are given."""

    def __init__(self) -> None:
        self.bytes = 0
        for name, position in (("all_reduce", 0), ("all_to_all_single", 1)):
            setattr(dist, name, self.counted(getattr(dist, name), position))

    def counted(self, call: Any, position: int) -> Any:
        def counting(*arguments: Any, **options: Any) -> Any:
            self.bytes += arguments[position].nbytes
            return call(*arguments, **options)

        return counting


def setting(options: argparse.Namespace, folder: Path, entities: int, *, new: bool) -> tuple[Any, ...]:
    """The graph, the model, the optimizer and the average of a run."""
    kg = load_kg(folder / "graph")
    config = KGEConfig(
        num_entities=entities, num_relations=RELATIONS, dim=options.dim, scorer="complex", loss="softmax"
    )
    torch.manual_seed(0)
    model = build_sharded(config, seed=0, filled=new)
    return kg, model, RowwiseAdagrad(model.parameters(), lr=0.1), ASWA(model)


def train(options: argparse.Namespace, folder: Path, entities: int) -> dict[str, float]:
    """The first processes: load, train, decide twice and save."""
    counting = Counting()
    found = {"idle_gb": peak()}
    start = time.perf_counter()
    kg, model, optimizer, aswa = setting(options, folder, entities, new=True)
    batches = BalancedBatches(kg.mapped("train"), model, per_pair=options.per_pair, negatives=options.negatives)
    iterator = iter(batches)
    dist.barrier()
    found |= {"load_s": time.perf_counter() - start, "balance": batches.balance}
    rows = len(model.entity_embeddings.weight)
    found["least_gb"] = (2 * rows * options.dim + rows) * 4 / 1e9
    spent, used, sent = 0.0, 0.0, 0

    def evaluate() -> float:
        began = time.perf_counter()
        score = evaluate_link_prediction(model, kg, "validation")["mrr"]
        evaluations.append(time.perf_counter() - began)
        return score

    evaluations: list[float] = []
    for half in range(2):
        for step in range(options.steps // 2):
            batch = next(iterator)
            weight, before, began = float(batch["weights"].sum()), counting.bytes, time.perf_counter()
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
            if half or step:  # the first step allocates
                spent, used, sent = spent + time.perf_counter() - began, used + weight, counting.bytes - before
        running = evaluate()
        began = time.perf_counter()
        decision = aswa.update(evaluate, running_score=running)
        decided = time.perf_counter() - began
    assert decision.value != "init"
    everyone = torch.tensor([used], dtype=torch.float64)
    dist.all_reduce(everyone)
    found |= {"triples_per_s": everyone.item() / spent, "bytes_per_step": sent, "score": running}
    found |= {"evaluate_s": evaluations[-1], "decide_s": decided, "averages_s": decided - evaluations[-1]}
    began = time.perf_counter()
    save_training(folder / "checkpoint" / "training.safetensors", model, optimizer)
    save_state(folder / "checkpoint" / "aswa", {"aswa": aswa})
    dist.barrier()
    return found | {"save_s": time.perf_counter() - began, "peak_gb": peak()}


def resume(options: argparse.Namespace, folder: Path, entities: int) -> dict[str, float]:
    """New processes: load the checkpoint and rank."""
    began = time.perf_counter()
    kg, model, optimizer, aswa = setting(options, folder, entities, new=False)
    load_weights(folder / "checkpoint" / "training.safetensors", model)
    load_optimizer(folder / "checkpoint" / "training.safetensors", model, optimizer)
    load_state(folder / "checkpoint" / "aswa", {"aswa": aswa})
    dist.barrier()
    found = {"resume_s": time.perf_counter() - began}
    found["again"] = evaluate_link_prediction(model, kg, "validation")["mrr"]
    began = time.perf_counter()
    metrics = evaluate_link_prediction(model, kg, "test")
    return found | {"rank_s": time.perf_counter() - began, "test_mrr": metrics["mrr"], "peak_resumed_gb": peak()}


def in_processes(job: Any, processes: int, *arguments: Any, killed: bool = False) -> list[dict[str, float]]:
    """What a job returns on each of forked processes; `killed` ends them with SIGKILL."""
    with tempfile.TemporaryDirectory() as meeting:
        children = []
        for rank in range(processes):
            sys.stdout.flush()
            if (child := os.fork()) == 0:
                try:
                    torch.set_num_threads(1)
                    store = f"file://{meeting}/store"
                    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes)
                    Path(meeting, str(rank)).write_text(json.dumps(job(*arguments)))
                    dist.barrier()
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                    os._exit(1)
                if killed:
                    os.kill(os.getpid(), signal.SIGKILL)
                os._exit(0)
            children.append(child)
        ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if ended != [-signal.SIGKILL if killed else 0] * processes:
            raise SystemExit(f"The processes ended with {ended}.")
        return [json.loads(Path(meeting, str(rank)).read_text()) for rank in range(processes)]


def measure(options: argparse.Namespace, entities: int) -> dict[str, float]:
    """All figures of one size; of figures that differ between processes, the largest."""
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        write_graph(folder / "graph", entities, min(options.triples, 4 * entities))
        ranks = in_processes(train, options.processes, options, folder, entities, killed=True)
        again = in_processes(resume, options.processes, options, folder, entities)
    found = [one | other for one, other in zip(ranks, again, strict=True)]
    if found[0]["again"] != found[0]["score"]:
        raise SystemExit(f"The resumed model has the MRR {found[0]['again']}, it had {found[0]['score']}.")
    return {key: max(one[key] for one in found) for key in found[0]}


def table(results: dict[int, dict[str, float]]) -> str:
    """The figures of all sizes as Markdown."""
    lines = ["| | " + " | ".join(f"{size:,} entities" for size in results) + " |"]
    lines.append("| --- |" + " --- |" * len(results))
    for key, label in ROWS:
        values = (f"{one[key]:,.0f}" if one[key] >= 1000 else f"{one[key]:.3g}" for one in results.values())
        lines.append(f"| {label} | {' | '.join(values)} |")
    return "\n".join(lines)


def derived(dim: int = 128, step: int = 65_536, negatives: int = 4096, queries: int = 1024) -> str:
    """Memory and bytes by arithmetic, for tables that no machine here can hold; no time, which takes a GPU to measure.

    A sampled step has `step` triples over all processes, and each query `negatives`; an all-entities step `queries`.
    """
    lines = ["| entities | GPUs | weights | + average and sums | while deciding | sampled step | all-entities step |"]
    lines.append("| --- |" + " --- |" * 6)
    for entities in (5_000_000, 90_000_000, 1_000_000_000):
        for gpus in (1, 8, 64):
            weights = -(-entities // gpus) * dim * 4
            kept = 2 * weights + -(-entities // gpus) * 4
            sampled = 2 * (step // gpus + negatives) * dim * 4 * (gpus > 1)
            everything = (2 * queries * dim + 2 * queries) * 4 * (gpus > 1)
            sizes = [f"{size / 1e9:,.1f} GB" for size in (weights, kept, kept + weights)]
            sizes += [f"{size / 1e6:,.1f} MB" for size in (sampled, everything)]
            lines.append(f"| {entities / 1e6:,.0f} million | {gpus} | {' | '.join(sizes)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--entities", type=positive, nargs="+", default=[1_000_000, 10_000_000], metavar="N")
    parser.add_argument("--triples", type=positive, default=20_000_000, help="at most (20 million; 4 per entity)")
    parser.add_argument("--processes", type=positive, default=2)
    parser.add_argument("--dim", type=positive, default=16)
    parser.add_argument("--steps", type=positive, default=60)
    parser.add_argument("--per_pair", type=positive, default=1024, help="triples of a step per pair of shards (1024)")
    parser.add_argument("--negatives", type=positive, default=256, help="that a process draws for each other (256)")
    parser.add_argument("--folder", type=Path, help="for graphs and checkpoints while they are needed")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write every figure to this file")
    parser.add_argument("--table", action="store_true", help="print memory and bytes for larger tables by arithmetic")
    options = parser.parse_args()
    if options.table:
        print(derived())
        return
    if options.steps < 4:
        parser.error("--steps must be at least 4: the first is not measured")
    header = {
        "torch": torch.__version__,
        "processes": f"{options.processes}, one thread each",
        "CPU": f"{cpu_name()} ({os.cpu_count()} cores)",
        "load before": round(os.getloadavg()[0], 2),
        "d": options.dim,
        "step": f"{options.per_pair * options.processes**2} triples, {options.negatives} negatives from each process",
    }
    print(", ".join(f"{key} {value}" for key, value in header.items()), flush=True)
    results: dict[int, dict[str, float]] = {}
    for entities in options.entities:
        results[entities] = measure(options, entities)
        if options.json:
            options.json.write_text(json.dumps({"header": header, "sizes": results}, indent=1))
    print(table(results))


if __name__ == "__main__":
    main()
