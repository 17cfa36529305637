"""The runs that a table needs: their names, whether they are finished, and how they are trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from aswa_hf._utils.files import make_folder, read_json
from aswa_hf.experiments.settings import ImageRun, KGERun, read_settings
from aswa_hf.reproduce.tables import ALL_STRATEGIES, KGE, ROBUSTNESS, VARIANTS, Sweep, Table, plain
from aswa_hf.run_folder import (
    CONSOLE,
    RESULTS,
    SETTINGS,
    Measured,
    check_unchanged,
    epochs_done,
    last_trainer_checkpoint,
)


@dataclass(frozen=True)
class GridRun:
    """One training run of a grid, with the table's name of its dataset; tables share equal runs."""

    dataset: str
    settings: KGERun | ImageRun
    recipe: str = ""

    @property
    def model(self) -> str:
        """The table's name of the model, or that of the recipe."""
        if self.recipe:
            return self.recipe
        for name, settings in VARIANTS.items():
            if all(getattr(self.settings, key, None) == value for key, value in settings.items()):
                return name
        return self.settings.model

    @property
    def seed(self) -> int:
        return self.settings.seed

    @property
    def epochs(self) -> int:
        return int(self.settings.epochs or 0)

    @property
    def val_ratio(self) -> float | None:
        return getattr(self.settings, "val_ratio", None)

    @property
    def train_size(self) -> int | None:
        return getattr(self.settings, "train_size", None)

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        parts = [self.dataset.lower().replace("/", "-"), self.model, str(self.seed), str(self.epochs)]
        if self.recipe:
            parts.append("tuned")
        if isinstance(self.settings, ImageRun):
            default = ImageRun(dataset=self.settings.dataset)
            parts += [f"val{self.val_ratio:g}"] if self.val_ratio != default.val_ratio else []
            parts += [f"{self.train_size}images"] if self.train_size else []
            different = self.settings.bn_batches != default.bn_batches
            parts += [f"bn{self.settings.bn_batches or 'all'}"] if different else []
            parts += [self.settings.precision] if self.settings.precision != default.precision else []
            parts += ["fge"] if self.settings.fge else []
        parts += [f"lr{self.settings.lr:g}", "robustness"] if self.settings.strategies == ROBUSTNESS else []
        parts += ["strategies"] if self.settings.strategies == ALL_STRATEGIES else []
        return "-".join(parts)

    def __str__(self) -> str:
        rate = f", learning rate {self.settings.lr:g}" if self.settings.strategies == ROBUSTNESS else ""
        epochs = "1 epoch" if self.epochs == 1 else f"{self.epochs} epochs"
        return f"{self.model} on {self.dataset}, seed {self.seed}, {epochs}{rate}"


def plan(
    table: Table,
    models: Sequence[str],
    datasets: Sequence[str],
    seeds: Sequence[int],
    epochs: Sequence[int] | None,
    rates: Sequence[float] | None = None,
    **images: Any,
) -> list[GridRun]:
    """The runs of a table, those of a dataset together; `images` are further settings of an `ImageRun`."""
    runs = []
    ratios = [images.pop("val_ratio")] if "val_ratio" in images else table.val_ratios
    for dataset, ratio, model in product(datasets, ratios, models):
        sweep = table.sweep(dataset) if table.by_rates else Sweep(())
        usual = [sweep.settings["epochs"]] if "epochs" in sweep.settings else table.epochs or [recipe_epochs(model)]
        at: list[float | None] = [*(rates or sweep.rates)]
        for length, rate, seed in product(epochs or usual, at or [None], seeds):
            settings: dict[str, Any] = {"dataset": dataset, "model": model} | VARIANTS.get(model, {})
            settings |= {**sweep.settings, "seed": seed, "epochs": length, "strategies": table.strategies}
            settings |= {} if rate is None else {"lr": rate}
            run: KGERun | ImageRun
            if table.task == KGE:
                run = KGERun(**settings)
            else:
                run = ImageRun(**settings, val_ratio=ratio, fge=table.fge, **images)
            runs.append(GridRun(dataset, run))
    return runs


def recipe_epochs(model: str) -> int:
    """The number of epochs for which the SWA paper trains a model on CIFAR."""
    from aswa_hf.vision.recipes import find_recipe

    return find_recipe(None, model, 10)[1].epochs


def is_trained(run: GridRun, output_dir: Path) -> bool:
    """Whether a run's training is finished; raises ValueError if its folder holds a run with different settings."""
    folder = output_dir / run.name
    if not (folder / SETTINGS).is_file():
        return False
    found, expected = read_settings(folder / SETTINGS), run.settings.to_settings({}, 1)
    # Settings that are None here follow from the recipe or the data.
    expected = {name: value for name, value in expected.items() if value is not None and name != "num_processes"}
    if expected.get("precision") == "auto":
        del expected["precision"]
    found["dataset"], expected["dataset"] = _plain_name(found["dataset"]["name"]), _plain_name(run.dataset)
    different = [name for name, value in expected.items() if found.get(name, value) != value]
    if different:
        changes = "; ".join(f"{name} was {found.get(name)}, is {expected[name]}" for name in different)
        raise ValueError(f"{folder} holds a run with different settings: {changes}. Choose another --output-dir.")
    return (folder / RESULTS).is_file()


def _plain_name(dataset: str) -> str:
    return plain(dataset.rpartition("/")[2])


def train(run: GridRun, source: str, output_dir: Path, callbacks: Sequence[Any] = ()) -> None:
    """Trains a run, or resumes it; its output goes to a file in its folder."""
    folder = output_dir / run.name
    settings = replace(run.settings, dataset=source)
    resume = last_trainer_checkpoint(folder) is not None
    make_folder(folder)
    with printed_to(folder / CONSOLE):
        if isinstance(settings, KGERun):
            from aswa_hf.experiments.kge import train_kge

            train_kge(settings, folder, resume=resume, callbacks=callbacks)
        else:
            from aswa_hf.experiments.image import train_image

            train_image(settings, folder, resume=resume, callbacks=callbacks)


@contextmanager
def printed_to(path: Path) -> Iterator[None]:
    """Appends printed output to a file: the output of many runs would fill the terminal."""
    with path.open("a", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        yield


def epochs_saved(run: GridRun, output_dir: Path) -> float:
    """The number of epochs of a run at its last checkpoint."""
    return epochs_done(last_trainer_checkpoint(output_dir / run.name))


def results(run: GridRun, output_dir: Path, part: str = RESULTS) -> dict[str, Any] | None:
    """The content of a run's results.json, or of another file in its folder; None if there is no such file."""
    path = output_dir / run.name / part
    if not path.is_file():
        return None
    content: dict[str, Any] = read_json(path, Measured)
    check_unchanged(path.parent, path.name)
    return content
