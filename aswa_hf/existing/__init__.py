"""Averages of checkpoints that already exist, on disk or on the Hub."""

from aswa_hf.existing.average import Progress, average_checkpoints
from aswa_hf.existing.judging import Evaluation
from aswa_hf.existing.result import AveragedCheckpoints

__all__ = ["AveragedCheckpoints", "Evaluation", "Progress", "average_checkpoints"]
