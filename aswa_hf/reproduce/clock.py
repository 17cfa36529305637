"""How long the rest of a grid will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from aswa_hf.reproduce.runs import RESULTS, Run, epochs_behind, epochs_logged, seconds_taken


class Clock:
    """The time left, judged by the runs that are over, those of earlier calls included.

    An epoch of training is taken to cost what it did in the most similar runs; what is trained already and has to be
    evaluated only, what that did.
    """

    def __init__(
        self,
        waiting: Sequence[Run],
        output_dir: Path,
        earlier: Sequence[Run] = (),
        now: Callable[[], float] = time.monotonic,
    ):
        self.output_dir = output_dir
        self.now = now
        self.trained = {run for run in waiting if (output_dir / run.name / RESULTS).exists()}
        self.work = {run: self._work(run) for run in waiting}
        self.current: Run | None = None
        self.began = self.saved = 0.0
        self.rates = {
            run: seconds / run.epochs
            for run in earlier
            if run not in self.work and (seconds := seconds_taken(run, output_dir)) is not None
        }

    def _work(self, run: Run) -> float:
        return 1.0 if run in self.trained else max(1.0, run.epochs - epochs_behind(run, self.output_dir))

    def start(self, run: Run) -> None:
        self.current, self.began = run, self.now()
        self.saved = epochs_behind(run, self.output_dir)

    def stop(self, *, well: bool = True) -> float:
        """The current run is over; gives the seconds it took."""
        run, self.current = self.current, None
        if run is None:
            return 0.0
        spent, work = self.now() - self.began, self.work.pop(run)
        if well:
            self.rates[run] = spent / work
        return spent

    def left(self) -> float | None:
        """The seconds till the end of the grid, or None as long as nothing is known."""
        rate = None
        if self.current is not None and self.current not in self.trained:
            done = epochs_logged(self.current, self.output_dir) - self.saved
            rate = (self.now() - self.began) / done if done > 0 else None
        total = 0.0
        for run, work in self.work.items():
            known = self._rate(run)
            # What the current run shows of itself says more than what others did.
            known = rate if rate is not None and (known is None or run == self.current) else known
            if known is None:
                return None
            spent = self.now() - self.began if run == self.current else 0.0
            total += max(0.0, known * work - spent)
        return total

    def _rate(self, run: Run) -> float | None:
        """The seconds a unit of work took in the runs most like this one."""
        for names in (("dataset", "model"), ("dataset",), ()):
            rates = [
                rate
                for other, rate in self.rates.items()
                if (other in self.trained) == (run in self.trained)
                and all(getattr(other, name) == getattr(run, name) for name in names)
            ]
            if rates:
                return sum(rates) / len(rates)
        return None

    def left_text(self) -> str:
        if not self.work:
            return "nothing left"
        left = self.left()
        return "time left unknown" if left is None else f"about {shown(left)} left"


def shown(seconds: float) -> str:
    """A duration as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
