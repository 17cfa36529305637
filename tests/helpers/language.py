"""Tiny language models from a config, a tokenizer made on the spot, and data for TRL's trainers: no download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from transformers.trainer_callback import PrinterCallback

WORDS = [f"w{i}" for i in range(20)]
SETTINGS: dict[str, Any] = {
    "num_train_epochs": 3,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "eval_strategy": "epoch",
    "save_strategy": "no",
    "logging_strategy": "epoch",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,  # TRL's default is True
}
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=CHAT_TEMPLATE
    )


def causal_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=23, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip


def causal_model(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    set_seed(7)
    return LlamaForCausalLM(causal_config()).to(dtype)


def saved_base(folder: Path) -> str:
    """Saves a base model, and returns its path."""
    causal_model().save_pretrained(folder / "base")
    return str(folder / "base")


def texts(count: int, first: int) -> list[str]:
    return [" ".join(WORDS[(first + i + step) % 20] for step in range(8)) for i in range(count)]


def preferences(count: int, first: int) -> list[dict[str, str]]:
    rows = texts(count, first)
    return [{"prompt": row[:8], "chosen": row[8:], "rejected": " ".join(reversed(row[8:].split()))} for row in rows]


def rows(kind: str, count: int, first: int) -> Dataset:
    """What TRL's trainer of this kind takes."""
    if kind in ("DPO", "Reward"):
        return Dataset.from_list(preferences(count, first))
    if kind == "GRPO":
        return Dataset.from_list([{"prompt": row["prompt"]} for row in preferences(count, first)])
    return Dataset.from_list([{"text": text} for text in texts(count, first)])


def make_trl(kind: str, folder: Path, *, model: Any = None, trainer: dict[str, Any] | None = None, **options: Any):
    """TRL's trainer `kind` (SFT, DPO, …) with a tiny model; `trainer` and `options` replace its arguments."""
    import trl

    given = {} if kind == "GRPO" else {"max_length": 16}
    args = getattr(trl, f"{kind}Config")(str(folder), **{**SETTINGS, **given, **options})
    made = getattr(trl, f"{kind}Trainer")(
        **{
            "model": causal_model() if model is None else model,
            "args": args,
            "train_dataset": rows(kind, 12, 0),
            "eval_dataset": rows(kind, 8, 5),
            "processing_class": tokenizer(),
            **(trainer or {}),
        }
    )
    made.remove_callback(PrinterCallback)
    return made
