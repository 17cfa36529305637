"""Reads files of triples as Arrow columns of text, without a Python loop; errors name the line."""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.csv  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]

from aswa_hf._utils.warnings import warn_caller

COLUMNS = ("head", "relation", "tail")
# Common names of the three columns, in this order.
SCHEMES = (
    COLUMNS,
    ("subject", "predicate", "object"),
    ("subject", "relation", "object"),
    ("h", "r", "t"),
    ("s", "p", "o"),
    ("source", "relation", "target"),
    ("source", "edge", "target"),
    ("source", "predicate", "target"),
    ("from", "rel", "to"),
    ("head", "rel", "tail"),
    ("entity1", "relation", "entity2"),
)
# Separators between the fields of a line, the most likely first.
SEPARATORS = {".txt": "\t ,;|", ".tsv": "\t", ".csv": ",;\t|"}
NAMES = {"\t": "tab", " ": "space", ",": "comma", ";": "semicolon", "|": "bar"}
BLOCK = 1 << 24  # bytes that one thread parses at a time; no line may be longer
SUFFIXES = (*SEPARATORS, ".nt", ".parquet")
# A resource, a blank node or, as a tail, a literal: "text", "text"@en, "1"^^<type>. The standard also allows dots in
# names of blank nodes; without them every character determines what follows, which makes matching three times faster.
NT_LINE = (
    r"^\s*(?P<head><[^<>]*>|_:[^\s.]+)\s+(?P<relation><[^<>]*>)\s+"
    r'(?P<tail><[^<>]*>|_:[^\s.]+|"(?:[^"\\]|\\.)*"(?:@[A-Za-z0-9-]+|\^\^<[^<>]*>)?)\s*\.\s*(?:#.*)?$'
)


@dataclass
class Triples:
    """Three columns of labels, and where each row came from."""

    heads: Any
    relations: Any
    tails: Any
    name: str
    unit: str = "line"
    numbers: np.ndarray | None = None  # of the rows; None: they are numbered from 1

    def __len__(self) -> int:
        return len(self.heads)

    def where(self, row: int) -> str:
        return f"{self.name}, {self.unit} {row + 1 if self.numbers is None else self.numbers[row]}"


def read_triples(path: Path) -> Triples:
    """The triples of a .txt, .tsv, .csv, .nt or .parquet file, which may be gzipped (.gz)."""
    zipped = path.suffix.lower() == ".gz"
    suffix = Path(path.stem).suffix.lower() if zipped else path.suffix.lower()
    try:
        data = gzip.decompress(path.read_bytes()) if zipped else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file ({error}). Compress or download it again.") from None
    if suffix == ".parquet":
        return _parquet(data, path)
    text = _text(data, path)
    if not text.strip():
        raise ValueError(f"{path} is empty. Expected a triple in every line: head, relation and tail.")
    return refuse_empty(_nt(text, path) if suffix == ".nt" else _separated(text, path, suffix))


def refuse_empty(triples: Triples) -> Triples:
    """Returns the triples; raises ValueError, with the place, if a label is empty or only spaces."""
    for what in ("heads", "relations", "tails"):
        empty = pc.equal(pc.utf8_trim_whitespace(getattr(triples, what)), "")
        if row := pc.index(empty, True).as_py() + 1:
            raise ValueError(
                f"{triples.where(row - 1)} has an empty {what[:-1]}. Give it a label or remove the {triples.unit}."
            )
    return triples


def find_columns(names: Sequence[str], texts: Sequence[str], where: str) -> list[str]:
    """Which columns are head, relation and tail: by their names, else the only three that hold text."""
    lower = {name.strip().lower(): name for name in names}
    for scheme in SCHEMES:
        if all(part in lower for part in scheme):
            chosen = [lower[part] for part in scheme]
            if any(name not in texts for name in chosen):
                raise ValueError(f"{where}: the columns {', '.join(chosen)} must contain labels, that is, text.")
            return chosen
    if len(texts) == 3:
        return list(texts)
    raise ValueError(
        f"{where} has the columns {', '.join(names) or '(none)'}, of which {len(texts)} contain text. Expected "
        "columns named head, relation and tail, or exactly three columns of text in this order."
    )


