"""The strategies: adaptive, plain and exponential averages, and the best and the last checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from aswa_hf import policy
from aswa_hf.strategy import Evaluate, Scores, Strategy, warn_caller
from aswa_hf.trajectory import Decision


class ASWA(Strategy):
    """Adaptive Stochastic Weight Averaging: averages as long as validation improves, restarts when that is better.

    >>> aswa = ASWA(model)
    >>> for epoch in range(epochs):
    ...     train_one_epoch(model)
    ...     aswa.update(lambda: validate(model))
    >>> aswa.apply()

    `hard_updates=False` is Algorithm 1 of the paper as printed: soft updates and rejections only, with one evaluation
    at each decision point.
    """

    name = "aswa"

    def __init__(self, model: nn.Module, *, hard_updates: bool = True, **options: Any):
        super().__init__(model, **options)
        self.hard_updates = hard_updates

    def update(
        self,
        evaluate: Evaluate | None = None,
        running_score: float | None = None,
        *,
        step: int | None = None,
        epoch: float | None = None,
    ) -> Decision:
        if evaluate is None:
            raise TypeError("ASWA decides by validation: update() needs a function that returns the validation score.")
        return super().update(evaluate, running_score, step=step, epoch=epoch)

    def _decide(self, evaluate: Evaluate | None, running_score: float | None) -> tuple[Decision, Scores]:
        assert evaluate is not None
        if self.members == 0 or self.hard_updates or running_score is not None:
            running_score = self._running_score(evaluate, running_score)

        lookahead_score: float | None = None

        def decide(score: float | None) -> Decision:
            nonlocal lookahead_score
            lookahead_score = score
            return Decision(
                policy.decide(
                    self.members,
                    self.score,
                    running_score,
                    lookahead_score,
                    hard_updates=self.hard_updates,
                    greater_is_better=self.greater_is_better,
                )
            )

        weight = 1 / (self.members + 1)
        decision = self._lookahead(weight, evaluate, decide) if self.members else decide(None)
        if decision in (Decision.INIT, Decision.HARD):
            self._restart()
            self.score = running_score
        return decision, {"running": running_score, "lookahead": lookahead_score}


class SWA(Strategy):
    """Stochastic Weight Averaging: the plain mean of all snapshots from `start` on.

    `start` is the first epoch (decision point) to include, counted from 0, or a fraction of the run; a fraction needs
    `total`, the number of decision points of the run.
    """

    name = "swa"

    def __init__(self, model: nn.Module, *, start: int | float = 0, total: int | None = None, **options: Any):
        super().__init__(model, **options)
        if start < 0 or (isinstance(start, float) and start >= 1):
            raise ValueError(f"start must be an epoch (0, 1, 2, …) or a fraction of the run in [0, 1), got {start}.")
        self.start = start
        self.total = total

    def _decide(self, evaluate: Evaluate | None, running_score: float | None) -> tuple[Decision, Scores]:
        first = self.start
        if isinstance(first, float):
            if self.total is None:
                raise ValueError(
                    f"start={first} is a fraction of the run: pass total=, the number of decision points, to SWA."
                )
            # 0.29 · 100 is 28.999…: the last bits must not move the start by an epoch.
            first = int(first * self.total + 1e-9)
        decision = Decision.REJECT
        if len(self.trajectory) >= first:
            decision = self._add_snapshot(1 / (self.members + 1), evaluate, running_score)
        return decision, {"running": running_score}


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

    def step(self) -> None:
        """Takes in the weights after an optimizer step."""
        self.steps += 1
        if self.steps % self.every == 0:
            self._take_snapshot(1 - self._decay(self.members))

    def _decay(self, updates: int) -> float:
        return min(self.decay, (1 + updates) / (10 + updates)) if self.warmup else self.decay

    def _decide(self, evaluate: Evaluate | None, running_score: float | None) -> tuple[Decision, Scores]:
        first = not any(record.members for record in self.trajectory)
        if self.steps == 0:
            warn_caller(
                "EMA.step() was not called after optimizer steps: averaging one snapshot per decision point instead."
            )
            self._add_snapshot(1 - self._decay(self.members), evaluate, running_score)
        elif evaluate is None:
            self.score = None
        elif self.members:
            with self.swapped():
                self.score = self._score(evaluate, "ema weights")
        if self.members == 0:
            return Decision.REJECT, {"running": running_score}
        return Decision.INIT if first else Decision.SOFT, {"running": running_score}

    @property
    def alphas(self) -> list[float]:
        """The weight of all snapshots taken between a decision point and the one before it."""
        # remaining[t]: what later updates left of the first t + 1 snapshots
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


class BestCheckpoint(Strategy):
    """The weights with the best validation score so far: what early stopping would return."""

    name = "best"

    def _decide(self, evaluate: Evaluate | None, running_score: float | None) -> tuple[Decision, Scores]:
        running_score = self._running_score(evaluate, running_score)
        if running_score is None:
            raise TypeError("BestCheckpoint decides by validation: pass evaluate or running_score to update().")
        # Early stopping is the rule without a look-ahead: only INIT, HARD and REJECT are left.
        decision = Decision(
            policy.decide(self.members, self.score, running_score, None, greater_is_better=self.greater_is_better)
        )
        if decision is not Decision.REJECT:
            self._restart()
            self.score = running_score
        return decision, {"running": running_score}


class LastCheckpoint(Strategy):
    """The weights of the last decision point: plain training."""

    name = "last"

    def _decide(self, evaluate: Evaluate | None, running_score: float | None) -> tuple[Decision, Scores]:
        running_score = self._running_score(evaluate, running_score)
        decision = Decision.HARD if self.members else Decision.INIT
        self._restart()
        self.score = running_score
        return decision, {"running": running_score}


STRATEGIES: dict[str, type[Strategy]] = {
    strategy.name: strategy for strategy in (ASWA, SWA, EMA, BestCheckpoint, LastCheckpoint)
}
