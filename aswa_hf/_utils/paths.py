"""Folders that others wrote: what is read from one, or shipped with it, must be inside it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from aswa_hf._utils.files import read_json

INDEX = "*.safetensors.index.json"


@dataclass
class WeightsIndex:
    """The schema of model.safetensors.index.json."""

    weight_map: dict[str, str] = field(default_factory=dict)


def is_file_name(name: str) -> bool:
    """Whether this is the name of a file in a folder, and not a path that leads out of it."""
    return name not in ("", ".", "..") and Path(name).name == name


def check_inside(folder: Path) -> None:
    """Raises ValueError if a file of a folder is a link out of it, or its index of shards names a file elsewhere."""
    root = folder.resolve()
    # Files in the Hub's cache are links to its blobs.
    allowed = [root, *(parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots")]
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and not path.is_dir():
            try:
                target = path.resolve()
            except RuntimeError:
                raise ValueError(f"{path} is a symbolic link that leads back to itself.") from None
            if not any(target.is_relative_to(place) for place in allowed):
                raise ValueError(f"{path} is a symbolic link out of its folder, to {target}. Copy the file there.")
    for index in sorted(folder.glob(INDEX)):
        for tensor, name in read_json(index, WeightsIndex).get("weight_map", {}).items():
            if not is_file_name(name):
                raise ValueError(
                    f"{index}: {tensor!r} is in {name!r}. Expected the name of a file in the same folder."
                )
