"""The pictures of a report, as PNGs in memory: strategies side by side, ASWA's gains, and the runs' trajectories."""

from __future__ import annotations

import io
import math
from typing import Any

from matplotlib.figure import Figure

from aswa_hf.report.compare import OURS, Comparison, Groups, over_seeds
from aswa_hf.report.gather import Run
from aswa_hf.trajectory import draw_trajectories

STYLES = {
    "last": ("0.55", "o"),
    "best": ("tab:brown", "s"),
    "swa": ("tab:purple", "v"),
    "ema": ("#8a8a10", "^"),
    "aswa": ("tab:blue", "D"),
    "fge": ("#0093a3", "P"),
}
OTHER_STYLE = ("tab:pink", "X")


def trajectory_picture(run: Run) -> bytes:
    """Scores and decisions over a run, and the weight of each snapshot."""
    return _png(draw_trajectories(run.trajectories, metric=run.metric, title=run.title))


def comparison_picture(groups: Groups, strategies: list[str], split: str, metric: str) -> bytes:
    """A metric of every strategy on every dataset and model: mean ± standard deviation over seeds."""
    figure = Figure(figsize=(8.2, 1.3 + 0.4 * len(groups)), layout="constrained")
    axis = figure.subplots()
    pairs = list(groups)
    for place, name in enumerate(strategies):
        shift = 0.56 * ((place + 0.5) / len(strategies) - 0.5)
        color, marker = STYLES.get(name, OTHER_STYLE)
        rows = [(row, over_seeds(groups[pair], name, split, metric)) for row, pair in enumerate(pairs)]
        shown = [(row + shift, s.mean, s.std or 0.0) for row, s in rows if s and math.isfinite(s.mean)]
        if shown:
            y, x, error = zip(*shown, strict=True)
            axis.errorbar(
                x,
                y,
                xerr=error,
                color=color,
                fmt=marker,
                ms=7.5 if name == OURS else 6,
                mec="white",
                mew=0.5,
                elinewidth=1.1,
                zorder=4 if name == OURS else 3,
                label=name,
            )
    datasets = [dataset for dataset, _ in pairs]
    for row in range(1, len(pairs)):
        other = datasets[row] != datasets[row - 1]
        axis.axhline(row - 0.5, color="0.5" if other else "0.9", lw=0.8, zorder=1)
    axis.set_yticks(range(len(pairs)), [" · ".join(filter(None, pair)) for pair in pairs])
    axis.set_ylim(len(pairs) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", alpha=0.25)
    axis.set_xlabel(f"{split} {metric}")
    figure.legend(fontsize=9, loc="outside upper center", ncols=6, frameon=False)
    return _png(figure)


def gains_picture(comparisons: list[Comparison], split: str) -> bytes:
    """ASWA's gain over each other strategy, a dot for every dataset and model; the bar is the median."""
    figure = Figure(figsize=(8.2, 1.1 + 0.5 * len(comparisons)), layout="constrained")
    axis = figure.subplots()
    for row, comparison in enumerate(comparisons):
        values = sorted(comparison.gains.values())
        # Neighbours are moved apart up and down, always the same way.
        heights = [row + 0.12 * ((place % 3) - 1) for place in range(len(values))]
        colors = ["tab:green" if v > 0 else "tab:red" if v < 0 else "0.5" for v in (round(v, 4) for v in values)]
        axis.scatter(values, heights, c=colors, s=30, alpha=0.8, linewidths=0, zorder=3)
        axis.plot([comparison.median] * 2, [row - 0.32, row + 0.32], color="0.15", lw=2, zorder=4)
    axis.axvline(0, color="0.3", lw=1)
    axis.set_yticks(range(len(comparisons)), [f"over {comparison.other}" for comparison in comparisons])
    axis.set_ylim(len(comparisons) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", alpha=0.25)
    axis.set_xlabel(f"gain of ASWA in {split} {comparisons[0].metric} (left of 0: ASWA is worse)")
    return _png(figure)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=130, format="png")
    return buffer.getvalue()
