"""Trainers that add metrics in `log`, as TRL's do: these can decide, and nothing of ours stays in their buffers."""

import shutil
from collections import defaultdict

import pytest
from language import SETTINGS, WORDS, causal_config, causal_model, make_trl, rows
from training import ConvNet, assert_same_tensors, image_data
from transformers import LlamaForSequenceClassification, Trainer, TrainingArguments, set_seed

from aswa_hf import ASWACallback


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


def test_an_evaluation_of_its_own_takes_nothing_from_the_next_log_of_training(tmp_path):
    def goodness(with_callback):
        set_seed(7)
        trainer = Buffered(
            ConvNet(),
            TrainingArguments(str(tmp_path / str(with_callback)), **SETTINGS | {"eval_strategy": "no"}),
            train_dataset=image_data(24, seed=1),
            eval_dataset=image_data(16, seed=2),
        )
        if with_callback:
            trainer.add_callback(ASWACallback(trainer, metric="goodness", every="4 steps"))
        trainer.train()
        return [entry["goodness"] for entry in trainer.state.log_history if "goodness" in entry]

    assert goodness(True) == goodness(False)


class BufferedOfMany(Buffered):
    """Reports None for a single batch, as GRPO does where a reward has no value for any example."""

    def log(self, logs, start_time=None):
        few = len(self.seen[self.model.training]) < 2
        super().log(logs, start_time)
        if few and "eval_goodness" in self.state.log_history[-1]:
            self.state.log_history[-1]["eval_goodness"] = None


class ReturnedOfMany(BufferedOfMany):
    """Adds what it logs to what the evaluation returns, too, as TRL does."""

    def log(self, logs, start_time=None):
        super().log(logs, start_time)
        logs.update({key: value for key, value in self.state.log_history[-1].items() if key.startswith("eval_")})


@pytest.mark.parametrize("kind", [BufferedOfMany, ReturnedOfMany])
@pytest.mark.parametrize("metric", ["goodness", lambda metrics: metrics["eval_goodness"]])
def test_a_metric_without_a_value_for_a_few_examples_is_not_refused(kind, metric, tmp_path):
    trainer = kind(
        ConvNet(),
        TrainingArguments(str(tmp_path), **SETTINGS | {"num_train_epochs": 1, "per_device_eval_batch_size": 8}),
        train_dataset=image_data(24, seed=1),
        eval_dataset=image_data(16, seed=2),
    )
    trainer.add_callback(callback := ASWACallback(trainer, metric=metric))
    trainer.train()
    (record,) = callback.strategies["aswa"].trajectory
    (measured,) = [entry["eval_goodness"] for entry in trainer.state.log_history if "eval_goodness" in entry]
    assert record.running_score == measured


@pytest.mark.parametrize("kind", [BufferedOfMany, ReturnedOfMany])
def test_a_metric_without_a_value_is_not_a_number(kind, tmp_path):
    trainer = kind(
        ConvNet(),
        TrainingArguments(str(tmp_path), **SETTINGS | {"num_train_epochs": 1, "per_device_eval_batch_size": 16}),
        train_dataset=image_data(24, seed=1),
        eval_dataset=image_data(16, seed=2),
    )
    trainer.add_callback(callback := ASWACallback(trainer, metric="goodness"))
    with pytest.warns(UserWarning, match="score of the running model is nan"):
        trainer.train()
    assert callback.strategies["aswa"].members == 0


def test_a_metric_of_one_of_several_datasets_is_known_by_its_name(tmp_path):
    """A trainer's own `log` does not know whose evaluation it logs."""
    data = {"first": image_data(16, seed=2), "second": image_data(16, seed=3)}
    trainer = Buffered(
        ConvNet(),
        TrainingArguments(str(tmp_path), **SETTINGS),
        train_dataset=image_data(24, seed=1),
        eval_dataset=data,
    )
    trainer.add_callback(callback := ASWACallback(trainer, metric="first_goodness"))
    trainer.train()
    measured = [entry["eval_goodness"] for entry in trainer.state.log_history if "eval_first_loss" in entry]
    records = callback.strategies["aswa"].trajectory
    assert len(measured) == 3
    assert [record.running_score for record in records] == measured
    assert records[1].lookahead_score not in (None, *measured)
    assert trainer.evaluate(data["first"])["eval_loss"] == pytest.approx(-callback.strategies["aswa"].score)
    wrong = ASWACallback(trainer, metric="first_badness")
    trainer.remove_callback(callback)
    trainer.add_callback(wrong)
    with pytest.raises(ValueError, match=r"eval_first_goodness.*Did you mean 'first_goodness'"):
        trainer.train()


