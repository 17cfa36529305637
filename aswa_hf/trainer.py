"""`ASWACallback`: weight averaging for `transformers.Trainer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback
from transformers.trainer_utils import IntervalStrategy
from transformers.utils import logging

from aswa_hf.averaging import persistent_buffers
from aswa_hf.batchnorm import default_train_batches
from aswa_hf.checkpoint import AVERAGE_FILE, load_state, save_state
from aswa_hf.distributed import broadcast_from_rank_0
from aswa_hf.metrics import Metric, Score
from aswa_hf.rng import preserved_rng
from aswa_hf.strategies import ASWA, EMA, SWA
from aswa_hf.strategy import Strategy
from aswa_hf.trainer_setup import (
    Factory,
    choose_direction,
    choose_metric,
    datasets_of_metric,
    named_factories,
    refuse_unsupported,
    resumed_checkpoint,
    unheard,
)
from aswa_hf.trajectory import Decision, save_trajectories

logger = logging.get_logger(__name__)

STATE_FOLDER = "aswa"
TRAJECTORY_FILE = "aswa_trajectory.json"


class ASWACallback(TrainerCallback):
    """Ends a training run with the ASWA ensemble in the model.

    >>> trainer = Trainer(model, args, train_dataset=…, eval_dataset=…, compute_metrics=…)
    >>> trainer.add_callback(ASWACallback(trainer, metric="accuracy"))
    >>> trainer.train()

    Args:
        trainer: the trainer it works for; needed for the second evaluation. A callback given to `Trainer(callbacks=…)`
            is bound with `callback.bind(trainer)`.
        metric: what decides: a metric's name, a dict of weights over metrics, or a function of the metrics dictionary.
            By default `metric_for_best_model`, then the evaluation loss.
        strategies: what to keep beside the running model: names ("aswa", "swa", "ema", "best", "last") or a mapping
            from names of your own to functions that build a strategy for a model.
        apply: the strategy whose weights are in the model after training; None leaves the running weights.
        every: when to decide: "epoch", "evaluation" (whenever the Trainer evaluates), or a number of epochs.
        greater_is_better: by default as in `TrainingArguments`: False for the loss, True for anything else.
        hard_updates, batchnorm, bn_batches, dtype, device: as for `ASWA`.
        resume_from: the checkpoint folder of a resumed run, if it is not in `output_dir`.

    The running model trains exactly as it would without the callback, and checkpoints hold its weights. Each decision
    costs one evaluation for every averaged strategy, and a pass over training batches if the model has BatchNorm.
    """

    def __init__(
        self,
        trainer: Trainer | None = None,
        metric: Metric | None = None,
        strategies: Sequence[str] | Mapping[str, Factory] | None = None,
        apply: str | None = "aswa",
        *,
        every: Literal["epoch", "evaluation"] | int = "epoch",
        greater_is_better: bool | None = None,
        hard_updates: bool = True,
        batchnorm: str = "recalibrate",
        bn_batches: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        resume_from: str | Path | None = None,
    ):
        if every not in ("epoch", "evaluation") and (isinstance(every, (bool, str)) or every < 1):
            raise ValueError(f"every must be 'epoch', 'evaluation' or a number of epochs, got {every!r}.")
        if metric is not None:
            Score(metric)  # a wrong kind of metric is refused here, not after the first epoch
        self.every = every
        self.apply = apply
        self.resume_from = resume_from
        self.strategies: dict[str, Strategy] = {}
        """The strategies by name, from the beginning of training on."""
        self._factories = named_factories(strategies if strategies is not None else ("aswa",))
        if apply is not None and apply not in self._factories:
            raise ValueError(
                f"apply={apply!r} is not among the strategies {', '.join(self._factories)}. Name one of them, or None "
                "to end with the running weights."
            )
        self._metric = metric
        self._greater_is_better = greater_is_better
        self._options = {"batchnorm": batchnorm, "bn_batches": bn_batches, "dtype": dtype, "device": device}
        self._hard_updates = hard_updates
        self.trainer: Trainer | None = None
        if trainer is not None:
            self.bind(trainer)

    def bind(self, trainer: Trainer) -> ASWACallback:
        """Ties the callback to the trainer whose run it shadows."""
        if not isinstance(trainer, Trainer):
            raise TypeError(f"ASWACallback works for a transformers.Trainer, got {type(trainer).__name__}.")
        refuse_unsupported(trainer, self.every)
        self.trainer = trainer
        self.score = Score(choose_metric(self._metric, self._factories, trainer.args))
        self._datasets = datasets_of_metric(self.score, trainer)
        self.greater_is_better = choose_direction(
            self._greater_is_better, self.score.label, self._factories, trainer.args
        )
        return self

    # ---- what the Trainer tells ----

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer = self._bound()
        self.bind(trainer)  # arguments and datasets may have changed since
        self._go_first(trainer)
        self._loader: Any = None
        self._awaited: dict[str, float] | None = None
        self._events = 0
        self._last_metrics: tuple[int, dict[str, float]] = (-1, {})
        self._metrics: dict[str, dict[str, float]] = {}
        self.strategies = self._build(trainer, state)
        if state.global_step > 0:
            self._resume(args, state)
        logger.info(f"Weight averaging ({', '.join(self.strategies)}) follows {self.score.label}.")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for strategy in self.strategies.values():
            strategy.step()
        if control.should_evaluate:
            self._share_buffers()
            if self.every == "evaluation":
                self._await()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if control.should_evaluate:
            self._share_buffers()
        if self.every == "evaluation":
            if control.should_evaluate:
                self._await()
            return
        stopped = control.should_training_stop or control.should_epoch_stop
        if stopped and not float(state.epoch or 0).is_integer():
            return  # the rest of this epoch will not come: its weights are not an epoch's
        if not self._is_due(state):
            return
        if control.should_evaluate:
            self._await()
        elif not self._is_delayed(args, state):
            step, metrics = self._last_metrics
            if step != state.global_step:
                self._share_buffers()
                with preserved_rng():
                    metrics = self._evaluate()
            self._decide(state, metrics)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        trainer = self._bound()
        if not trainer.is_in_train or metrics is None or not any(key.startswith("eval_") for key in metrics):
            return
        datasets = trainer.eval_dataset
        if self._awaited is None:
            # Remembered, in case the end of an epoch falls on this step.
            step, known = self._last_metrics
            self._last_metrics = (state.global_step, {**(known if step == state.global_step else {}), **metrics})
        else:
            self._awaited.update(metrics)
            self._events += 1
            if self._events == (len(datasets) if isinstance(datasets, dict) else 1):
                awaited, self._awaited = self._awaited, None
                self._decide(state, awaited)
        metrics.update(self._reported())

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._save(args, state)

    def on_push_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # A checkpoint is pushed before `on_save`, and the pushed folder must be complete.
        if self._bound().is_in_train:
            self._save(args, state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.should_save:
            save_trajectories(
                Path(args.output_dir) / TRAJECTORY_FILE,
                {name: strategy.trajectory for name, strategy in self.strategies.items()},
                alphas={name: strategy.alphas for name, strategy in self.strategies.items()},
                metric=self.score.label,
                greater_is_better=self.greater_is_better,
                applied=self.apply,
            )
        if self.apply is None:
            return
        strategy = self.strategies[self.apply]
        if strategy.members == 0:
            logger.warning(
                f"The {self.apply} ensemble is empty: no decision point had a finite {self.score.label}. The running "
                "weights stay in the model."
            )
        else:
            strategy.apply()
            logger.info(f"The model now holds the {self.apply} weights, {self.score.label} {strategy.score}.")

    # ---- the decision ----

    def _await(self) -> None:
        """The Trainer is about to evaluate the running model, and the decision follows."""
        self._awaited, self._events = {}, 0

    def _is_due(self, state: TrainerState) -> bool:
        epoch = float(state.epoch or 0)
        # Where the length of an epoch is not known, the Trainer counts fractions of the whole run.
        epochs = int(epoch) if epoch.is_integer() else int(epoch) + 1
        return epochs % (1 if self.every == "epoch" else int(self.every)) == 0

    def _is_delayed(self, args: TrainingArguments, state: TrainerState) -> bool:
        return args.eval_strategy == IntervalStrategy.EPOCH and args.eval_delay > (state.epoch or 0)

    def _decide(self, state: TrainerState, running: dict[str, float]) -> None:
        """One decision of every strategy, on the running model's metrics and evaluations of averaged weights."""
        decisions = {}
        for name, strategy in self.strategies.items():
            evaluated: list[dict[str, float]] = []

            def evaluate(found: list[dict[str, float]] = evaluated) -> float:
                found.append(self._evaluate())
                return self.score(found[-1])

            decision = strategy.update(evaluate, self.score(running), step=state.global_step, epoch=state.epoch)
            decisions[name] = decision
            if decision is not Decision.REJECT:
                averaged = evaluated and decision is not Decision.HARD
                self._metrics[name] = evaluated[-1] if averaged else dict(running)
        logs: dict[str, Any] = {name: value for name, value in self._reported().items() if _is_finite(value)}
        for name, strategy in self.strategies.items():
            if isinstance(strategy, ASWA):
                logs |= {f"{name}/decision": decisions[name].code, f"{name}/members": strategy.members}
        self._bound().log(logs)

    def _reported(self) -> dict[str, Any]:
        """The metrics of each strategy's weights, as `eval_<strategy>_<metric>`."""
        reported: dict[str, Any] = {}
        for name in self.strategies:
            if name in self._metrics:
                reported |= self.score.report(self._metrics[name], name)
            else:
                # Whoever follows the ensemble from the start finds it worse than anything to come.
                worst = float("-inf") if self.greater_is_better else float("inf")
                reported[f"eval_{name}_{self.score.label}"] = worst
        return reported

    def _evaluate(self) -> dict[str, float]:
        """The metrics of the weights now in the model: nothing is logged, no other callback hears of it."""
        trainer = self._bound()
        with unheard(trainer):
            if not self._datasets:
                return trainer.evaluate()
            metrics: dict[str, float] = {}
            for name in self._datasets:
                metrics |= trainer.evaluate(eval_dataset=name, metric_key_prefix=f"eval_{name}")
            return metrics

    def _share_buffers(self) -> None:
        """Rank 0's BatchNorm statistics on every rank, as the next training step would bring them anyway."""
        broadcast_from_rank_0(persistent_buffers(self._bound().model).values())

    # ---- setting up ----

    def _bound(self) -> Trainer:
        if self.trainer is None:
            raise RuntimeError(
                "This ASWACallback does not know its trainer, which it needs to evaluate averaged weights. Use "
                "trainer.add_callback(ASWACallback(trainer, …)), or callback.bind(trainer) before trainer.train()."
            )
        return self.trainer

    def _build(self, trainer: Trainer, state: TrainerState) -> dict[str, Strategy]:
        options = {**self._options, "greater_is_better": self.greater_is_better}
        extras: dict[type[Strategy], dict[str, Any]] = {
            ASWA: {"hard_updates": self._hard_updates},
            # The last quarter of the run, as the SWA paper does; the paper's ASWA needs no such choice.
            SWA: {"start": 0.75},
            EMA: {"warmup": True},
        }
        strategies = {}
        with default_train_batches(self._train_batches, self._forward):
            for name, factory in self._factories.items():
                if isinstance(factory, type):
                    strategy = factory(trainer.model, **options, **extras.get(factory, {}))
                else:
                    strategy = factory(trainer.model)
                    if not isinstance(strategy, Strategy):
                        raise TypeError(
                            f"strategies[{name!r}] must build a strategy for a model, got {type(strategy).__name__}."
                        )
                    strategy.greater_is_better = self.greater_is_better
                if isinstance(strategy, SWA) and strategy.total is None:
                    strategy.total = self._decision_points(trainer.args, state)
                strategies[name] = strategy
        return strategies

    def _decision_points(self, args: TrainingArguments, state: TrainerState) -> int:
        """How many decisions a full run will take."""
        if self.every == "evaluation" and args.eval_strategy == IntervalStrategy.STEPS:
            return max(1, int(state.max_steps // state.eval_steps))
        return max(1, int(state.num_train_epochs) // (self.every if isinstance(self.every, int) else 1))

    def _train_batches(self) -> Any:
        if self._loader is None:
            # Seeded, so that a resumed run recalibrates on the same batches.
            with preserved_rng(seed=0):
                self._loader = self._bound().get_train_dataloader()
        return self._loader

    def _forward(self, batch: Any) -> None:
        # As in training: a custom compute_loss knows which part of a batch the model takes.
        trainer = self._bound()
        with trainer.compute_loss_context_manager():
            trainer.compute_loss(trainer.model, trainer._prepare_inputs(batch))

    def _go_first(self, trainer: Trainer) -> None:
        """Right behind the default flow: whoever reads the metrics of an evaluation finds the ensemble's in them."""
        handler = trainer.callback_handler
        others = [callback for callback in handler.callbacks if callback is not self]
        position = next((i + 1 for i, c in enumerate(others) if isinstance(c, DefaultFlowCallback)), 0)
        # A new list: the handler is iterating over the old one.
        handler.callbacks = [*others[:position], self, *others[position:]]

    # ---- saving and resuming ----

    def _save(self, args: TrainingArguments, state: TrainerState) -> None:
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        # The trials of a hyperparameter search have folders of their own and are never resumed.
        if args.should_save and checkpoint.is_dir():
            save_state(
                checkpoint / STATE_FOLDER,
                self.strategies,
                metric=self.score.label,
                step=state.global_step,
                metrics={
                    name: {key: value for key, value in metrics.items() if _is_finite(value)}
                    for name, metrics in self._metrics.items()
                },
            )

    def _resume(self, args: TrainingArguments, state: TrainerState) -> None:
        checkpoint = resumed_checkpoint(self.resume_from, args, state)
        folder = checkpoint / STATE_FOLDER
        if (folder / AVERAGE_FILE).exists():
            self._metrics = load_state(folder, self.strategies)["metrics"]
            self._make_up(args, state)
        elif any(f"{name}/decision" in log for log in state.log_history for name in self.strategies):
            complete = [path.parent.parent.name for path in checkpoint.parent.glob(f"*/{STATE_FOLDER}/{AVERAGE_FILE}")]
            complete.sort(key=lambda name: int(name.rpartition("-")[2]) if name.rpartition("-")[2].isdigit() else -1)
            raise ValueError(
                f"{checkpoint} has no averaging state, although the run it belongs to kept one; the process may have "
                "been killed while saving. Resume from "
                + (f"{complete[-1]}, the last complete checkpoint." if complete else "another checkpoint.")
            )
        else:
            logger.warning(
                f"{checkpoint} was saved by a run without ASWACallback: the averages start at the next decision point."
            )

    def _make_up(self, args: TrainingArguments, state: TrainerState) -> None:
        """Takes the decision of an epoch's end that came after its checkpoint, and so is not in it.

        A checkpoint of the last step of an epoch is written before the epoch ends, and the Trainer does not end that
        epoch again.
        """
        at_end_of_epoch = float(state.epoch or 0).is_integer()
        by_epoch = self.every != "evaluation" or args.eval_strategy == IntervalStrategy.EPOCH
        known = any(
            record.step == state.global_step
            for strategy in self.strategies.values()
            for record in strategy.trajectory[-1:]
        )
        if at_end_of_epoch and by_epoch and not known:
            due = self.every == "evaluation" or self._is_due(state)
            if due and not self._is_delayed(args, state):
                with preserved_rng():
                    self._decide(state, self._evaluate())


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or value - value == 0
