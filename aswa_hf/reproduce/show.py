"""A table of the paper beside the results of the runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.table import Table as RichTable

from aswa_hf.experiments.recipes import find_recipe
from aswa_hf.experiments.settings import KGERun
from aswa_hf.reproduce.figures import Figure, paper_figures
from aswa_hf.reproduce.parts import is_measured, part_file
from aswa_hf.reproduce.runs import GridRun, recipe_epochs, results
from aswa_hf.reproduce.tables import IMAGES, KGE, MODELS, Table, plain
from aswa_hf.run_folder import RESULTS

ORDER = (
    "last", "best", "ema", "best-ema", "bema", "power-ema", "lawa", "swad", "swad-max", "swa", "swa-all", "aswa",
    "dense-aswa", "fge",
)  # fmt: skip
MISSING = "–"
LINES = (("ours", "ours", ""), ("±", "deviation", ""), ("paper", "paper", ""), ("differs", "difference", "+"))


def rows(table: Table, runs: Sequence[GridRun], output_dir: Path) -> list[dict[str, Any]]:
    """The rows of a table: `{"dataset", "model", "strategy", "val_ratio", "columns": {name: cell}}`.

    A cell is `{"ours", "deviation", "runs", "paper", "paper_deviation", "difference"}`; missing values are None.
    """
    found = {run: _scores(table, run, output_dir) for run in runs}
    content = []
    for dataset, ratio, model in dict.fromkeys((run.dataset, run.val_ratio, run.model) for run in runs):
        group = [run for run in runs if (run.dataset, run.val_ratio, run.model) == (dataset, ratio, model)]
        paper = _paper_rows(table, dataset, ratio, model)
        columns = list(table.columns) or list(dict.fromkeys(_column(table, run) for run in group))
        for strategy in (name for name in ORDER if name in (*table.strategies, *["fge"] * table.fge)):
            cells = {}
            for column in columns:
                some = [run for run in group if table.columns or _column(table, run) == column]
                key = column if table.columns else group[0].settings.metric
                values = [found[run][strategy, key] for run in some if (strategy, key) in found[run]]
                cells[column] = _cell(values, paper.get((strategy, column)))
            content.append(
                {"dataset": dataset, "model": model, "strategy": strategy, "val_ratio": ratio, "columns": cells}
            )
    return content


def _column(table: Table, run: GridRun) -> str:
    """The column of a run in a table that has one for each length or learning rate."""
    return f"{run.settings.lr:g}" if table.by_rates else str(run.epochs)


def _scores(table: Table, run: GridRun, output_dir: Path) -> dict[tuple[str, str], float]:
    """The numbers of a run for a table, by strategy and metric."""
    part = part_file(table.name)
    content = results(run, output_dir, part or RESULTS)
    if content is None or not is_measured(table.name, run, output_dir):
        return {}
    where, scale = {"train-fit": "train", "multi-hop": "queries"}.get(table.name, "test"), 1.0
    if table.task == IMAGES:
        scale = 100.0
    found = {}
    for strategy, measured in content["strategies"].items():
        for name, value in measured.get(where, {}).items():
            number = value["mrr"] if isinstance(value, dict) else value
            # Numbers that are not finite are written as strings, and are left out of the mean.
            if isinstance(number, float):
                found[strategy, name] = scale * number
    return found


def _paper_rows(table: Table, dataset: str, ratio: float | None, model: str) -> dict[tuple[str, str], Figure]:
    if table.of_recipes:
        published = find_recipe(f"{dataset}/{model}").published
        return {(strategy, "mrr"): Figure(published) for strategy in table.strategies if published is not None}
    found: dict[tuple[str, str], Figure] = {}
    for (name, paper_model, strategy), numbers in (paper_figures(table.name) if table.figures else {}).items():
        name, _, paper_ratio = name.partition(":")
        same_ratio = float(paper_ratio) == ratio if paper_ratio else ratio is None or ratio in table.val_ratios
        if (plain(name), paper_model) == (plain(dataset), model) and same_ratio:
            found |= {(strategy, column): number for column, number in zip(table.figures, numbers, strict=True)}
    return found


def _cell(values: list[float], paper: Figure | None) -> dict[str, Any]:
    ours = mean(values) if values else None
    return {
        "ours": ours,
        "deviation": stdev(values) if len(values) > 1 else None,
        "runs": len(values),
        "paper": paper and paper.mean,
        "paper_deviation": paper and paper.deviation,
        "difference": ours - paper.mean if ours is not None and paper else None,
    }


def title(table: Table, runs: Sequence[GridRun]) -> str:
    """The title of a table, with its settings and a note if these are not the paper's."""
    epochs = list(dict.fromkeys(run.epochs for run in runs))
    seeds = list(dict.fromkeys(run.seed for run in runs))
    parts = ["epochs: " + ", ".join(map(str, epochs)), "seeds: " + ", ".join(map(str, seeds))]
    if table.by_rates:
        return f"{table.title} ({'; '.join(parts)})"
    if table.of_recipes:
        return f"{table.title} ({parts[-1]})"
    if table.task == KGE:
        paper = KGERun(dataset="")
        parts.append(f"d = {paper.dim}, Adam, learning rate {paper.lr}, KvsAll")
    elif runs[0].train_size:
        parts.append(f"{runs[0].train_size} training images")
    changed = any(
        run.epochs not in (table.epochs or [recipe_epochs(run.model)])
        or (run.val_ratio is not None and run.val_ratio not in table.val_ratios)
        for run in runs
    )
    if changed or runs[0].train_size:
        parts.append("not the setting of the paper")
    return f"{table.title} ({'; '.join(parts)})"


def as_terminal_tables(table: Table, content: Sequence[dict[str, Any]]) -> Iterator[RichTable]:
    """A table for each dataset: under our means the deviations, the paper's figures and the differences from them."""
    digits = 2 if table.task == IMAGES else 3
    for dataset, ratio in dict.fromkeys((row["dataset"], row["val_ratio"]) for row in content):
        some = [row for row in content if (row["dataset"], row["val_ratio"]) == (dataset, ratio)]
        share = f", {100 * ratio:g} % of the training images for validation" if ratio is not None else ""
        shown = RichTable(title=f"\n{dataset}{share}", title_justify="left", box=None, pad_edge=False)
        for heading in ("model", "weights", ""):
            shown.add_column(heading, no_wrap=True)
        for column in some[0]["columns"]:
            shown.add_column(table.columns.get(column, column), justify="right", no_wrap=True)
        for number, row in enumerate(some):
            first = number == 0 or some[number - 1]["model"] != row["model"]
            if first and number:
                shown.add_row()
            names = [MODELS[table.task].get(row["model"], row["model"]) if first else "", row["strategy"]]
            for label, key, sign in LINES:
                values = [cell[key] for cell in row["columns"].values()]
                if key == "ours" or any(value is not None for value in values):
                    numbers = (MISSING if value is None else f"{value:{sign}.{digits}f}" for value in values)
                    label = "published" if table.of_recipes and key == "paper" else label
                    shown.add_row(*names, label, *numbers, style=None if key == "ours" else "dim")
                    names = ["", ""]
        yield shown
