"""`ASWACallback`: weight averaging for `transformers.Trainer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, has_length
from transformers.utils import logging

from aswa_hf._utils.distributed import agree, broadcast_from_rank_0, wait_for_all
from aswa_hf._utils.random_state import preserved_rng
from aswa_hf._utils.sharding import is_sharded
from aswa_hf.averaging import persistent_buffers
from aswa_hf.checkpoint import load_state, save_state
from aswa_hf.comparison import (
    Factory,
    Metric,
    Score,
    build_strategies,
    check_options,
    decide,
    named_factories,
    reported,
    why_empty,
)
from aswa_hf.run_folder import checkpoint_folder, write_trajectory
from aswa_hf.strategies import Strategy
from aswa_hf.trainer.files import (
    complete_checkpoints,
    drop_waiting,
    folder_ahead,
    move_into_checkpoint,
    resumed_checkpoint,
    saved_state,
)
from aswa_hf.trainer.hub import check_token, describe_run, give_card, push_at_end, repository_of
from aswa_hf.trainer.options import (
    check_every,
    choose_direction,
    choose_metric,
    datasets_of_metric,
    followed_strategy,
    refuse_unsupported,
    steps_to_first_decision,
    take_places,
    unheard,
)
from aswa_hf.trajectory import decode_numbers, encode_number

logger = logging.get_logger(__name__)


class ASWACallback(TrainerCallback):
    """Ends a training run with the ASWA ensemble in the model.

    >>> trainer = Trainer(model, args, train_dataset=…, eval_dataset=…, compute_metrics=…)
    >>> trainer.add_callback(ASWACallback(trainer, metric="accuracy"))
    >>> trainer.train()

    Args:
        trainer: the trainer it works for; needed for the second evaluation. A callback given to `Trainer(callbacks=…)`
            is bound with `callback.bind(trainer)`.
        metric: what decides: a metric's name, a dict of weights over metrics, or a function of the metrics dictionary
            (whose keys begin with `eval_`). By default `metric_for_best_model`, then the evaluation loss. With several
            evaluation datasets it names one: "<dataset>_accuracy".
        strategies: what to keep beside the running model: names ("aswa", "swa", "ema", "best", "last") or a mapping
            from names of your own to functions that build a strategy for a model. By name, SWA averages the last
            quarter of the run, and EMA has a decay of 0.999 that warms up.
        apply: the strategy whose weights are in the model after training; None leaves the running weights.
        every: when to decide: "epoch", "evaluation" (whenever the Trainer evaluates), or a number of epochs. The
            incomplete epoch at the end of a run is no decision point.
        greater_is_better: by default as in `TrainingArguments`: False for the loss, True for anything else.
        hard_updates: whether ASWA may start over from the running weights; False is Algorithm 1 of the paper.
        batchnorm: how BatchNorm statistics follow averaged weights: "recalibrate" computes them on training batches,
            "average" averages them like weights, "copy" takes the running model's.
        bn_batches: how many training batches to recalibrate on (default: all).
        dtype: of the averages, torch.float32 or torch.float64.
        device: where the averages are kept, for example "cpu" to spare the accelerator's memory.
        resume_from: the checkpoint folder of a resumed run, if it is not in `output_dir`.
        push_to_hub: a repository to which the model is pushed once, with its card, when training has ended; True is
            `TrainingArguments.hub_model_id`. Visibility, token and branch are those of the arguments. A push that
            fails is an error in the log; the model is in `output_dir` then.

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
        push_to_hub: bool | str = False,
    ):
        check_every(every)
        self._factories = named_factories(strategies if strategies is not None else ("aswa",))
        flags = {"greater_is_better": greater_is_better, "hard_updates": hard_updates}
        check_options(apply, self._factories, batchnorm, bn_batches, flags)
        if metric is not None:
            Score(metric)  # a wrong kind of metric is refused here, not after the first epoch
        self.every = every
        self.apply = apply
        self.resume_from = resume_from
        self.strategies: dict[str, Strategy] = {}
        """The strategies by name, from the beginning of training on."""
        self.push_to_hub = push_to_hub
        self.pushed: str | None = None
        """The address of the repository, when the push at the end of training has succeeded."""
        self.writes_history = True
        """Whether the trajectory file is written when training ends; whoever switches it off writes it."""
        self._metric = metric
        self._greater_is_better = greater_is_better
        self._options = {"batchnorm": batchnorm, "bn_batches": bn_batches, "dtype": dtype, "device": device}
        self._hard_updates = hard_updates
        # The evaluation of the running model that the Trainer is about to do: its metrics so far, by dataset.
        self._expected: dict[str, float] | None = None
        self.trainer: Trainer | None = None
        if trainer is not None:
            self.bind(trainer)

    def bind(self, trainer: Trainer) -> ASWACallback:
        """Ties the callback to the trainer whose run it shadows."""
        if not isinstance(trainer, Trainer):
            raise TypeError(f"ASWACallback works for a transformers.Trainer, got {type(trainer).__name__}.")
        refuse_unsupported(trainer, self.every, self._factories)
        repository_of(self.push_to_hub, trainer.args)
        self.trainer = trainer
        metric = choose_metric(self._metric, self._factories, trainer.args)
        self.score = Score(metric)
        self._datasets = datasets_of_metric(self.score, trainer)
        self.greater_is_better = choose_direction(
            self._greater_is_better, metric, self.score.label, self._factories, trainer.args
        )
        return self

    # ---- what the Trainer tells ----

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer = self._bound()
        if state is not trainer.state:
            raise RuntimeError("This ASWACallback is bound to another trainer. Bind it to the one that trains.")
        self.bind(trainer)  # arguments and datasets may have changed since
        if self.push_to_hub and trainer.is_world_process_zero():
            check_token(args)
        take_places(trainer, self)
        self._loader: Any = None
        self._expected, self.pushed = None, None
        self._events = 0
        self._decides = False
        self._last_metrics: tuple[int, dict[str, float]] = (-1, {})
        self._epoch_began, self._epoch_steps = state.global_step, 0
        self._metrics: dict[str, dict[str, Any]] = {}
        self.strategies = build_strategies(
            self._factories, trainer.model, self._strategy_options(), total_steps=state.max_steps
        )
        if state.global_step > 0:
            self._resume(args, state)
        elif args.should_save:
            drop_waiting(args.output_dir)
        if (steps := steps_to_first_decision(self.every, args, kwargs.get("train_dataloader"))) > state.max_steps:
            logger.warning(
                f"The run of {state.max_steps} steps ends before its first decision point at step {steps} (every="
                f"{self.every!r}): it will end with the running weights. every='evaluation' decides within an epoch."
            )
        logger.info(f"Weight averaging ({', '.join(self.strategies)}) follows {self.score.label}.")

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._epoch_began = state.global_step

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._decide_if_missed(state)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if self._expected is None or metrics is None:
            return  # somebody else's evaluation
        datasets = self._bound().eval_dataset
        self._expected.update(metrics)
        self._events += 1
        if self._events < (len(datasets) if isinstance(datasets, dict) else 1):
            return
        running, self._expected = self._expected, None
        if self._decides:
            self._decide(state, running)
        else:
            # In case the end of an epoch falls on this step.
            self._last_metrics = (state.global_step, running)
        metrics.update(self._followed(args, state))
        if control.should_save or args.save_strategy == SaveStrategy.BEST:
            self._write_ahead(args, state)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._decide_if_missed(state)
        missing = saved_state(checkpoint_folder(args.output_dir, state.global_step), state.global_step) is None
        # A sharded state is written by all ranks or none, and rank 0 may have moved what another looks for.
        if agree(missing, args.device) if is_sharded(self._bound().model) else missing:
            self._write_ahead(args, state)  # a checkpoint that was asked for at the last moment
        if args.should_save:
            move_into_checkpoint(args.output_dir, state.global_step)

    def on_push_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.trainer is None or not self.trainer.is_in_train:
            if self.trainer is not None and self.strategies:
                give_card(self.trainer)
        elif args.should_save:
            # A checkpoint is pushed before `on_save`, and the pushed folder must be complete.
            move_into_checkpoint(args.output_dir, state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._decide_if_missed(state)
        if self.apply is not None:
            self._apply(state, self.strategies[self.apply])
        if args.should_save and self.writes_history:
            self._write_history(args)
        repo_id = repository_of(self.push_to_hub, args)
        if repo_id is not None and not state.is_hyper_param_search:
            self.pushed = push_at_end(self._bound(), repo_id)

    def _write_history(self, args: TrainingArguments) -> None:
        shipped = self.apply if self.apply and self.strategies[self.apply].members else None
        try:
            drop_waiting(args.output_dir)
            write_trajectory(
                Path(args.output_dir),
                self.strategies,
                metric=self.score.label,
                greater_is_better=self.greater_is_better,
                applied=shipped,
                run=describe_run(self._bound(), self.strategies, self._metrics, self.score, shipped),
            )
        except OSError as error:
            # The weights are in the model: a full disk must not take them away.
            logger.warning(f"The history of the run could not be written: {error}")

    # ---- what comes after all other callbacks, since one of them may ask for an evaluation or a checkpoint ----

    def step_ended(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        for strategy in self.strategies.values():
            strategy.step()
        if control.should_evaluate:
            self._expect(args, decides=self.every == "evaluation")
        elif control.should_save:
            self._write_ahead(args, state)

    def epoch_ended(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        due = self.every == "evaluation" or (self._is_full_epoch(state, control) and self._is_due(state))
        if control.should_evaluate:
            self._expect(args, decides=due)
            return
        if due and self.every != "evaluation" and not self._is_delayed(args, state):
            step, metrics = self._last_metrics
            if step != state.global_step:
                self._share_buffers(args)
                metrics = self._evaluate()
            self._decide(state, metrics)
        if control.should_save:
            self._write_ahead(args, state)

    # ---- the decision ----

    def _expect(self, args: TrainingArguments, *, decides: bool) -> None:
        """The Trainer is about to evaluate the running model; maybe a decision follows."""
        self._share_buffers(args)
        self._expected, self._events, self._decides = {}, 0, decides

    def _decide_if_missed(self, state: TrainerState) -> None:
        """Evaluates for itself if the evaluation that was to come did not tell the callbacks of its metrics."""
        missed, self._expected = self._expected is not None, None
        if missed and self._decides:
            self._decide(state, self._evaluate())

    def _is_full_epoch(self, state: TrainerState, control: TrainerControl) -> bool:
        steps = state.global_step - self._epoch_began
        stopped = control.should_training_stop or control.should_epoch_stop
        if float(state.epoch or 0).is_integer() or not stopped:
            # A pass that was resumed in its middle is shorter than the others.
            self._epoch_steps = max(self._epoch_steps, steps)
            return True
        # Where the length of the data is not known, an epoch as long as the last one was not cut short.
        return steps == self._epoch_steps and not has_length(self._bound().train_dataset)

    def _is_due(self, state: TrainerState) -> bool:
        epoch = float(state.epoch or 0)
        # Where the length of an epoch is not known, the Trainer counts fractions of the whole run.
        epochs = int(epoch) if epoch.is_integer() else int(epoch) + 1
        return epochs % (1 if self.every == "epoch" else int(self.every)) == 0

    def _is_delayed(self, args: TrainingArguments, state: TrainerState) -> bool:
        if args.eval_strategy == IntervalStrategy.STEPS:
            return args.eval_delay > state.global_step
        return args.eval_strategy == IntervalStrategy.EPOCH and args.eval_delay > (state.epoch or 0)

    def _decide(self, state: TrainerState, running: dict[str, float]) -> None:
        """One decision of every strategy, on the running model's metrics and evaluations of averaged weights."""
        logs = decide(
            self.strategies,
            self._evaluate,
            running,
            self.score,
            self._metrics,
            step=state.global_step,
            epoch=state.epoch,
        )
        trainer = self._bound()
        # The handler takes any log for the one the Trainer has yet to write.
        should_log = trainer.control.should_log
        trainer.log(logs)
        trainer.control.should_log = should_log

    def _followed(self, args: TrainingArguments, state: TrainerState) -> dict[str, Any]:
        """What is added to the Trainer's own metrics: the scores, and what the best model is chosen by."""
        found = reported(self._metrics, self.score)
        # The objective of a hyperparameter search is the sum of all metrics.
        names = () if state.is_hyper_param_search else self.strategies
        keys = [f"eval_{name}_{self.score.label}" for name in names]
        added = {key: found[key] for key in keys if key in found}
        if followed_strategy(self._factories, args):
            key = "eval_" + str(args.metric_for_best_model).removeprefix("eval_")
            # Whoever follows an ensemble that is still empty finds it worse than anything to come.
            added[key] = found.get(key, float("-inf") if args.greater_is_better else float("inf"))
        return added

    def _evaluate(self) -> dict[str, float]:
        """The metrics of the weights now in the model: nothing is logged, no other callback hears of it."""
        trainer = self._bound()
        with unheard(trainer), preserved_rng():
            if not self._datasets:
                return trainer.evaluate()
            metrics: dict[str, float] = {}
            for name in self._datasets:
                metrics |= trainer.evaluate(eval_dataset=name, metric_key_prefix=f"eval_{name}")
            return metrics

    def _share_buffers(self, args: TrainingArguments) -> None:
        """Rank 0's BatchNorm statistics on every rank, as the next training step would bring them anyway."""
        if args.ddp_broadcast_buffers is not False:
            broadcast_from_rank_0(persistent_buffers(self._bound().model).values())

    def _apply(self, state: TrainerState, strategy: Strategy) -> None:
        if strategy.members == 0:
            reason = why_empty(strategy, self.score.label, f"the run had no decision point with every={self.every!r}")
            logger.warning(f"The {self.apply} ensemble is empty: {reason}. The running weights stay in the model.")
            return
        strategy.apply()
        logger.info(f"The model now holds the {self.apply} weights, {self.score.label} {strategy.score}.")

    # ---- setting up ----

    def _bound(self) -> Trainer:
        if self.trainer is None:
            raise RuntimeError(
                "This ASWACallback does not know its trainer, which it needs to evaluate averaged weights. Use "
                "trainer.add_callback(ASWACallback(trainer, …)), or callback.bind(trainer) before trainer.train()."
            )
        return self.trainer

    def _strategy_options(self) -> dict[str, Any]:
        return {
            **self._options,
            "greater_is_better": self.greater_is_better,
            "hard_updates": self._hard_updates,
            "train_batches": self._train_batches,
            "bn_forward": self._forward,
        }

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

    # ---- saving and resuming ----

    def _write_ahead(self, args: TrainingArguments, state: TrainerState) -> None:
        # The trials of a hyperparameter search have folders of their own and are never resumed.
        writes = args.should_save or is_sharded(self._bound().model)
        if writes and not state.is_hyper_param_search:
            save_state(
                folder_ahead(args.output_dir, state.global_step),
                self.strategies,
                metric=self.score.label,
                metric_description=self.score.description,
                step=state.global_step,
                epoch_steps=self._epoch_steps,
                metrics=encode_number(self._metrics),
            )

    def _resume(self, args: TrainingArguments, state: TrainerState) -> None:
        checkpoint = resumed_checkpoint(self.resume_from, args, state)
        folder = saved_state(checkpoint, state.global_step)
        if folder is not None:
            content = load_state(folder, self.strategies)
            if content["metric_description"] != self.score.description:
                raise ValueError(
                    f"{checkpoint} was decided by {content['metric_description']!r}, this run by "
                    f"{self.score.description!r}: their scores cannot be compared. Resume with the same metric."
                )
            self._metrics = decode_numbers(content["metrics"])
            self._epoch_steps = content["epoch_steps"]
            # If the run was killed before it could: a checkpoint keeps its state when others are dropped.
            wait_for_all()
            if args.should_save:
                move_into_checkpoint(checkpoint.parent, state.global_step)
            self._make_up(args, state)
        elif any(f"{name}/decision" in log for log in state.log_history for name in self.strategies):
            complete = complete_checkpoints(checkpoint.parent)
            raise ValueError(
                f"{checkpoint} has no averaging state, although the run it belongs to kept one. Resume from "
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
        by_epoch = self.every != "evaluation" or args.eval_strategy == IntervalStrategy.EPOCH
        known = any(
            record.step == state.global_step
            for strategy in self.strategies.values()
            for record in strategy.trajectory[-1:]
        )
        if float(state.epoch or 0).is_integer() and by_epoch and not known:
            due = self.every == "evaluation" or self._is_due(state)
            if due and not self._is_delayed(args, state):
                self._decide(state, self._evaluate())
