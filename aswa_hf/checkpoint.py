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
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from aswa_hf._utils.distributed import agree, rank, succeeding_together, world_size
from aswa_hf._utils.files import replacing, sync, write_text
from aswa_hf._utils.sharding import computing_device, is_dtensor, is_first_copy, is_sharded, own_rows
from aswa_hf.strategies import Strategy
from aswa_hf.trajectory import decode_number, encode_number

AVERAGE_FILE = "average.safetensors"
STATE_FILE = "state.json"
SHARD_FILE = "average-{save}-{rank}.safetensors"
FORMAT = "aswa-state"
VERSION = 1
_LIBRARIES = ("aswa-hf", "torch", "transformers", "accelerate", "timm", "safetensors")


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
    whole: dict[str, Tensor] = {}
    shards: dict[str, Any] = {}
    states = {}
    for name, strategy in strategies.items():
        state = strategy.state_dict(copy=False)
        for kind in [key for key, value in state.items() if isinstance(value, dict)]:
            for key, tensor in state.pop(kind).items():
                (shards if is_dtensor(tensor) else whole)[f"{name}/{kind}/{key}"] = tensor
        states[name] = state | {"score": encode_number(state["score"])}
    content = {
        "format": FORMAT,
        "version": VERSION,
        "strategies": states,
        "versions": library_versions(),
        **more,
    }
    sharded = next((strategy.model for strategy in strategies.values() if is_sharded(strategy.model)), None)
    if sharded is not None:
        device = computing_device(sharded)
        save = f"{int(agree(secrets.randbits(48), device)):012x}"
        content["shards"] = [SHARD_FILE.format(save=save, rank=number) for number in range(world_size())]
    text = json.dumps(content, indent=2, allow_nan=False)
    folder = Path(folder)
    try:
        if sharded is None:
            _write_index(folder, whole, text)
        else:
            _write_shards_and_index(folder, whole, shards, text, content["shards"], device)
    except OSError as error:
        raise OSError(
            f"The averaging state could not be saved to {folder}: {error}. An earlier state in this folder is "
            "unchanged; free some space and save again."
        ) from error
    if sharded is None or rank() == 0:
        for file in folder.glob(SHARD_FILE.format(save="*", rank="*")):
            if file.name not in content.get("shards", ()):
                with suppress(OSError):  # it only takes up space
                    file.unlink()


def _write_shards_and_index(
    folder: Path,
    whole: Mapping[str, Tensor],
    shards: Mapping[str, Any],
    text: str,
    files: Sequence[str],
    device: torch.device,
) -> None:
    """Writes the rows of this rank; when all ranks have done so, rank 0 writes the index."""
    own = folder / files[rank()]
    parts = {key: tensor for key, tensor in shards.items() if is_first_copy(tensor)}
    places = {key: {"start": own_rows(t).start, "shape": list(t.shape)} for key, t in parts.items()}
    try:
        with succeeding_together(device):
            folder.mkdir(parents=True, exist_ok=True)
            _write_tensors(own, {key: tensor.to_local() for key, tensor in parts.items()}, json.dumps(places))
        with succeeding_together(device):
            if rank() == 0:
                _write_index(folder, whole, text)
    except OSError:
        # All ranks raise it. After other failures, such as a lost rank, the index may already name this file.
        own.unlink(missing_ok=True)
        raise


def _write_index(folder: Path, tensors: Mapping[str, Tensor], text: str) -> None:
    """Writes tensors and state; the rename at the end makes them valid."""
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / AVERAGE_FILE) as temporary:
        _write_tensors(temporary, tensors, text)
        # Before the rename: if anything fails, the tensor file is still the old one.
        write_text(folder / STATE_FILE, text + "\n")


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], text: str) -> None:
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

    def add(self, start: int, file: Any) -> None:
        rows = file.get_slice(self.key).get_shape()[:1]
        self.parts.append((start, start + (rows[0] if rows else 1), file))
        self.parts.sort(key=lambda part: part[:2])

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
                file.get_slice(self.key)[max(rows.start, start) - start : min(rows.stop, end) - start]
                for start, end, file in self.parts
                if start < rows.stop and rows.start < end
            ]
        if not found:
            empty: Tensor = self.parts[0][2].get_slice(self.key)[:0]
            return empty
        return torch.cat(found) if len(found) > 1 else found[0]


def load_state(folder: str | Path, strategies: Mapping[str, Strategy]) -> dict[str, Any]:
    """Restores `strategies` from `folder`; returns everything else that was saved with them.

    The run that saved may have had another number of processes: each process reads the rows it holds.
    """
    path = Path(folder) / AVERAGE_FILE
    if not path.exists():
        raise FileNotFoundError(f"There is no averaging state at {path}.")
    with ExitStack() as files:
        try:
            content, tensors = _open_state(path, files)
        except (SafetensorError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a complete averaging state of aswa-hf: {error!r}.") from None
        if content.get("version") != VERSION:
            raise ValueError(f"{path} has version {content.get('version')}, this aswa-hf reads version {VERSION}.")
        saved = content.pop("strategies")
        if set(saved) != set(strategies):
            raise ValueError(
                f"{path} holds the strategies {', '.join(saved)}, but this run has {', '.join(strategies)}. Resume "
                "with the same strategies."
            )
        for name, state in saved.items():
            state["score"] = decode_number(state["score"])
            state |= {"averaged": {}, "buffers": {}}
            for key, tensor in tensors.items():
                if key.startswith(f"{name}/"):
                    kind, _, tensor_name = key.removeprefix(f"{name}/").partition("/")
                    state.setdefault(kind, {})[tensor_name] = tensor
                    # A model without buffers has none in its averages either.
                    state.setdefault(kind.replace("averaged", "buffers"), {})
            strategies[name].check_state_dict(state)
        # Only after all have passed the check.
        for name, state in saved.items():
            strategies[name].load_state_dict(state)
    return content


def _open_state(path: Path, files: ExitStack) -> tuple[dict[str, Any], dict[str, SavedTensor]]:
    """Returns what `save_state` wrote, with tensors that can be read while `files` is open."""
    index = files.enter_context(safe_open(path, framework="pt"))
    content = json.loads((index.metadata() or {})[FORMAT])
    tensors: dict[str, SavedTensor] = {}
    for key in index.keys():  # noqa: SIM118 (not a dict)
        tensors[key] = SavedTensor(key, index.get_slice(key).get_shape())
        tensors[key].add(0, index)
    for name in content.pop("shards", ()):
        try:
            file = files.enter_context(safe_open(path.with_name(name), framework="pt"))
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{path} was saved by several processes, and {name} of one of them is missing beside it. Save to and "
                "resume from a disk that all processes share."
            ) from None
        for key, place in json.loads((file.metadata() or {})[FORMAT]).items():
            tensors.setdefault(key, SavedTensor(key, place["shape"])).add(place["start"], file)
    if missing := next((key for key, tensor in tensors.items() if not tensor.is_complete), None):
        raise ValueError(f"{path} is not a complete averaging state of aswa-hf: rows of {missing!r} are missing.")
    return content, tensors


def __getattr__(name: str) -> Any:
    # Imported on access: it depends on this module, and on models and data that nothing here needs.
    if name == "average_checkpoints":
        return import_module("aswa_hf.checkpoints").average_checkpoints
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
