"""Test accuracy of averaged weights by the number of training batches that BatchNorm statistics are computed on.

    aswa-hf reproduce robustness-images --train-size 10000 --seeds 1 --rates 0.3 --data-dir data
    python benchmarks/batchnorm.py runs/cifar-10-preresnet20_cifar-1-10-10000images-lr0.3-robustness \\
        --batches 5 20 50 --repeats 3 --json results/differences/bn_batches.json

The weights are those that each strategy had at the last checkpoint of the run. For each number of batches, the
statistics are recomputed from random training batches, as at every decision; `--repeats` draws others.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm

from aswa_hf._utils.tensors import open_tensors
from aswa_hf.batchnorm import Recalibration
from aswa_hf.checkpoint import library_versions
from aswa_hf.experiments.evaluation import find_evaluation, strategy_weights
from aswa_hf.experiments.image import load_images
from aswa_hf.experiments.settings import ImageRun, read_run
from aswa_hf.run_folder import SETTINGS
from aswa_hf.vision import ImageTensors
from aswa_hf.vision.classifier import timm_classifier

WITHIN = 0.1  # points of accuracy


def averaged(path: Path, strategy: str) -> dict[str, torch.Tensor]:
    """The averaged weights of a strategy."""
    prefix = f"{strategy}/averaged/"
    with open_tensors(path) as file:
        return {key.removeprefix(prefix): file.get_tensor(key) for key in file.keys() if key.startswith(prefix)}  # noqa: SIM118


def build(run: ImageRun) -> Any:
    images = ImageTensors(load_images(run)["train"], size=run.image_size)
    return timm_classifier(
        run.model,
        images.class_names,
        channels=images.channels,
        size=images.size,
        mean=images.mean,
        std=images.std,
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    run = read_run(options.run / SETTINGS)
    evaluation = find_evaluation([options.run])
    if not isinstance(run, ImageRun) or evaluation is None or evaluation.batches is None:
        raise SystemExit(f"{options.run} is not a run of images.")
    model, path = build(run), strategy_weights(options.run)
    available = len(evaluation.batches)  # type: ignore[arg-type]
    counts = [*(count for count in options.batches if count < available), available]
    found: dict[str, dict[str, list[float]]] = {}
    for strategy in tqdm(options.strategies, unit="strategy", disable=None):
        weights = averaged(path, strategy)
        unknown = model.load_state_dict(weights, strict=False).unexpected_keys
        if unknown or not weights:
            raise SystemExit(f"{path} has no weights of {strategy} for this model.")
        found[strategy] = {}
        for count in counts:
            repeats = options.repeats if count < available else 1
            for repeat in range(repeats):
                # Recalibration itself always has the same seed, so that decisions are comparable.
                batches = list(drawn(evaluation.batches, count, repeat))
                Recalibration(model, batches)()
                accuracy = evaluation.measure(model.eval(), "test")["accuracy"]
                found[strategy].setdefault(str(count), []).append(100 * accuracy)
                tqdm.write(f"{strategy}, {count} batches: {100 * accuracy:.2f}")
    return {
        "dataset": run.dataset_name,
        "model": run.model,
        "seed": run.seed,
        "batch_size": run.batch_size,
        "available": available,
        "accuracy": found,
        "versions": library_versions(),
    }


def drawn(batches: Any, count: int, seed: int) -> Any:
    torch.manual_seed(seed)
    for number, batch in enumerate(batches):
        if number == count:
            return
        yield {key: value.clone() for key, value in batch.items()}


def largest_differences(found: dict[str, Any]) -> dict[str, float]:
    """By number of batches, the largest difference of a strategy's mean accuracy from that with all batches."""
    every = str(found["available"])
    return {
        count: max(abs(fmean(of[count]) - fmean(of[every])) for of in found["accuracy"].values())
        for count in next(iter(found["accuracy"].values()))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, help="the folder of a run of aswa-hf train image, with its checkpoint")
    parser.add_argument("--strategies", nargs="+", default=["dense-aswa", "ema", "swa"])
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 5, 20, 50])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args()
    found = measure(options)
    for strategy, accuracies in found["accuracy"].items():
        print(strategy, {count: [round(value, 2) for value in values] for count, values in accuracies.items()})
    differences = largest_differences(found)
    print("largest difference from all batches:", {count: round(value, 2) for count, value in differences.items()})
    enough = [int(count) for count, value in differences.items() if value <= WITHIN]
    print(f"within {WITHIN} points: {enough}")
    if options.json:
        options.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
