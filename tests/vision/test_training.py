"""Training image classifiers: schedule, recipes, models both libraries load, SGD, FGE and exact resumption."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import nn
from training import assert_accuracy, assert_same_tensors, weights_of
from transformers import AutoImageProcessor, AutoModelForImageClassification, TrainerCallback, set_seed

from aswa_hf import ASWACallback
from aswa_hf.vision import ImageTensors, load_digits
from aswa_hf.vision.classifier import save_tensors, save_timm, timm_classifier
from aswa_hf.vision.recipes import RECIPES, Recipe, find_recipe, swa_schedule
from aswa_hf.vision.training import FGETrainer, ImageTrainer, SaveWeights, chosen_precision, image_arguments

# The schedule and the recipes


def rates(scheduler, optimizer, steps):
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def sgd(lr: float) -> torch.optim.SGD:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=lr)


def test_the_rate_is_constant_to_half_the_run_falls_to_nine_tenths_and_stays_at_the_swa_rate():
    optimizer = sgd(0.1)
    found = rates(swa_schedule(optimizer, 10, swa_lr=0.02), optimizer, 12)
    assert found == pytest.approx([0.1] * 6 + [0.08, 0.06, 0.04, 0.02, 0.02, 0.02])


def test_the_rate_of_plain_sgd_falls_to_a_hundredth():
    optimizer = sgd(0.1)
    found = rates(swa_schedule(optimizer, 10), optimizer, 12)
    # At 80 % three quarters of the way down, from 90 % on at the end of it.
    assert found[8:] == pytest.approx([0.1 - 0.75 * 0.099, 0.001, 0.001, 0.001])


def test_it_agrees_with_the_papers_run_of_300_epochs_with_averaging_from_161():
    optimizer = sgd(0.1)
    found = rates(swa_schedule(optimizer, 161, swa_lr=0.05), optimizer, 300)
    for epoch, rate in enumerate(found):
        t = epoch / 161
        expected = 0.1 if t <= 0.5 else 0.05 if t > 0.9 else 0.1 - 0.05 * (t - 0.5) / 0.4
        assert rate == pytest.approx(expected), epoch


def test_all_groups_come_down_to_the_swa_rate():
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([{"params": first.parameters(), "lr": 1.0}, {"params": second.parameters()}], lr=0.1)
    rates(swa_schedule(optimizer, 10, swa_lr=0.05), optimizer, 10)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.05])


@pytest.mark.parametrize(("lr", "steps", "swa_lr"), [(0.1, 0, 0.1), (0.0, 5, 0.1), (0.1, 5, -0.1)])
def test_an_impossible_schedule_is_refused(lr, steps, swa_lr):
    with pytest.raises(ValueError, match=rf"steps={steps}, lr={lr}, swa_lr={swa_lr}"):
        swa_schedule(sgd(lr), steps, swa_lr=swa_lr)


def test_recipes_are_found_by_name_architecture_and_number_of_classes():
    assert find_recipe(None, "wrn28_10_cifar", 10) == ("wrn28_10", RECIPES["wrn28_10"])
    assert find_recipe(None, "preresnet164_cifar", 10)[1].swa_lr == 0.01
    assert find_recipe(None, "preresnet164_cifar", 100)[1].swa_lr == 0.05
    assert find_recipe("vgg16", "resnet18", 10)[1].lr == 0.05
    with pytest.raises(ValueError, match=r"There is no recipe 'vgg'. Did you mean 'vgg19'. Expected one of vgg16"):
        find_recipe("vgg", "vgg16_cifar", 10)


@pytest.mark.parametrize(("epochs", "start"), [(300, 161), (150, 80), (30, 16), (1, 1)])
def test_a_shorter_run_keeps_the_fractions_and_leaves_fge_time_for_two_snapshots(epochs, start):
    recipe = RECIPES["wrn28_10"].lasting(epochs)
    assert (recipe.epochs, recipe.swa_start) == (epochs, start)
    assert recipe.fge_epochs >= 1
    assert 1.5 * recipe.fge_cycle <= recipe.fge_epochs
    assert RECIPES["wrn28_10"].lasting(300) == RECIPES["wrn28_10"]


# timm models in transformers


MODELS = [
    ("preresnet20_cifar", {}, {}),
    ("preresnet20_cifar", {"channels": 1}, {"in_chans": 1}),
    ("test_resnet", {"size": 64}, {}),
    ("test_vit", {"size": 32, "channels": 1}, {"img_size": 32, "in_chans": 1}),
]


@pytest.mark.parametrize(("name", "options", "timms"), MODELS)
def test_weights_are_those_timm_draws(name, options, timms):
    torch.manual_seed(3)
    ours, after = timm_classifier(name, 7, **options), torch.rand(1)
    torch.manual_seed(3)
    theirs = timm.create_model(name, num_classes=7, **timms)
    assert_same_tensors(weights_of(ours.timm_model), weights_of(theirs))
    assert torch.equal(after, torch.rand(1))


@pytest.mark.parametrize(("name", "options", "timms"), MODELS)
def test_a_saved_model_is_the_same_in_timm_and_in_transformers(name, options, timms, tmp_path):
    model = timm_classifier(name, ["cat", "dog", "eel"], **options).to(memory_format=torch.channels_last)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.01 * torch.rand_like(tensor))  # as after training, statistics included
    model.save_pretrained(tmp_path)
    in_timm = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    in_transformers = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert_same_tensors(weights_of(in_timm), weights_of(model.timm_model))
    assert_same_tensors(weights_of(in_transformers), weights_of(model))
    assert in_transformers.config.id2label == {0: "cat", 1: "dog", 2: "eel"}

    channels, size, _ = model.timm_model.pretrained_cfg["input_size"]
    # In double precision, where another memory layout changes only digits that do not count.
    images = torch.randn(2, channels, size, size, dtype=torch.float64)
    with torch.no_grad():
        expected = model.double().eval()(images).logits
        torch.testing.assert_close(in_timm.double()(images), expected)
        torch.testing.assert_close(in_transformers.double()(images).logits, expected)
    assert AutoImageProcessor.from_pretrained(tmp_path).data_config["input_size"] == (channels, size, size)


def test_how_images_were_prepared_is_saved_with_the_model(tmp_path):
    save_timm(timm_classifier("test_resnet", 2, size=40, mean=(0.1, 0.2, 0.3), std=(1, 2, 3)), tmp_path)
    found = AutoImageProcessor.from_pretrained(tmp_path).data_config
    assert (found["mean"], found["std"], found["crop_pct"]) == ((0.1, 0.2, 0.3), (1, 2, 3), 1.0)


def test_tensors_that_share_memory_are_saved_under_each_name(tmp_path):
    tied = torch.arange(6.0)
    save_tensors({"a": tied, "timm_model.b": tied, "c": tied[2:], "d": tied.view(2, 3).T}, tmp_path / "tied", of="x")
    found = load_file(tmp_path / "tied")
    assert_same_tensors(found, {"a": tied, "b": tied, "c": tied[2:], "d": tied.view(2, 3).T})


def test_unknown_models_and_classes_without_names_are_refused():
    with pytest.raises(ValueError, match=r"no model 'preresnet21_cifar'. Did you mean 'preresnet20_cifar'"):
        timm_classifier("preresnet21_cifar", 10)
    with pytest.raises(ValueError, match="two or more classes with different names"):
        timm_classifier("test_resnet", ["cat", "cat"])


# The Trainer


RECIPE = Recipe(
    lr=0.1, weight_decay=1e-3, epochs=4, swa_start=2, swa_lr=0.02, fge_high=0.05, fge_low=0.01, fge_cycle=1,
    batch_size=20, momentum=0.8,
)  # fmt: skip


@pytest.fixture(scope="module")
def digits() -> dict[str, ImageTensors]:
    splits = load_digits(train=100, validation=100)
    return {name: ImageTensors(rows, size=16, augment=name == "train") for name, rows in splits.items()}


def make_trainer(kind, digits, folder, **options):
    set_seed(5)
    model = timm_classifier("test_resnet", 10, channels=1, size=16)
    settings = {"disable_tqdm": True, "use_cpu": True, "seed": 5, "save_strategy": "steps", "save_steps": 5}
    callbacks = options.pop("callbacks", None)
    args = image_arguments(folder, RECIPE, **(settings | options))
    sets = {"train_dataset": digits["train"], "eval_dataset": digits["validation"]}
    return kind(model, args, RECIPE, callbacks=callbacks, **sets)


class Rates(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        (group,) = optimizer.param_groups
        self.seen.append((group["lr"], group["momentum"], group["weight_decay"]))


class StopAfter(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_save(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


class SGDByHand(TrainerCallback):
    """Computes every step from the gradients: v ← 0.8 v + ∇ + 0.001 θ, θ ← θ − lr v."""

    def __init__(self):
        self.velocity, self.expected, self.steps = {}, {}, 0

    @torch.no_grad()
    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        for name, weight in model.named_parameters():
            self.velocity[name] = 0.8 * self.velocity.get(name, 0) + weight.grad + 1e-3 * weight
            self.expected[name] = weight - optimizer.param_groups[0]["lr"] * self.velocity[name]

    def on_step_end(self, args, state, control, model=None, **kwargs):
        for name, weight in model.named_parameters():
            torch.testing.assert_close(weight.detach(), self.expected[name])
        self.steps += 1


def test_the_trainer_uses_sgd_and_the_schedule_of_the_recipe(digits, tmp_path):
    callbacks = [seen := Rates(), by_hand := SGDByHand()]
    trainer = make_trainer(ImageTrainer, digits, tmp_path, save_strategy="no", callbacks=callbacks)
    convolution = next(p for p in trainer.model.parameters() if p.dim() == 4 and p.shape[2] > 1 and p.shape[1] > 1)
    assert convolution.is_contiguous(memory_format=torch.channels_last)
    trainer.train()
    # Five steps an epoch: constant for 5 of the 10 steps before SWA starts, at its rate from the 9th on.
    assert [lr for lr, _, _ in seen.seen] == pytest.approx([0.1] * 6 + [0.08, 0.06, 0.04] + [0.02] * 11)
    assert {(m, w) for _, m, w in seen.seen} == {(0.8, 1e-3)}
    assert by_hand.steps == 20
    found = trainer.evaluate(digits["test"], metric_key_prefix="test")["test_accuracy"]
    batch = digits["test"].__getitems__(list(range(len(digits["test"]))))
    with torch.no_grad():
        logits = trainer.model.eval()(batch["pixel_values"]).logits
    assert_accuracy(found, logits.softmax(-1), batch["labels"])


@pytest.mark.parametrize("stop", [5, 15])
def test_a_resumed_run_ends_with_the_same_weights_and_decisions(stop, digits, tmp_path):
    def run(folder, resume=False, **options):
        trainer = make_trainer(ImageTrainer, digits, folder, **options)
        trainer.add_callback(SaveWeights(folder / "start.safetensors", epoch=3))
        callback = ASWACallback(trainer, metric="accuracy", strategies=("aswa", "ema", "last"))
        trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=resume or None)
        history = {name: strategy.trajectory.to_json() for name, strategy in callback.strategies.items()}
        return weights_of(trainer.model), history

    weights, history = run(tmp_path / "straight")
    run(tmp_path / "resumed", callbacks=[StopAfter(stop)])
    resumed, resumed_history = run(tmp_path / "resumed", resume=True)
    assert resumed_history == history
    assert_same_tensors(resumed, weights)
    starts = [load_file(tmp_path / name / "start.safetensors") for name in ("straight", "resumed")]
    assert_same_tensors(*starts)


def test_checkpoints_load_in_timm_too(digits, tmp_path):
    trainer = make_trainer(ImageTrainer, digits, tmp_path, max_steps=5)
    trainer.train()
    loaded = timm.create_model(f"local-dir:{tmp_path / 'checkpoint-5'}", pretrained=True)
    assert_same_tensors(weights_of(loaded), weights_of(trainer.model.timm_model))


def test_fge_takes_its_snapshots_at_the_lowest_rates_and_resumes_exactly(digits, tmp_path):
    trainer = make_trainer(FGETrainer, digits, tmp_path / "straight", eval_strategy="no", callbacks=[seen := Rates()])
    trainer.train()
    # Five steps an epoch, four of them a cycle: the lowest rate is that of steps 2, 6, 10, 14 and 18.
    assert [lr for lr, _, _ in seen.seen][:5] == pytest.approx([0.03, 0.01, 0.03, 0.05, 0.03])
    assert list(trainer.fge.snapshots) == [2, 6, 10, 14, 18]
    assert [lr for lr, _, _ in seen.seen][1::4] == pytest.approx([0.01] * 5)

    stopped = make_trainer(FGETrainer, digits, tmp_path / "resumed", eval_strategy="no", callbacks=[StopAfter(10)])
    stopped.train()
    assert list(stopped.fge.snapshots) == [2, 6, 10]
    resumed = make_trainer(FGETrainer, digits, tmp_path / "resumed", eval_strategy="no")
    resumed.train(resume_from_checkpoint=True)
    assert list(resumed.fge.snapshots) == [2, 6, 10, 14, 18]
    for step in trainer.fge.snapshots:
        assert_same_tensors(resumed.fge.snapshots[step](), trainer.fge.snapshots[step]())
    batch = [digits["test"].__getitems__(list(range(50)))]
    assert torch.equal(trainer.fge.ensemble().predict(batch), resumed.fge.ensemble().predict(batch))


def test_fge_counts_its_cycle_in_optimizer_steps(digits, tmp_path):
    # Five batches of an epoch are three steps of two; a cycle of two epochs is six steps.
    recipe = replace(RECIPE, fge_cycle=2)
    args = image_arguments(tmp_path, recipe, use_cpu=True, gradient_accumulation_steps=2, eval_strategy="no")
    model = timm_classifier("test_resnet", 10, channels=1, size=16)
    trainer = FGETrainer(model, args, recipe, train_dataset=digits["train"], callbacks=[seen := Rates()])
    trainer.train()
    assert trainer.fge.cycle == 6
    assert list(trainer.fge.snapshots) == [3, 9]
    assert [lr for lr, _, _ in seen.seen][2::6] == pytest.approx([0.01, 0.01])


def test_fge_refuses_a_checkpoint_of_another_cycle(digits, tmp_path):
    make_trainer(FGETrainer, digits, tmp_path, eval_strategy="no", max_steps=5).train()
    other = make_trainer(FGETrainer, digits, tmp_path, eval_strategy="no", gradient_accumulation_steps=2)
    with pytest.raises(FileNotFoundError, match=r"cycles of 2, but .*snapshot-1\.safetensors is missing"):
        other.train(resume_from_checkpoint=True)


def test_another_learning_rate_takes_those_of_swa_and_fge_along(digits, tmp_path):
    trainer = make_trainer(ImageTrainer, digits, tmp_path, learning_rate=0.01, callbacks=[seen := Rates()])
    trainer.train()
    assert [lr for lr, _, _ in seen.seen] == pytest.approx([0.01] * 6 + [0.008, 0.006, 0.004] + [0.002] * 11)
    fge = make_trainer(FGETrainer, digits, tmp_path, learning_rate=0.01, eval_strategy="no")
    assert (fge.recipe.fge_high, fge.recipe.fge_low) == pytest.approx((0.005, 0.001))
    assert fge.optimizer.param_groups[0]["initial_lr"] == pytest.approx(0.005)
    assert RECIPE.at_rate(0.1) is RECIPE


def test_several_gpus_in_one_process_are_refused(digits, tmp_path):
    args = image_arguments(tmp_path, RECIPE, use_cpu=True)
    args._n_gpu = 2
    with pytest.raises(ValueError, match=r"use 2 GPUs\. Start one process per GPU: accelerate launch"):
        ImageTrainer(timm_classifier("test_resnet", 10), args, RECIPE, train_dataset=digits["train"])


class Weights(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seen.append(weights_of(model))


def test_with_augmentation_and_dropout_the_running_model_trains_as_it_would_without_the_callback(tmp_path, digits):
    def run(folder, with_aswa):
        set_seed(5)
        model = timm_classifier("test_resnet", 10, channels=1, size=16, drop_rate=0.3)
        args = image_arguments(folder, RECIPE, disable_tqdm=True, use_cpu=True, seed=5)
        sets = {"train_dataset": digits["train"], "eval_dataset": digits["validation"]}
        trainer = ImageTrainer(model, args, RECIPE, callbacks=[seen := Weights()], **sets)
        if with_aswa:
            trainer.add_callback(ASWACallback(trainer, metric="accuracy", strategies=("aswa", "swa", "ema", "best")))
        trainer.train()
        return seen.seen

    alone, shadowed = run(tmp_path / "alone", False), run(tmp_path / "shadowed", True)
    assert len(alone) == len(shadowed) == 20
    for expected, found in zip(alone, shadowed, strict=True):
        assert_same_tensors(found, expected)


@pytest.mark.parametrize(("has_bf16", "expected"), [(True, "bf16"), (False, "fp16")])
def test_mixed_precision_is_used_where_the_device_has_it(has_bf16, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    assert chosen_precision("auto") == expected
    assert chosen_precision("auto", use_cpu=True) == "fp32"
    assert chosen_precision("fp32") == "fp32"
    with pytest.raises(ValueError, match="precision must be auto, fp32, bf16 or fp16, got 'int4'"):
        chosen_precision("int4")


@pytest.mark.parametrize(("precision", "use_cpu"), [("bf16", True), ("fp32", False)])
def test_without_an_accelerator_bf16_means_the_cpu(precision, use_cpu, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    args = image_arguments(tmp_path, RECIPE, precision=precision)
    assert (args.use_cpu, args.bf16) == (use_cpu, precision == "bf16")


def test_training_in_bf16_keeps_float32_weights(digits, tmp_path):
    trainer = make_trainer(ImageTrainer, digits, tmp_path, precision="bf16", max_steps=4, save_strategy="no")
    convolution = next(module for module in trainer.model.modules() if isinstance(module, nn.Conv2d))
    seen = set()
    convolution.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    trainer.train()
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])
