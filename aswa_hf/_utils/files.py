"""Atomic writes, JSON files that others may have written or damaged, and hints for mistyped folders."""

from __future__ import annotations

import difflib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

LARGEST = 2**63  # larger integers do not fit into a tensor or an array
SHOWN = 60  # characters of a wrong value in an error message
# What was expected, by pydantic's types of errors.
TYPES = {
    "bool_type": "true or false",
    "dataclass_type": "an object",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "a list",
    "string_type": "a string",
}


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """An atomic write: yields a temporary path that replaces `path` if the block succeeds, and is removed if not."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def sync(path: Path) -> None:
    """Flushes a file, or the names in a folder, to the disk: a full disk may only be noticed then."""
    if path.is_dir():
        with suppress(OSError):  # not all file systems can
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())


def remove_temporary(folder: Path) -> None:
    """Removes the temporary files of writes that were killed; no other process may be writing to the folder."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


# torch reports a file that cannot be written as a RuntimeError.
_UNWRITTEN = ("PytorchStreamWriter", "unexpected pos", "file write failed", "No space left")


def write_failure(error: Exception) -> str | None:
    """Returns why a file could not be written, if that is what the error means."""
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _UNWRITTEN):
        return f"a file could not be written completely, is the disk full? ({str(error).splitlines()[0]})"
    return str(error) if isinstance(error, OSError) else None


def write_text(path: str | Path, text: str) -> None:
    """Writes a text file in one atomic write."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, content: Mapping[str, Any]) -> None:
    """Writes an object as strict JSON, in one atomic write."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def read_json(path: str | Path, schema: Any = dict[str, Any], *, finite: bool = True) -> Any:
    """Returns the content of a JSON file; raises ValueError, with file and field, if it does not fit `schema`.

    `schema` is a type: `list[str]`, or a dataclass for an object of which some fields are known. Objects are returned
    as dicts with all their fields. `finite=False` accepts NaN and Infinity, which some libraries write.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a JSON file: byte {error.start + 1} is not UTF-8 text.") from None
    return parse_json(text, str(path), schema, finite=finite)


def read_object(path: str | Path) -> dict[str, Any]:
    """Returns the JSON object in a file of any program, whatever its fields."""
    content: dict[str, Any] = read_json(path, finite=False)
    return content


def parse_json(text: str, where: str, schema: Any = dict[str, Any], *, finite: bool = True) -> Any:
    """Returns the content of a JSON text, checked like that of a file; `where` names it in errors."""
    try:
        content = json.loads(
            text,
            parse_int=_integer,
            parse_float=_finite if finite else float,
            parse_constant=_finite if finite else float,
        )
        problem = _misfit(content, text, schema)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"{where} is not a JSON file, or is damaged: {error.msg} at {place}.") from None
    except ValueError as error:  # from the functions that convert numbers
        raise ValueError(f"{where}: {error}") from None
    except RecursionError:
        raise ValueError(f"{where} is damaged: its lists and objects are nested too deeply.") from None
    if problem:
        raise ValueError(f"{where}{problem}")
    return content


def _misfit(content: Any, text: str, schema: Any) -> str | None:
    """What does not fit the schema, if anything."""
    from pydantic import TypeAdapter, ValidationError

    try:
        TypeAdapter(schema).validate_json(text, strict=True)
    except ValidationError as error:
        return _problem(content, error.errors(include_url=False, include_context=False))
    return None


def _integer(text: str) -> int:
    if len(text) > 20 or abs(int(text)) >= LARGEST:
        raise ValueError(f"the number {_short(text)} is out of range.")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{_short(text)} is not a finite number.")
    return number


def _problem(content: Any, problems: Any) -> str:
    """The first problem that pydantic found, and what was expected in its place."""
    if problems[0]["type"] == "json_invalid":
        return f" is damaged: {problems[0]['msg']}."
    # A union has a problem for each of its types: the one that is deepest in the content is the most specific.
    first = max(problems, key=lambda one: _find(content, one["loc"])[2])
    field, found, _ = _find(content, first["loc"])
    if first["type"] == "missing":
        return f" has no {first['loc'][-1]!r}" + (f" in {field}." if field else ".")
    same = [one for one in problems if _find(content, one["loc"])[0] == field]
    words = [TYPES.get(one["type"], one["msg"].removeprefix("Input should be ")) for one in same]
    expected = " or ".join(dict.fromkeys(words))
    return f"{f': {field} is' if field else ' contains'} {_short(repr(found))}, expected {expected}."


def _find(content: Any, place: tuple[int | str, ...]) -> tuple[str, Any, int]:
    """The field at a place, as text, its value and depth; pydantic adds names of types, which are left out."""
    field, depth = "", 0
    for step in place:
        if isinstance(step, int) and isinstance(content, list) and step < len(content):
            field += f"[{step}]"
        elif isinstance(content, dict) and step in content:
            field += f".{step}" if field else str(step)
        else:
            continue
        content, depth = content[step], depth + 1
    return field, content, depth


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def make_folder(path: str | Path) -> Path:
    """Creates a folder and its parents, if they do not exist; raises OSError with the reason if that fails."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        place = next((parent for parent in (path, *path.parents) if parent.exists()), path)
        reason = f"{place} is a file" if place.is_file() else str(error.strerror or error)
        raise OSError(f"The folder {path} cannot be created: {reason}. Choose another one.") from None
    return path


@contextmanager
def new_folder(path: str | Path) -> Iterator[None]:
    """Creates a folder for files that are all written in the block: if that fails, there are none of them."""
    path = Path(path)
    existed = path.exists()
    make_folder(path)
    if any(path.iterdir()):
        raise ValueError(f"{path} is not empty. Choose another folder, so that files are not mixed.")
    try:
        yield
    except BaseException:
        for written in path.iterdir():
            if written.is_dir():
                shutil.rmtree(written)
            else:
                written.unlink()
        if not existed:
            path.rmdir()
        raise


def nearest_path(path: str | os.PathLike[str]) -> str:
    """Returns a question with the name in the same folder that is nearest to a path that does not exist, or ""."""
    path = Path(path).expanduser()
    nearest = difflib.get_close_matches(path.name, _names_in(path.parent), n=1, cutoff=0.7)
    return f" Did you mean {path.parent / nearest[0]}?" if nearest else ""


def refuse_mistyped(name: str | os.PathLike[str], *, owner: bool = True) -> None:
    """Raises FileNotFoundError for a path that does not exist and cannot be meant as a Hub repository.

    Asking the Hub for it would take long, and the error would be less clear. Models have an `owner` (`user/model`);
    some old datasets have none.
    """
    path = Path(name).expanduser()
    if path.exists():
        return
    if path.is_absolute() or len(path.parts) > 2 or path.parts[:1] == ("..",):
        raise FileNotFoundError(f"There is no folder {path}.{nearest_path(path)}")
    hint = nearest_path(path)
    if len(path.parts) == 2 and path.parent.is_dir():
        hint = hint or f" It holds {', '.join(_names_in(path.parent)[:10]) or 'nothing'}."
        raise FileNotFoundError(f"There is no {path.name!r} in the folder {path.parent}.{hint}")
    if len(path.parts) < 2 and (owner or hint):
        expected = "" if hint or not owner else " Expected a folder, or a repository on the Hub like user/model."
        raise FileNotFoundError(f"There is no folder {str(name)!r}.{hint}{expected}")


def _names_in(folder: Path) -> list[str]:
    """The names in a folder, if it is one that can be read, without hidden ones."""
    try:
        return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []
