"""Images decoded once to bytes in memory, from which complete augmented batches of floats are made."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import PIL.Image
import torch
from datasets import ClassLabel, Dataset, Image
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from aswa_hf._utils.checks import check_whole_number
from aswa_hf._utils.warnings import warn_caller
from aswa_hf.vision.architectures import CIFAR10_MEAN, CIFAR10_STD

CIFAR100_MEAN, CIFAR100_STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
GRAY_MODES, COLOR_MODES = {"1", "L", "LA"}, {"P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB"}
CHUNK = 1000
LARGE = 4 * 2**30

Batch = dict[str, Tensor]


class ImageTensors(torch.utils.data.Dataset[Batch]):
    """The images and labels of a dataset, decoded once; batches are normalized and augmented as a whole.

        train = ImageTensors(splits["train"], augment=True)
        DataLoader(train, batch_size=128, shuffle=True, collate_fn=as_it_is)   # pixel_values (128, 3, 32, 32), labels

    Columns: `image` (an `Image`, or an array of bytes: (height, width) or (height, width, channels)) and `label` (a
    `ClassLabel`). Images that are not square, or not all of one size, need `size`, to which they are resized here.
    `augment` takes a random crop of the image with a black border of an eighth of its size (4 pixels at 32), flipped
    in half of the cases; it draws from torch's global generator. `mean` and `std`, one number per channel of an image
    from 0 to 1, default to those of CIFAR-100 for 100 classes (or its 20 coarse ones), otherwise of CIFAR-10; gray
    images are scaled to -1 … 1.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        size: int | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        augment: bool = False,
    ):
        if not isinstance(dataset.features.get("label"), ClassLabel) or "image" not in dataset.features:
            raise ValueError(
                f"Expected columns image and label (a ClassLabel), as load_cifar returns; got {dataset.features}."
            )
        if not len(dataset):
            raise ValueError(f"There are no images in {dataset.split or 'the dataset'}.")
        check_whole_number("size", size, optional=True)
        self.class_names: list[str] = dataset.features["label"].names
        self.num_classes = len(self.class_names)
        self.pixels = _decode(dataset, size)
        self.labels = torch.as_tensor(np.asarray(dataset.with_format("numpy")["label"][:])).long()
        self.channels, self.size = self.pixels.shape[1], self.pixels.shape[2]
        self.augment = augment
        self.padding = self.size // 8
        defaults = _normalization(self.channels, self.num_classes)
        self.mean = _per_channel("mean", mean, defaults[0], self.channels)
        self.std = _per_channel("std", std, defaults[1], self.channels)
        if min(self.std) <= 0:
            raise ValueError(f"std is {self.std}. Expected positive numbers.")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return {name: values[0] for name, values in self.__getitems__([index]).items()}

    def __getitems__(self, rows: Sequence[int]) -> Batch:
        """The batch of these rows; `DataLoader` calls this method if a dataset has it."""
        chosen = torch.as_tensor(rows)
        images = self.pixels.index_select(0, chosen)  # which is much faster than self.pixels[chosen]
        if self.augment:
            tops, lefts = torch.randint(2 * self.padding + 1, (2, len(images)))
            images = crop_and_flip(images, tops, lefts, torch.rand(len(images)) < 0.5, self.padding)
        return {"pixel_values": normalize(images, self.mean, self.std), "labels": self.labels[chosen]}


