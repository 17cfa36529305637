"""Image datasets through `datasets`: the built-in digits, folders of images, datasets on the Hub."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from datasets import Array2D, ClassLabel, Dataset, DatasetDict, Features, Image

from aswa_hf._utils.checks import is_number
from aswa_hf._utils.files import nearest_path, refuse_mistyped
from aswa_hf._utils.warnings import warn_caller
from aswa_hf.hub_requests import bounded_requests, reason_of_download
from aswa_hf.vision.images import ImageTensors, as_it_is

__all__ = ["ImageTensors", "as_it_is", "load_cifar", "load_digits"]

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label", "coarse_label")


def load_digits(*, train: int = 500, validation: int = 500, seed: int = 0) -> DatasetDict:
    """scikit-learn's 1,797 real handwritten digits as train, validation and (all others) test split.

    Columns: `image`, 8×8 pixels of 17 gray levels, the multiples of 15 from 0 to 240, and `label`.
    """
    from sklearn.datasets import load_digits as sklearn_digits

    digits = sklearn_digits()
    if train < 1 or validation < 1 or train + validation >= len(digits.target):
        raise ValueError(
            f"train={train} and validation={validation} must be at least 1 and leave some of the "
            f"{len(digits.target)} digits for testing."
        )
    features = Features({"image": Array2D((8, 8), "uint8"), "label": ClassLabel(names=list("0123456789"))})
    images = (15 * digits.images).astype(np.uint8)
    order = np.random.default_rng(seed).permutation(len(digits.target))
    splits = np.split(order, [train, train + validation])
    return DatasetDict(
        {
            name: Dataset.from_dict(
                {"image": images[rows], "label": digits.target[rows]}, features=features, split=name
            )
            for name, rows in zip(("train", "validation", "test"), splits, strict=True)
        }
    )


def load_cifar(
    name_or_path: str | os.PathLike[str],
    val_ratio: float = 0.05,
    seed: int = 0,
    *,
    label: str | None = None,
    train_size: int | None = None,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> DatasetDict:
    """CIFAR-10, CIFAR-100 or images like them as train, validation and test split, with columns `image` and `label`.

        load_cifar("uoft-cs/cifar10", val_ratio=0.1)           # a dataset on the Hub
        load_cifar("uoft-cs/cifar100", label="coarse_label")   # the 20 coarse classes instead of the 100 fine ones
        load_cifar("data/cifar10", train_size=10_000)          # a folder: train.parquet, test.parquet,
                                                               # or train/<class>/*.png, test/<class>/*.png

    The validation images are drawn from the training split, stratified by class, with at least one of each class. The
    same seed draws the same images, whatever `train_size` is; the training images are then drawn from the others.
    """
    check_ratio(val_ratio)
    source = _read(name_or_path, revision, cache_dir)
    splits = _same_classes({split: _two_columns(source[split], label) for split in ("train", "test")})
    return hold_out(splits, val_ratio, seed, train_size=train_size)


def check_ratio(val_ratio: float) -> None:
    """Raises ValueError if the ratio is not between 0 and 1."""
    if not is_number(val_ratio) or not 0 < val_ratio < 1:
        raise ValueError(f"val_ratio is {val_ratio!r}. Expected the share of validation images, between 0 and 1.")


def hold_out(
    splits: Mapping[str, Dataset], val_ratio: float, seed: int = 0, *, train_size: int | None = None
) -> DatasetDict:
    """Splits train into train and validation, stratified by class; the test split is unchanged."""
    # `Dataset.train_test_split(stratify_by_column="label")` leaves out small classes and refuses small shares, and
    # other images are held out with another `train_size`.
    ids = {split: np.asarray(dataset.with_format("numpy")["label"][:]) for split, dataset in splits.items()}
    counts = _check_classes(ids, splits["train"].features["label"].names)

    classes = int((counts > 0).sum())
    held_out = _shares(counts, max(classes, round(val_ratio * counts.sum())))
    held_out = np.minimum(held_out, np.maximum(counts - 1, 0))  # and one of each class for training
    kept = counts - held_out
    if train_size is not None:
        if not classes <= train_size <= kept.sum():
            raise ValueError(
                f"train_size is {train_size}. Expected at least {classes}, one image of each class, and at most "
                f"{kept.sum()}, the training images that are not used for validation."
            )
        kept = _shares(kept, train_size)
    train, validation = _draw(ids["train"], kept, held_out, seed)
    return DatasetDict(
        train=_select(splits["train"], "train", train),
        validation=_select(splits["train"], "validation", validation),
        test=splits["test"],
    )


def _read(name_or_path: str | os.PathLike[str], revision: str | None, cache_dir: Any) -> DatasetDict:
    """The unchanged source, with a train and a test split."""
    name, path = os.fspath(name_or_path), Path(name_or_path).expanduser()
    on_disk = path.is_dir() and bool(name)
    if name != "digits" and difflib.get_close_matches(name.lower(), ["digits"], cutoff=0.8) and not on_disk:
        # The Hub would be asked many times.
        raise ValueError(f"There is no dataset {name!r}. Did you mean 'digits'?")
    if not on_disk and (not name or path.is_absolute() or len(path.parts) > 2 or path.is_file()):
        # The Hub would be asked for what cannot be there.
        raise ValueError(
            f"Found no folder {name!r}. Expected one with train.parquet and test.parquet, or with train/<class>/ and "
            f"test/<class>/ full of images; or a dataset on the Hub like uoft-cs/cifar10.{nearest_path(path)}"
        )
    refuse_mistyped(path, owner=False)
    try:
        with bounded_requests() as unanswered:
            if on_disk:
                _check_parquet(path)
            source = datasets.load_dataset(
                str(path) if on_disk else name,
                revision=revision,
                cache_dir=None if cache_dir is None else str(cache_dir),
            )
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        place = "the folder" if on_disk else "the Hub (there is no folder of this name)"
        raise ValueError(f"Could not read {name!r} from {place}: {reason_of_download(error, unanswered)}") from error
    missing = [split for split in ("train", "test") if not len(source.get(split, []))]
    if missing:
        found = ", ".join(f"{split} ({len(dataset)} images)" for split, dataset in source.items())
        raise ValueError(
            f"{name} has no images for {' and '.join(missing)}. Expected splits train and test, got {found}."
        )
    if "validation" in source:
        warn_caller(
            f"The validation split of {name} is left out: validation images are drawn from its training split."
        )
    return source


def _check_parquet(folder: Path) -> None:
    """Returns an error if the files number their classes differently, which `datasets` does not notice."""
    first: dict[str, ClassLabel] = {}
    for file in sorted(folder.rglob("*.parquet")):
        for column, feature in Features.from_arrow_schema(pq.read_schema(file)).items():
            if isinstance(feature, ClassLabel) and first.setdefault(column, feature) != feature:
                raise ValueError(
                    f"the classes of column {column} in {file.name}, {feature.names}, are not those of the files "
                    f"before it, {first[column].names}"
                )


def _two_columns(dataset: Dataset, label: str | None) -> Dataset:
    """The dataset with its images as `image` and one of its labels as `label`, and nothing else."""
    columns = dataset.column_names
    images = next((name for name in IMAGE_COLUMNS if name in columns), None)
    labels = next((name for name in ((label,) if label else LABEL_COLUMNS) if name in columns), None)
    if images is None or labels is None:
        wanted = f"{' or '.join(IMAGE_COLUMNS)}, and {label or ' or '.join(LABEL_COLUMNS)}"
        raise ValueError(f"Expected columns {wanted}; the {dataset.split} split has {', '.join(columns)}.")
    dataset = dataset.select_columns([images, labels])
    if labels != "label":
        dataset = dataset.rename_column(labels, "label")
    if images != "image":
        dataset = dataset.rename_column(images, "image")
    if isinstance(dataset.features["image"], (dict, datasets.Value)):  # encoded images that parquet does not mark
        dataset = dataset.cast_column("image", Image())
    return dataset


def _same_classes(splits: Mapping[str, Dataset]) -> dict[str, Dataset]:
    """The splits with one numbering of labels, as a `ClassLabel`: in the source they may be numbers or text."""
    features = {split: dataset.features["label"] for split, dataset in splits.items()}
    if all(isinstance(feature, ClassLabel) for feature in features.values()):
        return dict(splits)
    values = {split: dataset.with_format(None)["label"][:] for split, dataset in splits.items()}
    distinct = set().union(*values.values())
    kinds = {type(value) for value in distinct}
    if kinds == {int} and min(distinct) >= 0:
        names = [str(number) for number in range(max(distinct) + 1)]
        number = {value: value for value in distinct}
    elif kinds == {str}:
        names = sorted(distinct)
        number = {name: position for position, name in enumerate(names)}
    else:
        raise ValueError(
            f"Expected labels that are all names, or all class numbers from 0 on; got {str(distinct)[:100]}."
        )
    return {
        split: dataset.remove_columns("label").add_column(
            "label", [number[value] for value in values[split]], feature=ClassLabel(names=names)
        )
        for split, dataset in splits.items()
    }


def _check_classes(ids: Mapping[str, np.ndarray], names: list[str]) -> np.ndarray:
    """How many training images each class has; an error if one cannot be learned and tested."""
    for split, found in ids.items():
        known = np.nan_to_num(np.asarray(found, dtype=float), nan=-1)  # a missing label is -1 or not a number
        bad = np.flatnonzero((known < 0) | (known >= len(names)))
        if len(bad):
            raise ValueError(
                f"Image {bad[0]} of {split} has the label {found[bad[0]]}. Expected one of the {len(names)} classes; "
                "in a folder the names of subfolders are the classes, as in train/<class>/1.png."
            )
    train, test = (np.bincount(ids[split].astype(np.int64), minlength=len(names)) for split in ("train", "test"))

    def classes(chosen: np.ndarray) -> str:
        found = [name for name, is_chosen in zip(names, chosen, strict=True) if is_chosen]
        return ", ".join(found[:5]) + (f" and {len(found) - 5} more classes" if len(found) > 5 else "")

    if ((train == 0) & (test > 0)).any():
        raise ValueError(f"There are test images but no training images of {classes((train == 0) & (test > 0))}.")
    if (train == 1).any():
        raise ValueError(
            f"There is a single training image of {classes(train == 1)}. Expected two or more of each class, for "
            "training and for validation."
        )
    if (train + test == 0).any():
        warn_caller(f"There are no images of {classes(train + test == 0)}: the model cannot learn this output.")
    if ((train > 0) & (test == 0)).any():
        warn_caller(f"There are no test images of {classes((train > 0) & (test == 0))}: the test score leaves it out.")
    return train


def _shares(counts: np.ndarray, total: int) -> np.ndarray:
    """`total` in proportion to `counts`: rounded down, the rest to the largest remainders; at least 1 unless 0."""
    exact = counts * (total / counts.sum())
    shares: np.ndarray = np.floor(exact).astype(np.int64)
    shares[np.argsort(shares - exact, kind="stable")[: total - shares.sum()]] += 1
    shares = np.maximum(shares, counts > 0)
    while shares.sum() > total:
        shares[np.argmax(shares)] -= 1
    return shares


def _draw(labels: np.ndarray, kept: np.ndarray, held_out: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows for training and rows for validation in ascending order, with the given number of each class."""
    train, validation = [], []
    generator = np.random.default_rng(seed)
    for label, (keep, hold) in enumerate(zip(kept, held_out, strict=True)):
        rows = generator.permutation(np.flatnonzero(labels == label))
        validation.append(rows[:hold])
        train.append(rows[hold : hold + keep])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(validation))


def _select(dataset: Dataset, split: str, rows: np.ndarray) -> Dataset:
    return Dataset(dataset.data, info=dataset.info, split=datasets.NamedSplit(split)).select(rows)
