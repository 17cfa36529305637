"""DeepSpeed ZeRO, stages 1 and 2: every process has all weights, and a part of their float32 master copy.

Where training is in lower precision, the optimizer changes the master copy, and the weights are rounded from it after
every step. So averages take the master copy; averaged weights are evaluated in the model's own dtype, as they will be
used.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
from torch import Tensor


def master_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The float32 master copy of each weight that has a more precise one, and the other weights as they are.

    It is gathered from all processes, which must all call this.
    """
    if "deepspeed" not in sys.modules:
        return weights
    return {
        name: tensor.get_full_hp_param()  # type: ignore[attr-defined]
        if tensor.dtype in (torch.bfloat16, torch.float16) and hasattr(tensor, "_hp_mapping")
        else tensor
        for name, tensor in weights.items()
    }


def set_master_weights(weights: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Overwrites the master copy, from which DeepSpeed's own checkpoints are made; a no-op for other weights."""
    if "deepspeed" in sys.modules:
        for name, tensor in weights.items():
            if hasattr(tensor, "_hp_mapping"):
                tensor.set_full_hp_param(values[name])  # type: ignore[attr-defined]
