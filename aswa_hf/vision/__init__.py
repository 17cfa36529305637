"""Image classification with timm: importing this registers the CIFAR architectures of the SWA paper."""

from aswa_hf.vision import architectures
from aswa_hf.vision.data import ImageTensors, as_it_is, load_cifar, load_digits

__all__ = ["ImageTensors", "architectures", "as_it_is", "load_cifar", "load_digits"]
