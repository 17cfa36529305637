"""Averages of existing checkpoints, on disk or on the Hub."""

from aswa_hf.checkpoints.average import Progress, average_checkpoints
from aswa_hf.checkpoints.result import AveragedCheckpoints
from aswa_hf.experiments.evaluation import Evaluation

__all__ = ["AveragedCheckpoints", "Evaluation", "Progress", "average_checkpoints"]
