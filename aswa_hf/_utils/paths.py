"""Folders that others wrote: what is read from one, or shipped with it, must lie inside it."""

from __future__ import annotations

from pathlib import Path

from aswa_hf._utils.files import read_object

INDEX = "*.safetensors.index.json"


def check_inside(folder: Path) -> None:
    """Raises ValueError if a file of a folder is a link out of it, or its index of shards names a file elsewhere."""
    root = folder.resolve()
    # Files in the Hub's cache are links to its blobs.
    allowed = [root, *(parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots")]
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and not path.is_dir():
            target = path.resolve()
            if not any(target.is_relative_to(place) for place in allowed):
                raise ValueError(f"{path} is a symbolic link out of its folder, to {target}. Copy the file there.")
    for index in sorted(folder.glob(INDEX)):
        shards = read_object(index).get("weight_map", {})
        if not isinstance(shards, dict):
            raise ValueError(f"{index}: 'weight_map' must map tensors to files, got a {type(shards).__name__}.")
        for tensor, name in shards.items():
            if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
                raise ValueError(
                    f"{index}: {tensor!r} is in {name!r}. Expected the name of a file in the same folder."
                )
