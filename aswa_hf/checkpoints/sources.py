"""Finds checkpoints: in a Trainer's output folder, as folders or files, in revisions of a Hub repository."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aswa_hf._utils.files import nearest_path, read_json, refuse_mistyped
from aswa_hf._utils.paths import WeightsIndex, check_inside
from aswa_hf._utils.warnings import warn_caller
from aswa_hf.checkpoints.streaming import UNSHARDED, Checkpoint, check_same_tensors, read_checkpoint
from aswa_hf.run_folder import (
    ADAPTER_CONFIG,
    CARD,
    CONFIG,
    RESULTS,
    SETTINGS,
    TRAINER_STATE,
    TRAJECTORY,
    WEIGHTS,
    check_unchanged,
    checkpoint_damage,
    checkpoint_step,
    checkpoints,
    commit_marker,
    is_finished,
    read_config,
    read_trainer_state,
)

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Other formats of the same weights, which a repository may also contain.
UNREAD = (*PICKLES, ".h5", ".msgpack", ".onnx", ".gguf", ".ot", ".tflite", ".npz")
# Files about a single checkpoint or run, which do not describe the average.
OF_ONE_CHECKPOINT = (TRAINER_STATE, TRAJECTORY, RESULTS, SETTINGS, "all_results.json",
    "train_results.json", "eval_results.json", CARD)  # fmt: skip
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def find_checkpoints(
    given: Paths, revisions: Sequence[str] | None = None, *, report: Callable[[str], None] = lambda _: None
) -> list[Checkpoint]:
    """The checkpoints in the order they were given or written, all complete and of one model."""
    paths = [given] if isinstance(given, (str, os.PathLike)) else list(given)
    if not paths:
        raise ValueError("There are no checkpoints to average. Give a folder, several of them, or a Hub repository.")
    if revisions is not None:
        if len(paths) != 1:
            raise ValueError(f"revisions are those of one Hub repository, got {len(paths)} paths.")
        found = _from_hub(str(paths[0]), list(revisions), report)
    elif len(paths) == 1:
        found = _of_one(paths[0], report)
    else:
        found = [checkpoint for path in paths for checkpoint in _of_several(path, report)]
    if len(found) < 2:
        raise ValueError(
            f"There is only one checkpoint in {paths[0]}, {found[0].name}: there is nothing to average it with. "
            "Keep more of them while training (save_total_limit), or give several."
        )
    check_same_tensors(found)
    return found


def _of_one(path: str | os.PathLike[str], report: Callable[[str], None]) -> list[Checkpoint]:
    """The checkpoints of a run's folder, or of a repository."""
    local = Path(path).expanduser()
    if local.is_dir():
        return _of_run(local) or [checkpoint_in(local)]
    return _of_several(path, report)


def _of_several(path: str | os.PathLike[str], report: Callable[[str], None]) -> list[Checkpoint]:
    """The checkpoints at one of several paths: usually one."""
    local = Path(path).expanduser()
    if local.is_file():
        return [_of_file(local)]
    if local.is_dir():
        # A run's folder with weights of its own is one checkpoint among others.
        return [checkpoint_in(local)] if _weights(local)[0] else _of_run(local) or [checkpoint_in(local)]
    repo, at, revisions = str(path).partition("@")
    if _REPOSITORY.fullmatch(repo):
        if not at:
            refuse_mistyped(local)
        return _from_hub(repo, [name.strip() for name in revisions.split(",")] if at else None, report)
    raise FileNotFoundError(
        f"There is no folder or file {path}. Expected a Trainer's output folder, checkpoint folders, safetensors "
        f"files or a Hub repository with revisions (user/model@main,v1.0).{nearest_path(local)}"
    )


def _of_run(folder: Path) -> list[Checkpoint]:
    """The valid checkpoint-N of a folder in the order of N; warns about what killed runs have left, and damage."""
    ordered = checkpoints(folder)
    # Checkpoints of other programs have no state of the Trainer, which the Trainer writes last.
    by_trainer = any((path / TRAINER_STATE).is_file() for path in ordered)
    damaged = {}
    for path in ordered:
        if commit_marker(path).exists():
            damaged[path] = checkpoint_damage(path)
        elif by_trainer and not is_finished(path):
            damaged[path] = f"it has no readable {TRAINER_STATE}"
    damaged = {path: reason for path, reason in damaged.items() if reason is not None}
    if damaged:
        skipped = ", ".join(f"{path.name} ({reason})" for path, reason in damaged.items())
        if len(damaged) == len(ordered):
            raise ValueError(f"No checkpoint in {folder} is valid: {skipped}.")
        warn_caller(f"Skipped damaged checkpoints in {folder}: {skipped}.")
    return [checkpoint_in(path) for path in ordered if path not in damaged]


