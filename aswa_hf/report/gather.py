"""Reads and checks runs on disk: the results of their strategies, and the decisions that led to them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from aswa_hf._utils.checks import is_number
from aswa_hf._utils.files import nearest_path, read_json
from aswa_hf.run_folder import RESULTS, SETTINGS, TRAJECTORY, check_unchanged, checkpoints
from aswa_hf.trajectory import FORMAT, Trajectory, decode_numbers, load_trajectories

Scores = dict[str, dict[str, dict[str, float]]]

LOWER_IS_BETTER = ("loss", "mean_rank", "perplexity", "error")
# Settings that do not distinguish runs of the same model on the same dataset: the results have fields for some, and
# the others do not change the training.
NOT_DISTINGUISHING = ("dataset", "model", "seed", "strategies", "num_processes")
# Settings that older results stored outside of their settings.
OLDER_FIELDS = ("epochs", "dim", "recipe")


class NoRunError(ValueError):
    """Raised for a folder that does not hold a finished run."""


@dataclass(frozen=True)
class MeasuredRun:
    """One training run: the metrics of each strategy by split, and the trajectories if they were kept."""

    source: str
    task: str
    dataset: str
    model: str
    seed: int | None
    scores: Scores
    settings: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    trajectories: dict[str, Trajectory] = field(default_factory=dict)
    metric: str = ""
    lower: frozenset[str] = frozenset()

    @property
    def title(self) -> str:
        seed = "" if self.seed is None else f", seed {self.seed}"
        return f"{self.model} on {self.dataset}{seed}" if self.dataset else f"{self.model}{seed}"


def read_runs(paths: Iterable[str | Path]) -> tuple[list[MeasuredRun], list[str]]:
    """Returns the runs in a fixed order, and notes about them; a run that is given twice counts once.

    If several folders are given, as by runs/*, those without a finished run are left out.
    """
    runs, left_out = [], []
    for path in sorted(set(map(Path, paths))):
        try:
            runs.append(read_run(path))
        except NoRunError as error:
            left_out.append(error)
    if not runs:
        raise left_out[0] if left_out else ValueError("A report needs at least one run: a run folder, or its results.")
    runs = sorted(_with_one_spelling(runs), key=_place)
    notes = [f"Left out: {error}" for error in left_out]
    kept, twice = [], []
    for _, same in groupby(runs, key=_place):
        first, *others = same
        kept.append(first)
        for other in others:
            if not same_scores(first.scores, other.scores):
                raise ValueError(
                    f"{first.source} and {other.source} are both {first.title} with the same settings, but their "
                    "results differ. Pass only one of them."
                )
            if other.trajectories and not kept[-1].trajectories:
                kept[-1] = replace(other, source=first.source)
            twice.append(f"{other.source} is the same as {first.source}")
    which = twice[0] if len(twice) == 1 else f"{len(twice)} of them, the first: {', '.join(twice[:1])}"
    return _with_distinct_names(kept), notes + [f"Runs that were given twice count once ({which})."] * bool(twice)


def read_run(path: str | Path) -> MeasuredRun:
    """Reads a run folder, a results.json under any name, or a trajectory file."""
    path = Path(path)
    if path.is_dir():
        return _read_folder(path)
    if not path.exists():
        hint = nearest_path(path)
        raise ValueError(f"{path} does not exist. Expected a run folder, or the results.json of one.{hint}")
    content = _read_json(path)
    return _from_trajectory(path, path) if content.get("format") == FORMAT else _from_results(path, content)


def same_scores(one: Scores, other: Scores) -> bool:
    """Returns whether two runs have the same results, apart from floating-point noise."""
    ours, theirs = _flat(one), _flat(other)
    return ours.keys() == theirs.keys() and all(
        math.isclose(value, theirs[key], rel_tol=1e-9, abs_tol=1e-9) or (value != value and theirs[key] != theirs[key])
        for key, value in ours.items()
    )


def _read_folder(folder: Path) -> MeasuredRun:
    trajectory = folder / TRAJECTORY
    if (folder / RESULTS).is_file():
        run = _from_results(folder / RESULTS, _read_json(folder / RESULTS), source=folder)
        run = _with_trajectories(run, trajectory) if trajectory.is_file() else run
        check_unchanged(folder, RESULTS, TRAJECTORY, SETTINGS)
        return run
    if trajectory.is_file():
        check_unchanged(folder, TRAJECTORY)
        return _from_trajectory(trajectory, folder)
    if checkpoints(folder):
        raise NoRunError(f"The run in {folder} has no {RESULTS} yet: it was not finished. Resume it with --resume.")
    inside = any((child / RESULTS).is_file() or _is_result(child) for child in folder.iterdir())
    hint = f" There are results inside: pass them as {folder}/*." if inside else ""
    raise NoRunError(f"{folder} is not a run: it has neither {RESULTS} nor {TRAJECTORY}.{hint}")


def _is_result(path: Path) -> bool:
    try:
        return path.suffix == ".json" and "strategies" in _read_json(path)
    except ValueError:
        return False


def _read_json(path: Path) -> dict[str, Any]:
    results: dict[str, Any] = decode_numbers(read_json(path))
    return results


def _from_results(path: Path, content: dict[str, Any], source: Path | None = None) -> MeasuredRun:
    missing = [key for key in ("task", "dataset", "model", "strategies") if not content.get(key)]
    if missing:
        raise ValueError(
            f"{path} has no {missing[0]!r}. Expected the results.json of a run, as `aswa-hf train` writes it."
        )
    if wrong := [key for key in ("task", "dataset", "model") if not isinstance(content[key], str)]:
        raise ValueError(f"{path}: {wrong[0]} is {content[wrong[0]]!r}, expected a string.")
    return _run(path, content, source or path)


def _run(path: Path, content: dict[str, Any], source: Path) -> MeasuredRun:
    if not isinstance(content["strategies"], dict):
        raise ValueError(f"{path}: 'strategies' must map names to results, got {content['strategies']!r}.")
    seed = content.get("seed")
    if not (seed is None or isinstance(seed, int)):
        raise ValueError(f"{path}: 'seed' must be an integer, got {seed!r}.")
    scores = {name: _splits(path, name, result) for name, result in content["strategies"].items()}
    metrics = {metric for result in scores.values() for values in result.values() for metric in values}
    return MeasuredRun(
        source=str(source),
        task=str(content["task"]),
        dataset=str(content["dataset"]),
        model=str(content["model"]),
        seed=seed,
        scores=scores,
        settings=_settings(path, content),
        about=content,
        lower=frozenset(metric for metric in metrics if metric.endswith(LOWER_IS_BETTER)),
    )


def _splits(path: Path, name: str, result: Any) -> dict[str, dict[str, float]]:
    """Returns the metrics of a strategy by split; other information is ignored."""
    parts = result.items() if isinstance(result, dict) else ()
    splits = {split: dict(_leaves(values)) for split, values in parts if isinstance(values, dict)}
    if not any(splits.values()):
        raise ValueError(f"{path}: strategy {name!r} has no metrics of a split, such as 'test'. Got {result!r}.")
    for split, values in splits.items():
        for metric, value in values.items():
            if not is_number(value):
                raise ValueError(f"{path}: {name} {split} {metric} must be a number, got {value!r}.")
    return splits


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yields metrics, also those in groups: {"2p": {"mrr": …}} yields "2p mrr"."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name} ")
        else:
            yield prefix + name, value


def _from_trajectory(path: Path, source: Path) -> MeasuredRun:
    """Reads a run that only has a trajectory file: the description in it if there is one, else the last scores."""
    trajectories, about = load_trajectories(path)
    folder = source.resolve().stem if source.is_file() else source.resolve().name
    described = about.get("run")
    if isinstance(described, dict) and described.get("strategies"):
        # In a user's own Trainer the callback may not know task and data; the folder distinguishes such runs.
        known = {key: value for key, value in decode_numbers(described).items() if value is not None}
        model = known.get("model", "") if known.get("dataset") else folder
        run = _run(path, {"task": "training", "dataset": "", **known, "model": model}, source)
        return _with_trajectories(run, path)
    metric = str(about.get("metric", "score"))
    scores: Scores = {
        name: {"validation": {metric: trajectory[-1].score}}
        for name, trajectory in trajectories.items()
        if trajectory and trajectory[-1].score is not None
    }
    if not scores:
        raise ValueError(f"{path} has no strategy with a score. Expected the trajectory of a run.")
    run = MeasuredRun(str(source), task="training", dataset="", model=folder, seed=None, scores=scores, about=about)
    return _with_trajectories(run, path)


def _with_trajectories(run: MeasuredRun, path: Path) -> MeasuredRun:
    trajectories, about = load_trajectories(path)
    metric = str(about.get("metric", ""))
    lower = run.lower - {metric} if about.get("greater_is_better", True) else run.lower | {metric}
    return replace(run, trajectories=trajectories, metric=metric, lower=lower)


def _settings(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what distinguishes a run from others of the same model on the same dataset, beside the seed."""
    older = {name: content[name] for name in OLDER_FIELDS if content.get(name) is not None}
    settings = content.get("settings")
    if not isinstance(settings, dict):
        beside = path.with_name(SETTINGS)
        settings = _read_json(beside) if path.name == RESULTS and beside.is_file() else {}
    settings = {name: value for name, value in settings.items() if value is not None}
    return {name: value for name, value in (older | settings).items() if name not in NOT_DISTINGUISHING}


def _with_one_spelling(runs: list[MeasuredRun]) -> list[MeasuredRun]:
    """Names datasets and models that differ only in case by one spelling: ComplEx and complex are one model."""
    spellings = {name.casefold(): name for name in sorted({n for run in runs for n in (run.dataset, run.model)})[::-1]}
    return [
        replace(run, dataset=spellings[run.dataset.casefold()], model=spellings[run.model.casefold()]) for run in runs
    ]


def _with_distinct_names(runs: list[MeasuredRun]) -> list[MeasuredRun]:
    """Adds differing settings to the names of runs of the same model on the same dataset: "keci, dim 64"."""
    named = []
    for _, group in groupby(runs, key=lambda run: (run.task, run.dataset, run.model)):
        members = list(group)
        keys = dict.fromkeys(key for run in members for key in run.settings)
        differing = [key for key in keys if len({str(run.settings.get(key, "default")) for run in members}) > 1]
        for run in members:
            settings = [f"{key.replace('_', '-')} {run.settings.get(key, 'default')}".strip() for key in differing]
            named.append(replace(run, model=", ".join([run.model, *settings])))
    return named


def _place(run: MeasuredRun) -> tuple[Any, ...]:
    settings = json.dumps(run.settings, sort_keys=True, default=str)
    unknown = run.source if run.seed is None else ""
    return run.task, run.dataset, run.model, settings, -1 if run.seed is None else run.seed, unknown


def _flat(scores: Scores) -> dict[tuple[str, str, str], float]:
    return {
        (name, split, metric): value
        for name, result in scores.items()
        for split, values in result.items()
        for metric, value in values.items()
    }
