"""The interface of all strategies, and what they share: the average, its score and history, swapping, saving.

Several strategies can follow the same run without influencing it or each other.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from aswa_hf import policy
from aswa_hf._utils.checks import check_flag, check_whole_number, is_number, is_whole_number
from aswa_hf._utils.defaults import BN_BATCHES
from aswa_hf._utils.distributed import agree
from aswa_hf._utils.names import did_you_mean
from aswa_hf._utils.random_state import preserved_rng
from aswa_hf._utils.sharding import computing_device
from aswa_hf._utils.signals import uninterrupted
from aswa_hf._utils.warnings import warn_caller
from aswa_hf.averaging import WeightAverage, take_snapshots
from aswa_hf.batchnorm import Batches, Forward, Recalibration
from aswa_hf.trajectory import Decision, Record, Trajectory

Evaluate = Callable[[], Any]
BATCHNORM_POLICIES = ("recalibrate", "average", "copy")


@dataclass(frozen=True)
class Outcome:
    """A decision, the scores it is based on, and the function that carries it out."""

    decision: Decision
    commit: Callable[[], None]
    running_score: float | None = None
    lookahead_score: float | None = None
    snapshot_score: float | None = None


class Strategy(ABC):
    """Base class of all strategies: the average, its score and history, swapping, saving.

    `batchnorm` sets where the BatchNorm statistics of averaged weights come from: "recalibrate" recomputes them on
    `train_batches` (at most `bn_batches` of them; None means all) whenever averaged weights are evaluated, "average"
    averages them like weights, "copy" uses the running model's. `device="cpu"` keeps the average off the accelerator.
    """

    name: ClassVar[str]
    averages: ClassVar[bool] = True
    """Whether weights are ever averaged; otherwise BatchNorm statistics need no special treatment."""

    def __init__(
        self,
        model: nn.Module,
        *,
        greater_is_better: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        batchnorm: str = "recalibrate",
        train_batches: Batches | None = None,
        bn_batches: int | None = BN_BATCHES,
        bn_forward: Forward | None = None,
        **unknown: Any,
    ):
        if unknown:
            name, known = next(iter(unknown)), keyword_options(type(self))
            hint = did_you_mean(name, known)
            raise TypeError(f"{type(self).__name__} has no option {name!r}. {hint}Its options: {', '.join(known)}.")
        if batchnorm not in BATCHNORM_POLICIES:
            raise ValueError(f"batchnorm must be one of {', '.join(BATCHNORM_POLICIES)}, got {batchnorm!r}.")
        check_whole_number("bn_batches", bn_batches, optional=True)
        check_flag("greater_is_better", greater_is_better)
        if not self.averages:
            batchnorm = "copy"
        self.average = WeightAverage(model, dtype=dtype, device=device, average_buffers=batchnorm == "average")
        self.parts: dict[str, WeightAverage] = {}
        """Additional averages that the strategy keeps beside its result; they are saved with it."""
        self.model = self.average.model
        self.greater_is_better = greater_is_better
        self.recalibrate: Callable[[], None] = (
            Recalibration(self.model, train_batches, limit=bn_batches, forward=bn_forward)
            if batchnorm == "recalibrate"
            else nothing
        )
        self.score: float | None = None
        self.members = 0
        self.trajectory = Trajectory()
        # Whether the averaged weights changed since their BatchNorm statistics were computed.
        self._stale = False

    def step(self) -> None:
        """Must be called after every optimizer step; a no-op for strategies that only use decision points."""
        take_step([self])

    def _after_step(self) -> Iterable[tuple[WeightAverage, float]]:
        """Counts an optimizer step; returns the averages to update, with the weight of the running weights in each."""
        return ()

    def update(
        self,
        evaluate: Evaluate | None = None,
        running_score: float | None = None,
        *,
        step: int | None = None,
        epoch: float | None = None,
    ) -> Decision:
        """Decision point: evaluates the weights now in the model and decides how the ensemble changes.

        `evaluate()` returns the validation score of the weights that are in the model. If the running model's score
        is already known, it can be passed as `running_score`. If `evaluate` raises, nothing has changed.
        """
        if evaluate is not None and not callable(evaluate):
            raise TypeError(
                f"update() takes a function that returns the validation score, got {type(evaluate).__name__}. Pass "
                "a score of the running model that is already known as running_score=."
            )
        if self.average.is_in_model:
            raise RuntimeError(
                "update() was called inside swapped() or an evaluation, where the model holds averaged weights. Call "
                "it where the model holds the running weights."
            )
        if running_score is not None:
            running_score = self._agreed(running_score)
        with preserved_rng():
            outcome = self._decide(evaluate, running_score, step)
        with uninterrupted():
            outcome.commit()
            self.average.share_buffers()
            self.trajectory.append(
                Record(
                    index=len(self.trajectory),
                    step=step,
                    epoch=len(self.trajectory) + 1 if epoch is None else epoch,
                    running_score=outcome.running_score,
                    lookahead_score=outcome.lookahead_score,
                    score=self.score,
                    members=self.members,
                    decision=outcome.decision,
                    snapshot_score=outcome.snapshot_score,
                )
            )
        return outcome.decision

    @abstractmethod
    def _decide(self, evaluate: Evaluate | None, running_score: float | None, step: int | None) -> Outcome:
        """Makes the decision; nothing changes until it is committed."""

    @property
    def alphas(self) -> list[float]:
        """α_i, the weight of the snapshot of every decision point in the ensemble; they sum to 1."""
        return self.trajectory.alphas

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Puts the ensemble into the model until the block ends, then restores the running weights bit for bit."""
        self._require_members()
        with self.average.swapped():
            self._refresh_statistics()
            yield

    def apply(self) -> None:
        """Puts the ensemble into the model permanently."""
        if self._stale:
            # Before anything is overwritten: if a pass over the training batches fails, the running weights remain.
            with self.swapped():
                pass
        self._require_members()
        self.average.apply()

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """Returns everything needed to resume: tensors under "averaged" and "buffers", plain values elsewhere.

        For a sharded model the averages are DTensors, like the weights in its own `state_dict()`: each process has
        its rows, and `tensor.full_tensor()`, called on all processes, returns the complete tensor.
        """
        state: dict[str, Any] = {
            "strategy": self.name,
            "greater_is_better": self.greater_is_better,
            "score": self.score,
            "members": self.members,
            "stale": self._stale,
            "records": self.trajectory.to_json(),
            "parts": [prefix.removesuffix(".") for prefix in self._averages() if prefix],
        }
        for prefix, average in self._averages().items():
            for kind, tensors in zip(("averaged", "buffers"), average.whole(), strict=True):
                state[prefix + kind] = {name: t.clone() if copy else t for name, t in tensors.items()}
        return state | self._rule()

    def _rule(self) -> dict[str, Any]:
        """Returns the options that a resumed run must have in common with the saved one."""
        return {}

    def _averages(self) -> dict[str, WeightAverage]:
        """Returns everything to save, by the prefix of its names in the state."""
        return {"": self.average} | {f"{name}.": part for name, part in self.parts.items() if not part.is_empty}

    def _part(self, name: str) -> WeightAverage:
        """Returns the additional average of this name; creates an empty one at the first call."""
        if name not in self.parts:
            self.parts[name] = self._new_average()
        return self.parts[name]

    def _new_average(self) -> WeightAverage:
        ours = self.average
        return WeightAverage(self.model, dtype=ours.dtype, device=ours.device, average_buffers=ours.average_buffers)

    @property
    def nbytes(self) -> int:
        """The memory that the strategy's weights take now, in bytes; of a sharded model, on this process."""
        return self.average.nbytes + sum(part.nbytes for part in self.parts.values())

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for a state of another model, strategy or direction, or one with impossible values."""
        if not isinstance(state, Mapping):
            raise TypeError(f"Expected what state_dict() of a strategy returned, got {type(state).__name__}.")
        if state.get("strategy") != self.name:
            raise ValueError(f"This is the state of strategy {state.get('strategy')!r}, expected {self.name!r}.")
        tensors: dict[str, Any] = {key: {} for key in state if key.endswith((".averaged", ".buffers"))}
        rule = self._rule()
        for key, ours in (self.state_dict(copy=False) | tensors).items():
            if key not in rule:
                _check_value(state, key, ours)
        for name, option in rule.items():
            # Older states lack the options of some strategies.
            if state.get(name, option) != option:
                raise ValueError(
                    f"This state was saved with {name}={state[name]}, this strategy has {name}={option}. Resume with "
                    "the same rule."
                )
        try:
            records = Trajectory.from_json(state["records"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"'records' of this state are damaged: {error}") from None
        self._check_progress(state, records[-1] if records else None)
        if bool(state["averaged"]) != (state["members"] > 0):
            raise ValueError(f"This state has {state['members']} members, but {len(state['averaged'])} averages.")
        if state["greater_is_better"] != self.greater_is_better:
            raise ValueError(
                f"This state was saved with greater_is_better={state['greater_is_better']}, this strategy has "
                f"greater_is_better={self.greater_is_better}: their scores cannot be compared."
            )
        saved = _saved_averages(state)
        listed = {f"{name}." for name in state.get("parts", ())}
        if different := sorted(listed ^ {prefix for prefix in saved if prefix}):
            problem = "missing" if different[0] in listed else "unexpected"
            raise ValueError(f"The average '{different[0]}averaged' of this state is {problem}.")
        if missing := sorted(self._required_parts(state, records) - set(state.get("parts", ()))):
            raise ValueError(f"The average '{missing[0]}.averaged' of this state is missing.")
        # Weights that are not finite have no finite score; of a run that diverged, they are resumed as they are.
        finite = policy.is_usable(state["score"])
        for prefix in saved:
            if f"{prefix}buffers" not in state:
                raise ValueError(f"This state has no '{prefix}buffers', which belong to its '{prefix}averaged'.")
            self.average.check(state[f"{prefix}averaged"], state[f"{prefix}buffers"], finite=finite and not prefix)

    def _check_progress(self, state: Mapping[str, Any], last: Record | None) -> None:
        """Raises ValueError if the members and the score of a state are not those of its last record."""
        members, score = (0, None) if last is None else (last.members, last.score)
        if state["members"] != members:
            raise ValueError(f"This state has {state['members']} members, and {members} in its last record.")
        if repr(state["score"]) != repr(score):
            raise ValueError(f"This state has the score {state['score']}, which its last record does not have.")

    def _required_parts(self, state: Mapping[str, Any], records: Trajectory) -> set[str]:
        """Returns the names of the additional averages that a state with these records must have."""
        return set()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved state. Raises ValueError, changing nothing, for a state of another model or strategy.

        A sharded model accepts DTensors and complete tensors, and each process keeps its rows of them.
        """
        self.check_state_dict(state)
        trajectory = Trajectory.from_json(state["records"])
        saved = _saved_averages(state)
        for prefix in saved:
            average = self._part(prefix.removesuffix(".")) if prefix else self.average
            average.load(state[f"{prefix}averaged"], state[f"{prefix}buffers"])
        for prefix in self._averages().keys() - saved:
            (self.parts[prefix.removesuffix(".")] if prefix else self.average).clear()
        self.score, self.members, self._stale = state["score"], state["members"], state["stale"]
        self.trajectory = trajectory
        if not self.average.is_finite:
            warn_caller(f"The {self.name} weights of this state hold NaN or infinite values: the run has diverged.")

    def _score(self, evaluate: Evaluate, of: str) -> float:
        """Returns the score of the weights now in the model, the same on every rank."""
        with preserved_modes(self.model):
            value = evaluate()
        try:
            score = float(value)
        except (TypeError, ValueError):
            raise TypeError(
                f"evaluate() must return one number, the validation score, got {type(value).__name__}: {value!r}."
            ) from None
        return self._checked(self._agreed(score), of)

    def _score_averaged(self, evaluate: Evaluate, of: str) -> tuple[float, dict[str, torch.Tensor]]:
        """Returns the score of the averaged weights now in the model, and the buffers they were evaluated with."""
        self.recalibrate()
        return self._score(evaluate, of), self.average.buffers_in_model()

    def _agreed(self, score: float) -> float:
        return agree(float(score), computing_device(self.model))

    def _checked(self, score: float, of: str) -> float:
        if not policy.is_usable(score):
            warn_caller(
                f"The validation score of the {of} is {score} at decision point {len(self.trajectory)}: it counts as "
                "worse than any number."
            )
        return score

    def _running_score(self, evaluate: Evaluate | None, running_score: float | None) -> float | None:
        if running_score is not None:
            return self._checked(running_score, "running model")
        return None if evaluate is None else self._score(evaluate, "running model")

    def _restart(self, score: float | None, of: WeightAverage | None = None) -> None:
        """Θ_A := Θ, or the average `of`."""
        self.average.assign(of)
        self.members = policy.next_members(self.members, policy.HARD)
        self.score = score
        # The statistics in the model are those of the running weights.
        self._stale = False

    def _lookahead(
        self, weight: float, evaluate: Evaluate, of: WeightAverage | None = None, *, called: str | None = None
    ) -> tuple[float, Callable[[], None]]:
        """Returns the score of the average with the running weights, and a function that accepts that average.

        Another average `of` the model may take the place of the running weights.
        """
        with self.average.lookahead(weight, of):
            score, buffers = self._score_averaged(evaluate, called or f"{self.name} weights")

        def accept() -> None:
            self.average.blend(weight, of)
            self.average.copy_buffers(buffers)
            self.members = policy.next_members(self.members, policy.SOFT)
            self.score = score
            self._stale = False

        return score, accept

    def _take_snapshot(self, weight: float) -> None:
        """Adds the running weights to the average without an evaluation."""
        if self.members == 0:
            self._restart(None)
        else:
            self.average.blend(weight, with_buffers=True)
            self.members = policy.next_members(self.members, policy.SOFT)
            self.score = None
            self._stale = True

    def _add_snapshot(self, weight: float, evaluate: Evaluate | None, running_score: float | None) -> Outcome:
        """Adds the running weights to the average regardless of their score; evaluates the average if possible."""
        if self.members == 0:
            score = self._running_score(evaluate, running_score)
            return Outcome(Decision.INIT, lambda: self._restart(score), running_score)
        if evaluate is None:
            return Outcome(Decision.SOFT, lambda: self._take_snapshot(weight), running_score)
        _, accept = self._lookahead(weight, evaluate)
        return Outcome(Decision.SOFT, accept, running_score)

    def _refresh_statistics(self) -> None:
        """Called with the ensemble in the model: recomputes its BatchNorm statistics if they are stale."""
        if self._stale:
            self.recalibrate()
            self.average.copy_buffers()
            self._stale = False

    def _require_members(self) -> None:
        if self.members == 0:
            raise RuntimeError(f"The {self.name} ensemble is empty: {self.why_empty()}.")

    def why_empty(self, metric: str = "score") -> str:
        """Returns why the strategy has no weights."""
        if not self.trajectory:
            return "update() has not been called yet"
        scores = self._deciding_scores()
        finite = any(policy.is_usable(score) for score in scores) or all(score is None for score in scores)
        return "no snapshot was due" if finite else f"no decision point had a finite {metric}"

    def _deciding_scores(self) -> list[float | None]:
        """Returns the scores without which there are no weights, one per decision point."""
        return [record.running_score for record in self.trajectory]


