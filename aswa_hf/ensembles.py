"""Ensembles of predictions: class probabilities averaged over several models, and FGE, which trains such models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import RandomSampler

from aswa_hf._utils.random_state import preserved_rng, rewound
from aswa_hf.batchnorm import to_device

State = Mapping[str, Tensor]
Member = nn.Module | State | Callable[[], State]
Forward = Callable[[nn.Module, Any], Any]


class PredictionEnsemble:
    """Class probabilities averaged over several models: checkpoints of one run, or independent runs.

    A member is a state dict, a function that returns one, or a model. State dicts are loaded into `model` one at a
    time, so that with functions no more than one is in memory; afterwards `model` is restored.

    >>> files = Path("runs").glob("seed-*/model.safetensors")
    >>> ensemble = PredictionEnsemble(model, [lambda file=file: load_file(file) for file in files])
    >>> classes = ensemble.predict(test_loader).argmax(-1)

    `forward(model, batch)` returns the logits of a batch. By default the model is called with the items of a dict as
    keyword arguments, with the first element of a tuple or list, or with the batch itself, and returns the logits or
    an output that has them as `logits`.
    """

    def __init__(self, model: nn.Module | None, members: Sequence[Member], *, forward: Forward | None = None):
        members = list(members)
        if not members:
            raise ValueError("A prediction ensemble needs at least one member, got none.")
        for index, member in enumerate(members):
            if not isinstance(member, Mapping) and not callable(member):
                raise TypeError(
                    f"Member {index} is a {type(member).__name__}, expected a model, a state dict, or a function that "
                    "returns a state dict."
                )
            if model is None and not isinstance(member, nn.Module):
                raise ValueError(f"Member {index} is not a model: pass the model its state dict belongs to.")
        self.model = model
        self.members = members
        self.forward = forward or _forward

    def predict(self, batches: Iterable[Any]) -> Tensor:
        """Returns the mean of the members' class probabilities: one row per example, in the order of `batches`."""
        if isinstance(batches, Iterator):
            raise TypeError(
                f"batches is a {type(batches).__name__}, which can be read only once, and every member reads it. Pass "
                "a DataLoader or a list."
            )
        if isinstance(getattr(batches, "sampler", None), RandomSampler):
            raise ValueError("The loader shuffles, so rows would not match examples. Pass one with shuffle=False.")
        total: Tensor | None = None
        for index, member in enumerate(self.members):
            with self._in_turn(index, member) as model:
                found = _probabilities(model, batches, self.forward)
            if total is not None and total.shape != found.shape:
                raise ValueError(
                    f"Member {index} returns probabilities of shape {tuple(found.shape)}, those before it of shape "
                    f"{tuple(total.shape)}: all members must see the same examples and know the same classes."
                )
            total = found if total is None else total + found
        assert total is not None
        return total / len(self.members)

    @contextmanager
    def _in_turn(self, index: int, member: Member) -> Iterator[nn.Module]:
        """Yields the model that predicts for a member; restores what a state dict has overwritten."""
        if isinstance(member, nn.Module):
            yield member
            return
        assert self.model is not None
        own = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        try:
            try:
                self.model.load_state_dict(member if isinstance(member, Mapping) else member())
            except RuntimeError as error:
                reason = " ".join(str(error).split())
                raise ValueError(f"Member {index} does not fit {type(self.model).__name__}: {reason}") from None
            yield self.model
        finally:
            self.model.load_state_dict(own)


