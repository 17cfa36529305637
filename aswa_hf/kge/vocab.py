"""The labels of a knowledge graph: their ids, their files, and suggestions for a misspelt label."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from transformers import FeatureExtractionMixin
from transformers.utils import cached_file

from aswa_hf._utils.files import read_json, write_text

FILES = {"entities": "entities.json", "relations": "relations.json"}


class KGVocab(FeatureExtractionMixin):
    """Labels ↔ ids: `entities[i]` is the label of entity i. A Trainer's `processing_class`, saved with checkpoints."""

    model_input_names = ("heads", "relations")

    def __init__(self, entities: Iterable[str] = (), relations: Iterable[str] = (), **kwargs: Any):
        super().__init__(**kwargs)
        self.entities = _distinct(entities, "entities")
        self.relations = _distinct(relations, "relations")

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
        return _Index(self.entities, "entity")

    @cached_property
    def _relation_index(self) -> _Index:
        return _Index(self.relations, "relation")

    def to_dict(self) -> dict[str, Any]:
        """The content of preprocessor_config.json; the labels are saved in separate files."""
        separate = {"entities", "relations", "_entity_index", "_relation_index"}
        values = {key: value for key, value in vars(self).items() if key not in separate}
        return values | {"feature_extractor_type": type(self).__name__}

    def to_json_file(self, json_file_path: str | os.PathLike[str]) -> None:
        # Written here, and not after save_pretrained, which ends with the upload of the files.
        for what, file in FILES.items():
            text = json.dumps(getattr(self, what), ensure_ascii=False, indent=0)
            write_text(Path(json_file_path).parent / file, text + "\n")
        write_text(Path(json_file_path), self.to_json_string())

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any) -> KGVocab:
        """Reads entities.json and relations.json of a folder or a Hub repository (`revision=`, `token=`, …)."""
        return cls(**{what: _read(pretrained_model_name_or_path, what, kwargs) for what in FILES})

    def __repr__(self) -> str:
        return f"KGVocab({self.num_entities} entities, {self.num_relations} relations)"


class _Index:
    """Maps labels to positions, one at a time or many at once."""

    def __init__(self, labels: list[str], kind: str):
        self.labels, self.kind = labels, kind

    @cached_property
    def positions(self) -> dict[str, int]:
        return {label: position for position, label in enumerate(self.labels)}

    @cached_property
    def array(self) -> Any:
        return pa.array(self.labels, type=pa.string())

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
        ids: np.ndarray = found.to_numpy().astype(np.int64)
        return ids

    def unknown(self, label: str) -> str:
        """The error message for an unknown label, with the nearest ones: `New York` finds `new_york`."""
        simple = {_simplify(known): known for known in reversed(self.labels)}
        nearest = [repr(simple[near]) for near in difflib.get_close_matches(_simplify(label), simple, n=3)]
        return f"Unknown {self.kind} {label!r}. " + (
            f"Did you mean {' or '.join(nearest)}?"
            if nearest
            else f"The labels look like {', '.join(map(repr, self.labels[:3]))}."
        )


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
