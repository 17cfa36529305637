"""A seeded generator of damaged files: every kind of file that the commands read, in many ways."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

# What each file of the folder made by `tests/cli/test_bad_inputs.py` is read by.
KGE = {"predict", "query", "evaluate", "push"}
READERS = {
    "run/config.json": KGE,
    "run/model.safetensors": KGE,
    "run/entities.json": KGE,
    "run/relations.json": KGE,
    "run/settings.json": {"evaluate", "resume"},
    "run/results.json": {"report"},
    "grid/run/settings.json": {"reproduce"},
    "grid/run/results.json": {"reproduce"},
    "run/aswa_trajectory.json": {"report", "push"},
    "run/aswa/average.safetensors": {"evaluate-strategies"},
    "run/checkpoint-2/model.safetensors": {"average-run"},
    "old/checkpoint-2/model.safetensors": {"average", "average-aswa"},
    "old/checkpoint-2/config.json": {"average-aswa"},
    "old/checkpoint-2/trainer_state.json": {"average"},
    "old/checkpoint-2/entities.json": {"average-aswa"},
    "sharded/model.safetensors.index.json": {"average-sharded", "predict-sharded"},
    "sharded/model-0.safetensors": {"average-sharded", "predict-sharded"},
    "data/train.txt": {"evaluate", "predict-known"},
    "csv/train.csv": {"evaluate-csv"},
    "nt/train.nt": {"evaluate-nt"},
    "parquet/train.parquet": {"evaluate-parquet"},
    "labeled/entities.json": {"predict-labeled"},
    "labeled/relations.tsv": {"predict-labeled"},
    "numbered/numbered.json": {"evaluate-numbered"},
    "numbered/train.arrow": {"evaluate-numbered"},
    "numbered/entities.arrow": {"evaluate-numbered"},
    "queries.json": {"evaluate-queries"},
    "queries.parquet": {"evaluate-parquet-queries"},
    "recipes.yaml": {"recipe"},
    "adapter/adapter_config.json": {"push-adapter"},
    "adapter/adapter_model.safetensors": {"push-adapter", "average-adapter"},
    "adapter/aswa_trajectory.json": {"push-adapter"},
    "image/config.json": {"evaluate-image", "push-image"},
    "image/model.safetensors": {"evaluate-image", "push-image"},
    "image/settings.json": {"evaluate-image"},
    "image/aswa_trajectory.json": {"push-image"},
}
# Files with a checksum: any other content is noticed, also one that could have been meant. The first are of a finished
# run, the others of its last checkpoint.
MARKED = {
    "marked/config.json": {"predict", "push"},
    "marked/model.safetensors": {"predict", "evaluate-strategies", "push", "average"},
    "marked/entities.json": {"predict", "query"},
    "marked/relations.json": {"predict"},
    "marked/settings.json": {"evaluate"},
    "marked/results.json": {"report", "push"},
    "marked/aswa_trajectory.json": {"report", "push"},
    "marked/aswa/average.safetensors": {"evaluate-strategies"},
    "marked/aswa/commit.json": {"predict", "push", "report"},
    "marked-image/config.json": {"evaluate-image", "push-image"},
    "marked-image/model.safetensors": {"evaluate-image", "push-image"},
    **{
        f"marked/checkpoint-3/{name}": {"resume"}
        for name in (
            "model.safetensors",
            "config.json",
            "entities.json",
            "trainer_state.json",
            "optimizer.pt",
            "scheduler.pt",
            "rng_state.pth",
            "aswa/average.safetensors",
            "aswa/state.json",
            "aswa/commit.json",
        )
    },
}
# A file without these parts is another file, not a damaged one: fewer strategies, metrics or optional notes.
OPTIONAL = {"strategies", "run", "settings", "versions", "seconds", "log_history", "about"}
ODD = [None, True, 3, -1.5, "x", [], {}, [[]], {"a": [1]}]
HUGE = ["1" + "0" * 400, "1e400", "-1e999", "NaN", "Infinity", "9" * 5000]


@dataclass(frozen=True)
class Case:
    """One damaged file and the command that reads it."""

    file: str
    command: str
    damage: str
    seed: int

    def apply(self, root: Path) -> None:
        """Damages the file."""
        path = root / self.file
        content = path.read_bytes()
        chance = random.Random(f"{self.file} {self.damage} {self.seed}")
        if self.damage == "a folder in its place":
            path.unlink()
            path.mkdir()
        elif self.damage == "a link to itself":
            path.unlink()
            path.symlink_to(path.name)
        else:
            path.write_bytes((damages(path) | CHANGES)[self.damage](content, chance))


Damage = Callable[[bytes, random.Random], bytes]


def cases() -> Iterator[Case]:
    """All cases, the same ones each time: the damages that depend on chance several times."""
    for file, commands in (READERS | {file: {f"{c}-marked" for c in names} for file, names in MARKED.items()}).items():
        kinds = [*damages(Path(file)), *REPLACED] if file in READERS else ["empty", *CHANGES]
        for damage in kinds:
            for command in sorted(commands):
                if damage in REPLACED and (file, command) in MAY_BE_MISSING:
                    continue
                for seed in range(REPEATED.get(damage, 1)):
                    yield Case(file, command, damage, seed)


def _bit_flipped(content: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]


def _exchanged(content: bytes, chance: random.Random) -> bytes:
    """Two different bytes, or digits where there are some, change places: most files stay readable."""
    digits = [at for at, byte in enumerate(content) if chr(byte).isdecimal()]
    for _ in range(1000):
        first, second = chance.sample(digits if len(digits) > 9 else range(len(content)), 2)
        if content[first] != content[second]:
            break
    changed = bytearray(content)
    changed[first], changed[second] = changed[second], changed[first]
    return bytes(changed)


# Any of these makes another file of it.
CHANGES: dict[str, Damage] = {
    "half of it": lambda content, chance: content[: len(content) // 2],
    "a flipped bit": _bit_flipped,
    "exchanged bytes": _exchanged,
}
REPLACED = ("a folder in its place", "a link to itself")
# Commands for which a missing file is an ordinary case: they say what they do without it.
MAY_BE_MISSING = {
    ("run/aswa_trajectory.json", "report"),
    ("run/aswa/average.safetensors", "evaluate-strategies"),
    ("grid/run/settings.json", "reproduce"),
    ("grid/run/results.json", "reproduce"),
}
# How often a damage at a random place is made.
REPEATED = {
    "truncated": 3,
    "another type": 8,
    "a field less": 4,
    "a huge number": 4,
    "a flipped byte": 3,
    "a wrong shape": 3,
    "lying offsets": 3,
    "numbers that are not finite": 2,
    "a line less a field": 2,
    "a flipped bit": 4,
    "exchanged bytes": 2,
    "a name elsewhere": 5,
}


def damages(path: Path) -> dict[str, Damage]:
    """The damages of a kind of file."""
    found: dict[str, Damage] = {
        "empty": lambda content, chance: b"",
        "truncated": lambda content, chance: content[: chance.randrange(1, max(2, len(content) - 2))],
        "garbage": lambda content, chance: bytes(chance.randrange(256) for _ in range(200)),
        "not UTF-8": lambda content, chance: b"\xff\xfe" + content,
    }
    if path.suffix == ".json":
        found |= {
            "another type": _changed(_other_type),
            "a field less": _changed(_one_less, str),
            "a huge number": _huge,
            "nested deeply": lambda content, chance: b"[" * 100_000 + b"]" * 100_000,
            "nested deeply inside": lambda content, chance: b'{"a":' * 5000 + content + b"}" * 5000,
            "a list around it": lambda content, chance: b"[" + content + b"]",
            "a number": lambda content, chance: b"7",
            "null": lambda content, chance: b"null",
        }
        if path.name.endswith(".index.json"):
            found["a name elsewhere"] = _elsewhere
    elif path.suffix == ".yaml":
        found |= {
            "truncated": lambda content, chance: content[: content.index(b":") - chance.randrange(1, 3)],
            "another type": _yaml(lambda value, chance: chance.choice([[], {"a": 1}, [[1]], "x" * 9])),
            "a huge number": _yaml(lambda value, chance: 10**400),
            "not a number": _yaml(lambda value, chance: float("nan")),
            "nested deeply": lambda content, chance: b"a: " + b"[" * 5000,
            "an alias": lambda content, chance: b"a: &x [1]\nb: [*x, *x]\n" + content,
            "an object of Python": lambda content, chance: content + b"\nx: !!python/object/apply:os.system [ls]\n",
            "tabs": lambda content, chance: content.replace(b"  ", b"\t"),
        }
    elif path.suffix == ".safetensors":
        found |= {
            "a longer file": lambda content, chance: content + b"\0" * 7,
            "a flipped byte": _flipped,
            "a tensor less": _header(_without),
            "another tensor": _header(_added),
            "a wrong shape": _header(_reshaped),
            "lying offsets": _header(_lying),
            "another dtype": _header(_other_dtype),
            "a header nested deeply": lambda content, chance: _with_header(b"[" * 100_000, b""),
            "numbers that are not finite": _not_finite,
            "a pointer of Git LFS": lambda content, chance: b"version https://git-lfs.github.com/spec/v1\n",
        }
        if path.name == "adapter_model.safetensors":
            # Which tensors an adapter has is known to its base model alone.
            found = {name: found[name] for name in found if name not in ("a tensor less", "another tensor")}
    elif path.suffix == ".tsv":
        found["a line less a field"] = _shorter_line
    elif path.suffix in (".txt", ".csv", ".nt"):
        found |= {
            "truncated": _within_line,
            "a line less a field": _shorter_line,
            "an empty label": _empty_label,
            "a zero byte": lambda content, chance: content.replace(b"\n", b"\0\n", 1),
        }
    return found


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all values inside an object or a list; of a list the first and the last."""
    found = []
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(inside):
        if isinstance(value, list) and key not in (0, len(value) - 1):
            continue
        found += [(*path, key), *_places(item, (*path, key))]
    return found


