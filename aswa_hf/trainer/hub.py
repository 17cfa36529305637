"""The Hub in the Trainer: the description of a run, our card in the Trainer's push, and a push after training."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, get_token
from transformers import Trainer, TrainingArguments
from transformers.modelcard import TASK_MAPPING
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.utils import logging

from aswa_hf._utils.sharding import is_sharded
from aswa_hf.averaging import unwrap
from aswa_hf.batchnorm import has_batchnorm
from aswa_hf.checkpoint import library_versions
from aswa_hf.comparison import Metrics, Score
from aswa_hf.hub import HubError, push_to_hub
from aswa_hf.hub.repository import check_repo_id, describe_strategy, write_card
from aswa_hf.hub_requests import TIMEOUT, Step, bounded_requests
from aswa_hf.run_folder import PICTURE
from aswa_hf.strategies import Strategy
from aswa_hf.trajectory import encode_number

logger = logging.get_logger(__name__)

LONGEST_PUSH = 3600.0  # seconds: large checkpoints over slow lines; each request has a limit of its own
FIRST_NOTICE, NOTICE_EVERY = 5.0, 60.0  # seconds


def describe_run(
    trainer: Trainer,
    strategies: Mapping[str, Strategy],
    metrics: Mapping[str, Metrics],
    score: Score,
    shipped: str | None,
) -> dict[str, Any]:
    """Returns what a card says about a run beside its decisions; `metrics` are those of each strategy's weights.

    Training has ended when this is called, with models and datasets of any kind: a failure is a warning, not an error.
    """
    try:
        return _description(trainer, strategies, metrics, score, shipped)
    except Exception as error:
        logger.warning(f"The card will not describe the training run: {type(error).__name__}: {error}")
        return {}


def _description(
    trainer: Trainer,
    strategies: Mapping[str, Strategy],
    metrics: Mapping[str, Metrics],
    score: Score,
    shipped: str | None,
) -> dict[str, Any]:
    args = trainer.args
    model: Any = unwrap(trainer.model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    kg = _knowledge_graph(trainer)
    logged = [log["train_runtime"] for log in trainer.state.log_history if "train_runtime" in log]
    epochs = float(trainer.state.epoch or 0)
    about = {
        "task": "link-prediction" if kg is not None else _task(base),
        "dataset": kg.name if kg is not None else _dataset_name(trainer),
        "model": str(getattr(getattr(base, "config", None), "architecture", None) or type(base).__name__),
        "seed": args.seed,
        "epochs": int(epochs) if epochs.is_integer() else epochs,
        "triples": {split: len(kg[split]) for split in kg} if kg is not None else None,
        # A sharded model only runs on all processes together.
        "example": None if is_sharded(model) else try_example(_example, trainer, base, kg),
        "seconds": {"train": logged[-1]} if logged else None,
        "processes": args.world_size,
    }
    results = {
        name: {"validation": _final_metrics(name, strategy, metrics.get(name), score)}
        for name, strategy in strategies.items()
        if strategy.members
    }
    found: dict[str, Any] = encode_number(
        {
            **{name: value for name, value in about.items() if value is not None},
            "strategies": results,
            **(describe_strategy(strategies[shipped]) if shipped else _own_weights(trainer)),
            "versions": library_versions(),
        }
    )
    return found


def _own_weights(trainer: Trainer) -> dict[str, Any]:
    """Describes a run that ends with the weights that the Trainer leaves in the model."""
    batchnorm = "copy" if has_batchnorm(unwrap(trainer.model)) else None
    if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint:
        return {"rule": "best-checkpoint", "best_by": trainer.args.metric_for_best_model, "batchnorm": batchnorm}
    return {"rule": "last", "batchnorm": batchnorm}


def _final_metrics(name: str, strategy: Strategy, metrics: Metrics | None, score: Score) -> dict[str, Any]:
    """Returns the validation metrics of a strategy's weights that are numbers, without `eval_`."""
    reported = score.report(metrics, name) if metrics is not None else {}
    plain = {key.removeprefix(f"eval_{name}_"): value for key, value in reported.items()}
    return {key: value for key, value in plain.items() if isinstance(value, (int, float))} | {
        score.label: strategy.score
    }


