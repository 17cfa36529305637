"""Multi-hop queries with their answers: sampled from a graph by walks, and saved as Parquet or JSON.

The answers that follow from the training triples alone are easy. Hard ones need at least one triple of validation or
test, which a link predictor has to predict.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from datasets import Dataset, Features, List, Value, load_dataset

from aswa_hf._utils.checks import check_whole_number
from aswa_hf._utils.files import parse_json, replacing
from aswa_hf._utils.warnings import warn_caller
from aswa_hf.kge.data import KnowledgeGraph
from aswa_hf.kge.graph import TailsByQuery
from aswa_hf.kge.queries.language import Structure, build, label_kinds, shape_structure
from aswa_hf.kge.vocab import take_labels

FEATURES = Features(
    {"shape": Value("string"), "query": Value("string"), "easy": List(Value("string")), "hard": List(Value("string"))}
)
# Truth values of walks in memory at a time, one byte each.
MEMBERS_AT_A_TIME = 1 << 24
WALKS_AT_A_TIME = 1024
# The search ends after this many consecutive batches of walks without a new query.
PATIENCE = 20


def generate_queries(
    kg: KnowledgeGraph,
    shape: str,
    n: int = 500,
    seed: int = 0,
    *,
    easy_splits: Sequence[str] = ("train",),
    max_answers: int = 1000,
) -> Dataset:
    """`n` different queries of a shape, each with a hard answer: columns `shape`, `query`, `easy` and `hard`.

        queries = generate_queries(load_kg("data/UMLS"), "2p")
        Query.parse(queries[0]["query"])

    Every query begins with a triple outside `easy_splits`, drawn at random for one of its atoms, and a random walk
    from there that fills in the others. It is kept if it has an answer in all splits together that it does not have in
    `easy_splits`, at most `max_answers` answers in total, and no two equal branches. The same seed returns the same
    queries; if a graph has fewer than `n`, those found are returned, with a warning. With
    `easy_splits=("train", "validation")`, hard answers are those that need test triples, the convention of other
    published query sets.
    """
    if not isinstance(kg, KnowledgeGraph):
        raise TypeError(f"Expected a graph as returned by load_kg, got {kg!r}.")
    structure = shape_structure(shape)
    easy_splits = (easy_splits,) if isinstance(easy_splits, str) else easy_splits
    for name, value, least in (("n", n, 1), ("max_answers", max_answers, 1), ("seed", seed, 0)):
        check_whole_number(name, value, least)
    if unknown := [split for split in easy_splits if split not in kg]:
        raise ValueError(f"easy_splits contains {unknown[0]!r}. The graph has the splits {', '.join(kg)}.")
    graphs = _Graphs(kg, easy_splits)
    random = np.random.default_rng([seed, *shape.encode()])
    found: dict[Any, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
    failures, walks = 0, 0
    while len(found) < n and failures < PATIENCE and len(graphs.hidden):
        before = len(found)
        rows = graphs.walks(structure, random, WALKS_AT_A_TIME)
        walks += WALKS_AT_A_TIME
        for row, easy, hard in graphs.answered(structure, rows, max_answers):
            key = _canonical(structure, iter(row.tolist()))
            if key is not None and len(found) < n:
                found.setdefault(key, (row, easy, hard))
        failures = failures + 1 if len(found) == before else 0
    if not found:
        reason = f"{walks:,} walks found none" if walks else f"all its triples are in {' and '.join(easy_splits)}"
        raise ValueError(
            f"The graph {kg.name} has no {shape} query with a hard answer ({reason}). Choose another shape or graph."
        )
    if len(found) < n:
        warn_caller(f"Found only {len(found)} {shape} queries with a hard answer in {kg.name}, not {n}.")
    return _dataset(kg, shape, list(found.values()))


def save_queries(queries: Dataset, path: str | os.PathLike[str]) -> None:
    """Writes queries to a .parquet file, or to a .json or .jsonl file with one query per line."""
    path = Path(path)
    kind = _format(path)
    with replacing(path) as temporary, _without_bars():
        if kind == "parquet":
            queries.to_parquet(temporary)
        else:
            queries.to_json(temporary, force_ascii=False)


def load_queries(path: str | os.PathLike[str]) -> Dataset:
    """Reads queries that `save_queries` wrote, or others with the columns `query`, `easy` and `hard`."""
    path = Path(path)
    kind = _format(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file of queries at {path}.")
    try:
        with TemporaryDirectory() as cache, _without_bars():
            if kind == "json":
                loaded = Dataset.from_list(_read_lines(path))
            else:
                loaded = load_dataset(kind, data_files=str(path), split="train", cache_dir=cache, keep_in_memory=True)
            return loaded.cast(Features({name: FEATURES.get(name, of) for name, of in loaded.features.items()}))
    except (datasets.exceptions.DatasetsError, pa.ArrowException, ValueError, TypeError, StopIteration) as error:
        raise ValueError(
            f"{path} does not contain queries with the columns {', '.join(FEATURES)} as {kind} "
            f"({error.__cause__ or error or 'it is empty'})."
        ) from error


@dataclass
class _Line:
    """The schema of a query in a JSON file."""

    query: str
    easy: list[str]
    hard: list[str]
    shape: str | None = None


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The queries of a JSON file: one per line, or a list of them."""
    # Not by `datasets`, whose reader crashes the process if a file is nested deeply.
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        rows: list[dict[str, Any]] = parse_json(text, str(path), list[_Line])
        return rows
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError("it is empty")
    return [parse_json(line, f"{path}, line {number},", _Line) for number, line in lines]


