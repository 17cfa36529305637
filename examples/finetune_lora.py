"""Fine-tunes a small language model with LoRA by TRL's `SFTTrainer`, and compares what each strategy ends with.

    python examples/finetune_lora.py                          # about two minutes on two cores, nothing is downloaded
    python examples/finetune_lora.py --task sums --seed 1
    python examples/finetune_lora.py --push me/my-adapter     # the adapter with its card
    python examples/finetune_lora.py --fast                   # seconds, to see that it runs

First a causal model is trained from its config on plain statements; this is the base model. Then an adapter learns to
answer questions in another form, with a decision every 20 steps. The statements are made here, by a program: of the
countries that ship with aswa-hf (`aswa_hf/kge/countries.md` has their origin and license), or sums of two numbers. The
questions are about facts that the statements contain; those for validation and test are not asked in
training.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)
from trl import SFTConfig, SFTTrainer

from aswa_hf import ASWACallback
from aswa_hf.hub import push_to_hub
from aswa_hf.kge import load_kg

CHAT = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<user> {{ message['content'] }} "
    "{% else %}<answer> {{ message['content'] }} <end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<answer> {% endif %}"
)
STRATEGIES = {
    "aswa": {},
    "dense-aswa": {},
    "swa": {},
    "ema": {"decay": 0.99},
    "bema": {"every": 1},
    "best": {},
    "last": {},
}
Pairs = list[tuple[str, str]]


# ---- data ----


def countries() -> tuple[list[str], Pairs]:
    """Statements about all countries, and questions about them with their answers."""
    kg = load_kg("countries")
    facts: dict[str, dict[str, list[str]]] = {}
    for split in kg:
        for row in kg[split]:
            head, relation, tail = (
                kg.vocab.entities[row["head"]],
                kg.vocab.relations[row["relation"]],
                kg.vocab.entities[row["tail"]],
            )
            facts.setdefault(head, {}).setdefault(relation, []).append(tail)
    statements, questions = [], []
    for name, found in sorted(facts.items()):
        if places := found.get("locatedin"):
            statements += [f"{name} is in {' and in '.join(sorted(places))} ."]
            questions.append((f"where can you find {name} ?", f"in {' and in '.join(sorted(places))}"))
        for other in sorted(found.get("neighbor", ())):
            statements.append(f"{name} has a border with {other} .")
        if near := sorted(found.get("neighbor", ())):
            questions.append((f"which countries are around {name} ?", " , ".join(near[:3])))
    return statements, questions


def sums() -> tuple[list[str], Pairs]:
    """Sums of two numbers below 40, digit by digit, and little stories that need them."""
    pairs = [(a, b) for a in range(40) for b in range(40)]
    statements = [f"{_digits(a)} + {_digits(b)} = {_digits(a + b)} ." for a, b in pairs]
    questions = [
        (f"anna has {_digits(a)} apples and gets {_digits(b)} more . how many ?", f"she has {_digits(a + b)} apples")
        for a, b in pairs
        if (a * 7 + b * 3) % 4 == 0
    ]
    return statements, questions


def _digits(number: int) -> str:
    return " ".join(str(number))


TASKS = {"countries": countries, "sums": sums}


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of the words in `texts`."""
    special = ["<pad>", "<eos>", "<unk>", "<user>", "<answer>", "<end>"]
    words = sorted({word for text in texts for word in text.split()})
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*special, *words])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=CHAT
    )


def split_questions(questions: Pairs, seed: int) -> dict[str, Dataset]:
    """Questions for training, validation and test, as TRL takes them."""
    shuffled = random.Random(seed).sample(questions, len(questions))
    first, second = int(0.5 * len(shuffled)), int(0.75 * len(shuffled))
    parts = {"train": shuffled[:first], "validation": shuffled[first:second], "test": shuffled[second:]}
    return {
        split: Dataset.from_list(
            [
                {
                    "prompt": [{"role": "user", "content": question}],
                    "completion": [{"role": "assistant", "content": answer}],
                }
                for question, answer in pairs
            ]
        )
        for split, pairs in parts.items()
    }


# ---- training ----


