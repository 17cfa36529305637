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

# Of a large table, at least this many queries share one pass over it.
FEWEST_QUERIES = 128


def queries_at_a_time(shard: EntityShard) -> int:
    """The number of queries that are ranked together by default."""
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
    width = max(1, min(len(table), _scores_at_a_time(table) // len(queries)))
    starts = range(0, len(table), width)
    rows, places = pairs(target_offsets, targets, device)
    known_rows, known_places = shard.own(*pairs(known_offsets, known, device))
    known_places, order = known_places.sort()
    known_rows = known_rows[order]
    borders = torch.tensor([*starts, len(table)], device=device)
    bounds = torch.searchsorted(known_places, borders).tolist()

    def scores_from(start: int) -> Tensor:
        return queries @ table[start : start + width].T

    # The targets' own scores come from the same products as those they are compared with.
    own = queries.new_zeros(len(rows))
    numbers, own_places, own_rows = shard.own(torch.arange(len(rows), device=device), places, rows)
    scores = queries.new_empty(0)
    for start in starts:
        inside = (own_places >= start) & (own_places < start + width)
        if len(starts) == 1 or inside.any():
            scores = scores_from(start)
            own[numbers[inside]] = scores[own_rows[inside], own_places[inside] - start]
    own = over_shards(own).unsqueeze(1)

    signs = torch.zeros(len(rows), dtype=torch.int64, device=device)
    broken = torch.zeros(len(queries), dtype=torch.bool, device=device)
    one_each = len(rows) == len(queries)
    for start, first, last in zip(starts, bounds, bounds[1:], strict=False):
        if len(starts) > 1:
            scores = scores_from(start)
        # Nothing compares greater than NaN: without this, a model that has diverged would look perfect.
        broken |= ~scores.sum(1, dtype=EXACT).isfinite()
        scores[known_rows[first:last], known_places[first:last] - start] = -torch.inf
        for some in torch.arange(len(rows), device=device).split(len(queries)):
            compared = scores if one_each else scores.index_select(0, rows[some])
            # Σ sign = g − (n − g − e) for n candidates, so that 1 + g + e/2 = 1 + (n + Σ sign)/2.
            found = torch.sub(compared, own[some]).sign_().sum(1, dtype=EXACT)
            signs[some] += found.nan_to_num_().long()
    counts = over_shards(torch.cat([signs, broken.long()]))
    ranks = 1 + (shard.num_rows + counts[: len(rows)].double()) / 2
    return ranks.masked_fill_(counts[len(rows) :][rows] > 0, torch.nan)


def pairs(offsets: np.ndarray, ids: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """The query of each id, and the ids."""
    rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    return torch.from_numpy(rows).to(device), torch.from_numpy(ids).to(device)


def _scores_at_a_time(table: Tensor) -> int:
    return SCORES_ON_CPU if table.device.type == "cpu" else SCORES_ON_DEVICE
