"""`KGERun` and `ImageRun`: every setting of a training run, with its default, its limits and its help text.

A class here is the only source for the Python call, the flags of `aswa-hf train`, settings.json, the command in a card
and the grid of `aswa-hf reproduce`. Nothing heavy is imported: the command line builds its flags from this module.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from aswa_hf._utils.defaults import BN_BATCHES
from aswa_hf._utils.files import LARGEST, read_json
from aswa_hf._utils.names import did_you_mean, parse_strategy, split_strategies, strategy_text
from aswa_hf.run_folder import check_unchanged

STRATEGY_NAMES = (
    "aswa",
    "dense-aswa",
    "swa",
    "ema",
    "best",
    "last",
    "lawa",
    "best-ema",
    "bema",
    "swad",
    "swad-max",
    "power-ema",
    "swa-all",
)
DEFAULT_STRATEGIES = ("aswa", "dense-aswa", "swa", "ema", "best", "last")
SCORERS = ("distmult", "complex", "qmult", "keci", "rescal", "tucker")
SCHEMES = ("kvsall", "1vsall", "negative_sampling", "balanced_sampling")
LOSSES = {
    "kvsall": ("binary", "softmax", "softmax-query"),
    "1vsall": ("softmax",),
    "negative_sampling": ("binary", "softmax"),
    "balanced_sampling": ("softmax",),
}
OPTIMIZERS = ("adam", "adamw", "adagrad", "adagrad-rowwise")
SCHEDULES = ("constant", "linear", "cosine", "plateau")
INITIALIZERS = ("xavier_normal", "xavier_uniform", "normal", "uniform")
PRECISIONS = ("auto", "fp32", "bf16", "fp16")

PLATEAU, SAMPLING, KECI = ("schedule", "plateau"), ("scheme", "negative_sampling"), ("model", "keci")
RANGED = ("initializer", "normal", "uniform")

R = TypeVar("R", bound="TrainingRun")


class SettingError(ValueError):
    """Raised for a setting outside its limits, with the name of the setting and the problem."""

    def __init__(self, name: str, problem: str):
        super().__init__(f"{name} {problem}")
        self.name, self.problem = name, problem


@dataclass(frozen=True)
class Setting:
    """A field of a run: its type, default, help text and limits."""

    name: str
    kind: type
    optional: bool
    default: Any
    help: str
    least: float | None = None
    below: float = math.inf
    choices: tuple[str, ...] = ()
    only_on: bool = False
    """Whether its flag can only turn it on."""
    fixed: bool = True
    """Whether a resumed run must have the same value."""
    needs: tuple[str, ...] | None = None
    """Another setting and its values, without one of which this one has no effect."""
    none: int | None = None
    """The value that stands for None where None is not the default."""

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    def check(self, value: Any) -> Any:
        """Returns the value as the run stores it; raises `SettingError` if it is outside the limits."""
        if self.optional and (value is None or (self.none is not None and value == self.none)):
            return None
        if self.kind is tuple:
            return self._check_names(value)
        accepted: Any = (int, float) if self.kind is float else self.kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and self.kind is not bool):
            raise SettingError(self.name, f"must be {self._expected()}, got {value!r}.")
        if self.kind in (int, float) and not (-math.inf if self.least is None else self.least) <= value < self.below:
            raise SettingError(self.name, f"must be {self._expected()}, got {value!r}.")
        if isinstance(value, int) and abs(value) >= LARGEST:
            raise SettingError(self.name, f"must be {self._expected()}, got one that is too large.")
        if self.choices and value not in self.choices:
            raise SettingError(self.name, unknown(value, self.choices))
        return value

    def _check_names(self, value: Any) -> tuple[str, ...]:
        texts = split_strategies(value) if isinstance(value, str) else value
        if isinstance(value, Mapping) and all(isinstance(options, Mapping) for options in value.values()):
            texts = [strategy_text(name, options) for name, options in value.items()]
        if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
            raise SettingError(self.name, f"must be a list of names from {', '.join(self.choices)}, got {value!r}.")
        found: dict[str, str] = {}
        for text in (text.strip() for text in texts if text.strip()):
            try:
                name, options = parse_strategy(text)
                if name not in self.choices:
                    raise SettingError(self.name, unknown(name, self.choices))
                if name in found:
                    raise SettingError(self.name, f"contains {name!r} twice.")
                if options:
                    # Only here: it takes seconds to import, and names alone do not need it.
                    from aswa_hf.comparison import named_factories

                    named_factories({name: options})
            except SettingError:
                raise
            except (TypeError, ValueError) as error:
                raise SettingError(self.name, f"has the invalid value {text!r}: {error}") from None
            found[name] = strategy_text(name, options)
        if not found:
            raise SettingError(self.name, f"must name at least one of {', '.join(self.choices)}, got {value!r}.")
        return tuple(found.values())

    def _expected(self) -> str:
        kinds = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}
        limits = [f"of at least {self.least:g}"] if self.least is not None else []
        limits += [f"below {self.below:g}"] if self.below < math.inf else []
        return " ".join([kinds[self.kind], *limits, *(["or None"] if self.optional else [])])

    def arguments(self, value: Any) -> list[str]:
        """The arguments that set this value on the command line."""
        if value is None:
            value = self.none
        if isinstance(value, bool):
            return [self.flag if value else f"--no-{self.name.replace('_', '-')}"]
        return [self.flag, ",".join(value) if isinstance(value, tuple) else str(value)]


def unknown(name: Any, known: Sequence[str]) -> str:
    """The problem with an unknown name, with the nearest known one."""
    return f"has the unknown value {name!r}. {did_you_mean(name, known)}Expected one of {', '.join(known)}."


def setting(help: str, default: Any = dataclasses.MISSING, **limits: Any) -> Any:
    """A field of a run; `limits` are those of `Setting`."""
    return field(default=default, metadata={"help": help, **limits})


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """The settings that all runs have."""

    kind: ClassVar[str]
    task: ClassVar[str]
    metric: ClassVar[str]

    dataset: str = setting("The data to train on.")
    model: str = setting("The model to train.")
    strategies: tuple[str, ...] = setting(
        "Strategies to compare, also with options, ema(decay=0.9995).",
        DEFAULT_STRATEGIES,
        choices=STRATEGY_NAMES,
    )
    apply: str | None = setting(
        "Strategy whose weights are saved; auto is the best on validation (default: auto, or the first --strategies).",
        None,
        choices=("auto", *STRATEGY_NAMES),
    )
    seed: int = setting("Seed for the weights and the batches.", 0, least=0)
    keep: int = setting("Number of checkpoints to keep; one is written per tenth of the run.", 1, least=1, fixed=False)

    def __post_init__(self) -> None:
        for one in self.settings():
            object.__setattr__(self, one.name, one.check(getattr(self, one.name)))
        if self.apply not in (None, "auto", *self.strategy_names):
            expected = ", ".join(["auto", *self.strategy_names])
            raise SettingError("apply", f"must be one of the strategies of the run ({expected}), got {self.apply!r}.")
        for one in self.settings():
            if (
                one.needs
                and getattr(self, one.name) != one.default
                and getattr(self, one.needs[0]) not in one.needs[1:]
            ):
                name, *values = one.needs
                raise SettingError(
                    one.name, f"is only for {name} {' or '.join(values)}, and {name} is {getattr(self, name)}."
                )

    @classmethod
    def settings(cls) -> Iterator[Setting]:
        """The fields of this kind of run, followed by those that all runs have."""
        hints = get_type_hints(cls)
        fields = {one.name: one for one in dataclasses.fields(cls)}
        for name in dict.fromkeys([*inspect.get_annotations(cls), *fields]):
            if name in fields:  # and not a class variable
                hint, one = hints[name], fields[name]
                kinds = (hint,) if get_origin(hint) is tuple else get_args(hint) or (hint,)
                kind = next(kind for kind in kinds if kind is not NoneType)
                yield Setting(name, get_origin(kind) or kind, NoneType in kinds, one.default, **one.metadata)

    @classmethod
    def from_settings(cls: type[R], content: Mapping[str, Any]) -> R:
        """The run that settings.json describes; settings that an older version did not write have their defaults."""
        names = {one.name for one in cls.settings()}
        given = {name: value for name, value in content.items() if name in names}
        dataset = content.get("dataset")
        if isinstance(dataset, Mapping):
            given["dataset"] = dataset.get("source") or dataset.get("name")
        return cls(**given)

    @property
    def dataset_name(self) -> str:
        """The name of the dataset; for a folder, the last part of its path."""
        path = Path(self.dataset).expanduser()
        return path.resolve().name if path.is_dir() or path.is_absolute() else self.dataset

    @property
    def strategy_names(self) -> list[str]:
        """The names of the strategies, without their options."""
        return [parse_strategy(text)[0] for text in self.strategies]

    @property
    def shipped(self) -> str:
        """The strategy whose weights are saved, or "auto"; by default the first of those that the user has chosen."""
        return self.apply or ("auto" if self.strategies == DEFAULT_STRATEGIES else self.strategy_names[0])

    @property
    def name(self) -> str:
        """The default name of the run's folder."""
        return "-".join([self.dataset_name.lower().replace("/", "-"), self.model, str(self.seed)])

    def to_settings(self, sizes: Mapping[str, int], processes: int) -> dict[str, Any]:
        """The content of settings.json: all settings that must not change when the run is resumed, and its epochs."""
        content = {one.name: getattr(self, one.name) for one in self.settings() if one.fixed or one.name == "epochs"}
        content = {name: list(value) if isinstance(value, tuple) else value for name, value in content.items()}
        path = Path(self.dataset).expanduser()
        source = str(path.resolve()) if path.is_dir() else self.dataset
        dataset = {"name": self.dataset_name, "source": source, **sizes}
        return content | {"dataset": dataset, "num_processes": processes}

    def describe(self, output_dir: str | Path) -> dict[str, Any]:
        """The description of the run in results.json and the card."""
        settings = self.to_settings({}, 1) | {"dataset": self.dataset_name}
        del settings["num_processes"]
        about = {"task": self.task, "dataset": self.dataset_name, "model": self.model, "seed": self.seed}
        about |= {"epochs": settings["epochs"], "settings": settings, "command": self.command(output_dir)}
        return about | ({"apply": self.shipped} if self.shipped == "auto" else {})

    def command(self, output_dir: str | Path) -> str:
        """The command that repeats the run."""
        words = ["aswa-hf", "train", self.kind]
        for one in self.settings():
            value = getattr(self, one.name)
            if value != one.default and (value is not None or one.none is not None):
                words += one.arguments(value)
        return shlex.join([*words, "--output-dir", str(output_dir)])


