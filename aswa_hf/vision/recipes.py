"""How the SWA paper trains on CIFAR: its learning rate schedule, and its hyperparameters by architecture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from aswa_hf._utils.checks import check_whole_number
from aswa_hf._utils.names import did_you_mean


@dataclass(frozen=True)
class Recipe:
    """SGD with momentum, the SWA paper's schedule, and FGE from a point of the same run.

    `swa_start` is the first epoch, counted from 1, whose weights SWA averages; half of it is trained at `lr`, and at
    nine tenths of it the learning rate has fallen to `swa_lr`. The rate changes with every step; in the paper's
    code it changes with every epoch. FGE starts from the weights after `fge_start` of the run, 80 %, and trains for
    the rest of it, with cycles of `fge_cycle` epochs between `fge_high` and `fge_low`: it costs a fifth more.
    """

    lr: float
    weight_decay: float
    epochs: int
    swa_start: int
    swa_lr: float
    fge_high: float
    fge_low: float = 5e-4
    fge_cycle: float = 4
    fge_start: float = 0.8
    momentum: float = 0.9
    batch_size: int = 128

    def lasting(self, epochs: int) -> Recipe:
        """The same for a run of `epochs`: SWA starts at the same fraction of it, FGE has time for two snapshots."""
        check_whole_number("epochs", epochs)
        shorter = replace(self, epochs=epochs, swa_start=max(1, round(self.swa_start * epochs / self.epochs)))
        return replace(shorter, fge_cycle=min(self.fge_cycle, shorter.fge_epochs / 1.5))

    def at_rate(self, lr: float) -> Recipe:
        """The same at another learning rate: the rates of SWA and FGE keep their proportion to it."""
        if lr == self.lr:
            return self
        factor = lr / self.lr
        rates = {name: getattr(self, name) * factor for name in ("swa_lr", "fge_high", "fge_low")}
        return replace(self, lr=lr, **rates)

    def summary(self) -> str:
        """Describes a run in one line."""
        return (
            f"{self.epochs} epochs in batches of {self.batch_size}, SGD with learning rate {self.lr:g}, momentum "
            f"{self.momentum:g} and weight decay {self.weight_decay:g}; SWA from epoch {self.swa_start} at "
            f"{self.swa_lr:g}"
        )

    @property
    def fge_epoch(self) -> int:
        """After how many epochs FGE starts; at least one remains for it."""
        return min(round(self.fge_start * self.epochs), self.epochs - 1)

    @property
    def fge_epochs(self) -> int:
        """How long FGE trains."""
        return self.epochs - self.fge_epoch


# Budgets of 1.5 of plain training, as in the SWA paper's tables. FGE's cycles and rates are chosen after its paper:
# cycles of 2 epochs for VGG and 4 for ResNets. The commands in its authors' code have cycles of 2 and a lowest rate of
# 0.01 throughout. There it starts from 80 % of plain training, here from 80 % of the whole budget.
_VGG = Recipe(lr=0.05, weight_decay=5e-4, epochs=300, swa_start=161, swa_lr=0.01, fge_high=0.01, fge_cycle=2)
_PRERESNET = Recipe(lr=0.1, weight_decay=3e-4, epochs=225, swa_start=126, swa_lr=0.01, fge_high=0.05)
# The one difference between the datasets: pre-activation ResNets have a higher SWA learning rate on CIFAR-100.
_PRERESNET_100 = replace(_PRERESNET, swa_lr=0.05)
_WRN = Recipe(lr=0.1, weight_decay=5e-4, epochs=300, swa_start=161, swa_lr=0.05, fge_high=0.05)

RECIPES: dict[str, Recipe] = {
    "vgg16": _VGG,
    "vgg16_bn": _VGG,
    "vgg19": _VGG,
    "vgg19_bn": _VGG,
    "preresnet20": _PRERESNET,
    "preresnet110": _PRERESNET,
    "preresnet164": _PRERESNET,
    "preresnet20_cifar100": _PRERESNET_100,
    "preresnet110_cifar100": _PRERESNET_100,
    "preresnet164_cifar100": _PRERESNET_100,
    "wrn28_10": _WRN,
}
DEFAULT_RECIPE = "preresnet20"


def find_recipe(name: str | None, model: str, num_classes: int) -> tuple[str, Recipe]:
    """The named recipe, or by default the one of the model's architecture, with its name."""
    if name is None:
        architecture = model.removesuffix("_cifar")
        candidates = [architecture + "_cifar100"] if num_classes == 100 else []
        name = next((key for key in (*candidates, architecture) if key in RECIPES), DEFAULT_RECIPE)
    if name not in RECIPES:
        hint = did_you_mean(name, RECIPES)
        raise ValueError(f"There is no recipe {name!r}. {hint}Expected one of {', '.join(RECIPES)}.")
    return name, RECIPES[name]


def swa_schedule(optimizer: Optimizer, steps: float, *, swa_lr: float | None = None, last_epoch: int = -1) -> LambdaLR:
    """The SWA paper's learning rate: constant, then falling linearly, then constant at `swa_lr`.

    It falls between 50 % and 90 % of `steps`, counted in calls of `step()`: epochs or optimizer steps. With the
    length of the whole run this is the schedule the paper plots; its code takes the epoch at which averaging starts
    (`swa_schedule(optimizer, 161, swa_lr=0.05)` in a run of 300). Without `swa_lr` it ends at a hundredth of the
    initial learning rate, the paper's plain SGD.

    >>> scheduler = swa_schedule(optimizer, epochs, swa_lr=0.05)
    """
    initial = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
    if steps <= 0 or min(initial) <= 0 or (swa_lr is not None and swa_lr < 0):
        raise ValueError(
            f"steps and the initial learning rate must be above 0 and swa_lr not below it, got steps={steps}, "
            f"lr={min(initial)}, swa_lr={swa_lr}."
        )
    ratios = [0.01 if swa_lr is None else swa_lr / lr for lr in initial]

    def factor_down_to(ratio: float) -> Callable[[int], float]:
        def factor(done: int) -> float:
            t = done / steps
            if t <= 0.5:
                return 1.0
            return 1.0 - (1.0 - ratio) * (t - 0.5) / 0.4 if t <= 0.9 else ratio

        return factor

    return LambdaLR(optimizer, [factor_down_to(ratio) for ratio in ratios], last_epoch)
