"""The paper's tables, and those of this project, as configurations: the runs that each needs, and its numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aswa_hf._utils.names import did_you_mean

KGE, IMAGES = "link-prediction", "image-classification"

MODELS = {
    KGE: {
        "distmult": "DistMult",
        "complex": "ComplEx",
        "qmult": "QMult",
        "keci": "Keci",
        "keci11": "Keci Cl(1,1)",
        "rescal": "RESCAL",
        "tucker": "TuckER",
    },
    IMAGES: {
        "vgg16_cifar": "VGG16",
        "vgg16_bn_cifar": "VGG16BN",
        "vgg19_cifar": "VGG19",
        "vgg19_bn_cifar": "VGG19BN",
        "preresnet20_cifar": "ResNet-20",
        "preresnet110_cifar": "ResNet-110",
        "preresnet164_cifar": "ResNet-164",
        "wrn28_10_cifar": "WRN-28-10",
    },
}
# Models that are more than a name: settings of a run. d must be a multiple of 1 + p + q.
VARIANTS: dict[str, dict[str, Any]] = {"keci11": {"model": "keci", "p": 1, "q": 1, "dim": 126}}
# The strategies of a run; the weights of the first are saved.
COMPARED = {
    KGE: ("aswa", "swa-all", "swa", "ema", "best", "last"),
    IMAGES: ("aswa", "swa", "ema", "best", "last"),
}
ALL_STRATEGIES = (
    "aswa", "dense-aswa", "swa", "ema", "best-ema", "bema", "power-ema", "lawa", "swad", "swad-max", "best", "last",
)  # fmt: skip
ROBUSTNESS = ("aswa", "dense-aswa", "swa", "ema", "best", "last")
# The strategies of the runs of recipes.
TUNED = ("aswa", "dense-aswa", "swa", "ema", "best-ema", "best", "last")
# The names that load_kg and load_cifar accept without a folder.
BUILT_IN = {KGE: ("countries", "countries-s1", "countries-s2", "countries-s3"), IMAGES: ("digits",)}
ON_THE_HUB = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100"}

RANKING = {"mrr": "MRR", "hits@1": "@1", "hits@3": "@3", "hits@10": "@10"}
SHAPES = {shape: shape for shape in ("2p", "3p", "2i", "3i", "ip", "pi", "2u", "up")}
# The shapes of the paper's table; it has no column for 2i.
PAPER_SHAPES = tuple(shape for shape in SHAPES if shape != "2i")
LONG_RUNS = tuple(range(300, 1001, 100))


@dataclass(frozen=True)
class Sweep:
    """The learning rates that runs on a dataset are repeated at, and their other settings."""

    rates: tuple[float, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """A table. Without `epochs`, the lengths of its runs are those of the models' recipes."""

    name: str
    title: str
    task: str
    datasets: tuple[str, ...]
    models: tuple[str, ...]
    columns: dict[str, str]
    figures: tuple[str, ...]
    epochs: tuple[int, ...] = ()
    val_ratios: tuple[float, ...] = (0.05,)
    fge: bool = False
    all_strategies: bool = False
    """Whether it compares all strategies, and ranks them."""
    sweeps: Mapping[str, Sweep] = field(default_factory=dict)
    """The learning rates of its runs by dataset (as `plain` spells it); "" is for datasets that are not named."""
    of_recipes: bool = False
    """Whether its runs are those of recipes, beside the published numbers."""

    @property
    def strategies(self) -> tuple[str, ...]:
        """The strategies of its runs; the weights of the first are saved."""
        if self.by_rates:
            return ROBUSTNESS
        if self.of_recipes:
            return TUNED
        return ALL_STRATEGIES if self.all_strategies else COMPARED[self.task]

    @property
    def by_rates(self) -> bool:
        """Whether each column is a learning rate."""
        return bool(self.sweeps)

    def sweep(self, dataset: str) -> Sweep:
        """The learning rates of the runs on a dataset."""
        return self.sweeps.get(plain(dataset), self.sweeps[""])

    @property
    def by_epochs(self) -> bool:
        """Whether each column is a number of epochs."""
        return not self.columns and not self.by_rates


