"""Model cards: the README of a repository, which describes its weights; all numbers are from the trajectory file."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from aswa_hf._utils.files import read_object
from aswa_hf.run_folder import ADAPTER_CONFIG, CONFIG, PICTURE, TRAJECTORY
from aswa_hf.trajectory import Trajectory, decode_numbers, load_trajectories

TEMPLATE = Path(__file__).parent / "card_template.md"
LABELS = {
    "last": "the last epoch",
    "best": "the best epoch (early stopping)",
    "swa": "SWA",
    "ema": "EMA",
    "aswa": "ASWA",
    "dense-aswa": "Dense ASWA",
    "fge": "FGE (predictions averaged)",
    "lawa": "LAWA",
    "best-ema": "the best EMA",
    "bema": "BEMA",
    "swad": "SWAD",
    "swad-max": "SWAD by validation maxima",
    "power-ema": "power-function EMA",
    "swa-all": "SWA over all epochs",
    "best-checkpoint": "the best checkpoint",
    "greedy": "greedy soup",
    "uniform": "uniform soup",
}
CHOSEN_BY_VALIDATION = ("best", "aswa", "dense-aswa", "best-ema", "swad", "swad-max", "greedy")
SHOWN = {"link-prediction": ("mrr", "hits@1", "hits@3", "hits@10"), "image-classification": ("accuracy",)}
LIBRARIES = {"kge": "transformers", "timm": "timm", "peft": "peft", "transformers": "transformers", "torch": None}
OWN_ARCHITECTURES = "_cifar"  # the end of their names
PIPELINES = {"link-prediction": "graph-ml"}
# By PEFT's names of tasks.
AUTO_CLASSES = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
}


@dataclass
class CardData:
    """The content of a card: given by the user, filled in from the run, constant."""

    # Given by the user.
    repo_id: str
    license: str | None = None
    notes: str = ""
    language: str | list[str] | None = None
    base_model: str | None = None
    datasets: Sequence[str] = ()
    more_tags: Sequence[str] = ()

    # Filled in from the run: by `read_card_data`.
    shipped: str = "aswa"
    metric: str = ""
    greater_is_better: bool = True
    trajectories: dict[str, Trajectory] = field(default_factory=dict)
    alphas: list[float] = field(default_factory=list)
    run: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    checkpoints: list[str] = field(default_factory=list)
    has_picture: bool = False

    # Constant.
    tags: tuple[str, ...] = ("aswa", "weight-averaging", "model-averaging")

    @property
    def task(self) -> str:
        task: str = self.run.get("task", "")
        return task

    @property
    def kind(self) -> str:
        """The library that loads the model: a key of `LIBRARIES`."""
        if self.config.get("model_type") == "kge":
            return "kge"
        if "architecture" in self.config:
            return "timm"
        if "peft_type" in self.config:
            return "peft"
        return "transformers" if "model_type" in self.config else "torch"

    @property
    def base(self) -> str | None:
        """The model that was fine-tuned: given, or on the Hub according to the adapter's config."""
        named = self.config.get("base_model_name_or_path") if self.kind == "peft" else None
        # A folder of this machine means nothing to others.
        on_hub = (
            isinstance(named, str) and re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", named) and not Path(named).exists()
        )
        return self.base_model or (named if on_hub else None)

    @property
    def base_folder(self) -> str:
        """The name of the folder of a base model that is not on the Hub."""
        return Path(str(self.config.get("base_model_name_or_path") or "")).name or "base_model"

    @property
    def auto_class(self) -> str:
        """The class of transformers that loads the base model of an adapter."""
        return AUTO_CLASSES.get(str(self.config.get("task_type")), "AutoModel")

    @property
    def rule(self) -> str:
        """The rule that made the shipped weights; the strategy itself may have any name."""
        return self.run.get("rule") or self.shipped

    @property
    def origin(self) -> str:
        return f"{len(self.checkpoints)} checkpoints" if self.checkpoints else "a training run"

    @property
    def model_name(self) -> str:
        """The class of the model, or the timm name of an image classifier."""
        architectures = self.config.get("architectures") or [self.config.get("architecture")]
        return str(architectures[0] or self.run.get("model") or "model")

    @property
    def is_own_architecture(self) -> bool:
        """Whether it is an image classifier that timm only has with this package."""
        return self.kind == "timm" and self.model_name.endswith(OWN_ARCHITECTURES)

    @property
    def dataset(self) -> str | None:
        return self.run.get("dataset") or next(iter(self.datasets), None)

    @property
    def aswa(self) -> Trajectory:
        return self.trajectories.get(self.shipped if self.rule == "aswa" else "aswa", Trajectory())

    @property
    def decisions(self) -> dict[str, int]:
        """How often ASWA made each decision."""
        found = [decision.value for decision in self.aswa.decisions]
        return {name: found.count(name) for name in ("init", "soft", "hard", "reject")}

    @property
    def evaluations(self) -> int:
        """How often ASWA evaluated averaged weights, on top of the evaluations of the running model."""
        return sum(record.lookahead_score is not None for record in self.aswa)

    @property
    def members(self) -> int:
        return sum(alpha > 0 for alpha in self.alphas)

    @property
    def alpha_rows(self) -> list[tuple[str, float]]:
        """The weight of each snapshot that has one, by epoch or checkpoint; equal neighbors share a row."""
        rows: list[tuple[int, int, float]] = []
        for index, alpha in enumerate(self.alphas):
            if alpha <= 0:
                continue
            if rows and rows[-1][1] == index - 1 and rows[-1][2] == alpha:
                rows[-1] = (rows[-1][0], index, alpha)
            else:
                rows.append((index, index, alpha))
        names = self.checkpoints or [
            f"{record.index + 1 if record.epoch is None else record.epoch:g}"
            for record in self.trajectories.get(self.shipped, Trajectory())
        ]
        return [
            (names[first] if first == last else f"{names[first]}–{names[last]}", alpha) for first, last, alpha in rows
        ]

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics in the tables: those of the task if the run has them, else the one that decided."""
        found = self.run.get("strategies", {}).get(self.shipped, {}).get("validation", {})
        return tuple(name for name in SHOWN.get(self.task, ()) if name in found) or (self.metric,)

    def results(self, split: str) -> list[tuple[str, list[float | None]]]:
        """Returns a row of metrics for each strategy that has any for this split, in a fixed order."""
        strategies = self.run.get("strategies", {})
        names = [name for name in [*LABELS, *strategies] if split in strategies.get(name, {})]
        return [
            (name, [strategies[name][split].get(metric) for metric in self.metrics]) for name in dict.fromkeys(names)
        ]

    @property
    def chosen(self) -> str:
        """The strategies in the tables whose weights were chosen by their validation scores."""
        rules = {name: self.rule if name == self.shipped else name for name, _ in self.results("validation")}
        return _listed([name for name, rule in rules.items() if rule in CHOSEN_BY_VALIDATION])

    @property
    def verdict(self) -> str:
        """Says whether the shipped weights are the best of the run, on the test split if there is one."""
        split = "test" if self.results("test") else "validation"
        scores = {name: self._goodness(values[0]) for name, values in self.results(split)}
        if self.shipped not in scores or len(scores) < 2:
            return ""
        own = scores.pop(self.shipped)
        better = [name for name, score in scores.items() if score > own]
        level = [name for name, score in scores.items() if score == own]
        where, ours, metric = f"On the {split} split", _escaped(label(self.shipped)), _escaped(self.metrics[0])
        if better:
            return f"{where} {ours} did **not** win: {_listed(better)} did better in {metric}."
        if level:
            return f"{where} no strategy did better in {metric}, and {_listed(level)} did equally well."
        return f"{where} {ours} did best of all in {metric}."

    def _goodness(self, value: float | None) -> float:
        if value is None or not math.isfinite(value):
            return -math.inf
        return value if self.greater_is_better or self.metrics[0] != self.metric else -value


def read_card_data(folder: str | Path, repo_id: str, **given: Any) -> CardData:
    """Reads the data of a card from a run folder or a repository's files."""
    folder = Path(folder)
    trajectories, about = load_trajectories(folder / TRAJECTORY)
    records = read_object(folder / TRAJECTORY)["strategies"]
    run = decode_numbers(about.get("run") or {})
    if "applied" not in about and "rule" not in run:
        raise ValueError(f"{folder / TRAJECTORY} has no 'applied': which strategy's weights are shipped is unknown.")
    shipped = about.get("applied") or run.get("rule") or "last"
    run.setdefault("strategies", _last_scores(trajectories, about["metric"]))
    configs = [folder / name for name in (ADAPTER_CONFIG, CONFIG) if (folder / name).exists()]
    return CardData(
        repo_id=repo_id,
        shipped=shipped,
        metric=about["metric"],
        greater_is_better=about["greater_is_better"],
        trajectories=trajectories,
        alphas=records.get(shipped, {}).get("alphas", []),
        run=run,
        config=read_object(configs[0]) if configs else {},
        checkpoints=about.get("checkpoints", []),
        has_picture=(folder / PICTURE).exists(),
        **given,
    )


