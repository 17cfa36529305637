"""The checkpoints that are averaged and their weights: one function for each strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from aswa_hf import policy
from aswa_hf.checkpoints.evaluation import Evaluator, statistics_of
from aswa_hf.checkpoints.sources import companions
from aswa_hf.checkpoints.tensors import Checkpoint, WeightedMean, read_checkpoint
from aswa_hf.trajectory import Decision, Record, Trajectory

BY_VALIDATION = ("aswa", "greedy", "best")
BY_ORDER = ("swa", "ema", "uniform", "last")
RULES = (*BY_VALIDATION, *BY_ORDER)


@dataclass
class Ensemble:
    """The checkpoints that are in the average, and the decisions that led there.

    The sum of the members, in float64, is kept in a file in `scratch`: a look-ahead reads two checkpoints, however
    many members there are.
    """

    checkpoints: Sequence[Checkpoint]
    evaluator: Evaluator
    scratch: Path
    copied: frozenset[str] = frozenset()
    greater_is_better: bool = True
    members: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    score: float | None = None
    statistics: dict[str, Tensor] = field(default_factory=dict)
    trajectory: Trajectory = field(default_factory=Trajectory)
    order: list[int] = field(default_factory=list)
    """The index of the checkpoint of each record of the trajectory."""
    _sum: Checkpoint | None = None

    def mean(self) -> WeightedMean:
        """The average of the members."""
        parts = [(self.checkpoints[i], weight) for i, weight in zip(self.members, self.weights, strict=True)]
        return WeightedMean(parts, sum(self.weights), self.copied, self.statistics)

    def own_score(self, index: int) -> float:
        """The score of a single checkpoint."""
        return self.evaluator.score(self.checkpoints[index])[0]

    def lookahead(self, index: int) -> tuple[float, Callable[[], None]]:
        """The score of the average with one more checkpoint, and a function that adds it."""
        new = self.checkpoints[index]
        parts = [(self._sum or self.checkpoints[self.members[0]], 1.0), (new, 1.0)]
        candidate = WeightedMean(parts, float(len(self.members) + 1), self.copied)
        score, statistics = self.evaluator.score(written(candidate, self.scratch / "look-ahead"), averaged=True)

        def accept() -> None:
            total = self.scratch / f"sum-{len(self.members) + 1}"
            WeightedMean(parts, 1.0, self.copied).write(_emptied(total), dtype="F64")
            if self._sum is not None:
                _remove(self._sum)
            self._sum = read_checkpoint("sum", [total / new.name_of(file) for file in new.files])
            self.members.append(index)
            self.weights.append(1.0)
            self.score, self.statistics = score, statistics

        return score, accept

    def restart(self, index: int, score: float | None) -> None:
        """Makes this checkpoint the only member."""
        if self._sum is not None:
            _remove(self._sum)
        self.members, self.weights, self._sum = [index], [1.0], None
        self.score, self.statistics = score, {}

    def record(
        self, index: int, decision: Decision, running: float | None = None, lookahead: float | None = None
    ) -> None:
        checkpoint = self.checkpoints[index]
        self.order.append(index)
        self.trajectory.append(
            Record(
                index=len(self.trajectory),
                step=checkpoint.step,
                epoch=checkpoint.epoch,
                running_score=running,
                lookahead_score=lookahead,
                score=self.score,
                members=len(self.members),
                decision=decision,
            )
        )

    def decide(self, running: float | None, lookahead: float | None, hard_updates: bool = True) -> Decision:
        """The decision by the rule of ASWA."""
        rule = {"hard_updates": hard_updates, "greater_is_better": self.greater_is_better}
        return Decision(policy.decide(len(self.members), self.score, running, lookahead, **rule))


def choose_adaptively(ensemble: Ensemble, *, hard_updates: bool = True) -> None:
    """ASWA over the checkpoints in their order."""
    for index in range(len(ensemble.checkpoints)):
        running = ensemble.own_score(index) if hard_updates or not ensemble.members else None
        lookahead, accept = ensemble.lookahead(index) if ensemble.members else (None, None)
        decision = ensemble.decide(running, lookahead, hard_updates)
        if decision is Decision.SOFT and accept is not None:
            accept()
        elif decision is not Decision.REJECT:
            ensemble.restart(index, running)
        ensemble.record(index, decision, running, lookahead)


def choose_best(ensemble: Ensemble) -> None:
    """The checkpoint with the best score: the rule without a look-ahead."""
    for index in range(len(ensemble.checkpoints)):
        running = ensemble.own_score(index)
        decision = ensemble.decide(running, None)
        if decision is not Decision.REJECT:
            ensemble.restart(index, running)
        ensemble.record(index, decision, running)


def choose_greedily(ensemble: Ensemble) -> None:
    """A greedy soup: from the best checkpoint to the worst, each is included unless the average gets worse."""
    own = [ensemble.own_score(index) for index in range(len(ensemble.checkpoints))]
    sign = -1 if ensemble.greater_is_better else 1
    usable = [policy.is_usable(score) for score in own]
    for index in sorted(range(len(own)), key=lambda i: (not usable[i], sign * own[i] if usable[i] else 0)):
        if not ensemble.members:
            decision, lookahead = ensemble.decide(own[index], None), None
            if decision is Decision.INIT:
                ensemble.restart(index, own[index])
        else:
            lookahead, accept = ensemble.lookahead(index)
            worse = policy.is_better(ensemble.score, lookahead, ensemble.greater_is_better)
            decision = Decision.REJECT if worse else Decision.SOFT
            if not worse:
                accept()
        ensemble.record(index, decision, own[index], lookahead)


def choose_by_order(ensemble: Ensemble, strategy: str, *, start: int | float = 0, decay: float = 0.7) -> None:
    """Weights that follow from the order alone: equal from `start` on, only the last, or decaying with age.

    EMA is Θ_A := decay · Θ_A + (1 − decay) · Θ, from the first checkpoint on.
    """
    total = len(ensemble.checkpoints)
    first = total - 1 if strategy == "last" else first_included(start, total) if strategy == "swa" else 0
    ensemble.members = []
    for index in range(total):
        if index < first:
            ensemble.record(index, Decision.REJECT)
            continue
        ensemble.members.append(index)
        ensemble.record(index, Decision.SOFT if len(ensemble.members) > 1 else Decision.INIT)
    ensemble.weights = [1.0] * len(ensemble.members)
    if strategy == "ema":
        ensemble.weights = [(1 - decay if i else 1.0) * decay ** (total - 1 - i) for i in range(total)]


def first_included(start: int | float, total: int) -> int:
    """The first checkpoint of SWA, given by its number or as a fraction of them all."""
    if isinstance(start, bool) or start < 0 or (isinstance(start, float) and start >= 1):
        raise ValueError(f"start must be a number of checkpoints (0, 1, 2, …) or a fraction in [0, 1), got {start}.")
    # 0.29 · 100 is 28.999…: rounding must not move the start.
    first = int(start * total + 1e-9) if isinstance(start, float) else start
    if first >= total:
        raise ValueError(f"start={start} leaves none of {total} checkpoints to average.")
    return first


def written(mean: WeightedMean, folder: Path) -> Checkpoint:
    """Writes an average as a checkpoint folder, with the files that make it loadable."""
    mean.write(_emptied(folder))
    last = mean.last
    if last.folder is not None:
        for path in companions(last.folder, last.files):
            (folder / path.name).write_bytes(path.read_bytes())
    files = [folder / last.name_of(file) for file in last.files]
    index = folder / last.index.name if last.index else None
    return read_checkpoint("the average", files, index, folder=folder if last.folder else None)


def unaveraged(checkpoint: Checkpoint, batchnorm: str) -> frozenset[str]:
    """Floating-point tensors that are not averaged: with "copy", the BatchNorm statistics."""
    return frozenset(statistics_of(checkpoint)) if batchnorm == "copy" else frozenset()


def _emptied(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    return folder


def _remove(checkpoint: Checkpoint) -> None:
    for file in checkpoint.files:
        file.unlink()
