"""Random state: extra evaluations and passes over the training data leave that of training unchanged."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader


@contextmanager
def preserved_rng(seed: int | None = None) -> Iterator[None]:
    """Restores Python's, NumPy's and torch's global random state on leaving; inside it starts from `seed`, if given.

    Every pass over a DataLoader draws from the global generator, so that an evaluation which training would not have
    done shifts the order of all later batches. Inside this context it does not.
    """
    state = rng_state()
    try:
        if seed is not None:
            random.seed(seed)
            torch.manual_seed(seed)
            if numpy := sys.modules.get("numpy"):
                numpy.random.seed(seed)
        yield
    finally:
        set_rng_state(state)


def rng_state() -> dict[str, Any]:
    """Python's, NumPy's and torch's global random state."""
    # NumPy counts only if the process uses it, and then it is already imported.
    numpy = sys.modules.get("numpy")
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state() if numpy else None,
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None,
        "mps": torch.mps.get_rng_state() if torch.backends.mps.is_available() else None,
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restores a state; generators that were not in use when it was taken are unchanged."""
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    if state["numpy"] is not None:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state_all(state["cuda"])
    if state["mps"] is not None:
        torch.mps.set_rng_state(state["mps"])


def rng_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """A state as tensors, for a file."""
    _, words, normal = state["python"]
    tensors = {"python": torch.tensor(words), "python.normal": _optional(normal), "cpu": state["cpu"]}
    if isinstance(state["numpy"], tuple):  # not if the user has set another kind of generator
        _, words, position, has_normal, normal = state["numpy"]
        tensors["numpy"] = torch.tensor([*words.tolist(), position])
        tensors["numpy.normal"] = _optional(normal if has_normal else None)
    tensors |= {f"cuda.{index}": device for index, device in enumerate(state["cuda"] or ())}
    return tensors if state["mps"] is None else tensors | {"mps": state["mps"]}


def rng_from_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The inverse of `rng_tensors`; devices that are not available now are left out."""
    normal = tensors["python.normal"].tolist()
    state: dict[str, Any] = dict.fromkeys(("numpy", "cuda", "mps"))
    state |= {"python": (3, tuple(tensors["python"].tolist()), *(normal or [None])), "cpu": tensors["cpu"]}
    if "numpy" in tensors and (numpy := sys.modules.get("numpy")):
        *words, position = tensors["numpy"].tolist()
        normal = tensors["numpy.normal"].tolist()
        keys = numpy.array(words, dtype=numpy.uint32)
        state["numpy"] = ("MT19937", keys, position, len(normal), *(normal or [0.0]))
    devices = [tensors[f"cuda.{index}"] for index in range(len(tensors)) if f"cuda.{index}" in tensors]
    if devices and torch.cuda.is_available() and len(devices) == torch.cuda.device_count():
        state["cuda"] = devices
    if "mps" in tensors and torch.backends.mps.is_available():
        state["mps"] = tensors["mps"]
    return state


def _optional(number: float | None) -> Tensor:
    return torch.tensor([] if number is None else [number], dtype=torch.float64)


@contextmanager
def rewound(batches: Any) -> Iterator[Any]:
    """Yields `batches` rewound to the start of epoch 0, and restores the state of a loader afterwards.

    A loader with its own generator, with persistent workers, or prepared by accelerate remembers each pass over it. It
    may be in the middle of one, or be left in the middle of this one.
    """
    saved: list[tuple[Any, str, Any]] = []
    for part in loader_parts(batches):
        if hasattr(part, "gradient_state") and hasattr(part, "end_of_dataloader"):
            state = part.gradient_state
            saved.append((state, "dataloader_references", list(state.dataloader_references)))
            saved += [(part, flag, getattr(part, flag)) for flag in ("end_of_dataloader", "remainder")]
        if isinstance(part, DataLoader) and part._iterator is not None:
            saved.append((part, "_iterator", part._iterator))
            part._iterator = None
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            saved.append((generator, "state", generator.get_state()))
            generator.manual_seed(0)
        for counter in ("iteration", "epoch"):
            if isinstance(getattr(part, counter, None), int):
                saved.append((part, counter, getattr(part, counter)))
                setattr(part, counter, 0)
    try:
        yield batches
    finally:
        # Backwards, because a loader and its sampler may share a generator: its first state is the one to keep.
        for owner, attribute, value in reversed(saved):
            if isinstance(owner, torch.Generator):
                owner.set_state(value)
            else:
                setattr(owner, attribute, value)


def loader_parts(loader: Any) -> list[Any]:
    """A loader and the loaders and samplers nested in it, each once."""
    found: list[Any] = []
    queue = [loader]
    while queue:
        part = queue.pop()
        if part is None or any(part is known for known in found):
            continue
        found.append(part)
        queue += [getattr(part, name, None) for name in ("base_dataloader", "batch_sampler", "sampler")]
    return found
