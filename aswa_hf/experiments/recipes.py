"""Recipes: settings of link predictors that are worth starting from, one file per graph in recipes/.

A recipe is a mapping from settings of `KGERun` to values, with what it is based on and the test MRR published for it.
What the recipes reached here is in recipes/reached.json, which `scripts/collect_results.py` writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any

import yaml
from rich.console import Group
from rich.table import Table

from aswa_hf._utils.files import nearest_path, read_object
from aswa_hf._utils.names import did_you_mean
from aswa_hf.experiments.settings import KGERun

FOLDER = Path(__file__).parent / "recipes"
REACHED = FOLDER / "reached.json"
DEEPEST = 10  # levels of a file of recipes; three are needed
PARTS = ("about", "settings", "published")


class _Loader(yaml.SafeLoader):
    """Reads 1e-3 as a number, which YAML 1.1 takes for text, and refuses keys that occur twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        content: dict[Any, Any] = super().construct_mapping(node, deep)
        if len(content) < len(node.value):
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            raise ValueError(f"it has {next(key for key in keys if keys.count(key) > 1)!r} twice in one mapping.")
        return content


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


@dataclass(frozen=True)
class Recipe:
    """Settings with a name, "<graph>/<model>"."""

    name: str
    about: str
    settings: Mapping[str, Any]
    published: float | None = None
    """The test MRR of the source."""
    reached: Mapping[str, Any] | None = None
    """Results of runs of this project, averaged: `runs`, test `mrr` of each strategy, `seconds`, `cpu_seconds`."""

    @property
    def graph(self) -> str:
        return self.name.partition("/")[0]

    @property
    def label(self) -> str:
        """The name without the graph."""
        return self.name.partition("/")[2]

    def run(self, **settings: Any) -> KGERun:
        """The run of this recipe; `settings` are those that it does not set (`dataset`), and changes."""
        return KGERun(**{**self.settings, **settings})


def recipes() -> Iterator[Recipe]:
    """The recipes of this package, by graph and name."""
    reached = read_object(REACHED) if REACHED.is_file() else {}
    for path in sorted(FOLDER.glob("*.yaml")):
        for recipe in read_recipes(path):
            yield replace(recipe, reached=reached.get(recipe.name))


def find_recipe(name: str) -> Recipe:
    """A recipe by name, "<graph>/<model>", or from your own file, "<path>.yaml/<model>"."""
    file, _, last = name.rpartition("/")
    own = file.endswith((".yaml", ".yml"))
    found = list(read_recipes(Path(file)) if own else recipes())
    for recipe in found:
        if recipe.name == (f"{Path(file).stem}/{last}" if own else name):
            return recipe
    known = [recipe.name for recipe in found]
    hint = f"{did_you_mean(name, known)}Expected one of {', '.join(known)}, or FILE.yaml/NAME."
    raise ValueError(f"There is no recipe {name!r}. {hint}")


def recipes_listed() -> Group:
    """The recipes with the published test MRR and what they reached here, and what each is based on."""
    table = Table(title="Recipes for link predictors: test MRR", box=None, pad_edge=False, title_justify="left")
    table.add_column("recipe", no_wrap=True)
    for heading in ("published", "ASWA", "best epoch", "runs", "CPU seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    notes = []
    for recipe in recipes():
        cells = ["" if recipe.published is None else f"{recipe.published:.3f}"]
        if recipe.reached:
            mrr = recipe.reached["mrr"]
            cells += [f"{mrr['aswa']:.3f}", f"{mrr['best']:.3f}", str(recipe.reached["runs"])]
            taken = recipe.reached["cpu_seconds"]
            cells.append("–" if taken is None else f"{taken:.0f}")
        else:
            cells.append("not run")
        table.add_row(recipe.name, *cells)
        notes.append(f"{recipe.name}: {recipe.about}")
    meaning = (
        "ASWA and the best epoch are from the same runs, averaged over seeds. CPU seconds are summed over all threads "
        "and include training, the averages of seven strategies and all evaluations; they are unknown (–) if a run "
        "was resumed. Recipes marked as not run have no completed run yet."
    )
    return Group(table, "", *notes, "", meaning)


def read_recipes(path: Path) -> Iterator[Recipe]:
    """The recipes of a file; raises ValueError with the file and the field if one is invalid."""
    try:
        text = path.read_text(encoding="utf-8")
        depth = 0
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                # A few of them can stand for more text than fits into memory.
                raise ValueError("it has aliases (*name). Write the values themselves.")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:  # takes the square of the depth in time
                raise ValueError("it is nested too deeply. Expected names of recipes with settings.")
        content = yaml.load(text, _Loader)
    except FileNotFoundError:
        raise ValueError(f"There is no file of recipes {path}.{nearest_path(path)}") from None
    except (OSError, UnicodeError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(f"{path} is not a file of recipes: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a file of recipes: expected a mapping from names to recipes.")
    known = {one.name: one for one in KGERun.settings()}
    for name, parts in content.items():
        where = f"{path}: {name}"
        if not isinstance(parts, dict) or not isinstance(parts.get("settings"), dict):
            raise ValueError(f"{where} must be a mapping with the key settings.")
        if unknown := [part for part in parts if part not in PARTS]:
            raise ValueError(f"{where} has the unknown key {unknown[0]!r}. Expected {', '.join(PARTS)}.")
        if not isinstance(parts.get("about", ""), str):
            raise ValueError(f"{where}: about must be text, got {parts['about']!r}.")
        published = parts.get("published")
        if not isinstance(published, (float, NoneType)) or not 0 < (published or 0.5) < 1:
            raise ValueError(f"{where}: published must be an MRR between 0 and 1, got {published!r}.")
        for field, value in parts["settings"].items():
            if field not in known:
                raise ValueError(
                    f"{where} has the unknown setting {field!r}. {did_you_mean(str(field), list(known))}".rstrip()
                )
            try:
                known[field].check(value)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
        yield Recipe(f"{path.stem}/{name}", **{"about": "", **parts})
