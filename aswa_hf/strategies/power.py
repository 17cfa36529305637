"""Power-function EMA with widths that are chosen after training (Karras and others, 2024)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from aswa_hf._utils.checks import check_number, check_whole_number
from aswa_hf.averaging import WeightAverage
from aswa_hf.strategies.base import Evaluate, Outcome
from aswa_hf.strategies.exponential import StepAverage
from aswa_hf.trajectory import Trajectory

# How far a reconstructed profile of weights over time may be from the exact one, relative to its norm.
MAX_ERROR = 0.1
# The least and the greatest width; that of equal weights, γ = 0, is 0.289.
WIDTHS = (0.001, 0.28)


def relative_width(gamma: float) -> float:
    """Returns the standard deviation of the profile τ^γ on [0, 1]."""
    width: float = ((gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3))) ** 0.5
    return width


def exponent(width: float) -> float:
    """Returns γ, the inverse of `relative_width`."""
    low, high = 0.0, 1e4
    for _ in range(100):  # bisection, to the last bit
        middle = (low + high) / 2
        low, high = (middle, high) if relative_width(middle) > width else (low, middle)
    return low


def inner_products(t_a: Tensor, gamma_a: Tensor, t_b: Tensor, gamma_b: Tensor) -> Tensor:
    """Returns ∫ p_a(τ) p_b(τ) dτ for all pairs of profiles p(τ) = (γ + 1) τ^γ / t^(γ + 1) on [0, t]."""
    t_a, gamma_a = t_a[:, None], gamma_a[:, None]
    powers = torch.where(t_a < t_b, gamma_b, -gamma_a)
    return (gamma_a + 1) * (gamma_b + 1) * (t_a / t_b) ** powers / ((gamma_a + gamma_b + 1) * torch.maximum(t_a, t_b))


class PowerEMA(StepAverage):
    """An EMA whose decay follows the length of the run: Θ_A := β_t Θ_A + (1 − β_t) Θ, β_t = (1 − 1/t)^(γ + 1).

    The width of such an average is its standard deviation in time as a fraction of the run. Two widths are tracked,
    `narrow` and `wide`; the wide one is the result. Any width between them is reconstructed after training, as is a
    width around them if the pairs of earlier decision points are kept as well: that of the last one and `snapshots`
    others, spread over the run (each takes two copies of the weights):

    >>> with power.reconstructed(0.07):
    ...     validate(model)
    >>> power.apply(0.07)
    """

    name = "power-ema"

    def __init__(
        self, model: nn.Module, *, narrow: float = 0.05, wide: float = 0.1, snapshots: int = 0, **options: Any
    ):
        super().__init__(model, **options)
        for name, width in (("narrow", narrow), ("wide", wide)):
            check_number(name, width, *WIDTHS)
        if narrow >= wide:
            raise ValueError(f"narrow must be less than wide, got narrow={narrow} and wide={wide}.")
        check_whole_number("snapshots", snapshots, 0)
        self.widths = {"wide": wide, "narrow": narrow}
        self.snapshots = snapshots
        self._gammas = {name: exponent(width) for name, width in self.widths.items()}
        self._part("narrow")

    def _after_step(self) -> Iterable[tuple[WeightAverage, float]]:
        self.steps += 1
        if self.steps % self.every:
            return ()
        self.members, self.score, self._stale = self.members + 1, None, self.members > 0
        averages = {"wide": self.average, "narrow": self.parts["narrow"]}
        return [(averages[name], 1 - (1 - 1 / self.members) ** (gamma + 1)) for name, gamma in self._gammas.items()]

    def _decide(self, evaluate: Evaluate | None, running_score: float | None, step: int | None) -> Outcome:
        self.parts["narrow"].share_buffers()
        outcome = super()._decide(evaluate, running_score, step)

        def commit() -> None:
            outcome.commit()
            if self.snapshots and self.members:
                self._keep()

        return Outcome(outcome.decision, commit, outcome.running_score)

    def _keep(self) -> None:
        """Keeps the two averages; if there are too many, drops an earlier pair, so that the others stay spread out.

        The pair of the last decision point comes on top of `snapshots`: until the next step it equals the averages.
        """
        kept = sorted({0, *self._kept(), self.members})
        if len(kept) > self.snapshots + 2:
            # Squares, as late steps have most of the weight.
            updates = min(zip(kept, kept[1:], kept[2:], strict=False), key=lambda near: near[2] ** 2 - near[0] ** 2)[1]
            del self.parts[f"wide-{updates}"], self.parts[f"narrow-{updates}"]
        self._part(f"wide-{self.members}").assign(self.average)
        self._part(f"narrow-{self.members}").assign(self.parts["narrow"])

    def _kept(self) -> list[int]:
        """Returns after how many updates the kept pairs were taken."""
        names = [name for name, part in self.parts.items() if name.startswith("wide-") and not part.is_empty]
        return sorted(int(name.removeprefix("wide-")) for name in names)

    @contextmanager
    def reconstructed(self, width: float) -> Iterator[None]:
        """Puts the average of another width into the model until the block ends."""
        with self._reconstruct(width).swapped():
            self.recalibrate()
            yield

    def apply(self, width: float | None = None) -> None:
        """Puts the wide average into the model permanently, or that of another width."""
        if width is None:
            super().apply()
            return
        average = self._reconstruct(width)
        with average.swapped():
            self.recalibrate()
            buffers = average.buffers_in_model()
        average.copy_buffers(buffers)
        average.apply()

    def _reconstruct(self, width: float) -> WeightAverage:
        self._require_members()
        average = self._new_average()
        average.combine(self._coefficients(width))
        average.copy_buffers(self.average.copied)
        return average

    def _coefficients(self, width: float) -> list[tuple[float, WeightAverage | None]]:
        """Returns the combination of averages whose profile is nearest to that of a width, by least squares."""
        check_number("width", width, *WIDTHS)
        found: list[tuple[str, int, WeightAverage]] = [
            (name, updates, self.parts[f"{name}-{updates}"])
            for updates in self._kept()
            if updates < self.members
            for name in self.widths
        ]
        found += [("wide", self.members, self.average), ("narrow", self.members, self.parts["narrow"])]
        times = torch.tensor([updates / self.members for _, updates, _ in found], dtype=torch.float64)
        gammas = torch.tensor([self._gammas[name] for name, _, _ in found], dtype=torch.float64)
        time, gamma = torch.ones(1, dtype=torch.float64), torch.tensor([exponent(width)], dtype=torch.float64)
        products, target = inner_products(times, gammas, times, gammas), inner_products(times, gammas, time, gamma)
        solution = torch.linalg.lstsq(products, target, driver="gelsd").solution
        norm = inner_products(time, gamma, time, gamma)
        error = (norm - 2 * solution.T @ target + solution.T @ products @ solution) / norm
        if error.item() > MAX_ERROR**2:
            tracked = " and ".join(f"{width:g}" for width in sorted(self.widths.values()))
            raise ValueError(
                f"The width {width} cannot be reconstructed from the tracked widths {tracked} (error "
                f"{error.sqrt().item():.3f}, at most {MAX_ERROR}). Choose one nearer to them, or train with widths "
                "nearer to it, or with more snapshots=, which update() takes."
            )
        # The profiles integrate to 1, and so must their combination.
        coefficients = (solution[:, 0] / solution.sum()).tolist()
        return [(coefficient, part) for coefficient, (_, _, part) in zip(coefficients, found, strict=True)]

    @property
    def alphas(self) -> list[float]:
        """For each decision point, the total weight of the steps since the previous one in the wide average."""
        last = self.trajectory[-1].members if self.trajectory else 0
        totals = [(record.members / last) ** (self._gammas["wide"] + 1) if last else 0.0 for record in self.trajectory]
        return [total - before for total, before in zip(totals, [0.0, *totals], strict=False)]

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        return super().state_dict(copy=copy) | {"widths": list(self.widths.values())}

    def _required_parts(self, state: Mapping[str, Any], records: Trajectory) -> set[str]:
        kept = {part.partition("-")[2] for part in state.get("parts", ()) if part.startswith(("wide-", "narrow-"))}
        pairs = {f"{name}-{updates}" for name in self.widths for updates in kept}
        return pairs | ({"narrow"} if state["members"] else set())

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        super().check_state_dict(state)
        if state["widths"] != list(self.widths.values()):
            raise ValueError(
                f"This state was saved with the widths {state['widths']} (wide, narrow), this strategy has "
                f"{list(self.widths.values())}. Resume with the same widths."
            )
