"""Strict loading of transformers models: they would replace a missing tensor with random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aswa_hf._utils.tensors import DTYPES, is_finite, read_header


def load_strictly(model_class: Any, folder: str | Path, *, unexpected: bool = False) -> Any:
    """Loads a model from safetensors; raises ValueError if a tensor is missing, has a wrong shape or is not finite.

    Tensors that the model does not have are refused too, unless they may be `unexpected`: a base model may have been
    saved with another head.
    """
    options = {"use_safetensors": True, "ignore_mismatched_sizes": True}  # these are refused below, by name
    try:
        model, about = model_class.from_pretrained(folder, output_loading_info=True, **options)
    except (OSError, ValueError):
        raise
    except Exception as error:  # many kinds of errors, depending on the files
        reason = " ".join(str(error).split())
        raise ValueError(f"The model in {folder} cannot be loaded: {type(error).__name__}: {reason}") from None
    for what in ("missing", "mismatched") if unexpected else ("missing", "unexpected", "mismatched"):
        if names := sorted(name if isinstance(name, str) else name[0] for name in about[f"{what}_keys"]):
            problem = "has a different shape" if what == "mismatched" else f"is {what}"
            raise ValueError(f"{folder} does not hold the weights of {type(model).__name__}: {names[0]!r} {problem}.")
    check_finite(model, folder)
    check_fractions(model, folder)
    return model


def check_finite(model: Any, folder: str | Path) -> None:
    """Raises ValueError if a weight or a statistic of a model is NaN or infinite."""
    for name, tensor in model.state_dict().items():  # buffers that are not saved may be infinite on purpose
        if not is_finite(tensor):
            raise ValueError(f"The weights in {folder} are not finite numbers: {name!r} has NaN or infinity.")


def check_fractions(model: Any, folder: str | Path) -> None:
    """Raises ValueError if a file in a folder has whole numbers for weights that are fractions, such as zeros."""
    expected = {name.removeprefix("timm_model."): tensor for name, tensor in model.state_dict().items()}
    for file in sorted(Path(folder).glob("*.safetensors")):
        for name, entry in read_header(file)[0].items():
            tensor, dtype = expected.get(name.removeprefix("timm_model.")), DTYPES.get(entry.dtype)
            if tensor is not None and dtype is not None and tensor.is_floating_point() > dtype.is_floating_point:
                raise ValueError(
                    f"The weights in {folder} are whole numbers of type {dtype}: {name!r} needs fractions."
                )
