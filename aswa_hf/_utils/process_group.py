"""The process group of a launched script, destroyed on every way out of it. Importing this does not load torch."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def closing_process_group() -> Iterator[None]:
    """Destroys the process group that is started in the block, however the block ends.

    >>> with closing_process_group():
    ...     main()

    Models, optimizers and accelerators are released first if they are variables of a function that the block calls, as
    above. A group that something still refers to keeps its threads, and a thread that is still running while the
    interpreter shuts down aborts the process ("terminate called without an active exception").

    A group that exists before the block is not touched. Without a group this does nothing.
    """
    if _group() is not None:
        yield
        return
    try:
        yield
    except BaseException:
        if _is_launched():
            # The traceback refers to the models until it has been printed. The group is dropped after them, by Python:
            # threads that need the interpreter's lock to finish get it then, and not if a C++ object drops the group.
            atexit.register(_release, [_group()])
        # Destroying an NCCL group could wait for other processes that wait for this one; the launcher ends them.
        if _group() is not None and _distributed().get_backend() == "gloo":
            _distributed().destroy_process_group()
        raise
    if _is_launched():
        _release([])
    if _group() is not None:
        _distributed().destroy_process_group()


def _distributed() -> Any:
    """`torch.distributed`, if something has loaded it: otherwise there is no group."""
    module = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() else None


def _group() -> Any:
    distributed = _distributed()
    return distributed.group.WORLD if distributed is not None and distributed.is_initialized() else None


def _is_launched() -> bool:
    """Whether there is a group, or was one: `Accelerator.end_training()` destroys it, but releases no model."""
    return _distributed() is not None and (_group() is not None or "RANK" in os.environ)


def _release(last: list[Any]) -> None:
    """Drops what is no longer in use but refers to process groups, then the content of `last`."""
    for name in ("last_exc", "last_value", "last_traceback"):
        vars(sys).pop(name, None)
    gc.collect()
    # Meshes refer to their groups, and torch keeps meshes in many caches of operations on DTensors.
    for found in gc.get_objects():
        if type(found) is _distributed().device_mesh.DeviceMesh:
            getattr(found, "_pg_registry", {}).clear()  # older versions of torch keep only names in a mesh
    last.clear()
