"""Decisions every N steps: where they fall, what they cost, resuming in the middle of an epoch."""

import json
import shutil

import pytest
import torch
from ddp_run import count_time, launch
from training import assert_same_tensors, make_trainer, scripted, weights_of, with_aswa

from aswa_hf import ASWACallback
from aswa_hf.schedule import EvaluationBudget
from aswa_hf.trainer.options import evaluating_on

ALL = ("aswa", "dense-aswa", "swa", "ema", "best", "last")
# Six steps an epoch.
STEPS = {"num_train_epochs": 3, "eval_strategy": "no", "save_strategy": "no"}


def steps_of(callback, name="aswa"):
    return [record.step for record in callback.strategies[name].trajectory]


def test_decisions_fall_on_multiples_and_the_last_step_and_training_is_not_disturbed(tmp_path):
    plain = make_trainer("conv", tmp_path / "plain", **STEPS)
    plain.train()
    callback = with_aswa(
        trainer := make_trainer("conv", tmp_path, **STEPS), every="4 steps", strategies=ALL, apply=None
    )
    trainer.train()
    assert steps_of(callback) == [4, 8, 12, 16, 18]
    assert [record.epoch for record in callback.strategies["aswa"].trajectory] == [4 / 6, 8 / 6, 2, 16 / 6, 3]
    assert_same_tensors(weights_of(plain.model), weights_of(trainer.model))
    logged = [entry["step"] for entry in trainer.state.log_history if "aswa/decision" in entry]
    assert logged == [4, 8, 12, 16, 18]
    # The mean of the last two steps is the snapshot of the last, shorter interval.
    assert callback.strategies["dense-aswa"].segment.steps == 0


def test_the_evaluation_of_the_trainer_at_the_same_step_is_used(tmp_path):
    # Evaluations in order: running at 3; running and look-ahead at 6; and so on.
    scores = scripted(0.1, 0.2, 0.3, 0.1, 0.4)
    trainer = make_trainer(
        "text", tmp_path, num_train_epochs=1.5, eval_strategy="steps", eval_steps=3, save_strategy="no",
        compute_metrics=scores,
    )  # fmt: skip
    callback = with_aswa(trainer, every="3 steps", metric="accuracy")
    trainer.train()
    records = callback.strategies["aswa"].trajectory
    assert [(r.step, r.running_score, r.lookahead_score) for r in records] == [
        (3, 0.1, None),
        (6, 0.2, 0.3),
        (9, 0.1, 0.4),
    ]


def test_resumed_in_the_middle_of_an_epoch_a_run_is_bit_identical(tmp_path):
    settings = STEPS | {"save_strategy": "steps", "save_steps": 5, "eval_strategy": "steps", "eval_steps": 8}

    def run(folder, resume=None):
        callback = with_aswa(trainer := make_trainer("conv", folder, **settings), every="4 steps", strategies=ALL)
        trainer.train(resume_from_checkpoint=resume)
        tensors = {f"{n}/{k}": t for n, s in callback.strategies.items() for k, t in s.average.averaged.items()}
        records = {name: strategy.trajectory.to_json() for name, strategy in callback.strategies.items()}
        return tensors | weights_of(trainer.model), json.dumps(records)

    straight, history = run(tmp_path / "straight")
    assert '"step": 4' in history
    assert '"step": 18' in history
    for step in (5, 10, 15):  # between two decisions, in the middle of the first, second and third epoch
        shutil.copytree(tmp_path / "straight" / f"checkpoint-{step}", tmp_path / f"{step}" / f"checkpoint-{step}")
        resumed, resumed_history = run(tmp_path / f"{step}", resume=True)
        assert resumed_history == history
        assert_same_tensors(straight, resumed)


def test_the_best_model_may_follow_the_ensemble_by_steps(tmp_path):
    settings = {
        "metric_for_best_model": "aswa_loss", "greater_is_better": False, "load_best_model_at_end": True,
        "eval_strategy": "steps", "eval_steps": 6, "save_strategy": "steps", "save_steps": 6, "num_train_epochs": 2,
    }  # fmt: skip
    callback = with_aswa(trainer := make_trainer("conv", tmp_path, **settings), every="3 steps")
    trainer.train()
    assert trainer.state.best_metric == pytest.approx(callback.strategies["aswa"].score)
    with pytest.raises(ValueError, match=r"every='4 steps' and eval_strategy='steps' there are evaluations without"):
        ASWACallback(trainer, every="4 steps")


