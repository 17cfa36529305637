"""When a run decides: by epochs, optimizer steps or evaluations, and what part of its time and data that may take."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from aswa_hf._utils.checks import is_number, is_whole_number
from aswa_hf._utils.distributed import agree

Unit = Literal["epoch", "step", "evaluation"]


@dataclass(frozen=True)
class Every:
    """A decision every `count` epochs, steps or evaluations, parsed from what the user gave as `every`."""

    unit: Unit
    count: int
    given: Any

    @classmethod
    def parse(cls, every: Any, *, evaluations: bool = True) -> Every:
        """Raises ValueError unless `every` says when to decide; `evaluations` allows "evaluation"."""
        if is_whole_number(every):
            return cls("epoch", every, every)
        if isinstance(every, str) and every in (("epoch", "evaluation") if evaluations else ("epoch",)):
            return cls(every, 1, every)  # type: ignore[arg-type]
        found = re.fullmatch(r"\s*(\d+)\s+(epoch|step)s?\s*", every) if isinstance(every, str) else None
        if found and int(found[1]):
            return cls(found[2], int(found[1]), every)  # type: ignore[arg-type]
        named = "'epoch', 'evaluation'" if evaluations else "'epoch'"
        raise ValueError(
            f"every must be {named}, a whole number of epochs, or a number of optimizer steps as in '500 steps', "
            f"got {every!r}."
        )

    @property
    def by_steps(self) -> bool:
        return self.unit == "step"

    def is_due_at_step(self, step: int, last: int | None) -> bool:
        """Whether a run that counts steps decides at this one; the `last` step of a run always is a decision point."""
        return self.by_steps and (step % self.count == 0 or step == last)


class EvaluationBudget:
    """Keeps what averaging adds to a run, its evaluations above all, within a share of the run's time.

    The clock is that of rank 0, so that all ranks skip the same decision points. The first evaluations are always
    made: only then is it known how long they take. So are those at the end of the run.
    """

    def __init__(self, share: float | None):
        self.share = share
        self.spent = 0.0
        """Seconds spent on decisions."""
        self.skipped = 0
        """Decision points without a decision."""
        self._expected = 0.0
        self._began = time.perf_counter()
        self._measuring = False

    @property
    def seconds(self) -> float:
        """How long the run has taken so far."""
        return time.perf_counter() - self._began

    def exceeded(self, device: torch.device, *, is_last: bool = False) -> bool:
        """Whether one more decision would take more than the share; counts the decision point as skipped if so.

        The last one of a run is not skipped: it may be its best one, and what a run ends with depends on it. All ranks
        must call it.
        """
        if self.share is None or is_last:
            return False
        mine = self.spent + self._expected > self.share * (self.seconds + self._expected)
        exceeded = bool(agree(float(mine), device))
        self.skipped += exceeded
        return exceeded

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Counts the time until the block ends."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._expected = time.perf_counter() - began
            self.spent += self._expected

    def why_skipped(self) -> str:
        return (
            f"Decisions have taken {self.spent:.1f} of {self.seconds:.1f} seconds, and another one would make that "
            f"more than max_eval_share={self.share}: decision points are skipped until it would not. This is reported "
            "once."
        )

    def state_dict(self) -> dict[str, float]:
        """Returns the times so far, for a checkpoint."""
        return {
            "spent": self.spent,
            "expected": self._expected,
            "seconds": self.seconds,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the times of a saved run."""
        self.spent, self._expected, self.skipped = state["spent"], state["expected"], int(state["skipped"])
        self._began = time.perf_counter() - state["seconds"]


def check_share(share: Any) -> None:
    """Raises ValueError unless `max_eval_share` is a share of the time, or None."""
    if share is not None and not (is_number(share) and 0 < share <= 1):
        raise ValueError(
            f"max_eval_share must be a share of the time such as 0.1, above 0 and at most 1, or None, got {share!r}."
        )


def check_subset(size: Any) -> None:
    """Raises ValueError unless `eval_subset` is a number of examples, a fraction, or None."""
    fraction = isinstance(size, float) and 0 < size < 1
    if size is not None and not fraction and not is_whole_number(size):
        raise ValueError(
            f"eval_subset must be a whole number of examples, a fraction between 0 and 1, or None, got {size!r}."
        )


def fixed_subset(dataset: Any, size: int | float, seed: int = 0) -> Any:
    """Returns the same random examples of a dataset at every call: `size` of them, or that fraction.

    They keep the order of the dataset. If it has no length, they are its first `size` examples.
    """
    check_subset(size)
    if not hasattr(dataset, "__len__"):
        if isinstance(size, int) and hasattr(dataset, "take"):
            return dataset.take(size)
        raise ValueError(
            f"eval_subset={size!r} needs a dataset with a length, got {type(dataset).__name__}. With a streamed "
            "dataset that has take(), give a whole number of examples."
        )
    count = max(1, int(size * len(dataset))) if isinstance(size, float) else size
    if count >= len(dataset):
        return dataset
    indices = sorted(random.Random(seed).sample(range(len(dataset)), count))
    return dataset.select(indices) if hasattr(dataset, "select") else torch.utils.data.Subset(dataset, indices)
