"""`ASWACallback`: weight averaging for `transformers.Trainer`."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, has_length
from transformers.utils import logging

from aswa_hf._utils.defaults import BN_BATCHES
from aswa_hf._utils.distributed import agree, broadcast_from_rank_0, wait_for_all
from aswa_hf._utils.random_state import preserved_rng
from aswa_hf._utils.sharding import is_sharded
from aswa_hf.averaging import persistent_buffers
from aswa_hf.checkpoint import load_state, save_state
from aswa_hf.comparison import (
    AUTO,
    Metric,
    Score,
    Strategies,
    build_strategies,
    check_due,
    check_options,
    chosen_strategy,
    decide,
    named_factories,
    reported,
    summary,
    why_empty,
)
from aswa_hf.plotting import plot_trajectories
from aswa_hf.run_folder import PICTURE, checkpoint_folder, commit_checkpoint, write_trajectory
from aswa_hf.schedule import EvaluationBudget, Every, check_share, check_subset
from aswa_hf.strategies import Strategy, take_step
from aswa_hf.strategies.base import preserved_modes
from aswa_hf.trainer.files import (
    SavedRun,
    check_before_loading,
    commit_saved,
    lock_output,
    move_into_checkpoint,
    pending_folder,
    remove_pending,
    resumed_checkpoint,
    saved_state,
    unlock_output,
    what_to_resume_from,
)
from aswa_hf.trainer.hub import (
    bounded_checkpoint_pushes,
    check_token,
    checkpoint_pushes,
    describe_run,
    finish_checkpoint_pushes,
    push_at_end,
    replace_card,
    repository_of,
)
from aswa_hf.trainer.options import (
    check_metric_exists,
    check_trainer_supported,
    choose_direction,
    choose_metric,
    datasets_of_metric,
    evaluating_on,
    evaluation_subset,
    failures_of_metrics,
    followed_strategy,
    metric_can_be_tried,
    metrics_of,
    order_callbacks,
    refuse_second,
    silenced,
    steps_to_first_decision,
)
from aswa_hf.trainer.reporters import show_picture
from aswa_hf.trajectory import decode_numbers, encode_number

logger = logging.get_logger(__name__)


class ASWACallback(TrainerCallback):
    """Ends a training run with the ASWA ensemble in the model.

    >>> trainer = Trainer(model, args, train_dataset=…, eval_dataset=…, compute_metrics=…)
    >>> trainer.add_callback(ASWACallback(trainer, metric="accuracy"))
    >>> trainer.train()

    Args:
        trainer: the trainer, needed for the second evaluation. A callback passed to `Trainer(callbacks=…)`
            is bound with `callback.bind(trainer)`.
        metric: the score that decides: a metric's name, a dict of weights over metrics, or a function of the metrics
            dictionary (whose keys begin with `eval_`). By default `metric_for_best_model`, then the evaluation loss.
            With several evaluation datasets it names one: "<dataset>_accuracy".
        strategies: what to keep beside the running model: names ("aswa", "dense-aswa", "swa", "ema", "best", "last"),
            a mapping from names to options ({"ema": {"decay": 0.9995}, "aswa": {}}), or from your own names to
            functions that build a strategy for a model. By name, SWA averages the last quarter of the run, and EMA
            has a decay of 0.999 that warms up.
        apply: the strategy whose weights are in the model after training; "auto" is the one with the best validation
            score, None leaves the running weights.
        every: when to decide: "epoch", "evaluation" (whenever the Trainer evaluates), a number of epochs, or of
            optimizer steps as in "500 steps". By steps, the last step of the run is a decision point too; an
            incomplete epoch at the end of a run is not.
        max_eval_share: the share of the run's time that decisions may take: a decision point at which the evaluations
            of averaged weights would exceed it is skipped.
        eval_subset: decide on a fixed part of the evaluation data: a number of examples, or a fraction. The running
            model is then evaluated on it too.
        greater_is_better: by default as in `TrainingArguments`: False for the loss, True for anything else.
        hard_updates: whether ASWA may restart from the running weights; False is Algorithm 1 of the paper.
        batchnorm: where the BatchNorm statistics of averaged weights come from: "recalibrate" recomputes them on
            training batches, "average" averages them like weights, "copy" uses the running model's.
        bn_batches: how many training batches to recalibrate on; None means all.
        dtype: the dtype of the averages, torch.float32 or torch.float64.
        device: where the averages are kept, for example "cpu" to save accelerator memory.
        resume_from: the checkpoint folder of a resumed run, if it is not in `output_dir`.
        push_to_hub: the repository that the model and its card are pushed to, once, when training has ended; True
            means `TrainingArguments.hub_model_id`. Visibility, token and branch are those of the arguments. A failed
            push is logged as an error, and the model is saved in `output_dir`.

    The running model trains exactly as it would without the callback, and checkpoints hold its weights. Each decision
    costs one evaluation for every averaged strategy, one of the running model if the Trainer does not evaluate at that
    step, and a pass over training batches if the model has BatchNorm.
    """

    def __init__(
        self,
        trainer: Trainer | None = None,
        metric: Metric | None = None,
        strategies: Strategies | None = None,
        apply: str | None = "aswa",
        *,
        every: Literal["epoch", "evaluation"] | int | str = "epoch",
        max_eval_share: float | None = None,
        eval_subset: int | float | None = None,
        greater_is_better: bool | None = None,
        hard_updates: bool = True,
        batchnorm: str = "recalibrate",
        bn_batches: int | None = BN_BATCHES,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        resume_from: str | Path | None = None,
        push_to_hub: bool | str = False,
    ):
        self._every = Every.parse(every)
        check_share(max_eval_share)
        check_subset(eval_subset)
        self._factories = named_factories(strategies if strategies is not None else ("aswa",))
        flags = {"greater_is_better": greater_is_better, "hard_updates": hard_updates}
        check_options(apply, self._factories, batchnorm, bn_batches, flags)
        if metric is not None:
            Score(metric)  # an invalid metric raises here, not after the first epoch
        self.every = every
        self.max_eval_share = max_eval_share
        self.eval_subset = eval_subset
        self.apply = apply
        self.applied: str | None = None
        """The strategy whose weights are in the model, once training has ended."""
        self.resume_from = resume_from
        self.strategies: dict[str, Strategy] = {}
        """The strategies by name; empty until training begins."""
        self.push_to_hub = push_to_hub
        self.pushed: str | None = None
        """The URL of the repository, once the push at the end of training has succeeded."""
        self.writes_history = True
        """Whether to write the trajectory file when training ends; if False, the caller must write it."""
        self._metric = metric
        self._greater_is_better = greater_is_better
        self._options = {"batchnorm": batchnorm, "bn_batches": bn_batches, "dtype": dtype, "device": device}
        self._hard_updates = hard_updates
        # Metrics so far of the running-model evaluation that the Trainer is about to do; None if none is expected.
        self._expected: dict[str, float] | None = None
        self._requests = ExitStack()  # what bounds the requests of a run
        self.trainer: Trainer | None = None
        if trainer is not None:
            self.bind(trainer)

    def bind(self, trainer: Trainer) -> ASWACallback:
        """Binds the callback to the trainer whose run it follows."""
        if not isinstance(trainer, Trainer):
            raise TypeError(f"ASWACallback needs a transformers.Trainer, got {type(trainer).__name__}.")
        check_trainer_supported(trainer, self._every, self._factories)
        repository_of(self.push_to_hub, trainer.args)
        check_before_loading(trainer)
        self.trainer = trainer
        metric = choose_metric(self._metric, self._factories, trainer.args)
        self.score = Score(metric)
        self._datasets = datasets_of_metric(self.score, trainer)
        self._subset = None if self.eval_subset is None else evaluation_subset(trainer, self.eval_subset)
        self.greater_is_better = choose_direction(
            self._greater_is_better, metric, self.score.label, self._factories, trainer.args
        )
        return self

    # ---- events of the Trainer ----

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer = self._bound()
        if state is not trainer.state:
            raise RuntimeError("This ASWACallback is bound to another trainer. Bind it to the one that trains.")
        refuse_second(trainer, self)
        self.bind(trainer)  # arguments and datasets may have changed since
        check_metric_exists(self.score, trainer)
        if self.push_to_hub and trainer.is_world_process_zero():
            check_token(args)
        if not state.is_hyper_param_search:  # whose trials have folders of their own
            lock_output(args)
        try:
            self._begin(args, state, kwargs.get("train_dataloader"))
        except BaseException:
            self._requests.close()
            unlock_output(args)
            raise

    def _begin(self, args: TrainingArguments, state: TrainerState, train_dataloader: Any) -> None:
        """Builds the strategies of a run, or restores them; checks what can be checked before training."""
        trainer = self._bound()
        self._requests.close()
        self._requests.enter_context(bounded_checkpoint_pushes(trainer))
        order_callbacks(trainer, self)
        self._loader: Any = None
        self._subset_loaders: dict[str, Any] = {}
        self._budget = EvaluationBudget(self.max_eval_share)
        self._expected, self.pushed, self.applied = None, None, None
        self._events = 0
        self._decides = False
        self._last_metrics: tuple[int, dict[str, float]] = (-1, {})
        self._epoch_began, self._epoch_steps = state.global_step, 0
        self._metrics: dict[str, dict[str, Any]] = {}
        self.strategies = build_strategies(
            self._factories, trainer.model, self._strategy_options(), total_steps=state.max_steps
        )
        steps = steps_to_first_decision(self._every, args, train_dataloader)
        # The last step of a run decides too; an epoch that it does not complete does not.
        points, part = divmod(state.max_steps, steps) if steps else (0, 0)
        points += bool(part and self._every.by_steps)
        self._steps_between = steps
        if state.global_step > 0:
            self._resume(args, state)
        else:
            # Compiled for so few examples, the model would have other kernels later.
            with torch.compiler.set_stance("force_eager") if args.torch_compile else nullcontext():
                self._try_metric(args)
            if args.should_save:
                remove_pending(args.output_dir)
        for line in check_due(self.strategies, self.apply, points=points if steps else None, steps=state.max_steps):
            logger.warning(line)
        if steps > state.max_steps:
            only = "decides only at its last step" if self._every.by_steps else "ends before its first decision point"
            logger.warning(
                f"The run of {state.max_steps} steps {only}, since every={self.every!r} is {steps} steps: it will end "
                f"with the running weights. A smaller number, as in every='{max(1, state.max_steps // 10)} steps', or "
                "every='evaluation' decides earlier."
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
            return  # not the expected evaluation
        trainer = self._bound()
        data = trainer.eval_dataset
        datasets = list(data) if isinstance(data, dict) else [None]
        logged = state.log_history[-1] if state.log_history else {}
        if logged.get("step") != state.global_step:
            logged = {}
        self._expected.update(metrics_of(trainer, metrics, logged, self.score, datasets[self._events]))
        self._events += 1
        if self._events < len(datasets):
            return
        running, self._expected = self._expected, None
        if self._decides:
            self._decide(state, running if self._subset is None else None)
        else:
            # This step may also be the last one of an epoch.
            self._last_metrics = (state.global_step, running)
        metrics.update(self._added_metrics(args, state))
        if control.should_save or args.save_strategy == SaveStrategy.BEST:
            self._write_ahead(args, state)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._decide_if_missed(state)
        missing = saved_state(checkpoint_folder(args.output_dir, state.global_step), state.global_step) is None
        # A sharded state is written by all ranks or none, and rank 0 may have moved it before another rank looks.
        if agree(missing, args.device) if is_sharded(self._bound().model) else missing:
            self._write_ahead(args, state)  # the checkpoint was requested too late to write ahead
        if args.should_save:
            move_into_checkpoint(args.output_dir, state.global_step)
        if not state.is_hyper_param_search:
            commit_saved(args, state.global_step)

    def on_push_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.trainer is None or not self.trainer.is_in_train:
            if self.trainer is not None and self.strategies:
                replace_card(self.trainer)
        elif args.should_save:
            # A checkpoint is pushed before `on_save`, and the pushed folder must be complete.
            move_into_checkpoint(args.output_dir, state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._decide_if_missed(state)
        name = chosen_strategy(self.apply, self.strategies)
        self._apply(name, shown=self.writes_history and state.is_world_process_zero)
        if args.should_save and self.writes_history:
            self._write_history(args)
        repo_id = repository_of(self.push_to_hub, args)
        if repo_id is not None and not state.is_hyper_param_search:
            self.pushed = push_at_end(self._bound(), repo_id)
        else:
            finish_checkpoint_pushes(self._bound())
        if not checkpoint_pushes(self._bound()):
            self._requests.close()
        unlock_output(args)

    def _write_history(self, args: TrainingArguments) -> None:
        try:
            remove_pending(args.output_dir)
            write_trajectory(
                Path(args.output_dir),
                self.strategies,
                metric=self.score.label,
                greater_is_better=self.greater_is_better,
                applied=self.applied,
                run=describe_run(self._bound(), self.strategies, self._metrics, self.score, self.applied)
                | ({"apply": AUTO} if self.apply == AUTO else {}),
            )
        except OSError as error:
            # The weights are in the model: a full disk must not lose them.
            logger.warning(f"The history of the run could not be written: {error}")
        try:
            trajectories = {name: strategy.trajectory for name, strategy in self.strategies.items()}
            if any(trajectories.values()):
                picture = Path(args.output_dir) / PICTURE
                plot_trajectories(trajectories, picture, metric=self.score.label)
                show_picture(self._bound(), picture)
        except Exception as error:  # any error of matplotlib: the run itself has succeeded
            logger.warning(f"{PICTURE} could not be drawn: {type(error).__name__}: {error}")

    # ---- called after all other callbacks, because one of them may request an evaluation or a checkpoint ----

    def step_ended(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        take_step(self.strategies.values())
        self._interval_ended(args, state, control, due=self._every.is_due_at_step(state.global_step, state.max_steps))

    def epoch_ended(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        due = self._every.unit == "epoch" and self._is_full_epoch(state, control) and self._is_due(state)
        self._interval_ended(args, state, control, due=due)

    def _interval_ended(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, due: bool
    ) -> None:
        """Decides if that is `due`: after the evaluation that the Trainer is about to do, or else at once."""
        if control.should_evaluate:
            decides = due or self._every.unit == "evaluation"
            self._expect(args, decides=decides and self._is_affordable(state))
            return
        if due and not self._is_delayed(args, state) and self._is_affordable(state):
            step, metrics = self._last_metrics
            known = step == state.global_step and self._subset is None
            if not known:
                self._share_buffers(args)
            self._decide(state, metrics if known else None)
        if control.should_save:
            self._write_ahead(args, state)

    # ---- the decision ----

    def _expect(self, args: TrainingArguments, *, decides: bool) -> None:
        """Prepares for the Trainer's evaluation of the running model; a decision follows it if `decides`."""
        self._share_buffers(args)
        self._expected, self._events, self._decides = {}, 0, decides

    def _decide_if_missed(self, state: TrainerState) -> None:
        """Runs its own evaluation if the expected one did not report its metrics to the callbacks."""
        missed, self._expected = self._expected is not None, None
        if missed and self._decides:
            self._decide(state)

    def _is_affordable(self, state: TrainerState) -> bool:
        """Whether another decision stays within `max_eval_share`, or is the last one; all ranks must ask."""
        trainer = self._bound()
        is_last = state.global_step >= self._last_due_step(state) or trainer.control.should_training_stop
        if not self._budget.exceeded(trainer.args.device, is_last=is_last):
            return True
        if self._budget.skipped == 1:
            logger.warning(self._budget.why_skipped())
        return False

    def _last_due_step(self, state: TrainerState) -> int:
        steps = self._steps_between
        if self._every.unit == "epoch" and not steps:  # of streamed data, known after the first epoch
            steps = self._epoch_steps * self._every.count
        whole = 0 if self._every.by_steps or not steps else state.max_steps // steps * steps
        return whole or state.max_steps

    def _is_full_epoch(self, state: TrainerState, control: TrainerControl) -> bool:
        steps = state.global_step - self._epoch_began
        stopped = control.should_training_stop or control.should_epoch_stop
        if float(state.epoch or 0).is_integer() or not stopped:
            # An epoch that was resumed in its middle is shorter than the others.
            self._epoch_steps = max(self._epoch_steps, steps)
            return True
        # If the length of the data is unknown, an epoch as long as the longest before was not cut short.
        return steps == self._epoch_steps and not has_length(self._bound().train_dataset)

    def _is_due(self, state: TrainerState) -> bool:
        epoch = float(state.epoch or 0)
        # If the length of an epoch is unknown, the Trainer counts fractions of the complete run.
        epochs = int(epoch) if epoch.is_integer() else int(epoch) + 1
        return epochs % self._every.count == 0

    def _is_delayed(self, args: TrainingArguments, state: TrainerState) -> bool:
        if args.eval_strategy == IntervalStrategy.STEPS:
            return bool(args.eval_delay > state.global_step)
        return bool(args.eval_strategy == IntervalStrategy.EPOCH and args.eval_delay > (state.epoch or 0))

    def _decide(self, state: TrainerState, running: dict[str, float] | None = None) -> None:
        """Makes one decision per strategy, on the running model's metrics and evaluations of averaged weights.

        Evaluates the running model first unless its metrics are given.
        """
        with self._budget.spending():
            logs = decide(
                self.strategies,
                self._evaluate,
                self._evaluate() if running is None else running,
                self.score,
                self._metrics,
                step=state.global_step,
                epoch=state.epoch,
            )
        trainer = self._bound()
        # Any log resets should_log, and the Trainer still has to write its own.
        should_log = trainer.control.should_log
        with preserved_modes(trainer.model):
            # A trainer may add what it has collected in this mode: in training mode that belongs to its next log.
            trainer.model.eval()
            trainer.log(logs)
        trainer.control.should_log = should_log

    def _added_metrics(self, args: TrainingArguments, state: TrainerState) -> dict[str, Any]:
        """Returns what is added to the Trainer's metrics: the scores, and the metric that selects the best model."""
        found = reported(self._metrics, self.score)
        # The objective of a hyperparameter search is the sum of all metrics.
        names = () if state.is_hyper_param_search else self.strategies
        keys = [f"eval_{name}_{self.score.label}" for name in names]
        added = {key: found[key] for key in keys if key in found}
        if followed_strategy(self._factories, args):
            key = "eval_" + str(args.metric_for_best_model).removeprefix("eval_")
            # An ensemble that is still empty counts as worse than any later one.
            added[key] = found.get(key, float("-inf") if args.greater_is_better else float("inf"))
        return added

    def _evaluate(self) -> dict[str, float]:
        """Returns the metrics of the weights now in the model, by silent evaluation."""
        trainer = self._bound()
        with (
            silenced(trainer) as logged,
            preserved_rng(),
            preserved_modes(trainer.model),
            evaluating_on(trainer, self._subset, self._subset_loaders),
        ):
            if not self._datasets:
                return metrics_of(trainer, trainer.evaluate(), logged, self.score)
            metrics: dict[str, float] = {}
            for name in self._datasets:
                logged.clear()
                found = trainer.evaluate(eval_dataset=name, metric_key_prefix=f"eval_{name}")
                metrics |= metrics_of(trainer, found, logged, self.score, name)
        return metrics

    def _try_metric(self, args: TrainingArguments) -> None:
        """Raises ValueError if an evaluation of a few examples, where it is allowed, does not report the metric."""
        trainer = self._bound()
        if not metric_can_be_tried(self.score, trainer):
            return
        handler, gradients = trainer.callback_handler, trainer.accelerator.gradient_state
        loader, iterated = handler.eval_dataloader, gradients.dataloader_references
        # A batch that is not complete may be dropped.
        size = args.world_size * (args.eval_batch_size if args.dataloader_drop_last else 1)
        subset, self._subset = self._subset, evaluation_subset(trainer, size)
        metrics: dict[str, float] | None = None
        try:
            with failures_of_metrics(trainer) as failures:
                metrics = self._evaluate()
            if not failures:
                self.score(metrics)
        except ArithmeticError:
            pass  # a function of the metrics may not be defined for so few examples
        except Exception:
            # A trainer's own `log` has the same metrics for all examples. If this process could not evaluate, the
            # others may be waiting for it.
            if trainer.compute_metrics is None if metrics is not None else args.world_size > 1:
                raise
            # The metrics of a few examples may be fewer, of those classes alone that occur, for instance, and a model
            # may not take a batch of one. Accelerate still counts the loader as iterated over then.
            gradients.dataloader_references = iterated
            self._subset, self._subset_loaders = subset, {}
            self.score(self._evaluate())
        finally:
            self._subset, self._subset_loaders = subset, {}
            handler.eval_dataloader = loader

    def _share_buffers(self, args: TrainingArguments) -> None:
        """Broadcasts rank 0's BatchNorm statistics, as the next training step would do anyway."""
        if args.ddp_broadcast_buffers is not False:
            broadcast_from_rank_0(persistent_buffers(self._bound().model).values())

    def _apply(self, name: str | None, *, shown: bool) -> None:
        if name is None:
            if self.apply is not None:
                logger.warning(
                    "No strategy has a validation score to choose by. The running weights stay in the model."
                )
            return
        strategy = self.strategies[name]
        if strategy.members == 0:
            reason = why_empty(strategy, self.score.label, f"the run had no decision point with every={self.every!r}")
            logger.warning(f"The {name} ensemble is empty: {reason}. The running weights stay in the model.")
            return
        strategy.apply()
        self.applied = name
        if shown:
            # By default this level is the lowest one that is shown.
            logger.warning(summary(name, strategy, self.score.label))

    # ---- setup ----

    def _bound(self) -> Trainer:
        if self.trainer is None:
            raise RuntimeError(
                "This ASWACallback is not bound to a trainer, which it needs to evaluate averaged weights. Use "
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
        # The trials of a hyperparameter search have their own folders and are never resumed.
        writes = args.should_save or is_sharded(self._bound().model)
        if writes and not state.is_hyper_param_search:
            save_state(
                pending_folder(args.output_dir, state.global_step),
                self.strategies,
                metric=self.score.label,
                metric_description=self.score.description,
                step=state.global_step,
                epoch_steps=self._epoch_steps,
                metrics=encode_number(self._metrics),
                budget=self._budget.state_dict(),
            )

    def _resume(self, args: TrainingArguments, state: TrainerState) -> None:
        checkpoint = resumed_checkpoint(self.resume_from, args, state)
        folder = saved_state(checkpoint, state.global_step)
        if folder is not None:
            content = load_state(folder, self.strategies, SavedRun, by="a Trainer with ASWACallback")
            if content["metric_description"] != self.score.description:
                raise ValueError(
                    f"{checkpoint} was decided by {content['metric_description']!r}, this run by "
                    f"{self.score.description!r}: their scores cannot be compared. Resume with the same metric."
                )
            self._metrics = decode_numbers(content["metrics"])
            self._epoch_steps = content["epoch_steps"]
            if "budget" in content:  # not in states of version 0.1
                self._budget.load_state_dict(content["budget"])
            # The run may have been killed before this; inside its checkpoint the state is not removed with others.
            wait_for_all()
            if args.should_save and folder == pending_folder(checkpoint.parent, state.global_step):
                move_into_checkpoint(checkpoint.parent, state.global_step)
                commit_checkpoint(checkpoint)
            elif args.should_save:
                remove_pending(checkpoint.parent)
            self._make_missing_decision(args, state)
        elif any(f"{name}/decision" in log for log in state.log_history for name in self.strategies):
            raise ValueError(
                f"{checkpoint} has no averaging state, although the run it belongs to kept one. "
                f"{what_to_resume_from(checkpoint.parent)}"
            )
        else:
            logger.warning(
                f"{checkpoint} was saved by a run without ASWACallback: the averages start at the next decision point."
            )

    def _make_missing_decision(self, args: TrainingArguments, state: TrainerState) -> None:
        """Makes the decision at the end of an epoch if the checkpoint was written before it.

        A checkpoint of the last step of an epoch is written before the epoch ends, and a resumed Trainer does not end
        that epoch again.
        """
        evaluations = self._every.unit == "evaluation"
        by_epoch = self._every.unit == "epoch" or (evaluations and args.eval_strategy == IntervalStrategy.EPOCH)
        known = any(
            record.step == state.global_step
            for strategy in self.strategies.values()
            for record in strategy.trajectory[-1:]
        )
        ended = float(state.epoch or 0).is_integer() and by_epoch and (evaluations or self._is_due(state))
        if ended and not known and not self._is_delayed(args, state) and self._is_affordable(state):
            self._decide(state)
