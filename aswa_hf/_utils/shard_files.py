"""Tensors in one safetensors file or, if they are sharded, in one per process and an index.

For a sharded model every rank writes the rows it holds to its own file, `<name>-<save>-<rank>.safetensors`.
`<name>.safetensors` is then the index: it holds what is not sharded, and names these files. Each save uses new names,
so that the old files are complete until the index is renamed, and the new ones from then on. A run with another number
of processes reads the rows it needs.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from aswa_hf._utils.distributed import agree, rank, succeeding_together, world_size
from aswa_hf._utils.files import parse_json, replacing, sync, write_text
from aswa_hf._utils.paths import is_file_name
from aswa_hf._utils.sharding import is_dtensor, is_first_copy, own_rows
from aswa_hf._utils.tensors import Entry, open_tensors, read_header

# The key of the JSON text in the header of a file.
FORMAT = "aswa-state"


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    content: dict[str, Any],
    device: torch.device | None = None,
    *,
    readable: str | None = None,
) -> None:
    """Writes tensors, and `content` as JSON in the header, replacing earlier files atomically.

    With a `device` the tensors may be DTensors, and all ranks must call it, with a path on a disk that they share.
    `readable` is a file beside it with the same JSON.
    """
    names: list[str] = []
    if device is not None:
        save = f"{int(agree(secrets.randbits(48), device)):012x}"
        names = [_shard_name(path, save, number) for number in range(world_size())]
        content = {**content, "shards": names}
    text = json.dumps(content, indent=2, allow_nan=False)
    if device is None:
        _write_index(path, tensors, text, readable)
    else:
        _write_shards_and_index(path, tensors, text, readable, names, device)
    if device is None or rank() == 0:
        for file in path.parent.glob(_shard_name(path, "*", "*")):
            if file.name not in names:
                with suppress(OSError):  # it only takes up space
                    file.unlink()


def _shard_name(path: Path, save: str, number: int | str) -> str:
    return f"{path.stem}-{save}-{number}{path.suffix}"


def _write_shards_and_index(
    path: Path,
    tensors: Mapping[str, Any],
    text: str,
    readable: str | None,
    names: Sequence[str],
    device: torch.device,
) -> None:
    """Writes the rows of this rank; when all ranks have done so, rank 0 writes the index."""
    own = path.with_name(names[rank()])
    parts = {key: tensor for key, tensor in tensors.items() if is_dtensor(tensor) and is_first_copy(tensor)}
    places = {key: {"start": own_rows(t).start, "shape": list(t.shape)} for key, t in parts.items()}
    try:
        with succeeding_together(device):
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(own, {key: tensor.to_local() for key, tensor in parts.items()}, json.dumps(places))
        with succeeding_together(device):
            if rank() == 0:
                whole = {key: tensor for key, tensor in tensors.items() if not is_dtensor(tensor)}
                _write_index(path, whole, text, readable)
    except OSError:
        # All ranks raise it. After other failures, such as a lost rank, the index may already name this file.
        own.unlink(missing_ok=True)
        raise


def _write_index(path: Path, tensors: Mapping[str, Tensor], text: str, readable: str | None) -> None:
    """Writes tensors and JSON; the rename at the end makes them valid."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        _write(temporary, tensors, text)
        if readable is not None:
            # Before the rename: if anything fails, the tensor file is still the old one.
            write_text(path.with_name(readable), text + "\n")


def _write(path: Path, tensors: Mapping[str, Tensor], text: str) -> None:
    try:
        # safetensors does not save shared or strided memory.
        save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, path, metadata={FORMAT: text})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    sync(path)


