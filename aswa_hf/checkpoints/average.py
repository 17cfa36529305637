"""`average_checkpoints`: one set of weights from existing checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aswa_hf._utils.checks import check_choice
from aswa_hf._utils.names import parse_strategy
from aswa_hf._utils.warnings import warn_caller
from aswa_hf.batchnorm import Batches
from aswa_hf.checkpoints import rules
from aswa_hf.checkpoints.evaluation import Evaluate, Evaluator, load_model, statistics_of
from aswa_hf.checkpoints.result import AveragedCheckpoints, finish, refuse_used, scratch_folder
from aswa_hf.checkpoints.rules import BY_VALIDATION, RULES, Ensemble, written
from aswa_hf.checkpoints.sources import Paths, find_checkpoints
from aswa_hf.checkpoints.streaming import Checkpoint
from aswa_hf.experiments.evaluation import Evaluation, find_evaluation
from aswa_hf.run_folder import ADAPTER_CONFIG, CONFIG
from aswa_hf.strategies import BATCHNORM_POLICIES

Progress = Callable[[str, int, int], None]
"""Called with a description of the next step, the number of finished steps, and their total."""


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
    start: int | float | None = None,
    decay: float | None = None,
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
    repository (`"me/model@v1,v2"`). `strategy` is "aswa", "greedy", "best" or "swad", which call `evaluate`, or "swa"
    (from `start` on: a number of checkpoints or a fraction), "lawa" (the last five; "lawa(k=3)"), "wsm" (weights that
    imitate a decay of the learning rate from `start` on: "wsm(schedule=cosine)", or linear, 1-sqrt), "ema" (`decay`,
    by default 0.7), "uniform" or "last", which do not need it. `hard_updates=False` is for "aswa".

    `evaluate(model)` returns the validation score of a model: a transformers model on the CPU, in evaluation mode, if
    the checkpoints have a config that names one, otherwise the state dict. `load(folder)` replaces this. Runs of
    `aswa-hf train` do not need `evaluate`; `dataset` is the location of their data, if they have been moved.

    BatchNorm statistics of averaged weights are recomputed on `train_batches` (at most `bn_batches` of them), if they
    are given or known, else averaged, with a warning; `batchnorm` ("recalibrate", "average", "copy") decides.
    """
    strategy, options = _checked(strategy, batchnorm, evaluate)
    options |= rules.own_arguments(strategy, start=start, decay=decay, hard_updates=hard_updates)
    if output is not None:
        refuse_used(Path(output))
    steps = _Steps(progress)
    found = find_checkpoints(checkpoints, revisions, report=steps)
    if strategy in ("swa", "wsm"):
        rules.first_included(options.get("start", 0), len(found))
    if load is None and (evaluate is not None or strategy in BY_VALIDATION):
        _check_configs(found)
    known = _known_evaluation(found, strategy, dataset) if evaluate is None else None
    if load is None and known is not None:
        _check_configs(found)
    if known is not None:
        evaluate, train_batches = known.score, known.batches if train_batches is None else train_batches
        bn_batches = known.bn_batches if bn_batches is None else bn_batches
    batchnorm = _batchnorm(found[0], strategy, batchnorm, train_batches)
    batches = train_batches if batchnorm == "recalibrate" else None
    evaluator = Evaluator(evaluate, _loading(load), batches, bn_batches, steps.evaluating, greater_is_better)
    by_validation = strategy in BY_VALIDATION
    look_aheads = {"aswa": len(found) - 1, "greedy": len(found) - 1, "swad": 1}.get(strategy, 0)
    steps.total = len(found) + look_aheads if by_validation else int(evaluate is not None)
    metric = metric or (known.metric if known else getattr(evaluate, "__name__", "score").strip("<>"))
    with scratch_folder(output) as scratch:
        copied = rules.unaveraged(found[0], batchnorm)
        ensemble = Ensemble(found, evaluator, scratch, copied, greater_is_better)
        _choose(ensemble, strategy, **options)
        if not by_validation or strategy == "swad":
            ensemble = _evaluate_fixed(ensemble)
        results: dict[str, dict[str, float]] = {}
        mean = ensemble.mean()
        if output is None and known is None:
            mean.check_finite()
        else:
            final = written(mean, scratch / "result", checked=True)
            if known is not None:
                steps("evaluating the result on all splits")
                results = evaluator.metrics(final, known.report)
        total = sum(ensemble.weights)
        shares = {i: weight / total for i, weight in zip(ensemble.members, ensemble.weights, strict=True)}
        result = AveragedCheckpoints(
            strategy=strategy,
            checkpoints=[found[index].name for index in ensemble.order],
            alphas=[shares.get(index, 0.0) for index in ensemble.order],
            trajectory=ensemble.trajectory,
            score=ensemble.score,
            metric=metric,
            evaluations=evaluator.evaluations,
            folder=None if output is None else Path(output),
            results=results,
            mean=mean,
        )
        if output is not None:
            finish(result, scratch / "result", Path(output), greater_is_better, known)
    return result


