"""Trainers that add metrics in `log`, as TRL's do: these can decide, and nothing of ours stays in their buffers."""

from collections import defaultdict

import pytest
from training import ConvNet, image_data
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments, set_seed

from aswa_hf import ASWACallback

SETTINGS = {
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
}


class Buffered(Trainer):
    """Adds the mean of what it has seen since the last log, by mode."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.seen = defaultdict(list)

    def compute_loss(self, model, inputs, return_outputs=False, **options):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
        self.seen[model.training].append(-loss.item())
        return (loss, outputs) if return_outputs else loss

    def log(self, logs, start_time=None):
        mode = self.model.training
        found = self.seen.pop(mode, [])
        prefix = "" if mode else "eval_"
        super().log({**logs, **({f"{prefix}goodness": sum(found) / len(found)} if found else {})}, start_time)


def test_a_metric_that_only_the_log_has_decides_and_buffers_are_emptied(tmp_path):
    def trained(with_callback):
        set_seed(7)
        trainer = Buffered(
            ConvNet(),
            TrainingArguments(str(tmp_path / str(with_callback)), **SETTINGS),
            train_dataset=image_data(24, seed=1),
            eval_dataset=image_data(16, seed=2),
        )
        if with_callback:
            trainer.add_callback(callback := ASWACallback(trainer, metric="goodness"))
            trainer.strategies_of_test = lambda: callback.strategies
        trainer.train()
        return trainer

    plain, followed = trained(False), trained(True)
    records = followed.strategies_of_test()["aswa"].trajectory
    measured = [entry["eval_goodness"] for entry in plain.state.log_history if "eval_goodness" in entry]
    assert [record.running_score for record in records] == measured
    assert [record.lookahead_score for record in records][1:] != measured[1:]
    # What the look-aheads added is in no log line, and no line is doubled.
    logged = [entry["eval_goodness"] for entry in followed.state.log_history if "eval_goodness" in entry]
    assert logged == measured
    assert not followed.seen[False]


# ---- TRL itself ----

WORDS = [f"w{i}" for i in range(20)]


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def causal_model():
    set_seed(7)
    config = LlamaConfig(
        vocab_size=23, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def texts(count, first):
    return [" ".join(WORDS[(first + i + step) % 20] for step in range(8)) for i in range(count)]


def preferences(count, first):
    rows = texts(count, first)
    return [{"prompt": row[:8], "chosen": row[8:], "rejected": " ".join(reversed(row[8:].split()))} for row in rows]


@pytest.mark.parametrize(("kind", "metric"), [("SFT", "mean_token_accuracy"), ("DPO", "rewards/accuracies")])
@pytest.mark.filterwarnings("default")  # of TRL and what it imports
def test_trainers_of_trl_decide_by_their_own_metrics(kind, metric, tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    rows = [{"text": text} for text in texts(12, 0)] if kind == "SFT" else preferences(12, 0)
    held_out = [{"text": text} for text in texts(8, 5)] if kind == "SFT" else preferences(8, 5)
    trainer = getattr(trl, f"{kind}Trainer")(
        model=causal_model(),
        args=getattr(trl, f"{kind}Config")(str(tmp_path), max_length=16, **SETTINGS),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(held_out),
        processing_class=tokenizer(),
        **({"ref_model": causal_model()} if kind == "DPO" else {}),
    )
    trainer.add_callback(callback := ASWACallback(trainer, metric=metric, strategies=("aswa", "ema", "last")))
    trainer.train()
    key = f"eval_{metric}"
    lines = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    records = callback.strategies["aswa"].trajectory
    assert [record.running_score for record in records] == [line[key] for line in lines]
    assert all(record.score is not None for record in records)
    assert not any(trainer._metrics["eval"].values())
