"""The Accelerate loop: what it trains, decides, logs, saves and refuses, in one process."""

import itertools
import logging
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration, set_seed
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from training import ConvNet, assert_same_tensors, image_data, weights_of

from aswa_hf import ASWA, EMA
from aswa_hf._utils.locks import LOCK_FILE
from aswa_hf._utils.random_state import rng_from_tensors, rng_state, rng_tensors, set_rng_state
from aswa_hf.checkpoint import save_state
from aswa_hf.loop.checkpoints import checkpoints
from aswa_hf.loop.checks import Stop
from aswa_hf.loop.training import fit
from aswa_hf.run_folder import TRAJECTORY
from aswa_hf.schedule import EvaluationBudget
from aswa_hf.trajectory import load_trajectories

ALL = ("aswa", "dense-aswa", "swa", "ema", "best", "last")
PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([torch.zeros(1)]))


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Accelerators share one state for the whole process."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


class Setup:
    """A small model with BatchNorm and dropout, its data, and a validation loss."""

    def __init__(self, *, model=None, **options):
        self.accelerator = Accelerator(cpu=True, **options)
        set_seed(7)
        self.model = model or ConvNet()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
        self.train_loader = DataLoader(image_data(40, seed=1), 8, shuffle=True)
        self.valid_loader = self.accelerator.prepare(DataLoader(image_data(48, seed=2), 16))
        self.evaluations = 0

    def evaluate(self):
        self.evaluations += 1
        losses = [self.model(**batch)["loss"].reshape(1) for batch in self.valid_loader]
        return self.accelerator.gather_for_metrics(torch.cat(losses)).mean()

    def fit(self, **options):
        options = {"epochs": 4, "metric": "loss", "progress": False} | options
        arguments = [options.pop(name, getattr(self, name)) for name in ("model", "optimizer", "train_loader")]
        evaluate = options.pop("evaluate", self.evaluate)
        return fit(self.accelerator, *arguments, evaluate, **options)


