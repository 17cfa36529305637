"""The picture of a run's decisions in the reporters of a Trainer: TensorBoard, Weights & Biases, trackio.

Scalars need nothing here: what is passed to `trainer.log` goes to all reporters.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.utils import logging

logger = logging.get_logger(__name__)

KEY = "aswa/trajectory"


def show_picture(trainer: Trainer, path: Path) -> None:
    """Adds the picture to every reporter of the trainer that takes pictures; a failure is a warning."""
    for callback in trainer.callback_handler.callbacks:
        for kind in type(callback).__mro__:
            if show := _REPORTERS.get(kind.__name__):
                try:
                    show(callback, path, trainer.state.global_step)
                except Exception as error:  # any error of a reporter: the run itself has succeeded
                    logger.warning(f"{kind.__name__} did not take {path.name}: {type(error).__name__}: {error}")
                break


def _in_tensorboard(callback: Any, path: Path, step: int) -> None:
    if callback.tb_writer is not None:
        import numpy as np
        from PIL import Image

        with Image.open(path) as picture:
            pixels = np.asarray(picture.convert("RGB"))
        callback.tb_writer.add_image(KEY, pixels, step, dataformats="HWC")


def _in_wandb(callback: Any, path: Path, step: int) -> None:
    if callback._wandb is not None and callback._wandb.run is not None:
        # The Trainer's own step is a value among others in W&B, which counts logs itself.
        callback._wandb.log({KEY: callback._wandb.Image(str(path)), "train/global_step": step})


def _in_trackio(callback: Any, path: Path, step: int) -> None:
    if callback._initialized:
        callback._trackio.log({KEY: callback._trackio.Image(str(path)), "train/global_step": step})


_REPORTERS: dict[str, Callable[[Any, Path, int], None]] = {
    "TensorBoardCallback": _in_tensorboard,
    "WandbCallback": _in_wandb,
    "TrackioCallback": _in_trackio,
}
