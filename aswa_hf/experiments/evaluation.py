"""Evaluation of the weights of a finished run, with the settings in its folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aswa_hf._utils.names import did_you_mean
from aswa_hf._utils.shard_files import open_index
from aswa_hf._utils.tensors import load_weights, read_header
from aswa_hf.batchnorm import Batches
from aswa_hf.checkpoint import AVERAGE_FILE
from aswa_hf.experiments.settings import ImageRun, KGERun, read_run, read_settings
from aswa_hf.run_folder import (
    CONFIG,
    SETTINGS,
    STATE_FOLDER,
    check_unchanged,
    last_trainer_checkpoint,
    read_config,
)

if TYPE_CHECKING:
    from aswa_hf.kge import KGEModel

SPLITS = ("validation", "test")
# The settings that determine which images a run holds out.
HELD_OUT = ("dataset", "val_ratio", "train_size", "seed", "image_size")


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of checkpoints of a known kind of run."""

    metric: str
    score: Callable[[Any], Any]
    """The validation score of a model."""
    measure: Callable[..., dict[str, float]]
    """The metrics of a model on a split; a third argument iterates over the batches, and may show progress."""
    batches: Batches | None = None
    bn_batches: int | None = None
    about: dict[str, Any] = field(default_factory=dict)

    def report(self, model: Any) -> dict[str, dict[str, float]]:
        """The metrics of a model by split."""
        return {split: self.measure(model, split) for split in SPLITS}


def find_evaluation(folders: Sequence[Path | None], dataset: str | None = None) -> Evaluation | None:
    """The evaluation of checkpoints of `aswa-hf train`, or of a link predictor on a given dataset; else None."""
    runs = list(dict.fromkeys(run for run in map(_run_of, folders) if run is not None))
    if not runs:
        if dataset is None:
            return None
        if {_model_type(folder) for folder in folders} != {"kge"}:
            raise ValueError("A dataset alone is enough only for link predictors. Give an evaluation function.")
        return _link_prediction(folders[0], None, {}, dataset)
    settings = [read_settings(run / SETTINGS) for run in runs]
    first = read_run(runs[0] / SETTINGS)
    for run, other in zip(runs[1:], settings[1:], strict=True):
        for name in HELD_OUT if isinstance(first, ImageRun) else ("dataset",):
            if _identity(other.get(name)) != _identity(settings[0].get(name)):
                raise ValueError(
                    f"{run} was trained with {name} {_identity(other.get(name))}, {runs[0]} with "
                    f"{_identity(settings[0].get(name))}: the data of one cannot evaluate the other. Give an "
                    "evaluation function instead."
                )
    sizes = sizes_of(settings[0])
    source = dataset or first.dataset
    if isinstance(first, ImageRun):
        return _images(first, sizes, source)
    return _link_prediction(folders[0], first, sizes, source)


def sizes_of(settings: Mapping[str, Any]) -> dict[str, int]:
    """The number of examples of each split that a run was trained and evaluated on."""
    return {split: size for split, size in settings["dataset"].items() if isinstance(size, int)}


def _identity(value: Any) -> Any:
    """A setting without the location of the data, which may have been moved."""
    return {key: item for key, item in value.items() if key != "source"} if isinstance(value, Mapping) else value


def _run_of(checkpoint: Path | None) -> Path | None:
    """The folder of the run that wrote a checkpoint."""
    if checkpoint is None:
        return None
    folder = checkpoint.resolve()
    return next((place for place in (folder, folder.parent) if (place / SETTINGS).is_file()), None)


def _model_type(folder: Path | None) -> Any:
    path = None if folder is None else folder / CONFIG
    return read_config(path).get("model_type") if path is not None and path.is_file() else None


def check_sizes(expected: Mapping[str, int], source: str, sizes: Mapping[str, int]) -> None:
    """Raises ValueError if the data are not those of the run."""
    known = {split: expected.get(split, sizes[split]) for split in sizes}
    if known != dict(sizes):
        raise ValueError(
            f"The run had {_listed(known)} examples, but {source!r} has {_listed(sizes)}. Give the run's dataset with "
            "--dataset (dataset=)."
        )


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {split}" for split, count in sizes.items())


