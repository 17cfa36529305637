"""The page of a report: its content as plain data, then as HTML with embedded plots."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from aswa_hf._utils.files import make_folder, replacing, write_text
from aswa_hf.hub.card import LABELS
from aswa_hf.interactive import CSS, trajectory_svg
from aswa_hf.plotting import as_png, as_svg, draw_comparison, draw_gains, draw_trajectories
from aswa_hf.report import compare
from aswa_hf.report.compare import ALL, OURS, Behind, Comparison, Groups, Pair
from aswa_hf.report.gather import MeasuredRun, read_runs
from aswa_hf.report.statistics import Spread
from aswa_hf.style import css_colors
from aswa_hf.trajectory import Decision, encode_number

TEMPLATE = "page.html"


@dataclass
class Task:
    """The content of a report on the runs of one task."""

    name: str
    groups: Groups
    strategies: list[str]
    splits: list[str]
    unseen_split: str | None
    metric: str
    twins: dict[Pair, Pair]
    counted: Groups
    judged: Groups = field(default_factory=dict)
    pooled: list[str] = field(default_factory=list)
    comparisons: dict[str, list[Comparison]] = field(default_factory=dict)
    behind: list[Behind] = field(default_factory=list)
    shared: int = 0
    pictures: dict[str, str] = field(default_factory=dict)

    @property
    def tested(self) -> bool:
        """Whether there are enough pairs for p-values, and for pictures of how gains are distributed."""
        return any(one.p is not None for found in self.comparisons.values() for one in found)

    @property
    def runs(self) -> list[MeasuredRun]:
        return [run for members in self.groups.values() for run in members]

    @property
    def datasets(self) -> list[tuple[str, list[MeasuredRun]]]:
        """The runs with a trajectory, by dataset."""
        shown = [run for run in self.runs if run.trajectories]
        return [(name, list(runs)) for name, runs in groupby(shown, key=lambda run: run.dataset)]

    @property
    def columns(self) -> list[str]:
        """The strategies as columns, ASWA first: narrow screens only show the first ones."""
        return sorted(self.strategies, key=lambda name: name != OURS)

    def metrics(self, split: str) -> list[str]:
        return compare.metrics_of(self.runs, split)

    def spread(self, pair: Pair, strategy: str, split: str, metric: str) -> Spread | None:
        return compare.over_seeds(self.groups[pair], strategy, split, metric)

    def best(self, pair: Pair, split: str, metric: str) -> set[str]:
        return compare.best_strategies(self.groups[pair], self.strategies, split, metric)

    def is_lower(self, metric: str) -> bool:
        return any(metric in run.lower for run in self.runs)


def write_report(
    paths: Iterable[str | Path], output: str | Path, track: Callable[[list[Any]], Iterable[Any]] = iter
) -> dict[str, Any]:
    """Writes the page and its plots, and returns the content of the page as plain data.

    The plots are in the page as SVG, and saved as PNG files in the folder `<page>_files` beside it.
    """
    output = Path(output)
    if output.suffix.lower() not in (".html", ".htm") or output.is_dir():
        raise ValueError(f"The report is an HTML page, so --output must end in .html; got {output}.")
    runs, notes = read_runs(paths)
    tasks = [_task(name, list(members)) for name, members in groupby(runs, key=lambda run: run.task)]
    notes += [note for task in tasks for note in _notes(task)]
    pictures: dict[str, bytes] = {}
    drawn: dict[str, str] = {}
    for name, draw, show in track([job for task in tasks for job in _jobs(task)]):
        figure = draw()
        pictures[name], drawn[name] = as_png(figure), show(figure)
    html = _render(tasks, notes, drawn)
    folder = output.with_name(f"{output.stem}_files")
    make_folder(folder)
    for name, content in pictures.items():
        with replacing(folder / name) as temporary:
            temporary.write_bytes(content)
    write_text(output, html)
    return _as_data(tasks, notes) | {"report": str(output), "pictures": [str(folder / name) for name in pictures]}


def _task(name: str, runs: list[MeasuredRun]) -> Task:
    groups = compare.by_pair(runs)
    twins = compare.twins(groups)
    counted = {pair: members for pair, members in groups.items() if pair not in twins}
    splits = compare.splits_of(runs)
    strategies = compare.strategies_of(runs)
    unseen = splits[0] if splits[0] in compare.UNSEEN else None
    metrics = compare.metrics_of(runs, splits[0])
    decided = [run.metric for run in runs if run.metric in metrics]
    metric = next((name for name in metrics if name.startswith("average ")), (decided or metrics)[0])
    task = Task(name, groups, strategies, splits, unseen, metric, twins, counted)
    if unseen and OURS in strategies:
        task.pooled = compare.poolable(counted, metrics, unseen)
        families = [*([one] for one in metrics), *([task.pooled] if len(task.pooled) > 1 else [])]
        tested = [compare.compare(counted, family, unseen) for family in families]
        task.comparisons = {found[0].metric: found for found in tested if found}
        task.judged = compare.judged(counted, metric, unseen)
        task.behind = compare.behind(task.judged, metric, unseen)
        best = [compare.best_strategies(members, strategies, unseen, metric) for members in task.judged.values()]
        task.shared = sum(OURS in names and len(names) > 1 for names in best)
    return task


def _notes(task: Task) -> list[str]:
    """Returns what a reader must know about the runs to interpret the results."""
    notes = []
    merged: dict[tuple[str, str], list[str]] = {}
    for (dataset, model), (_, first) in task.twins.items():
        merged.setdefault((model, first), []).append(dataset)
    for (model, first), datasets in merged.items():
        notes.append(
            f"{model} and {first} have identical results for every seed they share on {_listed(datasets)}: there "
            f"they are the same model (as Keci over Cl(0, 1) is ComplEx). Counts and tests include only {first}."
        )
    for other in (name for name in task.strategies if name != OURS):
        broken = {
            " · ".join(filter(None, pair))
            for split in compare.UNSEEN
            for metric in task.metrics(split)
            for pair in compare.gains(task.counted, other, metric, split)[1]
        }
        if broken:
            notes.append(
                f"ASWA or {other} has a value that is not finite on {_listed(sorted(broken))}: excluded from the "
                f"counts and tests against {other}."
            )
    unjudged = [" · ".join(filter(None, pair)) for pair in task.counted if pair not in task.judged]
    if task.comparisons and unjudged:
        notes.append(
            f"ASWA and another strategy do not both have a {task.unseen_split} {task.metric} on {_listed(unjudged)}: "
            "not counted."
        )
    some = [run.source for run in task.runs if not set(task.strategies) <= set(run.scores)]
    if some:
        notes.append(f"Not every run has every strategy ({_listed(some)}); each comparison uses the seeds with both.")
    without = [run.source for run in task.runs if not run.trajectories]
    if without:
        which = _listed(without) if len(without) <= 4 else f"{len(without)} runs"
        notes.append(f"There is no trajectory for {which}: the results are shown without decisions.")
    return notes


def _jobs(task: Task) -> list[tuple[str, Callable[[], Any], Callable[[Any], str]]]:
    """Returns the plots to draw: the file, the function that draws it, and the one that shows it in the page."""
    jobs: list[tuple[str, Callable[[], Any], Callable[[Any], str]]] = []

    def add(key: str, name: str, draw: Callable[[], Any], show: Callable[[Any], str]) -> None:
        taken = set(task.pictures.values())
        stem = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        file = next(f for i in range(1, len(taken) + 2) if (f := f"{stem}{f'-{i}' if i > 1 else ''}.png") not in taken)
        task.pictures[key] = file
        jobs.append((file, draw, show))

    if task.unseen_split:
        draw = partial(_draw_comparison, task)
        add("comparison", f"{task.name} comparison", draw, partial(_wide_and_narrow, draw))
    if task.tested and task.metric in task.comparisons:
        draw = partial(_draw_gains, task)
        add("gains", f"{task.name} gains", draw, partial(_wide_and_narrow, draw))
    for name, runs in task.datasets:
        for run in runs:
            seed = "" if run.seed is None else run.seed
            draw = partial(draw_trajectories, run.trajectories, metric=run.metric, title=run.title)
            show = partial(_explained, run, alone=len(runs) == 1)
            add(run.source, f"{task.name} {name} {run.model} {seed}", draw, show)
    return jobs


def _wide_and_narrow(draw: Callable[..., Any], figure: Any) -> str:
    """A plot twice: for phones half as wide, so that its letters can be read there; the page shows one of them."""
    narrow = as_svg(draw(narrow=True), salt="aswa-narrow")
    return f'<div class="on-wide">{as_svg(figure)}</div><div class="on-narrow">{narrow}</div>'


def _explained(run: MeasuredRun, _figure: Any, *, alone: bool) -> str:
    """The trajectory as the page shows it: each decision with its reason; the only one of a dataset is large."""
    better = run.metric not in run.lower
    draw = partial(trajectory_svg, run.trajectories, metric=run.metric, greater_is_better=better)
    small = draw(panel=False, width=360)
    return f'<div class="on-wide">{draw()}</div><div class="on-narrow">{small}</div>' if alone else small


def _draw_comparison(task: Task, *, narrow: bool = False) -> Any:
    def column(name: str) -> list[tuple[float, float] | None]:
        found = [task.spread(pair, name, str(task.unseen_split), task.metric) for pair in task.counted]
        return [(one.mean, one.std or 0.0) if one else None for one in found]

    columns = {name: column(name) for name in task.strategies}
    return draw_comparison(list(task.counted), columns, f"{task.unseen_split} {task.metric}", narrow=narrow)


def _draw_gains(task: Task, *, narrow: bool = False) -> Any:
    rows = {f"over {one.other}": (list(one.gains.values()), one.median) for one in task.comparisons[task.metric]}
    label = f"gain of ASWA in {task.unseen_split} {task.metric} (left of 0: ASWA is worse)"
    return draw_gains(rows, label, narrow=narrow)


def decision_summary(run: MeasuredRun) -> dict[str, Any]:
    """Summarizes a run in numbers: decisions, members, the last change, and the running model's scores."""
    trajectory = run.trajectories.get(OURS)
    if not trajectory:
        return {}
    decisions = trajectory.decisions
    changes = [record for record in trajectory if record.decision is not Decision.REJECT]
    seen = [r for r in trajectory if r.running_score is not None and math.isfinite(r.running_score)]
    sign = -1 if run.metric in run.lower else 1
    best = max(seen, key=lambda r: sign * (r.running_score or 0.0), default=None)

    def epoch(record: Any) -> float | None:
        return None if record is None else record.index + 1 if record.epoch is None else record.epoch

    return {
        **{decision.value: decisions.count(decision) for decision in Decision},
        "points": len(trajectory),
        "members": sum(alpha > 0 for alpha in trajectory.alphas),
        "last_change": epoch(changes[-1] if changes else None),
        "running_best": best.running_score if best else None,
        "running_best_epoch": epoch(best),
        "running_last": seen[-1].running_score if seen else None,
        "score": trajectory[-1].score,
    }


