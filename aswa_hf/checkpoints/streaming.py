"""Checkpoints on disk, read in pieces: the headers of their safetensors files, and weighted sums of checkpoints.

A header lists every tensor of a file with its dtype, shape and offsets, so that checkpoints are compared, and damaged
files found, before any weight is read. Sums are taken in float64 in small pieces: averaging any number of
checkpoints of any size needs very little memory.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aswa_hf._utils.tensors import DTYPES, Entry, is_finite, read_header
from aswa_hf.run_folder import ADAPTER_WEIGHTS, WEIGHTS

UNSHARDED = (WEIGHTS, ADAPTER_WEIGHTS)
AVERAGED = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")  # integers are copied
PIECE = 1 << 15  # elements: few enough for the cache, and for torch to add them in a single thread
CHECKED = 1 << 19  # elements that are looked at together


@dataclass(frozen=True)
class Checkpoint:
    """The weights of a checkpoint, in one file or several, and the folder they belong to, if any."""

    name: str
    files: tuple[Path, ...]
    folder: Path | None = None
    index: Path | None = None
    step: int | None = None
    epoch: float | None = None
    tensors: dict[str, Entry] = field(default_factory=dict, repr=False)
    metadata: dict[Path, dict[str, str]] = field(default_factory=dict, repr=False)

    def name_of(self, file: Path) -> str:
        """The name of one of the files in a folder that transformers loads."""
        return file.name if self.folder is not None or file.name in UNSHARDED else WEIGHTS

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors, by name."""
        return {name: entry.read().view(entry.shape) for name, entry in self.tensors.items()}

    def check_finite(self, but: Collection[str] = ()) -> None:
        """Raises ValueError, with file and tensor, for NaN or infinite numbers."""
        for name, entry in self.tensors.items():
            if entry.is_averaged and name not in but:
                for first in range(0, entry.elements, CHECKED):
                    if not is_finite(entry.read(first, min(CHECKED, entry.elements - first))):
                        raise ValueError(f"{entry.file}: the tensor {name!r} has NaN or infinite numbers.")


Part = tuple[Checkpoint, float]


