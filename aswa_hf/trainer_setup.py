"""What a `Trainer` and its arguments mean for `ASWACallback`, and an evaluation that nobody else hears of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import nn
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import IntervalStrategy

from aswa_hf.metrics import Metric, Score
from aswa_hf.strategies import STRATEGIES
from aswa_hf.strategy import Strategy

Factory = Callable[[nn.Module], Strategy]


def refuse_unsupported(trainer: Trainer, every: str | int) -> None:
    """Raises for a trainer whose weights cannot be averaged, or which would never decide."""
    if trainer.is_deepspeed_enabled:
        raise ValueError("ASWACallback does not support DeepSpeed, which keeps the weights to itself. Use DDP.")
    if trainer.is_fsdp_enabled:
        raise ValueError("ASWACallback does not support FSDP in the Trainer. Use DDP.")
    own_evaluation = (
        type(trainer).evaluate is not Trainer.evaluate
        or type(trainer).get_eval_dataloader is not Trainer.get_eval_dataloader
    )
    if trainer.eval_dataset is None and not own_evaluation:
        raise ValueError("ASWA decides by validation: give the Trainer an eval_dataset.")
    if every == "evaluation" and trainer.args.eval_strategy == IntervalStrategy.NO:
        raise ValueError("every='evaluation' with eval_strategy='no' would never decide. Use every='epoch'.")


def choose_metric(metric: Metric | None, strategies: Iterable[str], args: TrainingArguments) -> Metric:
    """The given metric, or `metric_for_best_model`, or the loss."""
    return metric if metric is not None else _metric_of_best(strategies, args)


def choose_direction(
    greater_is_better: bool | None, label: str, strategies: Iterable[str], args: TrainingArguments
) -> bool:
    """The given direction, or that of `metric_for_best_model`, or the Trainer's own rule."""
    if greater_is_better is not None:
        return greater_is_better
    if args.greater_is_better is not None and label == _metric_of_best(strategies, args):
        return args.greater_is_better
    return not label.endswith("loss")


def _metric_of_best(strategies: Iterable[str], args: TrainingArguments) -> str:
    """The running model's metric behind `metric_for_best_model`: "eval_aswa_accuracy" follows accuracy."""
    metric = (args.metric_for_best_model or "loss").removeprefix("eval_")
    for name in strategies:
        if metric.startswith(f"{name}_"):
            return metric.removeprefix(f"{name}_")
    return metric


def datasets_of_metric(score: Score, trainer: Trainer) -> list[str]:
    """With several evaluation datasets, those the metric reads; empty with one."""
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


def resumed_checkpoint(resume_from: str | Path | None, args: TrainingArguments, state: TrainerState) -> Path:
    """The folder a resumed run starts from; the Trainer does not tell."""
    given = args.resume_from_checkpoint
    candidates = [Path(given)] if isinstance(given, str) else []
    candidates.append(Path(args.output_dir) / f"checkpoint-{state.global_step}")
    if resume_from is not None:
        candidates = [Path(resume_from)]
    for candidate in candidates:
        saved = candidate / TRAINER_STATE_NAME
        if saved.is_file() and TrainerState.load_from_json(str(saved)).global_step == state.global_step:
            return candidate
    raise FileNotFoundError(
        f"The run resumes at step {state.global_step}, but {' and '.join(map(str, candidates))} is no checkpoint of "
        "that step. The Trainer does not tell callbacks where it resumes from: pass resume_from=your_checkpoint to "
        "ASWACallback."
    )


def named_factories(strategies: Sequence[str] | Mapping[str, Factory]) -> dict[str, Factory]:
    """What builds each strategy, by name."""
    if isinstance(strategies, str):
        strategies = tuple(strategies.split(","))
    if isinstance(strategies, Mapping):
        if wrong := [name for name, factory in strategies.items() if not callable(factory)]:
            raise TypeError(f"strategies[{wrong[0]!r}] must be a function that builds a strategy for a model.")
        return dict(strategies)
    if unknown := [name for name in strategies if name not in STRATEGIES]:
        raise ValueError(f"Unknown strategy {unknown[0]!r}. Known are {', '.join(STRATEGIES)}.")
    return {name: STRATEGIES[name] for name in strategies}


@contextmanager
def unheard(trainer: Trainer) -> Iterator[None]:
    """Evaluations inside are not logged and reach no callback but the progress bar."""
    handler, control = trainer.callback_handler, trainer.control
    callbacks, should_evaluate = handler.callbacks, control.should_evaluate
    had_own_log = "log" in vars(trainer)
    log = trainer.log
    progress = [callback for callback in callbacks if isinstance(callback, ProgressCallback)]
    for bar in progress:
        bar.on_evaluate(trainer.args, trainer.state, control)  # the bar of the evaluation just done
    handler.callbacks = progress
    trainer.log = lambda *args, **kwargs: None
    try:
        yield
    finally:
        handler.callbacks = callbacks
        control.should_evaluate = should_evaluate
        if had_own_log:
            trainer.log = log
        else:
            del trainer.log
