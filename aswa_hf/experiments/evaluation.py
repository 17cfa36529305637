"""How the checkpoints of a run are judged again, by the settings that the run has written down."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aswa_hf.checkpoints import Evaluation

if TYPE_CHECKING:
    from aswa_hf.checkpoints.tensors import Checkpoint

SETTINGS, RESULTS, CONFIG = "settings.json", "results.json", "config.json"
SPLITS = ("validation", "test")
# What decides which images a run has held out.
HELD_OUT = ("dataset", "val_ratio", "train_size", "seed", "image_size")


def find_evaluation(checkpoints: Sequence[Checkpoint], dataset: str | None = None) -> Evaluation | None:
    """The evaluation of checkpoints of `aswa-hf train`, or of a link predictor on a given dataset; else None."""
    runs = list(dict.fromkeys(run for run in map(_run_of, checkpoints) if run is not None))
    if not runs:
        kinds = {_config(checkpoint).get("model_type") for checkpoint in checkpoints}
        if dataset is None:
            return None
        if kinds != {"kge"}:
            raise ValueError("A dataset is all that is needed for link predictors only; give an evaluation instead.")
        return _link_prediction(checkpoints, {}, dataset)
    settings = [json.loads((run / SETTINGS).read_text(encoding="utf-8")) for run in runs]
    is_image = "recipe" in settings[0]
    for run, other in zip(runs[1:], settings[1:], strict=True):
        for name in HELD_OUT if is_image else ("dataset",):
            if other.get(name) != settings[0].get(name):
                raise ValueError(
                    f"{run} was trained with {name} {other.get(name)}, {runs[0]} with {settings[0].get(name)}: "
                    "what one was trained on cannot judge the other. Give an evaluation of your own."
                )
    source = dataset or _source(runs[0], settings[0])
    return _images(settings[0], source) if is_image else _link_prediction(checkpoints, settings[0], source)


def _run_of(checkpoint: Checkpoint) -> Path | None:
    """The folder of the run that wrote a checkpoint."""
    if checkpoint.folder is None:
        return None
    folder = checkpoint.folder.resolve()
    return next((place for place in (folder, folder.parent) if (place / SETTINGS).is_file()), None)


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    path = (checkpoint.folder or Path()) / CONFIG
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found if checkpoint.folder else {}


def _source(run: Path, settings: Mapping[str, Any]) -> str:
    """The dataset as it was given: the settings keep the name of a folder, and not its path."""
    if (run / RESULTS).is_file():
        command = shlex.split(json.loads((run / RESULTS).read_text(encoding="utf-8")).get("command", ""))
        for option, value in zip(command, [*command[1:], ""], strict=True):
            given = value if option == "--dataset" else option.removeprefix("--dataset=")
            if given != option and Path(given).is_dir():
                return given
    return str(settings["dataset"]["name"])


def _check_sizes(settings: Mapping[str, Any], source: str, sizes: Mapping[str, int]) -> None:
    """Refuses data that are not those of the run."""
    expected = {split: settings.get("dataset", {}).get(split, sizes[split]) for split in sizes}
    if expected != dict(sizes):
        raise ValueError(
            f"The run had {_listed(expected)} examples, but {source!r} has {_listed(sizes)}. Give the run's dataset "
            "with --dataset (dataset=)."
        )


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {split}" for split, count in sizes.items())


def _link_prediction(checkpoints: Sequence[Checkpoint], settings: Mapping[str, Any], source: str) -> Evaluation:
    from aswa_hf.kge import KGVocab, evaluate_link_prediction, load_kg

    try:
        kg = load_kg(source)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"The graph of the run could not be loaded; give it with --dataset (dataset=). {error}"
        ) from None
    _check_sizes(settings, source, {split: len(kg[split]) for split in kg})
    vocab = KGVocab.from_pretrained(checkpoints[0].folder or "")
    if (vocab.entities, vocab.relations) != (kg.vocab.entities, kg.vocab.relations):
        raise ValueError(f"{source!r} has other entities or relations than the checkpoints were trained on.")
    measure = partial(_on_device, lambda model, split: evaluate_link_prediction(model, kg, split))
    about = {"task": "link-prediction", "dataset": kg.name, "model": settings.get("model")}
    return _evaluation("mrr", measure, about=about | _of_the_run(settings))


def _images(settings: Mapping[str, Any], source: str) -> Evaluation:
    from torch.utils.data import DataLoader

    from aswa_hf.experiments.image import load_images
    from aswa_hf.vision import ImageTensors
    from aswa_hf.vision.images import as_it_is

    try:
        splits = load_images(source, settings["val_ratio"], settings["seed"], settings["train_size"])
    except (ValueError, OSError) as error:
        raise ValueError(
            f"The images of the run could not be loaded; give them with --dataset (dataset=). {error}"
        ) from None
    _check_sizes(settings, source, {split: len(rows) for split, rows in splits.items()})
    images = {
        split: ImageTensors(rows, size=settings["image_size"], augment=split == "train" and settings["augment"])
        for split, rows in splits.items()
    }
    loaders = {split: DataLoader(images[split], batch_size=250, collate_fn=as_it_is) for split in SPLITS}
    train = DataLoader(images["train"], batch_size=settings["batch_size"], shuffle=True, collate_fn=as_it_is)
    measure = partial(_on_device, lambda model, split: _classification(model, loaders[split]))
    about = {"task": "image-classification", "dataset": settings["dataset"]["name"], "model": settings["model"]}
    return _evaluation(
        "accuracy", measure, about=about | _of_the_run(settings), batches=train, bn_batches=settings["bn_batches"]
    )


def _of_the_run(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: settings[name] for name in ("seed", "epochs") if name in settings}


def _evaluation(metric: str, measure: Any, **options: Any) -> Evaluation:
    def score(model: Any) -> float:
        return float(measure(model, "validation")[metric])

    def report(model: Any) -> dict[str, dict[str, float]]:
        return {split: measure(model, split) for split in SPLITS}

    return Evaluation(metric, score, report, **options)


def _on_device(measure: Any, model: Any, split: str) -> dict[str, float]:
    import torch

    found: dict[str, float] = measure(model.to("cuda" if torch.cuda.is_available() else "cpu"), split)
    return found


def _classification(model: Any, loader: Any) -> dict[str, float]:
    import torch

    right, loss, seen = 0.0, 0.0, 0
    device = next(model.parameters()).device
    with torch.no_grad():
        for batch in loader:
            labels = batch["labels"].to(device)
            logits = model(batch["pixel_values"].to(device)).logits.float()
            right += float((logits.argmax(-1) == labels).sum())
            loss += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
            seen += len(labels)
    return {"accuracy": right / seen, "loss": loss / seen}
