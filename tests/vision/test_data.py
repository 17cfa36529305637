"""`load_cifar` and `ImageTensors`: sources, splits by class, decoding, batches, and what is refused."""

from __future__ import annotations

import io
import itertools
import warnings
from pathlib import Path

import datasets
import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, Value
from torch.utils.data import DataLoader

from aswa_hf.vision.data import ImageTensors, as_it_is, load_cifar, load_digits
from aswa_hf.vision.images import CIFAR10_MEAN, CIFAR10_STD, CIFAR100_MEAN, CIFAR100_STD, crop_and_flip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def picture(number: int, *, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> PIL.Image.Image:
    """A picture of its own: noise whose first pixel tells its number."""
    width, height = size
    noise = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    noise[0, 0] = number
    return PIL.Image.fromarray(noise).convert(mode)


def png(image: PIL.Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def write_parquet(
    folder: Path, names: list[str] | None = None, column: str = "img", **labels: dict[str, list]
) -> Path:
    """train.parquet and test.parquet with pictures 0, 1, 2, …; `labels`: label column → split → its values."""
    folder.mkdir()
    for split in ("train", "test"):
        columns = {name: values[split] for name, values in labels.items()}
        count = len(next(iter(columns.values())))
        columns[column] = [{"bytes": png(picture(number % 256)), "path": None} for number in range(count)]
        features = Features({name: ClassLabel(names=names) for name in labels} | {column: Image()}) if names else None
        Dataset.from_dict(columns, features=features).to_parquet(folder / f"{split}.parquet")
    return folder


def write_images(folder: Path, counts: dict[str, dict[str, int]]) -> Path:
    """train/<class>/*.png and test/<class>/*.png; `counts`: split → class → how many."""
    numbers = itertools.count()
    for split, classes in counts.items():
        for name, count in classes.items():
            (folder / split / name).mkdir(parents=True)
            for _ in range(count):
                number = next(numbers)
                picture(number).save(folder / split / name / f"{number:03}.png")
    return folder


def numbers(dataset: Dataset) -> list[int]:
    """Which pictures a split holds."""
    return ImageTensors(dataset).pixels[:, 0, 0, 0].tolist()


def counts(dataset: Dataset) -> list[int]:
    return np.bincount(dataset["label"][:], minlength=dataset.features["label"].num_classes).tolist()


@pytest.fixture
def three_classes(tmp_path):
    """40, 20 and 12 training images and 2 test images of each of three classes."""
    labels = {"train": [0] * 40 + [1] * 20 + [2] * 12, "test": [0, 1, 2, 0, 1, 2]}
    return write_parquet(tmp_path / "data", ["cat", "dog", "eel"], label=labels)


# splits


def test_validation_is_stratified_by_class(three_classes):
    found = load_cifar(three_classes, val_ratio=0.25)
    assert list(found) == ["train", "validation", "test"]
    assert counts(found["validation"]) == [10, 5, 3]
    assert counts(found["train"]) == [30, 15, 9]
    assert counts(found["test"]) == [2, 2, 2]
    assert found["train"].column_names == ["image", "label"]
    assert found["train"].features["label"].names == ["cat", "dog", "eel"]


def test_what_rounding_leaves_goes_to_the_largest_remainders(three_classes):
    # 10 % of 72 is 7; of the classes 3.89, 1.94 and 1.17: 3 + 1 + 1, and one more for the second and the first.
    assert counts(load_cifar(three_classes, val_ratio=0.1)["validation"]) == [4, 2, 1]


def test_every_class_has_an_image_for_validation_and_one_for_training(three_classes):
    assert counts(load_cifar(three_classes, val_ratio=0.01)["validation"]) == [1, 1, 1]
    assert counts(load_cifar(three_classes, val_ratio=0.99)["train"]) == [1, 1, 1]


def test_training_and_validation_share_no_image_and_lose_none(three_classes):
    found = load_cifar(three_classes, val_ratio=0.25)
    train, validation = numbers(found["train"]), numbers(found["validation"])
    assert sorted(train + validation) == list(range(72))


def test_images_keep_their_labels(three_classes):
    found = load_cifar(three_classes, val_ratio=0.25)
    for split in ("train", "validation"):
        expected = [0 if number < 40 else 1 if number < 60 else 2 for number in numbers(found[split])]
        assert found[split]["label"][:] == expected


def test_the_same_seed_draws_the_same_images_and_another_seed_others(three_classes):
    first, second, third = (numbers(load_cifar(three_classes, 0.25, seed)["validation"]) for seed in (0, 0, 1))
    assert first == second != third


def test_train_size_keeps_a_stratified_part_and_the_same_validation_images(three_classes):
    whole = load_cifar(three_classes, val_ratio=0.25)
    small = load_cifar(three_classes, val_ratio=0.25, train_size=18)
    assert counts(small["train"]) == [10, 5, 3]
    assert numbers(small["validation"]) == numbers(whole["validation"])
    assert set(numbers(small["train"])) < set(numbers(whole["train"]))


def test_a_rare_class_keeps_an_image_in_a_small_training_part(tmp_path):
    labels = {"train": [0] * 98 + [1] * 2, "test": [0, 1]}
    folder = write_parquet(tmp_path / "data", ["common", "rare"], label=labels)
    assert counts(load_cifar(folder, val_ratio=0.1, train_size=10)["train"]) == [9, 1]


@pytest.mark.parametrize("train_size", [2, 55])
def test_a_train_size_that_cannot_be_had_is_refused(three_classes, train_size):
    with pytest.raises(ValueError, match=rf"train_size is {train_size}\. Expected at least 3, .* at most 54"):
        load_cifar(three_classes, val_ratio=0.25, train_size=train_size)


@pytest.mark.parametrize("val_ratio", [0, 1, -0.1, 1.5, float("nan"), True])
def test_a_val_ratio_outside_0_and_1_is_refused(three_classes, val_ratio):
    with pytest.raises(ValueError, match=rf"val_ratio is {val_ratio}\. Expected .* between 0 and 1"):
        load_cifar(three_classes, val_ratio=val_ratio)


# sources and columns


def test_a_folder_of_images_by_class_is_read(tmp_path):
    folder = write_images(tmp_path / "pets", {"train": {"cat": 4, "dog": 8}, "test": {"cat": 1, "dog": 2}})
    found = load_cifar(folder, val_ratio=0.25)
    assert found["test"].features["label"].names == ["cat", "dog"]
    assert (counts(found["train"]), counts(found["validation"]), counts(found["test"])) == ([3, 6], [1, 2], [1, 2])
    assert sorted(numbers(found["train"]) + numbers(found["validation"])) == list(range(12))


def test_a_dataset_on_the_hub_is_asked_for_with_its_revision(three_classes, monkeypatch):
    read, asked = datasets.load_dataset, []

    def load_dataset(name, **options):
        asked.append((name, options["revision"]))
        return read(str(three_classes), **(options | {"revision": None}))

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert counts(load_cifar("uoft-cs/cifar10", revision="main")["validation"]) == [2, 1, 1]
    assert asked == [("uoft-cs/cifar10", "main")]


def test_fine_labels_are_used_unless_coarse_ones_are_asked_for(tmp_path):
    fine = {"train": [0, 1, 2, 3] * 2, "test": [0, 1, 2, 3]}
    coarse = {"train": [0, 0, 1, 1] * 2, "test": [0, 0, 1, 1]}
    folder = write_parquet(tmp_path / "data", list("abcd"), fine_label=fine, coarse_label=coarse)
    assert load_cifar(folder)["test"]["label"][:] == [0, 1, 2, 3]
    with pytest.warns(UserWarning, match="no images of c, d"):
        assert load_cifar(folder, label="coarse_label")["test"]["label"][:] == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="Expected columns image or img, and color; the train split has"):
        load_cifar(folder, label="color")


def test_labels_that_are_plain_numbers_or_names_become_classes(tmp_path):
    numbered = write_parquet(tmp_path / "numbers", column="image", label={"train": [0, 1] * 2, "test": [1]})
    named = write_parquet(tmp_path / "names", column="image", label={"train": ["dog", "cat"] * 2, "test": ["dog"]})
    with pytest.warns(UserWarning, match="no test images of 0"):
        assert load_cifar(numbered)["test"].features["label"].names == ["0", "1"]
    with pytest.warns(UserWarning, match="no test images of cat"):
        found = load_cifar(named)
    assert found["test"].features["label"].names == ["cat", "dog"]
    assert found["test"]["label"][:] == [1]
    assert sorted(found["train"]["label"][:]) == [0, 1]


def test_images_that_parquet_holds_as_plain_bytes_are_decoded(tmp_path):
    for split in ("train", "test"):
        table = pa.table({"image": [png(picture(number)) for number in range(4)], "label": [0, 1, 0, 1]})
        pq.write_table(table, tmp_path / f"{split}.parquet")
    assert numbers(load_cifar(tmp_path)["test"]) == [0, 1, 2, 3]


def test_a_validation_split_of_the_source_is_left_out_with_a_warning(three_classes):
    (three_classes / "validation.parquet").write_bytes((three_classes / "test.parquet").read_bytes())
    with pytest.warns(UserWarning, match="validation split of .* is left out"):
        assert counts(load_cifar(three_classes, 0.25)["validation"]) == [10, 5, 3]


def test_loading_a_clean_source_warns_of_nothing(three_classes):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_cifar(three_classes)


# sources that are refused


def test_a_folder_that_is_not_there_is_an_error_without_asking_the_hub(tmp_path):
    for path in (tmp_path / "nothing", "a/b/c", "", __file__):
        with pytest.raises(ValueError, match=r"Found no folder .*train\.parquet.*train/<class>/.*Hub"):
            load_cifar(path)


def test_a_hub_that_cannot_be_reached_is_one_clear_error():
    with pytest.raises(ValueError, match=r"Could not read 'uoft-cs/no-such-set' from the Hub \(there is no folder of"):
        load_cifar("uoft-cs/no-such-set")


def test_an_empty_folder_and_a_missing_split_are_errors(tmp_path, three_classes):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"Could not read .*empty' from the folder"):
        load_cifar(tmp_path / "empty")
    (three_classes / "test.parquet").unlink()
    with pytest.raises(
        ValueError, match=r"no images for test\. Expected splits train and test, got train \(72 images"
    ):
        load_cifar(three_classes)


