"""Random state: what an extra evaluation or a pass over the training data draws must not be missed by training."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader


@contextmanager
def preserved_rng(seed: int | None = None) -> Iterator[None]:
    """Restores Python's, NumPy's and torch's global random state on leaving; inside it starts from `seed`, if given.

    Every pass over a DataLoader draws from the global generator, so that an evaluation which training would not have
    done shifts the order of all later batches. Inside this context it does not.
    """
    # NumPy counts only if the process uses it, and then it is already imported.
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy else None
    cpu_state = torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    mps_state = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    try:
        if seed is not None:
            random.seed(seed)
            torch.manual_seed(seed)
            if numpy:
                numpy.random.seed(seed)
        yield
    finally:
        random.setstate(python_state)
        torch.set_rng_state(cpu_state)
        if numpy and numpy_state is not None:
            numpy.random.set_state(numpy_state)
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)
        if mps_state is not None:
            torch.mps.set_rng_state(mps_state)


@contextmanager
def rewound(batches: Any) -> Iterator[Any]:
    """`batches` from their beginning, in the order of epoch 0; afterwards a loader is where it was.

    A loader with a generator of its own, with workers that stay, or of accelerate's making remembers each pass over
    it. It may be in the middle of one, or be left in the middle of this one.
    """
    saved: list[tuple[Any, str, Any]] = []
    for part in _parts(batches):
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


def _parts(loader: Any) -> list[Any]:
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
