"""The history of a run: what was decided at each point, which snapshots the ensemble holds, and a picture of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

from aswa_hf import policy
from aswa_hf.files import write_text

FORMAT = "aswa-trajectory"
VERSION = 1


class Decision(Enum):
    """What became of the ensemble at a decision point."""

    INIT = policy.INIT
    HARD = policy.HARD
    SOFT = policy.SOFT
    REJECT = policy.REJECT

    @property
    def code(self) -> int:
        """A number for reporters that can only draw numbers: reject 0, soft 1, hard 2, init 3."""
        return ("reject", "soft", "hard", "init").index(self.value)


@dataclass(frozen=True)
class Record:
    """One decision point: the three scores, the ensemble's size after it, and the decision."""

    index: int
    step: int | None
    epoch: float | None
    running_score: float | None
    lookahead_score: float | None
    score: float | None
    members: int
    decision: Decision

    def to_json(self) -> dict[str, Any]:
        values = asdict(self) | {"decision": self.decision.value}
        return {key: encode_number(value) for key, value in values.items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Record:
        expected = [field.name for field in fields(cls)]
        if not isinstance(values, Mapping) or sorted(values) != sorted(expected):
            raise ValueError(f"A record of a trajectory has the keys {expected}, got {values!r}.")
        scores = {k: decode_number(values[k]) for k in ("running_score", "lookahead_score", "score")}
        return cls(**{**values, **scores, "decision": Decision(values["decision"])})


class Trajectory(list[Record]):
    """The records of one strategy, in order."""

    @property
    def decisions(self) -> list[Decision]:
        return [record.decision for record in self]

    @property
    def alphas(self) -> list[float]:
        """α_i, the weight of the snapshot of every decision point; they sum to 1."""
        return policy.ensemble_weights([decision.value for decision in self.decisions])

    def to_json(self) -> list[dict[str, Any]]:
        return [record.to_json() for record in self]

    @classmethod
    def from_json(cls, records: Iterable[Mapping[str, Any]]) -> Trajectory:
        return cls(Record.from_json(record) for record in records)


def encode_number(value: Any) -> Any:
    """NaN and infinities, also inside lists and dicts, as text: strict JSON has no numbers for them."""
    if isinstance(value, Mapping):
        return {key: encode_number(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode_number(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def decode_numbers(value: Any) -> Any:
    """What `encode_number` was given."""
    if isinstance(value, dict):
        return {key: decode_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode_numbers(item) for item in value]
    return float(value) if value in ("nan", "inf", "-inf") else value


def decode_number(value: Any) -> float | None:
    return None if value is None else float(value)


def save_trajectories(
    path: str | Path,
    trajectories: Mapping[str, Trajectory],
    *,
    metric: str,
    greater_is_better: bool,
    alphas: Mapping[str, list[float]] | None = None,
    **more: Any,
) -> None:
    """Writes the histories of all strategies of a run as one JSON file."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "metric": metric,
        "greater_is_better": greater_is_better,
        **more,
        "strategies": {
            name: {"records": t.to_json(), "alphas": (alphas or {}).get(name, t.alphas)}
            for name, t in trajectories.items()
        },
    }
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def load_trajectories(path: str | Path) -> tuple[dict[str, Trajectory], dict[str, Any]]:
    """The histories by strategy, and whatever else the file tells of the run."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a JSON file ({error}). Expected one written by aswa-hf.") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT or content.get("version") != VERSION:
        raise ValueError(f"{path} is not an {FORMAT} file of version {VERSION}. Expected one written by aswa-hf.")
    try:
        strategies = content.pop("strategies")
        return {name: Trajectory.from_json(s["records"]) for name, s in strategies.items()}, content
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error!r}. Expected a file written by aswa-hf.") from None


def plot_trajectories(
    trajectories: Mapping[str, Trajectory], path: str | Path, *, metric: str = "score", title: str = ""
) -> None:
    """Draws running and ensemble scores over the run, with ASWA's soft, hard and reject decisions marked."""
    draw_trajectories(trajectories, metric=metric, title=title).savefig(path, dpi=130)


def draw_trajectories(trajectories: Mapping[str, Trajectory], *, metric: str = "score", title: str = "") -> Any:
    """The picture of a run as a matplotlib figure: scores above, the weight α of each snapshot below."""
    # Not pyplot: a notebook's own figures and backend stay as they are.
    from matplotlib.figure import Figure

    main = "aswa" if "aswa" in trajectories else next(iter(trajectories))
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    axis, weights = figure.subplots(2, 1, height_ratios=[5, 1], sharex=True)
    x = [_position(record) for record in trajectories[main]]

    def line(scores: Iterable[float | None], **style: Any) -> None:
        axis.plot(x, [math.nan if s is None or not math.isfinite(s) else s for s in scores], **style)

    line((r.running_score for r in trajectories[main]), color="0.55", lw=1.2, marker=".", ms=4, label="running model")
    for name, style in (("swa", (0, (1, 1))), ("ema", (0, (4, 2)))):
        if name in trajectories and name != main:
            axis.plot(
                [_position(r) for r in trajectories[name] if r.score is not None],
                [r.score for r in trajectories[name] if r.score is not None],
                color="tab:purple" if name == "swa" else "#8a8a10",
                ls=style,
                lw=1.3,
                label=name.upper(),
            )
    line((r.score for r in trajectories[main]), color="tab:blue", lw=2.2, label=f"{main.upper()} ensemble")
    marks = {
        Decision.INIT: ("tab:blue", "o", "init"),
        Decision.SOFT: ("tab:green", "^", "soft: average taken"),
        Decision.HARD: ("tab:orange", "s", "hard: restart from running"),
        Decision.REJECT: ("tab:red", "x", "reject: unchanged"),
    }
    _focus(axis, trajectories[main], trajectories.values())
    low, high = axis.get_ylim()
    crowded = len(x) > 80
    scored = [(r, r.score) for r in trajectories[main] if r.score is not None]
    for decision, (color, marker, label) in marks.items():
        points = [(_position(r), score) for r, score in scored if r.decision is decision and low <= score <= high]
        if points:
            axis.scatter(
                *zip(*points, strict=True),
                color=color,
                marker=marker,
                s=12 if crowded else 42,
                linewidths=0.5 if crowded else None,
                # Side by side, the marks of a long row of rejects would hide the ensemble's line.
                zorder=1.9 if crowded and decision is Decision.REJECT else 3,
                label=label,
            )
    hidden = [(r, score) for r, score in scored if not low <= score <= high]
    if hidden:
        paper = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 2}
        note = {"transform": axis.transAxes, "ha": "right", "fontsize": 8, "color": "0.35", "bbox": paper}
        axis.text(0.99, 0.03, _unseen(hidden), **note)
    axis.set_ylabel(f"validation {metric}")
    axis.set_title(title or "Adaptive Stochastic Weight Averaging")
    axis.grid(alpha=0.25)
    figure.legend(fontsize=8, loc="outside lower center", ncols=4)

    width = min((b - a for a, b in pairwise(x)), default=1.0) * 0.8
    weights.bar(x, trajectories[main].alphas, width=width, color="tab:blue", alpha=0.7)
    weights.set_ylabel("α")
    weights.set_xlabel("epoch")
    weights.set_ylim(bottom=0)
    return figure


def _position(record: Record) -> float:
    return record.index + 1 if record.epoch is None else record.epoch


def _unseen(hidden: list[tuple[Record, float]]) -> str:
    """Says which decisions lie outside the view, and how far."""
    epochs = [f"{_position(record):g}" for record, _ in (hidden[0], hidden[-1])]
    where = f"epoch {epochs[0]}" if len(hidden) == 1 else f"{len(hidden)} epochs, {epochs[0]} to {epochs[1]}"
    scores = [f"{score:.4g}" for _, score in (hidden[0], hidden[-1])]
    return f"outside the view: {where} ({' to '.join(dict.fromkeys(scores))})"


def _focus(axis: Any, trajectory: Trajectory, others: Iterable[Trajectory]) -> None:
    """Leaves the first, steep part of the curve out of view, so that the decisions can be told apart.

    What any strategy ended with stays in view: a picture must not hide that another one is ahead.
    """
    finals = [r.score for r in trajectory if r.score is not None and math.isfinite(r.score)]
    running = [r.running_score for r in trajectory if r.running_score is not None and math.isfinite(r.running_score)]
    if len(finals) < 4 or not running:
        return
    later = sorted(running[len(running) // 4 :] + finals[len(finals) // 4 :])
    low, high = later[len(later) // 50], later[-1 - len(later) // 50]
    ends = [o[-1].score for o in others if o and o[-1].score is not None and math.isfinite(o[-1].score)]
    low, high = min([low, *ends]), max([high, *ends])
    margin = (high - low) * 0.15 or abs(high) * 0.05 or 1.0
    axis.set_ylim(low - margin, high + margin)