@dataclass(frozen=True, kw_only=True)
class KGERun(TrainingRun):
    """Training of a link predictor on a knowledge graph; the defaults are the paper's settings.

    >>> train_kge(KGERun(dataset="countries", model="complex"))
    """

    kind: ClassVar[str] = "kge"
    task: ClassVar[str] = "link-prediction"
    metric: ClassVar[str] = "mrr"

    dataset: str = setting("countries[-s1|-s2|-s3], a folder of triples, or a Hub dataset.")
    model: str = setting("distmult, complex, qmult, keci, rescal or tucker.", "complex", choices=SCORERS)
    dim: int = setting("Real numbers per entity.", 128, least=1)
    epochs: int = setting("Number of epochs.", 256, least=1, fixed=False)
    batch_size: int = setting("Queries (or triples) per step and process.", 1024, least=1)
    lr: float = setting("Learning rate.", 0.1, least=0)
    optimizer: str = setting("adam, adamw, adagrad or adagrad-rowwise.", "adam", choices=OPTIMIZERS)
    weight_decay: float = setting("Weight decay of adamw, L2 of the others.", 0.0, least=0)
    schedule: str = setting(
        "Learning rate over the run: constant, linear, cosine, or plateau of the validation MRR.",
        "constant",
        choices=SCHEDULES,
    )
    plateau_factor: float = setting(
        "Plateau: what the learning rate is multiplied by.", 0.95, least=0, below=1, needs=PLATEAU
    )
    plateau_patience: int = setting(
        "Plateau: evaluations without improvement that are tolerated.", 4, least=0, needs=PLATEAU
    )
    scheme: str = setting(
        "kvsall, 1vsall, negative_sampling, or balanced_sampling (with --shard-entities, for very large graphs).",
        "kvsall",
        choices=SCHEMES,
    )
    loss: str | None = setting(
        "binary, softmax (per triple) or softmax-query (per query); default: binary, for 1vsall and balanced_sampling "
        "softmax.",
        None,
        choices=LOSSES["kvsall"],
    )
    negatives: int = setting(
        "Negative or balanced sampling: entities that a triple is compared with.",
        32,
        least=1,
        needs=(*SAMPLING, "balanced_sampling"),
    )
    shared_negatives: bool = setting("Negative sampling: draw once per batch.", False, only_on=True, needs=SAMPLING)
    adversarial_temperature: float = setting(
        "Negative sampling, binary loss: weight negatives by their scores, at this temperature (0: equal weights).",
        0.0,
        least=0,
        needs=SAMPLING,
    )
    label_smoothing: float = setting("Smoothing of the training labels.", 0.0, least=0, below=1)
    entity_dropout: float = setting("Dropout of entities, in queries and as candidates.", 0.0, least=0, below=1)
    relation_dropout: float = setting("Dropout of relations.", 0.0, least=0, below=1)
    query_dropout: float = setting("Dropout of query vectors.", 0.0, least=0, below=1)
    regularizer: str | None = setting("n3 or l2, over head, relation and tail.", None, choices=("n3", "l2"))
    regularization: float = setting("Weight of the regularizer.", 0.0, least=0)
    relation_prediction: float = setting("Weight of a loss that predicts relations.", 0.0, least=0)
    initializer: str = setting(f"{', '.join(INITIALIZERS)}.", "xavier_normal", choices=INITIALIZERS)
    initializer_range: float = setting("normal: standard deviation; uniform: limit.", 0.1, least=0, needs=RANGED)
    shard_entities: bool = setting(
        "Spread the rows of the entity table over the processes; --batch-size is then that of all of them.",
        False,
        only_on=True,
    )
    eval_every: int = setting("Epochs from one decision to the next.", 1, least=1)
    p: int = setting("Keci: number of basis vectors that square to +1.", 0, least=0, needs=KECI)
    q: int = setting("Keci: number of basis vectors that square to −1.", 1, least=0, needs=KECI)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss is not None and self.loss not in LOSSES[self.scheme]:
            raise SettingError(
                "loss", f"must be {' or '.join(LOSSES[self.scheme])} for {self.scheme}, got {self.loss!r}."
            )
        if self.adversarial_temperature:
            # What it replaces has neither a softmax nor smoothed labels.
            if self.training_loss != "binary":
                raise SettingError("adversarial_temperature", f"is only for loss binary, and loss is {self.loss}.")
            if self.label_smoothing:
                raise SettingError(
                    "label_smoothing", f"must be 0 with adversarial weights, got {self.label_smoothing}."
                )
        if self.scheme == "balanced_sampling":
            self._check_balanced_sampling()
        if bool(self.regularization) != (self.regularizer is not None):
            name, other = ("regularizer", "regularization")[:: 1 if self.regularization else -1]
            raise SettingError(name, f"must be given with --{other} {getattr(self, other)}.")
        blocks = {"complex": 2, "qmult": 4, "keci": 1 + self.p + self.q}.get(self.model, 1)
        if self.dim % blocks:
            raise SettingError("dim", f"must be a multiple of {blocks} for {self.model}, got {self.dim}.")
        if self.epochs % self.eval_every:
            raise SettingError("eval_every", f"must divide the {self.epochs} epochs, got {self.eval_every}.")

    def _check_balanced_sampling(self) -> None:
        if not self.shard_entities:
            raise SettingError("scheme", "balanced_sampling must be used with --shard-entities.")
        if self.optimizer not in ("adagrad", "adagrad-rowwise"):
            raise SettingError(
                "optimizer", f"must be adagrad-rowwise or adagrad for balanced_sampling, got {self.optimizer!r}."
            )
        if self.model == "tucker":
            raise SettingError("model", "must not be 'tucker' for balanced_sampling: all triples share its core.")
        for name in ("weight_decay", "label_smoothing", "entity_dropout", "regularization", "relation_prediction"):
            if getattr(self, name):
                raise SettingError(name, f"must be 0 for balanced_sampling, got {getattr(self, name)}.")

    @property
    def training_loss(self) -> str:
        """The loss, which the scheme determines if none is given."""
        return self.loss or LOSSES[self.scheme][0]


