"""ASWACallback among other callbacks, logs, checkpoints and cards: it takes nothing away and mixes nothing up."""

import itertools
import json
import math
import shutil

import pytest
import torch
from training import accuracy, image_data, make_trainer, scripted, weights_of, with_aswa
from transformers import EarlyStoppingCallback, TrainerCallback

from aswa_hf.checkpoint import AVERAGE_FILE
from aswa_hf.schedule import EvaluationBudget


def decided_steps(callback):
    return [record.step for record in callback.strategies["aswa"].trajectory]


@pytest.mark.parametrize("eval_strategy", ["epoch", "no", "steps"])
def test_what_the_trainer_logs_is_what_it_logs_without_the_callback(eval_strategy, tmp_path):
    def logged(averaging):
        trainer = make_trainer(
            "conv", tmp_path, save_strategy="no", logging_strategy="epoch", eval_strategy=eval_strategy, eval_steps=4
        )
        if averaging:
            with_aswa(trainer, strategies=("aswa", "ema"))
        trainer.train()
        changing = ("runtime", "per_second", "total_flos")
        return [
            {key: value for key, value in row.items() if not key.endswith(changing)}
            for row in trainer.state.log_history
            if "aswa/decision" not in row
        ]

    assert sum("loss" in row for row in logged(True)) == 6
    assert logged(True) == logged(False)


class Failing(TrainerCallback):
    """Makes the disk full from an epoch on."""

    def __init__(self, monkeypatch, epoch):
        self.monkeypatch, self.epoch = monkeypatch, epoch

    def on_epoch_begin(self, args, state, control, **kwargs):
        def full(*args, **kwargs):
            raise OSError(28, "No space left on device")

        if state.epoch >= self.epoch:
            self.monkeypatch.setattr("aswa_hf._utils.shard_files.save_file", full)


@pytest.mark.parametrize("kind", ["conv", "lora"])
def test_with_one_checkpoint_kept_a_full_disk_loses_neither_it_nor_its_state(kind, tmp_path, monkeypatch):
    callbacks = [Failing(monkeypatch, epoch=2)]
    with_aswa(trainer := make_trainer(kind, tmp_path, save_total_limit=1, callbacks=callbacks))
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    monkeypatch.undo()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-12"]
    callback = with_aswa(resumed := make_trainer(kind, tmp_path, save_total_limit=1))
    resumed.train(resume_from_checkpoint=True)
    with_aswa(straight := make_trainer(kind, tmp_path / "straight"))
    straight.train()
    assert decided_steps(callback) == [6, 12, 18, 24, 30, 36]
    for name, tensor in weights_of(straight.model).items():
        assert torch.equal(weights_of(resumed.model)[name], tensor)


def test_a_process_that_ends_before_the_state_is_moved_into_its_checkpoint_loses_nothing(tmp_path):
    with_aswa(trainer := make_trainer("conv", tmp_path, num_train_epochs=3, save_total_limit=1))
    trainer.train()
    # What a kill between the rotation of checkpoints and `on_save` leaves behind.
    shutil.move(tmp_path / "checkpoint-18" / "aswa", tmp_path / "_aswa-18")
    callback = with_aswa(resumed := make_trainer("conv", tmp_path, num_train_epochs=4, save_total_limit=1))
    resumed.train(resume_from_checkpoint=True)
    assert decided_steps(callback) == [6, 12, 18, 24]
    assert not list(tmp_path.glob("_aswa-*"))


def test_a_state_found_waiting_is_given_to_its_checkpoint(tmp_path):
    with_aswa(trainer := make_trainer("conv", tmp_path, num_train_epochs=3))
    trainer.train()
    shutil.move(tmp_path / "checkpoint-18" / "aswa", tmp_path / "_aswa-18")
    for _ in range(2):
        callback = with_aswa(resumed := make_trainer("conv", tmp_path, num_train_epochs=3))
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-18"))
        assert decided_steps(callback) == [6, 12, 18]


class AsksToSave(TrainerCallback):
    def on_evaluate(self, args, state, control, **kwargs):
        control.should_save = True


