"""aswa-hf: better weights from the training run you already do."""

from typing import TYPE_CHECKING, Any

from aswa_hf.averaging import WeightAverage
from aswa_hf.ensembles import FGE, PredictionEnsemble
from aswa_hf.strategies import ASWA, EMA, SWA, BestCheckpoint, LastCheckpoint
from aswa_hf.trajectory import Decision, Trajectory

if TYPE_CHECKING:
    from aswa_hf.existing import average_checkpoints
    from aswa_hf.trainer import ASWACallback

__version__ = "0.1.0"
__all__ = [
    "ASWA",
    "ASWACallback",
    "BestCheckpoint",
    "Decision",
    "EMA",
    "FGE",
    "LastCheckpoint",
    "PredictionEnsemble",
    "SWA",
    "Trajectory",
    "WeightAverage",
    "average_checkpoints",
]


def __getattr__(name: str) -> Any:
    # transformers takes seconds to import, and a plain loop does not need it.
    if name == "ASWACallback":
        from aswa_hf.trainer import ASWACallback

        return ASWACallback
    if name == "average_checkpoints":
        from aswa_hf.existing import average_checkpoints

        return average_checkpoints
    raise AttributeError(f"module 'aswa_hf' has no attribute {name!r}")