def _task(model: Any) -> str | None:
    """Returns the Hub's name of the task, as in the Trainer's own card; a subclass has that of its parent."""
    tasks: dict[str, str] = {}
    for task, mapping in TASK_MAPPING.items():
        for names in mapping.values():
            tasks |= dict.fromkeys([names] if isinstance(names, str) else names, task)
    return next((tasks[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in tasks), None)


def _knowledge_graph(trainer: Trainer) -> Any:
    kg = getattr(trainer, "kg", None)
    if kg is None:
        return None
    from aswa_hf.kge import KnowledgeGraph

    return kg if isinstance(kg, KnowledgeGraph) else None


def _dataset_name(trainer: Trainer) -> str | None:
    data = trainer.train_dataset
    name = getattr(getattr(getattr(data, "rows", data), "info", None), "dataset_name", None)
    return name if isinstance(name, str) else None


def try_example(make: Callable[..., dict[str, str] | None], *args: Any) -> dict[str, str] | None:
    """Returns the example that a function makes for a card; a failure is a warning, since training has ended."""
    try:
        return make(*args)
    except Exception as error:
        logger.warning(f"The card will show no example: {type(error).__name__}: {error}")
        return None


def _example(trainer: Trainer, model: Any, kg: Any) -> dict[str, str] | None:
    """Returns a prediction of the weights now in the model, if it is a link predictor or image classifier of ours.

    May fail: other models and datasets may use these names for something else.
    """
    images = trainer.eval_dataset
    if kg is not None and len(kg["test"]):
        # There is no example for weights that have diverged.
        return link_example(model, kg) if all(weight.isfinite().all() for weight in model.parameters()) else None
    if hasattr(images, "class_names") and hasattr(images, "labels"):
        return image_example(model, images, "validation")
    return None


def link_example(model: Any, kg: Any) -> dict[str, str]:
    """Returns a question whose answer is only in the test split, and its answers, for a card."""
    from aswa_hf.kge.predict import LinkPredictor

    head, relation, tail = kg.triples("test")[0]
    h, r, t = kg.vocab.entities[head], kg.vocab.relations[relation], kg.vocab.entities[tail]
    return {
        "code": f"predictor.predict(head={json.dumps(h)}, relation={json.dumps(r)}, k=3)",
        "about": f"The test split holds ({h}, {r}, {t}), which training has not seen:",
        "output": LinkPredictor(model, kg.vocab).predict(head=h, relation=r, k=3).to_string(index=False),
    }


@torch.no_grad()
def image_example(model: Any, images: Any, split: str) -> dict[str, str]:
    """Returns an image classifier's prediction for the first image of a split, for a card."""
    device = next(model.parameters()).device
    probabilities = model.eval()(images[0]["pixel_values"][None].to(device)).logits.softmax(-1)[0]
    best = probabilities.topk(min(3, len(probabilities)))
    truth = images.class_names[images.labels[0]]
    rows = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return {
        "about": f"Class probabilities of the first {split} image, which shows {truth}:",
        "output": "\n".join(f"{images.class_names[index]:12s} {value:.4f}" for value, index in rows),
    }


def repository_of(push: bool | str, args: TrainingArguments) -> str | None:
    """Returns the repository to push to after training; raises ValueError now if that would fail then."""
    if not push:
        return None
    repo_id = args.hub_model_id if push is True else push
    if not isinstance(repo_id, str) or not repo_id:
        raise ValueError(
            f"ASWACallback(push_to_hub={push!r}) does not name a repository. Pass one, as in push_to_hub='me/model', "
            "or set TrainingArguments(hub_model_id=…)."
        )
    check_repo_id(repo_id)
    return repo_id


def check_token(args: TrainingArguments) -> None:
    """Raises HubError before training if there is no token for the push after it."""
    if not (args.hub_token or get_token()):
        raise HubError(
            "There is no token for ASWACallback(push_to_hub=…) to push with. Log in with `hf auth login`, or set "
            "HF_TOKEN."
        )


def push_at_end(trainer: Trainer, repo_id: str) -> str | None:
    """Saves the model on all ranks and pushes it from rank 0; a failure is logged, and does not end the run.

    Returns the URL of the repository, or None.
    """
    args, folder = trainer.args, Path(trainer.args.output_dir)
    try:
        trainer.save_model(_internal_call=True)
    except OSError as error:
        logger.error(f"Nothing was pushed to {repo_id}: the model could not be saved to {folder}: {error}")
        return None
    if not trainer.is_world_process_zero():
        return None
    _remove_unshipped_files(folder)
    options = {"private": args.hub_private_repo, "token": args.hub_token, "revision": args.hub_revision}
    try:
        wait_for_checkpoint_pushes(trainer)
        url = push_to_hub(folder, repo_id, **options)
    except (OSError, ValueError) as error:
        logger.error(
            f"{error} The model is saved in {folder}; to push it: aswa-hf push {shlex.quote(str(folder))} {repo_id}"
        )
        return None
    logger.info(f"Pushed to {url}")
    return url


def bounded_checkpoint_pushes(trainer: Trainer) -> AbstractContextManager[Any]:
    """While it is open, requests of the Trainer's background pushes end too if there is no answer."""
    if not trainer.args.push_to_hub or not trainer.is_world_process_zero():
        return nullcontext()
    return bounded_requests(TIMEOUT, longest_wait=math.inf)  # no one waits for them while the run continues


def wait_for_checkpoint_pushes(trainer: Trainer) -> None:
    """Waits for the pushes of checkpoints that the Trainer has begun; raises HubError if they do not end.

    The Trainer itself would wait without a limit. A push that failed is reported, which the Trainer does not do.
    """
    jobs = checkpoint_pushes(trainer)
    began, patience = time.monotonic(), min(FIRST_NOTICE, LONGEST_PUSH)
    while futures.wait(jobs, timeout=patience).not_done:
        waited = time.monotonic() - began
        if waited >= LONGEST_PUSH:
            raise HubError(
                f"The push of a checkpoint to {trainer.hub_model_id} has not ended after {LONGEST_PUSH:g} s, and "
                "could overwrite a later one: push again when it has ended."
            )
        logger.warning(
            f"Waiting for the push of a checkpoint to {trainer.hub_model_id}, {waited:.0f} s so far (at most "
            f"{LONGEST_PUSH:g} s)"
        )
        patience = min(NOTICE_EVERY, LONGEST_PUSH - waited)
    for job in jobs:
        if not job.cancelled() and (error := job.exception()):
            reason = Step("push", trainer.args.hub_token or get_token() or "").reason(error)
            logger.warning(f"A checkpoint was not pushed to {trainer.hub_model_id}: {reason}")
    if jobs:
        trainer.push_in_progress = None  # each is reported once


def finish_checkpoint_pushes(trainer: Trainer) -> None:
    """Waits for the pushes of checkpoints at the end of a run that pushes nothing else."""
    try:
        wait_for_checkpoint_pushes(trainer)
    except HubError as error:
        logger.error(str(error))


def checkpoint_pushes(trainer: Trainer) -> list[Any]:
    """Returns the pushes of checkpoints that the Trainer has begun, and that have not been waited for."""
    return list(getattr(getattr(trainer, "push_in_progress", None), "jobs", None) or [])


def replace_card(trainer: Trainer) -> None:
    """Makes the current push write this package's card, unless the trainer's class defines its own."""
    if type(trainer).create_model_card is Trainer.create_model_card and trainer.is_world_process_zero():
        trainer.create_model_card = _CardWriter(trainer)


class _CardWriter:
    """Replaces `Trainer.create_model_card` once: the Trainer calls it between saving the model and the upload."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def __call__(
        self,
        language: Any = None,
        license: str | None = None,
        tags: Any = None,
        finetuned_from: str | None = None,
        dataset: Any = None,
        dataset_tags: Any = None,
        **other: Any,
    ) -> None:
        del self.trainer.create_model_card
        folder = Path(self.trainer.args.output_dir)
        _remove_unshipped_files(folder)
        write_card(
            folder,
            self.trainer.hub_model_id,
            language=language,
            license=license,
            base_model=finetuned_from,
            datasets=_listed(dataset_tags) or _listed(dataset),
            more_tags=_listed(tags),
        )
        _remove_pushed_arguments(self.trainer)


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


def _remove_pushed_arguments(trainer: Trainer) -> None:
    """Deletes the pickle that pushes of checkpoints left in the repository: the last push only adds files."""
    args, repo_id = trainer.args, trainer.hub_model_id
    if not args.push_to_hub:
        return
    wait_for_checkpoint_pushes(trainer)
    step = Step(f"remove {TRAINING_ARGS_NAME}", args.hub_token or get_token() or "")
    api = HfApi(token=args.hub_token)
    try:
        with bounded_requests(TIMEOUT):
            head = step.attempt(lambda: api.model_info(repo_id, revision=args.hub_revision))
            if TRAINING_ARGS_NAME in {file.rfilename for file in head.siblings or []}:
                message = f"Remove {TRAINING_ARGS_NAME}, a pickle"
                api.delete_file(TRAINING_ARGS_NAME, repo_id, revision=args.hub_revision, commit_message=message)
    except Exception as error:  # HTTP errors have no base class common to all library versions
        logger.warning(f"{TRAINING_ARGS_NAME}, a pickle, stays in the repository {repo_id}: {step.reason(error)}")


def _remove_unshipped_files(folder: Path) -> None:
    # The Trainer pickles its arguments beside a saved model: nothing reads them, and repositories contain no pickles.
    (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)
    # It may be from an earlier run in this folder; it is drawn again.
    (folder / PICTURE).unlink(missing_ok=True)
