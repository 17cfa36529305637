"""ASWA, and Dense ASWA: averages that grow, restart or stay as validation decides."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from aswa_hf import policy
from aswa_hf._utils.checks import check_flag
from aswa_hf._utils.defaults import BN_BATCHES
from aswa_hf.batchnorm import Batches, Forward
from aswa_hf.strategies.base import Evaluate, Outcome, Strategy, nothing
from aswa_hf.strategies.segments import SegmentStrategy
from aswa_hf.trajectory import Decision


class ASWA(Strategy):
    """Adaptive Stochastic Weight Averaging: averages while validation improves, restarts when that is better.

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
        bn_batches: int | None = BN_BATCHES,
        bn_forward: Forward | None = None,
        **unknown: Any,
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
            **unknown,
        )
        check_flag("hard_updates", hard_updates)
        self.hard_updates = hard_updates

    def _decide(self, evaluate: Evaluate | None, running_score: float | None, step: int | None) -> Outcome:
        if evaluate is None:
            raise TypeError("ASWA decides by validation: update() needs a function that returns the validation score.")
        if self.members == 0 or self.hard_updates or running_score is not None:
            running_score = self._running_score(evaluate, running_score)
        lookahead_score, accept = (
            self._lookahead(1 / (self.members + 1), evaluate, called="look-ahead") if self.members else (None, nothing)
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

    def _rule(self) -> dict[str, Any]:
        return super()._rule() | {"hard_updates": self.hard_updates}


class DenseASWA(SegmentStrategy, ASWA):
    """ASWA over the means of all optimizer steps: it sees every step, as EMA does, and decides by validation.

    The snapshot of a decision point is Θ̄, the mean of the weights after every `every`-th optimizer step since the last
    one, and the look-ahead is Θ̂ = (n·Θ_A + Θ̄)/(n + 1). HARD restarts from the better of the running model and Θ̄ if it
    beats look-ahead and ensemble, SOFT takes the look-ahead if it beats the ensemble, and REJECT changes nothing.

    >>> aswa = DenseASWA(model)
    >>> for epoch in range(epochs):
    ...     for batch in loader:
    ...         train_on(batch)
    ...         aswa.step()
    ...     aswa.update(lambda: validate(model))
    >>> aswa.apply()

    `score_snapshot=False` leaves out the evaluation of Θ̄: HARD then restarts from the running model only. With
    `device="cpu"` both averages are off the accelerator, and `every` limits how often the weights are copied there.
    """

    name = "dense-aswa"

    def __init__(self, model: nn.Module, *, score_snapshot: bool = True, **options: Any):
        super().__init__(model, **options)
        check_flag("score_snapshot", score_snapshot)
        self.score_snapshot = score_snapshot

    def _decide(self, evaluate: Evaluate | None, running_score: float | None, step: int | None) -> Outcome:
        if evaluate is None:
            raise TypeError(
                "DenseASWA decides by validation: update() needs a function that returns the validation score."
            )
        self.segment.complete("DenseASWA")
        mean = self.segment.average
        may_restart = self.members == 0 or self.hard_updates
        if may_restart or running_score is not None:
            running_score = self._running_score(evaluate, running_score)
        snapshot_score: float | None = None
        buffers: dict[str, torch.Tensor] = {}
        if may_restart and self.score_snapshot:
            with mean.swapped(with_buffers=False):
                snapshot_score, buffers = self._score_averaged(evaluate, "snapshot")
        lookahead_score, accept = None, nothing
        if self.members:
            weight = 1 / (self.members + 1)
            lookahead_score, accept = self._lookahead(weight, evaluate, mean, called="look-ahead")
        decision, from_snapshot = policy.decide_dense(
            self.members,
            self.score,
            running_score,
            snapshot_score,
            lookahead_score,
            hard_updates=self.hard_updates,
            greater_is_better=self.greater_is_better,
        )

        def commit() -> None:
            if decision == policy.SOFT:
                accept()
            elif decision != policy.REJECT and from_snapshot:
                self._restart(snapshot_score, mean)
                self.average.copy_buffers(buffers)
            elif decision != policy.REJECT:
                self._restart(running_score)
            self.segment.restart()

        return Outcome(Decision(decision), commit, running_score, lookahead_score, snapshot_score)

    def _rule(self) -> dict[str, Any]:
        return super()._rule() | {"score_snapshot": self.score_snapshot}
