"""SWAD: the mean of all optimizer steps in the valley of the validation loss (Cha and others, 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from aswa_hf import policy
from aswa_hf._utils.checks import check_number, check_whole_number
from aswa_hf.averaging import WeightAverage
from aswa_hf.strategies.base import Evaluate, Outcome
from aswa_hf.strategies.segments import SegmentStrategy
from aswa_hf.trajectory import Decision, Trajectory


class _ScoredSegments(SegmentStrategy):
    """Base class of averages of consecutive segments that the running model's scores select."""

    def _scores(self, trajectory: Trajectory | None = None) -> list[float | None]:
        """Returns the running model's scores at all decision points so far, or at those of another trajectory."""
        return [record.running_score for record in (self.trajectory if trajectory is None else trajectory)]

    def _score_candidate(
        self, base: WeightAverage | None, weight: float, evaluate: Evaluate | None
    ) -> tuple[float | None, dict[str, Tensor] | None]:
        """Returns the score of base + weight · (segment − base), and the buffers then; without a base, of the segment.

        With a weight of 0, neither the segment nor the model's own buffers are read, which may not be finite.
        """
        if evaluate is None:
            return None, None
        segment = self.segment.average
        if base is None:
            entered = segment.swapped(with_buffers=False)
        elif weight == 0:
            entered = base.swapped()
        else:
            entered = base.lookahead(weight, segment)
        with entered:
            return self._score_averaged(evaluate, f"{self.name} weights")


class SWAD(_ScoredSegments):
    """The mean of the segments from where the validation loss stops falling to where it has risen again.

    A segment is the mean of the optimizer steps between two decision points; all of them count equally. The valley
    begins at the first of `n_converge` decision points that none of the others beats, and ends before the first of
    `n_tolerance` points that are all worse than the mean of those by more than `tolerance_ratio`; a score takes the
    place of the loss where greater is better. Before it begins, the result is the mean of the last segment.

    This is Algorithm 1 of the paper. The published code also takes up to `n_tolerance − n_converge` segments before
    the minimum if their loss is low, and counts those around the minimum more than once.

    `n_tolerance` earlier averages are kept, for the case that the valley turns out to have ended.
    """

    name = "swad"

    def __init__(
        self,
        model: nn.Module,
        *,
        n_converge: int = 3,
        n_tolerance: int = 6,
        tolerance_ratio: float = 0.3,
        **options: Any,
    ):
        super().__init__(model, **options)
        check_whole_number("n_converge", n_converge)
        check_whole_number("n_tolerance", n_tolerance)
        check_number("tolerance_ratio", tolerance_ratio, 0)
        self.n_converge, self.n_tolerance, self.tolerance_ratio = n_converge, n_tolerance, tolerance_ratio

    def _valley(self, scores: list[float | None]) -> tuple[int | None, int | None]:
        return policy.loss_valley(
            scores, self.n_converge, self.n_tolerance, self.tolerance_ratio, greater_is_better=self.greater_is_better
        )

    def _decide(self, evaluate: Evaluate | None, running_score: float | None, step: int | None) -> Outcome:
        running_score = self._running_score(evaluate, running_score)
        if running_score is None:
            raise TypeError("SWAD decides by validation: pass evaluate or running_score to update().")
        point, scores = len(self.trajectory), self._scores()
        begun, ended = self._valley(scores)
        start, end = self._valley([*scores, running_score])
        if ended is not None:
            return Outcome(Decision.REJECT, self.segment.restart, running_score)
        self.segment.complete("SWAD")
        base, weight, members = self.average, 1 / (self.members + 1), self.members + 1
        if start is None:
            members = 1
        elif end is not None:
            base, weight, members = self._earlier(end), 0.0, end - start + 1
        elif begun is None:
            base, weight, members = self._new_average(), 1 / self.n_converge, self.n_converge
            self._mean_of_segments(base, range(start, point))
        alone = start is None or (members == 1 and end is None)
        score, buffers = self._score_candidate(None if alone else base, weight, evaluate)

        def commit() -> None:
            if begun is not None and end is None:
                self._part(self._name_of_earlier(point - 1)).assign(self.average)
            elif begun is None and start is not None:
                for last in range(start, point):
                    self._mean_of_segments(self._part(self._name_of_earlier(last)), range(start, last + 1))
            if alone:
                self.average.assign(self.segment.average)
            else:
                if base is not self.average:
                    self.average.assign(base)
                if weight:
                    self.average.blend(weight, self.segment.average)
            if buffers is not None or end is None:
                self.average.copy_buffers(buffers)
            self.members, self.score, self._stale = members, score, buffers is None
            if start is None and self.n_converge > 1:
                self._segment_of(point).assign(self.segment.average)
            elif begun is None or end is not None:
                self._forget("segment-" if end is None else "earlier-")
            self.segment.restart()

        decision = Decision.INIT if point == 0 else Decision.HARD if alone else Decision.SOFT
        return Outcome(Decision.REJECT if end is not None else decision, commit, running_score)

    def _earlier(self, point: int) -> WeightAverage:
        """Returns the average after an earlier decision point."""
        latest = point == len(self.trajectory) - 1
        return self.average if latest else self.parts[self._name_of_earlier(point)]

    def _segment_of(self, point: int) -> WeightAverage:
        """Returns where the segment of a decision point is kept until the valley begins."""
        return self._part(self._name_of_segment(point))

    def _name_of_earlier(self, point: int) -> str:
        return f"earlier-{point % self.n_tolerance}"

    def _name_of_segment(self, point: int) -> str:
        return f"segment-{point % (self.n_converge - 1)}"

    def _required_parts(self, state: Mapping[str, Any], records: Trajectory) -> set[str]:
        found, points = super()._required_parts(state, records), len(records)
        start, end = self._valley(self._scores(records))
        if start is None:
            found |= {self._name_of_segment(point) for point in range(min(points, self.n_converge - 1))}
        elif end is None:
            # The valley ends at most this early.
            found |= {self._name_of_earlier(p) for p in range(max(start, points - self.n_tolerance), points - 1)}
        return found

    def _mean_of_segments(self, into: WeightAverage, points: range) -> None:
        for count, point in enumerate(points):
            segment = self._segment_of(point)
            if count:
                into.blend(1 / (count + 1), segment)
                into.copy_buffers(segment.copied)
            else:
                into.assign(segment)

    def _forget(self, prefix: str) -> None:
        for name, part in self.parts.items():
            if name.startswith(prefix):
                part.clear()

    @property
    def alphas(self) -> list[float]:
        start, end = self._valley(self._scores())
        points = len(self.trajectory)
        first = points - 1 if start is None else start
        last = points - 1 if end is None else end
        return [1 / (last - first + 1) if first <= point <= last else 0.0 for point in range(points)]

    def _rule(self) -> dict[str, Any]:
        rule = {name: getattr(self, name) for name in ("n_converge", "n_tolerance", "tolerance_ratio")}
        return super()._rule() | rule


