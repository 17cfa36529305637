"""The runs a table needs: their names, whether they are done, and doing one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aswa_hf.experiments.running import LOG, RESULTS, SETTINGS, epochs_done, last_whole_checkpoint, sole_run
from aswa_hf.reproduce.tables import KGE, STRATEGIES, Table, plain

CONSOLE = "console.log"
# The paper's: Adam with learning rate 0.1, batches of 1024, 128 real numbers per entity, all tails of a query at once.
KGE_SETTINGS: dict[str, Any] = {"dim": 128, "batch_size": 1024, "lr": 0.1, "scheme": "kvsall", "p": 0, "q": 1}


@dataclass(frozen=True)
class Run:
    """One training, shadowed by all strategies; tables that need the same one share it."""

    task: str
    dataset: str
    model: str
    seed: int
    epochs: int
    val_ratio: float | None = None
    train_size: int | None = None
    bn_batches: int | None = None
    fge: bool = False

    @property
    def name(self) -> str:
        parts = [self.dataset.lower().replace("/", "-"), self.model, str(self.seed), str(self.epochs)]
        if self.val_ratio is not None and self.val_ratio != 0.05:
            parts.append(f"val{self.val_ratio:g}")
        parts += [f"{self.train_size}images"] if self.train_size else []
        parts += [f"bn{self.bn_batches}"] if self.bn_batches else []
        return "-".join([*parts, "fge"] if self.fge else parts)

    def __str__(self) -> str:
        return f"{self.model} on {self.dataset}, seed {self.seed}, {self.epochs} epochs"


def plan(
    table: Table,
    models: list[str],
    datasets: list[str],
    seeds: list[int],
    epochs: list[int] | None,
    train_size: int | None = None,
    bn_batches: int | None = None,
) -> list[Run]:
    """The runs of a table, those of a dataset together."""
    runs = []
    for dataset in datasets:
        for ratio in table.val_ratios:
            for model in models:
                for length in epochs or table.epochs or [recipe_epochs(model)]:
                    for seed in seeds:
                        run = Run(table.task, dataset, model, seed, length)
                        if table.task != KGE:
                            images = {"val_ratio": ratio, "train_size": train_size, "bn_batches": bn_batches}
                            run = Run(**asdict(run) | images | {"fge": table.fge})
                        runs.append(run)
    return runs


def recipe_epochs(model: str) -> int:
    """How long the SWA paper trains a model on CIFAR."""
    from aswa_hf.vision.recipes import find_recipe

    return find_recipe(None, model, 10)[1].epochs


def is_trained(run: Run, output_dir: Path) -> bool:
    """Whether a run's training is over; an error if its folder holds a run with other settings."""
    folder = output_dir / run.name
    if not (folder / SETTINGS).is_file():
        return False
    found = _read(folder / SETTINGS)
    expected: dict[str, Any] = {"model": run.model, "seed": run.seed, "strategies": list(STRATEGIES[run.task])}
    if run.task == KGE:
        expected |= KGE_SETTINGS
    else:
        expected |= {"val_ratio": run.val_ratio, "train_size": run.train_size, "bn_batches": run.bn_batches}
    expected["epochs"] = run.epochs
    found["dataset"], expected["dataset"] = _folder(found.get("dataset", {}).get("name", "")), _folder(run.dataset)
    different = [name for name, value in expected.items() if found.get(name) != value]
    if different:
        changes = "; ".join(f"{name} was {found.get(name)}, is {expected[name]}" for name in different)
        raise ValueError(f"{folder} holds a run with other settings: {changes}. Choose another --output-dir.")
    return (folder / RESULTS).is_file()


def _folder(dataset: str) -> str:
    return plain(dataset.rpartition("/")[2])


def train(run: Run, source: str, output_dir: Path) -> None:
    """Trains a run, or goes on with it; what it says of itself goes to a file of its folder."""
    folder = output_dir / run.name
    resume = last_whole_checkpoint(folder) is not None
    common: dict[str, Any] = {
        "dataset": source,
        "output_dir": folder,
        "epochs": run.epochs,
        "strategies": list(STRATEGIES[run.task]),
        "seed": run.seed,
        "resume": resume,
    }
    with sole_run(folder), said_to(folder / CONSOLE), _called_as(command(run, source, output_dir)):
        if run.task == KGE:
            from aswa_hf.experiments.kge import train_kge

            train_kge(scorer=run.model, **common, **KGE_SETTINGS)
        else:
            from aswa_hf.experiments.image import train_image

            train_image(
                model_name=run.model,
                val_ratio=run.val_ratio or 0.05,
                train_size=run.train_size,
                bn_batches=run.bn_batches,
                fge=run.fge,
                precision="auto",
                recipe_name=None,
                batch_size=None,
                lr=None,
                fge_cycle=None,
                image_size=None,
                augment=None,
                **common,
            )


def command(run: Run, source: str, output_dir: Path) -> list[str]:
    """The arguments of `aswa-hf` that do this run alone."""
    options: dict[str, Any] = {"dataset": source, "model": run.model, "epochs": run.epochs, "seed": run.seed}
    if run.task != KGE:
        options |= {"val-ratio": run.val_ratio, "train-size": run.train_size, "bn-batches": run.bn_batches}
    options |= {"strategies": ",".join(STRATEGIES[run.task]), "output-dir": output_dir / run.name}
    given = [text for name, value in options.items() if value is not None for text in (f"--{name}", str(value))]
    return ["train", "kge" if run.task == KGE else "image", *given, *(["--fge"] if run.fge else [])]


@contextmanager
def _called_as(arguments: list[str]) -> Iterator[None]:
    """A run writes down the command that repeats it, which is not that of the whole grid."""
    before, sys.argv = sys.argv, [sys.argv[0], *arguments]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def said_to(path: Path) -> Iterator[None]:
    """What is printed and warned of goes to the end of a file: of many runs, nobody would find it on the screen."""
    with path.open("a", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        yield


def epochs_behind(run: Run, output_dir: Path) -> float:
    """How many epochs of a run are saved."""
    return epochs_done(last_whole_checkpoint(output_dir / run.name))


def epochs_logged(run: Run, output_dir: Path) -> float:
    """How many epochs of a run its log tells of."""
    try:
        with (output_dir / run.name / LOG).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 8192))
            lines = file.read().decode(errors="replace").splitlines()
        return float(json.loads(next(line for line in reversed(lines) if line.endswith("}")))["epoch"])
    except (OSError, StopIteration, ValueError, KeyError):
        return 0.0


def seconds_taken(run: Run, output_dir: Path) -> float | None:
    """How long a finished run took to train and evaluate."""
    try:
        return sum(_read(output_dir / run.name / RESULTS)["seconds"].values())
    except (OSError, KeyError):
        return None


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a JSON file ({error}). Remove its folder to run it anew.") from None
    return content


def results(run: Run, output_dir: Path, part: str = RESULTS) -> dict[str, Any] | None:
    """What a run has written down: of its own, or as another part of it."""
    path = output_dir / run.name / part
    return _read(path) if path.is_file() else None
