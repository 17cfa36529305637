"""ASWA compared with the other strategies of the same runs: means over seeds, wins, ties, losses, and tests."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean

from aswa_hf.hub.card import LABELS
from aswa_hf.report.gather import MeasuredRun, same_scores
from aswa_hf.report.statistics import Spread, holm, rounded, signed_rank, spread, win_tie_loss

OURS = "aswa"
ALL = "all metrics"
UNSEEN = ("test", "queries")  # the splits that were not used to choose the weights
FEWEST_PAIRS = 5  # for a test: with fewer, no result could be called unlikely

Pair = tuple[str, str]  # dataset, model
Groups = dict[Pair, list[MeasuredRun]]


@dataclass(frozen=True)
class Comparison:
    """ASWA against another strategy on unseen data; a gain above zero means that ASWA is better.

    `statistic`, `p` and `p_holm` are None for fewer than `FEWEST_PAIRS` (dataset, model) pairs.
    """

    other: str
    metric: str
    gains: dict[str, float]
    pairs: int
    wins: int
    ties: int
    losses: int
    n: int
    statistic: float | None
    p: float | None
    p_holm: float | None
    median: float


@dataclass(frozen=True)
class Behind:
    """A dataset and model on which another strategy has the better mean."""

    pair: Pair
    other: str
    ours: Spread
    theirs: Spread
    gap: float


def by_pair(runs: Iterable[MeasuredRun]) -> Groups:
    """Groups the runs by dataset and model: each group has one run per seed."""
    groups: Groups = {}
    for run in runs:
        groups.setdefault((run.dataset, run.model), []).append(run)
    return groups


def strategies_of(runs: Iterable[MeasuredRun]) -> list[str]:
    """Returns the names of all strategies in the order of the cards; variants such as swa-all follow their base."""
    known = list(LABELS)

    def place(name: str) -> tuple[int, str]:
        kind = name.partition("-")[0]
        return (known.index(kind) if kind in known else len(known)), name

    return sorted({name for run in runs for name in run.scores}, key=place)


def splits_of(runs: Iterable[MeasuredRun]) -> list[str]:
    """Returns the splits that were measured, those of unseen data first."""
    found = {split for run in runs for result in run.scores.values() for split in result}
    known = (*UNSEEN, "validation")
    return [split for split in known if split in found] + sorted(found - set(known))


def metrics_of(runs: Iterable[MeasuredRun], split: str) -> list[str]:
    """Returns the metrics of a split, in the order of the files."""
    return list(
        dict.fromkeys(metric for run in runs for result in run.scores.values() for metric in result.get(split, {}))
    )


def value(run: MeasuredRun, strategy: str, split: str, metric: str) -> float | None:
    return run.scores.get(strategy, {}).get(split, {}).get(metric)


def over_seeds(runs: Iterable[MeasuredRun], strategy: str, split: str, metric: str) -> Spread | None:
    """Returns mean ± standard deviation of a strategy over the seeds that have it."""
    values = [found for run in runs if (found := value(run, strategy, split, metric)) is not None]
    return spread(values) if values else None


def best_strategies(runs: list[MeasuredRun], names: Iterable[str], split: str, metric: str) -> set[str]:
    """Returns the strategies with the best mean, rounded as shown."""
    means = {name: found.mean for name in names if (found := over_seeds(runs, name, split, metric))}
    finite = {name: rounded([mean])[0] for name, mean in means.items() if math.isfinite(mean)}
    if not finite:
        return set()
    best = min(finite.values()) if _is_lower(runs, metric) else max(finite.values())
    return {name for name, mean in finite.items() if mean == best}


def twins(groups: Groups) -> dict[Pair, Pair]:
    """Maps each model with the same results as another, on one dataset and all seeds they share, to that other one.

    Such a model is the other one under another name: Keci over Cl(0, 1) is ComplEx.
    """
    same: dict[Pair, Pair] = {}
    # The model with the most seeds is counted; among equals, the first by name.
    ordered = sorted(groups, key=lambda pair: (-len(groups[pair]), pair))
    for one, other in combinations(ordered, 2):
        if one[0] != other[0] or one in same or other in same:
            continue
        ours, theirs = ({run.seed: run for run in groups[pair] if run.seed is not None} for pair in (one, other))
        shared = ours.keys() & theirs.keys()
        if shared and all(same_scores(ours[seed].scores, theirs[seed].scores) for seed in shared):
            same[other] = one
    return same


def gains(groups: Groups, other: str, metric: str, split: str) -> tuple[dict[Pair, float], list[Pair]]:
    """Returns ASWA's mean gain over another strategy by pair, over seeds with both, and pairs without a finite one."""
    found: dict[Pair, float] = {}
    broken: list[Pair] = []
    for pair, runs in groups.items():
        both = [(value(run, OURS, split, metric), value(run, other, split, metric)) for run in runs]
        differences = [ours - theirs for ours, theirs in both if ours is not None and theirs is not None]
        if not differences:
            continue
        gain = fmean(differences)
        if math.isfinite(gain):
            found[pair] = -gain if _is_lower(runs, metric) else gain
        else:
            broken.append(pair)
    return found, broken


