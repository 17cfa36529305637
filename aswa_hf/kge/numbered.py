"""Graphs of many millions of triples: numbered once in bounded memory, then memory-mapped by every process.

    number_graph("wikidata/", "wikidata-numbered/")      # train, valid and test as .tsv or .txt, also .gz
    kg = load_kg("wikidata-numbered/")                   # opens at once, and takes no memory

The folder holds the ids of each split (`train.arrow`, …) in int32, or int64 where that is not enough, the labels of
entities and relations (`entities.arrow`, `relations.arrow`) and their numbers (`numbered.json`). Entities are numbered
by a hash of their labels, in effect at random: frequent ones spread evenly over the shards of a table.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.csv  # type: ignore[import-untyped]
from tqdm import tqdm  # type: ignore[import-untyped]

from aswa_hf._utils.files import make_folder, write_json
from aswa_hf._utils.warnings import warn_caller
from aswa_hf.kge.data import ABOUT, NumberedGraph, split_files
from aswa_hf.kge.labels import LABEL_FILES
from aswa_hf.kge.reading import COLUMNS

BLOCK = 1 << 24  # bytes of text at a time
MEMORY = 1 << 30  # bytes of labels that are numbered at a time


def number_graph(
    source: str | Path, folder: str | Path, *, memory: int = MEMORY, progress: bool = True
) -> NumberedGraph:
    """Numbers the triples of a folder of text files; the memory does not grow with the graph.

    Labels are first spread over temporary files by their hash, each of about `memory` bytes or less, and numbered
    file by file. Nothing is overwritten: `folder` must not exist.
    """
    source, folder = Path(source), Path(folder)
    files = split_files(source)
    if folder.exists():
        raise FileExistsError(f"{folder} exists already. Choose another folder, or remove it first.")
    for split, path in files.items():
        if Path(path.name.removesuffix(".gz")).suffix not in (".txt", ".tsv"):
            raise ValueError(
                f"{path} for the split {split!r} cannot be numbered in bounded memory. Expected tab-separated .tsv or "
                ".txt files, also .gz."
            )
    if unused := [name for name in LABEL_FILES if (source / name).is_file()]:
        warn_caller(f"{source} has labels in {' and '.join(unused)}; a numbered graph shows identifiers instead.")
    make_folder(folder.parent)
    size = sum(path.stat().st_size * (6 if path.suffix == ".gz" else 1) for path in files.values())
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        _Numbering(Path(temporary), parts=max(16, 2 * size // memory), hidden=not progress).run(files)
        shutil.move(str(Path(temporary) / "result"), folder)
    return NumberedGraph(folder)


class _Numbering:
    """One pass over the text, one over the labels; `parts` files hold the labels in between."""

    def __init__(self, folder: Path, *, parts: int, hidden: bool):
        self.folder, self.result, self.parts, self.hidden = folder, folder / "result", parts, hidden
        self.result.mkdir()
        self.relations: dict[str, int] = {}
        self.rows = 0

    def run(self, files: dict[str, Path]) -> None:
        schema = pa.schema([("place", pa.int64()), ("label", pa.string())])
        counts = {}
        with ExitStack() as opened:
            parts = [opened.enter_context(pa.ipc.new_stream(str(self._part(k)), schema)) for k in range(self.parts)]
            by = opened.enter_context((self.folder / "relations").open("wb"))
            size = sum(path.stat().st_size for path in files.values())
            bar = opened.enter_context(
                tqdm(total=size, unit="B", unit_scale=True, desc="reading", disable=self.hidden)
            )
            for split, path in files.items():
                first = self.rows
                for heads, relations, tails in _blocks(path, bar):
                    by.write(self._relation_ids(relations).tobytes())
                    self._spread(parts, heads, tails)
                    self.rows += len(heads)
                counts[split] = self.rows - first
                if not counts[split]:
                    raise ValueError(f"{path} is empty. Expected a triple in every line: head, relation and tail.")
        entities = self._number(counts)
        _write_labels(self.result / "relations.arrow", [pa.array(list(self.relations), pa.string())])
        write_json(self.result / ABOUT, {"entities": entities, "relations": len(self.relations), "splits": counts})

    def _part(self, number: int) -> Path:
        return self.folder / f"labels-{number}"

    def _relation_ids(self, labels: Any) -> np.ndarray:
        encoded = labels.dictionary_encode()
        ids = [self.relations.setdefault(label, len(self.relations)) for label in encoded.dictionary.to_pylist()]
        found: np.ndarray = np.asarray(ids, dtype=np.int32)[encoded.indices.to_numpy()]
        return found

    def _spread(self, parts: list[Any], heads: Any, tails: Any) -> None:
        """Appends every label to the part of its hash, with its place: 2·row for a head, 2·row + 1 for a tail."""
        labels = pa.concat_arrays([heads, tails]).dictionary_encode()
        codes = labels.indices.to_numpy()
        part = (_hashes(labels.dictionary) % np.uint64(self.parts)).astype(np.int64)[codes]
        places = 2 * (self.rows + np.arange(len(heads)))
        places = np.concatenate([places, places + 1])
        order = np.argsort(part, kind="stable")
        bounds = np.searchsorted(part[order], np.arange(self.parts + 1))
        for number, (start, stop) in enumerate(pairwise(bounds)):
            if stop > start:
                chosen = order[start:stop]
                found = labels.dictionary.take(pa.array(codes[chosen]))
                parts[number].write_batch(pa.record_batch([pa.array(places[chosen]), found], ["place", "label"]))

    def _number(self, counts: dict[str, int]) -> int:
        """Numbers the labels part by part, and writes the ids to the places where they occur; returns how many."""
        # Not known before the end; int32 is enough if even distinct labels everywhere would fit.
        kind = np.int32 if 2 * self.rows < 2**31 else np.int64
        ends = [_new_map(self.folder / f"end-{k}", kind, self.rows) for k in (0, 1)]

        def distinct() -> Iterator[Any]:
            first = 0
            for number in tqdm(range(self.parts), desc="numbering", unit="part", disable=self.hidden):
                with pa.memory_map(str(self._part(number))) as source:
                    table = pa.ipc.open_stream(source).read_all()
                if not len(table):
                    continue
                # Chunk by chunk: all occurrences of a frequent label are in one part, however many they are.
                chunks = table["label"].dictionary_encode().chunks  # with one dictionary for all of them
                for labels, places in zip(chunks, table["place"].chunks, strict=True):
                    ids = first + labels.indices.to_numpy().astype(kind)
                    rows, which = np.divmod(places.to_numpy(), 2)
                    for k in (0, 1):
                        ends[k][rows[which == k]] = ids[which == k]
                first += len(chunks[-1].dictionary)
                self._part(number).unlink()
                yield chunks[-1].dictionary

        total = _write_labels(self.result / "entities.arrow", distinct())
        by = np.memmap(self.folder / "relations", dtype=np.int32, mode="r", shape=(self.rows,))
        first = 0
        for split, count in counts.items():
            part = slice(first, first + count)
            columns = [pa.array(column[part]) for column in (ends[0], by, ends[1])]
            batch = pa.record_batch(columns, list(COLUMNS))
            with pa.ipc.new_stream(str(self.result / f"{split}.arrow"), batch.schema) as file:
                file.write_batch(batch)
            first += count
        return total


def _new_map(path: Path, kind: Any, rows: int) -> np.ndarray:
    """A new array in a file, whose space is reserved: a mapped page that finds the disk full ends the process."""
    with path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(file.fileno(), 0, rows * np.dtype(kind).itemsize)
    return np.memmap(path, dtype=kind, mode="r+", shape=(rows,))


def _blocks(path: Path, bar: Any) -> Iterator[list[Any]]:
    """The three columns of a file, some lines at a time; raises ValueError for a line that is not a triple."""
    row = done = 0
    kinds = dict.fromkeys(COLUMNS, pa.string())
    with path.open("rb") as raw:
        stream = pa.CompressedInputStream(raw, "gzip") if path.suffix == ".gz" else pa.PythonFile(raw, "r")
        try:
            reader = pyarrow.csv.open_csv(
                stream,
                pyarrow.csv.ReadOptions(column_names=list(COLUMNS), block_size=BLOCK, use_threads=False),
                pyarrow.csv.ParseOptions(delimiter="\t", quote_char=False),
                pyarrow.csv.ConvertOptions(column_types=kinds, strings_can_be_null=False),
            )
            for batch in reader:
                for name in COLUMNS:
                    empty = pc.index(pc.equal(pc.utf8_trim_whitespace(batch[name]), ""), True).as_py()
                    if empty >= 0:
                        raise ValueError(f"{path}, triple {row + empty + 1} has an empty {name}. Give it a label.")
                    zero = pc.index(pc.match_substring(batch[name], "\0"), True).as_py()
                    if zero >= 0:
                        raise ValueError(f"{path}, triple {row + zero + 1} has a zero byte. Save the file as UTF-8.")
                yield [batch[name] for name in COLUMNS]
                row += len(batch)
                bar.update(raw.tell() - done)
                done = raw.tell()
        except pa.ArrowInvalid as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"{path} cannot be read after triple {row}: {reason}. Expected head, relation and tail in every line, "
                "separated by tabs."
            ) from None
        except OSError as error:
            if error.errno is not None or path.suffix != ".gz":
                raise
            raise ValueError(f"{path} is not a complete gzip file ({error}). Compress or download it again.") from None


def _hashes(labels: Any) -> np.ndarray:
    """A 64-bit hash of every label of an Arrow array, none of them empty; the same on every machine."""
    offsets = np.frombuffer(labels.buffers()[1], dtype=np.int32)[labels.offset : labels.offset + len(labels) + 1]
    data = np.frombuffer(labels.buffers()[2] or b"", dtype=np.uint8)[offsets[0] : offsets[-1]]
    lengths = np.diff(offsets)
    places = np.arange(len(data)) - np.repeat(offsets[:-1] - offsets[0], lengths)
    factors = np.random.default_rng(0).integers(1, 2**63, 4096, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    words = (data.astype(np.uint64) + np.uint64(1)) * factors[places % len(factors)]
    found = np.add.reduceat(words, offsets[:-1] - offsets[0])
    found ^= found >> np.uint64(31)
    mixed: np.ndarray = (found * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(17)
    return mixed


def _write_labels(path: Path, chunks: Any) -> int:
    total = 0
    with pa.ipc.new_stream(str(path), pa.schema([("label", pa.string())])) as file:
        for labels in chunks:
            file.write_batch(pa.record_batch([labels], ["label"]))
            total += len(labels)
    return total
