"""LAWA, BestEMA, BEMA, SWAD and PowerEMA against literal transcriptions on numbers made by hand."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from aswa_hf import LAWA, Decision

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
