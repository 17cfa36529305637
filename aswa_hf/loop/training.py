"""`fit`: a training loop for Accelerate that ends with the ensemble in the model. Made to be read, copied and changed.

accelerator = Accelerator()
model, optimizer, train_loader, valid_loader = accelerator.prepare(model, optimizer, train_loader, valid_loader)

def evaluate():
    right = [accelerator.gather_for_metrics(model(b["x"]).argmax(-1) == b["labels"]) for b in valid_loader]
    return torch.cat(right).float().mean()

fit(accelerator, model, optimizer, train_loader, evaluate, epochs=10, checkpoint_dir="run")
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]

from aswa_hf._utils.defaults import BN_BATCHES
from aswa_hf._utils.distributed import broadcast_from_rank_0
from aswa_hf._utils.process_group import keep_group
from aswa_hf._utils.random_state import preserved_rng, rewound
from aswa_hf._utils.sharding import undivided
from aswa_hf.averaging import persistent_buffers, unwrap
from aswa_hf.comparison import (
    Metric,
    Score,
    Strategies,
    build_strategies,
    check_due,
    check_options,
    chosen_strategy,
    decide,
    named_factories,
    why_empty,
)
from aswa_hf.loop.checkpoints import Place, drop_all_but, opened, sharded_model
from aswa_hf.loop.checks import (
    Stop,
    check_accelerator_supported,
    check_arguments,
    check_clipping,
    check_loss,
    check_sharded_table,
    check_training,
    length_of,
    loss_of,
    metrics_of_main,
    prepared,
)
from aswa_hf.run_folder import write_trajectory
from aswa_hf.schedule import EvaluationBudget, Every, check_share
from aswa_hf.strategies import Strategy, take_step
from aswa_hf.trajectory import Trajectory

logger = get_logger(__name__)


@dataclass
class FitResult:
    """The result of `fit`: the strategies with their weights, a row per epoch and decision, and the last step."""

    strategies: dict[str, Strategy]
    history: list[dict[str, Any]]
    step: int
    applied: str | None = None
    """The strategy whose weights are in the model."""

    @property
    def trajectories(self) -> dict[str, Trajectory]:
        """The decisions of each strategy."""
        return {name: strategy.trajectory for name, strategy in self.strategies.items()}


def fit(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    train_loader: Any,
    evaluate: Callable[[], Any],
    *,
    epochs: int,
    scheduler: Any = None,
    loss: Callable[[nn.Module, Any], Tensor] = loss_of,
    max_grad_norm: float | None = None,
    strategies: Strategies = ("aswa",),
    apply: str | None = "aswa",
    metric: Metric | None = None,
    greater_is_better: bool | None = None,
    every: int | str = 1,
    max_eval_share: float | None = None,
    hard_updates: bool = True,
    batchnorm: str = "recalibrate",
    bn_batches: int | None = BN_BATCHES,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    checkpoint_dir: str | Path | None = None,
    resume: bool = True,
    save_every: int = 1,
    save_steps: int | None = None,
    save_total_limit: int | None = 2,
    progress: bool = True,
) -> FitResult:
    """Trains `model` and ends with the ensemble in it.

    Args:
        model, optimizer, train_loader, scheduler: as `accelerator.prepare` returns them; what is not prepared yet is
            prepared here. The scheduler is stepped after every optimizer step.
        evaluate: returns the validation score of the weights in `model`, or a dict of metrics. It is called on all
            processes (`accelerator.gather_for_metrics`), in evaluation mode, and the main process's result is used.
        loss: returns the loss of a batch, `loss(model, batch)`; by default the `loss` of the model's output.
        max_grad_norm: clips the norm of the gradients.
        strategies, apply: what to keep beside the running model, and whose weights the model ends with, as in
            `ASWACallback`. `strategies={}, apply=None` is plain training.
        metric: which of several metrics decides: a name, a dict of weights, or a function of the metrics.
        greater_is_better: by default True, unless the metric's name ends with "loss".
        every: the number of epochs from one decision to the next, or of optimizer steps as in "500 steps"; by steps,
            the last step of the run is a decision point too.
        max_eval_share: the share of the run's time that decisions may take: a decision point at which evaluating would
            exceed it is skipped. To evaluate on a part of the data, build its loader from `fixed_subset`.
        hard_updates, batchnorm, bn_batches, dtype, device: as in `ASWACallback`.
        checkpoint_dir: where checkpoints go. With one, SIGTERM and Ctrl-C save before they end the run, and the same
            call resumes from the last checkpoint, bit for bit as in an uninterrupted run.
        resume: False starts a new run, and raises if the folder already holds one.
        save_every, save_steps: epochs from one checkpoint to the next, and optimizer steps for more of them.
        save_total_limit: how many checkpoints to keep; None keeps all.
        progress: whether the main process shows a progress bar.

    The model trains exactly as it would without strategies and evaluations. Gradient accumulation, mixed precision
    and trackers are the accelerator's. A model with sharded entities (`aswa_hf.kge.sharded`) has the same batches on
    all processes.
    """
    factories = named_factories(strategies)
    score = Score(metric if metric is not None else "score")
    flags = {"greater_is_better": greater_is_better, "hard_updates": hard_updates, "resume": resume}
    counts = {"epochs": epochs, "save_every": save_every}
    interval = Every.parse(every, evaluations=False)
    check_share(max_eval_share)
    optional = {"save_steps": save_steps, "save_total_limit": save_total_limit}
    check_options(apply, factories, batchnorm, bn_batches, flags)
    check_arguments(accelerator, model, {"evaluate": evaluate, "loss": loss}, counts, optional, max_grad_norm)
    check_training(optimizer, train_loader, scheduler)
    check_accelerator_supported(accelerator, train_loader, checkpoint_dir)
    if interval.unit == "epoch" and interval.count > epochs and factories:
        raise ValueError(f"every={every!r} is more than epochs={epochs}: the run would never decide.")
    if greater_is_better is None:
        greater_is_better = not score.label.endswith("loss")
    model, optimizer, train_loader, scheduler = prepared(accelerator, model, optimizer, train_loader, scheduler)
    keep_group()

    module = unwrap(model)
    check_clipping(model, max_grad_norm)
    if check_sharded_table(accelerator, module, train_loader, max_grad_norm):
        train_loader = undivided(train_loader)
        if checkpoint_dir is not None:
            sharded_model(accelerator)  # raises now what the first checkpoint would raise
    options: dict[str, Any] = {"batchnorm": batchnorm, "bn_batches": bn_batches, "dtype": dtype, "device": device}
    options |= {"greater_is_better": greater_is_better, "hard_updates": hard_updates}
    options |= {"train_batches": train_loader, "bn_forward": lambda batch: loss(module, batch)}
    per_epoch = length_of(train_loader)
    steps = per_epoch and epochs * -(-per_epoch // accelerator.gradient_accumulation_steps)
    points = steps and -(-steps // interval.count) if interval.by_steps else epochs // interval.count
    last_point = epochs if interval.by_steps else epochs - epochs % interval.count
    # A fraction of the run is one of its steps where decision points may be skipped.
    by_steps = interval.by_steps or max_eval_share is not None
    length: dict[str, int | None] = {"total_steps": steps} if by_steps else {"total": points}
    shadows = build_strategies(factories, module, options, **length)
    for line in check_due(shadows, apply, points=points, steps=steps):
        logger.warning(line)
    budget = EvaluationBudget(max_eval_share)
    place = Place(loss=torch.zeros((), device=accelerator.device))
    root = Path(checkpoint_dir) if checkpoint_dir is not None else None

    def measure() -> dict[str, float]:
        """The main process's metrics of the weights in the model, on all processes."""
        model.eval()
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(preserved_rng())
            for loader in accelerator._dataloaders:
                if not loader.persistent_workers:  # which would all be started again
                    stack.enter_context(rewound(loader))
            found = evaluate()
        return metrics_of_main(accelerator, found, score.label)

    def save() -> None:
        if root is not None:
            about = {"metric": score.description, "budget": budget.state_dict()}
            folder = place.save(accelerator, root, shadows, train_loader, **about)
            if accelerator.is_main_process:
                drop_all_but(save_total_limit, root)
            stop.end_run(folder)

    def decide_now(epoch: float) -> dict[str, Any]:
        """The metrics of a decision point; none if it is skipped."""
        if budget.exceeded(accelerator.device, is_last=epoch >= last_point):
            if budget.skipped == 1:
                logger.warning(budget.why_skipped())
            return {}
        with budget.spending():
            # As the next training step would: each rank has BatchNorm statistics of its own batches.
            if getattr(model, "broadcast_buffers", True):
                broadcast_from_rank_0(persistent_buffers(module).values())
            running = measure()
            decided = decide(shadows, measure, running, score, place.metrics, step=place.step, epoch=epoch)
        scores = {name: strategy.score for name, strategy in shadows.items()}
        bar.set_postfix({name: f"{found:.4g}" for name, found in scores.items() if found is not None})
        return running | decided

    def report(row: dict[str, Any]) -> None:
        place.history.append(row)
        accelerator.log(row, step=place.step)

    def is_saved_next() -> bool:
        """Whether a checkpoint comes after the next optimizer step."""
        return root is not None and bool(stop.agreed or (save_steps and (place.step + 1) % save_steps == 0))

    hidden = not (progress and accelerator.is_main_process)
    with (
        opened(accelerator, root, resume) as last,
        Stop(accelerator, enabled=root is not None) as stop,
        tqdm(total=per_epoch and per_epoch * epochs, unit="batch", disable=hidden) as bar,
    ):
        if last is not None:
            found = place.load(accelerator, last, shadows, train_loader, metric=score.description, epochs=epochs)
            if "budget" in found:  # not in checkpoints of version 0.1
                budget.load_state_dict(found["budget"])
            bar.initial = bar.n = (per_epoch or 0) * place.epoch + place.batches
        while place.epoch < epochs:
            bar.set_description(f"epoch {place.epoch + 1}/{epochs}")
            model.train()
            for batch in place.batches_left(train_loader, is_saved_next):
                with accelerator.accumulate(model):
                    value = loss(model, batch)
                    check_loss(value)
                    accelerator.backward(value)
                    if accelerator.sync_gradients and max_grad_norm is not None:
                        accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
                    optimizer.step()
                    if scheduler is not None:
                        scheduler.step()
                    optimizer.zero_grad()
                place.loss += value.detach()
                bar.update()
                if not accelerator.sync_gradients:
                    continue
                place.step += 1
                if not optimizer.step_was_skipped:
                    take_step(shadows.values())
                if interval.is_due_at_step(place.step, None) and not accelerator.gradient_state.end_of_dataloader:
                    epoch = place.epoch + (place.batches / per_epoch if per_epoch else 0)
                    if found := decide_now(epoch):
                        report({"epoch": epoch, "step": place.step, **found})
                    model.train()
                stop.check()
                if place.can_be_saved and not accelerator.gradient_state.end_of_dataloader:
                    save()

            row = {"epoch": place.epoch + 1, "step": place.step, **place.end_epoch(accelerator)}
            ended = interval.unit == "epoch" and place.epoch % interval.count == 0
            if ended or interval.is_due_at_step(place.step, place.step if place.epoch == epochs else None):
                bar.set_description("evaluating")
                row |= decide_now(place.epoch)
            row["learning_rate"] = optimizer.param_groups[0]["lr"]
            report(row)
            stop.check(now=True)
            due = place.epoch % save_every == 0 or (save_steps and place.step % save_steps == 0)
            if due or stop.agreed or place.epoch == epochs:
                save()

    model.eval()
    result = FitResult(shadows, place.history, place.step)
    name = chosen_strategy(apply, shadows)
    if name is not None and shadows[name].members:
        shadows[name].apply()
        result.applied = name
    elif name is not None:
        reason = why_empty(shadows[name], score.label, "the run had no decision point")
        logger.warning(f"The {name} ensemble is empty: {reason}. The running weights stay in the model.")
    elif apply is not None:
        logger.warning("No strategy has a validation score to choose by. The running weights stay in the model.")
    if root is not None and accelerator.is_main_process:
        write_trajectory(
            root,
            shadows,
            metric=score.label,
            greater_is_better=greater_is_better,
            applied=result.applied,
        )
    return result
