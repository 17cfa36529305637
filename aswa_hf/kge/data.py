"""Knowledge graphs through `datasets`: the built-in countries, folders of triples, datasets on the Hub."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from datasets import Dataset, DatasetDict
from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from aswa_hf._utils.files import nearest_path, read_json, refuse_mistyped
from aswa_hf._utils.warnings import warn_caller
from aswa_hf.hub_requests import bounded_requests, reason_of_download
from aswa_hf.kge.configuration_kge import KGEConfig
from aswa_hf.kge.labels import LABEL_FILES, labeled, read_labels
from aswa_hf.kge.reading import COLUMNS, SUFFIXES, Triples, from_table, read_triples, refuse_empty
from aswa_hf.kge.vocab import KGVocab, MappedLabels

__all__ = ["KGVocab", "KnowledgeGraph", "NumberedGraph", "load_kg"]

SPLITS = {"train": ("train",), "validation": ("validation", "valid", "dev", "val"), "test": ("test",)}
DATA_FILES = (".parquet", ".arrow", ".csv", ".tsv", ".txt", ".json", ".jsonl", ".zip", ".gz")
COUNTRIES = {"countries": 1, "countries-s1": 1, "countries-s2": 2, "countries-s3": 3}
ABOUT = "numbered.json"  # in a folder that `number_graph` has written
_NOT_FOUND = (
    f"Found no knowledge graph {{!r}}. Expected a built-in one ({', '.join(COUNTRIES)}), a folder with train, valid "
    f"and test files ({', '.join(SUFFIXES)}), or a dataset on the Hub ({{}})."
)


class KnowledgeGraph(DatasetDict):
    """The splits `train`, `validation` and `test`, with int32 columns `head`, `relation`, `tail`, and their labels.

    `unseen` counts, for validation and test, the entities and relations that do not occur in train, and the triples
    that contain one.
    """

    def __init__(
        self, splits: Mapping[str, Dataset], *, vocab: KGVocab, name: str, unseen: Mapping[str, Any] | None = None
    ):
        super().__init__(splits)
        self.vocab = vocab
        self.name = name
        self.unseen = dict(unseen or {})

    @property
    def num_entities(self) -> int:
        return self.vocab.num_entities

    @property
    def num_relations(self) -> int:
        """The number of relations, without inverses."""
        return self.vocab.num_relations

    def config(self, **options: Any) -> KGEConfig:
        """The configuration of a model for this graph: `kg.config(scorer="keci", dim=64)`."""
        known = [field.name for field in fields(KGEConfig)]
        # KGEConfig itself accepts any name, so that files of other versions load, and ignores it.
        if unknown := [name for name in options if name not in known]:
            nearest = difflib.get_close_matches(unknown[0], known, n=1)
            hint = f"Did you mean {nearest[0]!r}?" if nearest else "See KGEConfig for the available options."
            raise TypeError(f"Unknown option {unknown[0]!r}. {hint}")
        return KGEConfig(num_entities=self.num_entities, num_relations=self.num_relations, **options)

    def triples(self, split: str) -> np.ndarray:
        """The ids of a split as an (n, 3) int64 array: head, relation, tail."""
        # int64 and not the columns' int32: products of ids, which index pairs and triples, stay in range.
        table = self[split].with_format("arrow")[:]
        return np.stack([table[column].to_numpy() for column in COLUMNS], axis=1, dtype=np.int64)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{split} {len(dataset):,}" for split, dataset in self.items())
        return (
            f"KnowledgeGraph({self.name}: {self.num_entities:,} entities, {self.num_relations:,} relations; {sizes})"
        )


@dataclass
class _Numbers:
    """The schema of numbered.json."""

    entities: int
    relations: int
    splits: dict[str, int]


class MappedTriples:
    """Triples on disk: `triples[numbers]` and `triples[start:stop]` are (n, 3) arrays, and only they are read."""

    def __init__(self, dataset: Dataset):
        table = dataset.with_format("arrow")[:]
        self.columns = [_mapped(table[column]) for column in COLUMNS]

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, rows: Any) -> np.ndarray:
        return np.stack([column[rows] for column in self.columns], axis=1)


def _mapped(column: Any) -> np.ndarray:
    # One chunk is a view of the file; several would be copied.
    found: np.ndarray = column.chunk(0).to_numpy() if column.num_chunks == 1 else column.to_numpy()
    return found


def _opened(path: Path) -> Dataset:
    """Opens the triples of a numbered graph; raises ValueError if they are damaged."""
    try:
        dataset = Dataset.from_file(str(path))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}. Number the graph again.") from None
    if dataset.column_names != list(COLUMNS):
        raise ValueError(f"{path} is damaged: expected the columns {', '.join(COLUMNS)}. Number the graph again.")
    return dataset


class NumberedGraph(KnowledgeGraph):
    """A graph in a folder that `number_graph` has written; its labels are read when they are first asked for."""

    def __init__(self, folder: Path):
        about = read_json(folder / ABOUT, _Numbers)
        if about["splits"].keys() != SPLITS.keys() or min(about["entities"], about["relations"]) < 1:
            raise ValueError(f"{folder / ABOUT} is damaged: expected entities, relations and {', '.join(SPLITS)}.")
        splits = {split: _opened(folder / f"{split}.arrow") for split in SPLITS}
        DatasetDict.__init__(self, splits)
        self.folder, self.name, self.unseen = folder, folder.resolve().name, {}
        self._sizes = about["entities"], about["relations"]
        for split, expected in about["splits"].items():
            if len(self[split]) != expected:
                raise ValueError(
                    f"{folder / split}.arrow has {len(self[split]):,} triples, expected {expected:,}: it is damaged. "
                    "Number the graph again."
                )

    @property
    def num_entities(self) -> int:
        return int(self._sizes[0])

    @property
    def num_relations(self) -> int:
        return int(self._sizes[1])

    @cached_property
    def vocab(self) -> KGVocab:  # type: ignore[override]
        """The labels; those of the entities stay on disk."""
        labels = self.labels("entities")
        if len(labels) != self.num_entities:
            raise ValueError(
                f"{self.folder / 'entities.arrow'} has {len(labels):,} labels, expected {self.num_entities:,}: it is "
                "damaged. Number the graph again."
            )
        return KGVocab(MappedLabels(labels), self.labels("relations").to_pylist())

    def labels(self, what: str) -> Any:
        """The labels of "entities" or "relations" by id, as a memory-mapped Arrow array."""
        with pa.memory_map(str(self.folder / f"{what}.arrow")) as source:
            return pa.ipc.open_stream(source).read_all()["label"]

    def mapped(self, split: str) -> MappedTriples:
        """The ids of a split without reading them into memory."""
        return MappedTriples(self[split])


def load_kg(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> KnowledgeGraph:
    """A knowledge graph: a built-in one by its name, a folder of train/valid/test files, or a dataset on the Hub.

        kg = load_kg("countries")                 # also countries-s1, countries-s2, countries-s3
        kg = load_kg("data/UMLS")                 # train, valid, test as .txt .tsv .csv .nt .parquet, also .gz
        kg = load_kg("data/numbered")             # of number_graph, which is memory-mapped
        kg = load_kg("user/dataset", revision=…)  # three columns of text: head, relation, tail

    Entities and relations are numbered as they first occur in train, then validation, then test. Repeated triples,
    and triples of validation or test that are also in train, are kept, with a warning. A folder or dataset may have
    readable labels beside its triples: entities.json and relations.json (identifier → label) or two-column .tsv files.
    """
    path = Path(name_or_path).expanduser()
    if isinstance(name_or_path, str) and name_or_path.lower() in COUNTRIES:
        return _number(_countries(COUNTRIES[name_or_path.lower()]), name_or_path.lower())
    if path.is_file():
        raise ValueError(f"{path} is a file. Expected the folder that holds the train, valid and test files.")
    nearest = difflib.get_close_matches(os.fspath(name_or_path).lower(), COUNTRIES, n=1, cutoff=0.8)
    if nearest and not path.is_dir():
        raise ValueError(f"There is no graph {os.fspath(name_or_path)!r}. Did you mean {nearest[0]!r}?")
    if not os.fspath(name_or_path) or (not path.is_dir() and (path.is_absolute() or len(path.parts) > 2)):
        # This cannot be a name on the Hub; a request, repeated five times, would only take time.
        raise ValueError(_NOT_FOUND.format(str(name_or_path), "there is no such folder") + nearest_path(path))
    refuse_mistyped(path, owner=False)
    if os.path.lexists(path / ABOUT):  # also if damaged: otherwise the ids would be read as labels
        return NumberedGraph(path)
    if path.is_dir() and any(_split_files(path).values()):
        files = {split: read_triples(file) for split, file in split_files(path).items()}
        return _number(files, path.resolve().name, read_labels(path))
    if path.is_dir():
        if not path.resolve().name or not _may_be_dataset(path):
            raise ValueError(_NOT_FOUND.format(str(name_or_path), f"the folder {path} has no such files"))
        return _number(_dataset(str(path), revision, cache_dir), path.resolve().name, read_labels(path))
    splits = _dataset(str(name_or_path), revision, cache_dir)
    return _number(splits, str(name_or_path), _labels_on_hub(str(name_or_path), revision, cache_dir))


def _countries(task: int) -> dict[str, Triples]:
    """The Countries tasks of Bouchard et al. (2015): in which region does a country of validation or test lie?

    S1 hides this fact itself, S2 also the country's subregion, S3 also the regions of its neighbors.
    """
    text = files("aswa_hf.kge").joinpath("countries.tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines()[1:]]
    hidden = {country for country, _, _, split, _ in rows if split != "train"}
    near = {other for country, *_, neighbors in rows if country in hidden for other in neighbors.split()}
    facts: dict[str, list[tuple[str, str, str]]] = {split: [] for split in SPLITS}
    facts["train"] += sorted({(subregion, "locatedin", region) for _, subregion, region, *_ in rows})
    for country, subregion, region, split, neighbors in rows:
        if task < 2 or country not in hidden:
            facts["train"].append((country, "locatedin", subregion))
        if country in hidden or task < 3 or country not in near:
            facts[split].append((country, "locatedin", region))
        facts["train"] += [(country, "neighbor", other) for other in neighbors.split()]
    return {
        split: from_table(pa.table(dict(zip(COLUMNS, zip(*triples, strict=True), strict=True))), split)
        for split, triples in facts.items()
    }


def _split_files(folder: Path) -> dict[str, list[Path]]:
    """The files of each split in a folder, found by their names."""
    found: dict[str, list[Path]] = {split: [] for split in SPLITS}
    for file in sorted(folder.iterdir()):
        stem, dot, suffix = file.name.lower().removesuffix(".gz").partition(".")
        for split, names in SPLITS.items():
            if stem in names and dot + suffix in SUFFIXES and file.is_file():
                found[split].append(file)
    return found


def _may_be_dataset(folder: Path) -> bool:
    """Whether a folder has data files where `datasets` looks for them; a search of all folders below may take long."""
    names = {alias for aliases in SPLITS.values() for alias in aliases} | {"data"}
    places = [folder, *(place for place in folder.iterdir() if place.name.lower() in names and place.is_dir())]
    files = [file for place in places for file in place.iterdir() if file.is_file()]
    return any(file.name.lower().endswith(DATA_FILES) for file in files)


def split_files(folder: Path) -> dict[str, Path]:
    """The file of each split in a folder; raises if there is none, or several."""
    found = _split_files(folder)
    for split, paths in found.items():
        if not paths:
            raise FileNotFoundError(
                f"{folder} has no file for the {split} split. Expected {' or '.join(SPLITS[split])} with the suffix "
                f"{', '.join(SUFFIXES)}, optionally with .gz; it contains "
                f"{', '.join(sorted(path.name for path in folder.iterdir()))}."
            )
        if len(paths) > 1:
            raise ValueError(
                f"{folder} has several files for the {split} split: {', '.join(path.name for path in paths)}. "
                "Keep one."
            )
    return {split: path for split, (path,) in found.items()}


def _dataset(name: str, revision: str | None, cache_dir: str | os.PathLike[str] | None) -> dict[str, Triples]:
    """The splits of a dataset on the Hub, or of a folder that is laid out like one."""
    try:
        with bounded_requests() as unanswered:
            loaded = datasets.load_dataset(name, revision=revision, cache_dir=cache_dir and str(cache_dir))
    except Exception as error:  # many kinds of errors, depending on the files
        raise ValueError(_NOT_FOUND.format(name, reason_of_download(error, unanswered))) from error
    found = {}
    for split, names in SPLITS.items():
        chosen = next((alias for alias in names if alias in loaded), None)
        if chosen is None:
            raise ValueError(
                f"The dataset {name} has the splits {', '.join(loaded)}, but none for {split}. Expected one named "
                f"{' or '.join(names)}."
            )
        table = from_table(loaded[chosen].with_format("arrow")[:], f"{name}, split {chosen}")
        found[split] = refuse_empty(table)
    return found


def _labels_on_hub(
    name: str, revision: str | None, cache_dir: str | os.PathLike[str] | None
) -> dict[str, dict[str, str]]:
    """The labels in a dataset on the Hub, or in the cache; a warning if it is not known whether there are any."""
    place: dict[str, Any] = {"repo_type": "dataset", "revision": revision}
    place["cache_dir"] = None if cache_dir is None else str(cache_dir)
    folder = None
    for file in LABEL_FILES:
        try:
            with bounded_requests() as unanswered:
                path = hf_hub_download(name, file, local_files_only=datasets.config.HF_HUB_OFFLINE, **place)
        except EntryNotFoundError as error:
            local = isinstance(error, LocalEntryNotFoundError)
            if not local or try_to_load_from_cache(name, file, **place) is _CACHED_NO_EXIST:
                continue
            reason = unanswered[-1] if unanswered else error.__cause__ or error
            warn_caller(f"Identifiers of {name} are shown without labels, which could not be looked up: {reason}")
            break
        folder = Path(path).parent
    try:
        return read_labels(folder) if folder is not None else {}
    except ValueError as error:  # a file of the dataset's owner, perhaps for something else
        warn_caller(f"Identifiers of {name} are shown without labels: {error}")
        return {}


def _number(
    splits: Mapping[str, Triples], name: str, labels: Mapping[str, Mapping[str, str]] | None = None
) -> KnowledgeGraph:
    """Replaces the identifiers of the data with ids, and warns about suspicious triples."""
    parts = splits.values()
    relation_labels, relations = _encode([part.relations for part in parts])
    entity_labels, codes = _encode([part.heads for part in parts] + [part.tails for part in parts])
    ends = codes.reshape(2, -1)
    # These codes number all heads before all tails; ids number the head and the tail of each triple in turn.
    first = np.empty(len(entity_labels), dtype=np.int64)
    in_order = ends.T.ravel()
    first[in_order[::-1]] = np.arange(len(in_order))[::-1]  # of repeated indices, the last assignment wins
    order = np.argsort(first)
    ids = np.empty(len(order), dtype=np.int32)
    ids[order] = np.arange(len(order), dtype=np.int32)

    vocab = labeled(entity_labels.take(pa.array(order)).to_pylist(), relation_labels.to_pylist(), labels or {})
    triples = np.stack([ids[ends[0]], relations, ids[ends[1]]])
    borders = np.cumsum([len(part) for part in parts])[:-1]
    by_split = dict(zip(splits, np.split(triples, borders, axis=1), strict=True))
    _report_repetitions(splits, by_split, vocab)
    data = {
        split: Dataset(pa.table(dict(zip(COLUMNS, map(pa.array, columns), strict=True))))
        for split, columns in by_split.items()
    }
    return KnowledgeGraph(data, vocab=vocab, name=name, unseen=_unseen(by_split, vocab, name))


def _encode(columns: list[Any]) -> tuple[Any, np.ndarray]:
    """The distinct labels of some columns in order of their first occurrence, and the position of each label there."""
    chunks = [chunk for column in columns for chunk in getattr(column, "chunks", [column])]
    encoded = pa.chunked_array(chunks, type=pa.string()).dictionary_encode().unify_dictionaries()
    codes = np.concatenate([chunk.indices.to_numpy() for chunk in encoded.chunks])
    return encoded.chunk(0).dictionary, codes.astype(np.int32, copy=False)


def _report_repetitions(splits: Mapping[str, Triples], ids: Mapping[str, np.ndarray], vocab: KGVocab) -> None:
    """Warns about triples that are repeated in a split, and about triples that are in two splits."""
    heads, relations, tails = np.concatenate(list(ids.values()), axis=1).astype(np.int64)
    queries = heads * vocab.num_relations + relations
    if vocab.num_entities**2 * vocab.num_relations >= 2**63:
        queries = np.unique(queries, return_inverse=True)[1]
    keys = queries * vocab.num_entities + tails
    keys_of = dict(zip(ids, np.split(keys, np.cumsum([part.shape[1] for part in ids.values()])[:-1]), strict=True))

    def label(split: str, row: int) -> str:
        head, relation, tail = ids[split][:, row]
        return f"({vocab.entities[head]}, {vocab.relations[relation]}, {vocab.entities[tail]})"

    for split, own in keys_of.items():
        again = _repeated(own)
        if len(again):
            warn_caller(
                f"{split} contains {len(again):,} repetitions of earlier triples, the first at "
                f"{splits[split].where(again[0])}: {label(split, again[0])}. They are kept, but ranked "
                "once; remove them if they are not intended."
            )
    for known, split in (("train", "validation"), ("train", "test"), ("validation", "test")):
        leaked = np.flatnonzero(_among(keys_of[split], keys_of[known]))
        if len(leaked):
            warn_caller(
                f"{len(leaked):,} of the {len(keys_of[split]):,} triples of {split} are also in {known}, the first at "
                f"{splits[split].where(leaked[0])}: {label(split, leaked[0])}. They are kept and make the scores of "
                f"{split} too high; remove them from one of the two splits."
            )


def _repeated(keys: np.ndarray) -> np.ndarray:
    """The indices, in ascending order, of keys that occurred before."""
    # Not np.unique, whose hash table takes a hundred times as long as a sort of 64-bit keys.
    if not (np.diff(np.sort(keys)) == 0).any():
        return np.empty(0, dtype=np.int64)
    order = np.argsort(keys, kind="stable")
    return np.sort(order[1:][np.diff(keys[order]) == 0])


def _among(keys: np.ndarray, known: np.ndarray) -> np.ndarray:
    known = np.sort(known)
    found: np.ndarray = known[np.searchsorted(known, keys).clip(max=len(known) - 1)] == keys
    return found


def _unseen(ids: Mapping[str, np.ndarray], vocab: KGVocab, name: str) -> dict[str, dict[str, int]]:
    """How many entities and relations of validation and test are not in train, and how many triples contain one."""
    heads, relations, tails = ids["train"]
    new_entity, new_relation = np.ones(vocab.num_entities, dtype=bool), np.ones(vocab.num_relations, dtype=bool)
    new_entity[heads] = new_entity[tails] = new_relation[relations] = False
    unseen = {}
    for split in ("validation", "test"):
        heads, relations, tails = ids[split]
        unseen[split] = {
            "entities": len(np.unique(np.concatenate([heads[new_entity[heads]], tails[new_entity[tails]]]))),
            "relations": len(np.unique(relations[new_relation[relations]])),
            "triples": int((new_entity[heads] | new_relation[relations] | new_entity[tails]).sum()),
        }
    if any(counts["triples"] for counts in unseen.values()):
        found = "; ".join(
            f"{split}: {counts['entities']:,} entities and {counts['relations']:,} relations in {counts['triples']:,} "
            "triples"
            for split, counts in unseen.items()
        )
        warn_caller(
            f"{name} contains labels that do not occur in train ({found}). They are kept, but train has no facts "
            "about them."
        )
    return unseen
