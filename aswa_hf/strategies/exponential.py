"""Exponential moving averages, which are updated after optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from aswa_hf import policy
from aswa_hf._utils.checks import check_flag, check_number, check_whole_number, is_whole_number
from aswa_hf._utils.warnings import warn_caller
from aswa_hf.averaging import WeightAverage
from aswa_hf.strategies.base import Evaluate, Outcome, Strategy, nothing
from aswa_hf.trajectory import Decision, Record, Trajectory


class StepAverage(Strategy):
    """Base class of averages that are updated after every `every`-th optimizer step, whatever the scores are."""

    def __init__(self, model: nn.Module, *, every: int = 1, **options: Any):
        super().__init__(model, **options)
        check_whole_number("every", every)
        self.every = every
        self.steps = 0

    def _rule(self) -> dict[str, Any]:
        return super()._rule() | {"every": self.every}

    def why_empty(self, metric: str = "score") -> str:
        if self.steps < self.every:
            return f"it averages every {self.every} steps, and there were {self.steps}"
        return super().why_empty(metric)

    def _require_steps(self) -> None:
        if self.steps == 0:
            raise RuntimeError(
                f"{type(self).__name__} averages optimizer steps: call its step() after each of them, before update()."
            )

    def _decide(self, evaluate: Evaluate | None, running_score: float | None, step: int | None) -> Outcome:
        self._require_steps()
        if self.members == 0:
            return Outcome(Decision.REJECT, nothing, running_score)
        # Since the last decision each rank has averaged the buffers of its own batches.
        self.average.share_buffers()
        score = None
        if evaluate is not None:
            with self.swapped():
                score = self._score(evaluate, f"{self.name} weights")

        def commit() -> None:
            self.score = score

        first = not any(record.members for record in self.trajectory)
        return Outcome(Decision.INIT if first else Decision.SOFT, commit, running_score)

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        return super().state_dict(copy=copy) | {"steps": self.steps}

    def _check_progress(self, state: Mapping[str, Any], last: Record | None) -> None:
        updates, before = state["steps"] // self.every, 0 if last is None else last.members
        # Before the first step, an EMA may have taken one snapshot per decision point.
        taken = [record for place, record in enumerate(state["records"]) if record["members"] == place + 1]
        # Between two decision points the average grows, which makes its score unknown.
        grown = state["members"] > before
        if not updates <= state["members"] <= updates + len(taken) or (grown and state["score"] is not None):
            raise ValueError(
                f"This state has {state['members']} members and the score {state['score']} after {state['steps']} "
                f"steps. Expected {updates} members with every={self.every}, and no score."
            )
        if not grown:
            super()._check_progress(state, last)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.steps = state["steps"]


class EMA(StepAverage):
    """Exponential moving average: Θ_A := decay · Θ_A + (1 − decay) · Θ after every `every`-th optimizer step.

    `warmup` lets the decay grow with the number of updates t as (1 + t) / (10 + t), up to `decay`, so that a short
    run is not dominated by its first weights.
    """

    name = "ema"

    def __init__(self, model: nn.Module, *, decay: float = 0.999, warmup: bool = False, **options: Any):
        super().__init__(model, **options)
        check_number("decay", decay, 0, 1, below=True)
        check_flag("warmup", warmup)
        self.decay = decay
        self.warmup = warmup

    def _rule(self) -> dict[str, Any]:
        return super()._rule() | {"decay": self.decay, "warmup": self.warmup}

    def _after_step(self) -> Iterable[tuple[WeightAverage, float]]:
        self.steps += 1
        if self.steps % self.every:
            return ()
        weight = 1 - self._decay(self.members) if self.members else 1.0
        self.members, self.score, self._stale = self.members + 1, None, self.members > 0
        return [(self.average, weight)]

    def _decay(self, updates: int) -> float:
        return min(self.decay, (1 + updates) / (10 + updates)) if self.warmup else self.decay

    def _decide(self, evaluate: Evaluate | None, running_score: float | None, step: int | None) -> Outcome:
        if self.steps == 0:
            warn_caller(
                "EMA.step() was not called after optimizer steps: averaging one snapshot per decision point instead."
            )
            return self._add_snapshot(1 - self._decay(self.members), evaluate, running_score)
        return super()._decide(evaluate, running_score, step)

    @property
    def alphas(self) -> list[float]:
        """For each decision point, the total weight of the snapshots taken since the previous one."""
        return self._shares([record.members for record in self.trajectory])

    def _shares(self, updates: list[int]) -> list[float]:
        """Returns the weights of the updates between decision points, given how many there were until each."""
        last = updates[-1] if updates else 0
        # remaining[t]: the weight that later updates leave to the first t of them
        remaining = [1.0] * (last + 1)
        for t in range(last - 1, 0, -1):
            remaining[t] = remaining[t + 1] * self._decay(t)
        totals = [remaining[count] if count else 0.0 for count in updates]
        return [total - before for total, before in zip(totals, [0.0, *totals], strict=False)]


class BestEMA(EMA):
    """The exponential moving average at the decision point where it did best on validation."""

    name = "best-ema"

    def __init__(self, model: nn.Module, **options: Any):
        super().__init__(model, **options)
        self.ema = self._part("ema")
        self._updates = [0]  # until each decision point, and until now

    def _after_step(self) -> Iterable[tuple[WeightAverage, float]]:
        self.steps += 1
        if self.steps % self.every:
            return ()
        weight = 1 - self._decay(self._updates[-1]) if self._updates[-1] else 1.0
        self._updates[-1] += 1
        return [(self.ema, weight)]

    def _decide(self, evaluate: Evaluate | None, running_score: float | None, step: int | None) -> Outcome:
        self._require_steps()
        if evaluate is None:
            raise TypeError("BestEMA decides by validation: update() needs a function that returns the score.")
        score: float | None = None
        buffers: dict[str, Tensor] = {}
        if self._updates[-1]:
            self.ema.share_buffers()
            with self.ema.swapped():
                score, buffers = self._score_averaged(evaluate, "ema weights")
        decision = Decision(
            policy.decide(self.members, self.score, score, None, greater_is_better=self.greater_is_better)
        )

        def commit() -> None:
            if decision is not Decision.REJECT:
                self._restart(score, self.ema)
                self.average.copy_buffers(buffers)
            self._updates.append(self._updates[-1])

        return Outcome(decision, commit, running_score, snapshot_score=score)

    def _deciding_scores(self) -> list[float | None]:
        return [record.snapshot_score for record in self.trajectory]

    @property
    def alphas(self) -> list[float]:
        """For each decision point, the total weight of the steps since the previous one."""
        best = max((r.index for r in self.trajectory if r.decision is not Decision.REJECT), default=-1)
        return self._shares(self._updates[: best + 1]) + [0.0] * (len(self.trajectory) - best - 1)

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        return super().state_dict(copy=copy) | {"updates": list(self._updates)}

    def _check_progress(self, state: Mapping[str, Any], last: Record | None) -> None:
        Strategy._check_progress(self, state, last)
        updates = state["updates"]
        whole = all(is_whole_number(count, 0) for count in updates) and updates == sorted(updates)
        if not whole or len(updates) != len(state["records"]) + 1 or updates[-1] != state["steps"] // self.every:
            raise ValueError(
                f"'updates' of this state are {updates}. Expected the number of updates until each of "
                f"{len(state['records'])} decision points, and until now, after {state['steps']} steps."
            )

    def _required_parts(self, state: Mapping[str, Any], records: Trajectory) -> set[str]:
        return {"ema"} if state["updates"][-1] else set()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._updates = list(state["updates"])


class BEMA(StepAverage):
    """Bias-corrected EMA: Θ_A := EMA_t + α_t (Θ_t − Θ_0), with Θ_0 the weights when the strategy is built.

    After every `every`-th of t optimizer steps, EMA_t := (1 − β_t) EMA_{t−1} + β_t Θ_t, where β_t = (ρ + t)^−κ and
    α_t = (ρ + t)^−η (Block and others, 2025). The defaults are those of TRL's `BEMACallback`. A run of fewer than
    `every` steps has no average.
    """

    name = "bema"

    def __init__(
        self,
        model: nn.Module,
        *,
        kappa: float = 0.5,
        eta: float = 0.2,
        rho: float = 10.0,
        every: int = 400,
        **options: Any,
    ):
        super().__init__(model, every=every, **options)
        check_number("kappa", kappa, 0, 1)
        check_number("eta", eta, 0)
        check_number("rho", rho, 1)
        self.kappa, self.eta, self.rho = kappa, eta, rho
        self.initial, self.ema = self._part("initial"), self._part("ema")
        self.initial.assign()
        self.ema.assign()

    def _rule(self) -> dict[str, Any]:
        return super()._rule() | {"kappa": self.kappa, "eta": self.eta, "rho": self.rho}

    def _after_step(self) -> Iterable[tuple[WeightAverage, float]]:
        self.steps += 1
        if self.steps % self.every == 0:
            self.ema.blend(self._beta(self.steps), with_buffers=True)
            alpha = self._alpha(self.steps)
            self.average.combine([(1.0, self.ema), (alpha, None), (-alpha, self.initial)])
            self.members, self.score, self._stale = self.members + 1, None, True
        return ()

    def _required_parts(self, state: Mapping[str, Any], records: Trajectory) -> set[str]:
        return {"initial", "ema"}

    def _beta(self, steps: int) -> float:
        beta: float = (self.rho + steps) ** -self.kappa
        return beta

    def _alpha(self, steps: int) -> float:
        alpha: float = (self.rho + steps) ** -self.eta
        return alpha

    @property
    def alphas(self) -> list[float]:
        """For each decision point, the total weight of the snapshots taken since the previous one.

        That of the initial weights, which the correction makes small or negative, counts for the first of them.
        """
        updates = self.trajectory[-1].members if self.trajectory else 0
        weights = [1.0]
        for update in range(1, updates + 1):
            beta = self._beta(update * self.every)
            weights = [weight * (1 - beta) for weight in weights] + [beta]
        if updates:
            weights[0] -= self._alpha(updates * self.every)
            weights[-1] += self._alpha(updates * self.every)
        shares, before = [], -1
        for record in self.trajectory:
            shares.append(sum(weights[before + 1 : record.members + 1]) if record.members else 0.0)
            before = record.members if record.members else before
        return shares
