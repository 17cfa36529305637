"""Training timm models with the Trainer."""

from __future__ import annotations

from typing import Any

import timm
import torch
from torch import Tensor, nn


class ImageClassifier(nn.Module):
    """A timm model with the inputs and outputs the Trainer expects: `pixel_values`, `labels`; `loss`, `logits`."""

    def __init__(self, name: str, *, num_classes: int, **options: Any):
        super().__init__()
        self.backbone = timm.create_model(name, num_classes=num_classes, **options)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.backbone(pixel_values)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def accuracy(predictions: Any) -> dict[str, float]:
    """`compute_metrics` for the Trainer: the share of images whose most likely class is the true one."""
    classes = torch.as_tensor(predictions.predictions).argmax(-1)
    return {"accuracy": float((classes == torch.as_tensor(predictions.label_ids)).float().mean())}
