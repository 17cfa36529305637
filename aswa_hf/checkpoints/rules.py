"""The checkpoints that are averaged and their weights: one function for each strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from aswa_hf import policy
from aswa_hf._utils.checks import check_choice, check_number, check_whole_number, is_number
from aswa_hf._utils.names import did_you_mean
from aswa_hf.checkpoints.evaluation import Evaluator, statistics_of
from aswa_hf.checkpoints.sources import companions
from aswa_hf.checkpoints.streaming import Checkpoint, WeightedMean, read_checkpoint
from aswa_hf.trajectory import Decision, Record, Trajectory

BY_VALIDATION = ("aswa", "greedy", "best", "swad")
BY_ORDER = ("swa", "lawa", "wsm", "ema", "uniform", "last")
RULES = (*BY_VALIDATION, *BY_ORDER)

# Options that are given with the name, as in "lawa(k=3)", and their defaults.
OPTIONS: dict[str, dict[str, Any]] = {
    "lawa": {"k": 5},
    "wsm": {"schedule": "linear"},
    "swad": {"n_converge": 3, "n_tolerance": 6, "tolerance_ratio": 0.3},
}
# Of an EMA over checkpoints, the weight of the previous average.
DECAY = 0.7
# Options that are arguments of their own: the strategies that have them, the default, and the flag.
ARGUMENTS: dict[str, tuple[tuple[str, ...], Any, str]] = {
    "start": (("swa", "wsm"), 0, "--start"),
    "decay": (("ema",), DECAY, "--decay"),
    "hard_updates": (("aswa",), True, "--soft-only"),
}
# The decays of the learning rate from 1 to 0 that WSM imitates, over the fraction of the checkpoints.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "1-sqrt": lambda x: 1 - math.sqrt(x),
}


def checked_options(strategy: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all options of a strategy; raises ValueError for one that it does not have, or outside its range."""
    known = OPTIONS.get(strategy, {})
    for name in given:
        if name in ARGUMENTS:
            raise ValueError(
                f"{name!r} is not given with the name of a strategy here. It is an argument of its own, on the "
                f"command line {ARGUMENTS[name][2]}."
            )
        if name not in known:
            expected = f"{did_you_mean(name, known)}Its options: {', '.join(known)}." if known else "It has none."
            raise ValueError(f"The strategy {strategy!r} has no option {name!r}. {expected}")
    options = known | dict(given)
    for name in ("k", "n_converge", "n_tolerance"):
        if name in options:
            check_whole_number(name, options[name])
    check_number("tolerance_ratio", options.get("tolerance_ratio", 0), 0)
    if "schedule" in options:
        check_choice("schedule", options["schedule"], SCHEDULES)
    return options


def own_arguments(strategy: str, **given: Any) -> dict[str, Any]:
    """Returns those arguments that are given and that the strategy has; raises ValueError for others."""
    given = {name: value for name, value in given.items() if value is not None}
    if "decay" in given:
        check_number("decay", given["decay"], 0, 1, below=True)
    found = {}
    for name, value in given.items():
        owners, default, _ = ARGUMENTS[name]
        if strategy in owners:
            found[name] = value
        elif value != default:
            raise ValueError(
                f"{name}={value} has no effect on the strategy {strategy}. Leave it out, or choose "
                f"{' or '.join(owners)}."
            )
    return found


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


def choose_valley(ensemble: Ensemble, *, n_converge: int, n_tolerance: int, tolerance_ratio: float) -> None:
    """SWAD: the checkpoints in the valley of the validation loss; the last usable one if there is no valley yet."""
    own: list[float | None] = [ensemble.own_score(index) for index in range(len(ensemble.checkpoints))]
    first, last = policy.loss_valley(
        own, n_converge, n_tolerance, tolerance_ratio, greater_is_better=ensemble.greater_is_better
    )
    if first is None:
        first = last = max((index for index, score in enumerate(own) if policy.is_usable(score)), default=len(own))
    _include(ensemble, range(first, len(own) if last is None else last + 1), own)


def choose_by_order(
    ensemble: Ensemble,
    strategy: str,
    *,
    start: int | float = 0,
    decay: float = DECAY,
    k: int = 5,
    schedule: str = "linear",
) -> None:
    """Weights that follow from the order alone: equal from `start` on, the last `k`, only the last, or a formula.

    EMA is Θ_A := decay · Θ_A + (1 − decay) · Θ, from the first checkpoint on. WSM imitates the decay of the learning
    rate from `start` on: the update before checkpoint i counts D(i/n), so the weight of i is D(i/n) − D((i + 1)/n).
    """
    total = len(ensemble.checkpoints)
    first = {"last": total - 1, "lawa": max(0, total - k)}.get(strategy, 0)
    if strategy in ("swa", "wsm"):
        first = first_included(start, total)
    _include(ensemble, range(first, total))
    if strategy == "ema":
        ensemble.weights = [(1 - decay if i else 1.0) * decay ** (total - 1 - i) for i in range(total)]
    elif strategy == "wsm":
        left, count = SCHEDULES[schedule], total - first
        ensemble.weights = [left(i / count) - left((i + 1) / count) for i in range(count)]


def _include(ensemble: Ensemble, members: range, scores: Sequence[float | None] | None = None) -> None:
    """Makes these checkpoints the members, with equal weights, and writes the records of all."""
    ensemble.members = []
    for index in range(len(ensemble.checkpoints)):
        score = None if scores is None else scores[index]
        if index not in members:
            ensemble.record(index, Decision.REJECT, score)
            continue
        ensemble.members.append(index)
        ensemble.record(index, Decision.SOFT if len(ensemble.members) > 1 else Decision.INIT, score)
    ensemble.weights = [1.0] * len(ensemble.members)


def first_included(start: int | float, total: int) -> int:
    """The first checkpoint of SWA, given by its number or as a fraction of them all."""
    if not is_number(start) or not start >= 0 or (isinstance(start, float) and start >= 1):
        raise ValueError(f"start must be a number of checkpoints (0, 1, 2, …) or a fraction in [0, 1), got {start!r}.")
    # 0.29 · 100 is 28.999…: rounding must not move the start.
    first = int(start * total + 1e-9) if isinstance(start, float) else start
    if first >= total:
        raise ValueError(f"start={start} leaves none of {total} checkpoints to average.")
    return first


def written(mean: WeightedMean, folder: Path, *, checked: bool = False) -> Checkpoint:
    """Writes an average as a checkpoint folder, with the files that make it loadable; `checked` as in `write`."""
    mean.write(_emptied(folder), checked=checked)
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
