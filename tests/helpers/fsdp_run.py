"""Sharded runs on several gloo processes, started from one process that has imported the libraries already.

`Processes` (the tests' side) starts this file. It reads jobs from its input, one JSON line each, forks as many ranks
as a job asks for, and answers with what each rank returned, its error or the signal that ended it.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # fully_shard imports it, which takes seconds: here and not on every rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from aswa_hf import ASWA, EMA, SWA, BestCheckpoint, DenseASWA, LastCheckpoint
from aswa_hf.strategies import Strategy

POINTS = 5
# The scores of the running model and of the look-ahead at each point: init, soft, hard, soft, reject. Dense ASWA, with
# its snapshot before its look-ahead: init, soft, hard, hard, reject.
SCORES = [(0.5, 0.0), (0.4, 0.6, 0.7), (0.9, 0.1, 0.2), (0.2, 0.95, 0.5), (0.3, 0.3, 0.3)]
SECONDS = 240  # that a rank may take
TOKENS = torch.arange(10).reshape(10, 1) % 5


class Net(nn.Module):
    """Rows that no number of processes divides, a single row, tied and frozen weights, BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.block = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1))
        self.wide = nn.Linear(1, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight
        self.wide.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.wide(self.block(self.embed(tokens[:, 0]))))


def make_net(dtype: torch.dtype = torch.float32, buffers: torch.dtype | None = None) -> Net:
    torch.manual_seed(0)
    net = Net().to(dtype)
    net.block[1]._buffers.update({k: b.to(buffers or dtype) for k, b in net.block[1].named_buffers() if b.ndim})
    return net


def shard(model: nn.Module, compute: torch.dtype | None = None, hybrid: bool = False) -> nn.Module:
    """One unit inside another, as usual; the outer one stays gathered after a forward pass."""
    world = dist.get_world_size()
    shape, names = ((2, world // 2), ("replicate", "shard")) if hybrid else ((world,), ("shard",))
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names)}
    if compute is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=compute, cast_forward_inputs=False)
    fully_shard(model.block, **options)
    return fully_shard(model, **options)


def install(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Puts whole weights into a model, by PyTorch's own means if it is sharded."""
    whole = {}
    for name, tensor in model.state_dict().items():
        sharded = isinstance(tensor, DTensor)
        whole[name] = (
            distribute_tensor(weights[name], tensor.device_mesh, tensor.placements) if sharded else weights[name]
        )
    model.load_state_dict(whole)


def snapshot(point: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The weights that a run has come to at a decision point.

    They are multiples of 1/64, so that halves and quarters of their sums are exact, whatever a rank holds of them.
    """
    torch.manual_seed(500 + point)
    net = Net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_((torch.randn(parameter.shape) * 64 / (1 + 0.5 * point)).round() / 64)
        net.block[1].running_mean.fill_(0.1 * point)
    return {name: tensor.clone() for name, tensor in net.to(dtype).state_dict().items()}


def strategies(model: nn.Module, **options: Any) -> dict[str, Strategy]:
    return {
        "aswa": ASWA(model, **options),
        "dense-aswa": DenseASWA(model, **options),
        "swa": SWA(model, start=1, **options),
        "ema": EMA(model, decay=0.75, **options),
        "best": BestCheckpoint(model),
        "last": LastCheckpoint(model),
    }


def walk(
    model: nn.Module,
    of: dict[str, Strategy],
    points: range,
    *,
    dtype: torch.dtype = torch.float32,
    run: Callable[[nn.Module, Tensor], Tensor] = lambda model, tokens: model(tokens),
) -> dict[str, Any]:
    """Goes through the snapshots with all strategies; every output of the model on the way, in order."""
    outputs: list[Any] = []

    def compute() -> None:
        model.eval()
        with torch.no_grad():
            outputs.append(run(model, TOKENS).tolist())
        model.train()

    def evaluate(scores: Iterator[float]) -> float:
        compute()
        return next(scores)

    restored = True
    for point in points:
        install(model, snapshot(point, dtype))
        running = local_copies(model)
        for strategy in of.values():
            strategy.step()
            strategy.update(partial(evaluate, iter(SCORES[point])))
            restored &= same(local_copies(model), running)
            compute()  # and what is used is what is stored
    return {
        "outputs": outputs,
        "restored": restored,
        "histories": {name: strategy.trajectory.to_json() for name, strategy in of.items()},
    }


def local_copies(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    return {name: (t.to_local() if isinstance(t, DTensor) else t).clone() for name, t in state.items()}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def in_bfloat16(model: nn.Module, tokens: Tensor) -> Tensor:
    return copy.deepcopy(model).bfloat16()(tokens)


def plain_walk(points: range = range(POINTS), **options: Any) -> tuple[dict[str, Any], dict[str, Strategy]]:
    """What one process makes of the same snapshots with all weights to itself."""
    walking = {key: options.pop(key) for key in ("dtype", "run") if key in options}
    model = make_net(walking.get("dtype", torch.float32), options.pop("buffers", None))
    of = strategies(model, **{"batchnorm": "copy", **options})
    return walk(model, of, points, **walking), of


class Processes:
    """Runs functions of the `fsdp_*` modules on freshly forked ranks."""

    def __init__(self) -> None:
        self.server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
            text=True,
            start_new_session=True,
        )

    def run(self, job: str, world: int, folder: Path, *, fails: bool = False, **options: Any) -> list[Any]:
        """What each rank returned; with `fails`, also errors and signals."""
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        print(json.dumps([job, world, str(folder), options]), file=self.server.stdin, flush=True)
        answers = json.loads(self.server.stdout.readline())
        assert fails or all(kind == "result" for kind, _ in answers), "\n".join(str(a) for _, a in answers)
        return answers if fails else [answer for _, answer in answers]

    def close(self) -> None:
        os.killpg(self.server.pid, signal.SIGKILL)
        self.server.communicate()


def serve() -> None:
    for line in sys.stdin:
        job, world, folder, options = json.loads(line)
        module, _, name = job.rpartition(".")
        function = getattr(importlib.import_module(module), name)
        meeting = Path(folder) / f".meeting-{time.monotonic_ns()}"
        ranks = []
        for rank in range(world):
            if (child := os.fork()) == 0:
                work(function, rank, world, Path(folder), meeting, options)
            ranks.append(child)
        ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks]
        print(json.dumps([answer(meeting, rank, status) for rank, status in enumerate(ended)]), flush=True)


def work(function: Callable, rank: int, world: int, folder: Path, meeting: Path, options: dict[str, Any]) -> None:
    """One rank: never returns."""
    signal.alarm(SECONDS)  # ends it
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
        result = ("result", function(folder, **options))
    except BaseException as error:
        result = ("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    Path(f"{meeting}-{rank}").write_text(json.dumps(result))
    os._exit(0)


def answer(meeting: Path, rank: int, status: int) -> tuple[str, Any]:
    written = Path(f"{meeting}-{rank}")
    return json.loads(written.read_text()) if written.exists() else ("signal", -status)


if __name__ == "__main__":
    serve()
