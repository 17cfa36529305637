"""Writes the tables of measured results into the pages that show them: `make tables`.

A result is what a run wrote as `results.json`, kept as `results/<task>/<run>.json`. A table stands between
`<!-- table: <task> <metric> [<dataset>…] -->` and `<!-- /table -->`.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STRATEGIES = ("last", "best", "swa", "ema", "aswa")
MODELS = {"distmult": "DistMult", "complex": "ComplEx", "qmult": "QMult", "keci": "Keci"}
MARKED = re.compile(r"(<!-- table: (\S+) (\S+) (.*?)-->\n).*?(<!-- /table -->)", flags=re.DOTALL)

Result = dict[str, Any]


def load_results(task: str) -> list[Result]:
    return [json.loads(path.read_text()) for path in sorted((ROOT / "results" / task).glob("*.json"))]


def table(task: str, metric: str, datasets: list[str]) -> str:
    """Mean ± standard deviation of a test metric over seeds, the best of each row bold; no names mean all datasets."""
    groups: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in load_results(task):
        if datasets and result["dataset"] not in datasets:
            continue
        groups[result["dataset"], result["model"]].append(result)
    names = [
        name for name in (*STRATEGIES, "fge") if all(name in r["strategies"] for rs in groups.values() for r in rs)
    ]
    lines = [f"| dataset | model | {' | '.join(names)} |", "| --- | --- |" + " --- |" * len(names)]
    for (dataset, model), results in sorted(groups.items(), key=_by_size):
        scores = {name: [_percent(r["strategies"][name]["test"][metric]) for r in results] for name in names}
        best = max(round(mean(values), 1) for values in scores.values())
        cells = [_spread(values, bold=round(mean(values), 1) == best) for values in scores.values()]
        lines.append(f"| {dataset} | {MODELS.get(model, model)} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", wins(groups.values(), names, metric)])


def wins(groups: Iterable[list[Result]], names: list[str], metric: str) -> str:
    """How often ASWA is ahead of, level with and behind each of the others, run by run."""
    counts = []
    for name in names:
        if name == "aswa":
            continue
        gaps = [
            round(r["strategies"]["aswa"]["test"][metric] - r["strategies"][name]["test"][metric], 4)
            for results in groups
            for r in results
        ]
        counts.append(f"{name} {sum(g > 0 for g in gaps)} / {sum(g == 0 for g in gaps)} / {sum(g < 0 for g in gaps)}")
    return f"ASWA is better / level / worse, run by run, than {', '.join(counts)}."


def _by_size(group: tuple[tuple[str, str], list[Result]]) -> tuple[int, str, int]:
    """Real graphs first, the three Countries last; models in the order of the paper."""
    (dataset, model), _ = group
    return dataset.startswith("Countries"), dataset, list(MODELS).index(model) if model in MODELS else 0


def _percent(value: float) -> float:
    return 100 * value


def _spread(values: list[float], *, bold: bool) -> str:
    shown = f"{mean(values):.1f}"
    spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    return f"**{shown}**{spread}" if bold else shown + spread


def main() -> None:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        filled = MARKED.sub(lambda mark: f"{mark[1]}\n{table(mark[2], mark[3], mark[4].split())}\n\n{mark[5]}", text)
        if filled != text:
            page.write_text(filled, encoding="utf-8")


if __name__ == "__main__":
    main()
