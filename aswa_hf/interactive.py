"""Pictures for pages: a run as SVG that explains each decision under the pointer, and the weights of an ensemble.

The SVG takes its colors from the CSS variables of `aswa_hf.style`, so that it follows the page from light to dark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from aswa_hf.policy import is_better, is_usable
from aswa_hf.trajectory import Decision, Record, Trajectory

WIDTH, LEFT, RIGHT = 900, 64, 14
ADAPTIVE = ("aswa", "dense-aswa")
CSS = """\
.aswa-plot { display: block; width: 100%; height: auto; font: 13px system-ui, sans-serif; }
.aswa-plot text { fill: var(--ink); }
.aswa-plot .quiet { fill: var(--soft-ink); }
.aswa-plot .grid { stroke: var(--line); fill: none; }
.aswa-plot .running { stroke: var(--running); fill: none; stroke-width: 1.3; }
.aswa-plot .ensemble { stroke: var(--aswa); fill: none; stroke-width: 2.6; stroke-linejoin: round; }
.aswa-plot .alpha { fill: var(--aswa); fill-opacity: .75; }
.aswa-plot .init { fill: var(--init); } .aswa-plot .soft { fill: var(--soft); } .aswa-plot .hard { fill: var(--hard); }
.aswa-plot .reject { fill: none; stroke: var(--reject); stroke-width: 1.6; }
.aswa-plot .crowd .reject { stroke-width: .8; }
.aswa-plot .band { fill: transparent; } .aswa-plot .point:hover .band { fill: var(--ours); fill-opacity: .1; }
.aswa-plot .chosen { fill: var(--ours); fill-opacity: .16; }
.aswa-plot .tip { visibility: hidden; pointer-events: none; } .aswa-plot .point:hover .tip { visibility: visible; }
.aswa-plot .hint { visibility: visible; } .aswa-plot .points:hover .hint { visibility: hidden; }
"""


def position(record: Record) -> float:
    """Returns where a decision point is on the axis: its epoch, or its number."""
    return record.index + 1 if record.epoch is None else record.epoch


def number(score: float | None) -> str:
    """Returns a score as text."""
    if score is None:
        return "–"
    return f"{score:.4f}" if abs(score) < 100 else f"{score:.4g}"


def reason(trajectory: Trajectory, index: int, *, greater_is_better: bool = True) -> str:
    """Returns in one sentence why a decision point of ASWA was decided as it was."""
    record = trajectory[index]
    before = trajectory[index - 1].score if index else None
    lookahead, ensemble = number(record.lookahead_score), number(before)
    # With DenseASWA the better of the running model and of the mean of the steps takes part, the mean on a tie.
    mean = record.snapshot_score
    dense = mean is not None and not is_better(record.running_score, mean, greater_is_better)
    candidate = "mean of the steps" if dense else "running model"
    score = mean if dense else record.running_score
    if record.decision is Decision.INIT:
        return f"There was no ensemble yet: the {candidate if dense else 'running weights'} start{'s' * dense} it."
    if record.decision is Decision.HARD:
        return (
            f"The {candidate} ({number(score)}) beats the look-ahead ({lookahead}) and the ensemble ({ensemble}): the "
            "average starts over from it."
        )
    if record.decision is Decision.SOFT:
        joins = "it" if mean is None else "the mean of the steps"
        return (
            f"The look-ahead ({lookahead}) beats the ensemble ({ensemble}), and the {candidate} ({number(score)}) "
            f"does not beat the look-ahead: {joins} joins the average as snapshot {record.members}."
        )
    unusable = [
        name
        for name, score in (("running model", record.running_score), ("look-ahead", record.lookahead_score))
        if score is not None and not is_usable(score)
    ]
    if unusable:
        return f"The score of the {' and of the '.join(unusable)} is not a finite number: nothing changes."
    if is_better(score, before, greater_is_better) and is_usable(before):
        return f"The look-ahead ({lookahead}) does not beat the ensemble ({ensemble}): nothing changes."
    return (
        f"Neither the {candidate} ({number(score)}) nor the look-ahead ({lookahead}) beats the ensemble ({ensemble}): "
        "nothing changes."
    )


def describe(trajectory: Trajectory, index: int, *, greater_is_better: bool = True) -> list[str]:
    """Returns a decision point as lines of text: where and what, its three scores, and why."""
    record = trajectory[index]
    where = f"Epoch {position(record):g}" if record.epoch is not None else f"Decision point {index + 1}"
    scores = [f"running model {number(record.running_score)}"]
    if record.snapshot_score is not None:
        scores.append(f"mean of the steps {number(record.snapshot_score)}")
    scores += [f"look-ahead {number(record.lookahead_score)}", f"ensemble {number(record.score)}"]
    return [
        f"{where}: {record.decision.value}",
        ", ".join(scores) + f", {record.members} snapshot{'s' * (record.members != 1)}",
        reason(trajectory, index, greater_is_better=greater_is_better),
    ]


def main_trajectory(trajectories: Mapping[str, Trajectory]) -> str:
    """Returns the name of the strategy whose decisions are shown."""
    return next((name for name in ADAPTIVE if name in trajectories), next(iter(trajectories)))


def trajectory_svg(
    trajectories: Mapping[str, Trajectory],
    *,
    metric: str = "score",
    greater_is_better: bool = True,
    panel: bool = True,
    chosen: int | None = None,
    animated: bool = False,
    width: int = WIDTH,
    explained: bool = True,
) -> str:
    """Returns a run as SVG: running and ensemble scores with the decisions, and the weight α of each snapshot.

    The text of the point under the pointer is shown in a `panel` above the plot, or in the browser's own tooltip.
    `chosen` marks a decision point, and shows the weights as they were after it. `animated` draws the run in time.
    `width` is in the units of the SVG, in which letters have the size 13: a narrow plot can be read on a phone.
    `explained=False` leaves the texts of the points out.
    """
    name = main_trajectory(trajectories)
    trajectory = trajectories[name]
    if not trajectory:
        return '<p class="quiet">There are no decisions yet.</p>'
    letters = int((width - LEFT - RIGHT) / 6.9)  # that fit into a line
    lines = [describe(trajectory, i, greater_is_better=greater_is_better) for i in range(len(trajectory))]
    lines = [[*_wrapped(one[0], letters), *_wrapped(one[1], letters), *_wrapped(one[2], letters)] for one in lines]
    top = 23 + 17 * max(map(len, lines)) if panel else 14
    height, bars = max(250, width // 4), 62
    xs = [position(record) for record in trajectory]
    span = (xs[-1] - xs[0]) or 1.0
    step = (width - LEFT - RIGHT) / max(len(xs), 1)
    x = [LEFT + step / 2 + (value - xs[0]) / span * (width - LEFT - RIGHT - step) for value in xs]
    low, high = _view(trajectory)

    def place(score: float) -> float:
        return top + height * (1 - (score - low) / (high - low))

    scored = [i for i, r in enumerate(trajectory) if r.score is not None and math.isfinite(r.score)]
    y = {i: place(trajectory[i].score or 0.0) for i in scored}
    running = [
        (px, place(r.running_score))
        for px, r in zip(x, trajectory, strict=True)
        if r.running_score is not None and math.isfinite(r.running_score)
    ]
    visible = {i for i in scored if top <= y[i] <= top + height}
    outside = [f"{xs[i]:g}" for i in scored if i not in visible]
    note = f"outside the view: {len(outside)} epochs, {outside[0]} to {outside[-1]}" if outside else ""
    note = f"outside the view: epoch {outside[0]}" if len(outside) == 1 else note
    legend, rows = _legend(name, width, note)
    total = top + height + 14 + bars + 26 + 18 * rows
    decisions = [record.decision.value for record in trajectory]
    counts = ", ".join(f"{decisions.count(d)} {d}" for d in ("hard", "soft", "reject"))
    label = (
        f"Validation {metric} over {len(x)} decision points of {name}: {counts}; the ensemble ends at "
        f"{number(trajectory[-1].score)}"
    )
    parts = [
        f'<svg class="aswa-plot" viewBox="0 0 {width} {total}" role="img" aria-label="{escape(label)}" '
        'xmlns="http://www.w3.org/2000/svg">'
    ]
    for tick in _ticks(low, high):
        ty = place(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {ty:.1f}H{width - RIGHT}"/>')
        parts.append(f'<text class="quiet" x="{LEFT - 8}" y="{ty + 4:.1f}" text-anchor="end">{tick:g}</text>')
    clip = f"aswa-view-{width}-{top}"  # the same rectangle in every such picture of a page
    moving = ' data-moving=""' if animated else ""  # it grows with time: lines appear together with their marks
    area = f'<rect x="{LEFT}" y="{top}" width="{width - LEFT - RIGHT}" height="{height}"{moving}/>'
    parts.append(f'<clipPath id="{clip}">{area}</clipPath><g clip-path="url(#{clip})">')
    if running:
        parts.append(_path(running, "running"))
    size = 2.6 if len(x) > 80 else 4.6
    crowded = len(x) > 80  # the marks of many rejects in a row would hide the ensemble's line
    early = [i for i in visible if crowded and trajectory[i].decision is Decision.REJECT]
    if early:
        marks = (mark("reject", x[i], y[i], size, delay=i / len(x) * 6 if animated else None) for i in sorted(early))
        parts.append(f'<g class="crowd">{"".join(marks)}</g>')
    if scored:
        parts.append(_path(_stairs([x[i] for i in scored], [y[i] for i in scored]), "ensemble"))
    parts.append("</g>")
    shown = trajectory if chosen is None else Trajectory(trajectory[: chosen + 1])
    alphas = shown.alphas
    base, most = top + height + 14 + bars, max([*alphas, 1e-9])
    for px, alpha in zip(x, alphas, strict=False):
        if alpha > 0:
            tall = bars * alpha / most
            parts.append(
                f'<rect class="alpha" x="{px - step * 0.4:.1f}" y="{base - tall:.1f}" width="{step * 0.8:.1f}" '
                f'height="{tall:.1f}"/>'
            )
    parts.append(f'<path class="grid" d="M{LEFT} {base}H{width - RIGHT}"/>')
    parts.append(f'<text class="quiet" x="{LEFT - 8}" y="{base - bars + 10}" text-anchor="end">α {most:.2g}</text>')
    unit = "point" if trajectory[0].epoch is None else "epoch"
    parts.append(f'<text class="quiet" x="{LEFT - 8}" y="{base + 17}" text-anchor="end">{unit}</text>')
    for value in _ticks(xs[0], xs[-1], whole=True):
        tx = LEFT + step / 2 + (value - xs[0]) / span * (width - LEFT - RIGHT - step)
        parts.append(f'<text class="quiet" x="{tx:.1f}" y="{base + 17}" text-anchor="middle">{value:g}</text>')
    if chosen is not None:
        parts.append(
            f'<rect class="chosen" x="{x[chosen] - step / 2:.1f}" y="{top}" width="{max(step, 3):.1f}" '
            f'height="{base - top}"/>'
        )
    parts.append('<g class="points">')
    if panel:
        hint = f"Validation {metric} of the running model and of the ensemble. Point at an epoch to see why."
        for row, line in enumerate(_wrapped(hint, letters)):
            parts.append(f'<text class="quiet hint" x="{LEFT}" y="{16 + 17 * row}">{escape(line)}</text>')
    for i, record in enumerate(trajectory):
        parts.append('<g class="point">')
        if explained:
            parts.append(
                f'<rect class="band" x="{x[i] - step / 2:.1f}" y="{top}" width="{step:.2f}" height="{base - top}">'
                + ("" if panel else f"<title>{escape(chr(10).join(lines[i]))}</title>")
                + "</rect>"
            )
        if i in visible and i not in early:
            parts.append(mark(record.decision.value, x[i], y[i], size, delay=i / len(x) * 6 if animated else None))
        if panel:
            parts.append('<g class="tip">')
            for row, line in enumerate(lines[i]):
                weight = ' font-weight="600"' if row == 0 else ""
                parts.append(f'<text x="{LEFT}" y="{16 + 17 * row}"{weight}>{escape(line)}</text>')
            parts.append("</g>")
        parts.append("</g>")
    parts.append("</g>")
    parts.append(f'<g transform="translate(0 {base + 38})">{legend}</g></svg>')
    return "".join(parts)


def _view(trajectory: Trajectory) -> tuple[float, float]:
    """The range of scores shown: without the first, steep part of the curve, so that decisions can be told apart."""
    scores = [
        score
        for record in trajectory
        for score in (record.running_score, record.score)
        if score is not None and math.isfinite(score)
    ]
    if not scores:
        return 0.0, 1.0
    later = sorted(scores[len(scores) // 4 :]) if len(scores) > 12 else sorted(scores)
    low, high = later[len(later) // 50], max(scores) if later[-1] == max(scores) else later[-1]
    last = trajectory[-1].score
    if last is not None and math.isfinite(last):
        low, high = min(low, last), max(high, last)
    margin = (high - low) * 0.08 or abs(high) * 0.05 or 1.0
    return low - margin, high + margin


def _ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Round numbers between two others, about six of them."""
    span = (high - low) or 1.0
    size = 10 ** math.floor(math.log10(span / 5))
    size = next(size * factor for factor in (1, 2, 5, 10) if span / (size * factor) <= 7)
    size = max(1.0, size) if whole else size
    first = math.ceil(low / size - 1e-9)
    return [round(i * size, 12) for i in range(first, math.floor(high / size + 1e-9) + 1)]


