"""ASWACallback with the real Trainer: what it leaves alone, what it leaves in the model, when it decides."""

import json
import logging
import math
import signal
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from training import (
    MODELS,
    ConvNet,
    accuracy,
    assert_same_tensors,
    image_data,
    make_trainer,
    scripted,
    text_model,
    weights_of,
    with_aswa,
)
from transformers import BertForSequenceClassification, EarlyStoppingCallback, Trainer, TrainerCallback

from aswa_hf import ASWA, SWA, ASWACallback, Decision
from aswa_hf._utils.locks import locked
from aswa_hf.checkpoint import load_state
from aswa_hf.comparison import chosen_strategy
from aswa_hf.hub.card import read_card_data, render
from aswa_hf.trainer.files import LOCK
from aswa_hf.trajectory import load_trajectories

ALL = ("aswa", "dense-aswa", "swa", "ema", "best", "last")


class Snapshots(TrainerCallback):
    """The running weights after every epoch, by an observer that has nothing to do with averaging."""

    def __init__(self):
        self.weights = []

    def on_epoch_end(self, args, state, control, model=None, **kwargs):
        self.weights.append(weights_of(model))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("eval_strategy", ["epoch", "no"])
def test_the_running_model_trains_as_without_the_callback(kind, eval_strategy, tmp_path):
    options = {"save_strategy": "no", "eval_strategy": eval_strategy, "num_train_epochs": 4}
    plain = Snapshots()
    make_trainer(kind, tmp_path, callbacks=[plain], **options).train()

    shadowed = Snapshots()
    callback = with_aswa(trainer := make_trainer(kind, tmp_path, callbacks=[shadowed], **options), strategies=ALL)
    trainer.train()

    assert len(callback.strategies["aswa"].trajectory) == 4
    for before, after in zip(plain.weights, shadowed.weights, strict=True):
        assert_same_tensors(before, after)
    last = callback.strategies["last"].average.averaged
    assert_same_tensors(dict(last), {name: plain.weights[-1][name] for name in last})


