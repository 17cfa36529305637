"""Commit markers: a file written last, with the size and a checksum of every other file in a folder.

The marker decides whether the folder is valid. CRC-32 finds every flipped bit, and is as fast as a disk.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from aswa_hf._utils.files import read_json, read_object, sync, write_json

FORMAT, VERSION = "aswa-commit", 1
_CHUNK = 1 << 22


def commit(folder: Path, marker: Path, files: Iterable[Path] | None = None) -> None:
    """Flushes files to the disk, then writes their sizes and checksums to `marker`, atomically.

    By default these are all files of the folder and those below it.
    """
    found = sorted(folder.rglob("*") if files is None else files)
    files = [path for path in found if path.is_file() and path != marker and not path.name.startswith(".")]
    folders = {folder, *(path.parent for path in files), *(path for path in found if path.is_dir())}
    for path in (*files, *sorted(folders)):
        sync(path)
    with ThreadPoolExecutor() as pool:
        sums = list(pool.map(_size_and_checksum, files))
    names = (path.relative_to(folder).as_posix() for path in files)
    content = {"format": FORMAT, "version": VERSION, "files": dict(zip(names, sums, strict=True))}
    marker.parent.mkdir(exist_ok=True)
    write_json(marker, content)


def damage(folder: Path, marker: Path, required: str) -> str | None:
    """Returns what is wrong with a folder, or None if it is valid.

    With a marker, all files that it lists must be unchanged. Without one, as in folders of older versions, `required`
    must exist (as valid JSON if its name ends in .json), and tensor files must not be truncated.
    """
    if not marker.exists():
        return _structural_damage(folder, required)
    return changed(folder, marker)


def changed(folder: Path, marker: Path, files: Iterable[Path] | None = None) -> str | None:
    """Returns how the first changed file of a folder differs from the marker, or None; `files` are checked (all)."""
    try:
        listed = read_json(marker, _Marker)["files"]
    except (OSError, ValueError):
        return f"{marker.name} cannot be read"
    expected = {name: (about["size"], about["crc32"]) for name, about in listed.items()}
    if not expected or any(Path(name).is_absolute() or ".." in Path(name).parts for name in expected):
        return f"{marker.name} does not list the files of this folder"
    if files is not None:
        names = {path.relative_to(folder).as_posix() for path in files}
        expected = {name: about for name, about in expected.items() if name in names}
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
        check: Callable[[Path], object] | None = CHECKS.get(path.suffix)
        if path == folder / required and path.suffix == ".json":
            check = read_object
        if check is not None and path.is_file():
            try:
                check(path)
            except (OSError, ValueError, zipfile.BadZipFile) as error:
                return f"{path.relative_to(folder).as_posix()} cannot be read: {error}"
    return None


def _check_safetensors(path: Path) -> None:
    # Imports torch, which the command line does not need at its start.
    from aswa_hf._utils.tensors import read_header

    read_header(path)


def _check_zip(path: Path) -> None:
    # What torch.save writes is a ZIP archive, whose directory is at its end.
    with path.open("rb") as file:
        start = file.read(2)
    if b"PK".startswith(start):
        zipfile.ZipFile(path).close()


CHECKS = {".safetensors": _check_safetensors, ".pt": _check_zip, ".pth": _check_zip}


@dataclass
class _File:
    size: int
    crc32: int


@dataclass
class _Marker:
    """The schema of a marker."""

    files: dict[str, _File]
