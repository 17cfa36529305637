"""Training of knowledge-graph embeddings with the Trainer: KvsAll, 1vsAll and negative sampling."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerControl, TrainingArguments
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_utils import IntervalStrategy

from aswa_hf._utils.checks import check_whole_number
from aswa_hf._utils.random_state import rng_state, set_rng_state
from aswa_hf._utils.sharding import row_sharded, undivided
from aswa_hf._utils.training_state import load_optimizer, load_weights, save_training
from aswa_hf.kge.graph import TailsByQuery, with_inverses
from aswa_hf.kge.modeling_kge import KGEModel
from aswa_hf.kge.ranking import evaluate_link_prediction
from aswa_hf.run_folder import TRAINING

if TYPE_CHECKING:
    from aswa_hf.kge.data import KnowledgeGraph

Batch = dict[str, Tensor]


class KvsAll(Dataset[Batch]):
    """One example per distinct (head, relation), with all its true tails; the labels stay sparse."""

    def __init__(self, triples: np.ndarray):
        self.queries = TailsByQuery.of(triples)

    def __len__(self) -> int:
        return len(self.queries)

    def __getitems__(self, rows: list[int]) -> Batch:
        """A complete batch at once: no Python loop over its examples."""
        chosen = np.asarray(rows)
        labels, offsets = self.queries.take(chosen)
        return _as_tensors(
            heads=self.queries.heads[chosen],
            relations=self.queries.relations[chosen],
            labels=labels,
            label_offsets=offsets,
        )


class OneVsAll(Dataset[Batch]):
    """One example per triple: the tail against all other entities."""

    def __init__(self, triples: np.ndarray):
        self.triples = triples.astype(np.int64)

    def __len__(self) -> int:
        return len(self.triples)

    def __getitems__(self, rows: list[int]) -> Batch:
        heads, relations, tails = self.triples[np.asarray(rows)].T
        return _as_tensors(heads=heads, relations=relations, labels=tails)


class NegativeSampling(OneVsAll):
    """One example per triple: the tail against `negatives` random entities, drawn for each triple or for a batch."""

    def __init__(self, triples: np.ndarray, num_entities: int, negatives: int = 32, shared: bool = False):
        super().__init__(triples)
        check_whole_number("negatives", negatives)
        self.num_entities = num_entities
        self.negatives = negatives
        self.shared = shared

    def __getitems__(self, rows: list[int]) -> Batch:
        batch = super().__getitems__(rows)
        if self.shared:
            return batch | {"negatives": torch.randint(self.num_entities, (self.negatives,))}
        true = batch.pop("labels").unsqueeze(1)
        drawn = torch.randint(self.num_entities, (len(true), self.negatives))
        labels = torch.cat([torch.ones_like(true), torch.zeros_like(drawn)], dim=1)
        return batch | {"tails": torch.cat([true, drawn], dim=1), "labels": labels.float()}


# The value of the loss takes a quarter of a KvsAll step: a logged one is the mean over at least this many steps.
LOSSES_PER_LOG = 8

SCHEMES = ("kvsall", "1vsall", "negative_sampling")
BALANCED = "balanced_sampling"  # of sharded entities; its steps are not made of examples


def training_examples(
    kg: KnowledgeGraph,
    scheme: str = "kvsall",
    *,
    inverses: bool,
    negatives: int = 32,
    shared_negatives: bool = False,
) -> Any:
    """The training split as examples of one of the schemes, with inverse relations if the model has them."""
    triples = kg.triples("train")
    if len(triples) == 0:
        raise ValueError("The split 'train' has no triples to learn from.")
    if inverses:
        triples = with_inverses(triples, kg.num_relations)
    if scheme == "kvsall":
        return KvsAll(triples)
    if scheme == "1vsall":
        return OneVsAll(triples)
    if scheme == "negative_sampling":
        return NegativeSampling(triples, kg.num_entities, negatives, shared_negatives)
    raise ValueError(f"scheme must be one of {', '.join(SCHEMES)}, got {scheme!r}.")


def paper_arguments(output_dir: str, **options: Any) -> TrainingArguments:
    """The paper's settings (Adam, learning rate 0.1, batches of 1024, 256 epochs), overridden by `options`."""
    defaults: dict[str, Any] = {
        "num_train_epochs": 256,
        "per_device_train_batch_size": 1024,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "eval_strategy": "epoch",
        "logging_strategy": "epoch",
        "save_strategy": "no",
        "report_to": "none",
        "dataloader_pin_memory": torch.cuda.is_available(),
        "ddp_find_unused_parameters": False,  # every step uses all of them; the Trainer's default warns about that
    }
    return TrainingArguments(output_dir=output_dir, **(defaults | options))


