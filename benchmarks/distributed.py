"""What a decision costs on one and on two processes: its time beside the evaluation in it, and the bytes it sends.

    python benchmarks/distributed.py
    python benchmarks/distributed.py --processes 1 2 --epochs 8 --repeats 5 --json distributed.json

Measured: `aswa_hf.loop.fit` with and without ASWA in turn, the same training in every process (gloo, one thread each),
for a plain network and for one with BatchNorm, whose statistics are recomputed before averaged weights are evaluated.
The limit is the evaluation alone: ASWA needs one more per decision. Bytes are those that the collective calls of one
process carry during a decision, without those of the evaluation itself; a broadcast on n processes carries them n - 1
times in all, a sum 2 (n - 1) times.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from averaging import cpu_name, positive
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from aswa_hf import closing_process_group
from aswa_hf.loop import training as loop

MODELS = ("plain", "batchnorm")
LEGEND = """\
epoch      training alone, without evaluation and decision: no strategy, with ASWA
evaluate   one evaluation of the validation split, the least that a decision needs
decide     all of a decision of ASWA after the first: look-ahead, evaluation, broadcasts
x evaluate decide / evaluate
own        what is left of a decision without its evaluation; own share: beside an epoch and its evaluation
Times are medians in milliseconds."""


class Network(nn.Module):
    """A perceptron, or a few convolutions with BatchNorm, on 3×16×16 numbers."""

    def __init__(self, kind: str):
        super().__init__()
        if kind == "plain":
            self.layers = nn.Sequential(
                nn.Flatten(), nn.Linear(768, 1024), nn.LayerNorm(1024), nn.ReLU(), nn.Linear(1024, 10)
            )
        else:
            channels = [3, 32, 64, 64]
            blocks = [
                nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU())
                for a, b in pairwise(channels)
            ]
            self.layers = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class Meter:
    """Seconds spent in, and bytes sent during, decisions and evaluations."""

    def __init__(self) -> None:
        self.evaluations: list[float] = []
        self.decisions: list[dict[str, float]] = []
        self.sent: float | None = None  # counts while it is a number

    @contextmanager
    def decision(self) -> Iterator[None]:
        first, self.sent, start = len(self.evaluations), 0, time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.decisions.append(
            {"seconds": seconds, "evaluation": sum(self.evaluations[first:]), "bytes": float(self.sent or 0)}
        )
        self.sent = None

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        sent, self.sent, start = self.sent, None, time.perf_counter()
        yield
        self.evaluations.append(time.perf_counter() - start)
        self.sent = sent

    def listen(self) -> None:
        """Counts what goes through the collective calls of torch."""
        inside = False

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(tensors: Any, *args: Any, **options: Any) -> Any:
                nonlocal inside
                if self.sent is not None and not inside:
                    # Of a gathering call, the first argument is what comes in, the second what goes out.
                    sent = args[0] if function.__name__.startswith("all_gather") else tensors
                    self.sent += sum(
                        t.numel() * t.element_size() for t in ([sent] if isinstance(sent, Tensor) else sent)
                    )
                outer, inside = inside, True
                try:
                    return function(tensors, *args, **options)
                finally:
                    inside = outer

            return call

        # Lists of objects are sent by functions that find the others in their own module.
        for name in ("broadcast", "all_reduce", "all_gather", "all_gather_into_tensor"):
            wrapped = counted(getattr(dist, name))
            for module in (dist, dist.distributed_c10d):
                setattr(module, name, wrapped)


def train(kind: str, strategies: Any, options: argparse.Namespace, meter: Meter) -> float:
    """One run; returns the seconds of an epoch without evaluation and decision."""
    AcceleratorState._reset_state(False)
    GradientState._reset_state()
    loading = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=loading)
    set_seed(0)
    model = Network(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def data(batches: int, size: int) -> DataLoader:
        images, labels = torch.randn(batches * size, 3, 16, 16), torch.randint(10, (batches * size,))
        return DataLoader(TensorDataset(images, labels), size, shuffle=True)

    model, optimizer, train_loader, valid_loader = accelerator.prepare(
        model, optimizer, data(options.batches, 64), data(options.batches // 2, 128)
    )

    def evaluate() -> float:
        with meter.evaluation():
            right = [accelerator.gather_for_metrics(model(x).argmax(-1) == y) for x, y in valid_loader]
            return torch.cat(right).double().mean().item()

    first = len(meter.evaluations), len(meter.decisions)
    start = time.perf_counter()
    loop.fit(
        accelerator, model, optimizer, train_loader, evaluate,
        epochs=options.epochs, progress=False, strategies=strategies, apply=None,
        loss=lambda module, batch: nn.functional.cross_entropy(module(batch[0]), batch[1]),
    )  # fmt: skip
    seconds = time.perf_counter() - start
    decisions = meter.decisions[first[1] :]
    outside = sum(meter.evaluations[first[0] :]) - sum(d["evaluation"] for d in decisions)
    return (seconds - outside - sum(d["seconds"] for d in decisions)) / options.epochs


def work(options: argparse.Namespace) -> None:
    """What each process does: the runs in turn; the first process reports them."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    meter = Meter()
    if "WORLD_SIZE" in os.environ:
        meter.listen()
    decide = loop.decide

    def measured(strategies: Any, *args: Any, **more: Any) -> Any:
        if not strategies:
            return decide(strategies, *args, **more)
        with meter.decision():
            return decide(strategies, *args, **more)

    loop.decide = measured
    for kind in MODELS:
        epochs: dict[str, list[float]] = {"none": [], "aswa": []}
        meter.decisions.clear()
        meter.evaluations.clear()
        for round_ in range(-1, options.repeats):  # the first one warms up
            for name, strategies in (("none", {}), ("aswa", ("aswa",))):
                seconds = train(kind, strategies, options, meter)
                if round_ >= 0:
                    epochs[name].append(seconds)
        # The first decision of a run takes the running weights as they are.
        later = [d for i, d in enumerate(meter.decisions) if i % options.epochs and i >= options.epochs]
        parameters = sum(p.numel() for p in Network(kind).parameters())
        found[kind] = {"parameters": parameters, "epochs": epochs, "decisions": later}
        found[kind]["evaluations"] = list(meter.evaluations)
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(found))


