"""Images for training and testing: loaded through `datasets`, then decoded once and kept as tensors."""

from __future__ import annotations

import numpy as np
import torch
from datasets import Array2D, ClassLabel, Dataset, DatasetDict, Features
from torch import Tensor


def load_digits(*, train: int = 500, validation: int = 500, seed: int = 0) -> DatasetDict:
    """scikit-learn's 1,797 real handwritten digits as train, validation and (what is left over) test split.

    Columns: `image`, 8×8 grey levels from 0 to 16, and `label`.
    """
    from sklearn.datasets import load_digits as sklearn_digits

    digits = sklearn_digits()
    if train < 1 or validation < 1 or train + validation >= len(digits.target):
        raise ValueError(
            f"train={train} and validation={validation} must be at least 1 and leave some of the "
            f"{len(digits.target)} digits for testing."
        )
    features = Features({"image": Array2D((8, 8), "uint8"), "label": ClassLabel(names=list("0123456789"))})
    order = np.random.default_rng(seed).permutation(len(digits.target))
    splits = np.split(order, [train, train + validation])
    return DatasetDict(
        {
            name: Dataset.from_dict(
                {"image": digits.images[rows].astype(np.uint8), "label": digits.target[rows]}, features=features
            )
            for name, rows in zip(("train", "validation", "test"), splits, strict=True)
        }
    )


class TensorImages(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Grey images of a dataset as tensors from -1 to 1, enlarged to `size`, with the names a model's inputs have.

    Decoding happens once, here, and not in every epoch.
    """

    def __init__(self, dataset: Dataset, *, size: int, brightest: int = 16):
        table = dataset.with_format("numpy")
        images = torch.as_tensor(np.asarray(table["image"][:]), dtype=torch.float32)[:, None] * (2 / brightest) - 1
        self.pixel_values = torch.nn.functional.interpolate(images, size=size, mode="bilinear")
        self.labels = torch.as_tensor(np.asarray(table["label"][:]))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": self.pixel_values[index], "labels": self.labels[index]}
