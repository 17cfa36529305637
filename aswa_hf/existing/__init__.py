"""`average_checkpoints`: one set of weights from checkpoints that already exist, on disk or on the Hub."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from aswa_hf.batchnorm import Batches
from aswa_hf.checkpoint import library_versions
from aswa_hf.existing import choosing
from aswa_hf.existing.choosing import JUDGED, STRATEGIES, Ensemble, written
from aswa_hf.existing.judging import Evaluate, Judge, load_model, statistics_of
from aswa_hf.existing.sources import Paths, find_checkpoints
from aswa_hf.existing.tensors import Checkpoint, WeightedMean
from aswa_hf.strategy import BATCHNORM_POLICIES, warn_caller
from aswa_hf.trajectory import Trajectory, encode_number, save_trajectories

__all__ = ["AveragedCheckpoints", "Evaluation", "average_checkpoints"]

TRAJECTORY = "aswa_trajectory.json"
Progress = Callable[[str, int, int], None]
"""Told what is done next, how many steps are done, and how many there are."""


@dataclass(frozen=True)
class Evaluation:
    """How the checkpoints of a known kind of run are judged."""

    metric: str
    score: Evaluate
    """The validation score of a model."""
    report: Callable[[Any], dict[str, dict[str, float]]]
    """The metrics of a model by split."""
    batches: Batches | None = None
    bn_batches: int | None = None
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AveragedCheckpoints:
    """What came of averaging: the weights (`state_dict()`, `folder`), and how they were chosen."""

    strategy: str
    checkpoints: list[str]
    """The names of the checkpoints in the order they were looked at: that of `trajectory` and `alphas`."""
    alphas: list[float]
    trajectory: Trajectory
    score: float | None
    metric: str
    evaluations: int
    folder: Path | None
    results: dict[str, dict[str, float]]
    """Metrics of the result by split, for runs whose data are known."""
    mean: WeightedMean = field(repr=False)

    def state_dict(self) -> dict[str, Tensor]:
        """The averaged weights, in the dtypes of the checkpoints."""
        return self.mean.state_dict()

    def to_json(self) -> dict[str, Any]:
        """Everything but the weights."""
        rows = zip(self.checkpoints, self.alphas, self.trajectory, strict=True)
        found: dict[str, Any] = encode_number(
            {
                "strategy": self.strategy,
                "metric": self.metric,
                "score": self.score,
                "folder": None if self.folder is None else str(self.folder),
                "evaluations": self.evaluations,
                "results": self.results,
                "checkpoints": [{"name": name, "alpha": alpha, **r.to_json()} for name, alpha, r in rows],
            }
        )
        return found


def average_checkpoints(
    checkpoints: Paths,
    evaluate: Evaluate | None = None,
    strategy: str = "aswa",
    *,
    output: str | os.PathLike[str] | None = None,
    revisions: Sequence[str] | None = None,
    greater_is_better: bool = True,
    metric: str | None = None,
    hard_updates: bool = True,
    start: int | float = 0,
    decay: float = 0.7,
    batchnorm: str | None = None,
    train_batches: Batches | None = None,
    bn_batches: int | None = None,
    dataset: str | None = None,
    load: Callable[[Path], Any] | None = None,
    progress: Progress | None = None,
) -> AveragedCheckpoints:
    """Averages existing checkpoints of one model by a strategy, and writes the result to the folder `output`.

    >>> average_checkpoints("trainer-output", evaluate, output="averaged")
    >>> average_checkpoints(["a/model.safetensors", "b/model.safetensors"], strategy="uniform").state_dict()
    >>> average_checkpoints("me/model", evaluate, "greedy", revisions=["step-100", "step-200", "main"])

    `checkpoints` is a folder with `checkpoint-N`, a list of checkpoint folders or safetensors files, or a Hub
    repository (`"me/model@v1,v2"`). `strategy` is "aswa", "greedy" or "best", which ask `evaluate`, or "swa" (from
    `start` on: a number of checkpoints or a fraction), "ema" (`decay`), "uniform" or "last", which do not need it.

    `evaluate(model)` gives the validation score of a model: a transformers model on the CPU, in evaluation mode, if
    the checkpoints have a config that names one, otherwise the state dict. `load(folder)` replaces this. For the runs
    of `aswa-hf train` it need not be given; `dataset` says where their data are, if they have been moved.

    BatchNorm statistics of averaged weights are recomputed on `train_batches` (at most `bn_batches` of them), if they
    are given or known, else averaged, with a warning; `batchnorm` ("recalibrate", "average", "copy") decides.
    """
    strategy = _checked(strategy, decay, batchnorm, evaluate)
    if output is not None:
        _refuse_used(Path(output))
    say = _Steps(progress)
    found = find_checkpoints(checkpoints, revisions, report=say)
    if strategy == "swa":
        choosing.first_included(start, len(found))
    known = _known_evaluation(found, strategy, dataset) if evaluate is None else None
    if known is not None:
        evaluate, train_batches = known.score, known.batches if train_batches is None else train_batches
        bn_batches = known.bn_batches if bn_batches is None else bn_batches
    batchnorm = _batchnorm(found[0], strategy, batchnorm, train_batches)
    batches = train_batches if batchnorm == "recalibrate" else None
    judge = Judge(evaluate, _loading(load), batches, bn_batches, say.evaluating)
    judged = strategy in JUDGED
    look_aheads = len(found) - 1 if strategy in ("aswa", "greedy") else 0
    say.total = len(found) + look_aheads if judged else int(evaluate is not None)
    metric = metric or (known.metric if known else getattr(evaluate, "__name__", "score").strip("<>"))
    with _scratch(output) as scratch:
        copied = choosing.unaveraged(found[0], batchnorm)
        ensemble = Ensemble(found, judge, scratch, copied, greater_is_better)
        _choose(ensemble, strategy, hard_updates=hard_updates, start=start, decay=decay)
        if not judged:
            ensemble = _judge_fixed(ensemble)
        results: dict[str, dict[str, float]] = {}
        mean = ensemble.mean()
        if output is not None or known is not None:
            final = written(mean, scratch / "result")
            if known is not None:
                say("evaluating the result on all splits")
                results = judge.metrics(final, known.report)
        total = sum(ensemble.weights)
        shares = {i: weight / total for i, weight in zip(ensemble.members, ensemble.weights, strict=True)}
        result = AveragedCheckpoints(
            strategy=strategy,
            checkpoints=[found[index].name for index in ensemble.order],
            alphas=[shares.get(index, 0.0) for index in ensemble.order],
            trajectory=ensemble.trajectory,
            score=ensemble.score,
            metric=metric,
            evaluations=judge.evaluations,
            folder=None if output is None else Path(output),
            results=results,
            mean=mean,
        )
        if output is not None:
            _finish(result, scratch / "result", Path(output), greater_is_better, known)
    return result


def _checked(strategy: str, decay: float, batchnorm: str | None, evaluate: Any) -> str:
    name = str(strategy).lower().removesuffix("soup").rstrip("-_ ")
    if name not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}.")
    if not 0 <= decay < 1:
        raise ValueError(f"decay must be in [0, 1), got {decay}.")
    if batchnorm is not None and batchnorm not in BATCHNORM_POLICIES:
        raise ValueError(f"batchnorm must be one of {', '.join(BATCHNORM_POLICIES)}, got {batchnorm!r}.")
    if evaluate is not None and not callable(evaluate):
        raise TypeError(f"evaluate must be a function of the model, got {type(evaluate).__name__}.")
    return name


def _refuse_used(output: Path) -> None:
    if output.is_dir() and not any(output.iterdir()):
        return
    if output.exists() or output.is_symlink():
        raise ValueError(f"{output} exists already and is not an empty folder. Choose another one for the result.")


def _known_evaluation(found: Sequence[Checkpoint], strategy: str, dataset: str | None) -> Evaluation | None:
    """How the checkpoints are judged, if they are those of a run of this package."""
    from aswa_hf.cli.run_evaluation import find_evaluation

    try:
        known = find_evaluation(found, dataset)
    except (ValueError, OSError) as error:
        if strategy in JUDGED or dataset is not None:
            raise
        warn_caller(f"The result is not evaluated: {error}")
        return None
    if known is None and strategy in JUDGED:
        raise ValueError(
            f"The strategy {strategy!r} asks for validation scores: give an evaluation, which is a function of the "
            "model that returns its score. Only for runs of `aswa-hf train` is it found without."
        )
    return known


def _batchnorm(checkpoint: Checkpoint, strategy: str, batchnorm: str | None, batches: Batches | None) -> str:
    """What becomes of BatchNorm statistics; averaged ones are wrong, and it is said if nothing better can be done."""
    if not statistics_of(checkpoint) or strategy in ("best", "last"):
        return "copy"
    if batchnorm == "recalibrate" and batches is None:
        raise ValueError("batchnorm='recalibrate' needs train_batches to recompute the statistics on.")
    if batchnorm is None and batches is None:
        warn_caller(
            "The model has BatchNorm layers, whose statistics belong to the weights before them. Without training "
            "batches they are averaged too, and averaged weights look worse than they are: pass train_batches= to "
            "recompute them, or batchnorm='average' if this is meant."
        )
        return "average"
    return batchnorm or "recalibrate"


def _loading(load: Callable[[Path], Any] | None) -> Callable[[Checkpoint], Any]:
    if load is None:
        return load_model
    return lambda checkpoint: load(checkpoint.folder or checkpoint.files[0])


def _choose(ensemble: Ensemble, strategy: str, *, hard_updates: bool, start: int | float, decay: float) -> None:
    if strategy == "aswa":
        choosing.choose_adaptively(ensemble, hard_updates=hard_updates)
    elif strategy == "greedy":
        choosing.choose_greedily(ensemble)
    elif strategy == "best":
        choosing.choose_best(ensemble)
    else:
        choosing.choose_by_order(ensemble, strategy, start=start, decay=decay)
    if not ensemble.members:
        raise ValueError(
            f"None of {len(ensemble.checkpoints)} checkpoints has a finite score, so there is nothing to choose from."
        )


def _judge_fixed(ensemble: Ensemble) -> Ensemble:
    """Statistics and score of an average whose weights were known before; they go into its last record."""
    from dataclasses import replace

    judge = ensemble.judge
    averaged = len(ensemble.members) > 1
    if judge.evaluate is None and not (averaged and judge.batches is not None):
        return ensemble
    candidate = written(ensemble.mean(), ensemble.scratch / "look-ahead")
    if judge.evaluate is None:
        ensemble.statistics = judge.statistics(candidate)
    else:
        ensemble.score, ensemble.statistics = judge.score(candidate, averaged=averaged)
        ensemble.trajectory[-1] = replace(ensemble.trajectory[-1], score=ensemble.score)
    return ensemble


def _finish(
    result: AveragedCheckpoints, temporary: Path, output: Path, greater_is_better: bool, known: Evaluation | None
) -> None:
    """Puts the finished folder in its place, with the trajectory beside the weights."""
    run: dict[str, Any] = {"versions": library_versions()}
    if known is not None:
        run |= known.about | {"strategies": {result.strategy: result.results}}
    save_trajectories(
        temporary / TRAJECTORY,
        {result.strategy: result.trajectory},
        alphas={result.strategy: result.alphas},
        metric=result.metric,
        greater_is_better=greater_is_better,
        applied=result.strategy,
        checkpoints=result.checkpoints,
        evaluations=result.evaluations,
        run=json.loads(json.dumps(encode_number(run))),
    )
    _refuse_used(output)
    os.replace(temporary, output)


@contextmanager
def _scratch(output: str | os.PathLike[str] | None) -> Iterator[Path]:
    """A folder for what is in the making, on the disk of the result, that is gone in the end."""
    if output is None:
        with tempfile.TemporaryDirectory(prefix="aswa-") as folder:
            yield Path(folder)
        return
    parent = Path(output).absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(prefix=f".{Path(output).name}.", suffix=".tmp", dir=parent)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Steps:
    """Counts what is done for the one who watches."""

    def __init__(self, progress: Progress | None):
        self.progress = progress
        self.done, self.total = -1, 0

    def __call__(self, text: str) -> None:
        if self.progress is not None:
            self.progress(text, max(self.done, 0), self.total)

    def evaluating(self, text: str) -> None:
        self.done += 1
        self(text)
