"""Complete training runs with all strategies, as `aswa-hf train` and `aswa-hf reproduce` perform them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from aswa_hf.experiments.settings import ImageRun, KGERun

if TYPE_CHECKING:
    from aswa_hf.experiments.image import train_image
    from aswa_hf.experiments.kge import train_kge

__all__ = ["ImageRun", "KGERun", "train_image", "train_kge"]

# Imported when they are first used: the command line builds its flags from the settings, without torch.
_MODULES = {"train_image": "image", "train_kge": "kge"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
