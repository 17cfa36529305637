"""A training run of an image classifier."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import timm
import torch
from datasets import DatasetDict, concatenate_datasets
from rich.console import Console
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainingArguments, set_seed

from aswa_hf._utils.distributed import wait_for_all
from aswa_hf._utils.files import read_object, write_json
from aswa_hf._utils.tensors import load_tensors, load_weights, open_tensors
from aswa_hf.comparison import Named, named_factories
from aswa_hf.experiments.progress import results_table, steps_shown, verdict
from aswa_hf.experiments.running import (
    SPLITS,
    FinishedRun,
    checkpoint_to_resume,
    is_main_process,
    keep_settings,
    run_console,
    sole_run,
    train_and_evaluate,
    train_to_the_end,
    write_results,
)
from aswa_hf.experiments.settings import ImageRun
from aswa_hf.run_folder import SETTINGS, epochs_done, newest_checkpoint
from aswa_hf.strategies import SWA
from aswa_hf.trainer import ASWACallback
from aswa_hf.trainer.hub import image_example, try_example
from aswa_hf.vision import ImageTensors, load_cifar, load_digits
from aswa_hf.vision.classifier import TimmForImageClassification, check_timm_name, timm_classifier
from aswa_hf.vision.data import check_ratio, hold_out
from aswa_hf.vision.images import as_it_is
from aswa_hf.vision.recipes import Recipe, find_recipe
from aswa_hf.vision.training import FGETrainer, ImageTrainer, SaveWeights, chosen_precision, image_arguments

START = "start.safetensors"
DIGITS_FOR_TRAINING = 1300


def train_image(
    run: ImageRun,
    output_dir: str | Path | None = None,
    *,
    resume: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
) -> FinishedRun:
    """Trains an image classifier and fills its run folder, by default `runs/<dataset>-<model>-<seed>`.

    >>> finished = train_image(ImageRun(dataset="digits", epochs=20, val_ratio=0.3))
    >>> finished.results["strategies"]["aswa"]["test"]["accuracy"]
    """
    folder = Path("runs") / run.name if output_dir is None else Path(output_dir)
    with sole_run(folder):
        return _train(run, folder, resume, callbacks)


def _train(run: ImageRun, folder: Path, resume: bool, callbacks: Sequence[TrainerCallback]) -> FinishedRun:
    console = run_console()
    check_timm_name(run.model)
    find_recipe(run.recipe, run.model, 0)  # raises for an unknown one, before images are loaded
    factories: Any = named_factories(run.strategies)
    checkpoint = checkpoint_to_resume(run, folder, resume)
    splits = load_images(run)
    preset = timm.get_pretrained_cfg(run.model)
    size = run.image_size or (preset.input_size[-1] if preset else None)
    # A mirrored digit is not a digit.
    augment = run.dataset != "digits" if run.augment is None else run.augment
    images = {
        split: ImageTensors(rows, size=size, augment=augment and split == "train") for split, rows in splits.items()
    }
    run, recipe = _resolved(run, images["train"])
    fge_folder = folder / "fge"
    if run.fge:
        _check_fge(recipe, fge_folder / START, checkpoint)
    set_seed(run.seed)
    model = _build(run.model, images["train"])
    sizes = {split: len(rows) for split, rows in images.items()}
    parts = ", ".join(f"{count:,} {split}" for split, count in sizes.items())
    size, classes = images["train"].size, images["train"].num_classes
    console.print(f"{run.dataset}: {parts} images, {classes} classes, {size}×{size} pixels")
    console.print(f"{run.model} with recipe {run.recipe}: {recipe.summary()}")

    options: dict[str, Any] = {"seed": run.seed, "disable_tqdm": True, "save_strategy": "no"}
    args = image_arguments(folder, recipe, precision=run.precision, save_total_limit=run.keep, **options)
    data = {"train_dataset": images["train"], "eval_dataset": images["validation"]}
    trainer = ImageTrainer(model, args, recipe, callbacks=list(callbacks), **data)
    if factories.get("swa") == Named(SWA):
        # The epoch at which the learning rate has reached SWA's.
        factories["swa"] = Named(SWA, {"start": recipe.swa_start - 1})
    callback = ASWACallback(
        trainer, metric=run.metric, strategies=factories, apply=run.shipped, bn_batches=run.bn_batches
    )
    if run.fge:
        trainer.add_callback(SaveWeights(fge_folder / START, recipe.fge_epoch))
    keep_settings(run, sizes, args, checkpoint)

    def evaluate(split: str) -> dict[str, float]:
        found = trainer.evaluate(images[split], metric_key_prefix=split)
        return {name: found[f"{split}_{name}"] for name in ("accuracy", "loss")}

    results, seconds = train_and_evaluate(trainer, callback, checkpoint, evaluate, console)
    example = try_example(image_example, model, images["test"], "test")
    if run.fge:
        start = time.perf_counter()
        options |= {"precision": run.precision, "num_train_epochs": recipe.fge_epochs, "eval_strategy": "no"}
        fge_args = image_arguments(fge_folder, recipe, save_total_limit=1, **options)
        results["fge"] = _fge(model, fge_args, recipe, images, console)
        seconds["fge"] = time.perf_counter() - start
        callback.strategies[str(callback.applied)].apply()
    about: dict[str, Any] = {"recipe": run.recipe, "images": sizes, "bn_batches": run.bn_batches, "example": example}
    # Beside the others, whose sum is the duration of the run.
    about |= {"cpu_seconds": seconds.pop("cpu"), "resumed": checkpoint is not None}
    content = write_results(folder, callback, results, seconds, **run.describe(folder), **about)
    saved = str(callback.applied)
    console.print(results_table(results, {run.metric: ""}, "Accuracy (%)", saved))
    console.print(verdict(results, run.metric, run.metric, saved), soft_wrap=True)
    registered = "import aswa_hf.vision; " if run.model.endswith("_cifar") else ""
    place = json.dumps(f"local-dir:{folder}", ensure_ascii=False)
    code = f"{registered}timm.create_model({place}, pretrained=True)"
    console.print(f"Written to {folder}; load it with: {code}", soft_wrap=True)
    return FinishedRun(folder, content, model, callback.strategies)


def _resolved(run: ImageRun, images: ImageTensors) -> tuple[ImageRun, Recipe]:
    """The run with a value for every setting that was left open, and its recipe."""
    name, recipe = find_recipe(run.recipe, run.model, images.num_classes)
    recipe = recipe.lasting(run.epochs or recipe.epochs).at_rate(recipe.lr if run.lr is None else run.lr)
    recipe = replace(
        recipe,
        batch_size=run.batch_size or recipe.batch_size,
        fge_cycle=recipe.fge_cycle if run.fge_cycle is None else run.fge_cycle,
    )
    found = replace(
        run,
        recipe=name,
        epochs=recipe.epochs,
        batch_size=recipe.batch_size,
        lr=recipe.lr,
        image_size=images.size,
        augment=images.augment,
        precision=chosen_precision(run.precision),
    )
    return found, recipe


def load_images(run: ImageRun) -> DatasetDict:
    """The splits that a run is trained and evaluated on, including those of the built-in digits."""
    if run.dataset != "digits":
        return load_cifar(run.dataset, val_ratio=run.val_ratio, seed=run.seed, train_size=run.train_size)
    check_ratio(run.val_ratio)
    splits = load_digits(train=DIGITS_FOR_TRAINING - 1, validation=1, seed=run.seed)
    train = concatenate_datasets([splits["train"], splits["validation"]])
    return hold_out({"train": train, "test": splits["test"]}, run.val_ratio, run.seed, train_size=run.train_size)


def _build(name: str, images: ImageTensors) -> TimmForImageClassification:
    """The model for the images; raises ValueError if it does not work on one of them."""
    model = timm_classifier(
        name, images.class_names, channels=images.channels, size=images.size, mean=images.mean, std=images.std
    )
    try:
        with torch.no_grad():
            model.eval()(images[0]["pixel_values"][None])
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"{name} does not work on {images.size}×{images.size} pixels: {error}. Choose another --image-size or "
            "--model."
        ) from None
    return model


def _check_fge(recipe: Recipe, start: Path, checkpoint: Path | None) -> None:
    """Raises ValueError for settings of FGE that would fail only after training."""
    if recipe.epochs < 2:
        raise ValueError("--fge starts from a point within the run and needs --epochs 2 or more.")
    if recipe.fge_cycle <= 0:
        raise ValueError(f"--fge-cycle must be a number of epochs above 0, got {recipe.fge_cycle}.")
    if recipe.fge_cycle > 2 * recipe.fge_epochs:
        raise ValueError(
            f"--fge-cycle {recipe.fge_cycle}: the first snapshot would come after half a cycle, but FGE only trains "
            f"for the last {recipe.fge_epochs} of {recipe.epochs} epochs."
        )
    if epochs_done(checkpoint) < recipe.fge_epoch:
        return
    if not start.exists():
        raise ValueError(
            f"--fge: {start} is missing, because the run was started without --fge and is past epoch "
            f"{recipe.fge_epoch}. Resume without --fge, or start a new run."
        )
    with open_tensors(start) as file:
        epoch = (file.metadata() or {}).get("epoch")
    if epoch != str(recipe.fge_epoch):
        raise ValueError(
            f"--fge: in a run of {recipe.epochs} epochs FGE starts from epoch {recipe.fge_epoch}, which this run has "
            f"passed, and {start} is from epoch {epoch}. Resume without --fge or with other --epochs, or start a new "
            "run."
        )


def _fge(
    model: TimmForImageClassification,
    args: TrainingArguments,
    recipe: Recipe,
    images: dict[str, ImageTensors],
    console: Console,
) -> dict[str, Any]:
    """The metrics of Fast Geometric Ensembling from the run's weights after `recipe.fge_epoch` epochs."""
    folder = Path(args.output_dir)
    _drop_other_fge(folder, recipe)
    load_weights(model.timm_model, load_tensors(folder / START), folder / START)
    trainer = FGETrainer(model, args, recipe, train_dataset=images["train"])
    last = newest_checkpoint(folder, clean=is_main_process())
    train_to_the_end(
        trainer, last, steps_shown(trainer, console, f"FGE from epoch {recipe.fge_epoch}, steps"), commits=True
    )
    ensemble = trainer.fge.ensemble()
    results: dict[str, Any] = {"members": len(ensemble.members)}
    for split in SPLITS:
        with console.status(f"evaluating fge, {split}"):
            loader = DataLoader(images[split], batch_size=args.per_device_eval_batch_size, collate_fn=as_it_is)
            probabilities, labels = ensemble.predict(loader), images[split].labels
        results[split] = {
            "accuracy": float((probabilities.argmax(-1) == labels).float().mean()),
            "loss": float(torch.nn.functional.nll_loss(probabilities.clamp_min(1e-12).log(), labels)),
        }
    return results


def _drop_other_fge(folder: Path, recipe: Recipe) -> None:
    """Deletes checkpoints and snapshots that were made from other weights or with another recipe."""
    settings = asdict(recipe) | {"start": hashlib.sha256((folder / START).read_bytes()).hexdigest()}
    path = folder / SETTINGS
    if is_main_process() and not (path.exists() and read_object(path) == settings):
        for other in folder.iterdir():
            if other.is_dir():
                shutil.rmtree(other)
            elif other.name != START:
                other.unlink()
        write_json(path, settings)
    wait_for_all()