def test_images_without_labels_are_an_error(tmp_path):
    for split in ("train", "test"):
        (tmp_path / "flat" / split).mkdir(parents=True)
        picture(0).save(tmp_path / "flat" / split / "0.png")
    with pytest.raises(ValueError, match=r"Image 0 of train has the label nan\. Expected .*train/<class>/"):
        load_cifar(tmp_path / "flat")


def test_a_class_that_is_tested_but_never_shown_is_an_error(tmp_path):
    folder = write_images(tmp_path / "pets", {"train": {"cat": 4, "dog": 4}, "test": {"cat": 1, "eel": 1}})
    with pytest.raises(ValueError, match="test images but no training images of eel"):
        load_cifar(folder)


def test_a_class_with_a_single_training_image_is_an_error(tmp_path):
    folder = write_images(tmp_path / "pets", {"train": {"cat": 4, "dog": 1}, "test": {"cat": 1, "dog": 1}})
    with pytest.raises(ValueError, match="single training image of dog"):
        load_cifar(folder)


def test_a_class_without_any_image_is_warned_of(tmp_path):
    labels = {"train": [0, 2] * 4, "test": [0, 2]}
    folder = write_parquet(tmp_path / "data", ["cat", "dog", "eel"], label=labels)
    with pytest.warns(UserWarning, match="no images of dog"):
        assert counts(load_cifar(folder)["train"]) == [3, 0, 3]