class KGETrainer(Trainer):
    """A Trainer for link prediction: it builds the examples, and evaluation is filtered ranking.

    `evaluate()` ranks the validation split, `evaluate("test")` another one; the metrics are `eval_mrr`, `eval_hits@1`
    and so on, so that `ASWACallback(trainer, metric="mrr")` works as with any other Trainer.
    """

    control: TrainerControl

    def __init__(
        self,
        model: KGEModel,
        args: TrainingArguments,
        kg: KnowledgeGraph,
        *,
        scheme: str = "kvsall",
        negatives: int = 32,
        shared_negatives: bool = False,
        **options: Any,
    ):
        self.kg = kg
        if (model.config.num_entities, model.config.num_relations) != (kg.num_entities, kg.num_relations):
            raise ValueError(
                f"The model has {model.config.num_entities} entities and {model.config.num_relations} relations, the "
                f"graph {kg.num_entities} and {kg.num_relations}. Build the config with kg.config(…)."
            )
        if args.n_gpu > 1:
            raise ValueError(
                f"One process would use {args.n_gpu} GPUs. Start one process per GPU: accelerate launch --multi_gpu …"
            )
        if args.accelerator_config.dispatch_batches:
            raise ValueError(
                "dispatch_batches splits batches of triples incorrectly. Remove it from accelerator_config."
            )
        if row_sharded(model):
            _refuse_with_sharded_entities(args)
        self._steps_since_log = 0
        examples: Any
        if scheme == BALANCED:
            examples = _balanced_batches(model, kg, args, negatives)
        else:
            examples = training_examples(
                kg,
                scheme,
                inverses=model.config.inverse_relations,
                negatives=negatives,
                shared_negatives=shared_negatives,
            )
        args.remove_unused_columns = False  # it would treat a finished batch as a list of examples
        options = {"processing_class": kg.vocab, "eval_dataset": kg["validation"]} | options
        super().__init__(model, args, train_dataset=examples, data_collator=_as_it_is, **options)

    def training_step(self, model: Any, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
        """A training step; if there are many between two logs, only some compute the loss and the others repeat it."""
        measured = self._steps_since_log % self._measure_every == 0
        self._steps_since_log += 1
        loss: Tensor = super().training_step(model, {**inputs, "measured": measured}, num_items_in_batch)
        if measured:
            self._last_loss = loss
        return self._last_loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        # With sharded entities each process has only the gradients of its own rows, so there is no norm to log.
        return None if row_sharded(self.model) else super()._get_grad_norm(model, grad_norm)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:  # and not the metrics of an evaluation
            self._steps_since_log = 0
        super().log(logs, *args, **kwargs)

    @property
    def _measure_every(self) -> int:
        if not isinstance(self.train_dataset, KvsAll):
            return 1  # the other losses come with their gradients
        per_log = self.state.max_steps / self.state.num_train_epochs
        if self.args.logging_strategy == IntervalStrategy.STEPS:
            per_log = self.state.logging_steps
        return max(1, int(per_log) // LOSSES_PER_LOG)

    def get_train_dataloader(self) -> Any:
        """The training batches; with sharded entities the same ones on all processes, unless they are balanced."""
        loader: Any
        if hasattr(self.train_dataset, "per_pair"):  # each process has its own part of every step already
            loader = self.accelerator.prepare(DataLoader(self.train_dataset, collate_fn=_only))
        else:
            loader = super().get_train_dataloader()
        return undivided(loader) if row_sharded(self.model) else loader

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model; in a checkpoint, each process saves its rows of sharded entities."""
        if not row_sharded(self.model):
            super().save_model(output_dir, _internal_call)
            return
        folder = Path(output_dir or self.args.output_dir)
        if _internal_call:
            optimizer = None if self.args.save_only_model else self.optimizer
            save_training(folder / TRAINING, self.model, optimizer)
        else:
            self.model.save_pretrained(folder)
        if self.args.should_save:
            self.model.config.save_pretrained(folder)
            self.kg.vocab.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not row_sharded(self.model):
            super()._save_optimizer_and_scheduler(output_dir)
        elif self.args.should_save:  # the optimizer is saved with the weights
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if row_sharded(self.model):
            load_weights(Path(resume_from_checkpoint) / TRAINING, self.model)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not row_sharded(self.model):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load_optimizer(Path(checkpoint) / TRAINING, self.model, self.optimizer)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None and row_sharded(self.model):
            # All processes draw the same numbers, also processes that the saved run did not have.
            (state,) = broadcast_object_list([rng_state()])
            set_rng_state(state)

    def evaluate(
        self, eval_dataset: str | None = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Filtered ranking of a split, by default the validation split."""
        if not isinstance(eval_dataset, str | None):
            raise TypeError(f"evaluate() takes the name of a split of the graph, got a {type(eval_dataset).__name__}.")
        start = time.perf_counter()
        found = evaluate_link_prediction(self.model, self.kg, eval_dataset or "validation", self._ranking_batch_size())
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        metrics[f"{metric_key_prefix}_runtime"] = time.perf_counter() - start
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _ranking_batch_size(self) -> int | None:
        # The Trainer's default of 8 is meant for other kinds of examples.
        size = self.args.per_device_eval_batch_size
        return size if size != TrainingArguments.per_device_eval_batch_size else None


def _refuse_with_sharded_entities(args: TrainingArguments) -> None:
    """Raises ValueError for arguments that do not work if each process has only its own rows."""
    for name, used, reason in (
        ("max_grad_norm", args.max_grad_norm, "each process would clip by the norm of its own rows; set it to 0"),
        ("fp16", args.fp16, "processes would skip different steps; use bf16"),
        ("load_best_model_at_end", args.load_best_model_at_end, "use the strategy 'best' of ASWACallback"),
    ):
        if used:
            raise ValueError(f"{name}={used} is not supported with sharded entities: {reason}.")


def _balanced_batches(model: KGEModel, kg: KnowledgeGraph, args: TrainingArguments, negatives: int) -> Any:
    """The steps of balanced sampling: of about as many triples over all processes as the batch size says."""
    if not row_sharded(model):
        raise ValueError(f"scheme={BALANCED!r} needs a model with sharded entities: see aswa_hf.kge.sharded.")
    # Imported here to avoid a circular import.
    from aswa_hf.kge.sharded import BalancedBatches

    world = args.world_size
    triples = kg.mapped("train") if hasattr(kg, "mapped") else kg.triples("train")
    return BalancedBatches(
        triples,
        model,
        per_pair=max(1, args.per_device_train_batch_size // world**2),
        negatives=-(-negatives // world),
        seed=args.seed,
    )


def _only(batches: list[Batch]) -> Batch:
    (batch,) = batches
    return batch


def _as_tensors(**arrays: np.ndarray) -> Batch:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _as_it_is(batch: Batch) -> Batch:
    """Returns the batch unchanged: the dataset has already collated it."""
    return batch
