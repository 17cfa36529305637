"""Weight averaging in a loop of Accelerate: `fit`."""

from aswa_hf.loop.training import Run, fit

__all__ = ["Run", "fit"]
