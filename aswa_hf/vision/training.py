"""Training timm models with the Trainer: SGD by a recipe, and FGE from a point of the run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer, TrainerCallback, TrainingArguments

from aswa_hf._utils.distributed import wait_for_all
from aswa_hf._utils.random_state import preserved_rng
from aswa_hf._utils.tensors import load_tensors
from aswa_hf.ensembles import FGE, State
from aswa_hf.vision.classifier import save_tensors
from aswa_hf.vision.images import as_it_is
from aswa_hf.vision.recipes import Recipe, swa_schedule


def accuracy(predictions: Any) -> dict[str, float]:
    """`compute_metrics` for the Trainer: the share of images whose most likely class is the true one."""
    classes = torch.as_tensor(predictions.predictions).argmax(-1)
    return {"accuracy": float((classes == torch.as_tensor(predictions.label_ids)).float().mean())}


def chosen_precision(precision: str, use_cpu: bool = False) -> str:
    """Returns "fp32", "bf16" or "fp16": the given precision, or for "auto" the best that the device supports."""
    if precision not in ("auto", "fp32", "bf16", "fp16"):
        raise ValueError(f"precision must be auto, fp32, bf16 or fp16, got {precision!r}.")
    if precision != "auto":
        return precision
    if use_cpu or not torch.cuda.is_available():
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def image_arguments(
    output_dir: str | Path, recipe: Recipe, *, precision: str = "auto", **options: Any
) -> TrainingArguments:
    """The Trainer's arguments for a recipe, overridden by `options`; mixed precision if the device supports it.

    The recipe's batch size is that of one process, as always in the Trainer.
    """
    precision = chosen_precision(precision, bool(options.get("use_cpu")))
    defaults: dict[str, Any] = {
        "num_train_epochs": recipe.epochs,
        "per_device_train_batch_size": recipe.batch_size,
        "per_device_eval_batch_size": 250,
        "learning_rate": recipe.lr,
        "weight_decay": recipe.weight_decay,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        # The Trainer refuses bf16 without a GPU unless the CPU was asked for.
        "use_cpu": precision == "bf16" and not torch.accelerator.is_available(),
        "max_grad_norm": 0.0,
        "eval_strategy": "epoch",
        "logging_strategy": "epoch",
        "save_strategy": "no",
        "report_to": "none",
        "remove_unused_columns": False,
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    return TrainingArguments(output_dir=str(output_dir), **(defaults | options))


class ImageTrainer(Trainer):
    """A Trainer for image classifiers: SGD with momentum, the SWA paper's schedule, channels last, accuracy.

    The datasets return complete batches of `pixel_values` and `labels`, as `ImageTensors` does. If `args` have another
    learning rate than the recipe, all rates of the recipe are scaled in proportion.
    """

    optimizer: torch.optim.Optimizer | None
    lr_scheduler: LRScheduler | None

    def __init__(self, model: nn.Module, args: TrainingArguments, recipe: Recipe, **options: Any):
        if args.n_gpu > 1:
            raise ValueError(
                f"One process would use {args.n_gpu} GPUs. Start one process per GPU: accelerate launch --multi_gpu …"
            )
        self.recipe = recipe.at_rate(args.learning_rate)
        model.to(memory_format=torch.channels_last)
        super().__init__(model, args, **({"data_collator": as_it_is, "compute_metrics": accuracy} | options))

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        """Evaluates as the Trainer does, without changing the training batches that follow."""
        with preserved_rng():
            metrics: dict[str, float] = super().evaluate(*args, **options)
        return metrics

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """SGD; weight decay acts on all weights, as in the SWA paper."""
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(
                [p for p in (model or self.model).parameters() if p.requires_grad],
                lr=self.args.learning_rate,
                momentum=self.recipe.momentum,
                weight_decay=self.args.weight_decay,
            )
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        if self.lr_scheduler is None:
            # As in the SWA paper's code: down to the SWA learning rate when averaging starts.
            steps = num_training_steps * self.recipe.swa_start / self.recipe.epochs
            self.lr_scheduler = swa_schedule(optimizer or self.create_optimizer(), steps, swa_lr=self.recipe.swa_lr)
        return self.lr_scheduler


class SaveWeights(TrainerCallback):
    """Writes the running weights after `epoch` epochs, from which FGE starts, to a file with the epoch as metadata."""

    def __init__(self, path: Path, epoch: int):
        self.path = path
        self.epoch = epoch

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        # Not at the end of the epoch, which comes after its checkpoint: a run killed in between would never write it.
        if state.global_step * state.num_train_epochs != state.max_steps * self.epoch:
            return
        if args.should_save:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            save_tensors(model.state_dict(), self.path, epoch=str(self.epoch))
        wait_for_all()


class FGETrainer(ImageTrainer):
    """Fast Geometric Ensembling from the weights now in `model`, for the number of epochs in `args`.

    Each snapshot is written to a file in `args.output_dir`; `fge.ensemble()` reads them one at a time. The optimizer
    starts without momentum. A resumed run reads the snapshots up to its checkpoint from these files.
    """

    def __init__(self, model: nn.Module, args: TrainingArguments, recipe: Recipe, **options: Any):
        super().__init__(model, args, recipe, **options)
        steps_per_epoch = -(-len(self.get_train_dataloader()) // args.gradient_accumulation_steps)
        # A cycle of an odd number of steps has no middle.
        cycle = max(2, 2 * int(recipe.fge_cycle * steps_per_epoch / 2 + 1e-9))
        rates = {"high": self.recipe.fge_high, "low": self.recipe.fge_low}
        self.fge = FGE(model, self.create_optimizer(), cycle=cycle, keep=self._keep, **rates)
        self.lr_scheduler = self.fge.schedule
        self.add_callback(_Collect(self.fge, self._file))

    def _file(self, step: int) -> Path:
        return Path(self.args.output_dir) / f"snapshot-{step}.safetensors"

    def _keep(self, state: State, step: int) -> Callable[[], State]:
        if self.args.should_save:
            self._file(step).parent.mkdir(parents=True, exist_ok=True)
            save_tensors(state, self._file(step))
        wait_for_all()  # another process may read it
        return partial(load_tensors, self._file(step))


class _Collect(TrainerCallback):
    """Takes the snapshots of FGE, and finds those that were taken before the checkpoint of a resumed run."""

    def __init__(self, fge: FGE, file: Callable[[int], Path]):
        self.fge = fge
        self.file = file

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Steps of the scheduler: with fp16 the Trainer also counts steps that were skipped.
        done = self.fge.schedule.last_epoch
        taken = {step: self.file(step) for step in range(self.fge.cycle // 2, done + 1, self.fge.cycle)}
        if missing := [path for path in taken.values() if not path.exists()]:
            raise FileNotFoundError(
                f"FGE resumes after {done} steps in cycles of {self.fge.cycle}, but {missing[0]} is missing. Resume "
                "with the cycle and the batches of the run that wrote the checkpoint, or start a new run."
            )
        self.fge.snapshots = {step: partial(load_tensors, path) for step, path in taken.items()}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.fge.collect()
