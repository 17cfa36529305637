"""The CIFAR networks for transformers: with `architectures.py`, shipped with every such model on the Hub."""

from typing import Any

from transformers import TimmWrapperForImageClassification

# transformers only fetches what is imported by this form.
from .architectures import default_cfgs  # noqa: F401 (registers the networks with timm)


class CifarForImageClassification(TimmWrapperForImageClassification):
    """transformers' timm wrapper, for networks that timm does not have."""

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **options: Any) -> Any:
        """Loads a model as usual, but strictly and only from safetensors.

        Raises ValueError if a tensor is missing, unexpected or not finite, which transformers would accept.
        """
        options = {"use_safetensors": True, **options}
        model, info = super().from_pretrained(*args, output_loading_info=True, **options)
        for what in ("missing", "unexpected"):
            if names := sorted(info[f"{what}_keys"]):
                raise ValueError(f"The weights of {args[0]} do not fit {cls.__name__}: {names[0]!r} is {what}.")
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and not tensor.is_meta and not tensor.isfinite().all():
                raise ValueError(f"The weights of {args[0]} are not finite numbers: {name!r} has NaN or infinity.")
        return (model, info) if output_loading_info else model
