"""Weight averaging in a loop of Accelerate: `fit`."""

from aswa_hf.loop.training import FitResult, fit

Run = FitResult  # the former name of FitResult

__all__ = ["FitResult", "Run", "fit"]
