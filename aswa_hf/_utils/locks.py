"""A lock on a folder, so that two runs do not write to it at the same time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

LOCK_FILE = ".lock"


@contextmanager
def locked(folder: Path, name: str = LOCK_FILE) -> Iterator[None]:
    """Locks a folder for this run; the lock is released when the process ends, also if it is killed."""
    path = folder / name
    path.touch()  # a folder that cannot be written to is an error, a file system without locks is not
    with ExitStack() as held:
        try:
            # A lock that is only a file would outlive a process that is killed. Any thread may release this one.
            held.enter_context(FileLock(path, blocking=False, fallback_to_soft=False, thread_local=False))
        except Timeout:
            raise BlockingIOError("another run is using it") from None
        except (OSError, NotImplementedError) as error:
            logging.getLogger(__name__).info(f"{folder} cannot be locked: {error}")
        yield


# The locks that this process holds, with the thread that runs each training.
_held: dict[Path, tuple[int, ExitStack]] = {}


def hold(folder: Path, name: str) -> None:
    """Locks a folder until `release`.

    A thread runs one training at a time: if it locks a folder again, the earlier training has ended with an error
    without releasing its lock.
    """
    path = folder.resolve() / name
    if path in _held and _held[path][0] == threading.get_ident():
        release(folder, name)
    lock = ExitStack()
    lock.enter_context(locked(folder, name))
    _held[path] = (threading.get_ident(), lock)


def release(folder: Path, name: str) -> None:
    """Releases a lock of this process, if it holds one."""
    _, lock = _held.pop(folder.resolve() / name, (0, ExitStack()))
    lock.close()
