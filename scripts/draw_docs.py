"""Draws the pictures of docs/assets/: the moving trajectory of the start page and the four identities of the paper.

    python scripts/draw_docs.py

The trajectory is a run of this repository (model_cards/cifar10-preresnet20-0). The identities are what the rule
decides for four made-up sequences of scores. Each has a narrow form too, whose letters can be read on a phone.
"""

from __future__ import annotations

import re
import textwrap
from html import escape
from pathlib import Path

from aswa_hf import policy, style
from aswa_hf.interactive import CSS, mark, trajectory_svg
from aswa_hf.trajectory import load_trajectories

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "docs" / "assets"
RUN = ROOT / "model_cards" / "cifar10-preresnet20-0" / "aswa_trajectory.json"
MOVING = """\
@media (prefers-reduced-motion: no-preference) {
  [data-moving] { transform-box: fill-box; transform-origin: left; animation: draw 6s linear both; }
  [data-appears] { animation: appear .25s both; }
  @keyframes draw { from { transform: scaleX(0); } to { transform: scaleX(1); } }
  @keyframes appear { from { opacity: 0; } to { opacity: 1; } }
}
"""
# Running score and look-ahead score at each of eight epochs.
RISING = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
IDENTITIES = [
    (
        "Plain training",
        "every running model is the best so far and beats the look-ahead: all hard, the last epoch is returned",
        list(zip(RISING, [score - 0.05 for score in RISING], strict=True)),
    ),
    (
        "Early stopping",
        "hard up to the best epoch, then nothing beats it: the best epoch is returned",
        [(0.1, 0.0), (0.3, 0.2), (0.5, 0.4), (0.6, 0.5), (0.5, 0.5), (0.45, 0.5), (0.4, 0.5), (0.35, 0.5)],
    ),
    (
        "SWA from the first epoch",
        "the look-ahead always beats the ensemble and the running model: all soft, every epoch has the same weight",
        [(0.1, 0.0), *((0.1 + 0.5 * (score - 0.1), score) for score in RISING[1:])],
    ),
    (
        "SWA from epoch j = 4",
        "hard while the running model improves alone, soft from there on: epochs 4 to 8 have the same weight",
        [(0.1, 0.0), (0.2, 0.1), (0.3, 0.2), (0.4, 0.3), (0.38, 0.5), (0.4, 0.6), (0.41, 0.7), (0.42, 0.8)],
    ),
]


def decisions_of(scores: list[tuple[float, float]]) -> list[str]:
    """Returns what the rule decides at each point."""
    members, score, found = 0, None, []
    for running, lookahead in scores:
        decision = policy.decide(members, score, running, lookahead)
        members = policy.next_members(members, decision)
        score = {policy.SOFT: lookahead, policy.REJECT: score}.get(decision, running)
        found.append(decision)
    return found


def share(alpha: float) -> str:
    """Returns a weight as a fraction."""
    return f"1/{round(1 / alpha)}" if 0 < alpha < 1 else f"{alpha:g}"


