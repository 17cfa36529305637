"""The whole weights of a model, sharded or not."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """They are on rank 0, and nothing is on the others; all ranks must call it."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def all_gathered(model: nn.Module, stage: int | None) -> AbstractContextManager[None]:
    """The complete weights of DeepSpeed ZeRO-3 in the model, until the block ends; of any other stage they are."""
    if stage != 3:
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters

    return GatheredParameters(list(model.parameters()))
