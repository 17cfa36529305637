"""A run of `aswa-hf train image`."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import timm
import torch
from datasets import DatasetDict, concatenate_datasets
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import TrainingArguments, set_seed

from aswa_hf._utils.distributed import wait_for_all
from aswa_hf._utils.files import write_text
from aswa_hf.comparison import named_factories
from aswa_hf.experiments.progress import steps_shown
from aswa_hf.experiments.running import (
    LOG,
    SETTINGS,
    LogFile,
    checked_folder,
    draw,
    epochs_done,
    is_main_process,
    keep_settings,
    last_whole_checkpoint,
    results_table,
    run_console,
    save_every_tenth,
    train_and_evaluate,
    write_results,
)
from aswa_hf.strategies import SWA
from aswa_hf.trainer import ASWACallback
from aswa_hf.trainer.hub import image_example
from aswa_hf.vision import ImageTensors, load_cifar, load_digits
from aswa_hf.vision.classifier import TimmForImageClassification, check_timm_name, timm_classifier
from aswa_hf.vision.data import check_ratio, hold_out
from aswa_hf.vision.images import as_it_is
from aswa_hf.vision.recipes import Recipe, find_recipe
from aswa_hf.vision.training import FGETrainer, ImageTrainer, SaveWeights, chosen_precision, image_arguments

START = "start.safetensors"
DIGITS_FOR_TRAINING = 1300


def train_image(
    *,
    dataset: str,
    output_dir: Path,
    model_name: str,
    recipe_name: str | None,
    epochs: int | None,
    batch_size: int | None,
    lr: float | None,
    strategies: list[str],
    fge: bool,
    fge_cycle: float | None,
    image_size: int | None,
    augment: bool | None,
    val_ratio: float,
    train_size: int | None,
    bn_batches: int | None,
    precision: str,
    seed: int,
    resume: bool,
    keep: int = 1,
) -> dict[str, Any]:
    """Trains an image classifier and fills its run folder; gives what results.json holds."""
    console = run_console()
    check_timm_name(model_name)
    factories: Any = named_factories(strategies)
    checkpoint = checked_folder(output_dir, resume)
    splits = load_images(dataset, val_ratio, seed, train_size)
    preset = timm.get_pretrained_cfg(model_name)
    size = image_size or (preset.input_size[-1] if preset else None)
    images = {
        split: ImageTensors(rows, size=size, augment=split == "train" and _augments(augment, dataset))
        for split, rows in splits.items()
    }
    recipe_name, recipe = find_recipe(recipe_name, model_name, images["train"].num_classes)
    recipe = recipe.lasting(epochs or recipe.epochs).at_rate(recipe.lr if lr is None else lr)
    recipe = replace(
        recipe,
        batch_size=batch_size or recipe.batch_size,
        fge_cycle=recipe.fge_cycle if fge_cycle is None else fge_cycle,
    )
    fge_folder = output_dir / "fge"
    if fge:
        _check_fge(recipe, fge_folder / START, checkpoint)
    set_seed(seed)
    model = _build(model_name, images["train"])
    parts = ", ".join(f"{len(rows):,} {split}" for split, rows in images.items())
    size, classes = images["train"].size, images["train"].num_classes
    name = Path(dataset).name if Path(dataset).is_dir() else dataset
    console.print(f"{dataset}: {parts} images, {classes} classes, {size}×{size} pixels")
    console.print(f"{model_name} by recipe {recipe_name}: {recipe.summary()}")

    options: dict[str, Any] = {"seed": seed, "disable_tqdm": True, "save_strategy": "steps", "save_total_limit": keep}
    args = image_arguments(output_dir, recipe, precision=precision, **options)
    trainer = ImageTrainer(model, args, recipe, train_dataset=images["train"], eval_dataset=images["validation"])
    if "swa" in factories:
        # The epoch at which the learning rate is ready for it.
        factories["swa"] = lambda model: SWA(model, start=recipe.swa_start - 1, bn_batches=bn_batches)
    callback = ASWACallback(
        trainer, metric="accuracy", strategies=factories, apply=strategies[0], bn_batches=bn_batches
    )
    if fge:
        trainer.add_callback(SaveWeights(fge_folder / START, recipe.fge_epoch))
    counts = {split: len(rows) for split, rows in images.items()}
    settings = {
        "dataset": {"name": name, **counts},
        "model": model_name,
        "recipe": recipe_name,
        "epochs": recipe.epochs,
        "batch_size": recipe.batch_size,
        "lr": recipe.lr,
        "strategies": strategies,
        "image_size": size,
        "augment": images["train"].augment,
        "val_ratio": val_ratio,
        "train_size": train_size,
        "bn_batches": bn_batches,
        "precision": chosen_precision(precision),
        "seed": seed,
    }
    keep_settings(args, settings, checkpoint)

    def evaluate(split: str) -> dict[str, float]:
        found = trainer.evaluate(images[split], metric_key_prefix=split)
        return {name: found[f"{split}_{name}"] for name in ("accuracy", "loss")}

    results, seconds = train_and_evaluate(trainer, callback, checkpoint, evaluate, console)
    example = image_example(model, images["test"], "test")
    if fge:
        start = time.perf_counter()
        options |= {"precision": precision, "num_train_epochs": recipe.fge_epochs, "eval_strategy": "no"}
        options["save_total_limit"] = 1
        results["fge"] = _fge(model, image_arguments(fge_folder, recipe, **options), recipe, images, console)
        seconds["fge"] = time.perf_counter() - start
    content = write_results(
        output_dir,
        results,
        seconds,
        task="image-classification",
        dataset=name,
        model=model_name,
        seed=seed,
        epochs=recipe.epochs,
        recipe=recipe_name,
        images=counts,
        bn_batches=bn_batches,
        example=example,
    )
    draw(output_dir, callback.strategies, "accuracy", f"{model_name} on {Path(name).name}")
    console.print(results_table(results, {"accuracy": ""}, "Accuracy (%)"))
    registered = "import aswa_hf.vision; " if model_name.endswith("_cifar") else ""
    code = f'{registered}timm.create_model("local-dir:{output_dir}", pretrained=True)'
    console.print(f"Written to {output_dir}; loaded by: {code}", soft_wrap=True)
    return content


def load_images(dataset: str, val_ratio: float, seed: int, train_size: int | None) -> DatasetDict:
    """The splits that a run trains and is judged on, of the built-in digits too."""
    if dataset != "digits":
        return load_cifar(dataset, val_ratio=val_ratio, seed=seed, train_size=train_size)
    check_ratio(val_ratio)
    splits = load_digits(train=DIGITS_FOR_TRAINING - 1, validation=1, seed=seed)
    train = concatenate_datasets([splits["train"], splits["validation"]])
    return hold_out({"train": train, "test": splits["test"]}, val_ratio, seed, train_size=train_size)


def _augments(augment: bool | None, dataset: str) -> bool:
    # A mirrored digit is none.
    return dataset != "digits" if augment is None else augment


def _build(name: str, images: ImageTensors) -> TimmForImageClassification:
    """The model for the images, tried on one of them."""
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


def _check_fge(recipe: Recipe, start: Path, checkpoint: str | None) -> None:
    """Refuses what would fail only when training is over."""
    if recipe.epochs < 2:
        raise ValueError("--fge sets out from a point within the run and needs --epochs 2 or more.")
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
            f"--fge: {start} is missing, because the run was begun without --fge and is past epoch "
            f"{recipe.fge_epoch}. Go on without --fge, or start anew."
        )
    with safe_open(start, framework="pt") as file:
        epoch = (file.metadata() or {}).get("epoch")
    if epoch != str(recipe.fge_epoch):
        raise ValueError(
            f"--fge: in a run of {recipe.epochs} epochs FGE sets out from epoch {recipe.fge_epoch}, which this run is "
            f"past, and {start} is of epoch {epoch}. Go on without --fge, with other --epochs, or start anew."
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
    model.load_state_dict(load_file(folder / START))
    trainer = FGETrainer(model, args, recipe, train_dataset=images["train"], callbacks=[LogFile(folder / LOG)])
    save_every_tenth(trainer)
    with steps_shown(trainer, console, f"FGE from epoch {recipe.fge_epoch}, steps"):
        trainer.train(resume_from_checkpoint=last_whole_checkpoint(folder))
    ensemble = trainer.fge.ensemble()
    results: dict[str, Any] = {"members": len(ensemble.members)}
    for split in ("validation", "test"):
        with console.status(f"evaluating fge, {split}"):
            loader = DataLoader(images[split], batch_size=args.per_device_eval_batch_size, collate_fn=as_it_is)
            probabilities, labels = ensemble.predict(loader), images[split].labels
        results[split] = {
            "accuracy": float((probabilities.argmax(-1) == labels).float().mean()),
            "loss": float(torch.nn.functional.nll_loss(probabilities.clamp_min(1e-12).log(), labels)),
        }
    return results


def _drop_other_fge(folder: Path, recipe: Recipe) -> None:
    """Leaves checkpoints and snapshots only if they were made from these very weights with this very recipe."""
    settings = asdict(recipe) | {"start": hashlib.sha256((folder / START).read_bytes()).hexdigest()}
    path = folder / SETTINGS
    if is_main_process() and not (path.exists() and json.loads(path.read_text(encoding="utf-8")) == settings):
        for other in folder.iterdir():
            if other.is_dir():
                shutil.rmtree(other)
            elif other.name != START:
                other.unlink()
        write_text(path, json.dumps(settings, indent=2) + "\n")
    wait_for_all()