def checkpoint_in(folder: Path, name: str | None = None) -> Checkpoint:
    """The checkpoint in a folder, which may be sharded."""
    files, index = _weights(folder)
    if not files:
        raise ValueError(_no_weights(folder, [path.name for path in folder.iterdir()]))
    _refuse_quantized(folder)
    number = checkpoint_step(folder) if folder in checkpoints(folder.parent) else None
    state = read_trainer_state(folder) if (folder / TRAINER_STATE).is_file() else {}
    place = {"step": state.get("global_step", number), "epoch": state.get("epoch")}
    checkpoint = read_checkpoint(name or folder.resolve().name, files, index, folder=folder, **place)
    if index is not None:
        for tensor, file in read_json(index, WeightsIndex).get("weight_map", {}).items():
            if tensor not in checkpoint.tensors or checkpoint.tensors[tensor].file.name != file:
                raise ValueError(f"{folder / file} has no tensor {tensor!r}, which {index} lists.")
    check_unchanged(folder, CONFIG, ADAPTER_CONFIG, "*.safetensors*")
    return checkpoint


def _of_file(path: Path) -> Checkpoint:
    if path.suffix in PICKLES:
        raise ValueError(_pickle(str(path)))
    if path.suffix != ".safetensors":
        raise ValueError(f"{path} is not a checkpoint. Expected a .safetensors file or a folder with one.")
    if path.name in UNSHARDED and any((path.parent / name).is_file() for name in (CONFIG, ADAPTER_CONFIG)):
        return checkpoint_in(path.parent)
    return read_checkpoint(path.stem, [path])


def _weights(folder: Path) -> tuple[list[Path], Path | None]:
    """The files with the weights of a folder, and their index if they are shards."""
    check_inside(folder)
    for name in UNSHARDED:
        if (folder / name).is_file():
            return [folder / name], None
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if indices:
        shards = [
            folder / name for name in sorted(set(read_json(indices[0], WeightsIndex).get("weight_map", {}).values()))
        ]
        if missing := next((shard for shard in shards if not shard.is_file()), None):
            raise ValueError(f"{missing} is missing, which {indices[0]} lists. Copy or download it again.")
        return shards, indices[0]
    single = sorted(folder.glob("*.safetensors"))
    return (single, None) if len(single) == 1 else ([], None)


def _no_weights(place: Any, names: Sequence[str]) -> str:
    if pickle := next(
        (name for name in sorted(names) if re.fullmatch(r"(pytorch_|adapter_)?model.*\.bin", name)), None
    ):
        return _pickle(f"{place}/{pickle}")
    if pickle := next((name for name in sorted(names) if name.endswith((".pt", ".pth", ".ckpt"))), None):
        return _pickle(f"{place}/{pickle}")
    return f"{place} contains no checkpoint: it has neither a {WEIGHTS} nor a checkpoint-N with one."


def _pickle(path: str) -> str:
    return (
        f"{path} is a pickle, which may run any code when it is loaded, so it is not read. If you trust it, convert "
        "it: model.save_pretrained(folder) or safetensors.torch.save_file(state_dict, path) write safetensors."
    )


def _refuse_quantized(folder: Path) -> None:
    if (folder / CONFIG).is_file() and read_config(folder / CONFIG).get("quantization_config"):
        raise ValueError(
            f"{folder} contains a quantized model, whose integers cannot be averaged. Average the original weights, "
            "and quantize the result."
        )


def companions(folder: Path, weights: Sequence[Path]) -> list[Path]:
    """The files beside the weights that make a checkpoint loadable: configuration, vocabulary, preprocessing."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and path not in weights
        and not path.name.startswith(".")
        and path.name not in OF_ONE_CHECKPOINT
        and not path.name.endswith((*UNREAD, ".safetensors", ".safetensors.index.json", ".log", ".png"))
        and not path.name.startswith("events.out.tfevents")
    ]


def _from_hub(repo: str, revisions: list[str] | None, report: Callable[[str], None]) -> list[Checkpoint]:
    """The weights of a repository at several revisions, or its folders checkpoint-N."""
    from huggingface_hub import list_repo_files, snapshot_download

    from aswa_hf.hub_requests import bounded_requests

    def download(revision: str | None, **patterns: Any) -> Path:
        report(f"downloading {repo}" + (f"@{revision}" if revision else ""))
        try:
            with bounded_requests():
                names = list_repo_files(repo, revision=revision)
                if not any(name.endswith(".safetensors") for name in names):
                    raise ValueError(_no_weights(f"{repo}@{revision}" if revision else repo, names))
                return Path(snapshot_download(repo, revision=revision, **patterns))
        except OSError as error:
            reason = " ".join(str(error).split())
            raise OSError(
                f"Could not download {repo}{f'@{revision}' if revision else ''} from the Hub: {reason}"
            ) from None

    unread = [f"*{suffix}" for suffix in UNREAD]
    if revisions is None:
        folder = download(None, allow_patterns=["checkpoint-*"], ignore_patterns=unread)
        found = _of_run(folder)
        if not found:
            raise ValueError(
                f"{repo} has no folders checkpoint-N on the Hub. Name the revisions to average: {repo}@main,v1.0"
            )
        return found
    if not all(revisions):
        raise ValueError(f"Expected names of revisions after @, separated by commas, got {','.join(revisions)!r}.")
    return [
        checkpoint_in(download(name, ignore_patterns=[*unread, "*/*"]), name=f"{repo}@{name}") for name in revisions
    ]
