"""Several processes: every rank works with rank 0's scores and buffers; no-ops in a single process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def is_distributed() -> bool:
    """Whether `torch.distributed` is initialized, also with one process."""
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """The number of processes; 1 where `torch.distributed` is not initialized."""
    return dist.get_world_size() if is_distributed() else 1


def rank() -> int:
    """The rank of this process; 0 where `torch.distributed` is not initialized."""
    return dist.get_rank() if is_distributed() else 0


def wait_for_all() -> None:
    """A barrier: returns when every rank has reached it."""
    if world_size() > 1:
        dist.barrier()


def agree(value: float, device: torch.device) -> float:
    """Returns rank 0's `value` on every rank, so that all ranks take the same decision."""
    if world_size() == 1:
        return value
    shared = torch.tensor([value], dtype=torch.float64, device="cpu" if device.type == "mps" else device)
    dist.broadcast(shared, src=0)
    return float(shared.item())


def on_every_rank(yes: bool, device: torch.device) -> bool:
    """Whether `yes` is true on all ranks; returns the same on all of them."""
    if world_size() == 1:
        return yes
    votes = torch.tensor([int(yes)], device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes.item())


def in_step(items: Iterable[T], device: torch.device) -> Iterator[T]:
    """Yields `items` as long as every rank has another one: a sharded model must run on all ranks."""
    iterator = iter(items)
    nothing = object()
    while on_every_rank((item := next(iterator, nothing)) is not nothing, device):
        yield item  # type: ignore[misc]


@contextmanager
def succeeding_together(device: torch.device, errors: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Raises on every rank if the block raises one of `errors` on any of them; all have the message of the first."""
    error: Exception | None = None
    try:
        yield
    except errors as caught:
        error = caught
    if not on_every_rank(error is None, device):
        messages: list[str | None] = [None] * world_size()
        if world_size() > 1:
            dist.all_gather_object(messages, None if error is None else str(error))
        raise error or errors[0](next(f"on rank {r}: {m}" for r, m in enumerate(messages) if m is not None))


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