def plain_loop(epochs, **options):
    """The weights after each epoch of the loop everybody writes, without any evaluation."""
    setup = Setup(**options)
    accelerator = setup.accelerator
    model, optimizer, loader = accelerator.prepare(setup.model, setup.optimizer, setup.train_loader)
    model.train()
    found = []
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
        found.append(weights_of(model))
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return found


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_running_model_trains_as_in_a_plain_loop_and_the_ensemble_is_what_the_alphas_say(accumulate, tmp_path):
    expected = plain_loop(4, gradient_accumulation_steps=accumulate)
    setup = Setup(gradient_accumulation_steps=accumulate)
    run = setup.fit(strategies=ALL, checkpoint_dir=tmp_path, save_total_limit=None)
    steps = -(-5 // accumulate)
    assert [path.name for path in checkpoints(tmp_path)] == [f"checkpoint-{steps * epoch}" for epoch in (1, 2, 3, 4)]
    snapshots = [load_file(path / "model.safetensors") for path in checkpoints(tmp_path)]
    for snapshot, weights in zip(snapshots, expected, strict=True):
        assert_same_tensors(snapshot, weights)

    assert len({record.decision for record in run.trajectories["aswa"]}) >= 2
    for name in ("aswa", "swa", "best", "last"):
        strategy = run.strategies[name]
        for key, tensor in strategy.average.averaged.items():
            replayed = sum(a * s[key].double() for a, s in zip(strategy.alphas, snapshots, strict=True))
            largest = max(s[key].abs().max().item() for s in snapshots)
            torch.testing.assert_close(tensor.double(), replayed, rtol=0, atol=1e-6 * largest)
    model = weights_of(setup.model)
    assert_same_tensors(
        {key: model[key] for key in run.strategies["aswa"].average.averaged},
        run.strategies["aswa"].average.averaged,
    )
    assert not setup.model.training
    assert run.strategies["ema"].steps == run.step == 4 * steps


def test_the_ema_of_a_run_is_that_of_its_optimizer_steps(tmp_path):
    setup = Setup(gradient_accumulation_steps=2)
    run = setup.fit(
        strategies={"ema": lambda model: EMA(model, decay=0.5, batchnorm="copy", greater_is_better=False)},
        apply="ema", epochs=1, checkpoint_dir=tmp_path, save_steps=1, save_total_limit=None,
    )  # fmt: skip
    first, second, third = (load_file(path / "model.safetensors") for path in checkpoints(tmp_path))
    for key, tensor in run.strategies["ema"].average.averaged.items():
        expected = 0.25 * first[key] + 0.25 * second[key] + 0.5 * third[key]
        torch.testing.assert_close(tensor, expected)


def test_decisions_by_steps_fall_on_multiples_and_the_last_step_and_do_not_disturb_training(tmp_path):
    expected = plain_loop(3)[-1]
    setup = Setup()
    run = setup.fit(strategies=ALL, epochs=3, every="4 steps", checkpoint_dir=tmp_path)
    assert [record.step for record in run.trajectories["dense-aswa"]] == [4, 8, 12, 15]
    assert [record.epoch for record in run.trajectories["aswa"]] == [4 / 5, 8 / 5, 12 / 5, 3]
    assert [row["step"] for row in run.history] == [4, 5, 8, 10, 12, 15]
    assert_same_tensors(load_file(tmp_path / "checkpoint-15" / "model.safetensors"), expected)
    # SWA averages the last quarter of the 15 steps.
    assert [record.decision.value for record in run.trajectories["swa"]] == ["reject", "reject", "init", "soft"]


def test_decision_points_of_a_run_are_skipped_where_evaluating_takes_too_long(monkeypatch, caplog):
    monkeypatch.setattr(EvaluationBudget, "seconds", 1.0)
    setup = Setup()
    by_epochs = Setup().fit(epochs=7, every=2, max_eval_share=1e-9)
    assert [record.epoch for record in by_epochs.trajectories["aswa"]] == [2, 6]
    caplog.clear()
    run = setup.fit(epochs=3, every="1 step", max_eval_share=1e-9)
    # What the first one takes was not known, and the run ends with the last one.
    assert [record.step for record in run.trajectories["aswa"]] == [1, 15]
    assert setup.evaluations == 3
    assert caplog.text.count("max_eval_share=1e-09") == 1


def test_history_holds_losses_scores_and_decisions_and_goes_to_the_trackers(tmp_path):
    class Notes(GeneralTracker):
        name = "notes"
        requires_logging_directory = False
        tracker = None

        def __init__(self):
            super().__init__()
            self.rows = []

        @on_main_process
        def log(self, values, step=None, **kwargs):
            self.rows.append((step, values))

    notes = Notes()
    setup = Setup(log_with=notes)
    setup.accelerator.init_trackers("test")
    scores = iter([3.0, 2.0, 2.6, 2.5, 2.7])
    run = setup.fit(
        evaluate=lambda: {"loss": next(scores), "words": "not a number"}, epochs=3, checkpoint_dir=tmp_path / "run"
    )
    # init at 3; 2 against a look-ahead of 2.6: hard; 2.5 against 2.7: rejected
    assert [row["eval_loss"] for row in run.history] == [3.0, 2.0, 2.5]
    assert [row["eval_aswa_loss"] for row in run.history] == [3.0, 2.0, 2.0]
    assert [row["aswa/decision"] for row in run.history] == [3, 2, 0]
    assert [row["aswa/members"] for row in run.history] == [1, 1, 1]
    assert [row["step"] for row in run.history] == [5, 10, 15]
    assert all(row["train_loss"] > 0 and row["learning_rate"] == 0.5 for row in run.history)
    assert notes.rows == [(row["step"], row) for row in run.history]
    trajectories, about = load_trajectories(tmp_path / "run" / TRAJECTORY)
    assert trajectories == run.trajectories
    assert (about["metric"], about["greater_is_better"], about["applied"]) == ("loss", False, "aswa")


def test_the_direction_of_the_metric_can_be_given():
    scores = [1.0, 2.0, 2.5]
    for greater, expected in ((None, 2.5), (False, 1.0)):
        left = iter(scores)
        run = Setup().fit(evaluate=lambda left=left: next(left), metric=None, greater_is_better=greater, epochs=2)
        assert run.strategies["aswa"].score == expected


def test_decisions_may_be_rarer_than_epochs():
    setup = Setup()
    run = setup.fit(every=2, epochs=5)
    assert [record.epoch for record in run.trajectories["aswa"]] == [2, 4]
    assert setup.evaluations == 3
    assert ["eval_loss" in row for row in run.history] == [False, True, False, True, False]


def test_plain_training_needs_no_strategy():
    setup = Setup()
    run = setup.fit(strategies={}, apply=None)
    assert_same_tensors(weights_of(setup.model), plain_loop(4)[-1])
    assert setup.evaluations == 4
    assert run.trajectories == {}


def test_gradients_are_clipped():
    setup = Setup()
    before = weights_of(setup.model)
    setup.fit(max_grad_norm=1e-8, apply=None, epochs=1)
    after = weights_of(setup.model)
    change = sum((after[n] - before[n]).square().sum() for n, _ in setup.model.named_parameters()) ** 0.5
    assert 0 < change < 5 * 0.5 * 1e-8 * 10  # five steps, learning rate, norm, momentum


def test_mixed_precision_is_the_accelerators():
    kinds = set()
    setup = Setup(mixed_precision="bf16")
    setup.model.body[0].register_forward_hook(lambda module, args, output: kinds.add(output.dtype))
    run = setup.fit(epochs=2)
    assert kinds == {torch.bfloat16}
    assert {tensor.dtype for tensor in run.strategies["aswa"].average.averaged.values()} == {torch.float32}


def test_objects_that_are_prepared_already_are_left_as_they_are():
    setup = Setup()
    prepared = setup.accelerator.prepare(setup.model, setup.optimizer, setup.train_loader)
    setup.model, setup.optimizer, setup.train_loader = prepared
    scheduler = torch.optim.lr_scheduler.StepLR(setup.optimizer.optimizer, 5, gamma=0.1)
    run = setup.fit(scheduler=scheduler, epochs=2)
    assert [row["learning_rate"] for row in run.history] == pytest.approx([0.05, 0.005])
    assert len(setup.accelerator._models) == len(setup.accelerator._optimizers) == 1
    assert setup.accelerator._dataloaders == [setup.valid_loader, setup.train_loader]


def test_a_stream_of_unknown_length_is_trained_on_and_resumed(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(image_data(40, seed=1))

    def run(folder, epochs=2, **options):
        setup = Setup()
        setup.train_loader = DataLoader(Stream(), 8)
        return setup.fit(epochs=epochs, checkpoint_dir=folder, **options), weights_of(setup.model)

    straight, weights = run(tmp_path / "straight")

    def fails_at(number):
        calls = itertools.count(1)

        def loss(model, batch):
            if next(calls) == number:
                raise ConnectionError
            return model(**batch)["loss"]

        return loss

    with pytest.raises(ConnectionError):
        run(tmp_path / "resumed", loss=fails_at(10), save_steps=1)
    assert checkpoints(tmp_path / "resumed")[-1].name == "checkpoint-9"
    resumed, resumed_weights = run(tmp_path / "resumed", save_steps=1)
    assert resumed.history == straight.history
    assert_same_tensors(resumed_weights, weights)


def test_a_bar_is_shown_on_request(capsys):
    Setup().fit(epochs=2)
    assert capsys.readouterr().err == ""
    Setup().fit(epochs=2, progress=True)
    shown = capsys.readouterr().err
    assert "epoch 2/2" in shown
    assert "10/10" in shown
    assert "aswa=" in shown


def test_an_ensemble_without_a_finite_score_leaves_the_running_weights(caplog):
    setup = Setup()
    with pytest.warns(UserWarning, match="nan"), caplog.at_level(logging.WARNING):
        setup.fit(evaluate=lambda: float("nan"), epochs=2)
    assert "no decision point had a finite loss" in caplog.text
    assert_same_tensors(weights_of(setup.model), plain_loop(2)[-1])


def test_a_checkpoint_that_cannot_be_written_leaves_those_before(tmp_path, monkeypatch):
    monkeypatch.setattr("aswa_hf._utils.commits.sync", lambda path: None)
    Setup().fit(epochs=1, checkpoint_dir=tmp_path)

    def full(path):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("aswa_hf._utils.commits.sync", full)
        with pytest.raises(
            OSError, match=r"checkpoint of step 10 could not be saved.*No space left.*same command again"
        ):
            Setup().fit(epochs=2, checkpoint_dir=tmp_path)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-5"]
    assert Setup().fit(epochs=2, checkpoint_dir=tmp_path).step == 10
    assert not list(tmp_path.glob(".checkpoint-*"))


def test_a_folder_with_another_run_is_refused(tmp_path):
    Setup().fit(epochs=2, checkpoint_dir=tmp_path)
    with pytest.raises(FileExistsError, match="already holds a run"):
        Setup().fit(epochs=2, checkpoint_dir=tmp_path, resume=False)
    with pytest.raises(ValueError, match="decided by 'loss', this run by 'score'"):
        Setup().fit(epochs=2, checkpoint_dir=tmp_path, metric=None, greater_is_better=False)
    with pytest.raises(ValueError, match="holds the strategies aswa, but this run has aswa, ema"):
        Setup().fit(epochs=2, checkpoint_dir=tmp_path, strategies=("aswa", "ema"))
    with pytest.raises(ValueError, match="is already at epoch 2, but this run has 1 epochs"):
        Setup().fit(epochs=1, checkpoint_dir=tmp_path)


def test_a_folder_that_cannot_be_written_to_is_reported_before_training(tmp_path):
    (tmp_path / "file").touch()
    setup = Setup()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", "/proc/run"):
        with pytest.raises(OSError, match=rf"Checkpoints cannot be kept in {folder}: .*Choose another checkpoint_dir"):
            setup.fit(checkpoint_dir=folder)
    assert setup.evaluations == 0


def test_a_folder_that_another_process_writes_to_is_refused_until_that_has_ended(tmp_path):
    Setup().fit(epochs=1, checkpoint_dir=tmp_path)
    half = tmp_path / ".checkpoint-10"
    half.mkdir()
    lock = "import filelock, sys\nwith filelock.FileLock(sys.argv[1]): print(flush=True); input()"
    command = [sys.executable, "-c", lock, tmp_path / LOCK_FILE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.read(1)
        with pytest.raises(OSError, match="another run is using it"):
            Setup().fit(epochs=2, checkpoint_dir=tmp_path)
        assert half.exists()
        other.kill()
    assert Setup().fit(epochs=2, checkpoint_dir=tmp_path).step == 10


def test_a_checkpoint_that_does_not_fit_is_named(tmp_path):
    def plain(**options):
        return Setup(**options).fit(strategies={}, apply=None, epochs=2, checkpoint_dir=tmp_path / "plain")

    plain()
    with pytest.raises(ValueError, match=r"(?s)checkpoint-10 cannot be resumed.*Resume with the same model"):
        plain(model=nn.Linear(2, 2))
    # As an older version wrote it, without a marker.
    for name in ("commit.json", "rank-0.safetensors"):
        (tmp_path / "plain" / "checkpoint-10" / "aswa" / name).unlink()
    with pytest.raises(ValueError, match=r"checkpoint-10 cannot be resumed: .*rank-0\.safetensors"):
        plain()


def test_damaged_checkpoints_are_named_put_aside_and_written_again(tmp_path):
    straight = Setup()
    straight.fit(epochs=3, checkpoint_dir=tmp_path / "straight")
    options = {"checkpoint_dir": tmp_path / "run", "save_total_limit": None}
    Setup().fit(epochs=3, **options)
    weights = tmp_path / "run" / "checkpoint-15" / "model.safetensors"
    flipped = bytearray(weights.read_bytes())
    flipped[-1] ^= 1
    weights.write_bytes(flipped)
    optimizer = tmp_path / "run" / "checkpoint-10" / "optimizer.bin"
    size = optimizer.stat().st_size
    optimizer.write_bytes(optimizer.read_bytes()[:-7])
    message = (
        r"Skipped damaged checkpoints in .*run: checkpoint-15 \(the content of model.safetensors has changed\), "
        rf"checkpoint-10 \(optimizer.bin has {size - 7} bytes instead of {size}\). The run resumes from checkpoint-5."
    )
    (tmp_path / "run" / ".aswa_trajectory.json.1234.tmp").touch()
    resumed = Setup()
    with pytest.warns(UserWarning, match=message):
        resumed.fit(epochs=3, **options)
    assert_same_tensors(weights_of(resumed.model), weights_of(straight.model))
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-5", "checkpoint-10", "checkpoint-15"]
    assert (tmp_path / "run" / "_damaged-checkpoint-15").is_dir()
    assert not list((tmp_path / "run").glob(".*.tmp"))


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_again(tmp_path):
    Setup().fit(epochs=1, checkpoint_dir=tmp_path)
    (tmp_path / "checkpoint-5" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"No checkpoint in .* is valid: checkpoint-5 \(model.safetensors is missing"):
        Setup().fit(epochs=2, checkpoint_dir=tmp_path)
    assert (tmp_path / "checkpoint-5").is_dir()


def test_a_disk_that_fills_while_the_optimizer_is_written_is_reported_in_one_line(tmp_path, monkeypatch):
    def full(*args, **options):
        raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 128 vs 22\nframe #0: …")

    setup = Setup()
    monkeypatch.setattr(setup.accelerator, "save_state", full)
    with pytest.raises(
        OSError, match=r"step 5 could not be saved in .*: a file could not be written .*full\?"
    ) as told:
        setup.fit(epochs=1, checkpoint_dir=tmp_path)
    assert "\n" not in str(told.value)


def test_a_checkpoint_of_a_sharded_run_is_refused_by_one_that_is_not(tmp_path):
    Setup().fit(epochs=1, checkpoint_dir=tmp_path)
    (tmp_path / "checkpoint-5" / "pytorch_model_fsdp_0").mkdir()
    with pytest.raises(ValueError, match=r"saved by a run with sharded weights .* one with complete weights"):
        Setup().fit(epochs=2, checkpoint_dir=tmp_path)


def test_the_folder_of_a_trainer_is_refused(tmp_path):
    setup = Setup()
    # as ASWACallback saves it
    aswa = ASWA(setup.model, greater_is_better=False, batchnorm="copy")
    save_state(tmp_path / "checkpoint-5" / "aswa", {"aswa": aswa}, metric="loss", step=5)
    with pytest.raises(ValueError, match=r"checkpoint-5 was not saved by fit\(\)"):
        setup.fit(checkpoint_dir=tmp_path)


def test_persistent_workers_are_reported_when_an_epoch_is_resumed(tmp_path, caplog):
    def run(**options):
        loader = DataLoader(image_data(40, seed=1), 8, shuffle=True, num_workers=1, persistent_workers=True)
        with caplog.at_level(logging.WARNING):
            return Setup().fit(train_loader=loader, checkpoint_dir=tmp_path, save_steps=1, epochs=1, **options)

    def interrupted(model, batch):
        if (tmp_path / "checkpoint-2").exists():
            raise ConnectionError
        return model(**batch)["loss"]

    with pytest.raises(ConnectionError):
        run(loss=interrupted)
    assert "persistent_workers" not in caplog.text
    run()
    assert "persistent_workers=True) continue with different random numbers" in caplog.text


def test_signals_are_left_alone_without_a_checkpoint_folder_and_after_the_run(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    found = []

    def evaluate():
        found.append([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)])
        return 1.0

    Setup().fit(epochs=1, evaluate=evaluate)
    assert found[-1] == before
    Setup().fit(epochs=1, evaluate=evaluate, checkpoint_dir=tmp_path)
    assert found[-1] != before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_second_interrupt_does_not_wait():
    with Stop(Accelerator(cpu=True), enabled=True):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_the_handler_that_was_there_before_has_the_last_word(tmp_path, monkeypatch):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with Stop(Accelerator(cpu=True), enabled=True) as stop:
            signal.raise_signal(signal.SIGTERM)
            stop.check()
            assert heard == []
            with pytest.raises(SystemExit, match="143"):
                stop.end_run(tmp_path)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"epochs": 0}, ValueError, "epochs must be a whole number of at least 1, got 0"),
        ({"epochs": 2.5}, ValueError, "epochs must be a whole number of at least 1, got 2.5"),
        ({"save_steps": 0}, ValueError, "save_steps must be a whole number of at least 1 or None, got 0"),
        ({"save_total_limit": 0}, ValueError, "save_total_limit must be a whole number"),
        ({"every": 5}, ValueError, "every=5 is more than epochs=4"),
        ({"every": 0}, ValueError, "every must be 'epoch', a whole number of epochs, or .* '500 steps', got 0"),
        ({"every": "evaluation"}, ValueError, "got 'evaluation'"),
        ({"max_eval_share": 2}, ValueError, "max_eval_share must be a share"),
        ({"max_grad_norm": 0}, ValueError, "max_grad_norm must be a positive number"),
        ({"evaluate": 0.5}, TypeError, "evaluate must be a function, got float"),
        ({"model": "bert"}, TypeError, "model must be a torch.nn.Module, got str"),
        ({"strategies": ("awsa",)}, ValueError, "Unknown strategy 'awsa'"),
        ({"apply": "ema"}, ValueError, r"apply='ema' is not among the strategies \(aswa\)"),
        ({"batchnorm": "no"}, ValueError, "batchnorm must be one of"),
        ({"resume": "yes"}, TypeError, "resume must be True or False"),
        ({"bn_batches": True}, ValueError, "bn_batches must be a whole number of at least 1 or None, got True"),
        ({"optimizer": "adam"}, TypeError, "optimizer must be a torch.optim.Optimizer.*got str"),
        ({"optimizer": torch.optim.SGD}, TypeError, "optimizer must be a torch.optim.Optimizer.*got SGD"),
        ({"train_loader": None}, TypeError, "train_loader must be an iterable of batches.*got NoneType"),
        ({"scheduler": "cosine"}, TypeError, "scheduler must be a learning rate scheduler or None, got str"),
        ({"scheduler": PLATEAU}, ValueError, "ReduceLROnPlateau needs a score"),
    ],
)
def test_bad_arguments_are_refused_at_once(options, error, message):
    setup = Setup()
    with pytest.raises(error, match=message):
        setup.fit(**options)
    assert setup.evaluations == 0
    assert setup.accelerator._models == []