def _link_prediction(folder: Path | None, run: KGERun | None, expected: Mapping[str, int], source: str) -> Evaluation:
    from aswa_hf.kge import KGVocab, evaluate_link_prediction, load_kg

    try:
        kg = load_kg(source)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"The graph of the run could not be loaded; give it with --dataset (dataset=). {error}"
        ) from None
    check_sizes(expected, source, {split: len(kg[split]) for split in kg})
    vocab = KGVocab.from_pretrained(folder or "")
    if (vocab.entities, vocab.relations) != (kg.vocab.entities, kg.vocab.relations):
        raise ValueError(f"{source!r} does not have the entities and relations that the checkpoints were trained on.")
    measure = partial(_on_device, lambda model, split, track: evaluate_link_prediction(model, kg, split, track=track))
    about: dict[str, Any] = {"task": KGERun.task, "dataset": kg.name, "model": run.model if run else None}
    return _evaluation(KGERun.metric, measure, about=about | _numbers_of(run))


def _images(run: ImageRun, expected: Mapping[str, int], source: str) -> Evaluation:
    from dataclasses import replace

    from torch.utils.data import DataLoader

    from aswa_hf.experiments.image import load_images
    from aswa_hf.vision import ImageTensors
    from aswa_hf.vision.images import as_it_is

    try:
        splits = load_images(replace(run, dataset=source))
    except (ValueError, OSError) as error:
        raise ValueError(
            f"The images of the run could not be loaded; give them with --dataset (dataset=). {error}"
        ) from None
    check_sizes(expected, source, {split: len(rows) for split, rows in splits.items()})
    images = {
        split: ImageTensors(rows, size=run.image_size, augment=split == "train" and bool(run.augment))
        for split, rows in splits.items()
    }
    loaders = {split: DataLoader(images[split], batch_size=250, collate_fn=as_it_is) for split in SPLITS}
    train = DataLoader(images["train"], batch_size=run.batch_size, shuffle=True, collate_fn=as_it_is)
    measure = partial(_on_device, lambda model, split, track: _classification(model, loaders[split], track))
    about = {"task": run.task, "dataset": run.dataset_name, "model": run.model}
    return _evaluation(run.metric, measure, about=about | _numbers_of(run), batches=train, bn_batches=run.bn_batches)


def _numbers_of(run: KGERun | ImageRun | None) -> dict[str, Any]:
    return {} if run is None else {"seed": run.seed, "epochs": run.epochs}


def _evaluation(metric: str, measure: Any, **options: Any) -> Evaluation:
    def score(model: Any) -> float:
        return float(measure(model, "validation")[metric])

    return Evaluation(metric, score, measure, **options)


def _on_device(measure: Any, model: Any, split: str, track: Any = iter) -> dict[str, float]:
    import torch

    found: dict[str, float] = measure(model.to("cuda" if torch.cuda.is_available() else "cpu"), split, track)
    return found


def _classification(model: Any, loader: Any, track: Any) -> dict[str, float]:
    import torch

    correct, loss, seen = 0.0, 0.0, 0
    device = next(model.parameters()).device
    with torch.no_grad():
        for batch in track(loader):
            labels = batch["labels"].to(device)
            logits = model(batch["pixel_values"].to(device)).logits.float()
            correct += float((logits.argmax(-1) == labels).sum())
            loss += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
            seen += len(labels)
    return {"accuracy": correct / seen, "loss": loss / seen}


def each_strategy(model: KGEModel, run: str | Path, names: Sequence[str]) -> Iterator[str]:
    """Yields the names of strategies of a run, each while its weights are in the model."""
    path = check_strategies(Path(run), names)
    with ExitStack() as files:
        try:
            _, saved = open_index(path, files)  # also of a sharded run
        except ValueError as error:
            raise ValueError(f"{path} does not hold the weights of strategies: {error}") from None
        check_unchanged(path.parent.parent, f"{STATE_FOLDER}/*")
        for name in names:
            prefix = f"{name}/averaged/"
            weights = {key.removeprefix(prefix): saved[key][...] for key in saved if key.startswith(prefix)}
            load_weights(model, weights, f"{path}, strategy {name},")
            yield name


def check_strategies(run: Path, names: Sequence[str]) -> Path:
    """Returns the file with the weights of a run's strategies; raises ValueError if a strategy is not in it."""
    path = strategy_weights(run)
    known = dict.fromkeys(key.partition("/")[0] for key in read_header(path)[0])
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ValueError(f"The run has no weights of the strategy {name!r}. {hint}It has {', '.join(known)}.")
    return path


def strategy_weights(run: Path) -> Path:
    """The file with the weights of a run's strategies: at the end of the run, else at its last checkpoint."""
    places = [run, *([last] if (last := last_trainer_checkpoint(run)) else [])]
    for folder in places:
        if (folder / STATE_FOLDER / AVERAGE_FILE).is_file():
            return folder / STATE_FOLDER / AVERAGE_FILE
    raise ValueError(f"--strategies needs a run folder with the weights of its strategies, got {run}.")
