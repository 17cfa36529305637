"""The content of a repository: the files of a run that are shipped, its history and its card."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # exported, but not in __all__

from aswa_hf._utils.commits import damage
from aswa_hf._utils.files import nearest_path, new_folder, read_object, refuse_mistyped, write_json, write_text
from aswa_hf._utils.paths import check_inside
from aswa_hf._utils.pretrained import check_fractions, load_strictly
from aswa_hf._utils.random_state import preserved_rng
from aswa_hf._utils.tensors import is_finite, open_tensors, read_header
from aswa_hf.batchnorm import Recalibration, has_batchnorm
from aswa_hf.checkpoint import library_versions
from aswa_hf.hub.card import OWN_ARCHITECTURES, read_card_data, render
from aswa_hf.hub_requests import bounded_requests
from aswa_hf.plotting import plot_trajectories
from aswa_hf.run_folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CARD,
    CONFIG,
    PICTURE,
    RESULTS,
    SETTINGS,
    TRAJECTORY,
    WEIGHTS,
    WEIGHTS_INDEX,
    check_unchanged,
    checkpoints,
    commit_marker,
    read_config,
    write_trajectory,
)
from aswa_hf.strategies import Strategy
from aswa_hf.trajectory import Trajectory, load_trajectories

REFUSED_IN_TAGS = re.compile(r"[\s~^:?*\[\\\x00-\x1f\x7f]|\.\.|//|/\.|@\{|^[-/.]|[/.]$|\.lock$")  # by Git
WHOLE_WEIGHTS = (WEIGHTS, WEIGHTS_INDEX, ADAPTER_WEIGHTS)
WEIGHT_FILES = (*WHOLE_WEIGHTS, "model-*.safetensors")
# Besides the weights: configuration and its code, vocabulary, preprocessing. Nothing pickled, no checkpoints, no logs.
SHIPPED = (
    *WEIGHT_FILES,
    CONFIG,
    ADAPTER_CONFIG,
    "generation_config.json",
    "configuration_*.py",
    "modeling_*.py",
    "entities.json",
    "relations.json",
    "keys.json",
    "*processor_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "chat_template.*",
)


def save_run(
    model: Any,
    folder: str | Path,
    strategies: Strategy | Mapping[str, Strategy],
    *,
    metric: str = "score",
    applied: str | None = None,
    processor: Any = None,
    **about: Any,
) -> Path:
    """Writes a run folder for a model that was trained in any loop: its weights, and the history of its strategies.

    `applied` names the strategy whose weights are in the model (the first one). `processor` is saved beside it: a
    tokenizer, a KGVocab. `about` is more information for the card: `task=`, `dataset=`, `seed=`, `command=`.
    """
    named = {strategies.name: strategies} if isinstance(strategies, Strategy) else dict(strategies)
    applied = applied or next(iter(named), None)
    if applied not in named:
        raise ValueError(
            f"applied must be one of the strategies ({', '.join(named) or 'none given'}), got {applied!r}."
        )
    _check_applied(model, applied, named[applied])
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for part in (model, processor):
        if hasattr(part, "save_pretrained"):
            part.save_pretrained(folder)
        elif hasattr(part, "pretrained_cfg"):
            from timm.models import _hub

            from aswa_hf.vision.classifier import drop_repeated_classes

            _hub.save_for_hf(part, str(folder), safe_serialization=True)
            drop_repeated_classes(folder / CONFIG)
        elif part is not None:
            raise TypeError(
                f"A {type(part).__name__} cannot be saved for the Hub. Expected a model with save_pretrained (from "
                "transformers or peft), or a timm model."
            )
    write_trajectory(
        folder,
        named,
        metric=metric,
        greater_is_better=named[applied].greater_is_better,
        applied=applied,
        run={
            "model": type(model).__name__,
            "versions": library_versions(),
            **describe_strategy(named[applied]),
            **about,
        },
    )
    return folder


def describe_strategy(strategy: Strategy) -> dict[str, Any]:
    """Returns what a card says about the shipped strategy: its rule, and its treatment of BatchNorm statistics."""
    if isinstance(strategy.recalibrate, Recalibration):
        batchnorm = "recalibrate"
    else:
        batchnorm = "average" if strategy.average.average_buffers else "copy"
    return {
        "rule": strategy.name,
        "batchnorm": batchnorm if has_batchnorm(strategy.model) else None,
        "bn_batches": getattr(strategy.recalibrate, "limit", None),
    }


def _check_applied(model: Any, name: str, strategy: Strategy) -> None:
    """Raises ValueError if the model does not hold the weights that its card would describe."""
    if strategy.members == 0:
        raise ValueError(f"The {name} strategy has no weights yet. Call its update() at the end of every epoch.")
    averaged = strategy.average.averaged
    parameters = {key: p for key, p in strategy.model.named_parameters() if key in averaged}
    same = all(torch.equal(averaged[key].to(p.device, p.dtype), p.detach()) for key, p in parameters.items())
    if not same or getattr(model, "_orig_mod", model) is not strategy.model:
        raise ValueError(f"The model does not hold the {name} weights. Call the strategy's apply() before the push.")


def write_repository(run: str | Path, folder: str | Path, repo_id: str, **card: Any) -> Path:
    """Writes exactly the files of a repository for a run folder: weights, config, trajectory, plot, card."""
    run, folder = Path(run), Path(folder)
    check_repo_id(repo_id)
    check_run(run)
    with new_folder(folder):
        for pattern in (*SHIPPED, PICTURE):
            for file in run.glob(pattern):
                shutil.copyfile(file, folder / file.name)
        write_json(folder / TRAJECTORY, complete_history(run))
        write_card(folder, repo_id, **card)
    return folder


def write_card(folder: Path, repo_id: str, **card: Any) -> None:
    """Adds the card to a folder with a model and its trajectory file, the plot if there is none, and our own code."""
    _add_code(folder)
    if not (folder / PICTURE).exists():
        trajectories, about = load_trajectories(folder / TRAJECTORY)
        plot_trajectories(trajectories, folder / PICTURE, metric=about["metric"])
    write_text(folder / CARD, str(render(read_card_data(folder, repo_id, **card))))


def _add_code(folder: Path) -> None:
    """Adds the code of an image classifier that timm does not have, so that it loads without this package."""
    config = _read_if_there(folder / CONFIG)
    if not str(config.get("architecture")).endswith(OWN_ARCHITECTURES):
        return
    from aswa_hf.vision import architectures, modeling_cifar

    model_class = modeling_cifar.CifarForImageClassification
    for module in (architectures, modeling_cifar):
        source = Path(str(module.__file__))
        shutil.copyfile(source, folder / source.name)
    auto_map = {"AutoModelForImageClassification": f"modeling_cifar.{model_class.__name__}"}
    write_json(folder / CONFIG, {**config, "auto_map": auto_map})


def complete_history(run: Path) -> dict[str, Any]:
    """Returns the trajectory file's content, completed from the other files of the run."""
    content = read_object(run / TRAJECTORY)
    if "run" not in content and (run / RESULTS).exists():
        content["run"] = read_object(run / RESULTS)
    if "batchnorm" not in content.setdefault("run", {}):
        # `aswa-hf train` always recalibrates; for other runs it is unknown.
        treatment = "recalibrate" if (run / SETTINGS).exists() else "unknown"
        content["run"]["batchnorm"] = treatment if _has_batchnorm(run) else None
    return content


