"""ASWA: averages that validation decides about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from aswa_hf import policy
from aswa_hf.batchnorm import Batches, Forward
from aswa_hf.strategies.base import Evaluate, Outcome, Strategy, nothing
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
                f"hard_updates={self.hard_updates}. Resume with the same rule."
            )
