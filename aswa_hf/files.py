"""Files that a killed process or a full disk leaves either as they were or complete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A name to write to: it takes the place of `path` when the block succeeds, and is gone when it fails."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def sync(path: Path) -> None:
    """Waits until a file is on the disk: a full disk may show only then."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def write_text(path: str | Path, text: str) -> None:
    """Writes a text file in one piece."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
