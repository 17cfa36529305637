"""What the ranks of a sharded run do in the tests; see `fsdp_run.py`. Each returns what its rank saw."""

from __future__ import annotations

import gc
import os
import resource
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp_run import (
    POINTS,
    SCORES,
    TOKENS,
    Net,
    install,
    local_copies,
    make_net,
    same,
    shard,
    snapshot,
    strategies,
    walk,
)
from gathered import whole_weights
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

from aswa_hf import ASWA
from aswa_hf._utils import shard_files
from aswa_hf.checkpoint import load_state, save_state
from aswa_hf.strategies import take_step

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, None: None}


def follow(
    folder: Path,
    first: int = 0,
    last: int = POINTS,
    resume: bool = False,
    save: bool = False,
    dtype: str = "float32",
    compute: str | None = None,
    hybrid: bool = False,
    batchnorm: str = "copy",
) -> dict[str, Any]:
    """All strategies over the snapshots `first` to `last`; rank 0 writes the ensembles to `folder`."""
    # BatchNorm on the CPU wants its statistics in the format it computes in.
    model = make_net(DTYPES[dtype], DTYPES[compute])
    shard(model, DTYPES[compute], hybrid)
    batches = [TOKENS[:6], TOKENS[4:]]
    if batchnorm == "recalibrate":
        batches *= 1 + dist.get_rank()  # ranks need not have the same number
    of = strategies(model, batchnorm=batchnorm, train_batches=batches)
    if resume:
        assert load_state(folder / "state", of)["point"] == first
    report = walk(model, of, range(first, last), dtype=DTYPES[dtype])
    if save:
        save_state(folder / "state", of, point=last - 1)
        save_state(folder / "state", of, point=last)
    average = of["aswa"].average
    report["elements"] = {name: tensor.numel() for name, tensor in average.averaged.items()}
    report["dtypes"] = sorted({str(tensor.dtype) for tensor in average.averaged.values()})
    for name, strategy in of.items():
        strategy.apply()
        report["tied"] = model.head.weight is model.embed.weight
        weights = whole_weights(model)
        if dist.get_rank() == 0:
            save_file({key: tensor.clone() for key, tensor in weights.items()}, folder / f"{name}.safetensors")
        else:
            assert weights == {}
    return report


def train(folder: Path) -> dict[str, Any]:
    """Real training, in double precision: each rank has its part of every batch. Decisions follow `SCORES`."""
    model = make_net(torch.float64)
    world = dist.get_world_size()
    if world > 1:
        shard(model)
    of = strategies(model, train_batches=[TOKENS])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    part = slice(dist.get_rank(), None, world)
    decisions, losses = [], []
    for epoch in range(POINTS):
        model.train()
        model.block[1].eval()  # statistics of a part of a batch would make the runs differ
        for step in range(4):
            tokens = torch.randint(5, (6, 1), generator=torch.Generator().manual_seed(10 * epoch + step))
            loss = nn.functional.cross_entropy(model(tokens[part]), (tokens[part, 0] * (3 + epoch % 2)) % 5)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            take_step(of.values())

        def evaluate(scores: Iterator[float]) -> float:
            model.eval()
            with torch.no_grad():
                losses.append(nn.functional.cross_entropy(model(TOKENS), (TOKENS[:, 0] * 3) % 5).item())
            return next(scores)

        scores = SCORES[epoch]
        decisions.extend(strategy.update(partial(evaluate, iter(scores))).value for strategy in of.values())
    of["aswa"].apply()
    final = {name: tensor.tolist() for name, tensor in whole_weights(model).items()}
    return {"decisions": decisions, "losses": losses, "final": final}


def memory(folder: Path) -> dict[str, int]:
    """Bytes of all tensors in this process beyond those of the sharded model, with the average and while swapped."""
    gc.freeze()  # what was there before is not looked at
    model = fully_shard(nn.Sequential(nn.Linear(24, 36, bias=False), nn.Linear(36, 18, bias=False)))

    def allocated() -> int:
        gc.collect()
        tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
        tensors = [tensor for tensor in tensors if tensor.numel() > 1]  # a score may still be on its way
        tensors = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    before = allocated()
    aswa = ASWA(model)
    aswa.update(lambda: 0.5)
    kept = allocated() - before
    with aswa.swapped():
        swapped = allocated() - before
    return {"kept": kept, "swapped": swapped}