def test_a_function_that_is_not_defined_for_a_few_examples_is_not_refused(tmp_path):
    calls = []

    def ratio(metrics):
        calls.append(metrics["eval_goodness"])
        return 1 / (len(calls) - 1)

    trainer = Buffered(
        ConvNet(),
        TrainingArguments(str(tmp_path), **SETTINGS | {"num_train_epochs": 1}),
        train_dataset=image_data(24, seed=1),
        eval_dataset=image_data(16, seed=2),
    )
    trainer.add_callback(callback := ASWACallback(trainer, metric=ratio))
    trainer.train()
    assert [record.running_score for record in callback.strategies["aswa"].trajectory] == [1.0]


# ---- TRL itself ----

pytestmark = pytest.mark.filterwarnings("default")  # of TRL and what it imports


def few_or_many(completions, **_):
    """A reward that generated text earns: its share of the first words."""
    return [sum(word in WORDS[:5] for word in text.split()) / 4 for text in completions]


KINDS = [
    ("SFT", "mean_token_accuracy", {}, {}),
    ("DPO", "rewards/accuracies", {}, {"ref_model": causal_model}),
    pytest.param(
        "GRPO", "reward", {"num_generations": 2, "max_completion_length": 4, "num_train_epochs": 2},
        {"reward_funcs": lambda: few_or_many}, id="GRPO",
    ),
    pytest.param("Reward", "accuracy", {}, {"model": lambda: reward_model()}, id="Reward"),
]  # fmt: skip


def reward_model():
    set_seed(7)
    config = causal_config()
    config.num_labels = 1
    return LlamaForSequenceClassification(config)


@pytest.mark.parametrize(("kind", "metric", "options", "made"), KINDS)
def test_trainers_of_trl_decide_by_their_own_metrics(kind, metric, options, made, tmp_path):
    pytest.importorskip("trl")
    trainer = make_trl(kind, tmp_path, trainer={name: make() for name, make in made.items()}, **options)
    trainer.add_callback(callback := ASWACallback(trainer, metric=metric, strategies=("aswa", "ema", "last")))
    trainer.train()
    lines = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    records = callback.strategies["aswa"].trajectory
    assert [record.running_score for record in records] == [line[f"eval_{metric}"] for line in lines]
    assert all(record.score is not None for record in records)
    assert records[-1].lookahead_score is not None
    assert not any(trainer._metrics["eval"].values())


def test_a_metric_that_a_trainer_of_trl_never_reports_is_refused_with_those_it_did(tmp_path):
    pytest.importorskip("trl")
    trainer = make_trl("SFT", tmp_path, num_train_epochs=1)
    trainer.add_callback(ASWACallback(trainer, metric="mean_token_acuracy"))
    with pytest.raises(ValueError, match=r"eval_loss, eval_mean_token_accuracy.*Did you mean 'mean_token_accuracy'"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert not any(trainer._metrics["eval"].values())
    with pytest.raises(ValueError, match="pass an eval_dataset to the Trainer"):
        ASWACallback(make_trl("SFT", tmp_path, trainer={"eval_dataset": None}, eval_strategy="no"))


def test_packed_lora_by_steps_on_a_subset_resumes_in_the_middle_of_an_epoch(tmp_path):
    """What fine-tuning in one epoch looks like: packing, accumulation, checkpointed gradients, decisions by steps."""
    pytest.importorskip("trl")
    from peft import LoraConfig

    def run(folder, resume=None):
        trainer = make_trl(
            "SFT", folder, packing=True, max_length=12, per_device_train_batch_size=1, gradient_accumulation_steps=2,
            num_train_epochs=1, gradient_checkpointing=True, eval_strategy="no", save_strategy="steps", save_steps=3,
            trainer={"train_dataset": rows("SFT", 24, 0), "peft_config": LoraConfig(r=2, lora_dropout=0.1)},
        )  # fmt: skip
        strategies = ("aswa", "dense-aswa", "ema")
        callback = ASWACallback(trainer, strategies=strategies, every="2 steps", eval_subset=4)
        trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=resume)
        averages = {f"{n}/{k}": t for n, s in callback.strategies.items() for k, t in s.average.averaged.items()}
        return averages, {name: s.trajectory for name, s in callback.strategies.items()}

    straight, history = run(tmp_path / "straight")
    assert [record.step for record in history["aswa"]][:3] == [2, 4, 6]
    assert all("lora_" in name for name in straight)
    shutil.copytree(tmp_path / "straight" / "checkpoint-3", tmp_path / "resumed" / "checkpoint-3")
    resumed, resumed_history = run(tmp_path / "resumed", resume=True)
    assert resumed_history == history
    assert_same_tensors(straight, resumed)