def keyword_options(kind: type[Strategy]) -> dict[str, inspect.Parameter]:
    """Returns the keyword arguments of a strategy by name, those of its base classes included."""
    found: dict[str, inspect.Parameter] = {}
    for one in kind.__mro__:
        if "__init__" in vars(one):
            found = dict(inspect.signature(one.__init__).parameters) | found  # type: ignore[misc]
    return {name: parameter for name, parameter in found.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY}


def take_step(strategies: Iterable[Strategy]) -> None:
    """Calls `step()` of several strategies that follow the same run."""
    strategies = list(strategies)
    if any(strategy.average.is_in_model for strategy in strategies):
        raise RuntimeError(
            "step() was called inside swapped() or an evaluation, where the model holds averaged weights. Call it "
            "after an optimizer step, where the model holds the running weights."
        )
    with uninterrupted():
        take_snapshots([update for strategy in strategies for update in strategy._after_step()])


@contextmanager
def preserved_modes(model: nn.Module) -> Iterator[None]:
    """Restores training and evaluation mode on leaving: a validation that forgets to would turn off dropout."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _check_value(state: Mapping[str, Any], key: str, ours: Any) -> None:
    """Raises ValueError if a value of a saved state is missing, or not of the kind of our own."""
    if key not in state:
        # States of 0.1.0 have no "parts", which lists the additional averages.
        if key != "parts" and not key.endswith((".averaged", ".buffers")):
            raise ValueError(f"This state has no {key!r}.")
        return
    value = state[key]
    if key == "score":
        fits = value is None or is_number(value)
    elif isinstance(ours, int) and not isinstance(ours, bool):
        fits = is_whole_number(value, 0)
    elif key == "parts":
        fits = isinstance(value, list) and all(isinstance(name, str) for name in value)
    else:
        fits = isinstance(value, Mapping if isinstance(ours, Mapping) else type(ours))
    if not fits:
        expected = "a whole number of at least 0" if isinstance(ours, int) else f"a {type(ours).__name__}"
        raise ValueError(f"{key!r} of this state is {value!r}. Expected {'a number' if key == 'score' else expected}.")


def _saved_averages(state: Mapping[str, Any]) -> list[str]:
    """Returns the prefixes under which a state holds averages that are not empty."""
    return [key.removesuffix("averaged") for key in state if key.endswith("averaged") and state[key]]


def nothing() -> None:
    """No-op: commits a decision that changes nothing."""