def _last_scores(trajectories: dict[str, Trajectory], metric: str) -> dict[str, Any]:
    """Returns the results of a run that only saved its decisions: the validation score of each strategy."""
    scores = {name: records[-1].score for name, records in trajectories.items() if records}
    return {name: {"validation": {metric: score}} for name, score in scores.items() if score is not None}


def render(data: CardData) -> ModelCard:
    """Renders the card as a `huggingface_hub.ModelCard`: metadata and text."""
    # Names of tasks are those of pipelines, except our own.
    pipeline = PIPELINES.get(data.task, data.task) or None
    dataset = data.run.get("dataset")
    datasets = [*data.datasets, *([dataset] if dataset and "/" in dataset else [])]
    metadata = ModelCardData(
        library_name=LIBRARIES[data.kind],
        license=data.license,
        language=data.language,
        base_model=data.base,
        pipeline_tag=pipeline,
        tags=[*data.tags, *([data.task] if data.task in PIPELINES else []), *data.more_tags],
        datasets=list(dict.fromkeys(datasets)) or None,
        metrics=[metric for metric in data.metrics if metric],
        model_name=data.repo_id.split("/")[-1],
        eval_results=_eval_results(data) or None,
    )
    environment = jinja2.Environment(finalize=_escaped, keep_trailing_newline=True)
    environment.filters |= {"raw": _Raw, "code": _code, "identifier": _identifier}
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    content = template.render(card_data=metadata.to_yaml(), card=data, label=label, shown=_shown, times=_times)
    # The template's conditions leave empty lines.
    return ModelCard(re.sub(r"\n{3,}", "\n\n", content).rstrip() + "\n")