class SavedTensor:
    """A tensor in one file, or its rows in several; only the requested rows are read."""

    def __init__(self, key: str, shape: Sequence[int]):
        self.key = key
        self.shape = torch.Size(shape)
        self.parts: list[tuple[int, int, Any]] = []  # first row, end, open file; sorted by rows
        self.places: dict[int, Entry] = {}  # where the part with this first row is in its file

    def add(self, start: int, file: Any, place: Entry) -> None:
        rows = file.get_slice(self.key).get_shape()[:1]
        self.parts.append((start, start + (rows[0] if rows else 1), file))
        self.parts.sort(key=lambda part: part[:2])
        self.places[start] = place

    def is_floating_point(self) -> bool:
        return str(self.parts[0][2].get_slice(self.key).get_dtype()).startswith(("F", "BF"))

    def is_complex(self) -> bool:
        return str(self.parts[0][2].get_slice(self.key).get_dtype()).startswith("C")

    @property
    def is_complete(self) -> bool:
        ends = [0, *(end for _, end, _ in self.parts)]
        starts = [*(start for start, _, _ in self.parts), self.shape[0] if self.shape else 1]
        return starts == ends

    def __getitem__(self, rows: Any) -> Tensor:
        """Returns the rows of a slice, or the complete tensor for `...`."""
        if rows is ...:
            found = [file.get_tensor(self.key) for _, _, file in self.parts]
        else:
            found = [
                self._rows(start, max(rows.start, start) - start, min(rows.stop, end) - start)
                for start, end, _ in self.parts
                if start < rows.stop and rows.start < end
            ]
        if not found:
            empty: Tensor = self.parts[0][2].get_slice(self.key)[:0]
            return empty
        return torch.cat(found) if len(found) > 1 else found[0]

    def _rows(self, part: int, first: int, end: int) -> Tensor:
        # Read and not mapped: the pages of a mapped file count as memory of the process until it is closed.
        size = math.prod(self.shape[1:])
        return self.places[part].read(first * size, (end - first) * size).view(end - first, *self.shape[1:])


@dataclass
class _Index:
    """The schema of the JSON of an index, whatever else it holds."""

    shards: list[str] = field(default_factory=list)


@dataclass
class _Rows:
    """The schema of a sharded tensor in the file of a process: its first row there, and the shape of all."""

    start: int
    shape: list[int]


def open_index(
    path: Path, files: ExitStack, schema: Any = dict[str, Any]
) -> tuple[dict[str, Any], dict[str, SavedTensor]]:
    """Returns the content and the tensors of an index; the tensors can be read while `files` is open.

    Raises ValueError for other files, damaged and incomplete ones, and a content that does not fit `schema`.
    """
    index = files.enter_context(open_tensors(path))
    places, _ = read_header(path)
    parse_json(_text_of(index), "its state", _Index)
    content: dict[str, Any] = parse_json(_text_of(index), "its state", schema)
    tensors: dict[str, SavedTensor] = {}
    for key in index.keys():  # noqa: SIM118 (not a dict)
        tensors[key] = SavedTensor(key, index.get_slice(key).get_shape())
        tensors[key].add(0, index, places[key])
    for name in content.pop("shards", ()):
        if not is_file_name(name):
            raise ValueError(f"it names the file {name!r}, expected the name of one beside it.")
        try:
            file = files.enter_context(open_tensors(path.with_name(name)))
            places, _ = read_header(path.with_name(name))
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{path} was saved by several processes, and {name} of one of them is missing beside it. Save to and "
                "resume from a disk that all processes share."
            ) from None
        for key, place in parse_json(_text_of(file), f"the rows of {name}", dict[str, _Rows]).items():
            if key not in file.keys():  # noqa: SIM118 (not a dict)
                raise ValueError(f"{name} has no tensor {key!r}.")
            tensors.setdefault(key, SavedTensor(key, place["shape"])).add(place["start"], file, places[key])
    if missing := next((key for key, tensor in tensors.items() if not tensor.is_complete), None):
        raise ValueError(f"rows of {missing!r} are missing.")
    return content, tensors


def _text_of(file: Any) -> str:
    text = (file.metadata() or {}).get(FORMAT)
    if text is None:
        raise ValueError(f"it has no {FORMAT!r} in its header.")
    return str(text)