class SWADMax(_ScoredSegments):
    """SWAD by validation maxima: the steps from the best running model on, until where their mean does best.

    The mean of the segments starts over whenever the running model has a new best score, and the result is this mean
    at the decision point where it had its own best score.
    """

    name = "swad-max"

    def _decide(self, evaluate: Evaluate | None, running_score: float | None, step: int | None) -> Outcome:
        if evaluate is None:
            raise TypeError("SWADMax decides by validation: update() needs a function that returns the score.")
        running_score = self._running_score(evaluate, running_score)
        point = len(self.trajectory)
        start = self._start([*self._scores(), running_score])
        if start is None:
            return Outcome(Decision.REJECT, self.segment.restart, running_score)
        self.segment.complete("SWADMax")
        window, weight = self._part("window"), 1 / (point - start + 1)
        score, buffers = self._score_candidate(window if start < point else None, weight, evaluate)
        decision = Decision(
            policy.decide(self.members, self.score, score, None, greater_is_better=self.greater_is_better)
        )

        def commit() -> None:
            if start == point:
                window.assign(self.segment.average)
            else:
                window.blend(weight, self.segment.average)
            if decision is not Decision.REJECT:
                self._restart(score, window)
                self.members = point - start + 1
                self.average.copy_buffers(buffers)
            self.segment.restart()

        return Outcome(decision, commit, running_score, snapshot_score=score)

    def _required_parts(self, state: Mapping[str, Any], records: Trajectory) -> set[str]:
        window = set() if self._start(self._scores(records)) is None else {"window"}
        return super()._required_parts(state, records) | window

    def _start(self, scores: list[float | None]) -> int | None:
        """Returns the first decision point with the best score of the running model, if any is usable."""
        start = None
        for point, score in enumerate(scores):
            best = None if start is None else scores[start]
            if policy.is_better(score, best, self.greater_is_better):
                start = point
        return start

    @property
    def alphas(self) -> list[float]:
        chosen = max((r.index for r in self.trajectory if r.decision is not Decision.REJECT), default=-1)
        first = self._start(self._scores()[: chosen + 1])
        return [
            1 / self.members if first is not None and first <= point <= chosen else 0.0
            for point in range(len(self.trajectory))
        ]