def _render(tasks: list[Task], notes: list[str], drawn: dict[str, str]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[..., str]] = {
        "number": _number,
        "gain": lambda value: _number(value, sign="+"),
        "p": _p,
        "breakable": _breakable,
    }
    environment.filters |= filters
    page = environment.get_template(TEMPLATE).render(
        tasks=tasks,
        notes=notes,
        drawn=drawn,
        colors=css_colors(),
        plot_css=CSS,
        decision_summary=decision_summary,
        labels=LABELS,
        ours=OURS,
        all_metrics=ALL,
    )
    return page.strip() + "\n"


def _as_data(tasks: list[Task], notes: list[str]) -> dict[str, Any]:
    """Returns the content of the page as plain data."""
    data = {
        "notes": notes,
        "tasks": [
            {
                "task": task.name,
                "split": task.unseen_split,
                "metric": task.metric,
                "results": [
                    {"dataset": pair[0], "model": pair[1], "split": split, "metric": metric, "strategy": name}
                    | vars(found)
                    for pair in task.groups
                    for split in task.splits
                    for metric in task.metrics(split)
                    for name in task.strategies
                    if (found := task.spread(pair, name, split, metric))
                ],
                "judged": [{"dataset": dataset, "model": model} for dataset, model in task.judged],
                "counted_once": [{"dataset": p[0], "model": p[1], "as": t[1]} for p, t in task.twins.items()],
                "comparisons": [vars(one) for found in task.comparisons.values() for one in found],
                "behind": [
                    {"dataset": b.pair[0], "model": b.pair[1], "strategy": b.other, "gap": b.gap} for b in task.behind
                ],
                "runs": [
                    {"source": run.source, "dataset": run.dataset, "model": run.model, "seed": run.seed}
                    | decision_summary(run)
                    for run in task.runs
                ],
            }
            for task in tasks
        ],
    }
    encoded: dict[str, Any] = encode_number(data)
    return encoded


def _number(value: float | None, sign: str = "") -> str:
    if value is None:
        return "–"
    return f"{value:{sign}.4f}" if abs(value) < 10 else f"{value:{sign}.2f}"


def _p(value: float | None) -> str:
    if value is None:
        return "–"
    return "< 0.0001" if value < 0.0001 else f"{value:.4f}"


def _breakable(name: str) -> str:
    """HTML of a name whose line may end after an underscore."""
    return escape(name).replace("_", "_<wbr>")


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