def test_a_missing_label_is_an_error_that_names_the_image(tmp_path):
    labels = {"train": [0, 1, None, 1], "test": [0, 1]}
    folder = write_parquet(tmp_path / "data", ["cat", "dog"], label=labels)
    with pytest.raises(ValueError, match="Image 2 of train has the label"):
        load_cifar(folder)
    mixed = write_parquet(tmp_path / "mixed", label={"train": [0, 1, -1, 1], "test": [0, 1]})
    with pytest.raises(ValueError, match="all class numbers from 0 on"):
        load_cifar(mixed)


def test_files_that_number_their_classes_differently_are_an_error(tmp_path):
    folder = write_parquet(tmp_path / "data", ["cat", "dog"], label={"train": [0, 1] * 2, "test": [0, 1]})
    other = write_parquet(tmp_path / "other", ["dog", "cat"], label={"train": [0, 1] * 2, "test": [0, 1]})
    (folder / "test.parquet").write_bytes((other / "test.parquet").read_bytes())
    with pytest.raises(
        ValueError, match=r"column label in train.parquet, \['cat', 'dog'\], are not .* \['dog', 'cat'\]"
    ):
        load_cifar(folder)


# decoding


def dataset_of(*images: PIL.Image.Image | bytes | None, classes: int = 2, split: str = "train") -> Dataset:
    encoded = [png(image) if isinstance(image, PIL.Image.Image) else image for image in images]
    rows = {"image": [bytes_ and {"bytes": bytes_, "path": None} for bytes_ in encoded], "label": [0] * len(images)}
    return Dataset.from_dict(
        rows, features=Features({"image": Image(), "label": ClassLabel(num_classes=classes)}), split=split
    )


