"""Statistics over many results: mean and spread over seeds, wins and losses, and the Wilcoxon signed-rank test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

import numpy as np

# Differences are compared as they are shown: what is equal in four decimal places is a tie.
DIGITS = 4


@dataclass(frozen=True)
class Spread:
    """A mean over seeds, and the sample standard deviation (n − 1) if there are two or more."""

    mean: float
    std: float | None
    n: int


@dataclass(frozen=True)
class SignedRank:
    """A two-sided Wilcoxon signed-rank test: min(W⁺, W⁻) over the `n` differences that are not zero."""

    n: int
    statistic: float
    p: float
    median: float


def spread(values: Sequence[float]) -> Spread:
    """Returns mean ± standard deviation; NaN and None if a value is not finite."""
    if not all(map(math.isfinite, values)):
        return Spread(math.nan, None, len(values))
    return Spread(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


def rounded(differences: Sequence[float]) -> list[float]:
    """Rounds differences to `DIGITS` places: beyond that they are floating-point noise."""
    return [round(difference, DIGITS) for difference in differences]


def win_tie_loss(differences: Sequence[float]) -> tuple[int, int, int]:
    """Returns how many differences are above, at and below zero."""
    signs = rounded(differences)
    return sum(d > 0 for d in signs), sum(d == 0 for d in signs), sum(d < 0 for d in signs)


def signed_rank(differences: Sequence[float]) -> SignedRank:
    """Wilcoxon's test of whether differences are symmetric about zero; their median, with zeros, is the effect size.

    Zeros are dropped before ranking, as Wilcoxon did; equal sizes share their mean rank. p is exact for any n, also
    with shared ranks: 2·P(W ≤ min(W⁺, W⁻)) over all 2ⁿ equally likely signs.
    """
    differences = rounded(differences)
    nonzero = [d for d in differences if d]
    # Twice the mean rank of each size is an integer: the number below it, plus that at or below it, plus one.
    sizes = [abs(d) for d in nonzero]
    ranks = [sum(s < size for s in sizes) + sum(s <= size for s in sizes) + 1 for size in sizes]
    positive = sum(rank for rank, d in zip(ranks, nonzero, strict=True) if d > 0)
    smaller = min(positive, sum(ranks) - positive)
    chance = np.zeros(sum(ranks) + 1)  # probability of every sum of the positive ranks
    chance[0] = 1.0
    for rank in ranks:
        chance[rank:] = (chance[rank:] + chance[:-rank]) / 2
        chance[:rank] /= 2
    return SignedRank(
        n=len(nonzero),
        statistic=smaller / 2,
        p=min(1.0, 2 * float(chance[: smaller + 1].sum())),
        median=median(differences) if differences else math.nan,
    )


def holm(ps: Sequence[float]) -> list[float]:
    """Returns the p-values of several tests, corrected for their number by Holm's method."""
    adjusted = [0.0] * len(ps)
    largest = 0.0
    for place, index in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        largest = max(largest, min(1.0, (len(ps) - place) * ps[index]))
        adjusted[index] = largest
    return adjusted
