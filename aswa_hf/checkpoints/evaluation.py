"""Scores of checkpoints, loaded one at a time; BatchNorm statistics of averaged weights are recomputed."""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from aswa_hf import policy
from aswa_hf._utils.checks import check_choice
from aswa_hf._utils.pretrained import load_strictly
from aswa_hf._utils.random_state import preserved_rng
from aswa_hf._utils.warnings import warn_caller
from aswa_hf.averaging import persistent_buffers
from aswa_hf.batchnorm import Batches, Recalibration
from aswa_hf.checkpoints.sources import checkpoint_in
from aswa_hf.checkpoints.streaming import Checkpoint
from aswa_hf.experiments.evaluation import SPLITS, find_evaluation
from aswa_hf.run_folder import CONFIG, read_config

Evaluate = Callable[[Any], Any]
STATISTICS = (".running_mean", ".running_var")
Result = TypeVar("Result")


def load_model(checkpoint: Checkpoint) -> Any:
    """The transformers model of a checkpoint, if its config names one that transformers has; else its state dict."""
    folder = checkpoint.folder
    if folder is None or not (folder / CONFIG).is_file():
        return checkpoint.state_dict()
    config = read_config(folder / CONFIG)
    load = _loader(config)
    if load is None:
        return checkpoint.state_dict()
    return load_strictly(load, folder).eval()


def evaluate_images(
    run: Path, split: str, dataset: str | None = None, track: Callable[[Any], Any] = iter
) -> dict[str, float]:
    """The metrics of the classifier in the folder of a run of images on a split of its dataset.

    `track` iterates over the batches, and may show progress.
    """
    check_choice("--split", split, SPLITS)
    checkpoint = checkpoint_in(run)
    checkpoint.check_finite()
    if not (run / CONFIG).is_file():
        raise ValueError(f"{run} has no {CONFIG}: its model cannot be loaded.")
    known = find_evaluation([run], dataset)
    if known is None:
        raise ValueError(f"{run} is not a run of `aswa-hf train`: its dataset is unknown.")
    return known.measure(load_model(checkpoint), split, track)


def _loader(config: Mapping[str, Any]) -> Any:
    """The class that loads a model with this config, if there is one."""
    import transformers

    if config.get("model_type") == "kge":
        from aswa_hf.kge import KGEModel

        return KGEModel
    names = config.get("architectures") or []
    if "architecture" in config and not names:
        import aswa_hf.vision  # noqa: F401 (registers architectures with timm)

        return transformers.AutoModelForImageClassification
    return getattr(transformers, str(names[0]), None) if names else None


@dataclass
class Evaluator:
    """Loads and scores checkpoints, and counts the evaluations; with `batches`, BatchNorm is recalibrated on them."""

    evaluate: Evaluate | None
    load: Callable[[Checkpoint], Any] = load_model
    batches: Batches | None = None
    bn_batches: int | None = None
    report: Callable[[str], None] = lambda _: None
    greater_is_better: bool = True
    evaluations: int = field(default=0, init=False)
    best: float | None = field(default=None, init=False)

    def score(self, checkpoint: Checkpoint, *, averaged: bool = False) -> tuple[float, dict[str, Tensor]]:
        """The score of a checkpoint, and the BatchNorm statistics it was evaluated with, if they are new."""
        if self.evaluate is None:
            raise ValueError("There is no evaluation function.")
        self.report(f"evaluating {checkpoint.name}" + ("" if self.best is None else f", best so far {self.best:.4f}"))
        evaluate = self.evaluate

        def scored(model: Any) -> tuple[float, dict[str, Tensor]]:
            statistics = self._recalibrated(model, checkpoint) if averaged else {}
            with preserved_rng(), _located_errors(checkpoint):
                value = evaluate(model)
            return _number(value, checkpoint), statistics

        found = self._with_model(checkpoint, scored)
        self.evaluations += 1
        score = found[0]
        if policy.is_usable(score) and (
            self.best is None or policy.is_better(score, self.best, self.greater_is_better)
        ):
            self.best = score
        return found

    def statistics(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """BatchNorm statistics for averaged weights, without a score."""
        return self._with_model(checkpoint, lambda model: self._recalibrated(model, checkpoint))

    def metrics(self, checkpoint: Checkpoint, measure: Callable[[Any], Result]) -> Result:
        """The result of `measure` for the model of a checkpoint."""
        return self._with_model(checkpoint, measure)

    def _with_model(self, checkpoint: Checkpoint, use: Callable[[Any], Result]) -> Result:
        loaded = [self.load(checkpoint)]
        reference = weakref.ref(loaded[0]) if isinstance(loaded[0], nn.Module) else lambda: None
        try:
            return use(loaded.pop())
        finally:
            # A model in a cycle of references would stay in memory beside the next one.
            if reference() is not None:
                gc.collect()

    def _recalibrated(self, model: Any, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """Recalibrates the model; returns copies of its statistics under their names in the checkpoint."""
        names = statistics_of(checkpoint)
        if self.batches is None or not names:
            return {}
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"BatchNorm statistics can only be recomputed with a model, but the checkpoints were loaded as "
                f"{type(model).__name__}. Pass load=, which returns the model of a checkpoint, or batchnorm='average'."
            )
        Recalibration(model, self.batches, limit=self.bn_batches)()
        buffers = persistent_buffers(model)
        return {name: _find(name, buffers).clone() for name in names}


def statistics_of(checkpoint: Checkpoint) -> list[str]:
    """The names of BatchNorm statistics among the tensors of a checkpoint."""
    return [name for name in checkpoint.tensors if name.endswith(STATISTICS)]


def _find(name: str, buffers: Mapping[str, Tensor]) -> Tensor:
    """The buffer that is saved as `name`: a wrapper may add a prefix to the names, or leave one out."""
    found = [key for key in buffers if key == name or key.endswith("." + name) or name.endswith("." + key)]
    if len(found) != 1:
        raise ValueError(f"The model has no BatchNorm statistics that are saved as {name!r}.")
    return buffers[found[0]]


def _number(value: Any, checkpoint: Checkpoint) -> float:
    try:
        score = float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"evaluate must return one number, the validation score, got {type(value).__name__}: {value!r}."
        ) from None
    if not policy.is_usable(score):
        warn_caller(f"The score of {checkpoint.name} is {score}: it counts as worse than any number.")
    return score


@contextmanager
def _located_errors(checkpoint: Checkpoint) -> Any:
    """Adds the checkpoint and the line to an error of the user's function."""
    try:
        yield
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"evaluate failed on {checkpoint.name}: {type(error).__name__}: {error} "
            f"({Path(place.filename).name}, line {place.lineno})"
        ) from error
