"""The CIFAR networks for transformers: with `architectures.py`, shipped with every such model on the Hub."""

from transformers import TimmWrapperForImageClassification

# transformers only fetches what is imported by this form.
from .architectures import default_cfgs  # noqa: F401 (registers the networks with timm)


class CifarForImageClassification(TimmWrapperForImageClassification):
    """transformers' timm wrapper, for networks that timm does not have."""
