"""The mean Θ̄ of the weights after every optimizer step since the last decision point."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from aswa_hf._utils.checks import check_whole_number
from aswa_hf._utils.warnings import warn_caller
from aswa_hf.averaging import WeightAverage
from aswa_hf.strategies.base import Strategy
from aswa_hf.trajectory import Trajectory


class Segment:
    """Θ̄ over every `every`-th step of the present segment; if it has no such step, the running weights.

    Strategies save `average` among their parts and `steps` in their state.
    """

    def __init__(self, average: WeightAverage, every: int):
        check_whole_number("every", every)
        self.average = average
        self.every = every
        self.steps = 0

    @property
    def is_empty(self) -> bool:
        return self.steps < self.every

    def after_step(self) -> Iterable[tuple[WeightAverage, float]]:
        """Counts an optimizer step; returns the update of the mean that is due, if any."""
        self.steps += 1
        return () if self.steps % self.every else [(self.average, self.every / self.steps)]

    def complete(self, strategy: str) -> None:
        """Called at a decision point, before the mean is used."""
        if self.steps == 0:
            warn_caller(
                f"{strategy}.step() was not called after optimizer steps: the running weights are the snapshot of "
                "this decision point instead of the mean over the steps."
            )
        if self.is_empty:
            self.average.assign()
        # With batchnorm="average", each rank has averaged the buffers of its own batches.
        self.average.share_buffers()

    def restart(self) -> None:
        """Begins the next segment."""
        self.steps = 0


class SegmentStrategy(Strategy):
    """Base class of averages of segments, each the mean of the steps between two decision points."""

    def __init__(self, model: nn.Module, *, every: int = 1, **options: Any):
        super().__init__(model, **options)
        self.segment = Segment(self._part("segment"), every)

    def _after_step(self) -> Iterable[tuple[WeightAverage, float]]:
        return self.segment.after_step()

    def _averages(self) -> dict[str, WeightAverage]:
        # Between two segments the mean of the last one is not needed any more.
        return {k: a for k, a in super()._averages().items() if k != "segment." or not self.segment.is_empty}

    def _rule(self) -> dict[str, Any]:
        return super()._rule() | {"every": self.segment.every}

    def _required_parts(self, state: Mapping[str, Any], records: Trajectory) -> set[str]:
        return {"segment"} if state["segment_steps"] >= self.segment.every else set()

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        return super().state_dict(copy=copy) | {"segment_steps": self.segment.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.segment.steps = state["segment_steps"]