def from_table(table: Any, name: str) -> Triples:
    """The triples of an Arrow table; raises ValueError for a row without a value."""
    texts = [field.name for field in table.schema if _is_text(field.type)]
    chosen = find_columns(table.column_names, texts, name)
    for column in chosen:
        if table[column].null_count:
            row = pc.index(table[column].is_null(), True).as_py()
            raise ValueError(f"{name}, row {row + 1} has no {column}. Give it a label or remove the row.")
    if not len(table):
        raise ValueError(f"{name} is empty. Expected at least one triple.")
    heads, relations, tails = (table[column].cast(pa.string()) for column in chosen)
    return Triples(heads, relations, tails, name, unit="row")


def _is_text(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _parquet(data: bytes, path: Path) -> Triples:
    try:
        table = pyarrow.parquet.read_table(pa.BufferReader(data))
    except pa.ArrowException as error:
        raise ValueError(f"{path} is not a readable parquet file ({error}). Write or download it again.") from None
    return refuse_empty(from_table(table, str(path)))


def _text(data: bytes, path: Path) -> bytes:
    """The content as UTF-8 with Unix line ends and without a byte order mark."""
    try:
        if not data.isascii():
            data.decode()
        if b"\0" in data:
            at = data.index(b"\0")
            raise UnicodeDecodeError("utf-8", data, at, at + 1, "a zero byte")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {line} is not UTF-8 text: byte {data[error.start]:#04x}, {error.reason}. Save the file as "
            "UTF-8."
        ) from None
    data = data.removeprefix(b"\xef\xbb\xbf")
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in data else data


def _separated(text: bytes, path: Path, suffix: str) -> Triples:
    """Reads lines of three fields. Quotes are special only in .csv; `#` and `NA` are ordinary labels."""
    start = text.lstrip(b"\n").partition(b"\n")[0].decode()
    separator = next((s for s in SEPARATORS[suffix] if len(_split(start, s, suffix)) == 3), None)
    separator = separator or next((s for s in SEPARATORS[suffix] if s in start), SEPARATORS[suffix][0])
    if separator == " ":
        text = re.sub(rb"(?m)^ +| +$", b"", re.sub(rb"  +", b" ", text))
    numbers = _line_numbers(text)
    names = [field.strip(' "').lower() for field in _split(start, separator, suffix)]
    if any(set(scheme) <= set(names) for scheme in SCHEMES) and not _is_triple(names, text, separator, path):
        if len(set(names)) < len(names):
            raise ValueError(f"{path}, line {numbers[0]} names a column twice: {start!r}. Rename or remove one.")
        text, numbers = text.lstrip(b"\n").partition(b"\n")[2], numbers[1:]
        if not text.strip():
            raise ValueError(f"{path} contains only a header. Expected a triple in every line after it.")
    else:
        names = [*COLUMNS]
    if suffix == ".txt" and separator != "\t" and b"\t" in text:
        raise _line_error(text, path, numbers, separator, suffix, len(names))
    try:
        table = pyarrow.csv.read_csv(
            pa.BufferReader(text),
            pyarrow.csv.ReadOptions(column_names=names, block_size=BLOCK),
            pyarrow.csv.ParseOptions(
                delimiter=separator,
                quote_char='"' if suffix == ".csv" else False,
                newlines_in_values=suffix == ".csv",
            ),
            pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False),
        )
    except pa.ArrowInvalid as error:
        raise _line_error(text, path, numbers, separator, suffix, len(names), error) from None
    triples = from_table(table, str(path))
    # A quoted field of a .csv may span several lines: then only the rows can be counted.
    return triples if len(numbers) != len(triples) else replace(triples, unit="line", numbers=numbers)


