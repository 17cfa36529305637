"""Multi-hop queries as values and as text: which entities does a chain, an intersection or a union of hops reach?

A query is a path: an entity and the relations to follow from it, each after a comma. Paths are joined by & (and) and
| (or, which binds less tightly), and parentheses around them start a new path. ^ follows a relation backwards.

    france, neighbor, locatedin                       where the neighbors of France lie
    france, neighbor & spain, neighbor                what has a border with both
    (france, neighbor | spain, neighbor), locatedin   where the neighbors of either lie
    europe, ^locatedin                                what lies in Europe

The nine usual shapes also have names, which are followed only by the labels, in the same order:

    2p: france, neighbor, locatedin        2i: france, neighbor, spain, neighbor
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from aswa_hf._utils.names import did_you_mean

# What a query looks like without its labels: "e" for an entity, ("p", source) for a hop, ("i", …) for an intersection
# and ("u", …) for a union.
Structure = Any

_1P: Structure = ("p", "e")
_2P: Structure = ("p", _1P)
SHAPES: dict[str, Structure] = {
    "1p": _1P,
    "2p": _2P,
    "3p": ("p", _2P),
    "2i": ("i", _1P, _1P),
    "3i": ("i", _1P, _1P, _1P),
    "ip": ("p", ("i", _1P, _1P)),
    "pi": ("i", _2P, _1P),
    "2u": ("u", _1P, _1P),
    "up": ("p", ("u", _1P, _1P)),
}
_NAMES = {structure: name for name, structure in SHAPES.items()}

# The limit of hops and parentheses in one text: more than any real query has, and far below Python's recursion limit.
MAX_HOPS = 100


class Query:
    """A set of entities, described by hops from known ones: a `Hop`, an `And` or an `Or`.

    >>> Query.parse("2p: france, neighbor, locatedin") == Hop(Hop("france", "neighbor"), "locatedin")
    True
    """

    @staticmethod
    def parse(text: str) -> Query:
        """Parses the text of a query; the inverse of `str(query)`."""
        if not isinstance(text, str):
            raise TypeError(f"A query is text such as '2p: france, neighbor, locatedin', got {text!r}.")
        return _Parser(text).query()

    @property
    def structure(self) -> Structure:
        """The query without its labels."""
        raise NotImplementedError

    def labels(self) -> Iterator[tuple[str, str]]:
        """The labels from left to right, each as ("entity" | "relation" | "inverse", label)."""
        raise NotImplementedError

    @property
    def shape(self) -> str | None:
        """The name of its shape: "2p", "ip", …; a query of another form has none."""
        return _NAMES.get(self.structure)

    def __and__(self, other: Query) -> And:
        return And(*_members(self, And), *_members(other, And))

    def __or__(self, other: Query) -> Or:
        return Or(*_members(self, Or), *_members(other, Or))

    def __str__(self) -> str:
        if self.shape:
            return f"{self.shape}: " + ", ".join(_quoted(kind, label) for kind, label in self.labels())
        return self._text()

    def _text(self) -> str:
        raise NotImplementedError


@dataclass(frozen=True)
class Hop(Query):
    """The entities that `relation` leads to, from an entity given by its label or from any answer of another query."""

    source: str | Query
    relation: str
    inverse: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.source, (str, Query)) or not isinstance(self.relation, str):
            raise TypeError(
                "A Hop goes from an entity's label or a query along a relation's label, "
                f"got {self.source!r} and {self.relation!r}."
            )

    @property
    def structure(self) -> Structure:
        return "p", "e" if isinstance(self.source, str) else self.source.structure

    def labels(self) -> Iterator[tuple[str, str]]:
        if isinstance(self.source, str):
            yield "entity", self.source
        else:
            yield from self.source.labels()
        yield "inverse" if self.inverse else "relation", self.relation

    def _text(self) -> str:
        if isinstance(self.source, str):
            source = _quoted("entity", self.source)
        else:
            source = self.source._text() if isinstance(self.source, Hop) else f"({self.source._text()})"
        return f"{source}, {_quoted('inverse' if self.inverse else 'relation', self.relation)}"


@dataclass(frozen=True, init=False)
class _Several(Query):
    """A combination of two or more queries."""

    parts: tuple[Query, ...]

    def __init__(self, *parts: Query):
        if len(parts) < 2 or not all(isinstance(part, Query) for part in parts):
            raise TypeError(f"{type(self).__name__} takes two or more queries, got {parts!r}.")
        object.__setattr__(self, "parts", parts)

    @property
    def structure(self) -> Structure:
        return "i" if isinstance(self, And) else "u", *(part.structure for part in self.parts)

    def labels(self) -> Iterator[tuple[str, str]]:
        for part in self.parts:
            yield from part.labels()

    def _text(self) -> str:
        # "&" binds more tightly than "|"; nested parts with the same sign would merge without parentheses.
        bare = Hop if isinstance(self, And) else (Hop, And)
        texts = (part._text() if isinstance(part, bare) else f"({part._text()})" for part in self.parts)
        return (" & " if isinstance(self, And) else " | ").join(texts)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.parts))})"


class And(_Several):
    """The entities that all of several queries reach."""


class Or(_Several):
    """The entities that at least one of several queries reaches."""


def build(structure: Structure, labels: Sequence[tuple[str, str]]) -> Query:
    """The query of a structure with the given labels; the inverse of `Query.structure` and `Query.labels`."""
    query: Query = _build(structure, iter(labels))
    return query


def _build(structure: Structure, labels: Iterator[tuple[str, str]]) -> Any:
    if structure == "e":
        return next(labels)[1]
    parts = [_build(part, labels) for part in structure[1:]]
    if structure[0] == "p":
        kind, relation = next(labels)
        return Hop(parts[0], relation, kind == "inverse")
    return (And if structure[0] == "i" else Or)(*parts)


def label_kinds(structure: Structure) -> list[str]:
    """What the labels of a structure are from left to right: "entity" or "relation"."""
    if structure == "e":
        return ["entity"]
    kinds = [kind for part in structure[1:] for kind in label_kinds(part)]
    return [*kinds, "relation"] if structure[0] == "p" else kinds


def shape_structure(shape: str) -> Structure:
    """The structure of a shape given by its name."""
    if shape not in list(SHAPES):
        raise ValueError(f"Unknown shape {shape!r}. {did_you_mean(shape, SHAPES)}The shapes are {', '.join(SHAPES)}.")
    return SHAPES[shape]


def form(shape: str) -> str:
    """How a query of a shape is written: `2p: entity, relation, relation`."""
    return f"{shape}: {', '.join(label_kinds(SHAPES[shape]))}"


def _members(query: Query, kind: type[_Several]) -> tuple[Query, ...]:
    return query.parts if isinstance(query, kind) else (query,)


# The name of a shape, known or unknown, at the beginning of a text.
_NAME = re.compile(r"\s*(\d*[pinu]+|\d[A-Za-z])\s*:")
_SIGNS = ",&|()"
_LABEL = re.compile(rf"[^{_SIGNS}]+")
_QUOTED = {quote: re.compile(rf"{quote}((?:[^{quote}\\]|\\.)*){quote}", re.DOTALL) for quote in "\"'"}


def _quoted(kind: str, label: str) -> str:
    """A label as it is written in a text, in quotes if it would be ambiguous without."""
    plain = label == label.strip() and label[:1] not in ("", "^", '"', "'")
    if not plain or _NAME.match(label) or any(sign in label for sign in _SIGNS):
        label = '"' + re.sub(r'(["\\])', r"\\\1", label) + '"'
    return "^" + label if kind == "inverse" else label


class _Parser:
    """Parses a text from left to right; every error names the position where it stopped."""

    def __init__(self, text: str):
        self.text, self.at, self.hops = text, 0, 0

    def query(self) -> Query:
        name = _NAME.match(self.text)
        if name is None:
            first = self.text.split()[:1]
            if first and first[0] in SHAPES and "," not in self.text:
                raise self.error(f"a query of this shape is written as '{form(first[0])}', with commas")
            query = self.union()
            self.end("',' and a relation, '&', '|' or the end")
            return query
        if name[1] not in SHAPES:
            forms = f"the shapes are {', '.join(SHAPES)}, as in '{form('2p')}'"
            raise self.error(f"unknown shape {name[1]!r}, {forms}", name.start(1))
        structure, self.at = SHAPES[name[1]], name.end()
        kinds = label_kinds(structure)
        labels: list[tuple[str, str]] = []
        for kind in kinds:
            if labels and not self.take(","):
                raise self.expected(f"',' and {_article(kind)} ({name[1]} takes {', '.join(kinds)})")
            labels.append(self.label(kind))
        self.end(f"the end ({name[1]} takes {', '.join(kinds)})")
        return build(structure, labels)

    def union(self) -> Query:
        return self.several("|", self.intersection, Or)

    def intersection(self) -> Query:
        return self.several("&", self.path, And)

    def several(self, sign: str, part: Callable[[], Query], kind: type[_Several]) -> Query:
        parts = [part()]
        while self.take(sign):
            parts.append(part())
        return kind(*parts) if len(parts) > 1 else parts[0]

    def path(self) -> Query:
        source: str | Query
        if self.take("("):
            self.count()
            source = self.union()
            if not self.take(")"):
                raise self.expected("',' and a relation, '&', '|' or ')'")
        else:
            _, source = self.label("entity")
        while self.take(","):
            self.count()
            kind, relation = self.label("relation")
            source = Hop(source, relation, kind == "inverse")
        if isinstance(source, str):
            raise self.expected(f"',' and a relation after the entity {source!r}")
        return source

    def label(self, kind: str) -> tuple[str, str]:
        """The next label and its kind."""
        if kind == "relation" and self.take("^"):
            kind = "inverse"
        self.skip()
        opening = self.text[self.at : self.at + 1]
        if opening in _QUOTED:
            found = _QUOTED[opening].match(self.text, self.at)
            if found is None:
                raise self.error(f"the quote {opening} is not closed")
            self.at = found.end()
            return kind, re.sub(r"\\(.)", r"\1", found[1], flags=re.DOTALL)
        found = _LABEL.match(self.text, self.at)
        if found is None:
            raise self.expected(_article("relation" if kind == "inverse" else kind))
        if kind == "entity" and opening == "^":
            raise self.expected("an entity (only relations are followed backwards)")
        self.at = found.end()
        return kind, found[0].rstrip()

    def count(self) -> None:
        self.hops += 1
        if self.hops > MAX_HOPS:
            raise self.error(f"more than {MAX_HOPS} hops and parentheses", self.at - 1)

    def end(self, expected: str) -> None:
        self.skip()
        if self.at < len(self.text):
            raise self.expected(expected)

    def take(self, sign: str) -> bool:
        self.skip()
        found = self.text.startswith(sign, self.at)
        self.at += found
        return found

    def skip(self) -> None:
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1

    def expected(self, what: str) -> ValueError:
        self.skip()
        found = repr(self.text[self.at]) if self.at < len(self.text) else "the end"
        quotes = f"; labels that contain one of {_SIGNS} need quotes" if found[1:2] in tuple(_SIGNS) else ""
        return self.error(f"expected {what}, found {found}{quotes}")

    def error(self, what: str, at: int | None = None) -> ValueError:
        position = 1 + (self.at if at is None else at)
        text = self.text if len(self.text) < 500 else self.text[:500] + "…"
        return ValueError(f"The query {text!r} is wrong at position {position}: {what}.")


def _article(kind: str) -> str:
    return f"{'an' if kind[0] == 'e' else 'a'} {kind}"
