"""LAWA, BestEMA, BEMA, SWAD and PowerEMA against literal transcriptions on numbers made by hand."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn

from aswa_hf import BEMA, EMA, LAWA, BestEMA, Decision

INIT, HARD, SOFT, REJECT = Decision.INIT, Decision.HARD, Decision.SOFT, Decision.REJECT


class Point(nn.Module):
    """A model of one weight, set by hand where training would move it."""

    def __init__(self, value: float = 0.0):
        super().__init__()
        self.w = nn.Parameter(torch.full((1,), value, dtype=torch.float64))

    @property
    def value(self) -> float:
        return self.w.item()

    def move(self, value: float) -> None:
        with torch.no_grad():
            self.w.fill_(value)


def take_steps(strategy, values: list[float]) -> None:
    for value in values:
        strategy.model.move(value)
        strategy.step()


def ensemble(strategy) -> float | None:
    if not strategy.members:
        return None
    with strategy.swapped():
        return strategy.model.value


def walk(count: int, seed: int = 0) -> list[float]:
    generator = random.Random(seed)
    return [generator.uniform(-2, 2) for _ in range(count)]


# LAWA


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_lawa_is_the_mean_of_the_last_k_snapshots(k):
    lawa, values = LAWA(Point(), k=k), walk(8)
    for index, value in enumerate(values):
        lawa.model.move(value)
        seen = []
        decision = lawa.update(lambda seen=seen: seen.append(lawa.model.value) or 0.1)
        latest = values[max(0, index + 1 - k) : index + 1]
        assert decision is (INIT if index == 0 else SOFT if k > 1 else HARD)
        assert ensemble(lawa) == pytest.approx(sum(latest) / len(latest))
        assert seen == [pytest.approx(ensemble(lawa))]
        assert lawa.members == len(latest)
        assert lawa.alphas == [0.0] * (index + 1 - len(latest)) + [1 / len(latest)] * len(latest)
    assert sum(not part.is_empty for part in lawa.parts.values()) == k - 1


def test_lawa_refuses_a_k_out_of_range_and_the_state_of_another_k():
    for k in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="k must be a whole number of at least 1"):
            LAWA(Point(), k=k)
    with pytest.raises(ValueError, match="saved with k=3, this strategy has k=5"):
        LAWA(Point()).load_state_dict(LAWA(Point(), k=3).state_dict())


# BestEMA


@pytest.mark.parametrize("warmup", [True, False])
@pytest.mark.parametrize("greater_is_better", [True, False])
def test_best_ema_is_the_ema_of_the_best_decision_point(warmup, greater_is_better):
    options = {"decay": 0.7, "warmup": warmup, "greater_is_better": greater_is_better}
    best, ema = BestEMA(Point(), **options), EMA(Point(), **options)
    scores = [0.3, 0.5, 0.5, math.nan, 0.4, 0.9, 0.1]
    sign = 1 if greater_is_better else -1
    kept: tuple[float, float, list[float]] | None = None
    for index, score in enumerate(scores):
        for strategy in (best, ema):
            take_steps(strategy, walk(3, seed=index))
        now = ensemble(ema)
        seen = []
        if math.isnan(score):
            with pytest.warns(UserWarning, match="ema weights is nan"):
                ema.update(lambda: math.nan)
            with pytest.warns(UserWarning, match="ema weights is nan"):
                assert best.update(lambda: math.nan) is REJECT
        else:
            ema.update(lambda score=score: score)
            decision = best.update(lambda score=score, seen=seen: seen.append(best.model.value) or score)
            assert seen == [now]
            if kept is None or sign * score > sign * kept[1]:
                assert decision is (INIT if kept is None else HARD)
                kept = now, score, ema.alphas
            else:
                assert decision is REJECT
        assert (ensemble(best), best.score) == kept[:2]
        assert best.alphas == pytest.approx(kept[2] + [0.0] * (index + 1 - len(kept[2])))
        assert sum(best.alphas) == pytest.approx(1)


def test_best_ema_needs_steps_and_something_to_decide_by():
    with pytest.raises(RuntimeError, match=r"BestEMA averages optimizer steps: call its step\(\)"):
        BestEMA(Point()).update(lambda: 0.5)
    best = BestEMA(Point(), every=2)
    best.step()
    with pytest.raises(TypeError, match="BestEMA decides by validation"):
        best.update()
    assert best.update(lambda: 0.5) is REJECT


# BEMA


def literal_bema(
    initial: float, values: list[float], kappa: float, eta: float, rho: float, every: int
) -> float | None:
    ema, result = initial, None
    for t, value in enumerate(values, start=1):
        if t % every == 0:
            beta, alpha = (rho + t) ** -kappa, (rho + t) ** -eta
            ema = (1 - beta) * ema + beta * value
            result = ema + alpha * (value - initial)
    return result


@pytest.mark.parametrize("options", [{"every": 1}, {"every": 3}, {"every": 2, "kappa": 0.7, "eta": 0.4, "rho": 5.0}])
def test_bema_is_the_ema_with_its_bias_corrected(options):
    bema, values = BEMA(Point(1.5), **options), walk(12)
    given = {"kappa": 0.5, "eta": 0.2, "rho": 10.0} | options
    for index in range(0, 12, 2):
        take_steps(bema, values[index : index + 2])
        expected = literal_bema(1.5, values[: index + 2], **given)
        began = any(record.members for record in bema.trajectory)
        assert bema.update(lambda: 0.5) is (REJECT if expected is None else SOFT if began else INIT)
        assert ensemble(bema) == (None if expected is None else pytest.approx(expected))
    assert sum(bema.alphas) == pytest.approx(1)


def test_the_weights_of_bema_rebuild_it():
    bema, values = BEMA(Point(1.5), every=1), walk(6)
    for value in values:
        take_steps(bema, [value])
        bema.update(lambda: 0.5)
    first = 1.0
    for t in range(1, 7):
        first *= 1 - (10 + t) ** -0.5
    first -= 16**-0.2  # the weight of the initial weights, which is counted for the first point
    rebuilt = sum(a * v for a, v in zip(bema.alphas, values, strict=True)) + first * (1.5 - values[0])
    assert ensemble(bema) == pytest.approx(rebuilt)


def test_bema_has_the_constants_of_trl_and_refuses_others_that_make_no_sense():
    bema = BEMA(Point())
    assert (bema.kappa, bema.eta, bema.rho, bema.every) == (0.5, 0.2, 10.0, 400)
    for name, value in (("kappa", -0.1), ("kappa", 1.5), ("eta", 2.0), ("rho", 0.0), ("rho", math.inf), ("every", 0)):
        with pytest.raises(ValueError, match=f"{name} must be"):
            BEMA(Point(), **{name: value})
