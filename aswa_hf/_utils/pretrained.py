"""Strict loading of transformers models: they would replace a missing tensor with random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def load_strictly(model_class: Any, folder: Path) -> Any:
    """Loads a model from safetensors; raises ValueError if a tensor is missing, unexpected or has another shape."""
    options = {"use_safetensors": True, "ignore_mismatched_sizes": True}  # these are refused below, by name
    try:
        model, about = model_class.from_pretrained(folder, output_loading_info=True, **options)
    except (OSError, ValueError):
        raise
    except Exception as error:  # of many kinds, by what the files hold
        reason = " ".join(str(error).split())
        raise ValueError(f"The model in {folder} cannot be loaded: {type(error).__name__}: {reason}") from None
    for what in ("missing", "unexpected", "mismatched"):
        if names := sorted(name if isinstance(name, str) else name[0] for name in about[f"{what}_keys"]):
            problem = "has another shape" if what == "mismatched" else f"is {what}"
            raise ValueError(f"{folder} does not hold the weights of {type(model).__name__}: {names[0]!r} {problem}.")
    return model
