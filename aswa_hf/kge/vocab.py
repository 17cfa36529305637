"""The labels of a knowledge graph: their ids, their files, and suggestions for a misspelled label."""

from __future__ import annotations

import difflib
import json
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from transformers import FeatureExtractionMixin
from transformers.utils import cached_file

from aswa_hf._utils.files import read_json, replacing, write_text

FILES = {"entities": "entities.json", "relations": "relations.json"}
_AT_A_TIME = 1 << 20  # labels on disk
_NEAREST_AMONG = 1 << 20  # labels on disk that an unknown one is compared with
KEYS = "keys.json"  # the identifiers of the data, if they are not the labels


class MappedLabels(Sequence[str]):
    """The labels of a memory-mapped Arrow column, all distinct: a list of text that takes no memory.

    Looking labels up by their text reads all of them, once for any number of them.
    """

    def __init__(self, column: Any):
        self.column = column

    def __len__(self) -> int:
        return len(self.column)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return [self[i] for i in range(start, stop, step)]
            some: list[str] = self.column.slice(start, max(0, stop - start)).to_pylist()
            return some
        try:
            label: str = self.column[operator.index(index)].as_py()
        except IndexError:
            raise IndexError(f"There is no label {index}: there are {len(self):,}.") from None
        return label

    def take(self, ids: np.ndarray) -> np.ndarray:
        """The labels of many ids, as an array of text."""
        unique, places = np.unique(ids, return_inverse=True)
        found = np.array([self[i] for i in unique.tolist()], dtype=object)
        return found[places.reshape(-1)].reshape(np.shape(ids))

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _AT_A_TIME):
            yield from self[start : start + _AT_A_TIME]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MappedLabels):
            return bool(self.column.equals(other.column))
        if not isinstance(other, list):
            return NotImplemented
        return len(self) == len(other) and all(map(str.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __contains__(self, label: object) -> bool:
        return isinstance(label, str) and self.find([label])[0] >= 0

    def find(self, labels: Any) -> np.ndarray:
        """The positions of labels, −1 for unknown ones, in one pass over all labels."""
        wanted = labels if isinstance(labels, (pa.Array, pa.ChunkedArray)) else pa.array(labels, pa.string())
        wanted = wanted.cast(pa.string())
        if isinstance(wanted, pa.ChunkedArray):
            wanted = wanted.combine_chunks()
        encoded = wanted.dictionary_encode()
        positions = np.full(len(encoded.dictionary), -1, dtype=np.int64)
        start = 0
        for chunk in self.column.chunks if len(positions) else ():
            for first in range(0, len(chunk), _AT_A_TIME):
                some = chunk.slice(first, _AT_A_TIME)
                found = pc.index_in(some, value_set=encoded.dictionary)
                if found.null_count < len(found):
                    here = np.flatnonzero(found.is_valid().to_numpy(zero_copy_only=False))
                    positions[found.take(pa.array(here)).to_numpy()] = start + first + here
            start += len(chunk)
        codes = encoded.indices.fill_null(0).to_numpy() if len(positions) else np.zeros(len(wanted), dtype=np.int64)
        result = positions[codes] if len(positions) else np.full(len(wanted), -1, dtype=np.int64)
        result[wanted.is_null().to_numpy(zero_copy_only=False)] = -1
        return result


class KGVocab(FeatureExtractionMixin):
    """Labels ↔ ids: `entities[i]` is the label of entity i. A Trainer's `processing_class`, saved with checkpoints.

    `keys` are the identifiers of the data where they are not what readers want to see, such as Q76 of Wikidata:
    `{"entities": […], "relations": […]}`, one for each label. They are accepted wherever labels are.
    """

    model_input_names = ("heads", "relations")

    def __init__(
        self,
        entities: Iterable[str] = (),
        relations: Iterable[str] = (),
        keys: Mapping[str, Iterable[str]] | None = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.entities = entities if isinstance(entities, MappedLabels) else _distinct(entities, "entities")
        self.relations = _distinct(relations, "relations")
        self.keys = {what: _distinct(found, f"{what} (keys)") for what, found in (keys or {}).items()}
        for what, found in self.keys.items():
            if what not in FILES or len(found) != len(getattr(self, what)):
                raise ValueError(f"There must be one key for each label of entities or relations, got {len(found)}.")

    def same_as(self, other: KGVocab) -> bool:
        """Whether both give the same entities and relations the same ids; the labels shown may differ."""
        return all(self._identifiers(what) == other._identifiers(what) for what in FILES)

    def _identifiers(self, what: str) -> Sequence[str]:
        found: Sequence[str] = self.keys.get(what) or getattr(self, what)
        return found

    @property
    def num_entities(self) -> int:
        return len(self.entities)

    @property
    def num_relations(self) -> int:
        return len(self.relations)

    def entity_id(self, label: str) -> int:
        """The id of an entity; raises ValueError with the nearest labels if it is unknown."""
        return self._entity_index.one(label)

    def relation_id(self, label: str) -> int:
        """The id of a relation; raises ValueError with the nearest labels if it is unknown."""
        return self._relation_index.one(label)

    def entity_ids(self, labels: Any) -> np.ndarray:
        """The ids of many entities: a list, an Arrow or a numpy array of labels."""
        return self._entity_index.many(labels)

    def relation_ids(self, labels: Any) -> np.ndarray:
        """The ids of many relations: a list, an Arrow or a numpy array of labels."""
        return self._relation_index.many(labels)

    @cached_property
    def _entity_index(self) -> _Index:
        if isinstance(self.entities, MappedLabels):
            return _MappedIndex(self.entities, "entity")
        return _Index(self.entities, "entity", self.keys.get("entities", []))

    @cached_property
    def _relation_index(self) -> _Index:
        return _Index(self.relations, "relation", self.keys.get("relations", []))

    def to_dict(self) -> dict[str, Any]:
        """The content of preprocessor_config.json; the labels are saved in separate files."""
        separate = {"entities", "relations", "keys", "_entity_index", "_relation_index"}
        values = {key: value for key, value in vars(self).items() if key not in separate}
        return values | {"feature_extractor_type": type(self).__name__}

    def to_json_file(self, json_file_path: str | os.PathLike[str]) -> None:
        # Written here, and not after save_pretrained, which ends with the upload of the files.
        for what, file in FILES.items():
            labels = getattr(self, what)
            path = Path(json_file_path).parent / file
            if isinstance(labels, MappedLabels):
                _write_mapped(path, labels)
            else:
                write_text(path, json.dumps(labels, ensure_ascii=False, indent=0) + "\n")
        if self.keys:
            write_text(Path(json_file_path).parent / KEYS, json.dumps(self.keys, ensure_ascii=False, indent=0) + "\n")
        write_text(Path(json_file_path), self.to_json_string())

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any) -> KGVocab:
        """Reads entities.json and relations.json of a folder or a Hub repository (`revision=`, `token=`, …)."""
        entities, relations = (_read(pretrained_model_name_or_path, what, kwargs) for what in FILES)
        path = cached_file(pretrained_model_name_or_path, KEYS, _raise_exceptions_for_missing_entries=False, **kwargs)
        if path is None:
            return cls(entities, relations)
        try:
            return cls(entities, relations, keys=read_json(path, dict[str, list[str]]))
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from None

    def __repr__(self) -> str:
        return f"KGVocab({self.num_entities} entities, {self.num_relations} relations)"


class _Index:
    """Maps labels to positions, one at a time or many at once."""

    def __init__(self, labels: list[str], kind: str, keys: list[str]):
        self.labels, self.kind = labels, kind
        taken = set(labels) if keys else set()
        # A key that is also a label is that label.
        self.names = labels + [key for key in keys if key not in taken]
        self.ids = np.arange(len(labels))
        if keys:
            self.ids = np.append(self.ids, [i for i, key in enumerate(keys) if key not in taken]).astype(np.int64)

    @cached_property
    def positions(self) -> dict[str, int]:
        return dict(zip(self.names, self.ids.tolist(), strict=True))

    @cached_property
    def array(self) -> Any:
        return pa.array(self.names, type=pa.string())

    def one(self, label: str) -> int:
        if not isinstance(label, str):
            raise TypeError(f"The label of a single {self.kind} must be text, got {label!r}.")
        if label not in self.positions:
            raise ValueError(self.unknown(label))
        return self.positions[label]

    def many(self, labels: Any) -> np.ndarray:
        if isinstance(labels, str):
            raise TypeError(f"Expected a list of {self.kind} labels, got the text {labels!r}.")
        try:
            wanted = labels if isinstance(labels, (pa.Array, pa.ChunkedArray)) else pa.array(labels)
            found = pc.index_in(wanted.cast(pa.string()), value_set=self.array)
        except (pa.ArrowException, TypeError) as error:
            raise TypeError(f"Expected a list of {self.kind} labels ({error}).") from None
        if found.null_count:
            label = wanted[pc.index(found.is_null(), True).as_py()].as_py()
            raise ValueError(self.unknown(str(label)))
        ids: np.ndarray = self.ids[found.to_numpy()].astype(np.int64)
        return ids

    def unknown(self, label: str) -> str:
        """The error message for an unknown label, with the nearest ones: `New York` finds `new_york`."""
        simple = {_simplify(known): known for known in reversed(self.names)}
        wanted = _simplify(label)
        near = difflib.get_close_matches(wanted, simple, n=3)
        near = near or [known for known in simple if wanted and wanted in known][:3]
        nearest = [repr(simple[name]) for name in near]
        return f"Unknown {self.kind} {label!r}. " + (
            f"Did you mean {' or '.join(nearest)}?"
            if nearest
            else f"The labels look like {', '.join(map(repr, self.labels[:3]))}."
        )


class _MappedIndex(_Index):
    """The same for labels on disk, without an index of them in memory."""

    def __init__(self, labels: MappedLabels, kind: str):
        self.labels, self.kind = labels, kind  # type: ignore[assignment]

    @property
    def names(self) -> list[str]:  # type: ignore[override]
        return self.labels[:_NEAREST_AMONG]

    def one(self, label: str) -> int:
        if not isinstance(label, str):
            raise TypeError(f"The label of a single {self.kind} must be text, got {label!r}.")
        return int(self.many([label])[0])

    def many(self, labels: Any) -> np.ndarray:
        if isinstance(labels, str):
            raise TypeError(f"Expected a list of {self.kind} labels, got the text {labels!r}.")
        try:
            wanted = labels if isinstance(labels, (pa.Array, pa.ChunkedArray)) else pa.array(labels)
            ids: np.ndarray = self.labels.find(wanted)  # type: ignore[attr-defined]
        except (pa.ArrowException, TypeError) as error:
            raise TypeError(f"Expected a list of {self.kind} labels ({error}).") from None
        if len(ids) and ids.min() < 0:
            raise ValueError(self.unknown(str(wanted[int(np.argmin(ids))].as_py())))
        return ids


def take_labels(labels: Sequence[str], ids: np.ndarray) -> np.ndarray:
    """The labels of an array of ids, as an array of the same shape."""
    if isinstance(labels, MappedLabels):
        return labels.take(ids)
    found = np.array([labels[i] for i in ids.ravel().tolist()], dtype=object)
    return found.reshape(ids.shape)


def _write_mapped(path: Path, labels: MappedLabels) -> None:
    """Writes labels as a JSON list, as `json.dumps` with `indent=0` does, without having all of them in memory."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.write("[\n")
        for number, label in enumerate(labels):
            file.write((",\n" if number else "") + json.dumps(label, ensure_ascii=False))
        file.write("\n]\n")


def _simplify(label: str) -> str:
    return label.casefold().replace(" ", "_")


def _distinct(labels: Iterable[str], what: str) -> list[str]:
    labels = list(labels)
    wrong = next((label for label in labels if not isinstance(label, str)), None)
    if wrong is not None or None in labels:
        raise ValueError(f"The labels of {what} must be text, got {wrong!r}.")
    if len(set(labels)) < len(labels):
        seen: set[str] = set()
        twice = next(label for label in labels if label in seen or seen.add(label))  # type: ignore[func-returns-value]
        raise ValueError(f"The labels of {what} must be distinct, got {twice!r} twice.")
    return labels


def _read(source: str | os.PathLike[str], what: str, options: dict[str, Any]) -> list[str]:
    try:
        path = cached_file(source, FILES[what], **options)
    except OSError as error:
        raise OSError(
            f"Found no {FILES[what]} in {source}. Expected a folder or a Hub repository to which a KGVocab was saved "
            f"with save_pretrained() or push_to_hub(). ({error})"
        ) from error
    labels = read_json(path, list[str])
    try:
        return _distinct(labels, what)
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged: {error} Save the vocabulary again with load_kg(…).vocab.save_pretrained(folder)."
        ) from None
