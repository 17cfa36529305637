"""Models sharded by `fully_shard` (FSDP2): every process holds some rows of each parameter, and averages these.

Between two uses of the model the rows are what counts. While a module is gathered for a forward pass, its parameters
are other tensors, which stay in use until the module is resharded: reshard before changing weights.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from aswa_hf._utils.distributed import is_distributed


def reshard(model: nn.Module) -> bool:
    """Frees gathered parameters, so that the local rows are used; returns whether the model is sharded."""
    sharded = False
    if _may_be_sharded():
        kind = sys.modules["torch.distributed.fsdp"].FSDPModule
        for module in model.modules():
            if isinstance(module, kind):
                module.reshard()
                sharded = True
    return sharded


def is_sharded(model: nn.Module) -> bool:
    """Whether any part of the model is sharded by `fully_shard`; then saving and evaluating take all processes."""
    if not _may_be_sharded():
        return False
    kind = sys.modules["torch.distributed.fsdp"].FSDPModule
    return any(isinstance(module, kind) for module in model.modules())


def _may_be_sharded() -> bool:
    # Importing FSDP takes most of a second, and who has not imported it has sharded nothing.
    return "torch.distributed.fsdp" in sys.modules and is_distributed()


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
    if not _may_be_sharded():
        return tensors
    return {name: tensor.to_local() if is_dtensor(tensor) else tensor for name, tensor in tensors.items()}  # type: ignore[attr-defined]


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
        if hasattr(parameter, "ds_id"):
            raise ValueError(f"Parameter {name!r} is split by DeepSpeed ZeRO-3, which is not supported. {advice}")
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
