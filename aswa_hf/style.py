"""The look of every picture and page: colors that color-blind readers can tell apart, markers, and the pages' CSS.

The first colors are those of Okabe and Ito. No meaning depends on color alone: strategies also differ in marker and
line, decisions in shape. Imports nothing of this package.
"""

from __future__ import annotations

from typing import Any, NamedTuple

BLUE, SKY, GREEN, ORANGE, VERMILION, PURPLE, GRAY = (
    "#0072b2",
    "#56b4e9",
    "#009e73",
    "#e69f00",
    "#d55e00",
    "#cc79a7",
    "#7a7f87",
)


class StrategyStyle(NamedTuple):
    """The color of a strategy, its marker as matplotlib names it, and the dashes of its line (none: solid)."""

    color: str
    marker: str
    dashes: tuple[int, ...] = ()

    @property
    def line(self) -> Any:
        """The line as matplotlib names it."""
        return (0, self.dashes) if self.dashes else "-"


# The same in every picture.
STRATEGIES = {
    "last": StrategyStyle(GRAY, "o", (2, 2)),
    "best": StrategyStyle(ORANGE, "s", (6, 2, 1, 2)),
    "swa": StrategyStyle(PURPLE, "v", (1, 1)),
    "ema": StrategyStyle(GREEN, "^", (4, 2)),
    "aswa": StrategyStyle(BLUE, "D"),
    "dense-aswa": StrategyStyle(SKY, "d", (8, 2)),
    "swa-all": StrategyStyle("#553300", "H", (3, 3, 1, 3)),
    "fge": StrategyStyle(VERMILION, "P", (4, 1, 1, 1, 1, 1)),
    "best-ema": StrategyStyle("#aa9955", "<", (4, 2, 1, 2)),
    "lawa": StrategyStyle("#990033", ">", (1, 3)),
    "bema": StrategyStyle("#880077", "p", (3, 1, 1, 1)),
    "swad": StrategyStyle("#2211ff", "*", (8, 2, 1, 2)),
    "swad-max": StrategyStyle("#000000", "h", (8, 2, 1, 2, 1, 2)),
    "power-ema": StrategyStyle("#bb66ff", "8", (5, 5)),
}
OTHER_STRATEGY = StrategyStyle("#44475a", "X", (2, 4))

# Color, marker and label of each decision.
DECISIONS = {
    "init": (BLUE, "o", "init: the first snapshot"),
    "soft": (GREEN, "^", "soft: average taken"),
    "hard": (VERMILION, "s", "hard: restart from running"),
    "reject": (GRAY, "x", "reject: unchanged"),
}
GAIN, LOSS, TIE = BLUE, VERMILION, GRAY

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif'
MONOSPACE = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"

LIGHT = {
    "paper": "#fbfbfa",
    "card": "#ffffff",
    "ink": "#1d2129",
    "soft-ink": "#545d69",
    "line": "#dfe2e7",
    "ours": "#00619a",
    "tint": "#eaf4fb",
    "win": "#00619a",
    "tie": "#6a717c",
    "loss": "#b04a00",
    "lost": "#a84300",
    "note": "#fff7e3",
    "note-line": "#e8cf8c",
    "aswa": BLUE,
    "running": GRAY,
    "init": BLUE,
    "soft": "#00825f",
    "hard": VERMILION,
    "reject": GRAY,
}
DARK = {
    "paper": "#131313",
    "card": "#1b1b1b",
    "ink": "#e8e8e8",
    "soft-ink": "#abb0b8",
    "line": "#363636",
    "ours": "#6cc0f0",
    "tint": "#16283a",
    "win": "#1b78b0",
    "tie": "#666e7a",
    "loss": "#b4550f",
    "lost": "#ff9d5c",
    "note": "#2b2616",
    "note-line": "#5d5024",
    "aswa": SKY,
    "running": "#9aa0a8",
    "init": SKY,
    "soft": "#2fc79a",
    "hard": "#ff8a3d",
    "reject": "#9aa0a8",
}


def variables(colors: dict[str, str]) -> str:
    """Returns the colors as CSS variables."""
    return " ".join(f"--{name}: {color};" for name, color in colors.items())


def css_colors(light: str = ":root", dark: str | None = None) -> str:
    """Returns the CSS variables of all colors for a selector; in the dark for another one, or as the system asks."""
    if dark is not None:
        return f"{light} {{ {variables(LIGHT)} }}\n{dark} {{ {variables(DARK)} }}"
    preferred = f"@media (prefers-color-scheme: dark) {{ {light} {{ {variables(DARK)} }} }}"
    return f"{light} {{ {variables(LIGHT)} }}\n{preferred}"


def strategy_style(name: str) -> StrategyStyle:
    """Returns color, marker and line of a strategy."""
    return STRATEGIES.get(name, OTHER_STRATEGY)
