"""Weight averaging in `transformers.Trainer`: `ASWACallback`."""

from aswa_hf.trainer.callback import ASWACallback

__all__ = ["ASWACallback"]
