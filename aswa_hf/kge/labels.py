"""Readable labels of entities and relations beside a graph whose triples have identifiers, such as Q76 of Wikidata."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aswa_hf._utils.files import read_json
from aswa_hf._utils.warnings import warn_caller
from aswa_hf.kge.vocab import FILES, KGVocab

LABEL_FILES = [name for what in FILES for name in (FILES[what], f"{what}.tsv")]


def read_labels(folder: Path) -> dict[str, dict[str, str]]:
    """The labels in a folder by identifier, for "entities" and "relations" if there are such files.

    entities.json is an object from identifiers to labels, or to objects with a "label"; entities.tsv has two columns.
    """
    found: dict[str, dict[str, str]] = {}
    for what in FILES:
        path, table = folder / FILES[what], folder / f"{what}.tsv"
        if path.is_file() and table.is_file():
            raise ValueError(f"{folder} has the labels of {what} twice: {path.name} and {table.name}. Keep one.")
        if path.is_file():
            content = read_json(path, dict[str, str | dict[str, Any]])
            found[what] = {key: _label(path, key, value) for key, value in content.items()}
        elif table.is_file():
            found[what] = _read_tsv(table)
    return found


def _label(path: Path, key: str, value: Any) -> str:
    label = value.get("label") if isinstance(value, dict) else value
    if not isinstance(label, str) or not label.strip():
        raise ValueError(f"{path}: the label of {key!r} is {label!r}, expected text.")
    return " ".join(label.split())


def _read_tsv(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, row in enumerate(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE), 1):
                if len(row) != 2 or not row[1].strip() or row[0] in found:
                    expected = "an identifier, a tab and a label, each identifier once"
                    raise ValueError(f"{path}, line {number}: expected {expected}, got {str(row)[:100]}.")
                found[row[0]] = " ".join(row[1].split())
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read: {error}. Expected UTF-8 text of two columns.") from None
    return found


def labeled(entities: list[str], relations: list[str], labels: Mapping[str, Mapping[str, str]]) -> KGVocab:
    """The vocabulary of identifiers in which those that have a label are shown by it."""
    shown, keys = {}, {}
    for what, identifiers in (("entities", entities), ("relations", relations)):
        known = labels.get(what, {})
        if known and known.keys().isdisjoint(identifiers):
            warn_caller(
                f"None of the {len(known):,} labels of {what} has an identifier of the graph, such as "
                f"{identifiers[0]!r}; theirs are like {next(iter(known))!r}."
            )
        wanted = [known.get(identifier, identifier) for identifier in identifiers]
        # A label of several identifiers, or one that is the identifier of another, is ambiguous.
        often = Counter(wanted) + Counter(identifiers)
        shown[what] = [
            label if label == identifier or often[label] == 1 else f"{label} ({identifier})"
            for label, identifier in zip(wanted, identifiers, strict=True)
        ]
        if shown[what] != identifiers:
            keys[what] = identifiers
    return KGVocab(**shown, keys=keys or None)
