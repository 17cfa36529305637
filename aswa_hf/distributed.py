"""Several processes: every rank works with rank 0's scores and buffers. In a single process these do nothing."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist


def world_size() -> int:
    """How many processes train together; 1 where `torch.distributed` is not in use."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def wait_for_all() -> None:
    """Goes on when every rank has come here."""
    if world_size() > 1:
        dist.barrier()


def agree(value: float, device: torch.device) -> float:
    """Rank 0's `value`, on every rank: a decision taken on it is the same everywhere."""
    if world_size() == 1:
        return value
    shared = torch.tensor([value], dtype=torch.float64, device="cpu" if device.type == "mps" else device)
    dist.broadcast(shared, src=0)
    return float(shared.item())


@torch.no_grad()
def broadcast_from_rank_0(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrites `tensors` with rank 0's, in place."""
    if world_size() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, src=0)


@torch.no_grad()
def mean_over_ranks(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrites `tensors` with their mean over all ranks, in place and bit-identical on every rank."""
    tensors = list(tensors)
    if world_size() > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)
            tensor /= world_size()
        # A reduction may add in another order on each rank; the last bits must not differ.
        broadcast_from_rank_0(tensors)