def test_a_checkpoint_asked_for_at_the_last_moment_has_its_state(tmp_path):
    trainer = make_trainer("conv", tmp_path, save_strategy="no", num_train_epochs=2, callbacks=[AsksToSave()])
    with_aswa(trainer)
    trainer.train()
    for step in (6, 12):
        assert json.loads((tmp_path / f"checkpoint-{step}" / "aswa" / "state.json").read_text())["step"] == step


def test_a_removed_callback_decides_no_more(tmp_path):
    callback = with_aswa(trainer := make_trainer("conv", tmp_path, save_strategy="no", num_train_epochs=2))
    trainer.train()
    trainer.remove_callback(callback)
    trainer.train()
    assert decided_steps(callback) == [6, 12]


@pytest.mark.parametrize("save_strategy", ["epoch", "steps", "best"])
def test_every_checkpoint_has_its_state_and_nothing_else_is_left(save_strategy, tmp_path):
    options = {"metric_for_best_model": "loss"} if save_strategy == "best" else {"save_steps": 4}
    with_aswa(trainer := make_trainer("conv", tmp_path, save_strategy=save_strategy, **options))
    trainer.train()
    checkpoints = list(tmp_path.glob("checkpoint-*"))
    assert checkpoints
    for checkpoint in checkpoints:
        step = int(checkpoint.name.rpartition("-")[2])
        assert json.loads((checkpoint / "aswa" / "state.json").read_text())["step"] == step
        assert (checkpoint / "aswa" / AVERAGE_FILE).exists()
    assert not list(tmp_path.glob("_aswa-*"))


