"""All plots: the trajectory of a run, strategies side by side, the gains of one over the others, curves in panels."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from aswa_hf._utils.files import replacing
from aswa_hf.style import DECISIONS, GAIN, GRAY, LOSS, TIE, strategy_style
from aswa_hf.trajectory import Decision, Record, Trajectory

NARROW_DPI = 180  # of pictures for phones, whose screens are fine
OURS = strategy_style("aswa").color

Estimate = tuple[float, float]  # mean, standard deviation


def plot_trajectories(
    trajectories: Mapping[str, Trajectory],
    path: str | Path,
    *,
    metric: str = "score",
    title: str = "",
    narrow: bool = False,
) -> None:
    """Draws running and ensemble scores over the run, with ASWA's soft, hard and reject decisions marked."""
    figure = draw_trajectories(trajectories, metric=metric, title=title, narrow=narrow)
    with replacing(path) as temporary:
        kind = Path(path).suffix.removeprefix(".") or "png"
        figure.savefig(temporary, dpi=NARROW_DPI if narrow else 130, format=kind)


def draw_trajectories(
    trajectories: Mapping[str, Trajectory], *, metric: str = "score", title: str = "", narrow: bool = False
) -> Any:
    """Returns a plot of a run as a matplotlib figure: scores on top, the weight α of each snapshot below.

    `narrow` is for phones: half as wide with letters of the same size.
    """
    # Not pyplot, which would change the figures and the backend of a notebook.
    from matplotlib.figure import Figure

    main = "aswa" if "aswa" in trajectories else next(iter(trajectories))
    figure = Figure(figsize=(4.0, 4.8) if narrow else (9, 5.6), layout="constrained")
    axis, weights = figure.subplots(2, 1, height_ratios=[5, 1], sharex=True)
    x = [_position(record) for record in trajectories[main]]

    def line(scores: Iterable[float | None], **style: Any) -> None:
        axis.plot(x, [math.nan if s is None or not math.isfinite(s) else s for s in scores], **style)

    line((r.running_score for r in trajectories[main]), color=GRAY, lw=1.2, marker=".", ms=4, label="running model")
    for name in ("swa", "ema"):
        if name in trajectories and name != main:
            axis.plot(
                [_position(r) for r in trajectories[name] if r.score is not None],
                [r.score for r in trajectories[name] if r.score is not None],
                color=strategy_style(name).color,
                ls=strategy_style(name).line,
                lw=1.3,
                label=name.upper(),
            )
    line((r.score for r in trajectories[main]), color=OURS, lw=2.2, label=f"{main.upper()} ensemble")
    _focus(axis, trajectories[main], trajectories.values())
    low, high = axis.get_ylim()
    crowded = len(x) > 80
    scored = [(r, r.score) for r in trajectories[main] if r.score is not None]
    for decision in Decision:
        color, marker, label = DECISIONS[decision.value]
        points = [(_position(r), score) for r, score in scored if r.decision is decision and low <= score <= high]
        if points:
            axis.scatter(
                *zip(*points, strict=True),
                color=color,
                marker=marker,
                s=12 if crowded else 42,
                linewidths=0.5 if crowded else None,
                # The marks of many rejects in a row would hide the ensemble's line.
                zorder=1.9 if crowded and decision is Decision.REJECT else 3,
                label=label,
            )
    hidden = [(r, score) for r, score in scored if not low <= score <= high]
    if hidden:
        paper = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 2}
        note = {"transform": axis.transAxes, "ha": "right", "fontsize": 8, "color": "0.35", "bbox": paper}
        axis.text(0.99, 0.03, _unseen(hidden), **note)
    axis.set_ylabel(f"validation {metric}")
    axis.set_title(title or "Adaptive Stochastic Weight Averaging")
    axis.grid(alpha=0.25)
    figure.legend(fontsize=8, loc="outside lower center", ncols=2 if narrow else 4)

    width = min((b - a for a, b in pairwise(x)), default=1.0) * 0.8
    weights.bar(x, trajectories[main].alphas, width=width, color=OURS, alpha=0.7)
    weights.set_ylabel("α")
    weights.set_xlabel("epoch")
    weights.set_ylim(bottom=0)
    return figure


