"""Metrics of generated text decide in `Seq2SeqTrainer`."""

import pytest
import torch
from language import SETTINGS, tokenizer
from transformers import (
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

from aswa_hf import ASWACallback


def copied(seed, count):
    """The task: repeat the first three of five words."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(3, 23, (count, 5), generator=generator)
    return [{"input_ids": row.tolist(), "labels": [*row[:3].tolist(), 1]} for row in words]


@pytest.mark.filterwarnings("default")
def test_a_metric_of_generated_text_decides(tmp_path):
    set_seed(7)
    config = T5Config(
        vocab_size=23, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, pad_token_id=0, eos_token_id=1,
        decoder_start_token_id=0, dropout_rate=0.0,
    )  # fmt: skip
    generated = []

    def first_word(predictions):
        generated.append(predictions.predictions.shape)
        labels = predictions.label_ids
        return {"first_word": float((predictions.predictions[:, 1] == labels[:, 0]).mean())}

    model = T5ForConditionalGeneration(config)
    args = Seq2SeqTrainingArguments(
        str(tmp_path), **SETTINGS | {"learning_rate": 3e-2}, predict_with_generate=True, generation_max_length=5
    )
    trainer = Seq2SeqTrainer(
        model, args, train_dataset=copied(1, 32), eval_dataset=copied(2, 16), compute_metrics=first_word,
        processing_class=tokenizer(), data_collator=DataCollatorForSeq2Seq(tokenizer(), model=model),
    )  # fmt: skip
    trainer.add_callback(callback := ASWACallback(trainer, metric="first_word"))
    trainer.train()
    aswa = callback.strategies["aswa"]
    # One example shows that the metric exists; then the running model and the look-aheads are evaluated.
    assert [examples for examples, _ in generated] == [1] + (3 + 2) * [16]
    logged = [entry["eval_first_word"] for entry in trainer.state.log_history if "eval_first_word" in entry]
    assert [record.running_score for record in aswa.trajectory] == logged
    assert trainer.evaluate()["eval_first_word"] == pytest.approx(aswa.score)
