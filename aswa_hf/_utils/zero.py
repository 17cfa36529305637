"""DeepSpeed ZeRO: where the weights of a model are, and their float32 master copy in mixed precision.

Stages 1 and 2: every process has all weights, and a part of their master copy.

Stage 3: every process also has only a part of each weight, `parameter.ds_tensor`: flat, split as by `torch.chunk`.
The parameter itself is empty unless it is gathered. Small parameters stay gathered between two uses: after a change of
the parts, whatever is gathered must be released, or the model continues with the weights it had.

The weights are rounded from the master copy after every step. So the master copy is averaged; averaged weights are
evaluated in the model's own dtype, as they will be used.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from aswa_hf._utils.distributed import rank, world_size

_LOWER_PRECISION = (torch.bfloat16, torch.float16)
# The device mesh of the processes, by the optimizer of ZeRO-3.
_MESHES: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def module_of(engine: nn.Module) -> nn.Module | None:
    """The user's module inside of a DeepSpeed engine; None for any other module."""
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is None or type(engine) is not deepspeed.DeepSpeedEngine:
        return None
    module: nn.Module = engine.module  # type: ignore[assignment]
    return module


def refuse_unsupported_settings(config: Mapping[str, Any]) -> None:
    """Raises ValueError for a DeepSpeed config under which the weights cannot be averaged where they are."""
    settings: Mapping[str, Any] = config.get("zero_optimization") or {}
    for key in ("offload_param", "offload_optimizer"):
        offloaded = settings.get({"offload_param": "cpu_offload_params", "offload_optimizer": "cpu_offload"}[key])
        if offloaded is True or (settings.get(key) or {}).get("device", "none") != "none":
            raise ValueError(
                f"Weight averaging does not support DeepSpeed with {key}: the weights are not where they can be "
                f"averaged. Remove {key} from the DeepSpeed config; device='cpu' keeps the averages off the "
                "accelerator."
            )
    copies = {"zero_hpz_partition_size": 1, "mics_shard_size": 0, "zero_quantized_weights": 0}
    for key, none in copies.items():
        if isinstance(value := settings.get(key), int) and value > none:
            raise ValueError(
                f"Weight averaging does not support DeepSpeed with {key}={value!r}, which keeps other copies of the "
                f"weights. Remove {key} from the DeepSpeed config."
            )
    processes = (config.get("tensor_parallel") or {}).get("autotp_size", 0)
    if isinstance(processes, int) and processes > 1:
        raise ValueError(
            f"Weight averaging does not support DeepSpeed's tensor parallelism (autotp_size={processes}). Remove "
            "tensor_parallel from the DeepSpeed config."
        )


def is_partitioned(parameter: Any) -> bool:
    """Whether ZeRO-3 has split a parameter over the processes."""
    return hasattr(parameter, "ds_id")


def whole_of(parameter: Any) -> Tensor:
    """Returns a parameter of ZeRO-3 as a flat DTensor, of which this process has its part."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    optimizer = getattr(parameter, "_z3_optimizer", None)
    if optimizer is None:
        raise ValueError(
            "The model is split by DeepSpeed ZeRO-3, but has no engine that trains it. Build the strategy after "
            "deepspeed.initialize() or accelerator.prepare()."
        )
    if parameter.ds_zero_partition_world_size != world_size():
        raise ValueError(
            f"DeepSpeed ZeRO-3 splits a weight over {parameter.ds_zero_partition_world_size} of {world_size()} "
            "processes. Weight averaging needs weights that are split over all processes."
        )
    part = parameter.ds_tensor
    if optimizer not in _MESHES:
        _MESHES[optimizer] = init_device_mesh(part.device.type, (world_size(),))
    # The last parts are padded to the size of the first.
    left = max(0, parameter.ds_numel - rank() * part.numel())
    rows = part.detach().narrow(0, 0, min(left, part.numel()))
    shape = torch.Size((parameter.ds_numel,))
    found = DTensor.from_local(rows, _MESHES[optimizer], [Shard(0)], run_check=False, shape=shape, stride=(1,))
    return with_parameter(found, parameter)


def with_parameter(tensor: Tensor, parameter: Any) -> Tensor:
    """Returns the tensor, with a reference to the parameter of ZeRO-3 it belongs to; None means no such parameter."""
    if parameter is not None:
        tensor.zero_parameter = parameter  # type: ignore[attr-defined]
    return tensor


def release_gathered(model: nn.Module) -> None:
    """Frees the weights that ZeRO-3 has gathered; the next use gathers them from the parts.

    Small ones are gathered again at once, as after a step. Otherwise, where a model uses the weight of another module
    and finds it missing, DeepSpeed would register it as a new one and fail in the next forward pass. All processes
    must call this.
    """
    if "deepspeed" in sys.modules:
        for optimizer in {p._z3_optimizer for p in model.parameters() if hasattr(p, "_z3_optimizer")}:
            optimizer.empty_partition_cache()
            if small := optimizer.persistent_parameters:
                small[0].all_gather(small)


def master_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the float32 master copy of each weight that has one, and the other weights unchanged.

    Under stages 1 and 2 it is gathered from all processes, which must all call this.
    """
    if "deepspeed" not in sys.modules:
        return weights
    return {name: _master(tensor) if tensor.dtype in _LOWER_PRECISION else tensor for name, tensor in weights.items()}


def _master(tensor: Any) -> Tensor:
    found: Tensor = tensor
    if hasattr(tensor, "zero_parameter"):
        parameter = tensor.zero_parameter
        found = parameter._z3_optimizer.get_local_fp32_param(parameter)[: len(tensor)]
    elif hasattr(tensor, "_hp_mapping"):
        found = tensor.get_full_hp_param()
    return found


def set_master_weights(weights: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Overwrites the master copy, from which DeepSpeed's own checkpoints are made; a no-op for other weights."""
    if "deepspeed" not in sys.modules:
        return
    for name, tensor in weights.items():
        if hasattr(tensor, "zero_parameter"):
            parameter = tensor.zero_parameter
            filled = parameter.ds_tensor.to(torch.float32, copy=True)
            filled[: len(tensor)] = values[name]
            parameter._z3_optimizer.set_local_hp_param(filled, parameter)
        elif hasattr(tensor, "_hp_mapping"):
            tensor.set_full_hp_param(values[name])  # type: ignore[attr-defined]