def poolable(groups: Groups, metrics: Iterable[str], split: str) -> list[str]:
    """Returns the metrics on one scale, from 0 to 1: only their differences can be ranked together."""
    runs = [run for members in groups.values() for run in members]
    return [
        metric
        for metric in metrics
        if not _is_lower(runs, metric)
        and all(
            0 <= found <= 1
            for run in runs
            for name in run.scores
            if (found := value(run, name, split, metric)) is not None and math.isfinite(found)
        )
    ]


def compare(groups: Groups, metrics: list[str], split: str) -> list[Comparison]:
    """Compares ASWA with each other strategy over all (dataset, model, metric) pairs, as one family of tests."""
    runs = [run for members in groups.values() for run in members]
    label = metrics[0] if len(metrics) == 1 else ALL
    comparisons = []
    for other in strategies_of(runs):
        if other == OURS:
            continue
        by_metric = {metric: gains(groups, other, metric, split)[0] for metric in metrics}
        found = {
            " · ".join(filter(None, (*pair, metric if len(metrics) > 1 else ""))): gain
            for metric, gained in by_metric.items()
            for pair, gain in gained.items()
        }
        if not found:
            continue
        wins, ties, losses = win_tie_loss(list(found.values()))
        test = signed_rank(list(found.values()))
        pairs = len({pair for gained in by_metric.values() for pair in gained})
        statistic, p = (test.statistic, test.p) if pairs >= FEWEST_PAIRS else (None, None)
        comparisons.append(
            Comparison(other, label, found, pairs, wins, ties, losses, test.n, statistic, p, None, test.median)
        )
    tested = [comparison for comparison in comparisons if comparison.p is not None]
    adjusted = holm([comparison.p for comparison in tested if comparison.p is not None])
    corrected = {one.other: p for one, p in zip(tested, adjusted, strict=True)}
    return [replace(comparison, p_holm=corrected.get(comparison.other)) for comparison in comparisons]


def judged(groups: Groups, metric: str, split: str) -> Groups:
    """Returns the pairs on which ASWA and a rival have results of the same seeds: only there one can win."""
    return {
        pair: runs
        for pair, runs in groups.items()
        if any(gains({pair: runs}, other, metric, split)[0] for other in strategies_of(runs) if other != OURS)
    }


def behind(groups: Groups, metric: str, split: str) -> list[Behind]:
    """Returns every dataset and model on which ASWA's mean is not the best, with the best other strategy."""
    found = []
    for pair, runs in groups.items():
        ahead = []
        for other in strategies_of(runs):
            gap = -gains({pair: runs}, other, metric, split)[0].get(pair, 0.0)
            if other != OURS and rounded([gap])[0] > 0:
                ours, theirs = (over_seeds(runs, name, split, metric) for name in (OURS, other))
                if ours and theirs:
                    ahead.append(Behind(pair, other, ours, theirs, gap))
        found += sorted(ahead, key=lambda b: -b.gap)[:1]
    return sorted(found, key=lambda b: (-b.gap, b.pair))


def _is_lower(runs: Iterable[MeasuredRun], metric: str) -> bool:
    return any(metric in run.lower for run in runs)