def crop_and_flip(images: Tensor, tops: Tensor, lefts: Tensor, flips: Tensor, padding: int) -> Tensor:
    """Returns the images, shifted by (top, left) within a black border, and mirrored where `flips`."""
    # Rows are copied as contiguous memory first, then single columns: half the time of one index for both.
    count, channels, height, width = images.shape
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    first = torch.arange(count * channels).view(count, channels, 1) * padded.shape[2]
    rows = first + (tops[:, None] + torch.arange(height))[:, None]
    bands = padded.flatten(0, 2).index_select(0, rows.flatten()).view(count, channels, height, -1)
    columns = torch.arange(width)
    columns = lefts[:, None] + torch.where(flips[:, None], columns.flip(0), columns)
    return bands.gather(3, columns[:, None, None].expand(count, channels, height, width))


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(images / 255 - mean) / std of bytes (B, C, H, W), channel by channel."""
    scale = 1 / (255 * torch.tensor(std))
    shift = -torch.tensor(mean) / torch.tensor(std)
    return images.float().mul_(scale.view(-1, 1, 1)).add_(shift.view(-1, 1, 1))


def as_it_is(batch: Any) -> Any:
    """`collate_fn` of a `DataLoader`, `data_collator` of a Trainer: the dataset has already collated the batch."""
    return batch


def _normalization(channels: int, classes: int) -> tuple[Sequence[float], Sequence[float]]:
    if channels != 3:
        return (0.5,) * channels, (0.5,) * channels
    return (CIFAR100_MEAN, CIFAR100_STD) if classes in (20, 100) else (CIFAR10_MEAN, CIFAR10_STD)


def _per_channel(name: str, given: Any, default: Sequence[float], channels: int) -> tuple[float, ...]:
    values = tuple(float(value) for value in (default if given is None else given))
    if len(values) != channels:
        raise ValueError(f"{name} has {len(values)} numbers, the images {channels} channels.")
    return values


def _decode(dataset: Dataset, size: int | None) -> Tensor:
    """All images as bytes (N, C, H, W), with one channel if all are gray."""
    pixels: np.ndarray = np.empty(0, dtype=np.uint8)
    encoded = tqdm(_encoded(dataset), "decoding", len(dataset), unit=" images", delay=2, disable=None, leave=False)
    for index, content in enumerate(encoded):
        try:
            image = _open(content)
            if size is not None:
                image = image.resize((size, size), PIL.Image.Resampling.BILINEAR)
            if index == 0:
                pixels = _room(len(dataset), image)
            if image.size != pixels.shape[:1:-1]:
                raise ValueError(f"{image.size} pixels, others {pixels.shape[:1:-1]}; pass size= to resize them")
            if image.mode == "RGB" and pixels.shape[1] == 1:
                pixels = pixels.repeat(3, axis=1)
            values = np.asarray(image)
            pixels[index] = values if image.mode == "L" else values.transpose(2, 0, 1)
        except Exception as error:  # what a decoder raises on broken bytes is not documented
            raise ValueError(f"Cannot use image {index} of {dataset.split or 'the dataset'}: {error}.") from error
    return torch.from_numpy(pixels)


def _encoded(dataset: Dataset) -> Iterator[Any]:
    """The images as stored: the bytes or the path of a file, or an array."""
    if isinstance(dataset.features["image"], Image):
        dataset = dataset.cast_column("image", Image(decode=False))
    else:
        dataset = dataset.with_format("numpy")
    for start in range(0, len(dataset), CHUNK):
        yield from dataset[start : start + CHUNK]["image"]


def _open(content: Any) -> PIL.Image.Image:
    """One image in gray (L) or color (RGB)."""
    if content is None:
        raise ValueError("it is missing")
    image: PIL.Image.Image
    if isinstance(content, dict):
        image = PIL.Image.open(content["path"] if content["bytes"] is None else io.BytesIO(content["bytes"]))
    else:
        if content.dtype.kind not in "iu" or content.min() < 0 or content.max() > 255:
            raise ValueError(f"its values are not whole numbers from 0 to 255 ({content.dtype})")
        image = PIL.Image.fromarray(content.astype(np.uint8).squeeze())
    if image.mode not in GRAY_MODES | COLOR_MODES:
        raise ValueError(f"its pixels are not bytes (mode {image.mode})")
    return image.convert("L" if image.mode in GRAY_MODES else "RGB")


def _room(count: int, image: PIL.Image.Image) -> np.ndarray:
    """An empty array for `count` images like this one."""
    if image.width != image.height:
        raise ValueError(f"{image.size} pixels, not a square; pass size= to resize it")
    shape = (count, len(image.getbands()), image.height, image.width)
    if math.prod(shape) > LARGE:
        warn_caller(f"{count:,} images of {image.size} pixels take {math.prod(shape) / 2**30:.1f} GiB of memory.")
    return np.empty(shape, dtype=np.uint8)
