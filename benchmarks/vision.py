"""How many augmented training images per second, beside the machine's limit and torchvision, in one run.

    python benchmarks/vision.py
    python benchmarks/vision.py --data PATH/TO/cifar10 --threads 1 --repeats 200 --json vision.json

Measured: a batch of `ImageTensors`, cropped, flipped and normalized, by itself and through a `DataLoader`, and a batch
without augmentation. The peers are torchvision's transforms of one image at a time, put together by PyTorch's collate
function: the usual ones on PIL images, and v2 on tensors of bytes. Their images are in memory, decoded, as ours are.
The limit makes floats of the bytes of one fixed batch and normalizes them. `--data` is a folder (or a dataset on the
Hub) as `load_cifar` reads it; without it the images are random bytes, which takes the same time.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torchvision
from averaging import cpu_name, positive
from datasets import Array3D, ClassLabel, Dataset, Features
from torch.utils.data import DataLoader, default_collate
from torchvision import transforms
from torchvision.transforms import v2
from tqdm import tqdm

from aswa_hf.vision import ImageTensors, as_it_is, load_cifar
from aswa_hf.vision.images import normalize

AIM = 20_000
IMAGES = 4096

Operation = Callable[[list[int]], object]


@dataclass
class Row:
    """One way to make a batch of the images with the given numbers."""

    name: str
    make: Operation
    kind: str
    seconds: list[float] = field(default_factory=list)


def random_images() -> Dataset:
    features = Features({"image": Array3D((32, 32, 3), "uint8"), "label": ClassLabel(num_classes=10)})
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (IMAGES, 32, 32, 3), dtype=np.uint8)
    return Dataset.from_dict({"image": images, "label": generator.integers(0, 10, IMAGES)}, features=features)


def our_rows(images: ImageTensors, batch_size: int) -> list[Row]:
    plain = copy.copy(images)
    plain.augment = False

    def batches() -> Iterator[object]:
        while True:
            yield from DataLoader(images, batch_size, shuffle=True, drop_last=True, collate_fn=as_it_is)

    stream = batches()
    return [
        Row("ImageTensors, augmented", images.__getitems__, "ours"),
        Row("ImageTensors, augmented, through DataLoader", lambda rows: next(stream), "ours"),
        Row("ImageTensors, not augmented", plain.__getitems__, "ours"),
    ]


def peer_rows(images: ImageTensors) -> list[Row]:
    size, padding, mean, std = images.size, images.padding, images.mean, images.std
    on_pil = transforms.Compose(
        [
            transforms.RandomCrop(size, padding=padding),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(mean, std),
        ]
    )
    on_bytes = v2.Compose(
        [
            v2.RandomCrop(size, padding=padding),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(mean, std),
        ]
    )
    pictures = [transforms.functional.to_pil_image(image) for image in images.pixels]
    labels = images.labels.tolist()

    def each(transform: Callable[[Any], Any], source: Any) -> Operation:
        return lambda rows: default_collate([(transform(source[row]), labels[row]) for row in rows])

    return [
        Row("torchvision transforms, PIL images", each(on_pil, pictures), "peer"),
        Row("torchvision transforms.v2, bytes", each(on_bytes, images.pixels), "peer"),
    ]


def limit_row(images: ImageTensors, batch_size: int) -> Row:
    batch = images.pixels[:batch_size].clone()
    return Row("bytes to normalized floats", lambda rows: normalize(batch, images.mean, images.std), "limit")


def measure(rows: list[Row], images: int, batch_size: int, rounds: int, progress: tqdm) -> None:
    """Makes one batch in every way in every round, in a new order each time: load and caches are the same for all."""
    chance = random.Random(0)
    for round_ in range(-2, rounds):  # the first two warm up
        numbers = chance.sample(range(images), batch_size)
        for row in chance.sample(rows, len(rows)):
            start = time.perf_counter()
            row.make(numbers)
            seconds = time.perf_counter() - start
            if round_ >= 0:
                row.seconds.append(seconds)
        progress.update(round_ >= 0)


def table(rows: list[Row], batch_size: int) -> str:
    limit = median(rows[0].seconds)
    lines = [" " * 45 + f"{'images/s':>10}{'ms':>9}{'x limit':>9}"]
    for row in rows:
        seconds = median(row.seconds)
        lines.append(f"{row.name:45}{batch_size / seconds:>10,.0f}{1e3 * seconds:>9.2f}{seconds / limit:>9.1f}")
    return "\n".join([*lines, *(f"  {statement}" for statement in statements(rows, batch_size))])


def statements(rows: list[Row], batch_size: int) -> list[str]:
    """Compares the measurements with the aim and the peers."""
    lines = []
    for row in [row for row in rows if row.kind == "ours" and "not augmented" not in row.name]:
        seconds = median(row.seconds)
        lines.append(f"{row.name}: {batch_size / seconds:,.0f} images/s (aim {AIM:,} on one core)")
        lines.extend(
            f"{row.name}: {median(peer.seconds) / seconds:.1f} times as fast as {peer.name}"
            for peer in rows
            if peer.kind == "peer"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", metavar="PATH", help="images as load_cifar reads them; without it, random bytes")
    parser.add_argument("--batch-size", type=positive, default=128)
    parser.add_argument("--repeats", type=positive, default=100, help="batches made in each way (100)")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write every single measurement to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    try:
        dataset = load_cifar(options.data)["train"] if options.data else random_images()
        images = ImageTensors(dataset.select(range(min(IMAGES, len(dataset)))), augment=True)
    except ValueError as error:
        parser.error(str(error))
    if options.batch_size > len(images):
        parser.error(f"--batch-size {options.batch_size} is more than the {len(images)} images")
    header = {
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "threads": options.threads,
        "CPU": cpu_name(),
        "load before": round(os.getloadavg()[0], 2),
        "data": options.data or "random bytes",
        "images": f"{images.channels}×{images.size}×{images.size}",
        "batch": options.batch_size,
    }
    print(", ".join(f"{key} {value}" for key, value in header.items()))

    rows = [limit_row(images, options.batch_size), *our_rows(images, options.batch_size), *peer_rows(images)]
    with tqdm(total=options.repeats, unit="round", leave=False, disable=None) as progress:
        measure(rows, len(images), options.batch_size, options.repeats, progress)
    print(table(rows, options.batch_size))
    if options.json:
        measured = [{key: value for key, value in asdict(row).items() if key != "make"} for row in rows]
        report = {"header": header, "rows": measured, "statements": statements(rows, options.batch_size)}
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