def _weight_files(run: Path) -> list[Path]:
    return sorted({path for pattern in WEIGHT_FILES for path in run.glob(pattern) if path.suffix == ".safetensors"})


def _has_batchnorm(run: Path) -> bool:
    for file in _weight_files(run):
        with open_tensors(file) as tensors:
            if any(name.endswith(".running_mean") for name in tensors.keys()):  # noqa: SIM118
                return True
    return False


def check_repo_id(repo_id: str) -> None:
    """Raises ValueError if `repo_id` is not a valid owner/name; without the owner a card cannot say how to load it."""
    try:
        validate_repo_id(repo_id)
        owned = "/" in repo_id
    except HFValidationError:
        owned = False
    if not owned:
        raise ValueError(
            f"{repo_id!r} is not the name of a repository. Expected owner/name, such as me/model, of letters, digits, "
            "'-', '_' and '.'."
        )


def check_tag_name(tag: str | None) -> None:
    """Raises ValueError for a tag that Git would refuse, after the files have been committed."""
    if tag is not None and (tag in ("", "@") or REFUSED_IN_TAGS.search(tag)):
        raise ValueError(f"{tag!r} is not the name of a tag. Expected a name without spaces, such as v1.0.")


def check_run(run: Path) -> None:
    """Raises ValueError if a folder is not a finished run, before anything is copied or sent."""
    if not run.is_dir():
        raise ValueError(
            f"There is no folder {run}. Expected a run folder, as `aswa-hf train` writes it.{nearest_path(run)}"
        )
    check_inside(run)
    missing = [] if (run / TRAJECTORY).exists() else [TRAJECTORY]
    missing += [] if any((run / name).exists() for name in WHOLE_WEIGHTS) else [WEIGHTS]
    if missing:
        raise ValueError(
            f"{run} has no {' and no '.join(missing)}: it is not a finished run. Expected a folder as `aswa-hf train` "
            "writes it, or as Trainer.save_model() does with an ASWACallback."
        )
    load_trajectories(run / TRAJECTORY)
    for file in _weight_files(run):
        read_header(file)
    config = _read_if_there(run / CONFIG)
    _read_if_there(run / ADAPTER_CONFIG)
    if lost := [name for name in _needed(run, config) if not (run / name).exists()]:
        raise ValueError(f"{run} lacks {', '.join(lost)}: its model cannot be loaded. Save it again.")
    if (config.get("architectures") or config.get("auto_map")) and not config.get("model_type"):
        raise ValueError(f"{run / CONFIG} has no 'model_type': transformers could not load it. Save the model again.")
    if (code := sorted(run.glob("modeling_*.py"))) and not config.get("auto_map"):
        raise ValueError(
            f"{run / CONFIG} has no 'auto_map', so {code[0].name} would not be used. Save the model again."
        )
    if config.get("model_type") == "kge":
        _check_vocabulary(run, config)
    _check_weights(run, config)
    check_unchanged(run, *SHIPPED, TRAJECTORY, RESULTS, SETTINGS)


