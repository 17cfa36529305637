"""Recipes: settings of link predictors that are worth starting from, one file per graph in recipes/.

A recipe is a mapping from settings of `KGERun` to values, with what it is based on and what it reached here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from aswa_hf._utils.names import did_you_mean
from aswa_hf.experiments.settings import KGERun

FOLDER = Path(__file__).parent / "recipes"
PARTS = ("about", "settings", "published", "reached")


@dataclass(frozen=True)
class Recipe:
    """Settings with a name, "<graph>/<model>"."""

    name: str
    about: str
    settings: Mapping[str, Any]
    published: float | None = None
    """The test MRR of the source."""
    reached: Mapping[str, Any] | None = None
    """What a run here reached: the test MRR of each strategy, and its seconds."""

    def run(self, **settings: Any) -> KGERun:
        """The run of this recipe; `settings` are those that it leaves open (`dataset`), and changes."""
        return KGERun(**{**self.settings, **settings})


def recipes() -> Iterator[Recipe]:
    """The recipes of this package, by graph and name."""
    for path in sorted(FOLDER.glob("*.yaml")):
        yield from read_recipes(path)


def find_recipe(name: str) -> Recipe:
    """A recipe by name, "<graph>/<model>", or of a file of one's own, "<path>.yaml/<model>"."""
    file, _, last = name.rpartition("/")
    own = file.endswith((".yaml", ".yml"))
    found = list(read_recipes(Path(file)) if own else recipes())
    for recipe in found:
        if recipe.name == (f"{Path(file).stem}/{last}" if own else name):
            return recipe
    known = [recipe.name for recipe in found]
    hint = f"{did_you_mean(name, known)}Expected one of {', '.join(known)}, or FILE.yaml/NAME."
    raise ValueError(f"There is no recipe {name!r}. {hint}")


def recipes_table() -> Table:
    """The recipes with the published test MRR, and what they reached here."""
    table = Table("recipe", "published", "reached", "minutes", "about", title="Recipes for link predictors (test MRR)")
    for recipe in recipes():
        reached = recipe.reached or {}
        published = "" if recipe.published is None else f"{recipe.published:.3f}"
        best = f"{reached['mrr']:.3f}" if "mrr" in reached else ""
        minutes = f"{reached['seconds'] / 60:.0f}" if "seconds" in reached else ""
        table.add_row(recipe.name, published, best, minutes, recipe.about)
    return table


def read_recipes(path: Path) -> Iterator[Recipe]:
    """The recipes of a file; raises ValueError with the file and the field if one is invalid."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError, RecursionError) as error:
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