@dataclass(frozen=True)
class WeightedMean:
    """Θ = Σ w_i Θ_i / divisor, for floating-point tensors; others and those in `copied` are the last part's."""

    parts: Sequence[Part]
    divisor: float
    copied: frozenset[str] = frozenset()
    replaced: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def last(self) -> Checkpoint:
        return self.parts[-1][0]

    def pieces(self, name: str) -> Iterator[Tensor]:
        """A tensor from its first element to its last: averaged ones in float64, others unchanged."""
        entry = self.last.tensors[name]
        if name in self.replaced:
            yield self.replaced[name].detach().cpu().reshape(-1)
            return
        for first in range(0, entry.elements, PIECE):
            count = min(PIECE, entry.elements - first)
            if not entry.is_averaged or name in self.copied:
                yield entry.read(first, count)
                continue
            total = torch.zeros(count, dtype=torch.float64)
            for checkpoint, weight in self.parts:
                total.add_(checkpoint.tensors[name].read(first, count), alpha=weight)
            yield total.div_(self.divisor)

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors by name, in the dtypes of the checkpoints."""
        found = {}
        for name, entry in self.last.tensors.items():
            tensor = found[name] = torch.empty(entry.elements, dtype=DTYPES[entry.dtype])
            first = 0
            for piece in self.pieces(name):
                tensor[first : first + len(piece)] = piece
                first += len(piece)
        return {name: tensor.view(self.last.tensors[name].shape) for name, tensor in found.items()}

    def write(self, folder: Path, dtype: str | None = None, *, checked: bool = False) -> None:
        """Writes safetensors files like those of the checkpoints; `dtype` replaces that of averaged tensors.

        With `checked`, raises ValueError, as `check_finite` does, for a number that is not finite.
        """
        for file in self.last.files:
            names = [name for name, entry in self.last.tensors.items() if entry.file == file]
            kinds = {name: self._dtype(name, dtype) for name in names}
            path = folder / self.last.name_of(file)
            with path.open("wb") as out:
                out.write(self._header(kinds, self.last.metadata.get(file, {})))
                for name, kind in kinds.items():
                    for piece in self.pieces(name):
                        if checked and not is_finite(piece):
                            self.check_finite()
                            raise ValueError(f"The mean of the tensors {name!r} has NaN or infinite numbers.")
                        out.write(piece.to(DTYPES[kind]).contiguous().view(torch.uint8).numpy().data)
        if self.last.index is not None:
            (folder / self.last.index.name).write_bytes(self.last.index.read_bytes())

    def check_finite(self) -> None:
        """Raises ValueError, with file and tensor, if something of the mean has NaN or infinite numbers."""
        for name, tensor in self.replaced.items():
            if not is_finite(tensor):
                raise ValueError(f"The recomputed statistics {name!r} of the average have NaN or infinite numbers.")
        for checkpoint, _ in self.parts:
            unused = self.replaced.keys() | (set() if checkpoint is self.last else self.copied)
            checkpoint.check_finite(but=unused)

    def _dtype(self, name: str, dtype: str | None) -> str:
        entry = self.last.tensors[name]
        return dtype if dtype and entry.is_averaged else entry.dtype

    def _header(self, kinds: Mapping[str, str], metadata: Mapping[str, str]) -> bytes:
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        end = 0
        for name, kind in kinds.items():
            entry = self.last.tensors[name]
            start, end = end, end + entry.elements * DTYPES[kind].itemsize
            header[name] = {"dtype": kind, "shape": list(entry.shape), "data_offsets": [start, end]}
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def read_checkpoint(name: str, files: Sequence[Path], index: Path | None = None, **place: Any) -> Checkpoint:
    """Reads the headers of a checkpoint's files; raises ValueError if a file is damaged."""
    tensors: dict[str, Entry] = {}
    metadata: dict[Path, dict[str, str]] = {}
    for file in files:
        found, metadata[file] = read_header(file)
        if twice := next((tensor for tensor in found if tensor in tensors), None):
            raise ValueError(f"The tensor {twice!r} is in {file} and in {tensors[twice].file}.")
        tensors |= found
    for tensor, entry in tensors.items():
        if entry.dtype not in AVERAGED:
            raise ValueError(
                f"{entry.file}: the tensor {tensor!r} has dtype {entry.dtype}, which is not supported. Expected "
                f"{', '.join(AVERAGED)}."
            )
    if not any(entry.is_averaged for entry in tensors.values()):
        raise ValueError(f"{files[0]} has no floating-point tensor: there is nothing to average.")
    return Checkpoint(name, tuple(files), index=index, tensors=tensors, metadata=metadata, **place)


def check_same_tensors(checkpoints: Sequence[Checkpoint]) -> None:
    """Raises ValueError, with file and tensor, if checkpoints differ in the name, shape or dtype of a tensor."""
    first = checkpoints[0]
    for other in checkpoints[1:]:
        for a, b in ((first, other), (other, first)):
            if missing := next((name for name in a.tensors if name not in b.tensors), None):
                raise ValueError(
                    f"{_place(b)} has no tensor {missing!r}, which {a.tensors[missing].file} has. Only checkpoints of "
                    "one model can be averaged."
                )
        for name, ours in first.tensors.items():
            theirs = other.tensors[name]
            for what in ("shape", "dtype"):
                expected, got = (_shown(getattr(entry, what)) for entry in (ours, theirs))
                if got != expected:
                    raise ValueError(
                        f"{theirs.file}: the tensor {name!r} has {what} {got}, but {expected} in {ours.file}. "
                        "Only checkpoints of one model can be averaged."
                    )


def _place(checkpoint: Checkpoint) -> Path:
    single = len(checkpoint.files) == 1 or checkpoint.folder is None
    return checkpoint.files[0] if single else checkpoint.folder  # type: ignore[return-value]


def _shown(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
