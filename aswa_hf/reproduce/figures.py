"""The figures of the paper's tables, as they are printed there (`paper_figures.tsv`).

The paper's SWA averages from the first epoch on in link prediction (`swa-all`), and from the epoch in the SWA paper
on CIFAR (`swa`); its plain training is `last`. `CIFAR-10:0.1` has a tenth of the training images for validation. For
ComplEx with ASWA on WN18RR the paper prints a Hits@10 below Hits@3, which is impossible; it is kept as printed.
"""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files
from typing import NamedTuple


class Figure(NamedTuple):
    """A number of the paper, and its standard deviation if there is one."""

    mean: float
    deviation: float | None = None


@cache
def paper_figures(table: str) -> dict[tuple[str, str, str], tuple[Figure, ...]]:
    """The rows of one of the paper's tables by dataset, model and strategy."""
    text = (files("aswa_hf.reproduce") / "paper_figures.tsv").read_text(encoding="utf-8")
    rows: dict[tuple[str, str, str], tuple[Figure, ...]] = {}
    for row in csv.DictReader(text.splitlines(), delimiter="\t"):
        if row["table"] == table:
            figure = Figure(float(row["mean"]), float(row["deviation"]) if row["deviation"] else None)
            key = row["dataset"], row["model"], row["strategy"]
            rows[key] = (*rows.get(key, ()), figure)
    if not rows:
        raise KeyError(f"There are no figures of a table {table!r}.")
    return rows
