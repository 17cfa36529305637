"""Exponential moving averages, which are updated after optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from aswa_hf._utils.warnings import warn_caller
from aswa_hf.averaging import WeightAverage
from aswa_hf.strategies.base import Evaluate, Outcome, Strategy, nothing
from aswa_hf.trajectory import Decision


class EMA(Strategy):
    """Exponential moving average: Θ_A := decay · Θ_A + (1 − decay) · Θ after every `every`-th optimizer step.

    `warmup` lets the decay grow with the number of updates t as (1 + t) / (10 + t), up to `decay`, so that a short
    run is not dominated by its first weights.
    """

    name = "ema"

    def __init__(
        self, model: nn.Module, *, decay: float = 0.999, every: int = 1, warmup: bool = False, **options: Any
    ):
        super().__init__(model, **options)
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be in [0, 1), got {decay}.")
        if every < 1:
            raise ValueError(f"every must be at least 1 optimizer step, got {every}.")
        self.decay = decay
        self.every = every
        self.warmup = warmup
        self.steps = 0

    def _after_step(self) -> Iterable[tuple[WeightAverage, float]]:
        self.steps += 1
        if self.steps % self.every:
            return ()
        weight = 1 - self._decay(self.members) if self.members else 1.0
        self.members, self.score, self._stale = self.members + 1, None, self.members > 0
        return [(self.average, weight)]

    def _decay(self, updates: int) -> float:
        return min(self.decay, (1 + updates) / (10 + updates)) if self.warmup else self.decay

    def _decide(self, evaluate: Evaluate | None, running_score: float | None, step: int | None) -> Outcome:
        if self.steps == 0:
            warn_caller(
                "EMA.step() was not called after optimizer steps: averaging one snapshot per decision point instead."
            )
            return self._add_snapshot(1 - self._decay(self.members), evaluate, running_score)
        if self.members == 0:
            return Outcome(Decision.REJECT, nothing, running_score)
        # Since the last decision each rank has averaged the buffers of its own batches.
        self.average.share_buffers()
        score = None
        if evaluate is not None:
            with self.swapped():
                score = self._score(evaluate, "ema weights")

        def commit() -> None:
            self.score = score

        first = not any(record.members for record in self.trajectory)
        return Outcome(Decision.INIT if first else Decision.SOFT, commit, running_score)

    @property
    def alphas(self) -> list[float]:
        """For each decision point, the total weight of the snapshots taken since the previous one."""
        # remaining[t]: the weight that later updates leave to the first t + 1 snapshots
        weights: list[float] = []
        total, before = 0.0, 0
        updates = self.trajectory[-1].members if self.trajectory else 0
        remaining = [1.0] * (updates + 1)
        for t in range(updates - 1, 0, -1):
            remaining[t] = remaining[t + 1] * self._decay(t)
        for record in self.trajectory:
            share = remaining[record.members] if record.members > before else total
            weights.append(share - total)
            total, before = share, record.members
        return weights

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        return super().state_dict(copy=copy) | {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.steps = state["steps"]
