"""Weights and optimizer state of a model with `RowSharded` tables, each rank's rows in its own file.

    training.safetensors                   what is on every rank, and the names of the other files
    training-<save>-<rank>.safetensors     the rows of a rank, with their optimizer state

Tensors are named `weights/<parameter>` and `optimizer/<parameter>/<state>`. Any number of processes loads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aswa_hf._utils.distributed import is_distributed, succeeding_together
from aswa_hf._utils.shard_files import SavedTensor, open_index, write_tensors
from aswa_hf._utils.sharding import RowSharded, computing_device, is_dtensor, part_for, parts_for, row_sharded

VERSION = 1


def save_training(path: Path, model: nn.Module, optimizer: Any = None) -> None:
    """Writes weights and optimizer state to `path` and files beside it, atomically; all ranks must call it."""
    tables = row_sharded(model)
    tensors = {f"weights/{name}": _whole(p.detach(), tables.get(name)) for name, p in model.named_parameters()}
    tensors |= {f"weights/{name}": buffer for name, buffer in model.named_buffers()}
    content: dict[str, Any] = {"version": VERSION}
    if optimizer is not None:
        own = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        state, groups = _by_name(model, own)
        content |= {"optimizer": type(own).__name__, "groups": groups}
        for name, values in state.items():
            for key, value in values.items():
                found = value if isinstance(value, Tensor) else torch.tensor(value)
                tensors[f"optimizer/{name}/{key}"] = _whole(found, tables.get(name))
    write_tensors(path, tensors, content, computing_device(model) if is_distributed() else None)


def load_weights(path: Path, model: nn.Module) -> None:
    """Restores the weights of a model; raises ValueError on every rank, changing nothing, if they do not fit."""
    tables = row_sharded(model)
    expected = dict(model.named_parameters()) | dict(model.named_buffers())
    with _opened(path, model) as (_, tensors):
        with succeeding_together(computing_device(model), (ValueError,)):
            saved = {key.removeprefix("weights/"): t for key, t in tensors.items() if key.startswith("weights/")}
            _check_weights(path, saved, expected, tables)
        with torch.no_grad():
            for name, tensor in expected.items():
                whole = tables[name].whole() if name in tables else tensor.detach()
                for rows, part in parts_for(whole, saved[name]):
                    tensor[rows if tensor.dim() else ...] = part


def load_optimizer(path: Path, model: nn.Module, optimizer: Any) -> None:
    """Restores the state of an optimizer; raises ValueError on every rank if it belongs to another one."""
    tables = row_sharded(model)
    own = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    with _opened(path, model) as (content, tensors):
        groups = content.get("groups", [])
        with succeeding_together(computing_device(model), (ValueError,)):
            if [group["params"] for group in groups] != [group["params"] for group in _by_name(model, own)[1]]:
                raise ValueError(
                    f"{path} holds no optimizer state of these parameters. Resume with the same optimizer and model."
                )
            if content.get("optimizer", type(own).__name__) != type(own).__name__:
                raise ValueError(
                    f"{path} holds the state of {content['optimizer']}, not of {type(own).__name__}. Resume with the "
                    "same optimizer."
                )
        order = [name for group in groups for name in group["params"]]
        state: dict[int, dict[str, Any]] = {}
        for number, name in enumerate(order):
            prefix = f"optimizer/{name}/"
            if keys := [key for key in tensors if key.startswith(prefix)]:
                state[number] = {key.removeprefix(prefix): _part(tensors[key], tables.get(name)) for key in keys}
    places = iter(range(len(order)))
    restored = [
        {**saved, "params": [next(places) for _ in saved["params"]]}
        | {key: tuple(saved[key]) for key, value in group.items() if isinstance(value, tuple) and key in saved}
        for saved, group in zip(groups, own.param_groups, strict=True)
    ]
    own.load_state_dict({"state": state, "param_groups": restored})


@contextmanager
def _opened(path: Path, model: nn.Module) -> Iterator[tuple[dict[str, Any], dict[str, SavedTensor]]]:
    """The content of an index and its tensors; raises on every rank if one cannot open a file."""
    with ExitStack() as files:
        with succeeding_together(computing_device(model), (OSError, ValueError)):
            try:
                content, tensors = open_index(path, files)
            except ValueError as error:
                raise ValueError(f"{path} does not hold the state of a training run: {error}") from None
        yield content, tensors


def _whole(rows: Tensor, table: RowSharded | None) -> Tensor:
    """A tensor with a number, or several, for each row of a table as a part of the whole one."""
    if table is None or rows.dim() == 0 or len(rows) != len(table.weight):
        return rows
    return table.whole(rows)


def _part(saved: Any, table: RowSharded | None) -> Tensor:
    """The rows of this rank of a saved tensor."""
    if table is None or len(saved.shape) == 0 or saved.shape[0] != table.num_rows:
        part: Tensor = saved[...]
        return part
    whole = table.whole()
    return part_for(whole, saved) if is_dtensor(whole) else saved[...]


def _check_weights(
    path: Path, saved: Mapping[str, Any], expected: Mapping[str, Tensor], tables: Mapping[str, RowSharded]
) -> None:
    for name in sorted(saved.keys() | expected.keys()):
        if name not in saved or name not in expected:
            problem = f"{name!r} is {'missing' if name in expected else 'unexpected'}"
        else:
            rows = tables[name].num_rows if name in tables else None
            shape = expected[name].shape if rows is None else (rows, *expected[name].shape[1:])
            if tuple(saved[name].shape) == tuple(shape):
                continue
            problem = f"{name!r} has the shape {tuple(saved[name].shape)}, expected {tuple(shape)}"
        raise ValueError(f"{path} belongs to another model: {problem}. Resume with the same graph and model.")


def _by_name(model: nn.Module, optimizer: Any) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """The state of an optimizer by the names of parameters, and its groups."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = {names[id(parameter)]: values for parameter, values in optimizer.state.items()}
    groups = []
    for group in optimizer.param_groups:
        options = {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        groups.append(options | {"params": [names[id(parameter)] for parameter in group["params"]]})
    return state, groups