def test_what_evaluate_returns_must_be_a_score():
    with pytest.raises(TypeError, match=r"must return the validation score or a dict of metrics, got NoneType"):
        Setup().fit(evaluate=lambda: None)
    with pytest.raises(ValueError, match=r"'eval_loss' is not among those of the evaluation: eval_accuracy"):
        Setup().fit(evaluate=lambda: {"accuracy": 1.0})


def test_a_model_without_a_loss_is_an_error_that_says_what_to_do():
    class Silent(ConvNet):
        def forward(self, pixel_values, labels=None):
            return super().forward(pixel_values)

    setup = Setup(model=Silent())
    with pytest.raises(TypeError, match=r"has no loss\. Say how to compute it: loss="):
        setup.fit(evaluate=lambda: 0.0)
    setup.train_loader = DataLoader([(row["pixel_values"], row["labels"]) for row in image_data(8, seed=1)], 4)
    with pytest.raises(TypeError, match="A batch is a list"):
        setup.fit(evaluate=lambda: 0.0)
    run = setup.fit(
        evaluate=lambda: 0.0,
        epochs=2,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0])["logits"], batch[1]),
    )
    assert run.step == 4


@pytest.mark.parametrize(
    ("value", "message"),
    [(1.0, "got float"), (None, "got NoneType"), (torch.ones(8), r"got a tensor of shape \(8,\)")],
)
def test_what_loss_returns_must_be_one_number(value, message):
    with pytest.raises(TypeError, match=rf"loss\(model, batch\) must return a tensor of one number.*{message}"):
        Setup().fit(loss=lambda model, batch: value)


