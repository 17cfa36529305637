"""How a sharded entity table grows: train, decide, save, die, resume and rank with 1, 10 and 100 million entities.

    python benchmarks/scale.py
    python benchmarks/scale.py --entities 1000000 10000000 100000000 --json scale.json

For each size, on gloo processes of one thread each: a synthetic graph whose entities occur by a power law, with its
ids and labels on disk, memory-mapped; balanced sampling with row-wise Adagrad; ASWA at two decision points, each after
half of the steps and with a ranking of 200 triples; a checkpoint; SIGKILL of all processes; new ones load the
checkpoint, rank 1,000 triples, filtered by the graph, and look up 1,000 labels. Bytes are those of the tensors that a
process hands to collective calls in a step. The peak is the resident memory of a process, with the pages of files that
it has mapped; the least is weights, average and one sum per row.

    python benchmarks/scale.py --json scale.json && python benchmarks/scale.py --table scale.json

prints memory and bytes by arithmetic, and time per epoch derived from the measured step and from assumptions that are
printed with it, for tables that no machine here can hold.
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
import pyarrow.compute as pc
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
    ("changed_share", "rows in which average and running weights may differ, share"),
    ("save_s", "a checkpoint, s"),
    ("resume_s", "resume from it, s"),
    ("rank_s", "rank 1,000 triples by head and tail, s"),
    ("labels_s", "find 1,000 labels among all, s"),
    ("peak_gb", "peak memory of a process until it is killed, GB"),
    ("peak_resumed_gb", "peak memory of a process after resuming, GB"),
    ("idle_gb", "of that, before the model, GB"),
    ("least_gb", "weights + average + row-wise state of a process, GB"),
    ("all_gb", "peaks of all processes together, GB"),
    ("all_least_gb", "weights + average + row-wise state of all, GB"),
)
# What is assumed of a GPU in derived times, and the triples of a graph.
GPU = {
    "memory": (2_000, "GB/s of memory"),
    "rate": (60_000, "GFLOP/s in products"),
    "network": (25, "GB/s between GPUs"),
}
PER_ENTITY = 7
CHUNK = 1 << 20  # triples and labels that are generated at a time


def write_graph(folder: Path, entities: int, triples: int) -> None:
    """A graph of ids in the format of `number_graph`; frequent entities lie anywhere in the table."""
    random = np.random.default_rng(0)
    stride = next(k for k in range(int(entities * 0.618), 2 * entities) if np.gcd(k, entities) == 1)
    folder.mkdir(parents=True)
    counts = {"train": triples, **RANKED}
    for split, count in counts.items():
        scratch = [folder / f"column-{k}" for k in range(3)]
        columns = [np.memmap(path, dtype=np.int32, mode="w+", shape=(count,)) for path in scratch]
        for start in range(0, count, CHUNK):
            part = slice(start, min(start + CHUNK, count))
            size = part.stop - start
            for k in (0, 2):
                # Floor(n·u³): the density of the k-th most frequent entity falls as k^(−2/3).
                columns[k][part] = (entities * random.random(size) ** 3).astype(np.int64) * stride % entities
            columns[1][part] = random.integers(0, RELATIONS, size)
        batch = pa.record_batch([pa.array(column) for column in columns], ["head", "relation", "tail"])
        with pa.ipc.new_stream(str(folder / f"{split}.arrow"), batch.schema) as file:
            file.write_batch(batch)
        del batch, columns
        for path in scratch:
            path.unlink()
    for what, total in (("entities", entities), ("relations", RELATIONS)):
        with pa.ipc.new_stream(str(folder / f"{what}.arrow"), pa.schema([("label", pa.string())])) as file:
            for start in range(0, total, CHUNK):
                ids = pa.array(np.arange(start, min(start + CHUNK, total))).cast(pa.string())
                file.write_batch(pa.record_batch([pc.binary_join_element_wise(what[0], ids, "")], ["label"]))
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
    found["changed_share"] = sum(map(len, aswa.average._different.values())) / rows
    found |= {"step_s": spent / (options.steps // 2 * 2 - 1)} | limits(options)
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
    found |= {"rank_s": time.perf_counter() - began, "test_mrr": metrics["mrr"]}
    began = time.perf_counter()
    ids = np.arange(0, entities, -(-entities // 1000))
    if not np.array_equal(kg.vocab.entity_ids([f"e{number}" for number in ids]), ids):
        raise SystemExit("The labels have other ids.")
    return found | {"labels_s": time.perf_counter() - began, "peak_resumed_gb": peak()}


def limits(options: argparse.Namespace) -> dict[str, float]:
    """What a process of this machine reaches while the others do the same: copying, multiplying and exchanging."""
    source = torch.ones(1 << 24)
    target = torch.empty_like(source)
    queries, others = (torch.ones(count * options.processes, options.dim) for count in step_shape(options))
    sent = torch.ones(options.processes, sum(step_shape(options)), options.dim)
    jobs = {
        "copied_gb_per_s": (lambda: target.copy_(source), 2 * source.nbytes),
        "gflop_per_s": (lambda: queries @ others.T, 2 * len(queries) * len(others) * options.dim),
        "exchanged_gb_per_s": (lambda: dist.all_to_all_single(torch.empty_like(sent), sent), sent.nbytes),
    }
    found = {}
    for name, (job, amount) in jobs.items():
        dist.barrier()
        times = []
        for _ in range(10):
            began = time.perf_counter()
            job()
            times.append(time.perf_counter() - began)
        found[name] = amount / float(np.median(times)) / 1e9
    return found


def step_shape(options: argparse.Namespace) -> tuple[int, int]:
    """Triples and negatives that a process has with each other one."""
    return options.per_pair, options.negatives


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
    slowest = {key: min(one[key] for one in found) for key in found[0] if key.endswith("_per_s")}
    together = {
        "all_gb": sum(max(one["peak_gb"], one["peak_resumed_gb"]) for one in found),
        "all_least_gb": sum(one["least_gb"] for one in found),
    }
    return {key: max(one[key] for one in found) for key in found[0]} | slowest | together


def table(results: dict[int, dict[str, float]]) -> str:
    """The figures of all sizes as Markdown."""
    lines = ["| | " + " | ".join(f"{size:,} entities" for size in results) + " |"]
    lines.append("| --- |" + " --- |" * len(results))
    for key, label in ROWS:
        values = (f"{one[key]:,.0f}" if one[key] >= 1000 else f"{one[key]:.3g}" for one in results.values())
        lines.append(f"| {label} | {' | '.join(values)} |")
    return "\n".join(lines)


def derived(measured: dict[str, Any], step: int = 65_536, negatives: int = 4096, queries: int = 1024) -> str:
    """Tables that no machine here can hold: memory and bytes by arithmetic, time from a measured step and assumptions.

    A sampled step has `step` triples over all processes, and each query `negatives`; an all-entities step `queries`.
    """
    dim, header = 128, measured["header"]
    size, one = max(measured["sizes"].items(), key=lambda item: int(item[0]))
    share = least_time(header | {"sent": one["bytes_per_step"]}, one) / one["step_s"]
    lines = [
        f"Measured with {int(size):,} entities at d = {header['d']} ({header['CPU']}, load {header['load before']}): "
        f"a step of {one['step_s'] * 1e3:.3g} ms where a process can copy {one['copied_gb_per_s']:.3g} GB/s, multiply "
        f"{one['gflop_per_s']:.3g} GFLOP/s and exchange {one['exchanged_gb_per_s']:.3g} GB/s. That is {share:.0%} of "
        "what these limits allow. Assumed: a GPU reaches the same share of "
        + ", ".join(f"{value:,} {unit}" for value, unit in GPU.values())
        + f"; {PER_ENTITY} triples per entity, each with its inverse. Time per epoch is derived, not measured.",
        "",
        "| entities | GPUs | weights | + average and sums | while deciding, at most | sampled step "
        "| all-entities step | epoch |",
        "| --- |" + " --- |" * 7,
    ]
    for entities in (5_000_000, 90_000_000, 1_000_000_000):
        for gpus in (1, 2, 4, 8, 16, 32, 64):
            weights = -(-entities // gpus) * dim * 4
            kept = 2 * weights + -(-entities // gpus) * 4
            sampled = 2 * (step // gpus + negatives) * dim * 4 * (gpus > 1)
            everything = (2 * queries * dim + 2 * queries) * 4 * (gpus > 1)
            (memory, _), (rate, _), (network, _) = GPU.values()
            limits = {"copied_gb_per_s": memory, "gflop_per_s": rate, "exchanged_gb_per_s": network}
            shape = {"d": dim, "queries": step // gpus, "negatives": negatives, "sent": sampled}
            seconds = 2 * PER_ENTITY * entities / step * least_time(shape, limits) / share
            cells = [f"{number / 1e9:,.1f} GB" for number in (weights, kept, kept + weights)]
            cells += [f"{number / 1e6:,.1f} MB" for number in (sampled, everything)]
            lines.append(f"| {entities / 1e6:,.0f} million | {gpus} | {' | '.join(cells)} | {duration(seconds)} |")
    return "\n".join(lines)


def least_time(shape: dict[str, Any], limits: dict[str, float]) -> float:
    """The seconds that a sampled step takes at least where these are the limits of a process.

    Its rows (heads, tails and negatives) are read and written four times as weights and gradients, each score is read
    and written three times, and three products have the size of the scores.
    """
    rows, scores = 2 * shape["queries"] + shape["negatives"], shape["queries"] * shape["negatives"]
    moved = 4 * (8 * rows * shape["d"] + 6 * scores)
    return (
        moved / limits["copied_gb_per_s"]
        + 6 * scores * shape["d"] / limits["gflop_per_s"]
        + shape["sent"] / limits["exchanged_gb_per_s"]
    ) / 1e9


def duration(seconds: float) -> str:
    unit, name = next((unit for unit in ((3600, "h"), (60, "min")) if seconds >= unit[0]), (1, "s"))
    return f"{seconds / unit:,.2g} {name}"


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
    parser.add_argument(
        "--table", type=Path, metavar="JSON", help="print larger tables, from the figures in this file"
    )
    options = parser.parse_args()
    if options.table:
        print(derived(json.loads(options.table.read_text())))
        return
    if options.steps < 4:
        parser.error("--steps must be at least 4: the first is not measured")
    header = {
        "torch": torch.__version__,
        "processes": f"{options.processes}, one thread each",
        "CPU": f"{cpu_name()} ({os.cpu_count()} cores)",
        "load before": round(os.getloadavg()[0], 2),
        "d": options.dim,
        "queries": options.per_pair * options.processes,
        "negatives": options.negatives * options.processes,
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
