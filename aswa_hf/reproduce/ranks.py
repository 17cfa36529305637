"""All strategies of the same runs against each other: mean ranks, wins and losses, Wilcoxon's test."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.table import Table as RichTable

from aswa_hf.report.statistics import signed_rank, win_tie_loss

# The strategies that all others are compared with.
REFERENCES = ("dense-aswa", "aswa")
FEWEST = 5  # pairs that a p-value needs


def rankings(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ranks the strategies by their means over seeds on all pairs of dataset and model; the best mean rank first.

    An element is `{"strategy", "rank", "against": {reference: {"wins", "ties", "losses", "p"}}}`; `p` is None below
    five pairs. A pair counts if ASWA has a value there; a strategy is ranked if it has one in each of these pairs (the
    first average of BEMA is taken after 400 steps, which a small graph never reaches).
    """
    pairs: dict[Any, dict[str, float]] = {}
    for row in rows:
        cell = next(iter(row["columns"].values()))
        if cell["ours"] is not None:
            pairs.setdefault((row["dataset"], row["val_ratio"], row["model"]), {})[row["strategy"]] = cell["ours"]
    complete = [found for found in pairs.values() if REFERENCES[-1] in found]
    if not complete:
        return []
    names = [
        name for name in dict.fromkeys(row["strategy"] for row in rows) if all(name in found for found in complete)
    ]
    scores = [{name: found[name] for name in names} for found in complete]
    content = []
    for name in names:
        against = {}
        for other in REFERENCES:
            if other != name and other in names:
                differences = [found[other] - found[name] for found in scores]
                wins, ties, losses = win_tie_loss(differences)
                p = signed_rank(differences).p if len(differences) >= FEWEST else None
                against[other] = {"wins": wins, "ties": ties, "losses": losses, "p": p}
        content.append({"strategy": name, "rank": fmean(_rank(found, name) for found in scores), "against": against})
    return sorted(content, key=lambda row: row["rank"])


def _rank(scores: Mapping[str, float], name: str) -> float:
    """1 for the greatest score; equal ones share the mean of their ranks."""
    greater = sum(score > scores[name] for score in scores.values())
    equal = sum(score == scores[name] for score in scores.values())
    return greater + (equal + 1) / 2


def shown_p(p: float) -> str:
    """A p-value with three decimal places."""
    return "<0.001" if p < 0.0005 else f"{p:.3f}"


def as_terminal_table(content: Sequence[Mapping[str, Any]]) -> Iterator[RichTable]:
    """The ranking as a table; nothing if there is none."""
    if not content:
        return
    shown = RichTable(
        title="\nMean rank over pairs of dataset and model", title_justify="left", box=None, pad_edge=False
    )
    shown.add_column("weights", no_wrap=True)
    shown.add_column("mean rank", justify="right")
    for reference in REFERENCES:
        shown.add_column(f"{reference} wins/ties/losses, p", justify="right")
    for row in content:
        cells = []
        for reference in REFERENCES:
            found = row["against"].get(reference)
            p = "" if found is None or found["p"] is None else f", {shown_p(found['p'])}"
            cells.append("" if found is None else f"{found['wins']}/{found['ties']}/{found['losses']}{p}")
        shown.add_row(row["strategy"], f"{row['rank']:.2f}", *cells)
    yield shown
