"""Sharded models as ordinary safetensors files, written and read without holding the table in one process.

safetensors cannot split a tensor over files, and a plain `from_pretrained` reads the table from one: rank 0 writes it
in order, with the rows of the others as they arrive, a chunk at a time.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor

from aswa_hf._utils.distributed import rank, succeeding_together, world_size
from aswa_hf._utils.files import make_folder, read_json, replacing
from aswa_hf._utils.paths import WeightsIndex, is_file_name
from aswa_hf._utils.tensors import DTYPES, read_header
from aswa_hf.kge.sharded.table import EntityShard

# Numbers that are sent and written at a time.
CHUNK = 1 << 22
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_whole(path: Path, table: str, shard: EntityShard, others: Mapping[str, Tensor]) -> None:
    """Writes the complete table, called `table`, and other tensors to one file, atomically; all ranks must call it.

    Raises OSError on every rank if rank 0 cannot write.
    """
    with succeeding_together(shard.weight.device):
        if rank() == 0:
            _write(path, table, shard, others)
        else:
            for _ in _rows_in_order(shard):
                pass


def _write(path: Path, table: str, shard: EntityShard, others: Mapping[str, Tensor]) -> None:
    rows = _rows_in_order(shard)
    try:
        with replacing(path) as temporary, temporary.open("wb") as file:
            _write_header(file, table, shard, others)
            for tensor in others.values():
                file.write(_bytes(tensor))
            for chunk in rows:
                file.write(_bytes(chunk))
    finally:
        for _ in rows:  # after an error the others are still waiting to send the rest
            pass


def _write_header(file: BinaryIO, table: str, shard: EntityShard, others: Mapping[str, Tensor]) -> None:
    weight = shard.weight
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    shapes = [(name, tensor.dtype, list(tensor.shape), tensor.nbytes) for name, tensor in others.items()]
    shapes.append((table, weight.dtype, [shard.num_rows, weight.shape[1]], shard.num_rows * weight[0].nbytes))
    for name, dtype, shape, size in shapes:
        entries[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    file.write(len(header).to_bytes(8, "little") + header)


def _rows_in_order(shard: EntityShard) -> Iterator[Tensor]:
    """On rank 0 the rows of all ranks, in chunks; on the others the rows that they send."""
    weight = shard.weight.detach()
    height = max(1, CHUNK // weight.shape[1])
    for number in range(world_size()):
        rows = min(shard.num_rows, (number + 1) * shard.largest) - number * shard.largest
        for start in range(0, rows, height):
            count = min(height, rows - start)
            if rank() == number:
                chunk = weight[start : start + count].contiguous()
                if number:
                    dist.send(chunk, dst=0)
                yield chunk
            elif rank() == 0:
                chunk = weight.new_empty(count, weight.shape[1])
                dist.recv(chunk, src=number)
                yield chunk


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def save_without_weights(model: Any, folder: Path) -> None:
    """Writes everything that `save_pretrained` of a plain model writes, except for the weights."""
    make_folder(folder)
    with TemporaryDirectory() as temporary:
        model.save_pretrained(temporary)
        for path in Path(temporary).iterdir():
            if not path.name.endswith(".safetensors"):
                shutil.copy(path, folder / path.name)


def read_rows(folder: Path, name: str, shape: tuple[int, ...], rows: slice) -> Iterator[tuple[slice, Tensor]]:
    """Yields `rows` of a tensor of a saved model, some at a time, each part with its position among these rows.

    The rest of the file is not read. Raises ValueError if the tensor is missing or has a wrong shape.
    """
    path = folder / "model.safetensors"
    if not path.exists() and (index := folder / "model.safetensors.index.json").exists():
        files = read_json(index, WeightsIndex).get("weight_map", {})
        if name not in files:
            raise ValueError(f"{index} has no tensor {name!r}: it does not hold this model.")
        if not is_file_name(files[name]):
            raise ValueError(
                f"{index}: {name!r} is in {files[name]!r}. Expected the name of a file in the same folder."
            )
        path = folder / files[name]
    entries, _ = read_header(path)
    if name not in entries:
        raise ValueError(f"{path} has no tensor {name!r}: it does not hold this model.")
    entry = entries[name]
    if entry.shape != shape or entry.dtype not in DTYPES or not entry.is_averaged:
        raise ValueError(
            f"{path}: {name!r} has the shape {entry.shape} and the type {entry.dtype}. Expected floating-point "
            f"numbers of the shape {shape}, as config.json says."
        )
    size = math.prod(shape[1:])
    height = max(1, CHUNK // size)
    for start in range(rows.start, rows.stop, height):
        stop = min(start + height, rows.stop)
        part = entry.read(start * size, (stop - start) * size).view(stop - start, *shape[1:])
        yield slice(start - rows.start, stop - rows.start), part
