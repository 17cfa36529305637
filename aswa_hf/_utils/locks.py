"""A lock on a folder, so that two runs do not write to it at the same time."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

LOCK_FILE = ".lock"


@contextmanager
def only_user(folder: Path) -> Iterator[None]:
    """Keeps other runs out of a folder; the lock ends with this process, however that ends."""
    path = folder / LOCK_FILE
    path.touch()  # a folder that cannot be written to is an error, a file system without locks is not
    with ExitStack() as held:
        try:
            # A lock that is only a file would outlive a process that is killed.
            held.enter_context(FileLock(path, blocking=False, fallback_to_soft=False))
        except Timeout:
            raise BlockingIOError("another run is using it") from None
        except (OSError, NotImplementedError) as error:
            logging.getLogger(__name__).info(f"{folder} cannot be locked: {error}")
        yield