def _stairs(x: Sequence[float], y: Sequence[float]) -> list[tuple[float, float]]:
    """The ensemble keeps its score until the next decision."""
    points = [(x[0], y[0])]
    for i in range(1, len(x)):
        points += [(x[i], y[i - 1]), (x[i], y[i])]
    return points


def _path(points: Sequence[tuple[float, float]], kind: str) -> str:
    line = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in points)
    return f'<path class="{kind}" d="{line}"/>'


def mark(kind: str, x: float, y: float, size: float, delay: float | None = None) -> str:
    """The shape of a decision: circle, triangle, square or cross."""
    when = "" if delay is None else f' style="animation-delay:{delay:.2f}s" data-appears=""'
    if kind == "init":
        return f'<circle class="init" cx="{x:.1f}" cy="{y:.1f}" r="{size}"{when}/>'
    shape = {
        "soft": f"M{x:.1f} {y - size * 1.2:.1f}l{size * 1.15:.1f} {size * 2:.1f}h{-size * 2.3:.1f}z",
        "hard": f"M{x - size:.1f} {y - size:.1f}h{2 * size:.1f}v{2 * size:.1f}h{-2 * size:.1f}z",
        "reject": f"M{x - size:.1f} {y - size:.1f}l{2 * size:.1f} {2 * size:.1f}m0 {-2 * size:.1f}"
        f"l{-2 * size:.1f} {2 * size:.1f}",
    }[kind]
    return f'<path class="{kind}" d="{shape}"{when}/>'


def _legend(name: str, width: float, note: str) -> tuple[str, int]:
    """Returns the legend of lines and marks, with a note, and its number of rows."""
    parts, x, y = [], float(LEFT), 0
    for kind, text in (
        ("running", "running model"),
        ("ensemble", f"{name} ensemble"),
        ("hard", "hard: starts over"),
        ("soft", "soft: one more snapshot"),
        ("reject", "reject: unchanged"),
    ):
        taken = 52 + 6.9 * len(text)
        if x + taken - 22 > width and x > LEFT:
            x, y = float(LEFT), y + 18
        if kind in ("running", "ensemble"):
            parts.append(f'<path class="{kind}" d="M{x:.0f} {y - 4}h22"/>')
        else:
            parts.append(mark(kind, x + 11, y - 4, 4.6))
        parts.append(f'<text x="{x + 30:.0f}" y="{y}">{escape(text)}</text>')
        x += taken
    if note:
        y += 18
        parts.append(f'<text class="quiet" x="{LEFT}" y="{y}">{escape(note)}</text>')
    return "".join(parts), 1 + y // 18


def _wrapped(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width)[:5]