def identities_svg(narrow: bool = False) -> str:
    """Returns the four identities: scores and decisions over eight epochs, and below them the weights α."""
    width, columns = (400, 1) if narrow else (820, 2)
    wide = width / columns
    texts = [textwrap.wrap(text, int(wide - 40) // 7) for _, text, _ in IDENTITIES]
    lines = 18 * max(map(len, texts))
    tall, bars = 118, 44  # of the scores and of the weights
    row = 46 + lines + tall + bars + 34
    total = row * len(IDENTITIES) // columns + (52 if narrow else 34)
    parts = [
        f'<svg class="aswa-plot" viewBox="0 0 {width} {total}" xmlns="http://www.w3.org/2000/svg" '
        'role="img" aria-label="The scores, decisions and weights of plain training, early stopping and SWA">',
        f"<style>{style.css_colors('svg')}{CSS}svg {{ background: var(--card); }}</style>",
    ]
    for place, (title, _, scores) in enumerate(IDENTITIES):
        left, top = place % columns * wide, place // columns * row
        parts.append(f'<text x="{left + 14:g}" y="{top + 24}" font-weight="600">{escape(title)}</text>')
        for line, text in enumerate(texts[place]):
            parts.append(f'<text class="quiet" x="{left + 14:g}" y="{top + 43 + 18 * line}">{escape(text)}</text>')
        decisions = decisions_of(scores)
        alphas = policy.ensemble_weights(decisions)
        bottom = top + 46 + lines + tall
        step = (wide - 60) / len(scores)
        x = [left + 30 + step * (i + 0.5) for i in range(len(scores))]
        running = [bottom - 14 - (tall - 32) * score / 0.8 for score, _ in scores]
        ensemble = [bottom - 14 - (tall - 32) * score / 0.8 for score in ensemble_scores(scores, decisions)]
        parts.append(f'<path class="grid" d="M{left + 14:g} {bottom}H{left + wide - 14:g}"/>')
        parts.append(_line(x, running, "running") + _line(x, ensemble, "ensemble"))
        parts += [mark(one, *where, 5) for one, *where in zip(decisions, x, ensemble, strict=True)]
        base = bottom + bars + 10
        for px, alpha in zip(x, alphas, strict=True):
            high = (bars - 16) * alpha**0.5  # so that 1/8 can be seen beside 1
            if alpha:
                parts.append(
                    f'<rect class="alpha" x="{px - 0.36 * step:.1f}" y="{base - high:.1f}" width="{0.72 * step:.1f}" '
                    f'height="{high:.1f}"/>'
                )
            above = f'y="{base - high - 4:.1f}" text-anchor="middle"'
            parts.append(f'<text class="quiet" x="{px:.1f}" {above}>{share(alpha)}</text>')
        parts.append(f'<text class="quiet" x="{left + 14:g}" y="{base}">α</text>')
        parts.append(f'<path class="grid" d="M{left + 30:g} {base}H{left + wide - 14:g}"/>')
    x, y = 14, total - (32 if narrow else 12)
    for kind, text in (("running", "running model's score"), ("ensemble", "ensemble's score")):
        parts.append(
            f'<path class="{kind}" d="M{x} {y - 4}h20"/><text class="quiet" x="{x + 26}" y="{y}">{text}</text>'
        )
        x += 48 + 7 * len(text)
    x, y = (14, total - 12) if narrow else (x, y)
    for decision in ("init", "hard", "soft", "reject"):
        parts.append(mark(decision, x + 5, y - 4, 5) + f'<text class="quiet" x="{x + 16}" y="{y}">{decision}</text>')
        x += 36 + 7 * len(decision)
    return "".join([*parts, "</svg>"])


def ensemble_scores(scores: list[tuple[float, float]], decisions: list[str]) -> list[float]:
    """Returns the score of the ensemble after each decision."""
    found: list[float] = []
    for (running, lookahead), decision in zip(scores, decisions, strict=True):
        found.append({policy.SOFT: lookahead, policy.REJECT: found[-1] if found else running}.get(decision, running))
    return found


def _line(x: list[float], y: list[float], kind: str) -> str:
    points = "L".join(f"{px:.1f} {py:.1f}" for px, py in zip(x, y, strict=True))
    return f'<path class="{kind}" d="M{points}"/>'


def moving_svg(narrow: bool = False) -> str:
    """Returns a run that is drawn in six seconds."""
    trajectories, about = load_trajectories(RUN)
    svg = trajectory_svg(
        trajectories, metric=about["metric"], panel=False, animated=True, width=400 if narrow else 900
    )
    head, rest = svg.split(">", 1)
    look = style.css_colors("svg") + CSS + MOVING + "svg { background: var(--card); }"
    return f"{head}><style>{look}</style>{rest}"


def pictures() -> dict[str, str]:
    """Returns all pictures by file."""
    return {
        **badges(),
        "trajectory.svg": moving_svg(),
        "trajectory-narrow.svg": moving_svg(narrow=True),
        "identities.svg": identities_svg(),
        "identities-narrow.svg": identities_svg(narrow=True),
    }


def badge(name: str, value: str) -> str:
    """Returns a badge: a name and what it is, as in pyproject.toml, so that it is true without a server."""
    left, right = 7 * len(name) + 14, 7 * len(value) + 14
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="{escape(name)}: {escape(value)}"><title>{escape(name)}: {escape(value)}</title>'
        f'<clipPath id="r"><rect width="{left + right}" height="20" rx="3"/></clipPath><g clip-path="url(#r)">'
        f'<rect width="{left}" height="20" fill="#444b54"/>'
        f'<rect x="{left}" width="{right}" height="20" fill="{style.LIGHT["ours"]}"/></g>'
        '<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">'
        f'<text x="{left / 2:g}" y="14">{escape(name)}</text>'
        f'<text x="{left + right / 2:g}" y="14">{escape(value)}</text></g></svg>'
    )


def badges() -> dict[str, str]:
    """Returns the badges of the README by file."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = re.search(r'^license = "(\S+)', text, flags=re.MULTILINE)
    versions = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
    assert named is not None
    return {
        "badge-license.svg": badge("license", named[1]),
        "badge-python.svg": badge("python", " | ".join(versions)),
    }


def main() -> None:
    ASSETS.mkdir(exist_ok=True)
    for name, svg in pictures().items():
        (ASSETS / name).write_text(svg + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
