"""What `ASWACallback` takes from the `Trainer` and its arguments, its place among callbacks, silent evaluation."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback, ProgressCallback
from transformers.trainer_utils import IntervalStrategy, has_length

from aswa_hf._utils.zero import refuse_unsupported_settings
from aswa_hf.comparison import TIMINGS, Metric, Score
from aswa_hf.schedule import Every, fixed_subset


def check_trainer_supported(trainer: Trainer, every: Every, strategies: Iterable[str]) -> None:
    """Raises ValueError for a trainer whose weights cannot be averaged, or which would never decide."""
    if trainer.is_deepspeed_enabled:
        refuse_unsupported_settings(trainer.accelerator.state.deepspeed_plugin.deepspeed_config)
    fsdp = trainer.accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
    if trainer.is_fsdp_xla_enabled or (fsdp is not None and fsdp.fsdp_version != 2):
        raise ValueError(
            "ASWACallback does not support FSDP1, which flattens the weights, nor FSDP on XLA. Use FSDP2 "
            "(fsdp_config={'version': 2}) or DDP."
        )
    # TRL's trainers have methods of their own too, but they need the dataset.
    methods = (type(trainer).evaluate, type(trainer).get_eval_dataloader)
    base = (Trainer.evaluate, Trainer.get_eval_dataloader)
    own_evaluation = any(m not in base and not _is_of_trl(m) for m in methods)
    if trainer.eval_dataset is None and not own_evaluation:
        raise ValueError("ASWA decides by validation: pass an eval_dataset to the Trainer.")
    args = trainer.args
    if every.unit == "evaluation" and args.eval_strategy == IntervalStrategy.NO:
        raise ValueError("every='evaluation' with eval_strategy='no' would never decide. Use every='epoch'.")
    if followed_strategy(strategies, args) and not _decides_at_every_evaluation(every, args):
        raise ValueError(
            f"metric_for_best_model={args.metric_for_best_model!r} needs a decision at every evaluation, but "
            f"with every={every.given!r} and eval_strategy={args.eval_strategy.value!r} there are evaluations "
            "without one. Use every='evaluation'."
        )


def _decides_at_every_evaluation(every: Every, args: TrainingArguments) -> bool:
    if every.by_steps:
        # A fraction of the run, and the default until training begins, are not known to be multiples.
        steps = args.eval_steps or 0
        return bool(args.eval_strategy == IntervalStrategy.STEPS and steps >= 1 and steps % every.count == 0)
    return every.unit == "evaluation" or (every.count == 1 and args.eval_strategy == IntervalStrategy.EPOCH)


def check_metric_exists(score: Score, trainer: Trainer) -> None:
    """Raises ValueError for a metric that no evaluation of the trainer will have, where that is known."""
    # A trainer's own `log` may add metrics, as those of TRL do.
    methods = ("evaluate", "evaluation_loop", "log")
    own = any(getattr(type(trainer), name) is not getattr(Trainer, name) for name in methods)
    if own or trainer.compute_metrics is not None:
        return
    if missing := [key for key in score.keys if key not in _losses(trainer) and not key.endswith(TIMINGS)]:
        name = missing[0].removeprefix("eval_")
        raise ValueError(
            f"The metric {name!r} will not be among those of the evaluation: the Trainer has no compute_metrics, and "
            f"reports only the loss. Pass a compute_metrics that returns {name!r} to the Trainer, or metric='loss'."
        )


def metric_can_be_tried(score: Score, trainer: Trainer) -> bool:
    """Whether evaluating a few examples can show, without side effects, if the metric exists."""
    if not _evaluates_examples(trainer):
        return False
    data = trainer.eval_dataset
    parts = data.values() if isinstance(data, dict) else [data]
    adds_metrics = type(trainer).log is not Trainer.log or trainer.compute_metrics is not None
    # A subclass may evaluate on other data than its eval_dataset.
    methods = (type(trainer).evaluate, type(trainer).get_eval_dataloader)
    return (
        adds_metrics
        and all(method.__module__.startswith(("transformers.", "trl.")) for method in methods)
        and all(hasattr(part, "__len__") or hasattr(part, "take") for part in parts)
        and not (score.keys and _losses(trainer).issuperset(score.keys))
        and not trainer.args.batch_eval_metrics  # a compute_metrics that fails would keep the examples it has seen
    )


@contextmanager
def failures_of_metrics(trainer: Trainer) -> Iterator[list[Exception]]:
    """Collects the errors of `compute_metrics`, which may not be defined for a few examples, until the block ends."""
    compute, failures = trainer.compute_metrics, []

    def compute_if_defined(*args: Any, **options: Any) -> Any:
        try:
            return compute(*args, **options)
        except Exception as error:  # it is the user's function
            failures.append(error)
            return {}

    if compute is not None:
        trainer.compute_metrics = compute_if_defined
    try:
        yield failures
    finally:
        trainer.compute_metrics = compute


def _losses(trainer: Trainer) -> set[str]:
    """The losses that every evaluation reports."""
    data = trainer.eval_dataset
    return {f"eval_{name}_loss" for name in data} if isinstance(data, dict) else {"eval_loss"}


def _evaluates_examples(trainer: Trainer) -> bool:
    """Whether the evaluation data has examples; a link predictor is ranked on a complete split."""
    return trainer.eval_dataset is not None and not hasattr(trainer, "kg")


def _is_of_trl(method: Any) -> bool:
    return bool(method.__module__.startswith("trl."))


def refuse_second(trainer: Trainer, callback: TrainerCallback) -> None:
    """Raises ValueError if the trainer has another callback of this kind, or this one twice."""
    same = [other for other in trainer.callback_handler.callbacks if isinstance(other, type(callback))]
    if len(same) > 1:
        raise ValueError(
            f"The Trainer has {len(same)} of {type(callback).__name__}, which would overwrite each other's files. Add "
            "it once: one callback follows several strategies (strategies=…)."
        )


def followed_strategy(strategies: Iterable[str], args: TrainingArguments) -> str | None:
    """Returns the strategy that `metric_for_best_model` names, as in "eval_aswa_accuracy"."""
    metric = (args.metric_for_best_model or "").removeprefix("eval_")
    return next((name for name in strategies if metric.startswith(f"{name}_")), None)


def choose_metric(metric: Metric | None, strategies: Iterable[str], args: TrainingArguments) -> Metric:
    """Returns the given metric, or `metric_for_best_model`, or the loss."""
    return metric if metric is not None else _metric_of_best(strategies, args)


def choose_direction(
    greater_is_better: bool | None, metric: Metric, label: str, strategies: Iterable[str], args: TrainingArguments
) -> bool:
    """Returns the given direction, or that of `metric_for_best_model`, or that of the Trainer's own rule."""
    if greater_is_better is not None:
        return greater_is_better
    if isinstance(metric, Mapping) and any(k.endswith("loss") and weight > 0 for k, weight in metric.items()):
        raise ValueError(f"metric={dict(metric)!r} adds a loss: set greater_is_better= to the direction of the sum.")
    if args.greater_is_better is not None and label == _metric_of_best(strategies, args):
        return bool(args.greater_is_better)
    return not label.endswith("loss")


