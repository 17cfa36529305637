"""The runs of recipes, and what they took: `aswa-hf reproduce tuned`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table as RichTable

from aswa_hf._utils.files import read_object
from aswa_hf._utils.names import did_you_mean
from aswa_hf.experiments.recipes import Recipe, recipes
from aswa_hf.reproduce.runs import GridRun, results
from aswa_hf.reproduce.tables import TUNED, plain

COSTS = {"train": "minutes", "cpu": "CPU minutes", "peak": "peak GB", "averages": "of it averages"}


def find_recipes(names: Sequence[str] | None, graphs: Sequence[str] | None) -> list[Recipe]:
    """The recipes of these names ("complex") and graphs; without names, those that were measured here.

    Raises ValueError if there is none of a name or of a graph.
    """
    every = list(recipes())
    for option, asked, known in (
        ("--models", names, [recipe.label for recipe in every]),
        ("--datasets", graphs, [recipe.graph for recipe in every]),
    ):
        spelled = {plain(name) for name in known}
        for name in asked or []:
            if plain(name) not in spelled:
                expected = ", ".join(dict.fromkeys(known))
                hint = did_you_mean(name, list(dict.fromkeys(known)))
                raise ValueError(f"{option}: there is no recipe for {name!r}. {hint}Expected {expected}.")
    wanted = {plain(name) for name in names or []}
    of = {plain(name) for name in graphs or []}
    found = [
        recipe
        for recipe in every
        if (plain(recipe.label) in wanted if wanted else recipe.reached) and (not of or plain(recipe.graph) in of)
    ]
    if not found:
        asked = f"{', '.join(names)} for {', '.join(graphs)}" if names and graphs else "of these graphs measured here"
        raise ValueError(
            f"There is no recipe {asked}. Name recipes with --models; `aswa-hf train kge --recipes` lists them."
        )
    return found


def plan_recipes(chosen: Sequence[Recipe], seeds: Sequence[int], epochs: int | None = None) -> list[GridRun]:
    """The runs of recipes, by default as long as each recipe says."""
    changes: dict[str, Any] = {"strategies": TUNED} | ({} if epochs is None else {"epochs": epochs, "eval_every": 1})
    return [
        GridRun(recipe.graph, recipe.run(dataset=recipe.graph, seed=seed, **changes), recipe.label)
        for recipe in chosen
        for seed in seeds
    ]


def runs_of_recipes(folder: Path) -> list[tuple[Recipe, list[dict[str, Any]]]]:
    """The collected results of runs as long as their recipes say, recipe by recipe."""
    found = []
    collected = sorted(folder.glob("*.json"))
    for recipe in recipes():
        length = recipe.run(dataset="").epochs
        name = re.compile(rf"{re.escape(f'{recipe.graph}-{recipe.label}')}-\d+-{length}-tuned\.json")
        contents = [read_object(path) for path in collected if name.fullmatch(path.name)]
        if contents:
            found.append((recipe, contents))
    return found


def costs(runs: Sequence[GridRun], output_dir: Path) -> list[dict[str, Any]]:
    """Returns the mean costs of the finished runs of each recipe.

    An element is `{"recipe", "runs", "train", "cpu", "peak", "averages"}`: times are in minutes, `peak` is the largest
    memory of the process and `averages` that of all strategies, in GB.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        content = results(run, output_dir)
        if content is not None:
            found.setdefault(f"{run.dataset}/{run.model}", []).append(content)
    return [{"recipe": name, "runs": len(some), **mean_costs(some)} for name, some in found.items()]


def mean_costs(some: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The mean costs of runs, from the contents of their results.json. The times of a resumed run are unknown."""
    whole = [content for content in some if not content.get("resumed")]

    def mean(values: Sequence[float | None], unit: float) -> float | None:
        known = [value for value in values if value is not None]
        return fmean(known) / unit if known else None

    return {
        "train": mean([content["seconds"].get("train") for content in whole], 60),
        "cpu": mean([content.get("cpu_seconds") for content in whole], 60),
        "peak": mean([content.get("peak_memory") for content in some], 1e9),
        "averages": mean([sum(content.get("memory", {}).values()) for content in some], 1e9),
    }


def as_terminal_tables(content: Sequence[Mapping[str, Any]]) -> Iterator[RichTable]:
    """The costs as a table; nothing if there are none."""
    if not content:
        return
    shown = RichTable(title="\nTime and memory of a run", title_justify="left", box=None, pad_edge=False)
    shown.add_column("recipe", no_wrap=True)
    for heading in ("runs", *COSTS.values()):
        shown.add_column(heading, justify="right")
    for row in content:
        digits = {"train": 1, "cpu": 1, "peak": 2, "averages": 2}
        cells = ["–" if row[key] is None else f"{row[key]:.{digits[key]}f}" for key in COSTS]
        shown.add_row(row["recipe"], str(row["runs"]), *cells)
    yield shown
