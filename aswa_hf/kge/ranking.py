"""Filtered ranking of knowledge-graph embeddings: MRR, Hits@k and mean rank over heads and tails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from aswa_hf._utils.checks import check_whole_number
from aswa_hf.kge.graph import TailsByQuery, with_inverses

if TYPE_CHECKING:
    from aswa_hf.kge.data import KnowledgeGraph
    from aswa_hf.kge.modeling_kge import KGEModel

# A function that iterates over batches, and may show progress.
Track = Callable[[Sequence[Any]], Iterable[Any]]
# Scores computed at a time by default: on a CPU, as many as fit into its cache.
SCORES_ON_CPU = 1 << 21
SCORES_ON_DEVICE = 1 << 24
# Scores compared at a time: on a CPU, as many as fit into the cache of a core.
COMPARED_ON_CPU = 1 << 18
# Triples on disk that are looked at together.
TRIPLES = 1 << 20
# The dtype for counting entities: sums in half precision are inexact.
EXACT = torch.float32


def evaluate_link_prediction(
    model: KGEModel,
    kg: KnowledgeGraph,
    split: str = "test",
    batch_size: int | None = None,
    ks: Sequence[int] = (1, 3, 10),
    *,
    track: Track = iter,
) -> dict[str, float]:
    """MRR, Hits@k and mean rank of the triples of a split, each ranked once by its head and once by its tail.

    A candidate that forms another true triple (of any split) is left out of the ranking; candidates with the same
    score share their mean rank. `batch_size` is the number of queries scored at a time and bounds the memory. `track`
    iterates over the batches it is given and may show progress, as `tqdm.tqdm` does.
    """
    if split not in kg:
        raise ValueError(f"There is no split {split!r}. Choose one of {', '.join(kg)}.")
    check_whole_number("batch_size", batch_size, optional=True)
    for k in ks:
        check_whole_number("every k of ks", k)
    sizes = model.config.num_entities, model.config.num_relations
    if sizes != (kg.num_entities, kg.num_relations):
        raise ValueError(
            f"The model has {sizes[0]} entities and {sizes[1]} relations, the graph {kg.num_entities} and "
            f"{kg.num_relations}: evaluate it on the graph it was trained on."
        )
    ranks = rank_triples(model, kg, split, batch_size, track)
    if len(ranks) == 0:
        raise ValueError(f"The split {split!r} has no triples to rank.")
    metrics = {"mrr": (1 / ranks).mean().item()}
    metrics |= {f"hits@{k}": (ranks <= k).double().mean().item() for k in ks}
    return metrics | {"mean_rank": ranks.mean().item()}


@torch.no_grad()
def rank_triples(
    model: KGEModel, kg: KnowledgeGraph, split: str, batch_size: int | None = None, track: Track = iter
) -> Tensor:
    """The filtered ranks of all triples of a split, by tail and by head, in no particular order."""
    queries, known, known_rows = _index(kg, split)
    on_cpu = model.entity_embeddings.weight.device.type == "cpu"
    rows_at_a_time = max(1, (SCORES_ON_CPU if on_cpu else SCORES_ON_DEVICE) // kg.num_entities)
    # A model whose entities are spread over processes ranks where they are.
    on_shards = getattr(model, "filtered_ranks", None)
    if on_shards is not None:
        rows_at_a_time = model.prepare_ranking(kg, split, queries, known)
    rows_at_a_time = batch_size or rows_at_a_time
    training = model.training
    model.eval()
    try:
        ranks = []
        for start in track(range(0, len(queries), rows_at_a_time)):
            rows = np.arange(start, min(start + rows_at_a_time, len(queries)))
            heads, by = queries.heads[rows], queries.relations[rows]
            answers = *queries.take(rows), *known.take(known_rows[rows])
            if on_shards is not None:
                ranks.append(on_shards(*_tensors(model, heads, by), *answers))
            else:
                ranks.append(filtered_ranks(score_answers(model, heads, by, kg.num_relations), *answers))
        return torch.cat(ranks) if ranks else torch.empty(0)
    finally:
        model.train(training)


def _index(kg: KnowledgeGraph, split: str) -> tuple[TailsByQuery, TailsByQuery, np.ndarray]:
    """The queries of a split, those of all splits, and the rows of the former in the latter; cached in the graph.

    Inverse relations are included.
    """
    cache = kg.__dict__.setdefault("_ranking", {})
    version = tuple(kg[name]._fingerprint for name in kg)
    if cache.get("version") != version:
        cache.clear()
        cache.update(version=version, splits={})
    if split not in cache["splits"]:
        queries = TailsByQuery.of(with_inverses(kg.triples(split), kg.num_relations))
        if hasattr(kg, "mapped"):
            known = _answers_on_disk(kg, queries)
        elif (known := cache.get("known")) is None:
            triples = np.concatenate([kg.triples(name) for name in kg])
            known = cache["known"] = TailsByQuery.of(with_inverses(triples, kg.num_relations))
        cache["splits"][split] = queries, known, known.find(queries.heads, queries.relations)
    found: tuple[TailsByQuery, TailsByQuery, np.ndarray] = cache["splits"][split]
    return found


def _answers_on_disk(kg: Any, queries: TailsByQuery) -> TailsByQuery:
    """The answers that a memory-mapped graph has to these queries: only they are kept in memory."""
    width = 2 * kg.num_relations
    wanted = queries.heads * width + queries.relations
    found = []
    for split in kg:
        triples = kg.mapped(split)
        for start in range(0, len(triples), TRIPLES):
            both = with_inverses(triples[start : start + TRIPLES].astype(np.int64), kg.num_relations)
            keys = both[:, 0] * width + both[:, 1]
            found.append(both[wanted[np.searchsorted(wanted, keys).clip(max=len(wanted) - 1)] == keys])
    return TailsByQuery.of(np.concatenate(found))


def filtered_ranks(
    scores: Tensor, targets: np.ndarray, target_offsets: np.ndarray, known: np.ndarray, known_offsets: np.ndarray
) -> Tensor:
    """The rank of each target among the entities that are not other known answers of its query."""
    device = scores.device
    rows = torch.from_numpy(_rows(target_offsets)).to(device)
    own = scores[rows, torch.from_numpy(targets).to(device)].unsqueeze(1)
    # Nothing compares greater than NaN: without this, a model that has diverged would look perfect.
    broken = ~scores.sum(1, dtype=EXACT).isfinite()
    scores[torch.from_numpy(_rows(known_offsets)).to(device), torch.from_numpy(known).to(device)] = -torch.inf
    size = scores.shape[1]
    at_a_time = max(1, COMPARED_ON_CPU // size) if device.type == "cpu" else len(scores)
    difference = scores.new_empty(min(at_a_time, len(rows)), size)
    sums = torch.empty(len(rows), dtype=EXACT, device=device)
    for start in range(0, len(rows), at_a_time):
        some = slice(start, start + at_a_time)
        signs = torch.index_select(scores, 0, rows[some], out=difference[: len(rows[some])]).sub_(own[some]).sign_()
        torch.sum(signs, 1, dtype=EXACT, out=sums[some])
    # With g greater and e equal ones of n, Σ sign = g − (n − g − e), so that 1 + g + e/2 = 1 + (n + Σ sign)/2.
    ranks = 1 + (size + sums.double()) / 2
    return ranks.masked_fill_(broken[rows], torch.nan)


def score_answers(model: KGEModel, heads: np.ndarray, by: np.ndarray, relations: int) -> Tensor:
    """The scores of all entities as answers; a query by an inverse relation asks for heads."""
    if model.config.inverse_relations:
        return model.score_tails(*_tensors(model, heads, by))
    scores = model.entity_embeddings.weight.new_empty(len(heads), model.config.num_entities)
    forward = by < relations
    tails = model.score_tails(*_tensors(model, heads[forward], by[forward]))
    scores[torch.from_numpy(forward)] = tails.to(scores.dtype)  # autocast has its own dtype
    backward = ~forward
    scores[torch.from_numpy(backward)] = model.score_heads(*_tensors(model, by[backward] - relations, heads[backward]))
    return scores


def _tensors(model: KGEModel, *arrays: np.ndarray) -> list[Tensor]:
    device = model.entity_embeddings.weight.device
    return [torch.from_numpy(array).to(device) for array in arrays]


def _rows(offsets: np.ndarray) -> np.ndarray:
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
