"""Filtered ranks of sharded entities: each process counts among its own, and the counts are summed.

A rank is 1 + g + e/2, for g candidates with a greater and e with an equal score. Of each triple the processes exchange
the score of its target and one integer, g minus the number of lower ones; the ranks are those of one process.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from aswa_hf.kge.graph import TailsByQuery
from aswa_hf.kge.ranking import EXACT, SCORES_ON_CPU, SCORES_ON_DEVICE
from aswa_hf.kge.sharded.table import EntityShard, over_shards, refuse_differences

if TYPE_CHECKING:
    from aswa_hf.kge.data import KnowledgeGraph

# If the table is scored in blocks: the number of queries scored at a time, and per pass over the table.
FEWEST_QUERIES = 128
QUERIES_PER_PASS = 4096


def queries_at_a_time(shard: EntityShard) -> int:
    """The number of queries that are ranked together by default."""
    together = _queries_per_block(shard)
    return together if together * shard.largest <= _scores_at_a_time(shard.weight) else QUERIES_PER_PASS


def _queries_per_block(shard: EntityShard) -> int:
    return max(FEWEST_QUERIES, _scores_at_a_time(shard.weight) // shard.largest)


def refuse_other_graph(shard: EntityShard, kg: KnowledgeGraph, split: str, *queries: TailsByQuery) -> None:
    """Raises ValueError on every process if one would rank other triples, or filter by others."""
    cache = kg.__dict__["_ranking"].setdefault("checksums", {})
    if split not in cache:
        arrays = [array for one in queries for array in (one.heads, one.relations, one.offsets, one.tails)]
        cache[split] = {f"the number of triples to rank in {split!r}": len(queries[0].tails)}
        cache[split][f"the triples of the graph, seen from {split!r}"] = _checksum(arrays)
    advice = "All processes must load the same graph: compare the files that each of them reads."
    refuse_differences(cache[split], shard.weight.device, advice)


def _checksum(arrays: list[np.ndarray]) -> int:
    found = 0
    for array in arrays:
        found = zlib.crc32(np.ascontiguousarray(array).data, found)
    return found


def ranks_on_shards(
    shard: EntityShard,
    queries: Tensor,
    targets: np.ndarray,
    target_offsets: np.ndarray,
    known: np.ndarray,
    known_offsets: np.ndarray,
) -> Tensor:
    """The rank of each target among the entities that are not other known answers of its query, on every process."""
    table, device = shard.weight, shard.weight.device
    height = min(len(queries), _queries_per_block(shard))
    width = max(1, min(len(table), _scores_at_a_time(table) // height))
    starts = range(0, len(table), width)
    groups = [slice(first, min(first + height, len(queries))) for first in range(0, len(queries), height)]
    rows, places = pairs(target_offsets, targets, device)
    known_rows, known_places = shard.own(*pairs(known_offsets, known, device))
    filtered = _Filter(known_rows, known_places, groups, [*starts, len(table)])
    buffer = torch.empty(height * width, dtype=queries.dtype, device=device)

    def scores_of(group: slice, start: int) -> Tensor:
        some, block = queries[group], table[start : start + width]
        return torch.mm(some, block.T, out=buffer[: len(some) * len(block)].view(len(some), len(block)))

    # The targets' own scores come from the same products as those they are compared with.
    own = queries.new_zeros(len(rows))
    numbers, own_places, own_rows = shard.own(torch.arange(len(rows), device=device), places, rows)
    asked = (own_rows // height) * len(starts) + own_places // width
    scores = queries.new_empty(0)
    for product in asked.unique().tolist():
        inside = asked == product
        group, start = groups[product // len(starts)], starts[product % len(starts)]
        scores = scores_of(group, start)
        own[numbers[inside]] = scores[own_rows[inside] - group.start, own_places[inside] - start]
    own = over_shards(own).unsqueeze(1)

    signs = torch.zeros(len(rows), dtype=torch.int64, device=device)
    broken = torch.zeros(len(queries), dtype=torch.bool, device=device)
    for number, start in enumerate(starts):  # once through the table, for all queries
        for group, targeted in zip(groups, _targets_of(groups, target_offsets), strict=True):
            scores = scores_of(group, start)
            # Nothing compares greater than NaN: without this, a model that has diverged would look perfect.
            broken[group] |= ~scores.sum(1, dtype=EXACT).isfinite()
            filtered.apply_(scores, group, number, start)
            one_each = targeted.stop - targeted.start == len(scores)
            for first in range(targeted.start, targeted.stop, len(scores)):
                some = slice(first, min(first + len(scores), targeted.stop))
                compared = scores if one_each else scores.index_select(0, rows[some] - group.start)
                # Σ sign = g − (n − g − e) for n candidates, so that 1 + g + e/2 = 1 + (n + Σ sign)/2.
                found = compared.sub_(own[some]).sign_().sum(1, dtype=EXACT)
                signs[some] += found.nan_to_num_().long()
    counts = over_shards(torch.cat([signs, broken.long()]))
    ranks = 1 + (shard.num_rows + counts[: len(rows)].double()) / 2
    return ranks.masked_fill_(counts[len(rows) :][rows] > 0, torch.nan)


class _Filter:
    """The known answers among the entities here, by block of entities and, within it, by query."""

    def __init__(self, rows: Tensor, places: Tensor, groups: list[slice], borders: list[int]):
        ends = torch.tensor(borders, device=places.device)
        blocks = torch.searchsorted(ends, places, right=True) - 1
        order = torch.argsort(blocks * (groups[-1].stop + 1) + rows)
        self.rows, self.places, self.blocks = rows[order], places[order], blocks[order]
        of_block = torch.arange(len(borders) - 1, device=places.device).unsqueeze(1) * (groups[-1].stop + 1)
        firsts = torch.tensor([group.start for group in groups] + [groups[-1].stop], device=places.device)
        self.bounds = torch.searchsorted(self.blocks * (groups[-1].stop + 1) + self.rows, of_block + firsts).tolist()
        self.numbers = {group.start: number for number, group in enumerate(groups)}

    def apply_(self, scores: Tensor, group: slice, block: int, start: int) -> None:
        """Sets the scores of known answers to −∞."""
        bounds, number = self.bounds[block], self.numbers[group.start]
        some = slice(bounds[number], bounds[number + 1])
        scores[self.rows[some] - group.start, self.places[some] - start] = -torch.inf


def _targets_of(groups: list[slice], offsets: np.ndarray) -> list[slice]:
    """The targets of each group of queries."""
    return [slice(int(offsets[group.start]), int(offsets[group.stop])) for group in groups]


def pairs(offsets: np.ndarray, ids: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """The query of each id, and the ids."""
    rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    return torch.from_numpy(rows).to(device), torch.from_numpy(ids).to(device)


def _scores_at_a_time(table: Tensor) -> int:
    return SCORES_ON_CPU if table.device.type == "cpu" else SCORES_ON_DEVICE
