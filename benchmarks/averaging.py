"""What averaging weights costs in time and memory, beside the machine's limit and the peers, in one run.

    python benchmarks/averaging.py
    python benchmarks/averaging.py --sizes 25M --repeats 50 --threads 1 --cpu-time --json averaging.json

Measured: `WeightAverage.blend`, `EMA.step` and `DenseASWA.step` (an update), a step of all strategies together,
entering and leaving `WeightAverage.lookahead` and `WeightAverage.swapped` (averaged weights in the model, then the
running ones again), on the weights of a transformer: a few matrices and many short vectors. The peers are the updates
of `torch.optim.swa_utils.AveragedModel` and `timm.utils.ModelEmaV3`; the limit is `lerp_` and `copy_` over one flat
tensor of the same size. On a busy machine the figures are not reliable: every tensor of more than 32768
elements waits for all threads. There, one thread and its CPU time are the best that can be measured; other processes
still use caches and memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from itertools import accumulate, product
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch loads: its profiler would write between the tables

import timm
import torch
from timm.utils import ModelEmaV3
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from aswa_hf import EMA, DenseASWA, WeightAverage
from aswa_hf.strategies import STRATEGIES, take_step

AIM_TIMES_LIMIT, AIM_FROM = 1.3, 25_000_000
AIM_COPIES = 2.0
AIM_TOGETHER = 1.2
DECAY = 0.999
WEIGHT = 0.25
LEGEND = """\
x limit   an update: lerp_; a look-ahead: lerp_ + copy_; a swap: 2 copy_
x moved   with the backup that every change in place needs: lerp_ + 2 copy_; 3 copy_
x fresh   the same, the backup in memory never touched before: lerp_ + clone + copy_; 2 copy_ + clone
faulted   memory that a call touched for the first time, by the kernel's count of page faults
peak      the most that was allocated beside the model at any moment
Times are medians, ratios are of medians; memory is in float32 copies of the weights."""

Operation = Callable[[], object]
Limit = tuple[str, ...]
UPDATE: list[Limit] = [("lerp_",)]
LOOKAHEAD: list[Limit] = [("lerp_", "copy_"), ("lerp_", "copy_", "copy_"), ("lerp_", "clone", "copy_")]
SWAP: list[Limit] = [("copy_", "copy_"), ("copy_", "copy_", "copy_"), ("copy_", "copy_", "clone")]


@dataclass
class Row:
    """One measured operation, which `start` returns after building the state it works on."""

    name: str
    start: Callable[[], Operation]
    kind: str = "limit"
    limits: list[Limit] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    faulted: list[int] = field(default_factory=list)
    peak: int = 0


class Block(nn.Module):
    """The weights of one transformer block: 6 matrices, 10 vectors."""

    def __init__(self, width: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.mlp_norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


def build_model(parameters: int) -> nn.Module:
    """About `parameters` weights, an eighth of them in one embedding, the others in 16 tensors per block."""
    depth = max(1, round(8 * (parameters / 1e6) ** 0.2))
    width = max(8, 8 * round((7 / 8 * parameters / (12 * depth)) ** 0.5 / 8))
    blocks = nn.ModuleList(Block(width) for _ in range(depth))
    vocabulary = max(1, round((parameters - sum(p.numel() for p in blocks.parameters())) / width))
    return nn.ModuleDict({"embedding": nn.Embedding(vocabulary, width), "blocks": blocks, "norm": nn.LayerNorm(width)})


def limit_rows(parameters: int, dtype: torch.dtype) -> list[Row]:
    # The average is float32 whatever the model is; backup and restore are in the model's dtype.
    average, snapshot = torch.randn(parameters), torch.randn(parameters)
    running, backup = average.to(dtype), snapshot.to(dtype)
    return [
        Row("lerp_", lambda: lambda: average.lerp_(snapshot, WEIGHT)),
        Row("copy_", lambda: lambda: running.copy_(backup)),
        Row("clone", lambda: lambda: running.clone()),
    ]


def our_rows(model: nn.Module) -> list[Row]:
    def started() -> WeightAverage:
        average = WeightAverage(model)
        average.assign()
        return average

    def blend() -> Operation:
        average = started()
        return lambda: average.blend(WEIGHT)

    def ema_step() -> Operation:
        strategy = EMA(model, decay=DECAY)
        strategy.step()
        return strategy.step

    def dense_step() -> Operation:
        strategy = DenseASWA(model)
        strategy.step()
        return strategy.step

    def lookahead() -> Operation:
        average = started()
        return lambda: enter_and_leave(average.lookahead(WEIGHT))

    def swapped() -> Operation:
        average = started()
        return lambda: enter_and_leave(average.swapped())

    return [
        Row("WeightAverage.blend", blend, "ours", UPDATE),
        Row("EMA.step", ema_step, "ours", UPDATE),
        Row("DenseASWA.step", dense_step, "ours", UPDATE),
        Row("WeightAverage.lookahead, in and out", lookahead, "ours", LOOKAHEAD),
        Row("WeightAverage.swapped, in and out", swapped, "ours", SWAP),
    ]


def together_rows(model: nn.Module) -> list[Row]:
    """A step of all strategies together, and of each one alone; SWA and others that take no steps cost nothing."""
    strategies = [kind(model) for kind in STRATEGIES.values()]
    take_step(strategies)
    averages = len({id(average) for strategy in strategies for average, _ in strategy._after_step()})
    together = Row(
        f"a step of {len(strategies)} strategies, {averages} averages", lambda: lambda: take_step(strategies)
    )
    singles = [Row(f"{type(s).__name__}.step, alone", lambda s=s: s.step) for s in strategies]  # type: ignore[misc]
    together.kind, together.limits = "together", [tuple(row.name for row in singles)]
    for row in singles:
        row.kind = "single"
    return [together, *singles]


def peer_rows(model: nn.Module, dtype: torch.dtype) -> list[Row]:
    def averaged_model() -> Operation:
        peer = AveragedModel(model).float()  # a float32 average, like ours
        peer.update_parameters(model)
        return lambda: peer.update_parameters(model)

    def averaged_model_ema() -> Operation:
        peer = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        peer.update_parameters(model)
        return lambda: peer.update_parameters(model)

    def model_ema() -> Operation:
        peer = ModelEmaV3(model, decay=DECAY)
        return lambda: peer.update(model)

    rows = [
        Row("AveragedModel.update_parameters", averaged_model, "peer", UPDATE),
        Row("AveragedModel, get_ema_multi_avg_fn", averaged_model_ema, "peer", UPDATE),
        Row("timm ModelEmaV3.update", model_ema, "peer", UPDATE),
    ]
    if dtype != torch.float32:
        # These two can only average in the model's dtype, which moves less data and soon stops changing: shown, but
        # not compared with.
        for row in rows[1:]:
            row.name, row.kind = f"{row.name} (bf16 average)", "other"
    return rows


def enter_and_leave(context: AbstractContextManager[None]) -> None:
    with context:
        pass


def measure_time(rows: list[Row], rounds: int, clock: Callable[[], float], progress: tqdm) -> None:
    """Runs every operation once in every round, in a new order each time: load and caches are the same for all."""
    operations = {row.name: row.start() for row in rows}
    order = random.Random(0)
    for round_ in range(-1, rounds):  # round -1 warms up
        for row in order.sample(rows, len(rows)):
            operation = operations[row.name]
            faults = -page_faults()
            start = clock()
            operation()
            seconds = clock() - start
            faults += page_faults()
            if round_ >= 0:
                row.seconds.append(seconds)
                row.faulted.append(faults * resource.getpagesize())
        progress.update(round_ >= 0)


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def peak_memory(start: Callable[[], Operation]) -> int:
    """The most bytes that an operation and the state it works on have allocated at any moment."""
    # torch's allocator reports every block to the profiler, including temporaries inside an operator.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        operation = start()
        operation()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@dataclass
class Table:
    """The measurements of one model, in figures and in words."""

    title: str
    parameters: int
    rows: list[Row]

    def times(self, row: Row, others: Sequence[str], typical: Callable[[list[float]], float] = median) -> float:
        """The time of `row` over the summed time of the rows named in `others`."""
        seconds = {row.name: typical(row.seconds) for row in self.rows}
        return seconds[row.name] / sum(seconds[name] for name in others)

    def copies(self, size: float) -> float:
        return size / (4 * self.parameters)

    def text(self) -> str:
        columns = ("ms", "x limit", "x moved", "x fresh", "faulted", "peak")
        lines = [self.title, " " * 51 + "".join(f"{column:>9}" for column in columns)]
        for row in self.rows:
            cells = [f"{1e3 * median(row.seconds):.2f}"]
            cells += [f"{self.times(row, limit):.2f}" for limit in row.limits if row.kind != "together"]
            cells += [""] * (4 - len(cells))
            cells.append(f"{self.copies(median(row.faulted)):.2f}")
            cells.append(f"{self.copies(row.peak):.2f}" if row.peak else "")
            lines.append(f"{row.name:51}" + "".join(f"{cell:>9}" for cell in cells).rstrip())
        return "\n".join([*lines, *(f"  {statement}" for statement in self.statements())])

    def statements(self) -> list[str]:
        """Compares the measurements with the aims."""
        ours = [row for row in self.rows if row.kind == "ours"]
        peers = [row for row in self.rows if row.kind == "peer"]
        aim = f" (aim {AIM_TIMES_LIMIT}x)" if self.parameters > 0.99 * AIM_FROM else " (no aim at this size)"
        lines = []
        for row in ours:
            found = [f"{self.times(row, limit):.2f}x of {spelled(limit)}" for limit in row.limits]
            found[0] += "" if row.limits == SWAP else aim
            lines.append(f"{row.name}: {', '.join(found)}")
        for row, peer in product([row for row in ours if row.limits == UPDATE], peers):
            fastest = f"{self.times(row, [peer.name], min):.2f}x between the fastest calls"
            lines.append(f"{row.name}: {self.times(row, [peer.name]):.2f}x of {peer.name} (aim 1.0x; {fastest})")
        for row in (row for row in self.rows if row.kind == "together"):
            sums = self.times(row, row.limits[0]), self.times(row, row.limits[0], min)
            averages = int(row.name.split()[-2])
            # Each average is read and written, the weights are read once; a lerp_ moves three numbers.
            traffic = 3 * self.times(row, ["lerp_"]) / (2 * averages + 1)
            lines.append(
                f"{row.name}: {sums[0]:.2f}x of the sum of single steps ({sums[1]:.2f}x between the fastest calls), "
                f"{traffic:.2f}x of the memory traffic at the speed of lerp_ (aim {AIM_TOGETHER}x)"
            )
        peak = self.copies(max(row.peak for row in ours))
        lines.append(f"memory: at most {peak:.2f} extra copies of the weights (aim {AIM_COPIES})")
        return lines

    def as_json(self) -> dict[str, Any]:
        described = asdict(self) | {"statements": self.statements()}
        for row in described["rows"]:
            del row["start"]
        return described


def spelled(limit: Limit) -> str:
    """lerp_, copy_, copy_ → lerp_ + 2 copy_"""
    return " + ".join(name if times == 1 else f"{times} {name}" for name, times in Counter(limit).items())


def run(
    parameters: int, dtype: torch.dtype, rounds: int, progress: tqdm, clock: Callable[[], float] = time.perf_counter
) -> Table:
    torch.manual_seed(0)
    model = build_model(parameters).to(dtype)
    parameters = sum(p.numel() for p in model.parameters())
    title = f"{str(dtype).removeprefix('torch.')} model, {parameters / 1e6:.1f} M parameters"
    progress.set_description(title)
    limits, compared = limit_rows(parameters, dtype), [*our_rows(model), *peer_rows(model, dtype)]
    measure_time([*limits, *compared], rounds, clock, progress)
    for row in compared:
        row.peak = peak_memory(row.start)
    # Afterwards, and not at the same time: the averages of all strategies take the memory of eight models.
    together = together_rows(model)
    measure_time([*limits, *together], rounds, clock, progress)
    rows = [*limits, *compared, *together]
    return Table(f"{title} in {len(list(model.parameters()))} tensors, {rounds} rounds", parameters, rows)


def size(text: str) -> int:
    """25M → 25000000"""
    units = {"K": 10**3, "M": 10**6, "G": 10**9}
    number, unit = (text[:-1], units.get(text[-1].upper(), 0)) if text[-1:].isalpha() else (text, 1)
    try:
        parameters = round(float(number) * unit)
    except (ValueError, OverflowError):
        parameters = 0
    if parameters < 10_000:
        raise argparse.ArgumentTypeError(f"expected a number of parameters like 25M, at least 10K, got {text!r}")
    return parameters


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", type=size, nargs="+", default=[size("1M"), size("25M"), size("100M")])
    parser.add_argument("--repeats", type=positive, default=20, help="rounds (20); ten times as many below 5M")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="measure the CPU time of the process, not the clock's")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write every single measurement to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    header = {
        "torch": torch.__version__,
        "timm": timm.__version__,
        "threads": options.threads,
        "times": "of the CPU" if options.cpu_time else "of the clock",
        "CPU": cpu_name(),
        "load before": round(os.getloadavg()[0], 2),
    }
    print(", ".join(f"{key} {value}" for key, value in header.items()), LEGEND, sep="\n")

    plan = [(n, torch.float32) for n in options.sizes]
    plan += [(n, torch.bfloat16) for n in options.sizes if n >= AIM_FROM]
    rounds = {n: options.repeats * (10 if n < 5_000_000 else 1) for n in options.sizes}
    tables = []
    clock = time.process_time if options.cpu_time else time.perf_counter
    with tqdm(total=2 * sum(rounds[n] for n, _ in plan), unit="round", leave=False, disable=None) as progress:
        for parameters, dtype in plan:
            tables.append(run(parameters, dtype, rounds[parameters], progress, clock))
            progress.write(f"\n{tables[-1].text()}")
    if options.json:
        report = {"header": header, "tables": [table.as_json() for table in tables]}
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