def test_decision_points_are_skipped_where_evaluating_takes_too_long_and_that_is_said_once(
    tmp_path, monkeypatch, caplog
):
    count_time(monkeypatch)
    trainer = make_trainer("text", tmp_path, **STEPS | {"num_train_epochs": 2})
    callback = with_aswa(trainer, every="1 steps", max_eval_share=0.2, strategies=("aswa", "dense-aswa"))
    with caplog.at_level("WARNING"):
        trainer.train()
    # Two seconds a step, one a decision: the n-th is made when n ≤ 0.2 (2·steps + n), so at step 2n.
    assert steps_of(callback) == steps_of(callback, "dense-aswa") == [1, 4, 6, 8, 10, 12]
    assert callback._budget.skipped == 6
    told = [record.message for record in caplog.records if "max_eval_share=0.2" in record.message]
    assert len(told) == 1


@pytest.mark.parametrize(
    ("every", "length", "decided", "skipped"),
    [
        ("epoch", {"num_train_epochs": 3}, [6, 18], 1),
        ("5 steps", {"num_train_epochs": 3}, [5, 18], 2),
        ("evaluation", {"num_train_epochs": 3}, [6, 18], 1),
        ("epoch", {"max_steps": 21}, [6, 18], 1),
        (2, {"num_train_epochs": 7}, [12, 36], 1),
    ],
)
def test_the_last_decision_point_of_a_run_is_never_skipped(every, length, decided, skipped, tmp_path, monkeypatch):
    monkeypatch.setattr(EvaluationBudget, "seconds", 1e-9)
    trainer = make_trainer("text", tmp_path, save_strategy="no", **length)
    callback = with_aswa(trainer, every=every, max_eval_share=1e-9, strategies=("aswa", "last"), apply="last")
    trainer.train()
    assert steps_of(callback) == decided
    assert callback._budget.skipped == skipped


def test_two_ranks_with_different_clocks_skip_the_same_decision_points(tmp_path):
    (tensors, about), (other_tensors, other_about) = launch("conv", tmp_path, "--clocks")
    assert about == other_about
    assert_same_tensors(tensors, other_tensors)
    steps = [record["step"] for record in about["histories"]["aswa"]]
    # Half a second a step, one a decision: the n-th is made when n ≤ 0.25 (steps / 2 + n), so from step 6n on.
    assert steps == [4, 12, 20, 24, 32, 36]


def test_a_subset_of_the_evaluation_data_decides(tmp_path):
    trainer = make_trainer("conv", tmp_path, num_train_epochs=2, save_strategy="no")
    data = trainer.eval_dataset
    callback = with_aswa(trainer, every="epoch", eval_subset=8)
    trainer.train()
    assert trainer.eval_dataset is data
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    records = callback.strategies["aswa"].trajectory
    assert len(evaluated) == len(records) == 2
    assert all(record.running_score != full for record, full in zip(records, evaluated, strict=True))
    # The score is that of the ensemble, now in the model, on the same eight examples.
    found = trainer.evaluate(eval_dataset=callback._subset)
    assert len(callback._subset) == 8
    assert found["eval_loss"] == pytest.approx(callback.strategies["aswa"].score, rel=1e-5)


def test_each_of_several_evaluation_datasets_has_its_subset(tmp_path):
    trainer = make_trainer("text", tmp_path, num_train_epochs=1, save_strategy="no")
    trainer.eval_dataset = {"dev": trainer.eval_dataset, "other": trainer.eval_dataset[:10]}
    callback = with_aswa(trainer, metric="dev_loss", eval_subset=0.25)
    assert {name: len(part) for name, part in callback._subset.items()} == {"dev": 16, "other": 2}
    trainer.train()
    assert callback.strategies["aswa"].members == 1


def test_a_subset_needs_a_trainer_that_evaluates_on_its_data(tmp_path):
    with pytest.raises(ValueError, match="eval_subset=8 needs a Trainer that evaluates on its eval_dataset, got KGE"):
        ASWACallback(make_trainer("kvsall", tmp_path), metric="mrr", eval_subset=8)
    trainer = make_trainer("text", tmp_path)
    with (
        pytest.raises(ValueError, match=r"eval_subset has no effect: Trainer\.evaluate"),
        evaluating_on(trainer, trainer.eval_dataset[:8], {}),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"every": 0}, "every must be"),
        ({"every": 0.5}, "every must be"),
        ({"every": "0 steps"}, "every must be"),
        ({"max_eval_share": 0}, "max_eval_share must be"),
        ({"eval_subset": 1.5}, "eval_subset must be"),
    ],
)
def test_bad_options_are_refused_at_construction(options, match):
    with pytest.raises(ValueError, match=match):
        ASWACallback(**options)


def test_a_run_shorter_than_its_first_interval_is_announced(tmp_path, caplog):
    callback = with_aswa(trainer := make_trainer("text", tmp_path, **STEPS), every="500 steps")
    with caplog.at_level("WARNING"):
        trainer.train()
    assert "18 steps decides only at its last step, since every='500 steps' is 500 steps" in caplog.text
    assert steps_of(callback) == [18]
    assert torch.equal(
        trainer.model.classifier.weight, callback.strategies["aswa"].average.averaged["classifier.weight"]
    )
