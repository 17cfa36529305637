"""timm models as transformers models: initialized by timm, and saved so that both libraries load them."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from timm.models._hub import save_config_for_hf
from torch import Tensor
from transformers import TimmWrapperConfig, TimmWrapperForImageClassification

from aswa_hf._utils.files import read_object, replacing
from aswa_hf._utils.names import did_you_mean
from aswa_hf.run_folder import CONFIG, WEIGHTS


class TimmForImageClassification(TimmWrapperForImageClassification):
    """transformers' timm wrapper that leaves the initialization to timm and saves what timm can load too.

    transformers finds the loss by the end of a class's name.
    """

    def init_weights(self) -> None:
        """A no-op: timm has initialized the weights; the wrapper would overwrite convolutions with N(0, 0.02²)."""

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        push_to_hub: bool = False,
        **options: Any,
    ) -> None:
        """Writes `model.safetensors` and `config.json` as timm does."""
        if push_to_hub:
            raise ValueError("push_to_hub=True is not supported here: save to a folder, then model.push_to_hub(…).")
        if is_main_process:
            save_timm(self, save_directory, state_dict)


def timm_classifier(
    name: str,
    classes: int | Sequence[str],
    *,
    channels: int = 3,
    size: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    **options: Any,
) -> TimmForImageClassification:
    """A timm model by name with new weights, as a transformers model; `options` go to `timm.create_model`.

    `classes` is their number or their names. `size`, `mean` and `std` describe the images it is to be trained on,
    by default those that its authors used; they are saved with it, so that others prepare images in the same way.
    """
    check_timm_name(name)
    names = [str(label) for label in range(classes)] if isinstance(classes, int) else [str(label) for label in classes]
    if len(names) < 2 or len(set(names)) < len(names):
        raise ValueError(f"A classifier needs two or more classes with different names, got {names}.")
    preset = timm.get_pretrained_cfg(name)
    if channels != 3:
        options["in_chans"] = channels
    if size is not None and preset is not None and preset.fixed_input_size:
        options["img_size"] = size
    config = TimmWrapperConfig(
        architecture=name.partition(".")[0],
        num_labels=len(names),
        id2label=dict(enumerate(names)),
        label2id={label: index for index, label in enumerate(names)},
        model_args=options,
    )
    model = TimmForImageClassification(config)
    known: dict[str, Any] = model.timm_model.pretrained_cfg
    size = size or known["input_size"][-1]
    known["input_size"] = (channels, size, size)
    for key, values in (("mean", mean), ("std", std)):
        values = tuple(values) if values is not None else tuple(known[key])
        # If the number of channels differs, the mean over the colors is used for each.
        known[key] = values if len(values) == channels else (sum(values) / len(values),) * channels
    # The whole image was seen in training, so nothing is cut off in use.
    known["crop_pct"] = 1.0
    for key in ("test_input_size", "test_crop_pct", "tag", "license", "origin_url"):
        known.pop(key, None)  # of other weights
    return model


def check_timm_name(name: str) -> None:
    """Raises ValueError, with the names of similar ones, for a model that timm does not have."""
    if not timm.is_model(name):
        known = timm.list_models()
        similar = difflib.get_close_matches(name, known, n=5, cutoff=0.3)
        raise ValueError(f"timm has no model {name!r}. {did_you_mean(name, known)}Similar ones: {', '.join(similar)}.")


def save_timm(
    model: TimmWrapperForImageClassification,
    folder: str | os.PathLike[str],
    state_dict: Mapping[str, Tensor] | None = None,
) -> None:
    """Saves a wrapped timm model to a folder that both timm and transformers load.

    >>> save_timm(model, "folder")
    >>> timm.create_model("local-dir:folder", pretrained=True)
    >>> AutoModelForImageClassification.from_pretrained("folder")

    The architectures of this package are known to both once `aswa_hf.vision` is imported.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(model.state_dict() if state_dict is None else state_dict, folder / WEIGHTS)
    config = model.config
    labels = [config.id2label[index] for index in range(config.num_labels)]
    with replacing(folder / CONFIG) as temporary:
        save_config_for_hf(
            model.timm_model,
            temporary,
            model_config={"num_classes": config.num_labels, "label_names": labels},
            model_args=config.model_args or None,
        )
        drop_repeated_classes(temporary)


def drop_repeated_classes(config: Path) -> None:
    """Removes the number of classes from the model's arguments in a config that timm wrote.

    timm ≥ 1.0.31 repeats it there, and transformers' wrapper would pass it to the model twice.
    """
    content = read_object(config)
    if content.get("model_args", {}).pop("num_classes", None) is not None:
        config.write_text(json.dumps(content, indent=2), encoding="utf-8")


def save_tensors(state: Mapping[str, Tensor], path: Path, **about: str) -> None:
    """Writes weights under timm's names in one atomic write, with `about` as metadata of the file."""
    # safetensors refuses memory that is strided (channels last) or shared (tied weights).
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in state.items():
        tensor = tensor.detach().to("cpu", memory_format=torch.contiguous_format).contiguous()
        memory = tensor.untyped_storage().data_ptr()
        tensors[name.removeprefix("timm_model.")] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"} | about)