def states(folder: Path) -> dict[str, Any]:
    """What `state_dict()` gives for a sharded model, and what `load_state_dict()` takes."""
    model = shard(make_net())
    aswa = ASWA(model, batchnorm="copy")
    install(model, snapshot(3))
    aswa.update(lambda: 0.5)
    state = aswa.state_dict()
    weight = state["averaged"]["embed.weight"]
    report = {
        "sharded": all(isinstance(tensor, DTensor) for tensor in state["averaged"].values()),
        "whole": torch.equal(weight.full_tensor(), snapshot(3)["embed.weight"]),
        "shape": list(weight.shape),
    }
    whole = {**state, "averaged": {name: tensor.full_tensor() for name, tensor in state["averaged"].items()}}
    plain = ASWA(make_net(), batchnorm="copy")
    plain.load_state_dict(state)
    report["plain model"] = same(plain.average.averaged, whole["averaged"])
    for kind, given in (("sharded", state), ("whole", whole)):
        fresh = ASWA(shard(make_net()), batchnorm="copy")
        fresh.load_state_dict(given)
        report[f"from {kind}"] = same(fresh.average.averaged, aswa.average.averaged)
    try:
        fresh.load_state_dict({**whole, "averaged": {**whole["averaged"], "embed.weight": torch.zeros(3, 4)}})
    except ValueError as error:
        report["error"] = str(error)
    return report


def value_in(folder: Path) -> float:
    """The one value that a saved state consists of."""
    fresh = {"aswa": ASWA(make_net(), batchnorm="copy")}
    value = load_state(folder, fresh)["value"]
    assert all(tensor.eq(value).all() for tensor in fresh["aswa"].average.averaged.values())
    assert fresh["aswa"].score == value
    return value


def lose_a_rank(folder: Path, rank: int, moment: str) -> None:
    """Saves a state, then another, during which a rank ends as SIGKILL ends it."""
    model = shard(make_net())
    of = {"aswa": ASWA(model, batchnorm="copy")}

    def advance(value: float) -> None:
        install(model, {name: torch.full_like(tensor, value) for name, tensor in snapshot(0).items()})
        of["aswa"].update(lambda: -1.0, running_score=value)

    def end(*args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    advance(1.0)
    save_state(folder / "state", of, value=1.0)
    advance(2.0)
    if dist.get_rank() == rank:
        write = shard_files._write
        if moment == "in its file":
            shard_files._write = lambda path, tensors, text: (path.write_bytes(b"half"), end())
        elif moment == "after its file":
            shard_files._write = lambda *args: (write(*args), end())
        elif moment == "before the index counts":
            shard_files.write_text = end
        elif moment == "when the index counts":
            shard_files._write_index = lambda *args, index=shard_files._write_index: (index(*args), end())
    save_state(folder / "state", of, value=2.0)


def run_out_of_space(folder: Path, rank: int) -> dict[str, Any]:
    """A save that cannot be written on one rank, and one that can."""
    model = shard(make_net())
    of = {"aswa": ASWA(model, batchnorm="copy")}
    of["aswa"].update(lambda: 0.5)
    save_state(folder / "state", of, value=1.0)
    dist.barrier()
    files = sorted((folder / "state").iterdir())
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        save_state(folder / "state", of, value=2.0)
        error = ""
    except OSError as caught:
        error = str(caught)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    dist.barrier()
    unchanged = sorted((folder / "state").iterdir()) == files
    loaded = load_state(folder / "state", of)["value"]
    dist.barrier()
    save_state(folder / "state", of, value=3.0)
    return {
        "error": error,
        "unchanged": unchanged,
        "loaded": loaded,
        "then": load_state(folder / "state", of)["value"],
    }


def refuse(folder: Path) -> dict[str, str]:
    """The errors of models that are split in other ways."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))

    def by_columns(name: str, module: nn.Module, mesh: Any) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            placement = [Shard(1) if parameter.ndim > 1 else Replicate()]
            setattr(module, key, nn.Parameter(distribute_tensor(parameter.data, mesh, placement)))

    models = {
        "FSDP1": lambda: FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")),
        "tensor parallel": lambda: distribute_module(nn.Linear(4, 4), mesh, by_columns),
        "columns": lambda: fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda p: Shard(p.ndim - 1)),
    }
    errors = {}
    for name, build in models.items():
        try:
            ASWA(build())
        except ValueError as error:
            errors[name] = str(error)
    return errors


def look_ahead(folder: Path) -> dict[str, Any]:
    """Outputs inside and outside of the look-ahead and of `swapped()`, with the model gathered in between."""
    model = shard(make_net()).eval()
    aswa = ASWA(model, batchnorm="copy")
    outputs: dict[str, Any] = {}
    with torch.no_grad():
        install(model, snapshot(1))
        aswa.update(lambda: 0.5)
        install(model, snapshot(2))
        before = local_copies(model)
        outputs["running"] = model(TOKENS).tolist()
        with aswa.average.lookahead(0.25):
            outputs["look-ahead"] = model(TOKENS).tolist()
        outputs["after the look-ahead"] = model(TOKENS).tolist()
        with aswa.swapped():
            outputs["ensemble"] = model(TOKENS).tolist()
        outputs["after the ensemble"] = model(TOKENS).tolist()
        try:
            with aswa.swapped():
                model(TOKENS)
                raise KeyError
        except KeyError:
            outputs["after an error"] = model(TOKENS).tolist()
        outputs["restored"] = same(local_copies(model), before)
        aswa.apply()
        outputs["applied"] = model(TOKENS).tolist()
    assert isinstance(model, Net)
    return outputs