def _metric_of_best(strategies: Iterable[str], args: TrainingArguments) -> str:
    """Returns the running model's metric behind `metric_for_best_model`: accuracy for "eval_aswa_accuracy"."""
    metric = (args.metric_for_best_model or "loss").removeprefix("eval_")
    return metric.removeprefix(f"{followed_strategy(strategies, args)}_")


def datasets_of_metric(score: Score, trainer: Trainer) -> list[str]:
    """Returns the evaluation datasets that the metric uses, if there are several; empty with one."""
    if not isinstance(trainer.eval_dataset, dict):
        return []
    names = sorted(trainer.eval_dataset, key=len, reverse=True)
    needed = []
    for key in score.keys:
        dataset = next((name for name in names if key.startswith(f"eval_{name}_")), None)
        if dataset is None:
            raise ValueError(
                f"There are several evaluation datasets ({', '.join(trainer.eval_dataset)}), and the metric "
                f"{key.removeprefix('eval_')!r} names none of them. Say which one decides, for example "
                f"metric='{next(iter(trainer.eval_dataset))}_{key.removeprefix('eval_')}'."
            )
        needed.append(dataset)
    return list(dict.fromkeys(needed)) or list(trainer.eval_dataset)


def steps_to_first_decision(every: Every, args: TrainingArguments, loader: Any) -> int:
    """Returns how many steps a run needs to reach a decision; 0 if that is unknown."""
    if every.by_steps:
        return every.count
    if every.unit == "evaluation" or loader is None or not has_length(loader):
        return 0
    steps: int = -(-len(loader) // args.gradient_accumulation_steps)
    return steps * every.count


class RunsLast(TrainerCallback):
    """Calls its owner at the end of a step or an epoch, after all other callbacks."""

    def __init__(self, owner: Any, trainer: Trainer):
        self.owner = owner
        self.trainer = trainer

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._is_in_use():
            self.owner.step_ended(args, state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._is_in_use():
            self.owner.epoch_ended(args, state, control)

    def _is_in_use(self) -> bool:
        # Removing the owner from the Trainer does not remove this callback.
        return any(callback is self.owner for callback in self.trainer.callback_handler.callbacks)


def order_callbacks(trainer: Trainer, callback: TrainerCallback) -> None:
    """Moves `callback` right after the default flow: later callbacks see the ensemble's metrics in an evaluation's.

    Also adds its `RunsLast` at the end, where it is known whether the Trainer will evaluate and save.
    """
    handler = trainer.callback_handler
    others = [c for c in handler.callbacks if c is not callback and getattr(c, "owner", None) is not callback]
    position = next((i + 1 for i, c in enumerate(others) if isinstance(c, DefaultFlowCallback)), 0)
    # A new list: the handler is iterating over the old one.
    handler.callbacks = [*others[:position], callback, *others[position:], RunsLast(callback, trainer)]


def metrics_of(
    trainer: Trainer, returned: Mapping[str, Any], logged: Mapping[str, Any], score: Score, dataset: str | None = None
) -> dict[str, Any]:
    """The metrics of an evaluation: what it returned, and what only its log has.

    A trainer with a `log` of its own may report None where no example of the evaluation has a value, as GRPO does for
    a reward. What the score uses is then not a number; of a function, it is unknown what it uses. What it adds has no
    name of a `dataset`, as TRL's metrics of several evaluation datasets: here it has.
    """
    numbers = {key: value for key, value in logged.items() if value is None or isinstance(value, (int, float))}
    found = {key: value for key, value in numbers.items() if key.startswith("eval_")} | dict(returned)
    if dataset is not None:
        found = {_key_of(dataset, key): value for key, value in found.items()}
    if type(trainer).log is Trainer.log:
        return found  # a None is of compute_metrics, which must return numbers
    missing = [key for key, value in found.items() if value is None and (key in score.keys or not score.keys)]
    return {key: value for key, value in found.items() if value is not None} | dict.fromkeys(missing, math.nan)


def _key_of(dataset: str, key: str) -> str:
    named = not key.startswith("eval_") or key.startswith(f"eval_{dataset}_")
    return key if named else f"eval_{dataset}_{key.removeprefix('eval_')}"


def evaluation_subset(trainer: Trainer, size: int | float) -> Any:
    """Returns a fixed part of the trainer's evaluation data, or of each of several datasets."""
    if not _evaluates_examples(trainer):
        raise ValueError(
            f"eval_subset={size!r} needs a Trainer that evaluates on its eval_dataset, got {type(trainer).__name__}. "
            "Leave eval_subset out."
        )
    data = trainer.eval_dataset
    if isinstance(data, dict):
        return {name: fixed_subset(part, size) for name, part in data.items()}
    return fixed_subset(data, size)


@contextmanager
def evaluating_on(trainer: Trainer, data: Any, loaders: dict[str, Any]) -> Iterator[None]:
    """Replaces the trainer's evaluation data until the block ends; None changes nothing.

    `loaders` keeps the loaders of this data whose workers stay alive, as the trainer keeps those of its own.
    """
    if data is None:
        yield
        return
    replaced = {"eval_dataset": data}
    if hasattr(trainer, "_eval_dataloaders") or trainer.args.dataloader_persistent_workers:
        replaced["_eval_dataloaders"] = loaders
    used = []
    get_loader = trainer.get_eval_dataloader

    def get_eval_dataloader(*args: Any, **options: Any) -> Any:
        used.append(True)
        return get_loader(*args, **options)

    replaced["get_eval_dataloader"] = get_eval_dataloader
    missing = object()
    before = {name: vars(trainer).get(name, missing) for name in replaced}
    vars(trainer).update(replaced)
    try:
        yield
        if not used:
            raise ValueError(
                f"eval_subset has no effect: {type(trainer).__name__}.evaluate() does not use eval_dataset. Leave it "
                "out."
            )
    finally:
        for name, value in before.items():
            if value is missing:
                del vars(trainer)[name]
            else:
                setattr(trainer, name, value)


@contextmanager
def silenced(trainer: Trainer) -> Iterator[dict[str, float]]:
    """Silent evaluation: inside the block evaluations are not logged and call no callback but the progress bar.

    Yields what they would have logged: a trainer may add metrics of its own in `log`, and empties its buffers there.
    """
    handler, control, callbacks = trainer.callback_handler, trainer.control, trainer.callback_handler.callbacks
    logged: dict[str, float] = {}
    had_own_log = "log" in vars(trainer)
    log = trainer.log
    progress = [callback for callback in callbacks if isinstance(callback, ProgressCallback)]
    # Texts that a trainer generates in an evaluation, as GRPO does, are kept for its next log.
    texts = vars(trainer).get("_logs")
    if texts is not None:
        trainer._logs = copy.deepcopy(texts)
    for bar in progress:
        bar.on_evaluate(trainer.args, trainer.state, control)  # closes the bar of the last evaluation
    handler.callbacks = progress

    def log_silently(*args: Any, **options: Any) -> None:
        history, before = trainer.state.log_history, len(trainer.state.log_history)
        should_log, handler.callbacks = trainer.control.should_log, []
        prints = vars(trainer).get("log_completions")
        if prints:
            trainer.log_completions = False
        try:
            log(*args, **options)
            for entry in history[before:]:
                logged.update(entry)
        finally:
            del history[before:]
            trainer.control.should_log, handler.callbacks = should_log, progress
            if prints:
                trainer.log_completions = prints

    trainer.log = log_silently
    try:
        yield logged
    finally:
        handler.callbacks = callbacks
        if texts is not None:
            trainer._logs = texts
        if had_own_log:
            trainer.log = log
        else:
            del trainer.log