def _changed(change: Callable[[Any, Any, random.Random], None], kind: Any = (str, int)) -> Damage:
    """A damage of one value of a JSON file: of objects and lists, or of one kind."""

    def damage(content: bytes, chance: random.Random) -> bytes:
        content, *others = content.splitlines(keepends=True) if content.startswith(b'{"') else [content]
        value = json.loads(content)
        places = [place for place in _places(value) if not OPTIONAL & set(place)]
        *way, key = chance.choice([place for place in places if isinstance(place[-1], kind)] or places)
        holder = value
        for step in way:
            holder = holder[step]
        change(holder, key, chance)
        return b"".join([json.dumps(value).encode() + b"\n", *others])

    return damage


def _other_type(holder: Any, key: Any, chance: random.Random) -> None:
    odd = [value for value in ODD if type(value) is not type(holder[key])]
    if isinstance(holder[key], (int, float)) and not isinstance(holder[key], bool):
        odd = [value for value in odd if type(value) not in (int, float)]
    holder[key] = chance.choice(odd)


def _one_less(holder: Any, key: Any, chance: random.Random) -> None:
    del holder[key]


def _huge(content: bytes, chance: random.Random) -> bytes:
    """A number that no file of ours holds, in the place of a value."""
    marked = _changed(lambda holder, key, _: holder.__setitem__(key, "@@@"))(content, chance)
    return marked.replace(b'"@@@"', chance.choice(HUGE).encode())


