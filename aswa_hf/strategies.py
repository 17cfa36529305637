"""The strategies: adaptive, plain and exponential averages, and the best and the last checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from aswa_hf import policy
from aswa_hf.batchnorm import Batches, Forward
from aswa_hf.signals import uninterrupted
from aswa_hf.strategy import Evaluate, Outcome, Strategy, nothing, warn_caller
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

    def __init__(
        self,
        model: nn.Module,
        *,
        greater_is_better: bool = True,
        hard_updates: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        batchnorm: str = "recalibrate",
        train_batches: Batches | None = None,
        bn_batches: int | None = None,
        bn_forward: Forward | None = None,
    ):
        super().__init__(
            model,
            greater_is_better=greater_is_better,
            dtype=dtype,
            device=device,
            batchnorm=batchnorm,
            train_batches=train_batches,
            bn_batches=bn_batches,
            bn_forward=bn_forward,
        )
        self.hard_updates = hard_updates

    def _decide(self, evaluate: Evaluate | None, running_score: float | None, step: int | None) -> Outcome:
        if evaluate is None:
            raise TypeError("ASWA decides by validation: update() needs a function that returns the validation score.")
        if self.members == 0 or self.hard_updates or running_score is not None:
            running_score = self._running_score(evaluate, running_score)
        lookahead_score, accept = (
            self._lookahead(1 / (self.members + 1), evaluate) if self.members else (None, nothing)
        )
        decision = Decision(
            policy.decide(
                self.members,
                self.score,
                running_score,
                lookahead_score,
                hard_updates=self.hard_updates,
                greater_is_better=self.greater_is_better,
            )
        )
        commit = {Decision.SOFT: accept, Decision.REJECT: nothing}.get(decision, lambda: self._restart(running_score))
        return Outcome(decision, commit, running_score, lookahead_score)

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        return super().state_dict(copy=copy) | {"hard_updates": self.hard_updates}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        super().check_state_dict(state)
        if state["hard_updates"] != self.hard_updates:
            raise ValueError(
                f"This state was saved with hard_updates={state['hard_updates']}, this strategy has "
                f"hard_updates={self.hard_updates}. Go on with the same rule."
            )


class SWA(Strategy):
    """Stochastic Weight Averaging: the plain mean of all snapshots from `start` on.

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
        # 0.29 · 100 is 28.999…: the last bits must not move the start by an epoch.
        if self.total is not None:
            return points >= int(self.start * self.total + 1e-9)
        if self.total_steps is not None and step is not None:
            return step > self.start * self.total_steps + 1e-9
        raise ValueError(
            f"start={self.start} is a fraction of the run: pass total=, the number of decision points, to SWA."
        )


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
        with uninterrupted():
            self.steps += 1
            if self.steps % self.every == 0:
                self._take_snapshot(1 - self._decay(self.members))

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


STRATEGIES: dict[str, type[Strategy]] = {
    strategy.name: strategy for strategy in (ASWA, SWA, EMA, BestCheckpoint, LastCheckpoint)
}