class _Raw(str):
    """Text that is Markdown already."""

    __slots__ = ()


def _escaped(value: Any) -> Any:
    """Escapes what a template inserts: a name from a file must not become HTML or Markdown."""
    if isinstance(value, (_Raw, jinja2.Undefined)):
        return value
    text = html.escape(re.sub(r"\s+", " ", str(value)), quote=False)
    return re.sub(r"([\\`*|\[\]])", r"\\\1", text)


def _code(value: Any) -> str:
    """Returns text for a block of code, which it cannot end."""
    return _Raw(str(value).replace("```", "'''"))


def _identifier(value: Any) -> str:
    """Returns a name for a line of code."""
    return _Raw(re.sub(r"[^\w.-]", "_", str(value)))


def _eval_results(data: CardData) -> list[EvalResult]:
    """Returns the shipped weights' results for the model index by split; empty without a task or a dataset."""
    shipped = data.run.get("strategies", {}).get(data.shipped, {})
    if not data.task or not data.dataset:
        return []
    return [
        EvalResult(
            task_type=data.task,
            dataset_type=data.dataset,
            dataset_name=data.dataset,
            dataset_config="default",
            dataset_split=split,
            metric_type=metric,
            metric_name=f"{split} {metric}",
            metric_value=shipped[split][metric],
        )
        for split in ("validation", "test")
        for metric in data.metrics
        if math.isfinite(shipped.get(split, {}).get(metric, math.nan))
    ]


def label(strategy: str) -> str:
    """Returns the name of a strategy in a card."""
    return LABELS.get(strategy, strategy)


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _listed(names: list[str]) -> str:
    labels = [_escaped(label(name)) for name in names]
    return " and ".join(part for part in (", ".join(labels[:-1]), *labels[-1:]) if part)
