"""Triples as index arrays: all tails of a query (head, relation) side by side, without Python loops."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


def with_inverses(triples: np.ndarray, num_relations: int) -> np.ndarray:
    """The triples (h, r, t), followed by (t, r + num_relations, h): heads are then predicted as tails."""
    heads, relations, tails = triples.T
    return np.concatenate([triples, np.stack([tails, relations + num_relations, heads], axis=1)])


@dataclass(frozen=True)
class TailsByQuery:
    """Sparse rows: `tails[offsets[i]:offsets[i + 1]]` are the tails of the query (heads[i], relations[i])."""

    heads: np.ndarray
    relations: np.ndarray
    offsets: np.ndarray
    tails: np.ndarray

    @classmethod
    def of(cls, triples: np.ndarray) -> TailsByQuery:
        """The distinct triples, grouped by head and relation; queries and their tails in ascending order."""
        heads, relations, tails = (triples[:, column].astype(np.int64) for column in range(3))
        if len(triples) == 0:
            return cls(heads, relations, np.zeros(1, dtype=np.int64), tails)
        width, depth = int(np.max(relations)) + 1, int(np.max(tails)) + 1
        if (int(np.max(heads)) + 1) * width * depth >= 2**63:
            return cls._of_large(heads, relations, tails)
        keys = np.sort((heads * width + relations) * depth + tails)  # np.unique takes a hundred times as long
        keys = keys[np.diff(keys, prepend=-1) != 0]
        queries, tails = keys // depth, keys % depth
        first = np.flatnonzero(np.diff(queries, prepend=-1))
        return cls(queries[first] // width, queries[first] % width, np.append(first, len(keys)), tails)

    @classmethod
    def _of_large(cls, heads: np.ndarray, relations: np.ndarray, tails: np.ndarray) -> TailsByQuery:
        """The same if the number of possible triples is too large to number them."""
        order = np.lexsort((tails, relations, heads))
        heads, relations, tails = heads[order], relations[order], tails[order]
        other = (np.diff(heads, prepend=-1) != 0) | (np.diff(relations, prepend=-1) != 0)
        kept = other | (np.diff(tails, prepend=-1) != 0)
        first = np.flatnonzero(other[kept])
        heads, relations, tails = heads[kept], relations[kept], tails[kept]
        return cls(heads[first], relations[first], np.append(first, len(tails)), tails)

    def __len__(self) -> int:
        return len(self.heads)

    def take(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The concatenated tails of several queries, and their offsets."""
        starts = self.offsets[rows]
        counts = self.offsets[rows + 1] - starts
        offsets = np.concatenate([[0], np.cumsum(counts)])
        positions = np.repeat(starts - offsets[:-1], counts) + np.arange(offsets[-1])
        return self.tails[positions], offsets

    def find(self, heads: np.ndarray, relations: np.ndarray) -> np.ndarray:
        """The rows of the given queries, all of which must be present."""
        width = int(max(self.relations.max(initial=0), relations.max(initial=0))) + 1
        rows: np.ndarray = np.searchsorted(self.heads * width + self.relations, heads * width + relations)
        return rows
