"""aswa-hf: better weights from the training run you already do."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aswa_hf._utils.process_group import closing_process_group
    from aswa_hf.averaging import WeightAverage
    from aswa_hf.checkpoints import average_checkpoints
    from aswa_hf.ensembles import FGE, PredictionEnsemble
    from aswa_hf.experiments import ImageRun, KGERun, train_image, train_kge
    from aswa_hf.strategies import (
        ASWA,
        BEMA,
        EMA,
        LAWA,
        SWA,
        SWAD,
        BestCheckpoint,
        BestEMA,
        DenseASWA,
        LastCheckpoint,
        PowerEMA,
        SWADMax,
    )
    from aswa_hf.trainer import ASWACallback
    from aswa_hf.trajectory import Decision, Trajectory

    __version__: str

__all__ = [
    "ASWA",
    "ASWACallback",
    "BEMA",
    "BestCheckpoint",
    "BestEMA",
    "Decision",
    "DenseASWA",
    "EMA",
    "FGE",
    "ImageRun",
    "KGERun",
    "LAWA",
    "LastCheckpoint",
    "PowerEMA",
    "PredictionEnsemble",
    "SWA",
    "SWAD",
    "SWADMax",
    "Trajectory",
    "WeightAverage",
    "average_checkpoints",
    "closing_process_group",
    "train_image",
    "train_kge",
]

# Imported on first access: a plain loop does not need transformers, and shell completion does not need torch.
# Importing either takes seconds.
_MODULES = {
    **dict.fromkeys(("ASWA", "DenseASWA", "SWA", "LAWA", "BestCheckpoint", "LastCheckpoint"), "strategies"),
    **dict.fromkeys(("EMA", "BestEMA", "BEMA", "PowerEMA", "SWAD", "SWADMax"), "strategies"),
    **dict.fromkeys(("FGE", "PredictionEnsemble"), "ensembles"),
    **dict.fromkeys(("Decision", "Trajectory"), "trajectory"),
    "ASWACallback": "trainer",
    "WeightAverage": "averaging",
    "average_checkpoints": "checkpoints",
    **dict.fromkeys(("ImageRun", "KGERun", "train_image", "train_kge"), "experiments"),
    "closing_process_group": "_utils.process_group",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("aswa-hf")
    if name not in _MODULES:
        raise AttributeError(f"module 'aswa_hf' has no attribute {name!r}")
    return getattr(import_module(f"aswa_hf.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