def _position(record: Record) -> float:
    return record.index + 1 if record.epoch is None else record.epoch


def _unseen(hidden: list[tuple[Record, float]]) -> str:
    """Describes the decisions outside the view: their epochs and scores."""
    epochs = [f"{_position(record):g}" for record, _ in (hidden[0], hidden[-1])]
    where = f"epoch {epochs[0]}" if len(hidden) == 1 else f"{len(hidden)} epochs, {epochs[0]} to {epochs[1]}"
    scores = [f"{score:.4g}" for _, score in (hidden[0], hidden[-1])]
    return f"outside the view: {where} ({' to '.join(dict.fromkeys(scores))})"


def _focus(axis: Any, trajectory: Trajectory, others: Iterable[Trajectory]) -> None:
    """Excludes the first, steep part of the curve from the view, so that the decisions can be distinguished.

    The final score of every strategy stays in view: a plot must not hide that another one is ahead.
    """
    finals = [r.score for r in trajectory if r.score is not None and math.isfinite(r.score)]
    running = [r.running_score for r in trajectory if r.running_score is not None and math.isfinite(r.running_score)]
    if len(finals) < 4 or not running:
        return
    later = sorted(running[len(running) // 4 :] + finals[len(finals) // 4 :])
    low, high = later[len(later) // 50], later[-1 - len(later) // 50]
    ends = [o[-1].score for o in others if o and o[-1].score is not None and math.isfinite(o[-1].score)]
    low, high = min([low, *ends]), max([high, *ends])
    margin = (high - low) * 0.15 or abs(high) * 0.05 or 1.0
    axis.set_ylim(low - margin, high + margin)


def draw_comparison(
    rows: Sequence[tuple[str, ...]],
    columns: Mapping[str, Sequence[Estimate | None]],
    label: str,
    *,
    narrow: bool = False,
) -> Any:
    """Draws a metric of every strategy (column) on every dataset and model (row): mean ± standard deviation.

    `narrow` is for phones: half as wide with letters of the same size.
    """
    figure, axis = _rows_figure(len(rows), height=0.6 if narrow else 0.4, margin=1.6 if narrow else 1.3, narrow=narrow)
    for place, (name, estimates) in enumerate(columns.items()):
        shift = 0.56 * ((place + 0.5) / len(columns) - 0.5)
        style = strategy_style(name)
        shown = [(row + shift, *found) for row, found in enumerate(estimates) if found and math.isfinite(found[0])]
        if shown:
            y, x, error = zip(*shown, strict=True)
            axis.errorbar(
                x,
                y,
                xerr=error,
                color=style.color,
                fmt=style.marker,
                ms=7.5 if name == "aswa" else 6,
                mec="white",
                mew=0.5,
                elinewidth=1.1,
                zorder=4 if name == "aswa" else 3,
                label=name,
            )
    for row, (above, below) in enumerate(pairwise(rows)):
        axis.axhline(row + 0.5, color="0.9" if above[0] == below[0] else "0.5", lw=0.8, zorder=1)
    _finish_rows(axis, [("\n" if narrow else " · ").join(filter(None, row)) for row in rows], label)
    figure.legend(fontsize=9, loc="outside upper center", ncols=3 if narrow else 6, frameon=False)
    return figure


@dataclass(frozen=True)
class Panel:
    """Curves of strategies: by name, for every x the smallest, the mean and the greatest y over seeds."""

    title: str
    x: str
    y: str
    curves: Mapping[str, Mapping[float, tuple[float, float, float]]]
    log: bool = False
    bottom: float | None = None
    """Where the y axis begins, if lower values are not to be shown."""


def plot_panels(
    rows: Sequence[Sequence[Panel]],
    path: str | Path,
    *,
    labels: Mapping[str, str] | None = None,
    narrow: bool = False,
) -> None:
    """Draws panels of curves into a file."""
    figure = draw_panels(rows, labels=labels, narrow=narrow)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=NARROW_DPI if narrow else 110, format="png", metadata={"Software": None})


def draw_panels(
    rows: Sequence[Sequence[Panel]], *, labels: Mapping[str, str] | None = None, narrow: bool = False
) -> Any:
    """Draws curves with the range over seeds, in as many rows and columns as there are panels.

    `labels` are the names of strategies in the legend, if they are to be others. `narrow` is for phones: one panel
    below the other.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, NullFormatter

    labels = labels or {}
    if narrow:
        rows = [[panel] for row in rows for panel in row]
    size = (4.0, 2.9) if narrow else (4.6, 3.3) if len(rows[0]) < 3 else (3.5, 3.0)
    figure = Figure(figsize=(size[0] * len(rows[0]), size[1] * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    panels = [panel for row in rows for panel in row]
    for axis in axes.flat[len(panels) :]:  # the last row may be shorter
        axis.set_axis_off()
    for axis, panel in zip(axes.flat, panels, strict=False):
        for name, curve in panel.curves.items():
            if not curve:
                continue
            style = strategy_style(name)
            ours = name.endswith("aswa")
            x = list(curve)
            low, middle, high = zip(*curve.values(), strict=True)
            axis.plot(
                x,
                middle,
                color=style.color,
                ls=style.line,
                marker=style.marker if panel.log or len(x) < 2 else None,
                ms=5,
                lw=2.0 if ours else 1.3,
                zorder=4 if ours else 3,
                label=labels.get(name, name),
            )
            if low != high:
                axis.fill_between(x, low, high, color=style.color, alpha=0.12, linewidth=0)
        if panel.bottom is not None:
            axis.set_ylim(bottom=panel.bottom)
        if panel.log:
            places = sorted({x for curve in panel.curves.values() for x in curve})
            axis.set_xscale("log")
            axis.set_xticks(places, [f"{x:g}" for x in places])
            axis.xaxis.set_minor_formatter(NullFormatter())
        else:
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))  # epochs
        axis.set_title(panel.title, fontsize=10)
        axis.set_xlabel(panel.x)
        axis.set_ylabel(panel.y)
        axis.grid(alpha=0.25)
    handles, names = axes[0][0].get_legend_handles_labels()
    columns = max(6, 2 * len(rows[0]) + 1) if not narrow else 3 if max(map(len, names), default=0) < 12 else 2
    figure.legend(handles, names, fontsize=9, loc="outside lower center", ncols=columns, frameon=False)
    return figure


def draw_gains(rows: Mapping[str, tuple[Sequence[float], float]], label: str, *, narrow: bool = False) -> Any:
    """Draws gains in rows, by name: one dot each, and a bar at the given median."""
    figure, axis = _rows_figure(len(rows), height=0.5, margin=1.1, narrow=narrow)
    for row, (gains, median) in enumerate(rows.values()):
        values = sorted(gains)
        # Neighboring dots are shifted up and down, always in the same way.
        heights = [row + 0.12 * ((place % 3) - 1) for place in range(len(values))]
        colors = [GAIN if v > 0 else LOSS if v < 0 else TIE for v in (round(v, 4) for v in values)]
        axis.scatter(values, heights, c=colors, s=30, alpha=0.8, linewidths=0, zorder=3)
        axis.plot([median] * 2, [row - 0.32, row + 0.32], color="0.15", lw=2, zorder=4)
    axis.axvline(0, color="0.3", lw=1)
    _finish_rows(axis, list(rows), label.replace(" (", "\n(") if narrow else label)
    return figure


def _rows_figure(rows: int, *, height: float, margin: float, narrow: bool) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.0 if narrow else 8.2, margin + height * rows), layout="constrained")
    return figure, figure.subplots()


def _finish_rows(axis: Any, names: Sequence[str], label: str) -> None:
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", alpha=0.25)
    axis.set_xlabel(label)


def as_png(figure: Any, *, narrow: bool = False) -> bytes:
    """Returns a figure as the bytes of a PNG file; `narrow` is for phones."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=NARROW_DPI if narrow else 130, format="png", metadata={"Software": None})
    return buffer.getvalue()


def as_svg(figure: Any, salt: str = "aswa") -> str:
    """Returns a figure as an SVG element for an HTML page, with its text as text.

    `salt` distinguishes its identifiers from those of another one in the same page.
    """
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.family": "sans-serif"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