@pytest.mark.parametrize("kind", MODELS)
def test_after_training_the_model_holds_the_ensemble_and_checkpoints_the_running_weights(kind, tmp_path):
    snapshots = Snapshots()
    callback = with_aswa(trainer := make_trainer(kind, tmp_path, callbacks=[snapshots]))
    trainer.train()
    aswa = callback.strategies["aswa"]
    parameters = {name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert_same_tensors(parameters, dict(aswa.average.averaged))
    # The ensemble is the α-weighted mean of the weights an observer saw.
    assert math.isclose(sum(aswa.alphas), 1)
    for name, parameter in parameters.items():
        mean = sum(alpha * w[name].double() for alpha, w in zip(aswa.alphas, snapshots.weights, strict=True))
        largest = max(w[name].abs().max().item() for w in snapshots.weights)
        torch.testing.assert_close(parameter.double(), mean, rtol=0, atol=1e-6 * largest)
    if kind != "lora":
        for epoch, weights in enumerate(snapshots.weights, start=1):
            assert_same_tensors(weights, load_file(tmp_path / f"checkpoint-{6 * epoch}" / "model.safetensors"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_pushed_and_reloaded_weights_are_the_ensemble_bit_for_bit(dtype, tmp_path, monkeypatch):
    trainer = make_trainer("text", tmp_path / "run", model=text_model(dtype), num_train_epochs=4)
    callback = with_aswa(trainer, metric="accuracy")
    trainer.train()
    ensemble = weights_of(trainer.model)
    for name, average in callback.strategies["aswa"].average.averaged.items():
        assert average.dtype == torch.float32
        assert torch.equal(average.to(dtype), ensemble[name])

    trainer.save_model(tmp_path / "saved")
    assert_same_tensors(ensemble, weights_of(BertForSequenceClassification.from_pretrained(tmp_path / "saved")))

    pushed = {}

    def upload_folder(api, *, folder_path, **options):
        pushed["weights"] = weights_of(BertForSequenceClassification.from_pretrained(folder_path))
        pushed["files"] = {path.name for path in tmp_path.joinpath("run").iterdir()}

    repository = type("Url", (), {"repo_id": "me/run"})
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda *args, **options: repository)
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", upload_folder)
    trainer.push_to_hub()
    assert_same_tensors(ensemble, pushed["weights"])
    assert {"aswa_trajectory.json", "README.md", "model.safetensors"} <= pushed["files"]


def test_the_trajectory_file_has_what_the_strategies_know(tmp_path):
    callback = with_aswa(trainer := make_trainer("conv", tmp_path), strategies=ALL)
    trainer.train()
    trajectories, about = load_trajectories(tmp_path / "aswa_trajectory.json")
    assert {name: s.trajectory for name, s in callback.strategies.items()} == trajectories
    assert about["metric"] == "loss"
    assert about["greater_is_better"] is False
    content = json.loads((tmp_path / "aswa_trajectory.json").read_text())
    assert content["strategies"]["ema"]["alphas"] == callback.strategies["ema"].alphas


@pytest.mark.parametrize("apply", ["swa", None])
def test_apply_chooses_what_ends_in_the_model(apply, tmp_path):
    trainer = make_trainer("conv", tmp_path, save_strategy="no")
    callback = with_aswa(trainer, strategies=("aswa", "swa", "last"), apply=apply)
    trainer.train()
    expected = callback.strategies[apply or "last"].average
    found = weights_of(trainer.model)
    assert_same_tensors(found, {name: (expected.averaged | expected.copied)[name] for name in found})


def test_with_load_best_model_at_end_the_ensemble_wins(tmp_path):
    callback = with_aswa(trainer := make_trainer("conv", tmp_path, load_best_model_at_end=True, save_total_limit=1))
    trainer.train()
    parameters = {name: p.detach() for name, p in trainer.model.named_parameters()}
    assert_same_tensors(parameters, dict(callback.strategies["aswa"].average.averaged))


# ---- when it decides ----


def decided_steps(callback):
    return [record.step for record in callback.strategies["aswa"].trajectory]


def test_decides_every_n_epochs(tmp_path):
    callback = with_aswa(trainer := make_trainer("conv", tmp_path, save_strategy="no"), every=2)
    trainer.train()
    assert decided_steps(callback) == [12, 24, 36]


@pytest.mark.parametrize("every", ["evaluation", "epoch"])
def test_decides_at_every_evaluation_or_at_epochs_whatever_the_evaluations(every, tmp_path):
    options = {"save_strategy": "no", "eval_strategy": "steps", "eval_steps": 4, "num_train_epochs": 3}
    callback = with_aswa(trainer := make_trainer("conv", tmp_path, **options), every=every)
    trainer.train()
    # 18 steps; the Trainer also evaluates the last one.
    assert decided_steps(callback) == ([4, 8, 12, 16, 18] if every == "evaluation" else [6, 12, 18])


def test_a_partial_epoch_is_not_a_decision_point(tmp_path):
    callback = with_aswa(trainer := make_trainer("conv", tmp_path, save_strategy="no", max_steps=15))
    trainer.train()
    assert decided_steps(callback) == [6, 12]


def test_decides_with_gradient_accumulation_that_does_not_divide_the_epoch(tmp_path):
    options = {"save_strategy": "no", "gradient_accumulation_steps": 4, "num_train_epochs": 3}
    callback = with_aswa(trainer := make_trainer("conv", tmp_path, **options))
    trainer.train()
    assert decided_steps(callback) == [2, 4, 6]


def test_waits_for_eval_delay(tmp_path):
    callback = with_aswa(trainer := make_trainer("conv", tmp_path, save_strategy="no", eval_delay=3))
    trainer.train()
    assert decided_steps(callback) == [18, 24, 30, 36]


def test_the_trainer_evaluates_as_often_as_without_the_callback_and_the_ensemble_once_more(tmp_path):
    evaluations = []

    def counting(predictions):
        evaluations.append(1)
        return accuracy(predictions)

    with_aswa(trainer := make_trainer("conv", tmp_path, save_strategy="no", compute_metrics=counting))
    trainer.train()
    assert len(evaluations) == 6 + 5  # none at INIT
    assert sum("eval_loss" in log for log in trainer.state.log_history) == 6


def test_a_run_with_no_full_epoch_keeps_the_running_weights_and_says_so(tmp_path, caplog):
    snapshots = Snapshots()
    with_aswa(trainer := make_trainer("conv", tmp_path, save_strategy="no", max_steps=3, callbacks=[snapshots]))
    logging.getLogger("transformers").propagate = True
    logging.getLogger("aswa_hf").propagate = True
    with caplog.at_level("WARNING"):
        trainer.train()
    assert_same_tensors(weights_of(trainer.model), snapshots.weights[-1])
    assert "ensemble is empty" in caplog.text


@pytest.mark.parametrize(
    ("options", "every", "points"),
    [({"max_steps": 15}, "epoch", 2), ({"num_train_epochs": 3}, 2, 1), ({"max_steps": 15}, "6 steps", 3)],
)
def test_a_strategy_that_the_run_ends_too_early_for_is_refused_before_training(options, every, points, tmp_path):
    def trained(start: int) -> ASWACallback:
        trainer = make_trainer("conv", tmp_path, save_strategy="no", **options)
        callback = with_aswa(trainer, every=every, strategies={"swa": {"start": start}}, apply="swa")
        trainer.train()
        return callback

    callback = trained(points - 1)
    assert (len(callback.strategies["swa"].trajectory), callback.strategies["swa"].members) == (points, 1)
    with pytest.raises(ValueError, match=f"swa starts at decision point {points + 1}, and the run has {points}"):
        trained(points)
    with locked(tmp_path, LOCK):  # which the refused run has released
        pass


# ---- what it follows and reports ----


@pytest.mark.parametrize(
    ("metric", "label", "score"),
    [
        ("accuracy", "accuracy", lambda m: m["eval_accuracy"]),
        ("eval_accuracy", "accuracy", lambda m: m["eval_accuracy"]),
        ({"accuracy": 1.0, "eval_loss": -0.5}, "score", lambda m: m["eval_accuracy"] - 0.5 * m["eval_loss"]),
        (lambda m: 2 * m["eval_accuracy"], "score", lambda m: 2 * m["eval_accuracy"]),
    ],
)
def test_metric_by_name_by_weights_and_by_function(metric, label, score, tmp_path):
    callback = with_aswa(trainer := make_trainer("conv", tmp_path, save_strategy="no"), metric=metric)
    trainer.train()
    evaluations = [log for log in trainer.state.log_history if "eval_loss" in log]
    reports = [log for log in trainer.state.log_history if "aswa/decision" in log]
    trajectory = callback.strategies["aswa"].trajectory
    assert callback.greater_is_better
    assert [record.running_score for record in trajectory] == [score(log) for log in evaluations]
    assert [record.score for record in trajectory] == [log[f"eval_aswa_{label}"] for log in reports]
    assert [record.decision.code for record in trajectory] == [log["aswa/decision"] for log in reports]
    assert [record.members for record in trajectory] == [log["aswa/members"] for log in reports]


def test_by_default_follows_metric_for_best_model_then_the_loss(tmp_path):
    loss = ASWACallback(make_trainer("conv", tmp_path))
    assert (loss.score.label, loss.greater_is_better) == ("loss", False)
    best = ASWACallback(make_trainer("conv", tmp_path, metric_for_best_model="accuracy", greater_is_better=False))
    assert (best.score.label, best.greater_is_better) == ("accuracy", False)
    ensemble = ASWACallback(make_trainer("conv", tmp_path, metric_for_best_model="eval_aswa_accuracy"))
    assert (ensemble.score.label, ensemble.greater_is_better) == ("accuracy", True)


def test_several_evaluation_datasets_need_one_to_be_named(tmp_path):
    datasets = {"clean": image_data(48, seed=3), "noisy": image_data(32, seed=4)}
    trainer = make_trainer("conv", tmp_path, save_strategy="no", eval_dataset=datasets, num_train_epochs=3)
    with pytest.raises(ValueError, match=r"several evaluation datasets \(clean, noisy\).*'accuracy' names none"):
        ASWACallback(trainer, metric="accuracy")
    callback = with_aswa(trainer, metric="noisy_accuracy")
    trainer.train()
    running = [log["eval_noisy_accuracy"] for log in trainer.state.log_history if "eval_noisy_accuracy" in log]
    assert [record.running_score for record in callback.strategies["aswa"].trajectory] == running
    assert sum("eval_aswa_noisy_accuracy" in log for log in trainer.state.log_history) == 3


def test_tensorboard_shows_the_ensemble(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = make_trainer("conv", tmp_path / "run", save_strategy="no", report_to="tensorboard")
    callback = with_aswa(trainer, metric="accuracy", strategies=("aswa", "ema"))
    trainer.train()
    event_file = next(tmp_path.rglob("events.out.tfevents*"))
    events = EventAccumulator(str(event_file.parent))
    events.Reload()
    shown = [event.value for event in events.Scalars("eval/aswa_accuracy")]
    assert shown == pytest.approx([record.score for record in callback.strategies["aswa"].trajectory])
    assert {"eval/ema_accuracy", "train/aswa/decision", "train/aswa/members"} <= set(events.Tags()["scalars"])


@pytest.mark.parametrize("early_stopping_first", [True, False])
def test_best_model_and_early_stopping_follow_the_ensemble(early_stopping_first, tmp_path):
    stopping = EarlyStoppingCallback(early_stopping_patience=2)
    scores = [0.5, 0.4, 0.6, 0.1, 0.2, 0.7, 0.1, 0.6, 0.5, 0.2, 0.3]  # init, soft, reject, hard, reject, reject
    trainer = make_trainer(
        "conv",
        tmp_path,
        num_train_epochs=30,
        compute_metrics=scripted(*scores),
        metric_for_best_model="eval_aswa_accuracy",
        load_best_model_at_end=True,
        callbacks=[stopping] if early_stopping_first else None,
    )
    callback = with_aswa(trainer, metric=None)
    if not early_stopping_first:
        trainer.add_callback(stopping)
    trainer.train()
    assert callback.strategies["aswa"].trajectory.decisions == [
        Decision.INIT,
        Decision.SOFT,
        Decision.REJECT,
        Decision.HARD,
        Decision.REJECT,
        Decision.REJECT,
    ]
    assert trainer.state.best_metric == callback.strategies["aswa"].score == 0.7


def test_a_mapping_builds_strategies_of_ones_own(tmp_path):
    callback = with_aswa(
        trainer := make_trainer("conv", tmp_path, save_strategy="no"),
        strategies={
            "algorithm1": lambda model: ASWA(model, hard_updates=False, greater_is_better=False),  # the loss decides
            "late": lambda model: SWA(model, start=4, greater_is_better=False),
            "half": lambda model: SWA(model, start=0.5, greater_is_better=False),
        },
        apply="late",
    )
    trainer.train()
    assert callback.strategies["late"].members == 2
    assert callback.strategies["half"].alphas == [0, 0, 0, 1 / 3, 1 / 3, 1 / 3]
    assert any("eval_late_loss" in log for log in trainer.state.log_history)
    last_log = [log for log in trainer.state.log_history if "algorithm1/decision" in log][-1]
    assert last_log["eval_algorithm1_loss"] == callback.strategies["algorithm1"].score


def test_a_strategy_with_another_direction_than_the_run_is_an_error_before_training(tmp_path):
    trainer = make_trainer("conv", tmp_path)
    with_aswa(trainer, strategies={"late": lambda model: SWA(model, start=4)}, apply="late")
    with pytest.raises(ValueError, match=r"'late'.* has greater_is_better=True, the run has greater_is_better=False"):
        trainer.train()
    assert trainer.state.global_step == 0


# ---- when things go wrong ----


class BrokenError(Exception):
    pass


@pytest.mark.parametrize("error", [BrokenError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", ["text", "conv"])
def test_a_failing_or_interrupted_lookahead_evaluation_leaves_running_weights_and_saved_state(kind, error, tmp_path):
    snapshots = Snapshots()
    calls = []

    def failing(predictions):
        calls.append(1)
        if len(calls) == 5:  # running, running, look-ahead, running, look-ahead
            if error is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)  # raises here, and in this thread only
            raise BrokenError("in the look-ahead of epoch 3")
        return accuracy(predictions)

    trainer = make_trainer(kind, tmp_path, callbacks=[snapshots], compute_metrics=failing)
    callback = with_aswa(trainer)
    with pytest.raises(error):
        trainer.train()
    assert_same_tensors(weights_of(trainer.model), snapshots.weights[2])
    assert len(callback.strategies["aswa"].trajectory) == 2
    # The state of epoch 2 is on disk, and the run can be resumed from it.
    with_aswa(resumed := make_trainer(kind, tmp_path))
    resumed.train(resume_from_checkpoint=True)
    with_aswa(straight := make_trainer(kind, tmp_path / "straight"))
    straight.train()
    assert_same_tensors(weights_of(resumed.model), weights_of(straight.model))


def test_a_full_disk_while_saving_leaves_running_weights_and_the_previous_state(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    class FillDisk(Snapshots):
        def on_epoch_end(self, args, state, control, model=None, **kwargs):
            super().on_epoch_end(args, state, control, model=model)
            if state.epoch == 3:
                monkeypatch.setattr("aswa_hf._utils.shard_files.save_file", full)

    trainer = make_trainer("conv", tmp_path, callbacks=[snapshots := FillDisk()])
    with_aswa(trainer)
    with pytest.raises(OSError, match=r"could not be saved.*_aswa-18.*No space left"):
        trainer.train()
    assert_same_tensors(weights_of(trainer.model), snapshots.weights[2])
    assert not (tmp_path / "checkpoint-18" / "aswa" / "average.safetensors").exists()
    strategy = ASWA(trainer.model, greater_is_better=False, batchnorm="copy")
    load_state(tmp_path / "checkpoint-12" / "aswa", {"aswa": strategy})
    assert len(strategy.trajectory) == 2


def test_unbound_callback_says_how_to_bind(tmp_path):
    callback = ASWACallback(metric="accuracy")
    trainer = make_trainer("conv", tmp_path, save_strategy="no", num_train_epochs=2, callbacks=[callback])
    with pytest.raises(RuntimeError, match=r"callback\.bind\(trainer\)"):
        trainer.train()
    callback.bind(trainer)
    trainer.train()
    assert len(callback.strategies["aswa"].trajectory) == 2


def test_bad_arguments_are_refused_at_construction(tmp_path):
    trainer = make_trainer("conv", tmp_path)
    for options, message in [
        ({"every": "step"}, "every must be"),
        ({"every": 0}, "every must be"),
        (
            {"strategies": ("aswa", "sgd")},
            "Unknown strategy 'sgd'. Expected one of aswa, dense-aswa, swa, ema, best, last",
        ),
        ({"strategies": {"ema": {"dekay": 0.5}}}, "'ema' has no option 'dekay'. Did you mean 'decay'?"),
        ({"strategies": "aswa,ema(decay=1)"}, "decay must be in"),
        (
            {"strategies": "ema(decay=0.9),ema(decay=0.99)"},
            "strategies contains 'ema' twice. Two of a kind need",
        ),
        ({"apply": "swa"}, r"apply='swa' is not among the strategies \(aswa\)"),
        ({"metric": {}}, "maps metric names to weights"),
    ]:
        with pytest.raises(ValueError, match=message):
            ASWACallback(trainer, **options)
    with pytest.raises(TypeError, match="metric must be"):
        ASWACallback(trainer, metric=3)
    for wrong in (3, ["aswa", 3]):
        with pytest.raises(TypeError, match="strategies must be names, or a dict with options by name, got"):
            ASWACallback(trainer, strategies=wrong)
    with pytest.raises(TypeError, match=r"transformers\.Trainer, got Linear"):
        ASWACallback(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="pass an eval_dataset to the Trainer"):
        ASWACallback(make_trainer("conv", tmp_path, eval_dataset=None, eval_strategy="no"))
    with pytest.raises(ValueError, match="would never decide"):
        ASWACallback(make_trainer("conv", tmp_path, eval_strategy="no"), every="evaluation")


def test_an_unknown_metric_names_the_known_ones(tmp_path):
    with_aswa(trainer := make_trainer("conv", tmp_path, save_strategy="no"), metric="f1")
    with pytest.raises(ValueError, match=r"'eval_f1' is not among.*eval_accuracy, eval_loss"):
        trainer.train()


def test_bf16_autocast_and_torch_compile(tmp_path):
    callback = with_aswa(trainer := make_trainer("conv", tmp_path / "bf16", save_strategy="no", bf16=True))
    trainer.train()
    assert len(callback.strategies["aswa"].trajectory) == 6
    options = {"save_strategy": "no", "torch_compile": True, "torch_compile_backend": "aot_eager"}
    callback = with_aswa(trainer := make_trainer("text", tmp_path / "compiled", num_train_epochs=2, **options))
    trainer.train()
    assert not any("_orig_mod" in name for name in callback.strategies["aswa"].average.averaged)


def test_strategies_are_built_with_the_options_given_by_name(tmp_path):
    trainer = make_trainer("conv", tmp_path, num_train_epochs=2)
    chosen = {"dense-aswa": {"every": 2}, "ema": {"decay": 0.5}, "swa": {"start": 1}}
    callback = with_aswa(trainer, strategies=chosen, apply="dense-aswa")
    trainer.train()
    built = callback.strategies
    assert built["dense-aswa"].segment.every == 2
    assert (built["ema"].decay, built["ema"].warmup) == (0.5, True)
    assert (built["swa"].start, built["swa"].members) == (1, 1)


# The end of a run


@pytest.mark.pictures
def test_a_run_ends_with_a_line_and_a_picture(tmp_path, caplog):
    trainer = make_trainer("conv", tmp_path, compute_metrics=scripted(0.5, 0.75, 0.8, 0.6, 0.7), num_train_epochs=3)
    callback = with_aswa(trainer, metric="accuracy")
    with caplog.at_level(logging.WARNING, "aswa_hf"):
        trainer.train()
    # 0.5 begins, 0.75 and then 0.8 as the look-ahead; 0.6 and 0.7 are worse.
    assert [d.value for d in callback.strategies["aswa"].trajectory.decisions] == ["init", "soft", "reject"]
    assert "ASWA: 2 of 3 snapshots, accuracy 0.8; best epoch 0.75" in caplog.messages
    assert (tmp_path / "trajectory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.pictures
def test_a_picture_that_cannot_be_drawn_does_not_end_a_finished_run(tmp_path, monkeypatch, caplog):
    def fails(*args, **options):
        raise RuntimeError("no fonts")

    monkeypatch.setattr("aswa_hf.trainer.callback.plot_trajectories", fails)
    callback = with_aswa(trainer := make_trainer("conv", tmp_path, num_train_epochs=1))
    trainer.train()
    assert "trajectory.png could not be drawn: RuntimeError: no fonts" in caplog.messages
    assert callback.strategies["aswa"].members == 1


def test_a_metric_that_cannot_exist_is_found_before_training(tmp_path):
    trainer = make_trainer("conv", tmp_path, compute_metrics=None)
    with_aswa(trainer, metric="accuracy")
    with pytest.raises(ValueError, match=r"'accuracy' will not be among .* no compute_metrics.*or metric='loss'"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_mistyped_metric_is_reported_with_the_nearest_names_before_training(tmp_path):
    with_aswa(trainer := make_trainer("conv", tmp_path, num_train_epochs=1), metric="acuracy")
    with pytest.raises(ValueError, match=r"'eval_acuracy' is not among .*eval_accuracy.*Did you mean 'accuracy'\?"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert "log" not in vars(trainer)


@pytest.mark.parametrize("own", [True, False])
def test_a_loss_of_another_name_is_found_before_training(own, tmp_path):
    trainer = make_trainer("conv", tmp_path, num_train_epochs=1, **({} if own else {"compute_metrics": None}))
    with_aswa(trainer, metric="my_loss")
    with pytest.raises(ValueError, match=r"my_loss' (is not|will not be) among"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_the_metric_of_streamed_examples_is_found_before_training(tmp_path):
    from datasets import IterableDataset

    def examples():
        yield from image_data(8, seed=2)

    def trained(metric):
        with_aswa(
            trainer := make_trainer(
                "conv", tmp_path, num_train_epochs=1, eval_dataset=IterableDataset.from_generator(examples)
            ),
            metric=metric,
        )
        trainer.train()
        return trainer

    assert trained("accuracy").state.global_step == 6
    with pytest.raises(ValueError, match=r"Did you mean 'accuracy'\?"):
        trained("acuracy")


def test_the_metric_of_a_compiled_model_is_found_before_training_and_nothing_is_compiled_for_it(tmp_path):
    from torch._dynamo.utils import counters

    options = {"num_train_epochs": 1, "torch_compile": True, "torch_compile_backend": "aot_eager"}
    with_aswa(trainer := make_trainer("conv", tmp_path, **options), metric="acuracy")
    counters.clear()
    with pytest.raises(ValueError, match=r"Did you mean 'accuracy'\?"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert not counters["frames"]
    with_aswa(trainer := make_trainer("conv", tmp_path, **options), metric="accuracy")
    trainer.train()
    assert counters["frames"]


@pytest.mark.parametrize("of_one", ["raises", "has fewer metrics"])
def test_metrics_that_need_more_than_one_example_are_found_in_all(of_one, tmp_path):
    sizes = []

    def metrics(predictions):
        sizes.append(len(predictions.label_ids))
        if sizes[-1] > 1:
            return {"spread": float(predictions.predictions.std())}
        if of_one == "raises":
            raise ValueError("needs two examples")
        return {}

    trainer = make_trainer("conv", tmp_path, num_train_epochs=1, compute_metrics=metrics)
    callback = with_aswa(trainer, metric="spread")
    trainer.train()
    assert callback.strategies["aswa"].members == 1
    assert trainer.compute_metrics is metrics
    # One example, then all of them if the metric was missing, then the epoch's.
    assert sizes == ([1, 64, 64] if of_one == "has fewer metrics" else [1, 64])


class NotOfOne(ConvNet):
    """A model that cannot be evaluated on a single example."""

    def forward(self, pixel_values, labels=None):
        if len(labels) == 1:
            raise IndexError("a batch of one")
        return super().forward(pixel_values, labels)


def test_a_model_that_does_not_take_a_batch_of_one_is_trained(tmp_path):
    callback = with_aswa(
        trainer := make_trainer("conv", tmp_path, model=NotOfOne(), num_train_epochs=1), metric="accuracy"
    )
    trainer.train()
    assert callback.strategies["aswa"].members == 1
    iterated = [loader for loader in trainer.accelerator.gradient_state.dataloader_references if loader is not None]
    assert all(len(loader.dataset) > 1 for loader in iterated)


def test_a_wrong_metric_of_a_model_that_does_not_take_a_batch_of_one_is_found_before_training(tmp_path):
    with_aswa(trainer := make_trainer("conv", tmp_path, model=NotOfOne(), num_train_epochs=1), metric="acuracy")
    with pytest.raises(ValueError, match=r"Did you mean 'accuracy'\?"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_metric_that_is_none_for_one_example_is_found_in_all(tmp_path):
    def metrics(predictions):
        return {"accuracy": None} if len(predictions.label_ids) == 1 else accuracy(predictions)

    trainer = make_trainer("conv", tmp_path, num_train_epochs=1, compute_metrics=metrics)
    callback = with_aswa(trainer, metric="accuracy")
    trainer.train()
    assert callback.strategies["aswa"].members == 1


def test_metrics_that_are_computed_by_batches_see_each_example_of_an_evaluation_once(tmp_path):
    seen, sizes = [], []

    def metrics(predictions, compute_result=False):
        seen.extend(predictions.label_ids.tolist())
        if not compute_result:
            return {}
        if len(seen) == 1:
            raise ValueError("needs two examples")
        sizes.append(len(seen))
        seen.clear()
        return {"accuracy": 0.5}

    trainer = make_trainer("conv", tmp_path, num_train_epochs=1, compute_metrics=metrics, batch_eval_metrics=True)
    with_aswa(trainer, metric="accuracy")
    trainer.train()
    assert sizes == [64]


class AddsInLog(Trainer):
    """Reports a metric of its batches in its log only, as the trainers of TRL do."""

    batches = 0

    def prediction_step(self, *args, **options):
        self.batches += 1
        return super().prediction_step(*args, **options)

    def log(self, logs, *args, **options):
        if any(key.startswith("eval_") for key in logs) and self.batches:
            logs["eval_batches"], self.batches = float(self.batches), 0
        super().log(logs, *args, **options)


def test_a_metric_of_the_log_is_found_if_incomplete_batches_are_dropped(tmp_path):
    whole = make_trainer("conv", tmp_path, num_train_epochs=1, dataloader_drop_last=True)
    trainer = AddsInLog(whole.model, whole.args, train_dataset=whole.train_dataset, eval_dataset=whole.eval_dataset)
    callback = with_aswa(trainer, metric="batches")
    trainer.train()
    assert callback.strategies["aswa"].score == 4.0  # 64 examples in batches of 16


def test_a_second_callback_is_refused(tmp_path):
    trainer = make_trainer("conv", tmp_path, num_train_epochs=1)
    callback = with_aswa(trainer)
    trainer.add_callback(callback)
    with pytest.raises(ValueError, match=r"has 2 of ASWACallback.*Add it once"):
        trainer.train()
    trainer.remove_callback(callback)
    trainer.train()


@pytest.mark.parametrize("greater_is_better", [True, False])
def test_auto_ends_with_the_strategy_that_did_best_on_validation_and_the_card_says_so(greater_is_better, tmp_path):
    trainer = make_trainer("conv", tmp_path, num_train_epochs=3)
    metric = "accuracy" if greater_is_better else "loss"
    callback = with_aswa(trainer, metric=metric, strategies=("last", "ema", "dense-aswa", "best"), apply="auto")
    trainer.train()
    scores = {name: strategy.score for name, strategy in callback.strategies.items()}
    best = (max if greater_is_better else min)(scores.values())
    assert callback.applied == next(name for name, score in scores.items() if score == best)
    held = callback.strategies[callback.applied].average.averaged
    assert_same_tensors({name: p.detach() for name, p in trainer.model.named_parameters()}, held)
    content = json.loads((tmp_path / "aswa_trajectory.json").read_text())
    assert (content["applied"], content["run"]["apply"]) == (callback.applied, "auto")
    trainer.save_model()
    assert "Of the 4 strategies that followed the run, " in str(render(read_card_data(tmp_path, "me/model")))


def test_auto_passes_over_strategies_without_a_usable_score():
    def scored(score: float | None, members: int = 1) -> SimpleNamespace:
        return SimpleNamespace(score=score, members=members, greater_is_better=True, trajectory=[object()])

    strategies = {"a": scored(None), "b": scored(math.nan), "c": scored(0.9, members=0), "d": scored(0.5)}
    with pytest.warns(UserWarning, match="The weights of a have changed since the last decision point"):
        assert chosen_strategy("auto", strategies | {"e": scored(0.5)}) == "d"
    with pytest.warns(UserWarning, match="The weights of a have changed"):
        assert chosen_strategy("auto", {"a": scored(None)}) is None
    assert chosen_strategy("a", strategies) == "a"
    assert chosen_strategy(None, strategies) is None