def start(processes: int, arguments: list[str]) -> dict[str, Any]:
    """Runs this program with `--worker` on so many processes; returns what the first one measured."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    if processes > 1:
        # This process holds the store, as a launcher does, on a port that the system chooses.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(processes)}
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    running = []
    for rank in range(processes):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
        command = [sys.executable, __file__, "--worker", *arguments]
        running.append(subprocess.Popen(command, env=environment | own, stdout=subprocess.PIPE, text=True))
    printed = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        sys.exit(f"A process of {processes} failed; see its message above.")
    return json.loads(printed[0].splitlines()[-1])


def summary(measured: dict[str, Any]) -> dict[str, float]:
    """The medians of one model on one number of processes, in milliseconds and bytes."""
    decisions = measured["decisions"]
    values = {f"epoch {name}": median(seconds) for name, seconds in measured["epochs"].items()}
    values["evaluate"] = median(measured["evaluations"])
    values["decide"] = median(d["seconds"] for d in decisions)
    values["own"] = median(d["seconds"] - d["evaluation"] for d in decisions)
    found = {name: 1e3 * seconds for name, seconds in values.items()}
    found["x evaluate"] = found["decide"] / found["evaluate"]
    found["own share"] = found["own"] / (found["epoch none"] + found["evaluate"])
    return found | {"bytes": median(d["bytes"] for d in decisions)}


def table(results: dict[int, dict[str, Any]]) -> str:
    heads = ("epoch none", "epoch aswa", "evaluate", "decide", "x evaluate", "own", "own share", "bytes")
    lines = [f"{'model':12}{'processes':>10}" + "".join(f"{head:>12}" for head in heads)]
    for kind in MODELS:
        for processes, measured in results.items():
            values = summary(measured[kind])
            numbers = [f"{values[head]:>12.2f}" for head in heads[:6]]
            numbers += [f"{100 * values['own share']:>11.1f}%", f"{values['bytes']:>12,.0f}"]
            lines.append(f"{kind:12}{processes:>10}" + "".join(numbers))
    return "\n".join(lines)


def statements(results: dict[int, dict[str, Any]]) -> list[str]:
    """The measurements in words."""
    lines = []
    for kind in MODELS:
        for processes, measured in results.items():
            values = summary(measured[kind])
            lines.append(
                f"{kind}, {measured[kind]['parameters']:,} weights, {processes} process(es): a decision takes "
                f"{values['x evaluate']:.2f} evaluations and carries {values['bytes']:,.0f} bytes"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=positive, nargs="+", default=[1, 2], metavar="N")
    parser.add_argument("--epochs", type=positive, default=6, help="of every run (6)")
    parser.add_argument("--batches", type=positive, default=30, help="of 64 examples in an epoch (30)")
    parser.add_argument("--repeats", type=positive, default=3, help="runs of each kind (3)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write every single measurement to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.epochs < 2 or options.batches < 2:
        parser.error("--epochs and --batches must be at least 2: the first decision of a run is not measured")
    if options.worker:
        with closing_process_group():
            work(options)
        return
    header = {
        "torch": torch.__version__,
        "threads": "1 per process",
        "CPU": f"{cpu_name()} ({os.cpu_count()} cores)",
        "load before": round(os.getloadavg()[0], 2),
        "batches": f"{options.batches} of 64 to train, {options.batches // 2} of 128 to evaluate",
    }
    print(", ".join(f"{key} {value}" for key, value in header.items()))
    passed = ["--epochs", str(options.epochs), "--batches", str(options.batches), "--repeats", str(options.repeats)]
    results = {processes: start(processes, passed) for processes in options.processes}
    print(table(results), LEGEND, *(f"  {line}" for line in statements(results)), sep="\n")
    if options.json:
        report = {"header": header, "processes": results, "statements": statements(results)}
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