def _is_triple(names: list[str], text: bytes, separator: str, path: Path) -> bool:
    """Whether a first line of single letters, such as `s p o`, is a triple: then its relation is likely to recur."""
    if tuple(names) not in SCHEMES or len("".join(names)) > len(names):
        return False
    lines = text.lstrip(b"\n").decode().split("\n")
    relation = lines[0].split(separator)[1]
    if any(line.split(separator)[1:2] == [relation] for line in lines[1:]):
        return True
    if Path(path.name.removesuffix(".gz")).suffix != ".csv":
        warn_caller(
            f"{path}: the first line, {lines[0]!r}, is read as the names of the columns and not as a triple. If it is "
            "a triple, write head, relation and tail into a line before it."
        )
    return False


def _nt(text: bytes, path: Path) -> Triples:
    """Reads N-Triples: resources without their angle brackets, and literals as entities labeled as written."""
    numbers = _line_numbers(text)
    table = pyarrow.csv.read_csv(
        pa.BufferReader(text),
        pyarrow.csv.ReadOptions(column_names=["line"], block_size=BLOCK),
        # A separator that does not occur in text files keeps each line in one field.
        pyarrow.csv.ParseOptions(delimiter="\x01", quote_char=False),
        pyarrow.csv.ConvertOptions(column_types={"line": pa.string()}, strings_can_be_null=False),
    )
    facts = pc.invert(pc.match_substring_regex(table["line"], r"^\s*(#.*)?$"))
    lines, numbers = table["line"].filter(facts), numbers[facts.to_numpy()]
    if not len(lines):
        raise ValueError(f"{path} contains only comments. Expected lines like <head> <relation> <tail> .")
    fields = pc.extract_regex(lines, NT_LINE)
    if fields.null_count:
        row = pc.index(fields.is_null(), True).as_py()
        raise ValueError(
            f"{path}, line {numbers[row]} is not an N-Triples line: {_short(lines[row].as_py())}. Expected "
            "<head> <relation> <tail> . with a dot at the end."
        )
    heads, relations, tails = (_bare(pc.struct_field(fields, name)) for name in COLUMNS)
    return Triples(heads, relations, tails, str(path), numbers=numbers)


def _bare(column: Any) -> Any:
    return pc.if_else(pc.starts_with(column, "<"), pc.utf8_slice_codeunits(column, 1, -1), column)


def _line_numbers(text: bytes) -> np.ndarray:
    """The numbers, from 1, of the lines that are not empty."""
    ends = np.flatnonzero(np.frombuffer(text, dtype=np.uint8) == ord("\n"))
    if not text.endswith(b"\n"):
        ends = np.append(ends, len(text))
    return np.flatnonzero(np.diff(ends, prepend=-1) > 1) + 1


def _split(line: str, separator: str, suffix: str) -> list[str]:
    if suffix == ".csv":
        return next(csv.reader([line], delimiter=separator), [])
    return line.split() if separator == " " else line.split(separator)


def _line_error(
    text: bytes, path: Path, numbers: np.ndarray, separator: str, suffix: str, expected: int, reason: object = ""
) -> ValueError:
    """The error for the first line that cannot be read: its number, and what is wrong with it."""
    lines = [line for line in text.decode().split("\n") if line]
    for number, line in zip(numbers, lines, strict=True):
        fields = len(_split(line, separator, suffix))
        tab = suffix == ".txt" and separator != "\t" and "\t" in line
        if fields == expected and not tab:
            continue
        others = [s for s in NAMES if s != separator and s in line and len(_split(line, s, suffix)) == expected]
        other = "\t" if tab else next(iter(others), None)
        if other:
            return ValueError(
                f"{path}, line {number} is separated by {NAMES[other]} where "
                f"{NAMES[separator]} is expected: {_short(line)}. Use one separator throughout the file."
            )
        return ValueError(
            f"{path}, line {number} has {fields} field{'s' * (fields != 1)} separated by {NAMES[separator]}, expected "
            f"{expected} (head, relation, tail): {_short(line)}. Correct or remove the line."
        )
    return ValueError(f"{path} cannot be read: {reason}. Expected a triple in every line: head, relation and tail.")


def _short(line: str) -> str:
    return repr(line if len(line) <= 120 else line[:120] + "…")
