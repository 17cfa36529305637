"""Model cards: what a repository's README says of the weights in it, all numbers taken from the trajectory file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from aswa_hf.trajectory import Trajectory, load_trajectories

TRAJECTORY, RESULTS, CONFIG, PICTURE = "aswa_trajectory.json", "results.json", "config.json", "trajectory.png"
TEMPLATE = Path(__file__).parent / "card_template.md"
STRATEGIES = {
    "last": "the last epoch",
    "best": "the best epoch (early stopping)",
    "swa": "SWA",
    "ema": "EMA",
    "aswa": "ASWA",
    "fge": "FGE (predictions averaged)",
}
LIBRARIES = {"link-prediction": "transformers", "image-classification": "timm"}
SHOWN = {"link-prediction": ("mrr", "hits@1", "hits@3", "hits@10"), "image-classification": ("accuracy",)}


@dataclass
class CardData:
    """What a card says: given by the user, filled in from the run, constant."""

    # Given by the user.
    repo_id: str
    license: str | None = None
    notes: str = ""

    # Filled in from the run: by `read_card_data`.
    shipped: str = "aswa"
    metric: str = ""
    greater_is_better: bool = True
    trajectories: dict[str, Trajectory] = field(default_factory=dict)
    alphas: list[float] = field(default_factory=list)
    run: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    has_picture: bool = False

    # Constant.
    tags: tuple[str, ...] = ("aswa", "weight-averaging", "model-averaging")

    @property
    def task(self) -> str:
        return self.run.get("task", "")

    @property
    def model_name(self) -> str:
        """The class of a link predictor, the timm name of an image classifier."""
        architectures = self.config.get("architectures") or [self.config.get("architecture")]
        return str(architectures[0] or self.run.get("model") or "model")

    @property
    def decisions(self) -> dict[str, int]:
        """How often ASWA decided what."""
        found = (
            [decision.value for decision in self.trajectories["aswa"].decisions] if "aswa" in self.trajectories else []
        )
        return {name: found.count(name) for name in ("init", "soft", "hard", "reject")}

    @property
    def members(self) -> int:
        return sum(alpha > 0 for alpha in self.alphas)

    @property
    def alpha_rows(self) -> list[tuple[str, float]]:
        """The weight of each snapshot that has one, by epoch; runs of epochs with the same weight as one row."""
        trajectory = self.trajectories.get(self.shipped)
        rows: list[tuple[int, int, float]] = []
        for index, alpha in enumerate(self.alphas if trajectory else []):
            if alpha <= 0:
                continue
            if rows and rows[-1][1] == index and rows[-1][2] == alpha:
                rows[-1] = (rows[-1][0], index + 1, alpha)
            else:
                rows.append((index + 1, index + 1, alpha))
        return [(str(first) if first == last else f"{first}–{last}", alpha) for first, last, alpha in rows]

    def results(self, split: str) -> list[tuple[str, list[float]]]:
        """A row of metrics for each strategy of the run, in a fixed order."""
        strategies = self.run.get("strategies", {})
        names = [name for name in STRATEGIES if name in strategies]
        return [(name, [strategies[name][split][metric] for metric in self.metrics]) for name in names]

    @property
    def metrics(self) -> tuple[str, ...]:
        return SHOWN.get(self.task, (self.metric,))

    @property
    def verdict(self) -> str:
        """Whether the shipped weights are the best of the run on the test split, and if not, which are."""
        rows = self.results("test")
        if not rows:
            return ""
        scores = {name: values[0] for name, values in rows}
        own = scores.pop(self.shipped)
        better = [name for name, score in scores.items() if score > own]
        level = [name for name, score in scores.items() if score == own]
        label = _label(self.shipped)
        if better:
            return f"On the test split {label} did **not** win: {_listed(better)} did better in {self.metrics[0]}."
        if level:
            return f"On the test split no strategy did better in {self.metrics[0]}, and {_listed(level)} did as well."
        return f"On the test split {label} did best of all in {self.metrics[0]}."


def read_card_data(folder: str | Path, repo_id: str, **given: Any) -> CardData:
    """The data of a card, from a run folder or a repository's files."""
    folder = Path(folder)
    trajectories, about = load_trajectories(folder / TRAJECTORY)
    run = about.get("run")
    if run is None and (folder / RESULTS).exists():
        run = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8")) if (folder / CONFIG).exists() else {}
    shipped = about.get("applied") or "last"
    return CardData(
        repo_id=repo_id,
        shipped=shipped,
        metric=about["metric"],
        greater_is_better=about["greater_is_better"],
        trajectories=trajectories,
        alphas=trajectories[shipped].alphas if shipped in trajectories else [],
        run=run or {},
        config=config,
        has_picture=(folder / PICTURE).exists(),
        **given,
    )


def render(data: CardData) -> ModelCard:
    """The card as huggingface_hub knows it: metadata and text."""
    pipeline = "image-classification" if data.task == "image-classification" else None
    dataset = data.run.get("dataset")
    metadata = ModelCardData(
        library_name=LIBRARIES.get(data.task, "transformers"),
        license=data.license,
        pipeline_tag=pipeline,
        tags=[*data.tags, *([data.task] if data.task and data.task != pipeline else [])],
        datasets=[dataset] if dataset and "/" in dataset else None,
        metrics=[metric for metric in data.metrics if metric],
        model_name=data.repo_id.split("/")[-1],
        eval_results=_eval_results(data) or None,
    )
    return ModelCard.from_template(
        metadata, template_str=TEMPLATE.read_text(encoding="utf-8"), card=data, labels=STRATEGIES, label=_label
    )


def _eval_results(data: CardData) -> list[EvalResult]:
    """The shipped weights' results for the model index, split by split."""
    shipped = data.run.get("strategies", {}).get(data.shipped, {})
    return [
        EvalResult(
            task_type=data.task,
            dataset_type=data.run["dataset"],
            dataset_name=data.run["dataset"],
            dataset_config="default",
            dataset_split=split,
            metric_type=metric,
            metric_name=f"{split} {metric}",
            metric_value=shipped[split][metric],
        )
        for split in ("validation", "test")
        for metric in data.metrics
        if metric in shipped.get(split, {})
    ]


def _label(strategy: str) -> str:
    return STRATEGIES.get(strategy, strategy)


def _listed(names: list[str]) -> str:
    labels = [_label(name) for name in names]
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"