def test_images_are_held_as_the_bytes_they_have():
    images = [picture(number) for number in range(3)]
    found = ImageTensors(dataset_of(*images))
    assert (found.channels, found.size, found.num_classes, found.class_names) == (3, 8, 2, ["0", "1"])
    assert found.pixels.dtype == torch.uint8
    expected = np.stack([np.asarray(image) for image in images]).transpose(0, 3, 1, 2)
    assert np.array_equal(found.pixels.numpy(), expected)


def test_gray_images_have_one_channel_unless_there_are_colored_ones():
    gray, colored = picture(1, mode="L"), picture(2)
    assert ImageTensors(dataset_of(gray, gray)).pixels.shape == (2, 1, 8, 8)
    for order in ((gray, colored), (colored, gray)):
        found = ImageTensors(dataset_of(*order)).pixels
        for image, pixels in zip(order, found, strict=True):
            assert np.array_equal(pixels.numpy(), np.asarray(image.convert("RGB")).transpose(2, 0, 1))


def test_palettes_and_transparency_become_colors():
    image = picture(3).convert("P")
    assert np.array_equal(
        ImageTensors(dataset_of(image)).pixels[0].numpy(), np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    )
    assert ImageTensors(dataset_of(picture(3).convert("RGBA"))).channels == 3


def test_digits_are_read_by_the_same_class():
    digits = ImageTensors(load_digits(train=50)["train"], size=32)
    assert (digits.channels, digits.size, digits.num_classes, len(digits)) == (1, 32, 10, 50)
    batch = digits.__getitems__(list(range(50)))["pixel_values"]
    assert batch.min() == -1
    assert batch.max() == pytest.approx(2 * 240 / 255 - 1)


def test_images_are_resized_once():
    image = picture(0, size=(12, 6))
    found = ImageTensors(dataset_of(image, picture(1)), size=4)
    expected = image.resize((4, 4), PIL.Image.Resampling.BILINEAR)
    assert np.array_equal(found.pixels[0].numpy(), np.asarray(expected).transpose(2, 0, 1))


