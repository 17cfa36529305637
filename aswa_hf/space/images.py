"""A picture classified, and examples from the data of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from aswa_hf._utils.pretrained import check_finite, load_strictly
from aswa_hf.run_folder import CONFIG, WEIGHTS, check_unchanged, read_config
from aswa_hf.space.source import EXAMPLES, Reloading, Source, in_memory, run_settings

MAX_PIXELS = 50_000_000


class Images:
    """An image classifier that takes any picture."""

    def __init__(self, source: Source):
        self.source = source
        self._loaded = Reloading(self._load, [source.folder / name for name in (WEIGHTS, CONFIG)])

    def _load(self) -> tuple[Any, Any]:
        folder = self.source.folder
        config = read_config(folder / CONFIG)
        if config.get("architecture"):
            import timm

            import aswa_hf.vision  # noqa: F401 (registers architectures with timm)

            if not (folder / WEIGHTS).is_file():  # timm would open a pickle
                raise ValueError(f"{folder} has no {WEIGHTS}.")
            model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
            check_finite(model, folder)
            check_unchanged(folder, CONFIG, WEIGHTS)
            names = config.get("label_names") or [str(index) for index in range(int(config["num_classes"]))]
            return model, {"names": [str(name) for name in names], **model.pretrained_cfg}
        from transformers import AutoImageProcessor, AutoModelForImageClassification

        model = in_memory(load_strictly(AutoModelForImageClassification, folder).eval())
        labels = model.config.id2label
        names = [str(labels[index]) for index in range(len(labels))]
        return model, {"names": names, "processor": AutoImageProcessor.from_pretrained(folder)}

    @torch.no_grad()
    def classify(self, picture: Any, k: int = 10) -> list[tuple[str, float]]:
        """Returns the most likely classes of a PIL image with their probabilities."""
        if picture is None:
            raise ValueError("Drop a picture first, or choose an example.")
        if picture.width * picture.height > MAX_PIXELS:
            raise ValueError(f"The picture has {picture.width * picture.height:,} pixels: at most {MAX_PIXELS:,}.")
        model, about = self._loaded.get()
        if "processor" in about:
            logits = model(**about["processor"](picture.convert("RGB"), return_tensors="pt")).logits[0]
        else:
            logits = model(_prepared(picture, about))[0]
        shares = logits.float().softmax(-1)
        best = shares.topk(min(k, len(shares)))
        return [(about["names"][i], p) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)]

    def examples(self, folder: Path, count: int = 8) -> list[Path]:
        """Returns pictures of the run's own data, if they are on this machine; writes them to a folder first."""
        ready = sorted((self.source.folder / EXAMPLES).glob("*.png"))
        return ready or write_examples(self.source, folder, count)


def write_examples(source: Source, folder: Path, count: int = 8) -> list[Path]:
    """Writes test images of a run, one of each class in turn, as PNG files; none if the data are not available."""
    from aswa_hf.experiments.image import load_images
    from aswa_hf.experiments.settings import ImageRun, read_run
    from aswa_hf.run_folder import SETTINGS

    dataset = run_settings(source.folder).get("dataset")
    name = dataset.get("source") if isinstance(dataset, Mapping) else None
    if not isinstance(name, str) or not (name == "digits" or Path(name).is_dir()):
        return []
    try:
        run = read_run(source.folder / SETTINGS)
        if not isinstance(run, ImageRun):
            return []
        test = load_images(run)["test"]
    except (OSError, ValueError):
        return []
    labels = test["label"][:]
    chosen = [labels.index(label) for label in sorted(set(labels))[:count]]
    names = test.features["label"].names
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for row in chosen:
        picture = _as_picture(test[row]["image"])
        path = folder / f"{_plain(names[labels[row]])}-{row}.png"
        picture.save(path)  # in its own size: resized twice, it would not be what the model was trained to see
        paths.append(path)
    return paths


def _as_picture(content: Any) -> Any:
    if hasattr(content, "convert"):
        return content
    import numpy as np
    import PIL.Image

    return PIL.Image.fromarray(np.asarray(content, dtype=np.uint8).squeeze())


def _plain(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)[:40]


def _prepared(picture: Any, about: Mapping[str, Any]) -> torch.Tensor:
    """The picture as the model was trained to see it: its size, its channels, its mean and deviation."""
    import numpy as np
    import PIL.Image

    from aswa_hf.vision.images import normalize

    channels, height, width = about["input_size"]
    pixels = picture.convert("L" if channels == 1 else "RGB")
    pixels = pixels.resize((width, height), PIL.Image.Resampling.BILINEAR)
    array = np.asarray(pixels)
    bytes_ = torch.from_numpy(array.copy().reshape(height, width, -1)).permute(2, 0, 1).unsqueeze(0)
    return normalize(bytes_, about["mean"], about["std"])