@contextmanager
def _without_bars() -> Iterator[None]:
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _format(path: Path) -> str:
    kinds = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
    if path.suffix not in kinds:
        raise ValueError(f"The file name of queries must end in {', '.join(kinds)}, got {path}.")
    return kinds[path.suffix]


class _Edges:
    """The triples of a graph, for walks from their heads or their tails."""

    def __init__(self, triples: np.ndarray, entities: int):
        self.by_head = triples[np.argsort(triples[:, 0], kind="stable")]
        self.by_tail = triples[np.argsort(triples[:, 2], kind="stable")]
        self.head_offsets = np.searchsorted(self.by_head[:, 0], np.arange(entities + 1))
        self.tail_offsets = np.searchsorted(self.by_tail[:, 2], np.arange(entities + 1))

    def leaving(self, entities: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """A random triple of each entity as head, and whether there is one."""
        return self._drawn(self.by_head, self.head_offsets, entities, random)

    def entering(self, entities: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """A random triple of each entity as tail, and whether there is one."""
        return self._drawn(self.by_tail, self.tail_offsets, entities, random)

    @staticmethod
    def _drawn(
        triples: np.ndarray, offsets: np.ndarray, entities: np.ndarray, random: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        first, last = offsets[entities], offsets[entities + 1]
        drawn = first + (random.random(len(entities)) * (last - first)).astype(np.int64)
        return triples[np.minimum(drawn, len(triples) - 1)], first < last


class _Graphs:
    """A graph for walks and answers: all triples, the easy ones, and the hidden ones, which are all others."""

    def __init__(self, kg: KnowledgeGraph, easy_splits: Sequence[str]):
        self.entities, self.relations = kg.num_entities, kg.num_relations
        everything = np.concatenate([kg.triples(split) for split in kg])
        easy = np.concatenate([np.empty((0, 3), dtype=np.int64), *(kg.triples(split) for split in easy_splits)])
        self.all, self.easy = TailsByQuery.of(everything), TailsByQuery.of(easy)
        keys, known = self._keys(everything), self._keys(easy)
        self.hidden = everything[~np.isin(keys, known)]
        self.edges = _Edges(everything, self.entities)

    def _keys(self, triples: np.ndarray) -> np.ndarray:
        keys: np.ndarray = (triples[:, 0] * self.relations + triples[:, 1]) * self.entities + triples[:, 2]
        return keys

    def walks(self, structure: Structure, random: np.random.Generator, n: int) -> np.ndarray:
        """Queries as rows of ids, with a hidden triple in each; fewer than `n` if walks reach a dead end."""
        atoms = label_kinds(structure).count("relation")
        rows = []
        for atom in range(atoms):
            count = n // atoms + (atom < n % atoms)
            alive = np.ones(count, dtype=bool)
            columns, _ = self._from_hidden(structure, atom, random, alive)
            rows.append(np.stack(columns, axis=1)[alive])
        return random.permutation(np.concatenate(rows))

    def _from_hidden(
        self, node: Structure, atom: int, random: np.random.Generator, alive: np.ndarray
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Columns of ids for a part whose `atom`-th hop is a hidden triple, and the entities it leads to."""
        if node[0] == "p":
            if atom == label_kinds(node).count("relation") - 1:
                heads, relations, targets = self.hidden[random.integers(len(self.hidden), size=len(alive))].T
                return [*self._backwards(node[1], heads, random, alive), relations], targets
            columns, sources = self._from_hidden(node[1], atom, random, alive)
            triples, possible = self.edges.leaving(sources, random)
            alive &= possible
            return [*columns, triples[:, 1]], triples[:, 2]
        counts = [label_kinds(part).count("relation") for part in node[1:]]
        chosen = int(np.searchsorted(np.cumsum(counts), atom, side="right"))
        own, targets = self._from_hidden(node[1 + chosen], atom - sum(counts[:chosen]), random, alive)
        columns = []
        for index, part in enumerate(node[1:]):
            columns += own if index == chosen else self._branch(node[0], part, targets, random, alive)
        return columns, targets

    def _backwards(
        self, node: Structure, targets: np.ndarray, random: np.random.Generator, alive: np.ndarray
    ) -> list[np.ndarray]:
        """Columns of ids for a part that has the targets among its answers."""
        if node == "e":
            return [targets]
        if node[0] != "p":
            columns = self._backwards(node[1], targets, random, alive)
            for part in node[2:]:
                columns += self._branch(node[0], part, targets, random, alive)
            return columns
        triples, possible = self.edges.entering(targets, random)
        alive &= possible
        return [*self._backwards(node[1], triples[:, 0], random, alive), triples[:, 1]]

    def _branch(
        self, kind: str, node: Structure, targets: np.ndarray, random: np.random.Generator, alive: np.ndarray
    ) -> list[np.ndarray]:
        """Columns of ids for a part beside one that has the targets among its answers."""
        if kind == "u":
            # The others need not share an answer with it; half of them do.
            elsewhere = self.edges.by_head[random.integers(len(self.edges.by_head), size=len(targets)), 2]
            targets = np.where(random.random(len(targets)) < 0.5, targets, elsewhere)
        return self._backwards(node, targets, random, alive)

    def answered(
        self, structure: Structure, rows: np.ndarray, max_answers: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """The queries that have a hard answer and at most `max_answers`, each with its easy and hard answers."""
        at_a_time = max(1, MEMBERS_AT_A_TIME // self.entities)
        for first in range(0, len(rows), at_a_time):
            some = rows[first : first + at_a_time]
            everything = members(structure, iter(some.T), self.all, self.entities)
            easy = members(structure, iter(some.T), self.easy, self.entities)
            hard = everything & ~easy
            for row in np.flatnonzero(hard.any(1) & (everything.sum(1) <= max_answers)):
                yield some[row], np.flatnonzero(easy[row]), np.flatnonzero(hard[row])


def members(structure: Structure, columns: Iterator[np.ndarray], graph: TailsByQuery, entities: int) -> np.ndarray:
    """Which entities (B, |E|) are answers of queries according to the triples of a graph."""
    kind, *parts = structure
    if kind != "p":
        found = [members(part, columns, graph, entities) for part in parts]
        combined: np.ndarray = (np.logical_and if kind == "i" else np.logical_or).reduce(found)
        return combined
    if parts[0] == "e":
        heads = next(columns)
        rows: np.ndarray = np.arange(len(heads))
    else:
        rows, heads = np.nonzero(members(parts[0], columns, graph, entities))
    relations = next(columns)
    width = int(max(graph.relations.max(initial=0), relations.max(initial=0))) + 1
    keys, wanted = graph.heads * width + graph.relations, heads * width + relations[rows]
    places = np.minimum(np.searchsorted(keys, wanted), max(0, len(keys) - 1))
    there = keys[places] == wanted if len(keys) else np.zeros(len(wanted), dtype=bool)
    tails, offsets = graph.take(places[there])
    result = np.zeros((len(relations), entities), dtype=bool)
    result[np.repeat(rows[there], np.diff(offsets)), tails] = True
    return result


def _canonical(structure: Structure, ids: Iterator[int]) -> Any:
    """A key that does not depend on the order of a query's branches; None if two branches are equal."""
    if structure == "e":
        return next(ids)
    parts = [_canonical(part, ids) for part in structure[1:]]
    if structure[0] == "p":
        relation = next(ids)
        return None if parts[0] is None else (parts[0], relation)
    distinct = frozenset(parts)
    return None if None in distinct or len(distinct) < len(parts) else (structure[0], distinct)


def _dataset(kg: KnowledgeGraph, shape: str, found: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Dataset:
    structure = shape_structure(shape)
    kinds = label_kinds(structure)
    names = {"entity": kg.vocab.entities, "relation": kg.vocab.relations}
    texts = []
    for row, _, _ in found:
        labels = [(kind, names[kind][i]) for kind, i in zip(kinds, row.tolist(), strict=True)]
        texts.append(str(build(structure, labels)))
    entities = kg.vocab.entities
    columns = {
        "shape": [shape] * len(found),
        "query": texts,
        "easy": [take_labels(entities, easy).tolist() for _, easy, _ in found],
        "hard": [take_labels(entities, hard).tolist() for _, _, hard in found],
    }
    return Dataset.from_dict(columns, features=FEATURES)
