"""`Strategy`: what all ways to turn the weights of a run into the weights it ends with have in common.

All share one interface, so that several can shadow the same run without influencing it or each other:

    strategy.step()              after every optimizer step (only EMA needs it)
    strategy.update(evaluate)    at every decision point, usually the end of an epoch
    with strategy.swapped(): …   the strategy's weights in the model
    strategy.apply()             the strategy's weights in the model, for good
"""

from __future__ import annotations

import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from aswa_hf import policy
from aswa_hf.averaging import WeightAverage
from aswa_hf.batchnorm import Batches, Forward, Recalibration
from aswa_hf.distributed import agree
from aswa_hf.rng import preserved_rng
from aswa_hf.sharding import computing_device
from aswa_hf.signals import uninterrupted
from aswa_hf.trajectory import Decision, Record, Trajectory

Evaluate = Callable[[], Any]
BATCHNORM_POLICIES = ("recalibrate", "average", "copy")


@dataclass(frozen=True)
class Outcome:
    """A decision, the scores it was taken on, and what carries it out."""

    decision: Decision
    commit: Callable[[], None]
    running_score: float | None = None
    lookahead_score: float | None = None


class Strategy(ABC):
    """What all strategies share: the average, its score and history, swapping, saving.

    `batchnorm` says how BatchNorm statistics follow averaged weights: "recalibrate" computes them afresh on
    `train_batches` (at most `bn_batches` of them) whenever averaged weights are evaluated, "average" averages them
    like weights, "copy" takes the running model's. `device="cpu"` keeps the average off the accelerator.
    """

    name: ClassVar[str]
    averages: ClassVar[bool] = True
    """Whether weights are ever averaged; otherwise BatchNorm statistics need no attention."""

    def __init__(
        self,
        model: nn.Module,
        *,
        greater_is_better: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        batchnorm: str = "recalibrate",
        train_batches: Batches | None = None,
        bn_batches: int | None = None,
        bn_forward: Forward | None = None,
    ):
        if batchnorm not in BATCHNORM_POLICIES:
            raise ValueError(f"batchnorm must be one of {', '.join(BATCHNORM_POLICIES)}, got {batchnorm!r}.")
        if not self.averages:
            batchnorm = "copy"
        self.average = WeightAverage(model, dtype=dtype, device=device, average_buffers=batchnorm == "average")
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

    def step(self) -> None:  # noqa: B027 (nothing to do is the usual answer)
        """To be called after every optimizer step; most strategies only look at decision points."""

    def update(
        self,
        evaluate: Evaluate | None = None,
        running_score: float | None = None,
        *,
        step: int | None = None,
        epoch: float | None = None,
    ) -> Decision:
        """A decision point: looks at the weights now in the model and decides what becomes of the ensemble.

        `evaluate()` gives the validation score of whatever weights are in the model. The running model's own score
        may be passed as `running_score` where it is known. If `evaluate` raises, nothing has changed.
        """
        if evaluate is not None and not callable(evaluate):
            raise TypeError(
                f"update() takes a function that returns the validation score, got {type(evaluate).__name__}. A score "
                "of the running model that is known already goes in as running_score=."
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
                )
            )
        return outcome.decision

    @abstractmethod
    def _decide(self, evaluate: Evaluate | None, running_score: float | None, step: int | None) -> Outcome:
        """Takes the decision; nothing changes before it is committed."""

    @property
    def alphas(self) -> list[float]:
        """α_i, the weight of the snapshot of every decision point in the ensemble; they sum to 1."""
        return self.trajectory.alphas

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The ensemble in the model, until the block is left; then the running weights again, bit for bit."""
        self._require_members()
        with self.average.swapped():
            self._refresh_statistics()
            yield

    def apply(self) -> None:
        """Puts the ensemble into the model, for good."""
        if self._stale:
            # Before anything is overwritten: a failing pass over the training batches leaves the running weights.
            with self.swapped():
                pass
        self._require_members()
        self.average.apply()

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """Everything needed to go on: tensors under "averaged" and "buffers", plain values elsewhere.

        Of a sharded model the averages are DTensors, as the weights are in its own `state_dict()`: each process has
        its rows, and all together give the whole with `tensor.full_tensor()`.
        """
        averaged, buffers = self.average.whole()

        def tensors(of: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {name: tensor.clone() if copy else tensor for name, tensor in of.items()}

        return {
            "strategy": self.name,
            "greater_is_better": self.greater_is_better,
            "score": self.score,
            "members": self.members,
            "stale": self._stale,
            "records": self.trajectory.to_json(),
            "averaged": tensors(averaged),
            "buffers": tensors(buffers),
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Refuses a state of another model, strategy or direction."""
        if state.get("strategy") != self.name:
            raise ValueError(f"This is the state of strategy {state.get('strategy')!r}, expected {self.name!r}.")
        if state["greater_is_better"] != self.greater_is_better:
            raise ValueError(
                f"This state was saved with greater_is_better={state['greater_is_better']}, this strategy has "
                f"greater_is_better={self.greater_is_better}: their scores cannot be compared."
            )
        if state["averaged"]:
            self.average.check(state["averaged"], state["buffers"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state. A state of another model or strategy is refused, and nothing has changed.

        A sharded model takes DTensors and whole tensors alike, and keeps its rows of them.
        """
        self.check_state_dict(state)
        trajectory = Trajectory.from_json(state["records"])
        if state["averaged"]:
            self.average.load(state["averaged"], state["buffers"])
        else:
            self.average.clear()
        self.score, self.members, self._stale = state["score"], state["members"], state["stale"]
        self.trajectory = trajectory

    def _score(self, evaluate: Evaluate, of: str) -> float:
        """The score of the weights now in the model, the same on every rank."""
        value = evaluate()
        try:
            score = float(value)
        except (TypeError, ValueError):
            raise TypeError(
                f"evaluate() must return one number, the validation score, got {type(value).__name__}: {value!r}."
            ) from None
        return self._checked(self._agreed(score), of)

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

    def _restart(self, score: float | None) -> None:
        """Θ_A := Θ."""
        self.average.assign()
        self.members = policy.next_members(self.members, policy.HARD)
        self.score = score
        # The statistics in the model are those of the running weights.
        self._stale = False

    def _lookahead(self, weight: float, evaluate: Evaluate) -> tuple[float, Callable[[], None]]:
        """The score of the average with the running weights, and what takes that average over."""
        with self.average.lookahead(weight):
            self.recalibrate()
            score = self._score(evaluate, "look-ahead" if self.name == "aswa" else f"{self.name} weights")
            # The statistics the look-ahead was judged with, before the running model's come back.
            buffers = self.average.buffers_in_model()

        def accept() -> None:
            self.average.blend(weight)
            self.average.copy_buffers(buffers)
            self.members = policy.next_members(self.members, policy.SOFT)
            self.score = score
            self._stale = False

        return score, accept

    def _take_snapshot(self, weight: float) -> None:
        """Adds the running weights to the average without asking for a score."""
        if self.members == 0:
            self._restart(None)
        else:
            self.average.blend(weight, with_buffers=True)
            self.members = policy.next_members(self.members, policy.SOFT)
            self.score = None
            self._stale = True

    def _add_snapshot(self, weight: float, evaluate: Evaluate | None, running_score: float | None) -> Outcome:
        """Adds the running weights to the average whatever their score, and scores the average if it can."""
        if self.members == 0:
            score = self._running_score(evaluate, running_score)
            return Outcome(Decision.INIT, lambda: self._restart(score), running_score)
        if evaluate is None:
            return Outcome(Decision.SOFT, lambda: self._take_snapshot(weight), running_score)
        _, accept = self._lookahead(weight, evaluate)
        return Outcome(Decision.SOFT, accept, running_score)

    def _refresh_statistics(self) -> None:
        """Called with the ensemble in the model: computes its BatchNorm statistics if they are out of date."""
        if self._stale:
            self.recalibrate()
            self.average.copy_buffers()
            self._stale = False

    def _require_members(self) -> None:
        if self.members == 0:
            raise RuntimeError(
                f"The {self.name} ensemble is empty: update() has taken no snapshot yet. It takes the first one at "
                "the first decision point with a finite score."
            )


def nothing() -> None:
    """What a rejection changes."""


def warn_caller(message: str) -> None:
    """Warns at the line outside this package that led here."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "aswa_hf":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
