"""Two runs of a CIFAR network: strategies shadow each run, FGE starts from it, predictions of both are averaged.

    python examples/image_classification.py
    python examples/image_classification.py --dataset uoft-cs/cifar10 --image_size 32 --train_size 47500 --epochs 225
    python examples/image_classification.py --train_size 300 --epochs 2        # a quick look

The default data is embedded (scikit-learn's handwritten digits). `aswa-hf train image` does the same for one run, with
checkpoints, exact resumption and a folder of results.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import set_seed

from aswa_hf import ASWACallback, closing_process_group
from aswa_hf.ensembles import PredictionEnsemble
from aswa_hf.vision import ImageTensors, as_it_is, load_cifar, load_digits
from aswa_hf.vision.classifier import TimmForImageClassification, timm_classifier
from aswa_hf.vision.recipes import Recipe, find_recipe
from aswa_hf.vision.training import FGETrainer, ImageTrainer, SaveWeights, image_arguments

STRATEGIES = ("aswa", "swa", "ema", "best", "last")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="digits", help="digits, a folder, or a Hub dataset like uoft-cs/cifar10")
    parser.add_argument("--model", default="preresnet20_cifar", help="any timm model")
    parser.add_argument("--image_size", type=int, default=16, help="small images train fast")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--train_size", type=int, default=600)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/image_classification"))
    options = parser.parse_args()

    is_digits = options.dataset == "digits"
    load = (
        partial(load_digits, train=options.train_size)
        if is_digits
        else partial(load_cifar, options.dataset, train_size=options.train_size)
    )
    # Photographs are cropped and mirrored at random; a mirrored digit is not a digit.
    images = {
        name: ImageTensors(rows, size=options.image_size, augment=name == "train" and not is_digits)
        for name, rows in load().items()
    }
    _, recipe = find_recipe(None, options.model, images["train"].num_classes)
    recipe = recipe.lasting(options.epochs)

    folders = [options.output_dir / f"seed-{seed}" for seed in range(2)]
    for seed, folder in enumerate(folders):
        model = train(options.model, images, recipe, folder, seed)

    # One model in memory, through which the saved ones pass.
    runs = PredictionEnsemble(model, [partial(load_file, folder / "model.safetensors") for folder in folders])
    show("both runs", runs.predict(batches(images["test"])), images["test"].labels)


def train(
    name: str, images: dict[str, ImageTensors], recipe: Recipe, folder: Path, seed: int
) -> TimmForImageClassification:
    """One run: what each strategy ends with, what FGE makes of it, and the ASWA weights in `folder`."""
    set_seed(seed)
    first = images["train"]
    looks = {"channels": first.channels, "size": first.size, "mean": first.mean, "std": first.std}
    model = timm_classifier(name, first.class_names, **looks)
    args = image_arguments(folder, recipe, seed=seed)
    trainer = ImageTrainer(model, args, recipe, train_dataset=first, eval_dataset=images["validation"])
    callback = ASWACallback(trainer, metric="accuracy", strategies=STRATEGIES)
    trainer.add_callback(callback)
    trainer.add_callback(SaveWeights(folder / "fge" / "start.safetensors", recipe.fge_epoch))
    trainer.train()

    # The model holds the ensemble now; timm and transformers both load what is saved.
    trainer.save_model()
    test = images["test"]
    for strategy in STRATEGIES:
        with callback.strategies[strategy].swapped():
            show(f"seed {seed}, {strategy}", PredictionEnsemble(None, [model]).predict(batches(test)), test.labels)

    model.load_state_dict(load_file(folder / "fge" / "start.safetensors"))
    args = image_arguments(folder / "fge", recipe, seed=seed, num_train_epochs=recipe.fge_epochs, eval_strategy="no")
    fge = FGETrainer(model, args, recipe, train_dataset=first)
    fge.train()
    show(f"seed {seed}, fge", fge.fge.ensemble().predict(batches(test)), test.labels)
    return model


def batches(images: ImageTensors) -> DataLoader:
    return DataLoader(images, batch_size=250, collate_fn=as_it_is)


def show(what: str, probabilities: Tensor, labels: Tensor) -> None:
    print(f"{what:13s} test accuracy {(probabilities.argmax(-1) == labels).float().mean():.4f}", flush=True)


if __name__ == "__main__":
    with closing_process_group():
        main()
