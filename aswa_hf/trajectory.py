"""The history of a run: the decision at each point, the snapshots in the ensemble, and the file that stores them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from aswa_hf import policy
from aswa_hf._utils.checks import is_number, is_whole_number
from aswa_hf._utils.files import read_json, write_json

FORMAT = "aswa-trajectory"
VERSION = 1
SCORES = ("running_score", "lookahead_score", "score", "snapshot_score")

NOT_FINITE = ("nan", "inf", "-inf")
Number = float | Literal["nan", "inf", "-inf"]
"""A number in a JSON file, as `encode_number` writes it."""


class Decision(Enum):
    """What happened to the ensemble at a decision point."""

    INIT = policy.INIT
    HARD = policy.HARD
    SOFT = policy.SOFT
    REJECT = policy.REJECT

    @property
    def code(self) -> int:
        """The decision as a number, for trackers that only plot numbers: reject 0, soft 1, hard 2, init 3."""
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
    snapshot_score: float | None = None
    """The score of a snapshot that is not the running model: the mean of the weights since the last decision."""

    @property
    def scores(self) -> dict[str, float]:
        """The scores that are known, by name."""
        found = {name: getattr(self, name) for name in SCORES}
        return {name: score for name, score in found.items() if score is not None}

    def to_json(self) -> dict[str, Any]:
        values = asdict(self) | {"decision": self.decision.value}
        if self.snapshot_score is None:
            del values["snapshot_score"]
        return {key: encode_number(value) for key, value in values.items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Record:
        expected = [field.name for field in fields(cls) if field.name != "snapshot_score"]
        if not isinstance(values, Mapping) or sorted(values.keys() - {"snapshot_score"}) != sorted(expected):
            raise ValueError(f"A record of a trajectory must have the keys {expected}, got {values!r}.")
        for name in ("index", "members", "step"):
            if not is_whole_number(values[name], 0) and not (name == "step" and values[name] is None):
                raise ValueError(f"{name!r} of a record must be a whole number of at least 0, got {values[name]!r}.")
        for name in ("epoch", *SCORES):
            value = values.get(name)
            if not (is_number(value) or value is None or (isinstance(value, str) and value in NOT_FINITE)):
                raise ValueError(f"{name!r} of a record must be a number, got {value!r}.")
        scores = {name: decode_number(values.get(name)) for name in SCORES}
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
        found = cls(Record.from_json(record) for record in records)
        if wrong := next((record for place, record in enumerate(found) if record.index != place), None):
            raise ValueError(f"'index' of a record must be its place in the trajectory, got {wrong.index}.")
        return found


def encode_number(value: Any) -> Any:
    """Replaces NaN and infinities, also inside lists and dicts, with strings: strict JSON has no such numbers."""
    if isinstance(value, Mapping):
        return {key: encode_number(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode_number(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def decode_numbers(value: Any) -> Any:
    """Reverses `encode_number`."""
    if isinstance(value, dict):
        return {key: decode_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode_numbers(item) for item in value]
    return float(value) if value in NOT_FINITE else value


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
    write_json(path, content)


def load_trajectories(path: str | Path) -> tuple[dict[str, Trajectory], dict[str, Any]]:
    """Returns the histories by strategy, and everything else that the file says about the run."""
    content = read_json(path, _File)
    strategies = content.pop("strategies")
    return {name: Trajectory.from_json(history["records"]) for name, history in strategies.items()}, content


@dataclass
class _SavedRecord:
    """The schema of a `Record` in a file."""

    index: int
    step: int | None
    epoch: float | None
    running_score: Number | None
    lookahead_score: Number | None
    score: Number | None
    members: int
    decision: Decision
    snapshot_score: Number | None = None


@dataclass
class _History:
    records: list[_SavedRecord]
    alphas: list[float]


@dataclass
class _File:
    """The schema of a trajectory file."""

    format: Literal["aswa-trajectory"]
    version: Literal[1]
    metric: str
    greater_is_better: bool
    strategies: dict[str, _History]
    applied: str | None = None
    run: dict[str, Any] | None = None
    checkpoints: list[str] = field(default_factory=list)