def train_base(statements: list[str], tokenizer: Any, folder: Path, *, epochs: int, seed: int) -> Path:
    """Trains the base model from its config, and returns where it is saved."""
    set_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    rows = [tokenizer(f"{text} <eos>", max_length=48, truncation=True) for text in statements]
    args = TrainingArguments(
        str(folder / "base"), num_train_epochs=epochs, per_device_train_batch_size=32, learning_rate=3e-3,
        lr_scheduler_type="cosine", warmup_steps=20, weight_decay=0.01, seed=seed, **QUIET,
    )  # fmt: skip
    trainer = Trainer(
        LlamaForCausalLM(config),
        args,
        train_dataset=[dict(row) for row in rows],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    return folder / "base"


QUIET: dict[str, Any] = {
    "save_strategy": "no", "logging_strategy": "no", "report_to": "none", "disable_tqdm": True, "bf16": False,
    "dataloader_pin_memory": False,
}  # fmt: skip


def finetune(
    task: str = "countries",
    *,
    seed: int = 0,
    folder: str | Path = "runs/finetune_lora",
    base_epochs: int = 40,
    epochs: int = 12,
    every: str = "20 steps",
    schedule: str = "linear",
    rate: float = 1e-2,
    strategies: dict[str, dict[str, Any]] = STRATEGIES,
    most: int | None = None,
    base: Path | None = None,
) -> dict[str, Any]:
    """One run; returns the losses of each strategy's weights on the questions for validation and for test.

    A `base` model of an earlier run of the same task and seed need not be trained again.
    """
    folder = Path(folder)
    statements, questions = TASKS[task]()
    statements, questions = statements[:most], questions[:most]
    tokenizer = make_tokenizer([*statements, *(text for pair in questions for text in pair)])
    if base is None:
        base = train_base(statements, tokenizer, folder, epochs=base_epochs, seed=seed)
    data = split_questions(questions, seed)

    set_seed(seed)
    args = SFTConfig(
        str(folder), num_train_epochs=epochs, per_device_train_batch_size=8, per_device_eval_batch_size=64,
        learning_rate=rate, lr_scheduler_type=schedule, max_length=64, gradient_checkpointing=False, seed=seed,
        eval_strategy="steps", eval_steps=int(every.split()[0]), completion_only_loss=True,
        # The last checkpoint is kept: `aswa-hf serve` shows the running model beside the average.
        **{**QUIET, "save_strategy": "epoch", "save_total_limit": 1},
    )  # fmt: skip
    trainer = SFTTrainer(
        model=str(base),
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    callback = ASWACallback(trainer, strategies=strategies, every=every)  # the one line
    trainer.add_callback(callback)
    trainer.train()

    results: dict[str, Any] = {}
    for name, strategy in callback.strategies.items():
        with strategy.swapped():
            found = {split: trainer.evaluate(data[split])["eval_loss"] for split in ("validation", "test")}
        results[name] = {split: {"loss": loss} for split, loss in found.items()}
    trainer.save_model()
    (folder / "results.json").write_text(json.dumps({"task": task, "seed": seed, "strategies": results}, indent=2))
    return {"results": results, "callback": callback, "trainer": trainer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="countries")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schedule", choices=["linear", "constant"], default="linear", help="of the learning rate")
    parser.add_argument("--output_dir", default="runs/finetune_lora")
    parser.add_argument("--push", metavar="REPO", help="push the adapter with its card to this repository")
    parser.add_argument("--fast", action="store_true", help="a few steps on little data")
    given = parser.parse_args()
    fast = {"base_epochs": 1, "epochs": 2, "every": "2 steps", "most": 64} if given.fast else {}
    run = finetune(given.task, seed=given.seed, folder=given.output_dir, schedule=given.schedule, **fast)
    for name, found in run["results"].items():
        validation, test = found["validation"]["loss"], found["test"]["loss"]
        print(f"{name:10} validation loss {validation:.4f}, held-out loss {test:.4f}, perplexity {math.exp(test):.3f}")
    print(f"The adapter with the weights of {run['callback'].applied} is in {given.output_dir}.")
    if given.push:
        print(f"Pushed to {push_to_hub(given.output_dir, given.push)}")


if __name__ == "__main__":
    main()
