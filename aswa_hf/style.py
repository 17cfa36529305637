"""The look of every picture and page: colors that color-blind readers can tell apart, markers, and the pages' CSS.

The colors are those of Okabe and Ito. No meaning depends on color alone: strategies also differ in marker, decisions
in shape. Imports nothing.
"""

from __future__ import annotations

BLUE, SKY, GREEN, ORANGE, VERMILION, PURPLE, GREY = (
    "#0072b2",
    "#56b4e9",
    "#009e73",
    "#e69f00",
    "#d55e00",
    "#cc79a7",
    "#7a7f87",
)

# Color and marker (as matplotlib names it) of each strategy, the same in every picture.
STRATEGIES = {
    "last": (GREY, "o"),
    "best": (ORANGE, "s"),
    "swa": (PURPLE, "v"),
    "ema": (GREEN, "^"),
    "aswa": (BLUE, "D"),
    "dense-aswa": (SKY, "d"),
    "fge": (VERMILION, "P"),
}
OTHER_STRATEGY = ("#44475a", "X")
# Strategies that share the color of all others differ in marker.
OTHER_MARKERS = {"best-ema": "<", "lawa": ">", "bema": "p", "swad": "*", "swad-max": "h", "power-ema": "8"}

# Color, marker and label of each decision.
DECISIONS = {
    "init": (BLUE, "o", "init: the first snapshot"),
    "soft": (GREEN, "^", "soft: average taken"),
    "hard": (VERMILION, "s", "hard: restart from running"),
    "reject": (GREY, "x", "reject: unchanged"),
}
GAIN, LOSS, TIE = BLUE, VERMILION, GREY

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
    "running": GREY,
    "init": BLUE,
    "soft": "#00825f",
    "hard": VERMILION,
    "reject": GREY,
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


def strategy_style(name: str) -> tuple[str, str]:
    """Returns color and marker of a strategy."""
    color, marker = OTHER_STRATEGY
    return STRATEGIES.get(name) or (color, OTHER_MARKERS.get(name, marker))
