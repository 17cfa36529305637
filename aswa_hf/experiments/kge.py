"""A training run of a link predictor."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from transformers import TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import IntervalStrategy

from aswa_hf._utils.sharding import is_sharded
from aswa_hf.checkpoint import save_state
from aswa_hf.experiments.progress import results_table, verdict
from aswa_hf.experiments.running import (
    FinishedRun,
    checkpoint_to_resume,
    is_main_process,
    keep_settings,
    run_console,
    sole_run,
    steps_per_epoch,
    train_and_evaluate,
    write_results,
)
from aswa_hf.experiments.settings import KGERun
from aswa_hf.kge import KGEModel, KGETrainer, KnowledgeGraph, evaluate_link_prediction, load_kg, paper_arguments
from aswa_hf.kge.optimizers import optimizer_of
from aswa_hf.run_folder import STATE_FOLDER
from aswa_hf.trainer import ASWACallback
from aswa_hf.trainer.hub import link_example, try_example

# The settings of a run that are options of its model under the same name.
MODEL_SETTINGS = (
    "dim", "p", "q", "label_smoothing", "entity_dropout", "relation_dropout", "query_dropout", "regularizer",
    "regularization", "relation_prediction", "adversarial_temperature", "initializer", "initializer_range",
)  # fmt: skip
METRICS = {"mrr": "MRR", "hits@1": "Hits@1", "hits@3": "Hits@3", "hits@10": "Hits@10"}


def train_kge(
    run: KGERun,
    output_dir: str | Path | None = None,
    *,
    resume: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
) -> FinishedRun:
    """Trains a link predictor and fills its run folder, by default `runs/<dataset>-<model>-<seed>`.

    >>> finished = train_kge(KGERun(dataset="countries", model="complex", dim=32, lr=0.02))
    >>> finished.results["strategies"]["aswa"]["test"]["mrr"]
    """
    folder = Path("runs") / run.name if output_dir is None else Path(output_dir)
    with sole_run(folder):
        return _train(run, folder, resume, callbacks)


def _train(run: KGERun, folder: Path, resume: bool, callbacks: Sequence[TrainerCallback]) -> FinishedRun:
    console = run_console()
    checkpoint = checkpoint_to_resume(run, folder, resume)
    kg = load_kg(run.dataset)
    sizes = {split: len(kg[split]) for split in kg}
    parts = ", ".join(f"{count:,} {split}" for split, count in sizes.items())
    console.print(
        f"{kg.name}: {parts} triples, {kg.num_entities:,} entities, {kg.num_relations:,} relations", soft_wrap=True
    )
    args = paper_arguments(
        str(folder),
        num_train_epochs=run.epochs,
        per_device_train_batch_size=run.batch_size,
        learning_rate=run.lr,
        weight_decay=run.weight_decay,
        seed=run.seed,
        disable_tqdm=True,
        save_strategy="no",
        save_total_limit=run.keep,
        **_schedule(run),
    )
    model = _model(run, kg, args)
    trainer = KGETrainer(
        model,
        args,
        kg,
        scheme=run.scheme,
        negatives=run.negatives,
        shared_negatives=run.shared_negatives,
        callbacks=list(callbacks),
        optimizer_cls_and_kwargs=optimizer_of(run.optimizer, args),
    )
    every: Literal["epoch", "evaluation"] = "epoch"
    if run.eval_every > 1:
        every, args.eval_strategy = "evaluation", IntervalStrategy.STEPS
        args.eval_steps = run.eval_every * steps_per_epoch(trainer)
    callback = ASWACallback(trainer, metric=run.metric, strategies=run.strategies, apply=run.shipped, every=every)
    keep_settings(run, sizes, args, checkpoint)
    results, seconds = train_and_evaluate(
        trainer, callback, checkpoint, lambda split: evaluate_link_prediction(model, kg, split), console
    )
    if is_main_process() or is_sharded(model):
        # Checkpoints may be deleted; `evaluate` reads the strategies from here.
        save_state(folder / STATE_FOLDER, callback.strategies)
    about = {"dim": run.dim, "triples": sizes, "example": try_example(link_example, model, kg)}
    # Beside the others, whose sum is the duration of the run.
    about |= {"cpu_seconds": seconds.pop("cpu"), "resumed": checkpoint is not None}
    content = write_results(folder, callback, results, seconds, **run.describe(folder), **about)
    saved = str(callback.applied)
    console.print(results_table(results, METRICS, "Filtered ranking over heads and tails (%)", saved))
    console.print(verdict(results, run.metric, METRICS[run.metric], saved), soft_wrap=True)
    command = f"aswa-hf predict {shlex.quote(str(folder))} --head … --relation …"
    console.print(f"Written to {folder}; predict with: {command}", soft_wrap=True)
    return FinishedRun(folder, content, model, callback.strategies)


def _model(run: KGERun, kg: KnowledgeGraph, args: TrainingArguments) -> KGEModel:
    """The model of a run, with new weights."""
    options = {name: getattr(run, name) for name in MODEL_SETTINGS}
    config = kg.config(scorer=run.model, loss=run.training_loss, **options)
    set_seed(run.seed)
    if not run.shard_entities:
        return KGEModel(config)
    from aswa_hf.kge.sharded import build_sharded

    return build_sharded(config, seed=run.seed, device=args.device)  # the device starts the process group


def _schedule(run: KGERun) -> dict[str, Any]:
    """The learning rate schedule as arguments of a Trainer."""
    if run.schedule != "plateau":
        return {"lr_scheduler_type": run.schedule}
    options = {"mode": "max", "factor": run.plateau_factor, "patience": run.plateau_patience}
    return {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": options,
        "metric_for_best_model": run.metric,
    }
