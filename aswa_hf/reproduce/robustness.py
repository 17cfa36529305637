"""How much the quality of each strategy depends on the learning rate, and after how many epochs it is reached.

Everything is read from finished runs that differ in learning rate and seed alone: test scores from their results,
validation scores by epoch from their trajectories.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table as RichTable

from aswa_hf._utils.files import read_json
from aswa_hf.plotting import Panel
from aswa_hf.reproduce.runs import GridRun
from aswa_hf.run_folder import RESULTS, TRAJECTORY, Results
from aswa_hf.trajectory import decode_number, load_trajectories

Curve = Sequence[tuple[float, float]]  # epochs, and the validation score after them


@dataclass(frozen=True)
class Swept:
    """One run of a sweep over learning rates: of each strategy its test score, and its validation score by epoch."""

    dataset: str
    model: str
    rate: float
    seed: int
    metric: str
    test: Mapping[str, float]
    curves: Mapping[str, Curve]


def finished(runs: Iterable[GridRun], output_dir: Path) -> list[Swept]:
    """The runs of a grid that are finished."""
    return [
        _read(run, output_dir / run.name)
        for run in runs
        if all((output_dir / run.name / name).is_file() for name in (RESULTS, TRAJECTORY))
    ]


def _read(run: GridRun, folder: Path) -> Swept:
    trajectories, about = load_trajectories(folder / TRAJECTORY)
    metric = about["metric"]
    curves = {
        name: [(record.index + 1 if record.epoch is None else record.epoch, record.score) for record in trajectory]
        for name, trajectory in trajectories.items()
    }
    tested = {
        name: decode_number(found["test"][metric])
        for name, found in read_json(folder / RESULTS, Results)["strategies"].items()
    }
    return Swept(
        run.dataset,
        run.model,
        float(run.settings.lr or 0),
        run.seed,
        metric,
        {name: score for name, score in tested.items() if score is not None and math.isfinite(score)},
        {name: [(x, y) for x, y in curve if y is not None and math.isfinite(y)] for name, curve in curves.items()},
    )


def by_pair(runs: Iterable[Swept]) -> dict[tuple[str, str], list[Swept]]:
    """The runs by dataset and model."""
    pairs: dict[tuple[str, str], list[Swept]] = defaultdict(list)
    for run in runs:
        pairs[run.dataset, run.model].append(run)
    return dict(pairs)


def with_every_rate(runs: Iterable[Swept]) -> list[Swept]:
    """The runs of the seeds that have every learning rate of their dataset and model; all runs if no seed has.

    The means of two rates over different seeds would differ by the seeds too.
    """
    found = []
    for some in by_pair(runs).values():
        rates = {seed: {run.rate for run in some if run.seed == seed} for seed in {run.seed for run in some}}
        every = set().union(*rates.values())
        whole = [seed for seed, known in rates.items() if known == every]
        found += [run for run in some if not whole or run.seed in whole]
    return found


def by_rate(runs: Iterable[Swept], strategy: str) -> dict[float, list[float]]:
    """The test scores of a strategy, one per seed, by learning rate."""
    found: dict[float, list[float]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: (run.rate, run.seed)):
        if strategy in run.test:
            found[run.rate].append(run.test[strategy])
    return dict(found)


def tuned_score(runs: Sequence[Swept], seed: int, rate: float | None = None) -> float:
    """Returns the best validation score of a single epoch at a learning rate; by default at any, as after tuning."""
    some = [run for run in runs if run.seed == seed and rate in (None, run.rate)]
    return max(score for run in some for _, score in run.curves["best"])


def epochs_to(curve: Curve, target: float) -> float | None:
    """The number of epochs after which a curve first reaches `target`; None if it never does."""
    return next((epoch for epoch, score in curve if score >= target), None)


def times_to_quality(runs: Sequence[Swept], tuned: float | None = None) -> list[dict[str, Any]]:
    """After how many epochs each strategy reached, on validation, the best single epoch of a learning rate.

    This is the rate `tuned`, by default the best one of each seed. An element is `{"strategy", "target", "epochs":
    {rate: mean, or None if a seed never reached it}, "reached": {rate: number of seeds}, "seeds"}`; `target` is the
    mean over seeds. The runs are of one dataset and model.
    """
    seeds = sorted({run.seed for run in runs})
    targets = {seed: tuned_score(runs, seed, tuned) for seed in seeds}
    names = [name for name in runs[0].curves if all(name in run.curves for run in runs)]
    content = []
    for name in names:
        taken: dict[float, list[float | None]] = defaultdict(list)
        for run in sorted(runs, key=lambda run: (run.rate, run.seed)):
            taken[run.rate].append(epochs_to(run.curves[name], targets[run.seed]))
        epochs = {
            rate: None if None in found else fmean(value for value in found if value is not None)
            for rate, found in taken.items()
        }
        reached = {rate: sum(value is not None for value in found) for rate, found in taken.items()}
        target = fmean(targets.values())
        content.append({"strategy": name, "target": target, "epochs": epochs, "reached": reached, "seeds": len(seeds)})
    return content


def as_json(runs: Iterable[Swept]) -> list[dict[str, Any]]:
    """`times_to_quality` of every dataset and model."""
    return [
        {"dataset": dataset, "model": model, **row}
        for (dataset, model), some in by_pair(runs).items()
        for row in times_to_quality(some)
    ]


def shown_epochs(row: Mapping[str, Any], rate: float) -> str:
    """A cell of `times_to_quality`: the mean, "–" for never, or how many seeds reached the target."""
    if row["epochs"].get(rate) is not None:
        return f"{row['epochs'][rate]:.0f}"
    reached = row["reached"].get(rate, 0)
    return f"{reached} of {row['seeds']} seeds" if reached else "–"


def as_terminal_tables(runs: Iterable[Swept], names: Mapping[str, str]) -> Iterator[str | RichTable]:
    """For each dataset and model, the epochs that each strategy needs by learning rate, under a title."""
    for (dataset, model), some in by_pair(runs).items():
        content = times_to_quality(some)
        rates = sorted({run.rate for run in some})
        yield (
            f"\n{names.get(model, model)} on {dataset}: epochs to a validation {some[0].metric} of "
            f"{content[0]['target']:.4g}, the best of a single epoch at any rate"
        )
        shown = RichTable(box=None, pad_edge=False)
        shown.add_column("weights", no_wrap=True)
        for rate in rates:
            shown.add_column(f"{rate:g}", justify="right", no_wrap=True)
        for row in content:
            shown.add_row(row["strategy"], *(shown_epochs(row, rate) for rate in rates))
        yield shown


def panels(runs: Iterable[Swept], names: Mapping[str, str]) -> Iterator[tuple[Panel, Panel]]:
    """For each dataset and model: test scores by learning rate, and validation scores by epoch at a high rate."""
    for (dataset, model), some in by_pair(runs).items():
        what, metric = f"{names.get(model, model)} on {dataset}", some[0].metric
        rate = high_rate(some)
        strategies = [name for name in some[0].curves if all(name in run.curves for run in some)]
        left = {name: {x: (min(y), fmean(y), max(y)) for x, y in by_rate(some, name).items()} for name in strategies}
        right = {name: mean_curve([run.curves[name] for run in some if run.rate == rate]) for name in strategies}
        yield (
            Panel(what, "learning rate", f"test {metric}", left, log=True),
            Panel(f"{what}, learning rate {rate:g}", "epoch", f"validation {metric}", right),
        )


def best_rate(runs: Sequence[Swept]) -> float:
    """The learning rate that is best for a single epoch, on validation."""
    rates = sorted({run.rate for run in runs})
    means = {rate: fmean(max(s for _, s in run.curves["best"]) for run in runs if run.rate == rate) for rate in rates}
    return max(means, key=lambda rate: means[rate])


def high_rate(runs: Sequence[Swept]) -> float:
    """The next learning rate above the one that is best for a single epoch."""
    rates = sorted({run.rate for run in runs})
    return rates[min(rates.index(best_rate(runs)) + 1, len(rates) - 1)]


def mean_curve(curves: Sequence[Curve]) -> dict[float, tuple[float, float, float]]:
    """Returns the smallest, the mean and the greatest score of several runs by epoch."""
    points: dict[float, list[float]] = defaultdict(list)
    for curve in curves:
        for epoch, score in curve:
            points[epoch].append(score)
    return {epoch: (min(found), fmean(found), max(found)) for epoch, found in points.items()}
