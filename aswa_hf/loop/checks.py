"""What `fit` needs beside the loop itself: checks of its arguments, the loss of a batch, stopping on signals."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.data_loader import DataLoaderDispatcher, IterableDatasetShard
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from aswa_hf._utils.checks import check_whole_number, is_number
from aswa_hf._utils.sharding import row_sharded
from aswa_hf._utils.zero import module_of, refuse_unsupported_settings

logger = get_logger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# How often processes exchange received signals: each exchange is a synchronization.
SECONDS_BETWEEN_CHECKS = 1.0


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """Returns `loss` of the model's output, which is a dict or has it as an attribute."""
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"A batch is a {type(batch).__name__}, and only a dict can be passed to the model by name. Define "
            "the loss: loss=lambda model, batch: …"
        )
    output = model(**batch)
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(found, Tensor):
        raise TypeError(
            f"The model's output ({type(output).__name__}) has no loss. Say how to compute it: "
            "loss=lambda model, batch: …"
        )
    return found


def check_loss(value: Any) -> None:
    """Raises TypeError if the loss is not a tensor of one number."""
    if not isinstance(value, Tensor) or value.ndim:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"loss(model, batch) must return a tensor of one number without dimensions, got {got}.")


def metrics_of_main(accelerator: Accelerator, found: Any, label: str) -> dict[str, float]:
    """The main process's metrics, on all processes; on the others the evaluation may have returned nothing."""
    metrics: dict[str, float] | TypeError = {}
    if accelerator.is_main_process:
        try:
            metrics = as_metrics(found, label)
        except TypeError as error:
            metrics = error
    (metrics,) = broadcast_object_list([metrics])
    if isinstance(metrics, TypeError):
        raise metrics
    return metrics


def as_metrics(found: Any, label: str) -> dict[str, float]:
    """The result of an evaluation as a dict of numbers whose names begin with `eval_`."""
    if not isinstance(found, Mapping):
        found = {label: found}
    metrics = {}
    for name, value in found.items():
        try:
            metrics["eval_" + str(name).removeprefix("eval_")] = float(value)
        except (TypeError, ValueError):
            if name == label:
                raise TypeError(
                    f"evaluate() must return the validation score or a dict of metrics, got {type(value).__name__}: "
                    f"{value!r}."
                ) from None
    return metrics


def check_arguments(
    accelerator: Any,
    model: Any,
    functions: Mapping[str, Any],
    counts: Mapping[str, Any],
    optional_counts: Mapping[str, Any],
    max_grad_norm: Any,
) -> None:
    """Raises for arguments of a wrong type; `optional_counts` may be None."""
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"fit() takes an accelerate.Accelerator first, got {type(accelerator).__name__}.")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(f"{name} must be a function, got {type(function).__name__}.")
    for name, count in counts.items():
        check_whole_number(name, count)
    for name, count in optional_counts.items():
        check_whole_number(name, count, optional=True)
    if max_grad_norm is not None and not (is_number(max_grad_norm) and max_grad_norm > 0):
        raise ValueError(f"max_grad_norm must be a positive number, or None for no clipping, got {max_grad_norm!r}.")


