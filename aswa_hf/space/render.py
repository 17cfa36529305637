"""Pieces of HTML that an application shows. All text comes from data, so all of it is escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from aswa_hf.interactive import CSS as PLOT_CSS
from aswa_hf.interactive import describe, number, trajectory_svg
from aswa_hf.space.links import Answer, Edge
from aswa_hf.space.source import Source, label_of
from aswa_hf.style import css_colors
from aswa_hf.trajectory import Trajectory

LONGEST = 80  # characters of a label; the rest is in its tooltip
CSS = (
    css_colors(".gradio-container", ".dark .gradio-container, .gradio-container.dark")
    + PLOT_CSS
    + """
.gradio-container { --body-text-color-subdued: var(--soft-ink); }
.gradio-container .aswa { --card: var(--body-background-fill); }
.aswa { color: var(--ink); font-size: 15px; }
.gradio-container .html-container:has(.aswa) { padding: 0; }  /* one left edge for all tabs */
.gradio-container .aswa table { display: table; width: 100%; margin: 0; padding: 0; border-collapse: collapse; }
.aswa table { font-variant-numeric: tabular-nums; }
.aswa table.compared { max-width: 860px; }
.aswa .stacked tbody th { width: 16em; }
.aswa td:has(.bar) { width: 30%; }
.aswa caption { text-align: left; color: var(--soft-ink); padding: 0 0 6px; }
.aswa th, .aswa td { padding: 6px 8px; text-align: left; overflow-wrap: anywhere; }
.gradio-container .aswa :is(table, thead, tbody, tr, th, td) { border: 0 !important; }
.gradio-container .aswa tbody tr > * { border-top: 1px solid var(--line) !important; }
.aswa .narrow-only { display: none; }
.aswa thead th { overflow-wrap: normal; }
.aswa thead th { color: var(--soft-ink); font-weight: 500; font-size: 13px; }
.aswa td.n, .aswa th.n { text-align: right; white-space: nowrap; width: 1%; }
.aswa tr.best td, .aswa tr.best th { font-weight: 650; }
.aswa .bar { position: relative; height: 10px; border-radius: 5px; background: var(--line); min-width: 64px; }
.aswa .bar span { position: absolute; inset: 0 auto 0 0; border-radius: 5px; background: var(--ours); }
.aswa .known { border: 1px solid var(--soft); color: var(--ink); border-radius: 9px; font-size: 12px; padding: 0 7px; }
.aswa .known { white-space: nowrap; font-weight: 400; }
.aswa .quiet { color: var(--soft-ink); font-weight: 400; }
.aswa .stacked td.split { display: none; }
.aswa .scroll { overflow-x: auto; }
.aswa .error { border-left: 4px solid var(--hard); padding: 8px 12px; background: var(--note); }
.aswa .error, .aswa .output { color: var(--ink); overflow-wrap: anywhere; }
.aswa ol.chain { margin: 2px 0 0; padding-left: 18px; color: var(--soft-ink); font-size: 13px; font-weight: 400; }
.gradio-container .aswa ol.chain li { font-weight: 400; }
.aswa .nodes { max-width: 640px; display: block; margin: 0 auto; }
.aswa .around { max-width: 640px; margin: 0 auto; text-align: center; }
.gradio-container .aswa .around h4 { margin: 12px 0 0; }
#image-input img { object-fit: contain !important; min-height: 160px; }  /* small pictures can be seen */
#hops-message:not(:has(.error)) { display: none; }  /* an empty message takes no room */
.aswa .nodes text { fill: var(--ink); font: 13px system-ui, sans-serif; }
.aswa .nodes .relation { fill: var(--soft-ink); font-size: 11px; }
.aswa .nodes text { paint-order: stroke; stroke: var(--card); stroke-width: 4px; stroke-linejoin: round; }
.aswa .nodes circle { fill: var(--card); stroke: var(--ours); stroke-width: 2; }
.aswa .nodes .own { fill: var(--ours); }
.aswa .nodes path { stroke: var(--soft-ink); stroke-width: 1.5; fill: none; }
.aswa .nodes path.predicted { stroke: var(--hard); stroke-dasharray: 5 4; }
.aswa .nodes circle.predicted { stroke: var(--hard); stroke-dasharray: 4 3; }
.aswa .output { white-space: pre-wrap; border: 1px solid var(--line); border-radius: 8px; padding: 10px; }
.aswa .output { min-height: 3em; background: var(--card); }
.aswa .pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 280px), 1fr)); gap: 12px; }
.gradio-container button[role="tab"].selected { color: var(--ours) !important; }
.gradio-container :is(button, input, textarea):focus-visible { outline: 2px solid var(--ours) !important; }
.gradio-container :is(button, input[type="radio"], input[type="checkbox"]):focus-visible { outline-offset: 2px; }
@media (max-width: 640px) {
  .aswa .wide-only { display: none; } .aswa .narrow-only { display: block; }
  .aswa .bar { min-width: 40px; } .aswa th, .aswa td { padding: 5px 4px; }
  .aswa .stacked :is(table, tbody, th, td) { display: block; }
  .aswa .stacked td:has(.bar) { width: auto; }
  .aswa .stacked td.n { text-align: left; }
  .aswa .stacked thead { display: none; }
  .aswa .stacked tr { display: grid; grid-template-columns: 6em 4.5em 1fr; align-items: center; padding: 4px 0; }
  .aswa .stacked tr th { grid-column: 1 / -1; width: auto; }
  .aswa .stacked tr td { border: 0 !important; padding: 2px 4px; }
  .aswa .stacked td.split { display: block; color: var(--soft-ink); font-size: 13px; }
  .aswa .chains td:has(.bar) { display: none; }
  .aswa td:has(.bar) { width: 20%; }
}
.aswa .chains td { vertical-align: top; }
.aswa .chains .bar { margin-top: 7px; }
.gradio-container .md table { display: block; width: fit-content; max-width: 100%; overflow-x: auto; }
.gradio-container .md table { border: 0; padding: 0; }
#card :is(p, ul, ol) { max-width: 860px; }
.gradio-container .prose :is(th, td) { overflow-wrap: normal; word-break: normal; padding: 6px 10px; }
.gradio-container .prose td { border-color: var(--line); } .gradio-container .prose th { border-color: var(--line); }
.gradio-container input[type="range"]::-webkit-slider-thumb { border: 2px solid var(--ours); }
.gradio-container input[type="range"]::-moz-range-thumb { border: 2px solid var(--ours); }
"""
)


def short(label: str, longest: int = LONGEST) -> str:
    """Returns a label, escaped; a long one is cut, with the whole in its tooltip."""
    if len(label) <= longest:
        return escape(label).replace("_", "_<wbr>")  # a line may end there
    return f'<span title="{escape(label[:1000])}">{escape(label[: longest - 1])}…</span>'


def piece(content: str) -> str:
    """Wraps HTML in the element that the style applies to."""
    return f'<div class="aswa">{content}</div>'


def error(reason: BaseException | str) -> str:
    """Returns an error message, which screen readers announce."""
    text = " ".join(str(reason).split())[:600]
    return piece(f'<p class="error" role="alert">{escape(text)}</p>')


def bar(share: float, name: str) -> str:
    """Returns a bar of a length between 0 and 1."""
    percent = 100 * min(max(share if math.isfinite(share) else 0.0, 0.0), 1.0)
    return (
        f'<div class="bar" role="meter" aria-valuemin="0" aria-valuemax="100" aria-valuenow="{percent:.1f}" '
        f'aria-label="{escape(name[:200])}"><span style="width:{percent:.1f}%"></span></div>'
    )


def answers(question: str, found: Sequence[Answer], has_graph: bool) -> str:
    """Returns answers as a table: rank, label, whether it is known, probability and score."""
    rows = []
    for rank, one in enumerate(found, 1):
        known = f'<span class="known">known ({escape(one.known)})</span>' if one.known else ""
        rows.append(
            f'<tr><td class="n">{rank}</td><th scope="row">{short(one.label)} {known}</th>'
            f"<td>{bar(one.share, f'probability of {one.label}')}</td>"
            f'<td class="n">{one.share:.3f}</td><td class="n wide-only">{one.score:.3f}</td></tr>'
        )
    note = "" if has_graph else '<p class="quiet">The graph is not available, so known answers are not marked.</p>'
    return piece(
        f"<table><caption>{escape(question[:400])}</caption><thead><tr><th class='n'>rank</th><th>answer</th>"
        "<th colspan='2'>probability</th><th class='n wide-only'>score</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>{note}"
    )


def chains(question: str, found: Iterable[Mapping[str, Any]]) -> str:
    """Returns answers to a multi-hop question, each with the steps that lead to it."""
    rows = []
    for rank, one in enumerate(found, 1):
        steps = "".join(
            f"<li>{short(step.source)} —{short(step.relation)}→ {short(step.target)} "
            f"<span class='quiet'>({step.truth:.3g})</span></li>"
            for step in one["chain"]
        )
        rows.append(
            f'<tr><td class="n">{rank}</td><th scope="row">{short(one["label"])}<ol class="chain">{steps}</ol></th>'
            f"<td>{bar(one['truth'], 'truth of ' + one['label'])}</td><td class='n'>{one['truth']:.3g}</td></tr>"
        )
    return piece(
        f"<table class='chains'><caption>{escape(question[:600])}</caption><thead><tr><th class='n'>rank</th>"
        "<th>answer and how it is reached</th>"
        f"<th colspan='2'>truth</th></tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def neighborhood(entity: str, edges: Sequence[Edge]) -> str:
    """Returns a small picture of an entity and its neighbors: known ones with a line, predicted ones dashed."""
    if not edges:
        return piece('<p class="quiet">This entity has no neighbors to show.</p>')
    title = f"<h4>Around {short(entity)}</h4>"
    legend = '<p class="quiet">Solid: in the graph. Dashed: predicted by the model.</p>'
    wide, narrow = _nodes(entity, edges, 640, 420, 20), _nodes(entity, edges, 380, 520, 16)
    pictures = f'<div class="wide-only">{wide}</div><div class="narrow-only">{narrow}</div>'
    return piece(f'<div class="around">{title}{pictures}{legend}</div>')


def _nodes(entity: str, edges: Sequence[Edge], width: int, height: int, longest: int) -> str:
    """Returns an entity in the middle and its neighbors around it; labels have at most `longest` characters."""
    x0, y0 = width // 2, height // 2
    side = 3.6 * longest  # half of the width of the longest label
    told = "; ".join(
        f"{e.relation} {'to' if e.outgoing else 'from'} {e.other}{'' if e.known else ' (predicted)'}" for e in edges
    )
    arrow = f"aswa-arrow-{width}"
    parts = [
        f'<svg class="nodes" viewBox="0 0 {width} {height}" width="100%" role="img" '
        f'aria-label="{escape(f"Neighbors of {entity[:200]}: {told[:1500]}")}" xmlns="http://www.w3.org/2000/svg">'
        f'<defs><marker id="{arrow}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0L8 4L0 8z" style="fill:var(--soft-ink);stroke:none"/></marker></defs>'
    ]
    for i, edge in enumerate(edges):
        angle = 2 * math.pi * i / len(edges) - math.pi / 2
        x, y = x0 + (x0 - 1.2 * side) * math.cos(angle), y0 + (y0 - 50) * math.sin(angle)
        kind = "known" if edge.known else "predicted"
        length = math.hypot(x - x0, y - y0)
        ux, uy = (x - x0) / length, (y - y0) / length
        ends = [(x0 + 16 * ux, y0 + 16 * uy), (x - 11 * ux, y - 11 * uy)]
        (ax, ay), (bx, by) = ends if edge.outgoing else ends[::-1]
        parts.append(
            f'<path class="{kind}" d="M{ax:.0f} {ay:.0f}L{bx:.0f} {by:.0f}" marker-end="url(#{arrow})"/>'
            f'<circle class="{kind}" cx="{x:.0f}" cy="{y:.0f}" r="9"/>'
        )
        title = f"{edge.relation}: {edge.other}" + ("" if edge.known else f" (predicted, {edge.share:.2f})")
        below = y + (30 if y >= y0 else -16)
        parts.append(
            f'<text x="{min(max(x, side), width - side):.0f}" y="{below:.0f}" text-anchor="middle">'
            f"<title>{escape(title[:500])}</title>{_cut(edge.other, longest)}</text>"
            f'<text class="relation" x="{x0 + 0.55 * (x - x0):.0f}" y="{y0 + 0.55 * (y - y0) - 4:.0f}" '
            f'text-anchor="middle">{_cut(edge.relation, longest)}</text>'
        )
    parts.append(f'<circle class="own" cx="{x0}" cy="{y0}" r="13"/>')
    parts.append(
        f'<text x="{x0}" y="{y0 + 32}" text-anchor="middle" font-weight="600">{_cut(entity, 30)}</text></svg>'
    )
    return "".join(parts)


def _cut(text: str, longest: int) -> str:
    return escape(text if len(text) <= longest else text[: longest - 1] + "…")


def classes(found: Sequence[tuple[str, float]]) -> str:
    """Returns the classes of a picture with their probabilities."""
    rows = "".join(
        f'<tr><th scope="row">{short(name)}</th><td>{bar(share, "probability of " + name)}</td>'
        f'<td class="n">{100 * share:.1f} %</td></tr>'
        for name, share in found
    )
    return piece(
        "<table class='compared'><thead><tr><th>class</th><th colspan='2'>probability</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>"
    )


def texts(found: Mapping[str, str]) -> str:
    """Returns the continuations of a text side by side."""
    named = {"averaged": "Averaged weights", "running": "Running model, last checkpoint"}
    parts = "".join(
        f"<section><h4>{escape(named.get(name, name))}</h4>"
        f'<div class="output">{escape(text[:20000]) or "<i>nothing</i>"}</div></section>'
        for name, text in found.items()
    )
    same = len(set(found.values())) == 1 and len(found) > 1
    notes = "<p class='quiet'>Both continue the text in the same way.</p>" if same else ""
    if len(found) == 1:
        notes = "<p class='quiet'>The running model's checkpoint is not in this folder.</p>"
    return piece(f'<div class="pair" aria-live="polite">{parts}</div>{notes}')


def history(source: Source, chosen: int | None = None) -> str:
    """Returns the trajectory of a run as an interactive picture."""
    if source.main is None:
        return piece('<p class="quiet">This model has no trajectory file, so its history is not known.</p>')
    options: dict[str, Any] = {"greater_is_better": source.greater_is_better, "chosen": chosen}
    shown = {source.main: source.trajectories[source.main]}
    wide = trajectory_svg(shown, metric=source.metric, width=1200, **options)
    # On a phone there is nothing to point with: the slider shows what each decision did.
    narrow = trajectory_svg(shown, metric=source.metric, panel=False, width=360, explained=False, **options)
    return piece(f'<div class="wide-only">{wide}</div><div class="narrow-only">{narrow}</div>')


def point(source: Source, index: int) -> str:
    """Returns what a decision point did, and the weights of the ensemble as it was after it."""
    trajectory = source.trajectories[source.main or ""]
    index = min(max(int(index), 0), len(trajectory) - 1)
    headline, scores, why = describe(trajectory, index, greater_is_better=source.greater_is_better)
    alphas = Trajectory(trajectory[: index + 1]).alphas
    members = [i for i, alpha in enumerate(alphas) if alpha > 0]
    inside = (
        f"α = {alphas[members[0]]:.4g}{f' for each of {len(members)}' if len(members) > 1 else ''}: "
        f"{_ranges(trajectory, members)}. All other weights are 0."
        if members
        else "The ensemble is empty."
    )
    return piece(
        f'<div aria-live="polite"><h4>{escape(headline)}</h4><p>{escape(scores)}</p><p>{escape(why)}</p>'
        f"<p><b>The ensemble after it:</b> {escape(inside)}</p></div>"
    )


def _ranges(trajectory: Trajectory, members: Sequence[int]) -> str:
    """Returns "epochs 3, 5 to 9"; "decision points …" if some were made within an epoch."""
    epochs = [int(r.epoch) for r in trajectory if r.epoch is not None and float(r.epoch).is_integer()]
    whole = len(epochs) == len(trajectory)
    numbers = [epochs[i] if whole else i + 1 for i in members]
    runs: list[list[int]] = []
    for value in numbers:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"{'epoch' if whole else 'decision point'}{'s' * (len(numbers) > 1)} {', '.join(parts)}"


def strategies(source: Source) -> str:
    """Returns the strategies of a run side by side, on validation and test, in the metric that decided."""
    if not source.results:
        return piece('<p class="quiet">There are no results in this folder.</p>')
    splits = [s for s in ("validation", "test") if any(s in r for r in source.results.values())]
    splits += sorted(
        {s for r in source.results.values() for s, m in r.items() if isinstance(m, Mapping)} - set(splits)
    )

    def value(name: str, split: str) -> float | None:
        metrics = source.results[name].get(split)
        found = metrics.get(source.metric) if isinstance(metrics, Mapping) else None
        return float(found) if isinstance(found, (int, float)) else None

    best = {}
    for split in splits:
        measured = [v for name in source.results if (v := value(name, split)) is not None and math.isfinite(v)]
        best[split] = (max if source.greater_is_better else min)(measured, default=None)
    rows = []
    for name in source.results:
        cells = []
        for split in splits:
            found = value(name, split)
            bold = found is not None and found == best[split]
            text = number(found)
            cells.append(f'<td class="split">{escape(split)}</td>')
            cells.append(f'<td class="n">{f"<b>{text}</b>" if bold else text}</td>')
            scale = best[split] if source.greater_is_better else None
            share = found / scale if found is not None and scale and scale > 0 else 0.0
            cells.append(f"<td>{bar(share, f'{split} {source.metric} of {name}')}</td>" if scale else "<td></td>")
        applied = ' <span class="known">shipped</span>' if name == source.applied else ""
        label = label_of(name)
        same = label.lower().replace(" ", "-") == name
        words = "" if same else f'<br><span class="quiet">{escape(label)}</span>'
        rows.append(f'<tr><th scope="row">{escape(label if same else name)}{applied}{words}</th>{"".join(cells)}</tr>')
    heads = "".join(f'<th class="n">{escape(split)} {escape(source.metric)}</th><td></td>' for split in splits)
    note = (
        '<p class="quiet">All strategies follow the same run. Validation chose the weights, so its scores are '
        "optimistic; bold is the best of a column. Bars are relative to it.</p>"
    )
    return piece(
        f'<div class="scroll stacked"><table class="compared"><thead><tr><th>strategy</th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{note}"
    )
