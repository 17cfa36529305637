"""Sharded models: every process holds some rows of a parameter, and averages these.

Sharded by `fully_shard` (FSDP2), all parameters are split. Between two uses of the model the rows are what counts.
While a module is gathered for a forward pass, its parameters are other tensors, which stay in use until the module is
resharded: reshard before changing weights.

A `RowSharded` module computes with its rows where they are: its `weight` is an ordinary parameter of these rows.
DeepSpeed ZeRO-3 splits flat parameters, whose elements are the rows here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from aswa_hf._utils.distributed import is_distributed, rank, world_size
from aswa_hf._utils.zero import is_partitioned, with_parameter

# Numbers of a file that are read at a time.
_NUMBERS = 1 << 24


class RowSharded(nn.Module):
    """A module that holds some rows of a table of `num_rows` as its `weight`: those that `torch.chunk` assigns to it.

    Without a process group these are all rows.
    """

    weight: nn.Parameter

    def __init__(self, num_rows: int):
        super().__init__()
        self.largest = -(-num_rows // world_size())
        """The number of rows of the largest shard."""
        if num_rows <= (world_size() - 1) * self.largest:
            raise ValueError(
                f"A table of {num_rows:,} rows cannot be sharded over {world_size():,} processes: the last of them "
                f"would have no row. Start at most {-(-num_rows // self.largest):,} processes."
            )
        self.num_rows = num_rows
        self.start = rank() * self.largest
        """The first row that this process holds."""
        self.stop = min(num_rows, self.start + self.largest)
        self.mesh: Any = None

    def whole(self, rows: Tensor | None = None) -> Tensor:
        """The table as a DTensor, of which this process has its rows; `rows` are other numbers for each of them."""
        rows = self.weight.detach() if rows is None else rows
        if not is_distributed():
            return rows
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        if self.mesh is None or self.mesh.device_type != rows.device.type:
            self.mesh = init_device_mesh(rows.device.type, (world_size(),))
        shape = torch.Size((self.num_rows, *rows.shape[1:]))
        stride = rows.contiguous().stride()
        return DTensor.from_local(rows, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def row_sharded(model: nn.Module) -> dict[str, RowSharded]:
    """The modules of a model that hold rows of a table, by the name of their parameter."""
    found = ((path, module) for path, module in model.named_modules() if isinstance(module, RowSharded))
    return {f"{path}.weight" if path else "weight": module for path, module in found}


def undivided(loader: Any) -> Any:
    """Makes a loader that accelerate has prepared yield all of its batches on every process, and returns it."""
    sampler: Any = getattr(loader, "batch_sampler", None)
    if hasattr(sampler, "process_index"):
        sampler.num_processes, sampler.process_index = 1, 0
        sampler.even_batches = False  # otherwise the last batch would be padded with other examples
    return loader


def reshard(model: nn.Module) -> bool:
    """Frees gathered parameters, so that the local rows are used; returns whether FSDP2 shards the model."""
    sharded = False
    if kind := _fsdp_module():
        for module in model.modules():
            if isinstance(module, kind):
                module.reshard()  # type: ignore[operator]
                sharded = True
    return sharded


def is_sharded(model: nn.Module) -> bool:
    """Whether any part of the model is sharded; then saving and evaluating take all processes."""
    kinds = tuple(kind for kind in (_fsdp_module(), RowSharded) if kind is not None)
    if not is_distributed():
        return False
    by_deepspeed = "deepspeed" in sys.modules and any(map(is_partitioned, model.parameters()))
    return by_deepspeed or any(isinstance(module, kinds) for module in model.modules())


def _fsdp_module() -> type | None:
    # Importing FSDP takes most of a second; if nothing has imported it, no model is sharded with it.
    if "torch.distributed.fsdp" not in sys.modules or not is_distributed():
        return None
    kind: type = sys.modules["torch.distributed.fsdp"].FSDPModule
    return kind


def computing_device(model: nn.Module) -> torch.device:
    """The device for batches: sharded weights may be offloaded to CPU memory."""
    parameter: Any = next(model.parameters(), None)
    if parameter is None:
        return torch.device("cpu")
    return torch.device(parameter.device_mesh.device_type) if is_dtensor(parameter) else parameter.device


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, one part of a larger tensor on several processes."""
    return hasattr(tensor, "to_local")


