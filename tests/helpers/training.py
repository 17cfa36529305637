"""Small real models and the `Trainer` runs the tests share.

Text, text with LoRA adapters, images with BatchNorm, links between countries (by the training scheme's name).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from aswa_hf import ASWACallback


class ConvNet(nn.Module):
    """Convolution, BatchNorm and dropout: everything whose state an extra evaluation could disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(8, 3)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(pixel_values).mean((2, 3)))
        loss = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
        return loss | {"logits": logits}


def text_model(dtype: torch.dtype = torch.float32) -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=24, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=8, num_labels=3,
    )  # fmt: skip
    return BertForSequenceClassification(config).to(dtype)


def lora_model() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"], lora_dropout=0.1)
    return get_peft_model(text_model(), config)


def text_data(examples: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Eight tokens, the first of which tells the label; some labels are wrong."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 24, (examples, 8))
    labels = tokens[:, 0] % 3
    noisy = random.random(examples) < 0.1
    labels[noisy] = random.integers(0, 3, noisy.sum())
    return [{"input_ids": torch.tensor(t), "labels": torch.tensor(y)} for t, y in zip(tokens, labels, strict=True)]


def image_data(examples: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """6×6 noise whose brightness and contrast tell the class."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 3, examples)
    images = (
        random.normal(size=(examples, 1, 6, 6)) * (1 + labels[:, None, None, None]) + 0.3 * labels[:, None, None, None]
    )
    return [
        {"pixel_values": torch.tensor(x, dtype=torch.float32), "labels": torch.tensor(y)}
        for x, y in zip(images, labels, strict=True)
    ]


def accuracy(predictions: Any) -> dict[str, float]:
    return {"accuracy": float((predictions.predictions.argmax(-1) == predictions.label_ids).mean())}


def scripted(*scores: float) -> Callable[[Any], dict[str, float]]:
    """Metrics of a script instead of the predictions: each evaluation has the next accuracy.

    Before training the callback tries its metric on one example per process: that has none of these.
    """
    left = iter(scores)
    return lambda predictions: {"accuracy": next(left) if len(predictions.label_ids) > 4 else 0.0}


def assert_accuracy(found: float, probabilities: torch.Tensor, labels: torch.Tensor, digits: int = 6) -> None:
    """`found`, of which `digits` are known, is the accuracy of these predictions, made with whatever kernels.

    Images whose two likeliest classes rounding might exchange count either way.
    """
    own = probabilities.gather(1, labels[:, None])
    best_other = probabilities.scatter(1, labels[:, None], -1).amax(1, keepdim=True)
    surely, possibly = (((own - best_other) > margin).double().mean().item() for margin in (1e-3, -1e-3))
    assert surely - 10**-digits <= found <= possibly + 10**-digits


MODELS = {"text": text_model, "lora": lora_model, "conv": ConvNet}


def make_trainer(kind: str, output_dir: str | Path, *, examples: int = 48, **options: Any) -> Trainer:
    """A trainer of six epochs that evaluates and saves after each; `options` replace or add training arguments."""
    trainer_options = {
        name: options.pop(name)
        for name in ("callbacks", "eval_dataset", "compute_metrics", "model")
        if name in options
    }
    arguments: dict[str, Any] = {
        "output_dir": str(output_dir),
        "num_train_epochs": 6,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 16,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 7,
    } | options
    set_seed(7)
    if kind not in MODELS:
        arguments["per_device_train_batch_size"] *= 20
        return link_trainer(kind, TrainingArguments(**arguments), **trainer_options)
    data = image_data if kind == "conv" else text_data
    return Trainer(
        **{
            "model": MODELS[kind](),
            "args": TrainingArguments(**arguments),
            "train_dataset": data(examples, seed=1),
            "eval_dataset": data(64, seed=2),
            "compute_metrics": accuracy,
        }
        | trainer_options
    )  # fmt: skip


def link_trainer(scheme: str, args: TrainingArguments, **options: Any) -> Trainer:
    """A link predictor with dropout, for which validation is ranking."""
    from aswa_hf.kge import Keci, KGETrainer, load_kg

    kg = load_kg("countries")
    model = Keci(kg.config(dim=16, p=1, q=2, input_dropout=0.1, query_dropout=0.1))
    return KGETrainer(model, args, kg, scheme=scheme, negatives=4, **options)


def with_aswa(trainer: Trainer, **options: Any) -> ASWACallback:
    """Adds the callback to `trainer` and gives it back."""
    metric = "mrr" if hasattr(trainer, "kg") else "loss"
    callback = ASWACallback(trainer, **({"metric": metric} | options))
    trainer.add_callback(callback)
    return callback


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of everything a checkpoint of the model holds."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different, f"different: {different}"
