"""BatchNorm statistics for averaged weights: stale ones lead to chance accuracy, so they are recomputed.

The running mean and variance of a BatchNorm layer belong to the weights before it. After averaging, the model is run
on training batches, and each layer's statistics become the mean over these batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import SequentialSampler

from aswa_hf._utils.checks import check_whole_number
from aswa_hf._utils.distributed import in_step, mean_over_ranks, on_every_rank
from aswa_hf._utils.fingerprints import fingerprint
from aswa_hf._utils.random_state import loader_parts, preserved_rng, rewound
from aswa_hf._utils.sharding import computing_device, is_sharded, local_shards, reshard

Batches = Iterable[Any] | Callable[[], Iterable[Any]]
Forward = Callable[[Any], Any]

# For how many different weights the statistics are remembered.
_REMEMBERED = 32
# The attribute of BatchNorm layers that holds the default training batches.
_DEFAULT_BATCHES = "_aswa_train_batches"


def has_batchnorm(model: nn.Module) -> bool:
    """Returns whether any layer keeps running statistics, which averaging makes stale."""
    return bool(_layers(model))


@contextmanager
def default_train_batches(model: nn.Module, batches: Batches | None, forward: Forward | None = None) -> Iterator[None]:
    """Sets the batches for strategies built inside the block for `model`, or a part of it, without their own batches.

    A user's function that builds a strategy takes only the model, so the batches are attached to the model.
    """
    layers = _layers(model) if batches is not None else []
    for layer in layers:
        setattr(layer, _DEFAULT_BATCHES, (batches, forward))
    try:
        yield
    finally:
        for layer in layers:
            delattr(layer, _DEFAULT_BATCHES)


def _layers(model: nn.Module) -> list[_BatchNorm]:
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


class Recalibration:
    """Recomputes the BatchNorm statistics for the weights in the model; a no-op for a model without BatchNorm.

    `batches` is a loader, a list, or a function that returns an iterator; each pass sees the same batches in the same
    order. The model is called with the items of a dict as keyword arguments, with the first element of a tuple or
    list, or with the batch itself; `forward` replaces this. `limit` is the number of batches to use (default: all):
    the first ones of a shuffled loader, evenly spaced ones where the order is fixed and may be that of the classes.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Batches | None = None,
        *,
        limit: int | None = None,
        forward: Forward | None = None,
    ):
        self.model = model
        layers = _layers(model)
        self.needed = bool(layers)
        if not self.needed:
            return
        if batches is None:
            batches, default_forward = getattr(layers[0], _DEFAULT_BATCHES, (None, None))
            forward = forward or default_forward
        if batches is None:
            raise ValueError(
                "The model has BatchNorm layers, and batchnorm='recalibrate' needs training batches to recompute "
                "their statistics for averaged weights. Pass train_batches=your_train_loader, or choose "
                "batchnorm='average' (average the statistics too) or 'copy' (keep the running model's)."
            )
        if isinstance(batches, Iterator):
            raise TypeError(
                f"train_batches is a {type(batches).__name__}, which can be read only once, and every decision reads "
                "it again. Pass a DataLoader, a list of batches, or a function that returns an iterator."
            )
        check_whole_number("bn_batches", limit, optional=True)
        self.batches = batches
        self.limit = limit
        self.forward = forward
        self.remembers = False
        """Whether equal weights are run only once; set where several strategies share it."""
        self._known: dict[tuple[int, ...], list[Tensor]] = {}

    def shared_by(self, other: Recalibration) -> bool:
        """Returns whether the other one would compute the same statistics."""
        names = ("model", "batches", "limit", "forward")
        both_needed = self.needed and other.needed
        return both_needed and all(getattr(self, name) is getattr(other, name) for name in names)

    @torch.no_grad()
    def __call__(self) -> None:
        """Replaces the statistics in the model with those of its current weights."""
        if not self.needed:
            return
        if not self.remembers:
            self._recompute()
            return
        weights = self._fingerprint()
        if on_every_rank(weights in self._known, computing_device(self.model)):
            for statistic, known in zip(self._recomputed(), self._known[weights], strict=True):
                statistic.copy_(known)
        elif self._recompute():
            self._known[weights] = [statistic.clone() for statistic in self._recomputed()]
            while len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]

    def _fingerprint(self) -> tuple[int, ...]:
        """Returns the fingerprint of all weights and buffers but the statistics."""
        reshard(self.model)
        statistics = {id(buffer) for layer in _layers(self.model) for buffer in _statistics(layer)}
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return fingerprint(
            local_shards({str(i): tensor for i, tensor in enumerate(tensors) if id(tensor) not in statistics}).values()
        )

    def _recomputed(self) -> list[Tensor]:
        """Returns the running means and variances (not copies)."""
        return [statistic for layer in _layers(self.model) for statistic in _statistics(layer)[:2]]

    def _recompute(self) -> bool:
        """Runs the model on the training batches; returns whether these have reached every layer."""
        training = {module: module.training for module in self.model.modules()}
        # A layer that stays in evaluation mode while its model trains is frozen on purpose.
        self.model.train()
        layers = [layer for layer in _layers(self.model) if layer.training]
        momenta = {layer: layer.momentum for layer in layers}
        before = {layer: [buffer.clone() for buffer in _statistics(layer)] for layer in layers}
        try:
            # Dropout and similar layers stay off, as they will be when the statistics are used.
            self.model.eval()
            for layer in layers:
                layer.training = True
                layer.reset_running_stats()
                layer.momentum = None  # the plain mean over all batches
            # One seed for all passes: two averages are compared on the same, equally augmented batches.
            with preserved_rng(seed=0):
                self._run()
        finally:
            for layer, momentum in momenta.items():
                layer.momentum = momentum
            for module, mode in training.items():
                module.training = mode
        reached = True
        for layer, (old_mean, old_variance, old_count) in before.items():
            mean, variance, count = _statistics(layer)
            if count == 0:
                # No batch reached this layer, so it keeps its old statistics.
                mean.copy_(old_mean)
                variance.copy_(old_variance)
            mean_over_ranks([mean, variance])
            reached &= bool(count)
            # The count is of the batches that the running model was trained on.
            count.copy_(old_count)
        return reached and len(layers) == len(_layers(self.model))

    def _run(self) -> None:
        source = self.batches() if callable(self.batches) else self.batches
        forward = self.forward or self._forward
        with rewound(source):
            seen = 0
            batches = _chosen(source, self.limit)
            for batch in in_step(batches, computing_device(self.model)) if is_sharded(self.model) else batches:
                forward(batch)
                seen += 1
        if seen == 0:
            raise ValueError(
                "train_batches yielded no batch, so BatchNorm statistics cannot be recomputed. Pass a loader that can "
                "be read again at every decision."
            )

    def _forward(self, batch: Any) -> Any:
        batch = to_device(batch, computing_device(self.model))
        if isinstance(batch, Mapping):
            return self.model(**batch)
        return self.model(batch[0] if isinstance(batch, (tuple, list)) else batch)


def _chosen(batches: Iterable[Any], limit: int | None) -> Iterator[Any]:
    """At most `limit` batches: the first ones, or evenly spaced ones if the order is always the same."""
    fixed = isinstance(batches, (list, tuple)) or any(isinstance(p, SequentialSampler) for p in loader_parts(batches))
    total = len(batches) if limit is not None and fixed and isinstance(batches, Sized) else 0
    if limit is None or total <= limit:
        return islice(batches, limit)
    places = [number * total // limit for number in range(limit)]
    if isinstance(batches, (list, tuple)):
        return (batches[place] for place in places)
    wanted = set(places)
    return (batch for place, batch in enumerate(islice(batches, places[-1] + 1)) if place in wanted)


def _statistics(layer: _BatchNorm) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the layer's running mean, running variance and number of batches (not copies)."""
    # Declared as optional, but a layer with one of them has all three.
    return cast("tuple[Tensor, Tensor, Tensor]", (layer.running_mean, layer.running_var, layer.num_batches_tracked))


def to_device(batch: Any, device: torch.device) -> Any:
    """Returns a batch with its tensors on a device; what holds them becomes a dict or a list."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return [to_device(value, device) for value in batch]
    return batch
