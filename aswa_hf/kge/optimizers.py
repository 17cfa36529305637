"""Optimizers for embedding tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adagrad, Adam, Optimizer
from transformers import Trainer, TrainingArguments

from aswa_hf._utils.touched_rows import writing


class RowwiseAdagrad(Optimizer):
    """Adagrad with one sum per row of a tensor instead of one per number: state of 1/dim of the weights.

    A row w with gradient g has G ← G + mean(g²) and w ← w − lr·g/(√G + eps). For a sparse gradient,
    only its rows are read and written.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.01, eps: float = 1e-10, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if gradient.is_sparse:
            self._update_rows(parameter, gradient.coalesce(), group)
            return
        if group["weight_decay"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        state = self.state[parameter]
        if not state:
            state["sum"] = parameter.new_zeros(len(parameter))
        state["sum"] += gradient.flatten(1).square().mean(1)
        rates = group["lr"] / (state["sum"].sqrt() + group["eps"])
        parameter.addcmul_(gradient, rates.view(-1, *[1] * (parameter.dim() - 1)), value=-1)

    def _update_rows(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if group["weight_decay"]:
            raise ValueError(
                f"weight_decay={group['weight_decay']} would change every row, also those without a gradient: use 0 "
                "with sparse gradients."
            )
        state = self.state[parameter]
        if not state:
            state["sum"] = parameter.new_zeros(len(parameter))
        (rows,), values = gradient.indices(), gradient.values()
        sums = state["sum"][rows] + values.flatten(1).square().mean(1)
        state["sum"][rows] = sums
        rates = group["lr"] / (sums.sqrt() + group["eps"])
        with writing(parameter, rows):
            parameter.index_add_(0, rows, values * rates.view(-1, *[1] * (parameter.dim() - 1)), alpha=-1)


def optimizer_of(name: str, args: TrainingArguments) -> tuple[type[Optimizer], dict[str, Any]] | None:
    """The class and options of an optimizer for a Trainer; None for its own, AdamW.

    Without weight decay Adam and AdamW are the same. With it, Adam has it in its gradients, as Adagrad does.
    """
    if name == "adamw" or (name == "adam" and not args.weight_decay):
        return None
    if name == "adam":
        return Adam, Trainer.get_optimizer_cls_and_kwargs(args)[1]
    kinds = {"adagrad": Adagrad, "adagrad-rowwise": RowwiseAdagrad}
    return kinds[name], {"lr": args.learning_rate}