def _check_weights(run: Path, config: Mapping[str, Any]) -> None:
    """Raises ValueError for weights that are not finite, or do not fit a model that this package can build."""
    if config.get("model_type") == "kge":
        from aswa_hf.kge import KGEModel

        check_fractions(KGEModel.from_pretrained(run), run)  # raises for both
        return
    shapes = _finite_shapes(run)
    if (model_class := _transformers_class(run, config)) is not None:
        load_strictly(model_class, run)
    if isinstance(config.get("architecture"), str):
        expected = _timm_shapes(config)
        for name in sorted(shapes.keys() | expected.keys()):
            found, wanted = shapes.get(name, "missing"), expected.get(name, "no such tensor")
            if found != wanted:
                raise ValueError(
                    f"The weights in {run} do not fit {config['architecture']}: {name!r} is {found}, expected "
                    f"{wanted}."
                )


def _finite_shapes(folder: Path) -> dict[str, str]:
    """Returns the shapes of the tensors of a model by name; raises ValueError for numbers that are not finite."""
    shapes = {}
    for file in _weight_files(folder):
        with open_tensors(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118
                tensor = tensors.get_tensor(name)
                shapes[name] = _shape(tensor)
                if not is_finite(tensor):
                    raise ValueError(
                        f"{file} has NaN or infinite numbers in {name!r}. Train with a smaller learning rate."
                    )
    return shapes


def _shape(tensor: torch.Tensor) -> str:
    """Returns the shape of a tensor, for whole numbers with their type."""
    shape = str(tuple(tensor.shape))
    return shape if tensor.is_floating_point() else f"{tensor.dtype} {shape}"


def _transformers_class(run: Path, config: Mapping[str, Any]) -> Any:
    """Returns the class that transformers has for a model; None if it has none, and for an adapter alone."""
    import transformers

    names = config.get("architectures") or [""]
    is_whole = any((run / name).exists() for name in (WEIGHTS, WEIGHTS_INDEX))
    return getattr(transformers, names[0], None) if is_whole and "auto_map" not in config else None


def _timm_shapes(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the shapes of the tensors of the timm model that a config describes, by name."""
    import timm

    import aswa_hf.vision  # noqa: F401 (registers architectures with timm)

    options = {"num_classes": config.get("num_classes"), **(config.get("model_args") or {})}
    with preserved_rng():
        try:
            model = timm.create_model(config["architecture"], **options)
        except Exception as error:  # many kinds of errors, depending on the config
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"The model of {CONFIG} cannot be built: {config['architecture']}, {reason}") from None
    return {name: _shape(tensor) for name, tensor in model.state_dict().items()}


def _needed(run: Path, config: Mapping[str, Any]) -> list[str]:
    """Returns the files without which a model with these weights and this configuration cannot be loaded."""
    needed = set(_read_if_there(run / WEIGHTS_INDEX).get("weight_map", {}).values())
    if (run / ADAPTER_WEIGHTS).exists():
        needed.add(ADAPTER_CONFIG)
    if (run / SETTINGS).exists():  # all models of `aswa-hf train` have one
        needed.add(CONFIG)
    # The model's own code; in names of code from elsewhere, "--" follows the repository.
    classes = [name for name in config.get("auto_map", {}).values() if isinstance(name, str) and "--" not in name]
    needed |= {f"{name.partition('.')[0]}.py" for name in classes}
    if config.get("model_type") == "kge":
        needed |= {"entities.json", "relations.json"}
    return sorted(needed)


def _check_vocabulary(run: Path, config: Mapping[str, Any]) -> None:
    from aswa_hf.kge.vocab import KGVocab

    vocab = KGVocab.from_pretrained(run)
    for what, labels in (("entities", vocab.entities), ("relations", vocab.relations)):
        if len(labels) != (expected := config.get(f"num_{what}")):
            raise ValueError(
                f"{run / what}.json has {len(labels)} labels, the model {expected} {what}: they do not belong "
                "together. Save both again."
            )


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_config(path) if path.exists() else {}


def last_checkpoint(run: Path) -> Path:
    """Returns the checkpoint with the running model's last weights."""
    found = [path for path in checkpoints(run) if any((path / name).exists() for name in WHOLE_WEIGHTS)]
    if not found:
        raise ValueError(f"{run} has no checkpoint with the running model's weights. Push without running=True.")
    last = found[-1]
    check_inside(last)
    required = next(name for name in WHOLE_WEIGHTS if (last / name).exists())
    if reason := damage(last, commit_marker(last), required):
        raise ValueError(f"{last} is damaged: {reason}. Push without running=True.")
    ours, theirs = _finite_shapes(run), _finite_shapes(last)
    if different := sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)):
        raise ValueError(
            f"The weights in {last} are not those of the model in {run}: {different[0]!r} differs. Push without "
            "running=True."
        )
    return last


def read_history(
    path_or_repo: str | Path, *, revision: str | None = None, **options: Any
) -> tuple[dict[str, Trajectory], dict[str, Any]]:
    """Returns the decisions of a run by strategy, and its other data, from its folder or a Hub repository."""
    refuse_mistyped(path_or_repo)
    path = Path(path_or_repo) / TRAJECTORY
    if not Path(path_or_repo).is_dir():
        try:
            with bounded_requests():
                path = Path(hf_hub_download(str(path_or_repo), TRAJECTORY, revision=revision, **options))
        except EntryNotFoundError:
            raise FileNotFoundError(
                f"The repository {path_or_repo} has no {TRAJECTORY}. Expected one pushed by aswa-hf."
            ) from None
    elif not path.exists():
        raise FileNotFoundError(f"{path_or_repo} has no {TRAJECTORY}. Expected a run folder written by aswa-hf.")
    return load_trajectories(path)
