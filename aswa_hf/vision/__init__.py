"""Image classification with timm: importing this registers the CIFAR architectures of the SWA paper."""

from typing import TYPE_CHECKING, Any

from aswa_hf.vision import architectures
from aswa_hf.vision.data import ImageTensors, as_it_is, load_cifar, load_digits
from aswa_hf.vision.recipes import RECIPES, Recipe, swa_schedule

if TYPE_CHECKING:
    from aswa_hf.vision.classifier import timm_classifier
    from aswa_hf.vision.training import FGETrainer, ImageTrainer, image_arguments

__all__ = [
    "FGETrainer",
    "ImageTensors",
    "ImageTrainer",
    "RECIPES",
    "Recipe",
    "architectures",
    "as_it_is",
    "image_arguments",
    "load_cifar",
    "load_digits",
    "swa_schedule",
    "timm_classifier",
]


def __getattr__(name: str) -> Any:
    # transformers takes seconds to import, and models in timm alone do not need it.
    if name == "timm_classifier":
        from aswa_hf.vision.classifier import timm_classifier

        return timm_classifier
    if name in ("FGETrainer", "ImageTrainer", "image_arguments"):
        from aswa_hf.vision import training

        return getattr(training, name)
    raise AttributeError(f"module 'aswa_hf.vision' has no attribute {name!r}")
