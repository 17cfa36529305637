"""What is kept beside a checkpoint: `average.safetensors` and `state.json`, for all strategies of a run.

Tensors are named `<strategy>/averaged/<parameter>` and `<strategy>/buffers/<buffer>`. Everything else (scores,
history, versions) is JSON. It stands in the header of the tensor file, so that one rename replaces tensors and state
together, and once more in `state.json` for people and tools to read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from aswa_hf.files import replacing, sync, write_text
from aswa_hf.strategy import Strategy
from aswa_hf.trajectory import decode_number, encode_number

AVERAGE_FILE = "average.safetensors"
STATE_FILE = "state.json"
FORMAT = "aswa-state"
VERSION = 1
_LIBRARIES = ("aswa-hf", "torch", "transformers", "accelerate", "timm", "safetensors")


def library_versions() -> dict[str, str]:
    """The versions of what a run depends on, as far as it is installed."""
    found = {}
    for library in _LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return found


def save_state(folder: str | Path, strategies: Mapping[str, Strategy], **more: Any) -> None:
    """Writes the state of `strategies` and `more` (plain values) to `folder`, replacing an earlier one at once."""
    tensors, states = {}, {}
    for name, strategy in strategies.items():
        state = strategy.state_dict(copy=False)
        for kind in ("averaged", "buffers"):
            for key, tensor in state.pop(kind).items():
                # safetensors refuses memory that is shared or strided.
                tensors[f"{name}/{kind}/{key}"] = tensor.cpu().contiguous()
        states[name] = state | {"score": encode_number(state["score"])}
    content = {
        "format": FORMAT,
        "version": VERSION,
        "strategies": states,
        "versions": library_versions(),
        **more,
    }
    text = json.dumps(content, indent=2, allow_nan=False)
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / AVERAGE_FILE) as temporary:
            save_file(tensors, temporary, metadata={FORMAT: text})
            sync(temporary)
            # Before the rename: whatever fails, the tensor file is still the old one.
            write_text(folder / STATE_FILE, text + "\n")
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"The averaging state could not be saved to {folder}: {error}. Whatever was saved there before is "
            "unchanged; free some space and save again."
        ) from error


def load_state(folder: str | Path, strategies: Mapping[str, Strategy]) -> dict[str, Any]:
    """Restores `strategies` from `folder`; gives back whatever else was saved with them."""
    path = Path(folder) / AVERAGE_FILE
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            content = json.loads(header[FORMAT])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise FileNotFoundError(f"There is no averaging state at {path}.") from None
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a complete averaging state of aswa-hf: {error!r}.") from None
    if content.get("version") != VERSION:
        raise ValueError(f"{path} has version {content.get('version')}, this aswa-hf reads version {VERSION}.")
    saved = content.pop("strategies")
    if set(saved) != set(strategies):
        raise ValueError(
            f"{path} holds the strategies {', '.join(saved)}, but this run has {', '.join(strategies)}. Resume with "
            "the same strategies."
        )
    for name, state in saved.items():
        state["score"] = decode_number(state["score"])
        for kind in ("averaged", "buffers"):
            prefix = f"{name}/{kind}/"
            state[kind] = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
        strategies[name].check_state_dict(state)
    # Only now, when none of them will be refused.
    for name, state in saved.items():
        strategies[name].load_state_dict(state)
    return content
