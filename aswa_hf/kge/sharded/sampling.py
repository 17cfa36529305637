"""Sampled training of sharded entities: negatives from the shard of each process, exchanged in one all-to-all.

The triples are arranged by the shards of head and tail, as in BESS (Cattaneo et al., 2022). In a step, process i has b
triples from its own entities to those of every process j. Process j sends it their b tails, together with n entities
drawn from its own shard, which all queries of i share as negatives: W·(b + n) embeddings for each process, in one
balanced all-to-all, and as many gradients back. Nothing depends on the number of entities: gradients are sparse, and
`RowwiseAdagrad` writes only the rows that were used.

    for batch in BalancedBatches(triples, model, per_pair=256, negatives=64):
        loss = model(**batch).loss
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from aswa_hf._utils.checks import check_whole_number
from aswa_hf._utils.distributed import rank, world_size
from aswa_hf.kge.sharded.table import EntityShard, SumOfGradients, over_shards, refuse_differences

Batch = dict[str, Tensor]
Triples = Any  # an (n, 3) array, or the `MappedTriples` of a graph
# Settings of a model that the loss of balanced sampling does not have.
UNSUPPORTED = ("label_smoothing", "regularization", "relation_prediction", "entity_dropout")
# Triples that are looked at together when they are arranged.
CHUNK = 1 << 22


class BalancedBatches:
    """The batches of one process: every triple once in an epoch, in an order that `seed` and the epoch determine.

    `triples` (n, 3) may be memory-mapped; the inverse of each is a triple too. A step has `per_pair` triples for each
    pair of shards. Where a pair has fewer triples than another one, its last steps are padded with weight 0;
    `balance` is the fraction that is not padding: near 1 if entities are numbered in random order.
    """

    _is_accelerate_prepared = True  # each process has its own part already

    def __init__(self, triples: Triples, model: Any, *, per_pair: int = 128, negatives: int = 64, seed: int = 0):
        check_whole_number("per_pair", per_pair)
        check_whole_number("negatives", negatives)
        self.shard: EntityShard = model.entity_embeddings
        self.triples, self.relations = triples, model.config.num_relations
        self.per_pair, self.negatives, self.seed = per_pair, negatives, seed
        self.epoch = 0
        refuse_differences(
            {"the number of triples": len(triples), "the triples": _checksum(triples), "the seed": seed},
            self.shard.weight.device,
            "All processes must load the same graph, and draw with the same seed.",
        )
        self._order: tuple[int, dict[tuple[int, int], np.ndarray]] | None = None
        counts, self._members = self._arranged()
        self.steps = -(-int(counts.max()) // per_pair)
        self.balance = float(counts.sum() / (counts.size * self.steps * per_pair))

    def _arranged(self) -> tuple[np.ndarray, dict[tuple[int, int], np.ndarray]]:
        """The number of triples of every pair of shards; for pairs with this process, which these are.

        Number k + n is the inverse of triple k of n.
        """
        world, own, n = world_size(), rank(), len(self.triples)
        counts = np.zeros((world, world), dtype=np.int64)
        members: dict[tuple[int, int], list[np.ndarray]] = {}
        kind = np.int32 if 2 * n < 2**31 else np.int64
        for start in range(0, n, CHUNK):
            part = self.triples[start : start + CHUNK]
            heads, tails = (part[:, column] // self.shard.largest for column in (0, 2))
            for shift, first, second in ((start, heads, tails), (start + n, tails, heads)):
                counts += np.bincount(first * world + second, minlength=world**2).reshape(world, world)
                for pair in {*((own, j) for j in range(world)), *((j, own) for j in range(world))}:
                    found = np.flatnonzero((first == pair[0]) & (second == pair[1])) + shift
                    members.setdefault(pair, []).append(found.astype(kind))
        return counts, {pair: np.concatenate(parts) for pair, parts in members.items()}

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self.steps):
            yield self[step]

    def __getitem__(self, step: int) -> Batch:
        """Returns the batch of a step of the epoch, the same at every call."""
        if not 0 <= step < self.steps:
            raise IndexError(f"An epoch has {self.steps:,} steps, got step {step}.")
        world, own, device = world_size(), rank(), self.shard.weight.device
        order = self._ordered()
        part = slice(step * self.per_pair, (step + 1) * self.per_pair)
        asked = [self._padded(order[own, j][part]) for j in range(world)]
        sent = [self._padded(order[j, own][part])[2] for j in range(world)]
        # The negatives are drawn by the process that has them.
        draw = np.random.default_rng([self.seed, self.epoch, world, own, step])
        drawn = draw.integers(self.shard.start, self.shard.stop, (world, self.negatives))
        heads, relations, _, weights = (np.concatenate(column) for column in zip(*asked, strict=True))
        arrays = {"heads": heads - self.shard.start, "relations": relations, "weights": weights}
        arrays["sent"] = np.concatenate([np.stack(sent), drawn], axis=1) - self.shard.start
        # Padding has no row in the shard, so any row is used.
        arrays |= {name: arrays[name].clip(min=0) for name in ("heads", "sent")}
        return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}

    def _ordered(self) -> dict[tuple[int, int], np.ndarray]:
        """The triples of each pair of shards in the order of this epoch, the same on both processes."""
        if self._order is None or self._order[0] != self.epoch:
            self._order = None  # before the next one: each has a number for every triple
            self._order = (
                self.epoch,
                {
                    pair: np.random.default_rng([self.seed, self.epoch, *pair]).permutation(members)
                    for pair, members in self._members.items()
                },
            )
        return self._order[1]

    def _padded(self, numbers: np.ndarray) -> tuple[np.ndarray, ...]:
        """Heads, relations and tails of triples, and their weights: `per_pair` of each."""
        n = len(self.triples)
        heads, relations, tails = self.triples[numbers % n].astype(np.int64).T
        inverse = numbers >= n
        columns = (
            np.where(inverse, tails, heads),
            relations + inverse * self.relations,
            np.where(inverse, heads, tails),
        )
        missing = self.per_pair - len(numbers)
        weights = np.ones(len(numbers), dtype=np.float32)
        return tuple(np.pad(column, (0, missing)) for column in (*columns, weights))


def sampled_loss(model: Any, heads: Tensor, relations: Tensor, sent: Tensor, weights: Tensor) -> Tensor:
    """The mean cross-entropy over all triples of a step, each tail among the negatives that its process received.

    `heads` are rows of this shard, `sent` (W, b + n) those that the others need of it.
    """
    if model.config.loss != "softmax":
        raise ValueError(f"Balanced sampling needs loss='softmax' in the configuration, got {model.config.loss!r}.")
    if len(list(model.parameters())) > 2:
        raise ValueError(f"Balanced sampling supports scorers of entities and relations alone, not {model.scorer!r}.")
    for name in UNSUPPORTED:
        if value := getattr(model.config, name):
            raise ValueError(f"{name}={value} has no effect in balanced sampling. Set it to 0.")
    shard = model.entity_embeddings
    per_pair = len(heads) // len(sent)
    received: Tensor = _Exchange.apply(shard.weight, sent)
    tails, negatives = received[:, :per_pair].flatten(0, 1), received[:, per_pair:].flatten(0, 1)
    h = model.input_dropout(F.embedding(heads, shard.weight, sparse=True))
    # Each process has other triples: the gradient of a relation is the sum over all of them.
    table = SumOfGradients.apply(model.relation_embeddings.weight)
    r = model.input_dropout(model.relation_dropout(F.embedding(relations, table)))
    queries = model.query_dropout(model.combine(h, r))
    true = (queries * tails).sum(-1)
    scores = torch.cat([true.unsqueeze(1), queries @ negatives.T], dim=1)
    weights = weights.to(scores.dtype)
    part = (weights * (scores.logsumexp(1) - true)).sum()
    total = over_shards(torch.stack([part.detach(), weights.sum()]))
    # Its value is the mean over all processes, its gradient this process's part of that.
    loss: Tensor = part / total[1]
    return loss + (total[0] / total[1] - loss).detach()


class _Exchange(torch.autograd.Function):
    """Rows of this shard to every process, and theirs to this one; gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, sent: Tensor) -> Tensor:
        ctx.save_for_backward(sent)
        ctx.shape = weight.shape
        return _all_to_all(weight[sent])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (sent,) = ctx.saved_tensors
        own = _all_to_all(grad.contiguous()).flatten(0, 1)
        return torch.sparse_coo_tensor(sent.reshape(1, -1), own, ctx.shape, check_invariants=False), None


def _all_to_all(parts: Tensor) -> Tensor:
    """Part j of the result is the part that process j has for this one."""
    if world_size() == 1:
        return parts
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    return received


def _checksum(triples: Triples) -> int:
    found = 0
    for start in range(0, len(triples), CHUNK):
        found = zlib.crc32(np.ascontiguousarray(triples[start : start + CHUNK]).data, found)
    return found