_KGE_MODELS = ("distmult", "complex", "qmult", "keci")
_LINKS = Table(
    "link-prediction",
    "Link prediction on the test split",
    KGE,
    ("WN18RR", "FB15K-237", "YAGO3-10"),
    _KGE_MODELS,
    RANKING,
    tuple(RANKING),
    epochs=(256,),
)
_CIFAR_10 = Table(
    "cifar-epochs",
    "Test accuracy (%) by the number of epochs",
    IMAGES,
    ("CIFAR-10",),
    ("preresnet164_cifar", "vgg16_cifar", "vgg16_bn_cifar"),
    {},
    tuple(map(str, LONG_RUNS)),
    epochs=LONG_RUNS,
)
# A factor of 100 in five learning rates; on CoDEx-S the settings of its paper, whose learning rate is 0.00034.
_RATES = (0.001, 0.003, 0.01, 0.03, 0.1)
_CODEX = {
    "dim": 512,
    "loss": "softmax",
    "batch_size": 256,
    "entity_dropout": 0.08,
    "relation_dropout": 0.06,
    "initializer": "xavier_normal",
}
TABLES = {
    table.name: table
    for table in (
        Table(
            "cifar",
            "Test accuracy (%)",
            IMAGES,
            ("CIFAR-100", "CIFAR-10"),
            ("vgg16_bn_cifar", "preresnet164_cifar", "wrn28_10_cifar"),
            {"accuracy": "accuracy"},
            ("accuracy",),
            fge=True,
        ),
        _CIFAR_10,
        replace(
            _CIFAR_10,
            name="cifar-ratios",
            title="Test accuracy (%) by the number of epochs and the share of validation images",
            models=("vgg16_cifar", "vgg16_bn_cifar"),
            val_ratios=(0.1, 0.2),
        ),
        _LINKS,
        replace(
            _LINKS,
            name="nell",
            title="Link prediction on NELL-995",
            datasets=("NELL-995-h100", "NELL-995-h75", "NELL-995-h50"),
        ),
        replace(
            _LINKS,
            name="multi-hop",
            title="MRR of the hard answers of multi-hop queries",
            datasets=("FB15K-237",),
            columns=SHAPES,
            figures=PAPER_SHAPES,
        ),
        replace(
            _LINKS,
            name="train-fit",
            title="Link prediction on the training split",
            datasets=("FB15K-237", "YAGO3-10"),
        ),
        replace(
            _LINKS,
            name="strategies",
            title="All strategies in the same runs: link prediction on the test split",
            datasets=("UMLS", "KINSHIP", "Countries-S1", "Countries-S2", "Countries-S3"),
            figures=(),
            all_strategies=True,
        ),
        replace(
            _LINKS,
            name="tuned",
            title="Recipes: link prediction on the test split, beside the published MRR",
            datasets=(),
            models=(),
            figures=(),
            epochs=(),
            of_recipes=True,
        ),
        replace(
            _CIFAR_10,
            name="strategies-images",
            title="All strategies in the same runs: test accuracy (%)",
            models=("preresnet20_cifar", "vgg16_cifar"),
            columns={"accuracy": "accuracy"},
            figures=(),
            epochs=(),
            all_strategies=True,
        ),
        replace(
            _LINKS,
            name="robustness",
            title="Test MRR by learning rate",
            datasets=("UMLS", "KINSHIP", "CoDEx-S", "FB15k-237"),
            models=("complex",),
            columns={},
            figures=(),
            epochs=(20,),
            sweeps={
                "codexs": Sweep((0.0003, 0.001, 0.003, 0.01, 0.03), _CODEX | {"epochs": 135}),
                "fb15k237": Sweep(_RATES, {"epochs": 8}),
                "": Sweep((0.003, 0.01, 0.03, 0.1, 0.3), {"epochs": 60}),
            },
        ),
        replace(
            _CIFAR_10,
            name="robustness-images",
            title="Test accuracy (%) by learning rate",
            models=("preresnet20_cifar",),
            figures=(),
            epochs=(10,),
            sweeps={"": Sweep((0.01, 0.03, 0.1, 0.3, 1.0))},
        ),
    )
}


def plain(name: str) -> str:
    """A name without differences in spelling: FB15K-237 and fb15k_237 are fb15k237."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find_table(name: str) -> Table:
    if name not in TABLES:
        hint = did_you_mean(name, TABLES)
        raise ValueError(f"There is no table {name!r}. {hint}Expected one of {', '.join(TABLES)}.")
    return TABLES[name]


def find_models(table: Table, names: list[str] | None) -> list[str]:
    """The models by name, where `vgg16` stands for `vgg16_cifar`; without names, those of the table."""
    known = MODELS[table.task]
    found = []
    for name in table.models if names is None else names:
        key = next((key for key in (name.lower(), f"{name.lower()}_cifar") if key in known), None)
        if key is None:
            hint = did_you_mean(name, [*known, *(one.removesuffix("_cifar") for one in known)])
            raise ValueError(f"--models: there is no {name!r}. {hint}Table {table.name} takes {', '.join(known)}.")
        found.append(key)
    return list(dict.fromkeys(found))


def find_dataset(table: Table, name: str, data_dir: Path) -> str:
    """The argument of load_kg or load_cifar for a dataset: a folder below `data_dir`, a built-in name or a Hub id."""
    for folder in (*sorted(data_dir.glob("*")), *sorted(data_dir.glob("*/*"))):
        if folder.is_dir() and plain(folder.name) == plain(name):
            return str(folder)
    if name.lower() in BUILT_IN[table.task]:
        return name.lower()
    if "/" in name:
        return name
    if table.task == IMAGES and plain(name) in ON_THE_HUB:
        return ON_THE_HUB[plain(name)]
    known = [*BUILT_IN[table.task], *(folder.name for folder in data_dir.glob("*") if folder.is_dir())]
    known += [one for other in TABLES.values() if other.task == table.task for one in other.datasets]
    hint = "" if name in known else did_you_mean(name, known)
    raise ValueError(
        f"{name} is missing: there is no folder of that name in {data_dir} or a folder below it. {hint}Put its files "
        f"into {data_dir / name}, or set --data-dir to its location, or give a Hub dataset (user/name) to --datasets."
    )