class FGE:
    """Fast Geometric Ensembling: a cyclical learning rate moves a trained model through several good ones.

    In every cycle of `cycle` optimizer steps the learning rate falls linearly from near `high` (α₁) to `low` (α₂)
    and rises back to `high`. A snapshot is taken where it is lowest, and predictions are averaged over the snapshots.

    >>> fge = FGE(model, optimizer, cycle=4 * len(loader), high=0.05, low=0.0005)
    >>> for _ in range(epochs):
    ...     for batch in loader:
    ...         …
    ...         optimizer.step()
    ...         fge.step()
    >>> fge.ensemble().predict(test_loader)

    `keep(state, step)` stores a snapshot and returns a member for `PredictionEnsemble`; by default snapshots are kept
    in CPU memory. If something else steps the scheduler (the Trainer), pass it `schedule` and call `collect()` after
    each optimizer step instead of `step()`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        cycle: int,
        high: float,
        low: float,
        keep: Callable[[State, int], Member] | None = None,
    ):
        check_cycle(cycle, high, low)
        self.model = model
        self.cycle = cycle
        self.keep = keep or _in_memory
        self.snapshots: dict[int, Member] = {}
        """The snapshots by the number of steps after which they were taken."""
        for group in optimizer.param_groups:
            # An earlier scheduler has left its own initial learning rate.
            group["lr"] = group["initial_lr"] = high
        self.schedule = LambdaLR(optimizer, lambda done: cyclical_rate(done + 1, cycle, high, low) / high)

    def step(self) -> None:
        """Must be called after every optimizer step: sets the next learning rate, and takes a snapshot when due."""
        self.schedule.step()
        self.collect()

    def collect(self) -> None:
        """Takes a snapshot if the last step was at the lowest learning rate."""
        done = self.schedule.last_epoch
        if done % self.cycle == self.cycle // 2 and done not in self.snapshots:
            self.snapshots[done] = self.keep(self.model.state_dict(), done)

    def ensemble(self, forward: Forward | None = None) -> PredictionEnsemble:
        """Returns the snapshots taken so far as an ensemble."""
        if not self.snapshots:
            raise RuntimeError(
                f"FGE has taken no snapshot yet: the first one comes after {self.cycle // 2} steps, half a cycle, and "
                f"{self.schedule.last_epoch} are done."
            )
        return PredictionEnsemble(self.model, list(self.snapshots.values()), forward=forward)


def cyclical_rate(step: int, cycle: int, high: float, low: float) -> float:
    """Returns α(i) of step i = 1, 2, …: `low` in the middle of every cycle, `high` at its end, linear between.

    α(i) = (1 − 2t)·α₁ + 2t·α₂ for t ≤ ½, (2 − 2t)·α₂ + (2t − 1)·α₁ above, with t = (mod(i − 1, c) + 1) / c.
    """
    t = ((step - 1) % cycle + 1) / cycle
    return (1 - 2 * t) * high + 2 * t * low if t <= 0.5 else (2 - 2 * t) * low + (2 * t - 1) * high


def check_cycle(cycle: int, high: float, low: float) -> None:
    """Raises ValueError for a cycle without a step in its middle, or learning rates in the wrong order."""
    if cycle < 2 or cycle % 2:
        raise ValueError(f"cycle must be an even number of steps, so that one is in the middle, got {cycle}.")
    if not 0 <= low <= high or high == 0:
        raise ValueError(f"The learning rates must be 0 ≤ low ≤ high, and high above 0, got low={low}, high={high}.")


@torch.no_grad()
def _probabilities(model: nn.Module, batches: Iterable[Any], forward: Forward) -> Tensor:
    """Returns the class probabilities of all examples, from the model in evaluation mode."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with preserved_rng(seed=0), rewound(batches):
            found = [_logits(forward(model, batch)).float().softmax(-1).cpu() for batch in batches]
    finally:
        for module, mode in training.items():
            module.training = mode
    if not found:
        raise ValueError("batches yielded no batch, so there is nothing to predict.")
    return torch.cat(found)


def _forward(model: nn.Module, batch: Any) -> Any:
    parameter = next(model.parameters(), None)
    batch = to_device(batch, parameter.device if parameter is not None else torch.device("cpu"))
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, (tuple, list)) else batch)


def _logits(output: Any) -> Tensor:
    if isinstance(output, Mapping):
        output = output.get("logits")
    if not isinstance(output, Tensor):
        raise TypeError(
            f"The model returned a {type(output).__name__}, expected a tensor of logits or an output with logits. "
            "Pass forward=lambda model, batch: … that returns them."
        )
    return output


def _in_memory(state: State, _step: int) -> State:
    """Returns a copy of a snapshot in CPU memory."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