def check_training(optimizer: Any, train_loader: Any, scheduler: Any) -> None:
    """Raises for an optimizer, a loader or a scheduler that cannot train a model."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        got = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, built for the model's parameters, got {got}.")
    if not hasattr(train_loader, "__iter__"):
        got = type(train_loader).__name__
        raise TypeError(f"train_loader must be an iterable of batches, such as a DataLoader, got {got}.")
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise TypeError(f"scheduler must be a learning rate scheduler or None, got {type(scheduler).__name__}.")
    if isinstance(getattr(scheduler, "scheduler", scheduler), ReduceLROnPlateau):
        raise ValueError(
            "ReduceLROnPlateau needs a score for its steps, and fit() steps the scheduler after every optimizer step. "
            "Choose another one, or step it at the end of evaluate() yourself."
        )


def check_accelerator_supported(
    accelerator: Accelerator, train_loader: Any, checkpoint_dir: str | Path | None
) -> None:
    """Raises ValueError for settings under which weights cannot be averaged, or a run cannot be resumed."""
    kind = accelerator.distributed_type
    if kind == DistributedType.MEGATRON_LM:
        raise ValueError(f"fit() does not support {kind.value}, which manages the weights itself. Use DDP or FSDP2.")
    if kind == DistributedType.DEEPSPEED:
        refuse_unsupported_settings(accelerator.state.deepspeed_plugin.deepspeed_config)
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError(
            "fit() does not support FSDP version 1, which flattens the weights. Use DDP or FSDP2 (fsdp_version: 2 in "
            "the accelerate config)."
        )
    if checkpoint_dir is None:
        return
    if accelerator.project_configuration.automatic_checkpoint_naming:
        raise ValueError("fit() names its checkpoints itself: remove automatic_checkpoint_naming.")
    if accelerator.dataloader_config.use_stateful_dataloader or getattr(
        train_loader, "use_stateful_dataloader", False
    ):
        raise ValueError("fit() finds the next batch of a resumed run itself: remove use_stateful_dataloader.")
    if accelerator.gradient_accumulation_steps > 1 and not accelerator.gradient_state.sync_with_dataloader:
        raise ValueError(
            "With sync_with_dataloader=False gradients are left over at the end of an epoch, which a checkpoint does "
            "not hold: leave it out, or checkpoint_dir."
        )


def check_clipping(model: Any, max_grad_norm: float | None) -> None:
    """Raises ValueError for a norm that DeepSpeed, which clips gradients itself, would not use."""
    if max_grad_norm is None or module_of(model) is None:
        return
    used = model.gradient_clipping()
    if used != max_grad_norm:
        raise ValueError(
            f"DeepSpeed clips gradients to a norm of {used}, not to max_grad_norm={max_grad_norm}. Set "
            f"DeepSpeedPlugin(gradient_clipping={max_grad_norm}), or leave max_grad_norm out."
        )


def check_sharded_table(accelerator: Accelerator, model: nn.Module, loader: Any, max_grad_norm: float | None) -> bool:
    """Whether each process has its own rows of a table; raises ValueError for options that need all rows."""
    if not row_sharded(model):
        return False
    if max_grad_norm is not None:
        raise ValueError(
            f"max_grad_norm={max_grad_norm} is not supported with a sharded table: each process would clip by the "
            "norm of its own rows."
        )
    if accelerator.scaler is not None:
        raise ValueError(
            "mixed_precision='fp16' is not supported with a sharded table: processes would skip different steps. Use "
            "bf16."
        )
    divides = isinstance(loader, DataLoaderDispatcher)
    if divides or isinstance(getattr(loader, "dataset", None), IterableDatasetShard):
        raise ValueError(
            "With a sharded table all processes need the same batches, and this loader divides them. Use a DataLoader "
            "of a dataset with a length, and no dispatch_batches."
        )
    return True


def prepared(accelerator: Accelerator, *objects: Any) -> list[Any]:
    """The objects as `accelerator.prepare` returns them; those already prepared are unchanged."""
    new = [thing for thing in objects if thing is not None and not getattr(thing, "_is_accelerate_prepared", False)]
    if not new:
        return list(objects)
    results = accelerator.prepare(*new)
    fresh = dict(zip(map(id, new), results if len(new) > 1 else [results], strict=True))
    return [fresh.get(id(thing), thing) for thing in objects]


def length_of(loader: Any) -> int | None:
    """The number of batches, or None if the loader has no length."""
    try:
        return len(loader)
    except TypeError:
        return None


class Stop:
    """Handles SIGTERM and Ctrl-C: all processes stop at the same step, after saving a checkpoint."""

    def __init__(self, accelerator: Accelerator, *, enabled: bool):
        self.accelerator = accelerator
        # Python delivers signals to the main thread only, and only it may set handlers.
        self.enabled = enabled
        self.handles = enabled and threading.current_thread() is threading.main_thread()
        self.agreed = 0
        """The signal that ends the run."""
        self._received = 0
        self._steps, self._wait, self._since = 0, 1, time.monotonic()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if self.handles:
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # A launcher forwards the Ctrl-C that its processes already received from the terminal.
        if self._received and number == signal.SIGINT and self.accelerator.num_processes == 1:
            raise KeyboardInterrupt
        self._received = number

    def check(self, *, now: bool = False) -> None:
        """Called on all processes after every step: about once a second, or `now`, they agree whether to stop."""
        if not self.enabled:
            return
        if self.accelerator.num_processes == 1:
            self.agreed = self._received
            return
        self._steps += 1
        if self._steps < self._wait and not now:
            return
        seconds = (time.monotonic() - self._since) / self._steps
        mine = torch.tensor([[self._received, seconds]], device=self.accelerator.device)
        received, slowest = self.accelerator.gather(mine).amax(0).tolist()
        self.agreed = int(received)
        self._steps, self._wait, self._since = 0, int(SECONDS_BETWEEN_CHECKS / max(slowest, 1e-3)), time.monotonic()

    @property
    def name(self) -> str:
        """The name of the signal that ends the run."""
        return signal.Signals(self.agreed).name

    def end_run(self, checkpoint: Path, command: str = "the same command") -> None:
        """Ends the run if a signal was received, as the program would have ended without this handler."""
        if not self.agreed:
            return
        logger.warning(f"{self.name}: the run is saved in {checkpoint}; {command} resumes it.")
        handler = self._previous.get(self.agreed)
        self.__exit__()
        if callable(handler):
            handler(self.agreed, None)
        raise SystemExit(128 + self.agreed)