def _elsewhere(content: bytes, chance: random.Random) -> bytes:
    """An index that names a file outside of its folder."""
    index = json.loads(content)
    name = chance.choice(sorted(index["weight_map"]))
    index["weight_map"][name] = chance.choice(["../plain/model.safetensors", "/etc/passwd", "", "..", "a/b", "no\0"])
    return json.dumps(index).encode()


def _yaml(change: Callable[[Any, random.Random], Any]) -> Damage:
    """A damage of one setting of a recipe."""

    def damage(content: bytes, chance: random.Random) -> bytes:
        recipes = yaml.safe_load(content)
        settings = recipes["best"]["settings"]
        name = chance.choice(sorted(settings))
        settings[name] = change(settings[name], chance)
        return yaml.safe_dump(recipes).encode()

    return damage


def _split(content: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _with_header(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def _header(change: Callable[[dict[str, Any], str, random.Random], None]) -> Damage:
    """A damage of the header of a safetensors file."""

    def damage(content: bytes, chance: random.Random) -> bytes:
        header, data = _split(content)
        name = chance.choice(sorted(set(header) - {"__metadata__"}))
        change(header, name, chance)
        return _with_header(json.dumps(header).encode(), data)

    return damage


def _without(header: dict[str, Any], name: str, chance: random.Random) -> None:
    header[f"{name}.renamed"] = header.pop(name)


def _added(header: dict[str, Any], name: str, chance: random.Random) -> None:
    header["extra"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


def _reshaped(header: dict[str, Any], name: str, chance: random.Random) -> None:
    shape = header[name]["shape"]
    header[name]["shape"] = chance.choice([[*shape, 1], [*shape[::-1], 1], [-1], ["a"], [10**400], None, [2**62, 4]])


def _lying(header: dict[str, Any], name: str, chance: random.Random) -> None:
    start, end = header[name]["data_offsets"]
    header[name]["data_offsets"] = chance.choice(
        [[start, end + 4], [start + 4, end + 4], [end, start], [0, 10**15], [-8, end], [start], "all", [0.5, 1.5]]
    )


def _other_dtype(header: dict[str, Any], name: str, chance: random.Random) -> None:
    header[name]["dtype"] = chance.choice(["F64", "X99", 3, "BOOL"])


def _not_finite(content: bytes, chance: random.Random) -> bytes:
    header, data = _split(content)
    tensors = [about for name, about in header.items() if name != "__metadata__" and about["dtype"] == "F32"]
    start, end = chance.choice([about["data_offsets"] for about in tensors if about["data_offsets"][1] > 3])
    at = len(content) - len(data) + chance.randrange(start, end, 4)
    return content[:at] + chance.choice([b"\x00\x00\xc0\x7f", b"\x00\x00\x80\xff"]) + content[at + 4 :]


def _flipped(content: bytes, chance: random.Random) -> bytes:
    """Another byte in the first 64: in the length or at the beginning of the header."""
    at = chance.randrange(64)
    return content[:at] + bytes([content[at] ^ 0x80]) + content[at + 1 :]


def _shorter_line(content: bytes, chance: random.Random) -> bytes:
    lines = content.splitlines()
    lines[chance.randrange(len(lines))] = b"alone"
    return b"\n".join(lines)


def _within_line(content: bytes, chance: random.Random) -> bytes:
    """Ends after the first field of a line: files of lines that end elsewhere are shorter, but not damaged."""
    lines = content.splitlines(keepends=True)
    last = chance.randrange(len(lines))
    return b"".join(lines[:last]) + re.split(rb"[\t, ]", lines[last])[0]


def _empty_label(content: bytes, chance: random.Random) -> bytes:
    first, _, rest = content.partition(b"\n")
    for separator in (b"\t", b",", b" "):
        if separator in first:
            return separator + first.partition(separator)[2] + b"\n" + rest
    return b"\n"
