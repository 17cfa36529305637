"""Weight averaging in a loop of Accelerate: `fit`."""

from aswa_hf.loop.training import FitResult, fit
from aswa_hf.schedule import fixed_subset

Run = FitResult  # the former name of FitResult

__all__ = ["FitResult", "Run", "fit", "fixed_subset"]