def test_a_broken_image_is_an_error_that_names_it():
    truncated = png(picture(2, size=(32, 32)))[:-200]
    for broken in (truncated, b"not an image", None):
        with pytest.raises(ValueError, match="Cannot use image 1 of validation: "):
            ImageTensors(dataset_of(picture(0, size=(32, 32)), broken, split="validation"))


def test_images_of_other_sizes_need_a_size():
    with pytest.raises(
        ValueError, match=r"image 1 of train: \(8, 6\) pixels, others \(8, 8\); pass size= to resize them"
    ):
        ImageTensors(dataset_of(picture(0), picture(1, size=(8, 6))))
    with pytest.raises(ValueError, match=r"image 0 of train: \(8, 6\) pixels, not a square; pass size="):
        ImageTensors(dataset_of(picture(1, size=(8, 6))))


def test_pixels_that_are_not_bytes_are_refused():
    deep = PIL.Image.fromarray(np.full((8, 8), 40_000, dtype=np.uint16))
    with pytest.raises(ValueError, match=r"image 0 of train: its pixels are not bytes \(mode I(;16)?\)"):
        ImageTensors(dataset_of(deep))
    features = Features({"image": datasets.Array2D((2, 2), "int64"), "label": ClassLabel(num_classes=2)})
    wide = Dataset.from_dict({"image": [[[0, 1], [2, 256]]], "label": [0]}, features=features)
    with pytest.raises(ValueError, match="image 0 of the dataset: its values are not whole numbers from 0 to 255"):
        ImageTensors(wide)


