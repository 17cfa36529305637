"""A model of one weight, set by hand where training would move it."""

from __future__ import annotations

import torch
from torch import nn


class Point(nn.Module):
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
