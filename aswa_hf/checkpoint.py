"""The averaging state beside a checkpoint: `average.safetensors` and `state.json`, for all strategies of a run.

Tensors are named `<strategy>/averaged/<parameter>` and `<strategy>/buffers/<buffer>`, those of a strategy's further
averages `<strategy>/<part>.averaged/<parameter>`. Everything else (scores, history, versions) is JSON. It is in the
header of the tensor file, so that one rename replaces tensors and state together, and also in `state.json` for people
and tools to read.

For a sharded model every rank writes the rows it holds to its own file, `average-<save>-<rank>.safetensors`.
`average.safetensors` is then the index: it holds what is not sharded, and names these files. Each save uses new names,
so that the old state is complete until the index is renamed, and the new one from then on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from torch import Tensor

from aswa_hf._utils.files import parse_json
from aswa_hf._utils.shard_files import FORMAT, open_index, write_tensors
from aswa_hf._utils.sharding import computing_device, is_sharded
from aswa_hf.strategies import Strategy
from aswa_hf.trajectory import Number, decode_number, encode_number

AVERAGE_FILE = "average.safetensors"
STATE_FILE = "state.json"
VERSION = 1
_LIBRARIES = ("aswa-hf", "torch", "transformers", "accelerate", "timm", "safetensors")


@dataclass
class _SavedStrategy:
    score: Number | None


@dataclass
class _SavedState:
    """The schema of a state; its strategies check everything else in it."""

    version: int
    strategies: dict[str, _SavedStrategy]


@cache  # reading them searches the disk
def library_versions() -> dict[str, str]:
    """Returns the versions of the libraries that a run depends on and that are installed."""
    found = {}
    for library in _LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return found


def save_state(folder: str | Path, strategies: Mapping[str, Strategy], **more: Any) -> None:
    """Writes the state of `strategies` and `more` (plain values) to `folder`, replacing an earlier state atomically.

    With a sharded model all ranks must call it, with the same folder on a disk that they share.
    """
    tensors: dict[str, Tensor] = {}
    states = {}
    for name, strategy in strategies.items():
        state = strategy.state_dict(copy=False)
        for kind in [key for key, value in state.items() if isinstance(value, dict)]:
            for key, tensor in state.pop(kind).items():
                tensors[f"{name}/{kind}/{key}"] = tensor
        states[name] = state | {"score": encode_number(state["score"])}
    content = {
        "format": FORMAT,
        "version": VERSION,
        "strategies": states,
        "versions": library_versions(),
        **more,
    }
    sharded = next((strategy.model for strategy in strategies.values() if is_sharded(strategy.model)), None)
    device = None if sharded is None else computing_device(sharded)
    try:
        write_tensors(Path(folder) / AVERAGE_FILE, tensors, content, device, readable=STATE_FILE)
    except OSError as error:
        raise OSError(
            f"The averaging state could not be saved to {folder}: {error}. An earlier state in this folder is "
            "unchanged; free some space and save again."
        ) from error


def load_state(
    folder: str | Path, strategies: Mapping[str, Strategy], schema: Any = dict[str, Any], by: str = "aswa-hf"
) -> dict[str, Any]:
    """Restores `strategies` from `folder`; returns everything else that was saved with them.

    It must fit `schema`; `by` names what saves such states in the error message.

    The run that saved may have had a different number of processes: each process reads the rows it holds. Raises
    ValueError, changing nothing, if anything is damaged or belongs to another run.
    """
    path = Path(folder) / AVERAGE_FILE
    if not path.exists():
        raise FileNotFoundError(f"There is no averaging state at {path}.")
    with ExitStack() as files:
        try:
            content, tensors = open_index(path, files, _SavedState)
        except ValueError as error:
            raise ValueError(f"{path} is not a complete averaging state of aswa-hf: {error}") from None
        if content.get("version") != VERSION:
            raise ValueError(f"{path} has version {content.get('version')}, this aswa-hf reads version {VERSION}.")
        parse_json(
            json.dumps(content), f"{path.parent.parent} was not saved by {by}, or is damaged: its state", schema
        )
        saved = content.pop("strategies")
        if set(saved) != set(strategies):
            raise ValueError(
                f"{path} holds the strategies {', '.join(saved)}, but this run has {', '.join(strategies)}. Resume "
                "with the same strategies."
            )
        if unknown := [key for key in tensors if key.partition("/")[0] not in saved]:
            raise ValueError(f"{path} has the tensor {unknown[0]!r}, which belongs to none of its strategies.")
        for name, state in saved.items():
            state["score"] = decode_number(state["score"])
            state |= {"averaged": {}, "buffers": {}}
            for key, tensor in tensors.items():
                if key.startswith(f"{name}/"):
                    kind, _, tensor_name = key.removeprefix(f"{name}/").partition("/")
                    state.setdefault(kind, {})[tensor_name] = tensor
                    # A model without buffers has none in its averages either.
                    state.setdefault(kind.replace("averaged", "buffers"), {})
            try:
                strategies[name].check_state_dict(state)
            except ValueError as error:
                raise ValueError(f"{path} cannot be resumed from, strategy {name!r}: {error}") from None
        # Only after all have passed the check.
        for name, state in saved.items():
            strategies[name].load_state_dict(state)
    return content


def __getattr__(name: str) -> Any:
    # Imported on access: it depends on this module, and on models and data that nothing here needs.
    if name == "average_checkpoints":
        return import_module("aswa_hf.checkpoints").average_checkpoints
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
