"""Strategies over the snapshots of decision points: SWA, the best checkpoint, the last one."""

from __future__ import annotations

from typing import Any

from torch import nn

from aswa_hf import policy
from aswa_hf.strategies.base import Evaluate, Outcome, Strategy, nothing
from aswa_hf.trajectory import Decision


class SWA(Strategy):
    """Stochastic Weight Averaging: the mean of all snapshots from `start` on.

    `start` is the first epoch (decision point) to include, counted from 0, or a fraction of the run. A fraction needs
    the length of the run: `total` decision points, or `total_steps` optimizer steps with `update(…, step=…)`.
    """

    name = "swa"

    def __init__(
        self,
        model: nn.Module,
        *,
        start: int | float = 0,
        total: int | None = None,
        total_steps: int | None = None,
        **options: Any,
    ):
        super().__init__(model, **options)
        if start < 0 or (isinstance(start, float) and start >= 1):
            raise ValueError(f"start must be an epoch (0, 1, 2, …) or a fraction of the run in [0, 1), got {start}.")
        self.start = start
        self.total = total
        self.total_steps = total_steps

    def _decide(self, evaluate: Evaluate | None, running_score: float | None, step: int | None) -> Outcome:
        if self._has_started(step):
            return self._add_snapshot(1 / (self.members + 1), evaluate, running_score)
        return Outcome(Decision.REJECT, nothing, running_score)

    def _has_started(self, step: int | None) -> bool:
        points = len(self.trajectory)
        if not isinstance(self.start, float):
            return points >= self.start
        # 0.29 · 100 is 28.999…: rounding must not move the start by an epoch.
        if self.total is not None:
            return points >= int(self.start * self.total + 1e-9)
        if self.total_steps is not None and step is not None:
            return step > self.start * self.total_steps + 1e-9
        raise ValueError(
            f"start={self.start} is a fraction of the run: pass total=, the number of decision points, to SWA."
        )


class BestCheckpoint(Strategy):
    """The weights with the best validation score so far: what early stopping would return."""

    name = "best"
    averages = False

    def _decide(self, evaluate: Evaluate | None, running_score: float | None, step: int | None) -> Outcome:
        score = self._running_score(evaluate, running_score)
        if score is None:
            raise TypeError("BestCheckpoint decides by validation: pass evaluate or running_score to update().")
        # Early stopping is the rule without a look-ahead: only INIT, HARD and REJECT are left.
        decision = Decision(
            policy.decide(self.members, self.score, score, None, greater_is_better=self.greater_is_better)
        )
        commit = nothing if decision is Decision.REJECT else lambda: self._restart(score)
        return Outcome(decision, commit, score)


class LastCheckpoint(Strategy):
    """The weights of the last decision point: plain training."""

    name = "last"
    averages = False

    def _decide(self, evaluate: Evaluate | None, running_score: float | None, step: int | None) -> Outcome:
        score = self._running_score(evaluate, running_score)
        return Outcome(Decision.HARD if self.members else Decision.INIT, lambda: self._restart(score), score)