def _checked(strategy: str, batchnorm: str | None, evaluate: Any) -> tuple[str, dict[str, Any]]:
    name, given = parse_strategy(str(strategy).lower().removesuffix("soup").rstrip("-_ "))
    check_choice("strategy", name, RULES)
    options = rules.checked_options(name, given)
    if batchnorm is not None:
        check_choice("batchnorm", batchnorm, BATCHNORM_POLICIES)
    if evaluate is not None and not callable(evaluate):
        raise TypeError(f"evaluate must be a function of the model, got {type(evaluate).__name__}.")
    return name, options


def _check_configs(found: Sequence[Checkpoint]) -> None:
    """Raises ValueError if some checkpoints have a config and others do not."""
    for name in (CONFIG, ADAPTER_CONFIG):
        having = [one for one in found if one.folder is not None and (one.folder / name).is_file()]
        if without := next((one for one in found if having and one not in having), None):
            place = without.folder or without.files[0]
            raise ValueError(
                f"{place} has no {name}, but {having[0].folder} has one. If they are of "
                f"one model, copy {name} beside the weights that lack it."
            )


def _known_evaluation(found: Sequence[Checkpoint], strategy: str, dataset: str | None) -> Evaluation | None:
    """The evaluation of the checkpoints, if they belong to a run of `aswa-hf train` or a dataset is given."""
    try:
        known = find_evaluation([checkpoint.folder for checkpoint in found], dataset)
    except (ValueError, OSError) as error:
        if strategy in BY_VALIDATION or dataset is not None:
            raise
        warn_caller(f"The result is not evaluated: {error}")
        return None
    if known is None and strategy in BY_VALIDATION:
        raise ValueError(
            f"The strategy {strategy!r} needs validation scores: give an evaluation function, which returns the score "
            "of a model. Only runs of `aswa-hf train` do not need one."
        )
    return known


def _batchnorm(checkpoint: Checkpoint, strategy: str, batchnorm: str | None, batches: Batches | None) -> str:
    """The policy for BatchNorm statistics; warns if they can only be averaged, which is inaccurate."""
    if not statistics_of(checkpoint) or strategy in ("best", "last"):
        return "copy"
    if batchnorm == "recalibrate" and batches is None:
        raise ValueError("batchnorm='recalibrate' needs train_batches to recompute the statistics on.")
    if batchnorm is None and batches is None:
        warn_caller(
            "The model has BatchNorm layers, whose statistics depend on the weights before them. Without training "
            "batches they are averaged too, and averaged weights look worse than they are: pass train_batches= to "
            "recompute them, or batchnorm='average' if this is intended."
        )
        return "average"
    return batchnorm or "recalibrate"


def _loading(load: Callable[[Path], Any] | None) -> Callable[[Checkpoint], Any]:
    if load is None:
        return load_model
    return lambda checkpoint: load(checkpoint.folder or checkpoint.files[0])


def _choose(ensemble: Ensemble, strategy: str, **options: Any) -> None:
    if strategy == "aswa":
        rules.choose_adaptively(ensemble, **options)
    elif strategy == "greedy":
        rules.choose_greedily(ensemble)
    elif strategy == "best":
        rules.choose_best(ensemble)
    elif strategy == "swad":
        rules.choose_valley(ensemble, **options)
    else:
        rules.choose_by_order(ensemble, strategy, **options)
    if not ensemble.members:
        raise ValueError(
            f"None of {len(ensemble.checkpoints)} checkpoints has a finite score, so there is nothing to choose from."
        )


def _evaluate_fixed(ensemble: Ensemble) -> Ensemble:
    """Adds the statistics and the score of an average whose weights follow from the order."""
    evaluator = ensemble.evaluator
    averaged = len(ensemble.members) > 1
    if evaluator.evaluate is None and not (averaged and evaluator.batches is not None):
        return ensemble
    candidate = written(ensemble.mean(), ensemble.scratch / "look-ahead")
    if evaluator.evaluate is None:
        ensemble.statistics = evaluator.statistics(candidate)
    else:
        ensemble.score, ensemble.statistics = evaluator.score(candidate, averaged=averaged)
        ensemble.trajectory[-1] = replace(ensemble.trajectory[-1], score=ensemble.score)
    return ensemble


class _Steps:
    """Counts the evaluations and reports them to `progress`."""

    def __init__(self, progress: Progress | None):
        self.progress = progress
        self.done, self.total = -1, 0

    def __call__(self, text: str) -> None:
        if self.progress is not None:
            self.progress(text, max(self.done, 0), self.total)

    def evaluating(self, text: str) -> None:
        self.done += 1
        self(text)