def test_an_empty_loader_is_an_error():
    setup = Setup()
    setup.train_loader = DataLoader(image_data(4, seed=1), 8, drop_last=True)
    with pytest.raises(ValueError, match="train_loader yielded no batch"):
        setup.fit()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (DistributedType.MEGATRON_LM, "does not support MEGATRON_LM.*Use DDP or FSDP2"),
        (DistributedType.FSDP, "does not support FSDP version 1.*Use DDP or FSDP2"),
    ],
)
def test_sharding_that_hides_the_weights_is_refused(kind, message, monkeypatch):
    setup = Setup()
    monkeypatch.setattr(setup.accelerator.state, "distributed_type", kind)
    plugin = SimpleNamespace(fsdp_version=1)
    monkeypatch.setattr(setup.accelerator.state, "fsdp_plugin", plugin, raising=False)
    with pytest.raises(ValueError, match=message):
        setup.fit()


def test_settings_that_would_spoil_checkpoints_are_refused(tmp_path):
    setup = Setup(project_config=ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True))
    with pytest.raises(ValueError, match="remove automatic_checkpoint_naming"):
        setup.fit(checkpoint_dir=tmp_path / "run")


def test_gradients_that_are_left_over_at_the_end_of_an_epoch_are_refused_with_checkpoints(tmp_path):
    setup = Setup(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False))
    with pytest.raises(ValueError, match="gradients are left over at the end of an epoch"):
        setup.fit(checkpoint_dir=tmp_path / "run")
    assert setup.fit(epochs=2).step == 5


def test_random_states_survive_a_file():
    import random

    import numpy as np

    random.gauss(0, 1), np.random.standard_normal()  # both keep a second number for later
    state = rng_from_tensors(rng_tensors(rng_state()))
    expected = [random.gauss(0, 1), random.random(), np.random.standard_normal(), np.random.rand(), torch.rand(1)]
    set_rng_state(state)
    assert [
        random.gauss(0, 1),
        random.random(),
        np.random.standard_normal(),
        np.random.rand(),
        torch.rand(1),
    ] == expected
