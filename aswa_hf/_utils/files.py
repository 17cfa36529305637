"""Atomic writes, JSON objects, and hints for mistyped folders."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """An atomic write: yields a temporary path that replaces `path` if the block succeeds, and is removed if not."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def sync(path: Path) -> None:
    """Flushes a file to the disk: a full disk may only be noticed then."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_text(path: str | Path, text: str) -> None:
    """Writes a text file in one atomic write."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_object(path: Path) -> dict[str, Any]:
    """Reads the JSON object in a file; raises ValueError with the name of the file if it holds anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a JSON file ({error}). Save it again.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object. Save it again.")
    return content


def refuse_mistyped(name: str | os.PathLike[str]) -> None:
    """Raises FileNotFoundError if `name` looks like a Hub repository but its first part is a folder here.

    Asking the Hub for it would take long, and tell less.
    """
    path = Path(name).expanduser()
    if path.is_absolute() or len(path.parts) != 2 or path.exists() or not path.parent.is_dir():
        return
    siblings = sorted(sibling.name for sibling in path.parent.iterdir() if not sibling.name.startswith("."))
    nearest = difflib.get_close_matches(path.name, siblings, n=1)
    hint = (
        f"Did you mean {path.parent / nearest[0]}?"
        if nearest
        else f"It holds {', '.join(siblings[:10]) or 'nothing'}."
    )
    raise FileNotFoundError(f"There is no {path.name!r} in the folder {path.parent}. {hint}")
