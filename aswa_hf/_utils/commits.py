"""Commit markers: a file written last, with the size and a checksum of every other file in a folder.

The marker decides whether the folder is valid. CRC-32 finds every flipped bit, and is as fast as a disk.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aswa_hf._utils.files import sync, write_text

FORMAT, VERSION = "aswa-commit", 1
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, zipfile.BadZipFile)
_CHUNK = 1 << 22


def commit(folder: Path, marker: Path) -> None:
    """Flushes all files of a folder to the disk, then writes their sizes and checksums to `marker`, atomically."""
    files, folders = [], [folder]
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            folders.append(path)
        elif path != marker and not path.name.startswith("."):
            files.append(path)
    for path in (*files, *folders):
        sync(path)
    with ThreadPoolExecutor() as pool:
        sums = list(pool.map(_size_and_checksum, files))
    names = (path.relative_to(folder).as_posix() for path in files)
    content = {"format": FORMAT, "version": VERSION, "files": dict(zip(names, sums, strict=True))}
    marker.parent.mkdir(exist_ok=True)
    write_text(marker, json.dumps(content, indent=2) + "\n")


def damage(folder: Path, marker: Path, required: str) -> str | None:
    """Returns what is wrong with a folder, or None if it is valid.

    With a marker, all files that it lists must be unchanged. Without one, as in folders of older versions, `required`
    must be there (as JSON, if its name says so), and tensor files must not be truncated.
    """
    if not marker.exists():
        return _structural_damage(folder, required)
    try:
        files = json.loads(marker.read_text(encoding="utf-8"))["files"]
        expected = {str(name): (int(about["size"]), int(about["crc32"])) for name, about in files.items()}
    except UNREADABLE:
        return f"{marker.name} cannot be read"
    for name, (size, _) in expected.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if (found := (folder / name).stat().st_size) != size:
            return f"{name} has {found} bytes instead of {size}"
    try:
        with ThreadPoolExecutor() as pool:
            found_sums = pool.map(_size_and_checksum, [folder / name for name in expected])
            for (name, (_, checksum)), now in zip(expected.items(), found_sums, strict=True):
                if now["crc32"] != checksum:
                    return f"the content of {name} has changed"
    except OSError as error:
        return f"it cannot be read: {error}"
    return None


def _size_and_checksum(path: Path) -> dict[str, int]:
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return {"size": size, "crc32": checksum}


def _structural_damage(folder: Path, required: str) -> str | None:
    if not (folder / required).is_file():
        return f"it has no {required}"
    for path in (folder / required, *sorted(folder.rglob("*"))):
        check = {".safetensors": _check_safetensors, ".pt": _check_zip, ".pth": _check_zip}.get(path.suffix)
        if path == folder / required and path.suffix == ".json":
            check = _check_json
        if check is not None and path.is_file():
            try:
                check(path)
            except UNREADABLE as error:
                return f"{path.relative_to(folder).as_posix()} cannot be read: {error}"
    return None


def _check_json(path: Path) -> None:
    content: Any = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")


def _check_safetensors(path: Path) -> None:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(length, path.stat().st_size)))
    ends = [about["data_offsets"][1] for name, about in header.items() if name != "__metadata__"]
    if 8 + length + max(ends, default=0) != path.stat().st_size:
        raise ValueError("it is truncated")


def _check_zip(path: Path) -> None:
    # What torch.save writes is a ZIP archive, whose directory is at its end.
    with path.open("rb") as file:
        start = file.read(2)
    if b"PK".startswith(start):
        zipfile.ZipFile(path).close()