def test_many_large_images_are_warned_of(monkeypatch):
    monkeypatch.setattr("aswa_hf.vision.images.LARGE", 3 * 8 * 8)
    with pytest.warns(UserWarning, match=r"2 images of \(8, 8\) pixels take"):
        ImageTensors(dataset_of(picture(0), picture(1)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size must be a whole number of at least 1 or None, got 0"),
        ({"size": (8, 8)}, r"size must be a whole number .*, got \(8, 8\)"),
        ({"mean": (0.5,)}, "mean has 1 numbers, the images 3 channels"),
        ({"std": (1, 1, 0)}, "std is .* Expected positive"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ImageTensors(dataset_of(picture(0)), **options)


def test_datasets_without_images_or_classes_are_refused():
    with pytest.raises(ValueError, match="no images in train"):
        ImageTensors(dataset_of())
    with pytest.raises(ValueError, match=r"Expected columns image and label \(a ClassLabel\)"):
        ImageTensors(dataset_of(picture(0)).cast_column("label", Value("int64")))


# batches


def test_a_batch_is_normalised_by_channel():
    found = ImageTensors(dataset_of(picture(0), picture(1)), mean=(0.1, 0.2, 0.3), std=(0.5, 1, 2))
    batch = found.__getitems__([1, 0, 1])
    assert batch["labels"].dtype == torch.int64
    assert batch["pixel_values"].dtype == torch.float32
    for row, image in zip(batch["pixel_values"], (1, 0, 1), strict=True):
        expected = (np.asarray(picture(image)) / 255 - [0.1, 0.2, 0.3]) / [0.5, 1, 2]
        np.testing.assert_allclose(row.numpy(), expected.transpose(2, 0, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("classes", "mode", "mean", "std"),
    [
        (10, "RGB", CIFAR10_MEAN, CIFAR10_STD),
        (100, "RGB", CIFAR100_MEAN, CIFAR100_STD),
        (20, "RGB", CIFAR100_MEAN, CIFAR100_STD),
        (10, "L", (0.5,), (0.5,)),
    ],
)
def test_mean_and_deviation_default_to_those_of_the_data(classes, mode, mean, std):
    found = ImageTensors(dataset_of(picture(0, mode=mode), classes=classes))
    assert (found.mean, found.std) == (mean, std)


def test_without_augmentation_every_epoch_shows_the_same_images():
    found = ImageTensors(dataset_of(*(picture(number) for number in range(4))))
    before = torch.get_rng_state()
    first, second = (found.__getitems__([0, 1, 2, 3])["pixel_values"] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


def slowly_cropped(image: np.ndarray, top: int, left: int, flip: bool, padding: int) -> np.ndarray:
    channels, height, width = image.shape
    result = np.zeros_like(image)
    for channel, y, x in itertools.product(range(channels), range(height), range(width)):
        source_y = y + top - padding
        source_x = (width - 1 - x if flip else x) + left - padding
        if 0 <= source_y < height and 0 <= source_x < width:
            result[channel, y, x] = image[channel, source_y, source_x]
    return result


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 5, 7)])
def test_crops_and_flips_are_those_of_the_slow_way(shape):
    cases = list(itertools.product((0, 1, 4), (0, 2, 4), (False, True)))
    images = torch.randint(256, (len(cases), *shape), dtype=torch.uint8)
    tops, lefts, flips = map(torch.tensor, zip(*cases, strict=True))
    found = crop_and_flip(images, tops, lefts, flips, padding=2)
    for image, case, result in zip(images.numpy(), cases, found.numpy(), strict=True):
        assert np.array_equal(result, slowly_cropped(image, *case, padding=2))


def test_augmentation_shows_every_crop_and_flip_about_equally_often():
    image = picture(5, size=(16, 16))
    found = ImageTensors(dataset_of(image), augment=True, mean=(0, 0, 0), std=(1 / 255,) * 3)
    assert found.padding == 2
    torch.manual_seed(0)
    drawn = found.__getitems__([0] * 5000)["pixel_values"].round().to(torch.uint8).flatten(1).numpy()
    pixels = np.asarray(image).transpose(2, 0, 1)
    possible = [
        slowly_cropped(pixels, top, left, flip, padding=2).tobytes()
        for top, left, flip in itertools.product(range(5), range(5), (False, True))
    ]
    seen = dict.fromkeys(possible, 0)
    for row in drawn:
        seen[row.tobytes()] += 1  # a KeyError is a crop that cannot be
    assert len(seen) == 50
    assert 60 < min(seen.values()) < max(seen.values()) < 150  # 100 are expected


def test_the_border_is_an_eighth_of_the_image():
    assert ImageTensors(dataset_of(picture(0, size=(32, 32)))).padding == 4


def test_the_global_generator_decides_about_crops():
    found = ImageTensors(dataset_of(*(picture(number, size=(32, 32)) for number in range(4))), augment=True)
    state = torch.get_rng_state()
    first, other = (found.__getitems__([0, 1, 2, 3])["pixel_values"] for _ in range(2))
    torch.set_rng_state(state)
    assert torch.equal(found.__getitems__([0, 1, 2, 3])["pixel_values"], first)
    assert not torch.equal(other, first)


def test_a_loader_hands_on_whole_batches():
    found = ImageTensors(dataset_of(*(picture(number) for number in range(5))))
    batches = list(DataLoader(found, batch_size=2, collate_fn=as_it_is))
    assert [tuple(batch["pixel_values"].shape) for batch in batches] == [(2, 3, 8, 8), (2, 3, 8, 8), (1, 3, 8, 8)]
    assert torch.equal(batches[1]["pixel_values"][1], found[3]["pixel_values"])
    assert found[3]["labels"].shape == ()


def test_single_images_are_put_together_by_the_usual_collate_function():
    found = ImageTensors(dataset_of(*(picture(number) for number in range(3))))
    batch = torch.utils.data.default_collate([found[0], found[2]])
    assert torch.equal(batch["pixel_values"], found.__getitems__([0, 2])["pixel_values"])
    assert len(list(found)) == 3  # a sequence ends
