"""The process group of a launched script, destroyed on every way out of it. Importing this does not load torch."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_kept: list[Any] = []  # the groups that `keep_group` refers to


def keep_group() -> None:
    """Refers to the current gloo group until the block of `closing_process_group`, or else the process, ends.

    `Accelerator.end_training()` drops torch's reference while a DDP model still has one. That model would be the last
    to drop the group, from C++, with the interpreter's lock: one of the group's threads may need this lock to finish,
    and both wait forever. If Python is the last, the lock is released.
    """
    if (group := _group()) is not None and "gloo" in _backends():
        _keep(group)


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
    before = len(_kept)
    try:
        yield
    except BaseException:
        if _is_launched():
            # The traceback refers to the models until it has been printed; the group is dropped after them.
            _keep(_group())
        # Destroying an NCCL group could wait for other processes that wait for this one; the launcher ends them.
        if _group() is not None and _backends() == {"gloo"}:
            _distributed().destroy_process_group()
        raise
    if _is_launched():
        _release()
    if _group() is not None:
        _distributed().destroy_process_group()
    del _kept[before:]
    if not _kept:
        atexit.unregister(_drop)


def _distributed() -> Any:
    """`torch.distributed`, if something has loaded it: otherwise there is no group."""
    module = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() else None


def _group() -> Any:
    distributed = _distributed()
    return distributed.group.WORLD if distributed is not None and distributed.is_initialized() else None


def _backends() -> set[str]:
    """The backends of the group, of which every kind of device has one: "cpu:gloo,cuda:nccl"."""
    return {part.rpartition(":")[2] for part in _distributed().get_backend_config().split(",")}


def _is_launched() -> bool:
    """Whether there is a group, or was one: `Accelerator.end_training()` destroys it, but releases no model."""
    return _distributed() is not None and (_group() is not None or bool(_kept) or "RANK" in os.environ)


def _release() -> None:
    """Drops what is no longer in use but refers to process groups."""
    for name in ("last_exc", "last_value", "last_traceback"):
        vars(sys).pop(name, None)
    gc.collect()
    # Meshes refer to their groups, and torch keeps meshes in many caches of operations on DTensors.
    for found in gc.get_objects():
        if type(found) is _distributed().device_mesh.DeviceMesh:
            getattr(found, "_pg_registry", {}).clear()  # older versions of torch keep only names in a mesh


def _keep(group: Any) -> None:
    """Refers to a group, if there is one, until the end of the process."""
    if group is not None and not any(kept is group for kept in _kept):
        _kept.append(group)
    atexit.unregister(_drop)
    atexit.register(_drop)


def _drop() -> None:
    """Drops the groups that were kept, after what refers to them."""
    _release()
    _kept.clear()


def _forget() -> None:
    """In a forked process, which has no threads of a group: to drop the group would wait for them."""
    atexit.unregister(_drop)
    if _kept:
        import ctypes  # not at the start of every command

        for group in _kept:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # so that it is never dropped
        _kept.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
