"""Opens safetensors files: a damaged one is an error that names the file and the tensor, before anything is read.

A header lists every tensor of a file with its dtype, shape and offsets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from aswa_hf._utils.files import parse_json

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "BOOL": torch.bool,
}
LONGEST_HEADER = 100 << 20  # bytes, the limit of the format


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its dtype, shape and position."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_averaged(self) -> bool:
        return DTYPES[self.dtype].is_floating_point

    def read(self, first: int = 0, count: int | None = None) -> Tensor:
        """`count` elements from `first` on, in one dimension."""
        dtype = DTYPES[self.dtype]
        count = self.elements - first if count is None else count
        buffer = torch.empty(count, dtype=dtype)
        if count:
            view = buffer.view(torch.uint8).numpy().data
            with self.file.open("rb", buffering=0) as file:
                file.seek(self.start + first * dtype.itemsize)
                while len(view):
                    done = file.readinto(view)
                    if not done:
                        raise ValueError(f"{self.file} became shorter while it was read.")
                    view = view[done:]
        return buffer


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor has no NaN and no infinite number."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.element_size() == 1:  # float8 has no order in torch
        tensor = tensor.float()
    # NaN is the least and the greatest. `isfinite().all()` takes ten times as long.
    return all(bool(value.isfinite()) for value in tensor.aminmax())


@contextmanager
def open_tensors(path: str | Path) -> Iterator[Any]:
    """Opens a file for reading with safetensors; raises ValueError if it is damaged."""
    read_header(Path(path))
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}. Copy or download it again.") from None


def load_tensors(path: str | Path) -> dict[str, Tensor]:
    """Returns all tensors of a file by name; raises ValueError if it is damaged."""
    with open_tensors(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], where: str | Path) -> None:
    """Loads the weights of a model; raises ValueError, before any is changed, if one is missing or does not fit."""
    expected = model.state_dict()
    for name in sorted(expected.keys() | tensors.keys()):
        if name not in tensors or name not in expected:
            problem = "is missing" if name in expected else "is unexpected"
        elif tensors[name].shape != expected[name].shape:
            problem = f"has the shape {tuple(tensors[name].shape)}, expected {tuple(expected[name].shape)}"
        elif not is_finite(tensors[name]):
            problem = "has NaN or infinite numbers"
        elif expected[name].is_floating_point() > tensors[name].is_floating_point():
            problem = f"has whole numbers of type {tensors[name].dtype}"
        else:
            continue
        raise ValueError(f"{where} does not hold the weights of this {type(model).__name__}: {name!r} {problem}.")
    model.load_state_dict(tensors)


@dataclass
class _TensorInfo:
    """The schema of a tensor in a header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Returns the tensors of a file in their order, and its metadata; raises ValueError if it is damaged."""
    size = path.stat().st_size
    with path.open("rb") as file:
        beginning = file.read(8)
        length = int.from_bytes(beginning, "little")
        if beginning == b"version ":
            raise ValueError(f"{path} is a Git LFS pointer, not the file itself. Get it with `git lfs pull`.")
        if len(beginning) < 8 or 8 + length > size:
            if length <= LONGEST_HEADER:
                raise ValueError(f"{path} is truncated: it ends after {size} bytes, within its header.")
            raise ValueError(f"{path} is not a safetensors file.")
        try:
            text = file.read(length).decode()
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not a safetensors file: its header is not text.") from None
    header = parse_json(text, f"{path} is not a safetensors file: its header", dict[str, _TensorInfo | dict[str, str]])
    metadata = header.pop("__metadata__", {})
    entries: dict[str, Entry] = {}
    expected = 0
    for name, about in sorted(header.items(), key=lambda item: item[1].get("data_offsets", ())):
        if "data_offsets" not in about:
            raise ValueError(f"{path} is damaged: the tensor {name!r} has no offsets.")
        start, end = about["data_offsets"]
        entry = entries[name] = Entry(path, about["dtype"], tuple(about["shape"]), 8 + length + start)
        bytes_each = DTYPES[entry.dtype].itemsize if entry.dtype in DTYPES else None
        fits = bytes_each is None or end - start == entry.elements * bytes_each
        if start != expected or not fits or min(entry.shape, default=0) < 0:
            raise ValueError(f"{path} is damaged: the offsets of the tensor {name!r} do not match its shape.")
        if 8 + length + end > size:
            raise ValueError(
                f"{path} is truncated: it has {size} bytes, but the tensor {name!r} ends at byte {8 + length + end}. "
                "Copy or download it again."
            )
        expected = end
    if 8 + length + expected != size:
        raise ValueError(f"{path} is damaged: {size - 8 - length - expected} bytes follow its last tensor.")
    return entries, metadata