@torch.no_grad()
def local_shards(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The rows that this process holds of each tensor, sharing its memory; a tensor that is not sharded as it is."""
    if "torch.distributed.tensor" not in sys.modules or not is_distributed():
        return tensors
    return {
        name: with_parameter(tensor.to_local(), getattr(tensor, "zero_parameter", None))  # type: ignore[attr-defined]
        if is_dtensor(tensor)
        else tensor
        for name, tensor in tensors.items()
    }


def as_shards(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rows of this process as parts of whole tensors that are sharded as `like`."""
    return {
        name: _as_shard(tensor, like[name]) if is_dtensor(like[name]) else tensor for name, tensor in tensors.items()
    }


def _as_shard(rows: Tensor, like: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def own_rows(tensor: Any) -> slice:
    """Which rows of a sharded tensor this process holds."""
    mesh, (dimension,) = tensor.device_mesh, [i for i, p in enumerate(tensor.placements) if p.is_shard()]
    # As torch.chunk: all of one size but the last ones, which may be shorter or empty.
    start = mesh.get_local_rank(dimension) * -(-tensor.shape[0] // mesh.size(dimension))
    stop = min(start + len(tensor.to_local()), tensor.shape[0])
    return slice(min(start, stop), stop)


def is_first_copy(tensor: Any) -> bool:
    """Whether no process with a lower coordinate holds the same rows (they are repeated in hybrid sharding)."""
    coordinates = tensor.device_mesh.get_coordinate()
    return not any(
        at for at, placement in zip(coordinates, tensor.placements, strict=True) if placement.is_replicate()
    )


def part_for(model: Tensor, saved: Any) -> Tensor:
    """The part of a saved tensor, complete or sharded, that belongs to the local rows of `model`."""
    part: Tensor
    if not is_dtensor(model):
        part = saved.full_tensor() if is_dtensor(saved) else saved[...]
    elif is_dtensor(saved) and (saved.device_mesh, saved.placements) == (model.device_mesh, model.placements):  # type: ignore[attr-defined]
        part = saved.to_local()
    else:
        part = (saved.full_tensor() if is_dtensor(saved) else saved)[own_rows(model)]
    return part


def parts_for(model: Tensor, saved: Any) -> Iterator[tuple[slice, Tensor]]:
    """The part of a saved tensor for `model`, as `part_for` returns it; of a large file some rows at a time.

    Yields which rows these are of the local ones, and the rows.
    """
    if isinstance(saved, Tensor) or len(saved.shape) == 0:
        yield slice(None), part_for(model, saved)
        return
    own = own_rows(model) if is_dtensor(model) else slice(0, saved.shape[0])
    height = max(1, _NUMBERS // max(1, math.prod(saved.shape[1:])))
    for start in range(own.start, max(own.stop, own.start + 1), height):
        stop = min(start + height, own.stop)
        yield slice(start - own.start, stop - own.start), saved[start:stop]


def refuse_unsupported_sharding(model: nn.Module, parameters: Mapping[str, Any]) -> None:
    """Raises for weights that are split in a way other than `fully_shard` does it."""
    advice = "Use FSDP2 (torch.distributed.fsdp.fully_shard, or fsdp_version: 2 in accelerate) or DDP."
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules():
        if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            raise ValueError(f"The model is wrapped in FSDP1 (FullyShardedDataParallel), which flattens it. {advice}")
        if type(module).__module__.partition(".")[0] == "deepspeed":
            raise ValueError(
                f"The model is wrapped in DeepSpeed's {type(module).__name__}, which manages the weights itself. "
                f"{advice}"
            )
    under_fsdp = is_sharded(model)
    for name, parameter in parameters.items():
        if not is_dtensor(parameter):
            continue
        by_rows = [type(p).__name__ == "Shard" and p.is_shard(0) for p in parameter.placements]
        rest = [p for p, by_row in zip(parameter.placements, by_rows, strict=True) if not by_row]
        if not under_fsdp or sum(by_rows) != 1 or not all(p.is_replicate() for p in rest):
            raise ValueError(
                f"Parameter {name!r} is placed as {tuple(parameter.placements)}"
                + ("" if under_fsdp else " in a model that fully_shard() has not been called on")
                + ". Expected whole weights, or rows as fully_shard() splits them: Shard(0), with Replicate() for "
                "hybrid sharding. Tensor parallelism and other shard dimensions are not supported."
            )
