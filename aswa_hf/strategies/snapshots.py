"""Strategies over the snapshots of decision points: SWA, LAWA, the best checkpoint, the last one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from aswa_hf import policy
from aswa_hf._utils.checks import check_whole_number, is_number
from aswa_hf.averaging import WeightAverage
from aswa_hf.strategies.base import Evaluate, Outcome, Strategy, nothing
from aswa_hf.trajectory import Decision, Trajectory


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
        if not is_number(start) or not start >= 0 or (isinstance(start, float) and start >= 1):
            raise ValueError(f"start must be an epoch (0, 1, 2, …) or a fraction of the run in [0, 1), got {start!r}.")
        check_whole_number("total", total, optional=True)
        check_whole_number("total_steps", total_steps, optional=True)
        if isinstance(start, int) and total is not None and start >= total:
            raise ValueError(f"start={start} leaves none of total={total} decision points to average.")
        self.start = start
        self.total = total
        self.total_steps = total_steps

    def _decide(self, evaluate: Evaluate | None, running_score: float | None, step: int | None) -> Outcome:
        if self._has_started(step):
            return self._add_snapshot(1 / (self.members + 1), evaluate, running_score)
        return Outcome(Decision.REJECT, nothing, running_score)

    def _deciding_scores(self) -> list[float | None]:
        return []

    def _rule(self) -> dict[str, Any]:
        return super()._rule() | {"start": self.start}

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


class LAWA(Strategy):
    """Latest Weight Averaging: the mean of the last `k` snapshots, which takes the memory of `k` copies."""

    name = "lawa"

    def __init__(self, model: nn.Module, *, k: int = 5, **options: Any):
        super().__init__(model, **options)
        check_whole_number("k", k)
        self.k = k

    def _decide(self, evaluate: Evaluate | None, running_score: float | None, step: int | None) -> Outcome:
        point = len(self.trajectory)
        earlier = [self._slot(index) for index in range(max(0, point - self.k + 1), point)]
        if not earlier:
            score = self._running_score(evaluate, running_score)

            def restart() -> None:
                self._keep(point)  # first, as it may need memory that there is not
                self._restart(score)

            return Outcome(Decision.HARD if point else Decision.INIT, restart, score)
        mean = self._new_average()
        for count, snapshot in enumerate(earlier, start=1):
            mean.blend(1 / count, snapshot) if count > 1 else mean.assign(snapshot)
        weight = 1 / (len(earlier) + 1)
        score, buffers = None, None
        if evaluate is not None:
            with mean.lookahead(weight):
                score, buffers = self._score_averaged(evaluate, "lawa weights")

        def commit() -> None:
            self._keep(point)
            self.average.assign(mean)
            self.average.blend(weight)
            self.average.copy_buffers(buffers)
            self.members, self.score, self._stale = len(earlier) + 1, score, buffers is None

        return Outcome(Decision.SOFT, commit, running_score)

    @property
    def alphas(self) -> list[float]:
        share = 1 / max(self.members, 1)
        return [0.0] * (len(self.trajectory) - self.members) + [share] * self.members

    def _slot(self, point: int) -> WeightAverage:
        """Returns where the snapshot of a decision point is kept; it replaces one that is no longer needed."""
        return self._part(self._slot_name(point))

    def _slot_name(self, point: int) -> str:
        return f"snapshot-{point % (self.k - 1)}"

    def _required_parts(self, state: Mapping[str, Any], records: Trajectory) -> set[str]:
        return {self._slot_name(point) for point in range(min(len(records), self.k - 1))}

    def _keep(self, point: int) -> None:
        if self.k > 1:
            self._slot(point).assign()

    def _rule(self) -> dict[str, Any]:
        return super()._rule() | {"k": self.k}


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
