"""`EntityShard`: the rows of the entity table that one process holds, and what processes exchange about them.

All processes work on the same batch. What they exchange depends on the batch (B queries of d numbers), never on the
number of entities.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from aswa_hf._utils.distributed import rank, world_size
from aswa_hf._utils.sharding import RowSharded

# Rows that are initialized at a time, each block with its own seed: any number of processes has the same table.
BLOCK = 1 << 16


class EntityShard(RowSharded):
    """In place of an `nn.Embedding` of all entities: looks up any entity, but holds only the rows of this process.

    With `sparse=True` the gradient of a lookup is sparse, and an optimizer such as `RowwiseAdagrad` changes only the
    rows that were looked up.
    """

    def __init__(self, num_entities: int, dim: int, *, sparse: bool = False, **kind: Any):
        super().__init__(num_entities)
        self.weight = nn.Parameter(torch.empty(self.stop - self.start, dim, **kind))
        self.num_embeddings, self.embedding_dim = num_entities, dim
        self.sparse = sparse

    def forward(self, ids: Tensor) -> Tensor:
        """The embeddings of entities, on every process: one all-reduce of as many numbers."""
        embeddings: Tensor = _Lookup.apply(self.weight, ids, self)
        return embeddings

    def own(self, rows: Tensor, ids: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        """Returns the pairs (row, id) whose entity is on this process, with the position in `weight` as id."""
        here = (ids >= self.start) & (ids < self.stop)
        return (rows[here], ids[here] - self.start, *(tensor[here] for tensor in more))

    @property
    def is_first(self) -> bool:
        return self.start == 0

    def softmax_(self, logits: Tensor) -> Tensor:
        """Turns local logits into softmax over all entities, in place; returns log Σ exp of each row.

        Two all-reduces of a number per row: the maximum and the sum.
        """
        maximum = over_shards(logits.amax(1), dist.ReduceOp.MAX)
        logits.sub_(maximum.unsqueeze(1)).exp_()
        # A sum over few numbers that are at most 1: float32 at least.
        total = over_shards(logits.sum(1, dtype=torch.promote_types(logits.dtype, torch.float32)))
        logits.div_(total.unsqueeze(1))
        return total.log() + maximum

    def gather_columns(self, local: Tensor) -> Tensor:
        """(B, |E|) on every process, from the columns of the entities that each holds."""
        if world_size() == 1:
            return local
        padded = local.new_zeros(len(local), self.largest)
        padded[:, : local.shape[1]] = local
        parts = [torch.empty_like(padded) for _ in range(world_size())]
        dist.all_gather(parts, padded)
        return torch.cat(parts, dim=1)[:, : self.num_rows]

    def merge_best(self, values: Tensor, places: Tensor, k: int, *, largest: bool) -> tuple[Tensor, Tensor]:
        """The `k` best values of each row over all shards and their entities, from the best of each shard, sorted.

        Among equal values, those of lower shards come first. Sends k numbers and ids per row.
        """
        missing = k - values.shape[1]
        worst = -torch.inf if largest else torch.inf
        values = nn.functional.pad(values, (0, missing), value=worst).contiguous()
        ids = nn.functional.pad(places + self.start, (0, missing), value=-1).contiguous()
        if world_size() > 1:
            gathered = []
            for tensor in (values, ids):
                parts = [torch.empty_like(tensor) for _ in range(world_size())]
                dist.all_gather(parts, tensor)
                gathered.append(torch.cat(parts, dim=1))
            values, ids = gathered
        values, order = values.sort(dim=1, descending=largest, stable=True)
        return values[:, :k], ids.gather(1, order)[:, :k]

    def take_columns(self, local: Tensor, ids: list[int]) -> Tensor:
        """Returns columns of (B, |E|) on every process; `local` are the columns of this process's entities."""
        wanted = torch.tensor(ids, device=local.device)
        columns, places = self.own(torch.arange(len(ids), device=local.device), wanted)
        found = local.new_zeros(len(local), len(ids))
        found[:, columns] = local[:, places]
        return over_shards(found)

    @torch.no_grad()
    def fill(self, initializer: str, scale: float, seed: int) -> None:
        """Initializes the rows as `KGEConfig` says; the whole table does not depend on the number of processes.

        `scale` is the range of "normal" (its standard deviation) and "uniform"; Xavier's follows from the shape.
        """
        gaussian = initializer.endswith("normal")
        if initializer.startswith("xavier"):
            scale = ((2 if gaussian else 6) / (self.num_rows + self.embedding_dim)) ** 0.5
        for first in range(self.start - self.start % BLOCK, self.stop, BLOCK):
            # A stream for each block; a seed of its own for each would be near to those of other runs.
            generator = torch.Generator().manual_seed((seed << 32) + first // BLOCK)
            rows = torch.empty(min(BLOCK, self.num_rows - first), self.embedding_dim)
            if gaussian:
                rows.normal_(0, scale, generator=generator)
            else:
                rows.uniform_(-scale, scale, generator=generator)
            low, high = max(first, self.start), min(first + len(rows), self.stop)
            self.weight[low - self.start : high - self.start] = rows[low - first : high - first].to(self.weight)

    def extra_repr(self) -> str:
        return f"rows {self.start}:{self.stop} of {self.num_rows}, {self.embedding_dim}"


class _Lookup(torch.autograd.Function):
    """Rows of the table on every process; each keeps the gradient of its own.

    The gradient is the same on every process, since all of them compute the same from the rows.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, shard: EntityShard) -> Tensor:
        flat = ids.reshape(-1)
        places, rows = shard.own(torch.arange(len(flat), device=flat.device), flat)
        found = weight.new_zeros(len(flat), weight.shape[1])
        found[places] = weight[rows]
        ctx.save_for_backward(places, rows)
        ctx.shape, ctx.sparse = weight.shape, shard.sparse
        return over_shards(found).view(*ids.shape, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        places, rows = ctx.saved_tensors
        own = grad.reshape(-1, ctx.shape[1])[places]
        if ctx.sparse:
            return torch.sparse_coo_tensor(rows.unsqueeze(0), own, ctx.shape, check_invariants=False), None, None
        return own.new_zeros(ctx.shape).index_add_(0, rows, own), None, None


class SumOfGradients(torch.autograd.Function):
    """x itself; its gradient is the sum of those that the processes have computed, each with its own rows."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return over_shards(grad.clone())


class SumOfParts(torch.autograd.Function):
    """The sum of x over all processes; each has the gradient of its own part."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return over_shards(x.clone())

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad


def over_shards(tensor: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
    """The sum of a tensor over all processes, in place."""
    tensor = tensor.contiguous()
    if world_size() > 1:
        dist.all_reduce(tensor, op=operation)
    return tensor


def refuse_differences(numbers: dict[str, int], device: torch.device, advice: str) -> None:
    """Raises ValueError on every process if these numbers are not the same on all of them.

    Collectives of different sizes would hang, and those of different data would return wrong results.
    """
    if world_size() == 1:
        return
    own = torch.tensor(list(numbers.values()), dtype=torch.int64, device=device)
    bounds = torch.cat([own, -own])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    largest, smallest = bounds.view(2, -1).tolist()
    for name, high, low in zip(numbers, largest, smallest, strict=True):
        if high != -low:
            raise ValueError(
                f"The processes differ in {name}: {-low} to {high}, and {numbers[name]} on rank {rank()}. {advice}"
            )