def test_a_checkpoint_of_another_run_at_the_same_step_is_not_taken(tmp_path):
    for name, seed in (("ours", 1), ("other", 2)):
        with_aswa(trainer := make_trainer("conv", tmp_path / name, num_train_epochs=2, seed=seed, data_seed=seed))
        trainer.train()
    with_aswa(resumed := make_trainer("conv", tmp_path / "other", num_train_epochs=3))
    with pytest.raises(FileNotFoundError, match=r"is not the checkpoint it resumes from.*resume_from"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-12"))


def test_resuming_with_another_metric_or_rule_is_refused(tmp_path):
    with_aswa(trainer := make_trainer("conv", tmp_path, num_train_epochs=2), metric="accuracy")
    trainer.train()
    for options, message in [
        ({"metric": {"accuracy": 100.0}}, r"was decided by 'accuracy', this run by \{'accuracy': 100.0\}"),
        ({"metric": "accuracy", "hard_updates": False}, "hard_updates=True, this strategy has hard_updates=False"),
    ]:
        with_aswa(resumed := make_trainer("conv", tmp_path, num_train_epochs=3), **options)
        with pytest.raises(ValueError, match=message):
            resumed.train(resume_from_checkpoint=True)


class EvaluatesElsewhere(TrainerCallback):
    """Asks for scores of the training data at the end of every epoch, as many people's callbacks do."""

    def __init__(self, prefix):
        self.prefix = prefix

    def on_epoch_end(self, args, state, control, **kwargs):
        asked = control.should_evaluate
        self.trainer.evaluate(image_data(24, seed=9), metric_key_prefix=self.prefix)
        control.should_evaluate = asked


@pytest.mark.parametrize("prefix", ["eval", "eval_train", "train"])
def test_the_evaluations_of_others_are_not_taken_for_the_trainers(prefix, tmp_path):
    other = EvaluatesElsewhere(prefix)
    plain = with_aswa(trainer := make_trainer("conv", tmp_path / "plain", save_strategy="no"))
    trainer.train()
    callback = with_aswa(trainer := make_trainer("conv", tmp_path, save_strategy="no", callbacks=[other]))
    other.trainer = trainer
    trainer.train()
    scores = [record.running_score for record in callback.strategies["aswa"].trajectory]
    # Their evaluation draws random numbers, so only the first epoch is comparable.
    assert len(scores) == 6
    assert scores[0] == plain.strategies["aswa"].trajectory[0].running_score


class AsksForEvaluations(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_evaluate = control.should_evaluate or state.global_step % 5 == 0


def test_evaluations_that_another_callback_asks_for_are_decision_points_too(tmp_path):
    options = {"save_strategy": "no", "eval_strategy": "steps", "eval_steps": 1000, "num_train_epochs": 3}
    trainer = make_trainer("conv", tmp_path, **options)
    callback = with_aswa(trainer, every="evaluation")
    trainer.add_callback(AsksForEvaluations())
    trainer.train()
    assert decided_steps(callback) == [5, 10, 15, 18]


def test_a_trainer_that_does_not_tell_of_its_evaluations_still_decides(tmp_path):
    trainer = make_trainer("conv", tmp_path, save_strategy="no", num_train_epochs=3)
    silent = trainer.evaluate

    class Silent(type(trainer)):
        def evaluate(self, *args, **kwargs):
            callbacks, self.callback_handler.callbacks = self.callback_handler.callbacks, []
            try:
                return super().evaluate(*args, **kwargs)
            finally:
                self.callback_handler.callbacks = callbacks

    trainer.__class__ = Silent
    assert trainer.evaluate != silent
    callback = with_aswa(trainer)
    trainer.train()
    assert decided_steps(callback) == [6, 12, 18]


def test_patience_counts_decisions_also_with_several_datasets(tmp_path):
    # The scores of the running model and of the look-ahead, epoch by epoch; those of the other dataset say nothing.
    points = [(0.5,), (0.4, 0.6), (0.1, 0.2), (0.1, 0.6), (0.7, 0.2), *[(0.1, 0.7), (0.7, 0.1), (0.3, 0.3)]]
    scores = itertools.chain(*points)
    datasets = {"one": image_data(48, seed=3), "two": image_data(32, seed=4)}

    def metrics(predictions):
        return {"accuracy": next(scores) if len(predictions.label_ids) == 48 else 0.9}

    options = {"metric_for_best_model": "eval_aswa_one_accuracy", "load_best_model_at_end": True}
    trainer = make_trainer(
        "conv", tmp_path, eval_dataset=datasets, num_train_epochs=40, compute_metrics=metrics, **options
    )
    trainer.add_callback(EarlyStoppingCallback(3))
    callback = with_aswa(trainer, metric="one_accuracy")
    trainer.train()
    decisions = [record.decision.value for record in callback.strategies["aswa"].trajectory]
    # Two rejections are fewer than three; with the third in a row training ends.
    assert decisions == ["init", "soft", "reject", "reject", "hard", "reject", "reject", "reject"]
    assert list(scores) == []


@pytest.mark.parametrize("options", [{"every": 2}, {"eval_strategy": "steps", "eval_steps": 2}])
def test_following_the_ensemble_between_decisions_is_refused(options, tmp_path):
    every = options.pop("every", "epoch")
    trainer = make_trainer("conv", tmp_path, metric_for_best_model="eval_aswa_accuracy", **options)
    with pytest.raises(ValueError, match=r"needs a decision at every evaluation.*every='evaluation'"):
        with_aswa(trainer, metric=None, every=every)


@pytest.mark.parametrize("options", [{"max_steps": 15}, {"eval_delay": 2}, {"num_train_epochs": 3.5}])
def test_swa_by_name_starts_whatever_the_length_of_the_run(options, tmp_path):
    callback = with_aswa(
        trainer := make_trainer("conv", tmp_path, save_strategy="no", **options), strategies=("swa",), apply="swa"
    )
    trainer.train()
    assert callback.strategies["swa"].members >= 1


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(image_data(48, seed=1))


def test_a_stream_decides_after_every_pass_and_not_after_a_part(tmp_path):
    for max_steps, expected in ((18, [6, 12, 18]), (16, [6, 12])):
        trainer = make_trainer("conv", tmp_path, save_strategy="no", max_steps=max_steps)
        trainer.train_dataset = Stream()
        callback = with_aswa(trainer, strategies=("aswa", "swa"))
        trainer.train()
        assert decided_steps(callback) == expected


def test_the_last_pass_of_a_stream_decides_whatever_the_share(tmp_path, monkeypatch):
    monkeypatch.setattr(EvaluationBudget, "seconds", 1e-9)
    trainer = make_trainer("conv", tmp_path, save_strategy="no", max_steps=27)
    trainer.train_dataset = Stream()
    callback = with_aswa(trainer, max_eval_share=1e-9)
    trainer.train()
    assert decided_steps(callback) == [6, 24]


def test_a_resumed_stream_decides_after_its_last_pass(tmp_path):
    for folder, resume in ((tmp_path, None), (tmp_path, str(tmp_path / "checkpoint-12"))):
        trainer = make_trainer("conv", folder, max_steps=18, save_strategy="steps", save_steps=4)
        trainer.train_dataset = Stream()
        callback = with_aswa(trainer)
        trainer.train(resume_from_checkpoint=resume)
        assert decided_steps(callback) == [6, 12, 18]


def test_metrics_that_are_not_finite_are_saved_and_come_back(tmp_path):
    def nested(predictions):
        return accuracy(predictions) | {"per_class": [0.5, math.nan], "broken": math.inf}

    with_aswa(trainer := make_trainer("conv", tmp_path, num_train_epochs=2, compute_metrics=nested))
    trainer.train()
    options = {"num_train_epochs": 3, "eval_on_start": True, "compute_metrics": nested}
    callback = with_aswa(resumed := make_trainer("conv", tmp_path, **options))
    resumed.train(resume_from_checkpoint=True)
    assert decided_steps(callback) == [6, 12, 18]


def test_the_card_of_the_pushed_model_shows_the_ensembles_scores(tmp_path, monkeypatch):
    scores = [0.5, 0.4, 0.625, 0.25, 0.5]  # init, soft, rejected
    trainer = make_trainer("text", tmp_path, num_train_epochs=3, compute_metrics=scripted(*scores))
    with_aswa(trainer, metric="accuracy")
    trainer.train()
    repository = type("Url", (), {"repo_id": "me/run"})
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda *args, **options: repository)
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", lambda *args, **options: None)
    trainer.push_to_hub()
    card = (tmp_path / "README.md").read_text()
    assert "| **ASWA** | **0.6250** |" in card


def test_a_history_that_cannot_be_written_does_not_cost_the_ensemble(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("aswa_hf.trainer.callback.write_trajectory", full)
    callback = with_aswa(trainer := make_trainer("conv", tmp_path, save_strategy="no"))
    trainer.train()
    averaged = callback.strategies["aswa"].average.averaged
    assert all(torch.equal(p, averaged[name]) for name, p in trainer.model.named_parameters())


def test_a_callback_bound_to_another_trainer_says_so(tmp_path):
    callback = with_aswa(make_trainer("conv", tmp_path))
    other = make_trainer("conv", tmp_path, callbacks=[callback])
    with pytest.raises(RuntimeError, match="bound to another trainer"):
        other.train()


@pytest.mark.parametrize("value", [None, "high", [0.5]])
def test_a_metric_that_is_not_a_number_is_named(value, tmp_path):
    trainer = make_trainer("conv", tmp_path, compute_metrics=lambda predictions: {"accuracy": value})
    with_aswa(trainer, metric="accuracy")
    with pytest.raises(TypeError, match="The metric 'eval_accuracy' must be one number, got"):
        trainer.train()


def test_evaluations_before_and_after_training_have_no_effect(tmp_path):
    callback = with_aswa(trainer := make_trainer("conv", tmp_path, save_strategy="no", num_train_epochs=2))
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert not any("aswa" in key for key in (*before, *after))
    assert decided_steps(callback) == [6, 12]
    assert after["eval_loss"] == pytest.approx(callback.strategies["aswa"].score)


def test_an_ema_that_was_never_scored_can_still_be_applied(tmp_path):
    trainer = make_trainer("conv", tmp_path, save_strategy="no", max_steps=4)
    callback = with_aswa(trainer, strategies=("ema",), apply="ema")
    trainer.train()
    averaged = callback.strategies["ema"].average.averaged
    assert all(torch.equal(p, averaged[name]) for name, p in trainer.model.named_parameters())