@dataclass(frozen=True, kw_only=True)
class ImageRun(TrainingRun):
    """Training of a timm model on images; None means the value of the recipe, the model or the dataset.

    >>> train_image(ImageRun(dataset="digits", epochs=20, val_ratio=0.3))
    """

    kind: ClassVar[str] = "image"
    task: ClassVar[str] = "image-classification"
    metric: ClassVar[str] = "accuracy"

    dataset: str = setting("digits, a folder of parquet files or images, or a Hub dataset.")
    model: str = setting("A timm model, or vgg16_bn_cifar, … of this package.", "preresnet20_cifar")
    recipe: str | None = setting("Hyperparameters: vgg16, wrn28_10, … (default: the model's).", None)
    epochs: int | None = setting("Number of epochs (default: the recipe's).", None, least=1, fixed=False)
    batch_size: int | None = setting("Images per step and process (default: the recipe's).", None, least=1)
    lr: float | None = setting("Initial learning rate (default: the recipe's); scales SWA's and FGE's.", None, least=0)
    fge: bool = setting("Also run Fast Geometric Ensembling.", False, only_on=True, fixed=False)
    fge_cycle: float | None = setting(
        "Epochs between FGE snapshots (default: the recipe's).", None, least=0, fixed=False
    )
    image_size: int | None = setting("Resize images to this size (default: the model's).", None, least=8)
    augment: bool | None = setting("Random crops and flips (default: on, except for digits).", None)
    val_ratio: float = setting("Fraction of the training images used for validation.", 0.05)
    train_size: int | None = setting("Number of training images, stratified by class (default: all).", None, least=1)
    bn_batches: int | None = setting("Batches to recalibrate BatchNorm on; 0 means all.", BN_BATCHES, least=0, none=0)
    precision: str = setting("auto, fp32, bf16 or fp16.", "auto", choices=PRECISIONS)
    seed: int = setting("Seed for the split, the weights and the batches.", 0, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.val_ratio < 1:
            raise SettingError("val_ratio", f"must be above 0 and below 1, got {self.val_ratio:g}.")


@dataclass
class _Dataset:
    name: str
    source: str | None = None


@dataclass
class _File:
    """The schema of settings.json; the other fields are checked by the classes above."""

    dataset: _Dataset


def read_settings(path: Path) -> dict[str, Any]:
    """Returns the content of settings.json."""
    content: dict[str, Any] = read_json(path, _File)
    return content


def run_of(content: Mapping[str, Any]) -> KGERun | ImageRun:
    """The run of either kind that settings.json describes."""
    return (ImageRun if "recipe" in content else KGERun).from_settings(content)


def read_run(path: Path) -> KGERun | ImageRun:
    """The run of either kind that a settings.json describes."""
    try:
        run = run_of(read_settings(path))
    except SettingError as error:
        raise ValueError(f"{path}: {error}") from None
    check_unchanged(path.parent, path.name)
    return run
