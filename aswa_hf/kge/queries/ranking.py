"""Evaluation of a link predictor on multi-hop queries: filtered MRR and Hits@k over their hard answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc  # type: ignore[import-untyped]
from datasets import Dataset

from aswa_hf._utils.checks import check_whole_number
from aswa_hf.kge.predict import LinkPredictor
from aswa_hf.kge.queries.answering import DIVERGED, BeamSearch, by_structure, checked_predictor
from aswa_hf.kge.queries.language import Query
from aswa_hf.kge.ranking import Track, filtered_ranks
from aswa_hf.kge.vocab import KGVocab

OTHER = "other"
AVERAGE = "average"
# Lower odds are better. A power of two keeps the sum over all entities finite, and is exact above 1e-29.
ODDS_TO_SCORES = -(2.0**-30)


def evaluate_queries(
    model: LinkPredictor,
    queries: Dataset,
    *,
    beam: int = 10,
    tnorm: str = "product",
    truth: str = "sigmoid",
    batch_size: int | None = None,
    ks: Sequence[int] = (1, 3, 10),
    track: Track = iter,
) -> dict[str, dict[str, float]]:
    """The metrics of each shape, and of all under "average": `{"2p": {"mrr": …, "hits@1": …, …}, …}`.

    `queries` has the columns `query`, `easy` and `hard` of `generate_queries`. The rank of a hard answer leaves out
    all other answers of its query; entities with the same truth value share their mean rank. Metrics are means over
    the hard answers of a query, then over the queries of a shape, then over shapes. `track` iterates over
    the batches it is given and may show progress, as `tqdm.tqdm` does. The other options are those of `answer_query`.
    """
    for k in ks:
        check_whole_number("every k of ks", k)
    predictor = checked_predictor(model)
    if not isinstance(queries, Dataset):
        raise TypeError(
            f"Expected a Dataset as returned by generate_queries or load_queries, got {type(queries).__name__}."
        )
    if missing := {"query", "easy", "hard"} - set(queries.column_names):
        raise ValueError(
            f"Queries need the columns query, easy and hard; {', '.join(sorted(missing))} is missing from "
            f"{', '.join(queries.column_names)}."
        )
    texts = list(queries["query"])
    if not texts:
        raise ValueError("There are no queries to evaluate.")
    parsed = [Query.parse(text) for text in texts]
    easy, hard = (_Answers.of(queries, column, predictor.vocab) for column in ("easy", "hard"))
    if len(without := np.flatnonzero(np.diff(hard.offsets) == 0)):
        raise ValueError(f"The query {texts[without[0]]!r} has no hard answer to rank.")
    search = BeamSearch(predictor.model, beam=beam, tnorm=tnorm, truth=truth, batch_size=batch_size)
    names = ["mrr", *(f"hits@{k}" for k in ks)]
    per_query = np.empty((len(parsed), len(names)))
    with search.evaluating():
        batches = [
            (structure, rows[first : first + search.rows], ids[first : first + search.rows])
            for structure, rows, ids in by_structure(parsed, predictor.vocab)
            for first in range(0, len(rows), search.rows)
        ]
        for structure, some, some_ids in track(batches):
            odds = search.odds(search.tree(structure, some_ids))
            if search.shard is not None:
                search.memory.release(odds)
                odds = search.shard.gather_columns(odds)
            targets, offsets = hard.take(some)
            known = easy.beside(hard, some)
            ranks = filtered_ranks(odds.mul_(ODDS_TO_SCORES), targets, offsets, *known).cpu().numpy()
            search.memory.release(odds)
            if np.isnan(ranks).any():
                raise ValueError(DIVERGED)
            metrics = np.stack([1 / ranks, *(ranks <= k for k in ks)])
            counts = np.diff(offsets)
            per_query[some] = (np.add.reduceat(metrics, offsets[:-1], axis=1) / counts).T
    shapes = np.array([query.shape or OTHER for query in parsed])
    # In the order of their first query.
    found = {shape: per_query[shapes == shape].mean(0) for shape in dict.fromkeys(shapes.tolist())}
    found[AVERAGE] = np.mean(list(found.values()), axis=0)
    return {shape: dict(zip(names, values.tolist(), strict=True)) for shape, values in found.items()}


@dataclass(frozen=True)
class _Answers:
    """The concatenated ids of the answers of all queries; those of query i start at `offsets[i]`."""

    ids: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, queries: Dataset, column: str, vocab: KGVocab) -> _Answers:
        lists = queries.with_format("arrow")[:][column]
        lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
        labels = pc.list_flatten(lists)
        ids = vocab.entity_ids(labels) if len(labels) else np.empty(0, dtype=np.int64)
        return cls(ids, np.concatenate([[0], np.cumsum(lengths)]))

    def take(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        parts = [self.ids[self.offsets[row] : self.offsets[row + 1]] for row in rows]
        return np.concatenate(parts), np.concatenate([[0], np.cumsum([len(part) for part in parts])])

    def beside(self, other: _Answers, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The answers in both, query by query."""
        (mine, my_offsets), (its, its_offsets) = self.take(rows), other.take(rows)
        counts = np.diff(my_offsets), np.diff(its_offsets)
        owner = np.concatenate([np.repeat(np.arange(len(rows)), count) for count in counts])
        order = np.argsort(owner, kind="stable")
        return np.concatenate([mine, its])[order], my_offsets + its_offsets
