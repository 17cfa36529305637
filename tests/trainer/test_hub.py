"""Pushes from the Trainer: by the callback when training has ended, and by `Trainer.push_to_hub` with our card."""

import json
import logging
import math
import re
from concurrent.futures import Future

import pytest
import torch
import transformers
from ddp_run import launch
from hub_client import TOKEN, assert_nothing_pickled, files, hub_in_process, run_command, steps
from safetensors.torch import load
from training import ConvNet, accuracy, make_trainer, weights_of, with_aswa
from transformers import Trainer
from transformers.utils import PushInProgress

from aswa_hf import ASWA
from aswa_hf.hub import HubError, write_repository
from aswa_hf.trainer.hub import _task
from aswa_hf.trajectory import load_trajectories

HISTORY = {"README.md", "aswa_trajectory.json", "trajectory.png"}
TEXT = {"config.json", "model.safetensors"}
KGE = TEXT | {
    "configuration_kge.py",
    "modeling_kge.py",
    "entities.json",
    "relations.json",
    "preprocessor_config.json",
}
ALL = ("aswa", "swa", "ema", "best", "last")


@pytest.fixture
def hub(monkeypatch):
    with hub_in_process(monkeypatch) as server:
        yield server


def image_trainer(folder, **options):
    from aswa_hf.vision import ImageTensors, load_digits
    from aswa_hf.vision.classifier import timm_classifier
    from aswa_hf.vision.recipes import RECIPES
    from aswa_hf.vision.training import ImageTrainer, image_arguments

    images = {name: ImageTensors(rows, size=16) for name, rows in load_digits(train=60).items()}
    model = timm_classifier("test_resnet", images["train"].class_names, channels=1, size=16)
    recipe = RECIPES["preresnet20"].lasting(2)
    arguments = image_arguments(folder, recipe, report_to="none", disable_tqdm=True, use_cpu=True, **options)
    return ImageTrainer(model, arguments, recipe, train_dataset=images["train"], eval_dataset=images["validation"])


def trainer_of(kind, folder, **options):
    if kind == "timm":
        return image_trainer(folder, **options)
    return make_trainer(kind, folder, num_train_epochs=3, save_strategy="no", **options)


@pytest.mark.parametrize(
    ("kind", "metric", "expected"),
    [
        ("text", "accuracy", TEXT),
        ("kvsall", "mrr", KGE),
        ("timm", "accuracy", TEXT),
        ("lora", "loss", {"adapter_config.json", "adapter_model.safetensors"}),
        ("conv", "loss", {"model.safetensors"}),
    ],
)
def test_the_callback_pushes_the_ensemble_once_in_one_commit(kind, metric, expected, hub, tmp_path):
    trainer = trainer_of(kind, tmp_path / "run", hub_model_id="user/model", hub_private_repo=True)
    callback = with_aswa(trainer, metric=metric, strategies=ALL, push_to_hub=True)
    trainer.train()
    assert callback.pushed.endswith("user/model")
    assert hub.repos["user/model"].private
    assert (steps(hub, "create"), steps(hub, "commit")) == (1, 1)
    pushed = files(hub)
    assert set(pushed) == HISTORY | expected
    assert_nothing_pickled(pushed)
    assert TOKEN not in b"".join(pushed.values()).decode("latin-1")
    if kind != "lora":
        weights = load(pushed["model.safetensors"])
        ours = {name.removeprefix("timm_model."): tensor for name, tensor in weights_of(trainer.model).items()}
        assert weights.keys() == ours.keys()
        assert all(torch.equal(weights[name], ours[name]) for name in ours)
    card = pushed["README.md"].decode()
    score = callback.strategies["aswa"].score
    told = json.loads(pushed["aswa_trajectory.json"])["run"]
    assert told["strategies"]["aswa"]["validation"][metric] == score
    assert f"| **ASWA** | **{score:.4f}** |" in card
    for name, label in (("swa", "SWA"), ("ema", "EMA"), ("last", "the last epoch")):
        assert f"| {label} | {callback.strategies[name].score:.4f} |" in card
    assert "There are no results on a test split." in card
    assert ("LinkPredictor" in card, "timm.create_model" in card) == (kind == "kvsall", kind == "timm")
    assert ("recomputed on training data" in card) == (kind in ("timm", "conv"))


def test_trainer_push_to_hub_adds_our_card_in_one_commit(hub, tmp_path):
    trainer = trainer_of("text", tmp_path, hub_model_id="user/model")
    callback = with_aswa(trainer, metric="accuracy")
    trainer.train()
    trainer.push_to_hub(license="mit", tags="ours", dataset="me/sentences", finetuned_from="me/base")
    pushed = files(hub)
    assert set(pushed) == HISTORY | TEXT
    assert steps(hub, "commit") == 1
    assert_nothing_pickled(pushed)
    card = pushed["README.md"].decode()
    assert f"| **ASWA** | **{callback.strategies['aswa'].score:.4f}** |" in card
    for line in (
        "license: mit",
        "- ours",
        "- me/sentences",
        "base_model: me/base",
        "pipeline_tag: text-classification",
    ):
        assert line in card
    assert 'BertForSequenceClassification.from_pretrained("user/model")' in card
    trainer.create_model_card()  # asked for without a push, it is the Trainer's own again
    assert (
        "generated automatically according to the information the Trainer had" in (tmp_path / "README.md").read_text()
    )


@pytest.mark.parametrize("ours", [True, False], ids=["callback", "trainer"])
def test_the_pickle_that_pushes_of_checkpoints_leave_goes_with_the_last_push(ours, hub, tmp_path):
    options = {"hub_model_id": "user/model", "push_to_hub": True, "hub_always_push": True, "save_strategy": "epoch"}
    trainer = make_trainer("text", tmp_path, num_train_epochs=2, **options)
    with_aswa(trainer, metric="accuracy", push_to_hub=ours)
    trainer.train()
    if not ours:
        trainer.push_to_hub()
    repo = hub.repos["user/model"]
    assert any("training_args.bin" in commit.files for commit in repo.commits)
    assert_nothing_pickled(files(hub))
    assert set(files(hub)) >= HISTORY | TEXT
    assert trainer.state.epoch == 2


def test_a_hub_that_stops_answering_pushes_of_checkpoints_does_not_hang_the_run(hub, tmp_path, monkeypatch, caplog):
    logging.getLogger("aswa_hf").propagate = True
    monkeypatch.setattr("aswa_hf.trainer.hub.TIMEOUT", 1.0)
    options = {"hub_model_id": "user/model", "push_to_hub": True, "hub_always_push": True, "save_strategy": "epoch"}
    trainer = make_trainer("text", tmp_path, num_train_epochs=1, **options)
    with_aswa(trainer, metric="accuracy")
    hub.stall("commit", "before", 99)
    trainer.train()
    # On a busy machine an earlier request may be the one without an answer in time.
    assert re.search(r"A checkpoint was not pushed to user/model: no answer to (GET|POST) http", caplog.text)


def test_a_push_of_a_checkpoint_that_does_not_end_is_waited_for_with_a_limit(hub, tmp_path, monkeypatch, caplog):
    logging.getLogger("aswa_hf").propagate = True
    monkeypatch.setattr("aswa_hf.trainer.hub.LONGEST_PUSH", 1.0)
    monkeypatch.setattr("aswa_hf.trainer.hub.FIRST_NOTICE", 0.0)
    trainer = trainer_of("text", tmp_path / "run", hub_model_id="user/model")
    callback = with_aswa(trainer, metric="accuracy", push_to_hub=True)
    trainer.push_in_progress, trainer.hub_model_id = PushInProgress([Future()]), "user/model"
    monkeypatch.setattr(trainer, "_finish_current_push", lambda: None)  # the Trainer waits for good
    trainer.train()
    assert callback.pushed is None
    assert "Waiting for the push of a checkpoint to user/model, 0 s so far (at most 1 s)" in caplog.text
    ended = "The push of a checkpoint to user/model has not ended after 1 s, and could overwrite a later one"
    assert caplog.text.count(ended) == 1
    assert f"to push it: aswa-hf push {tmp_path / 'run'} user/model" in caplog.text
    assert "user/model" not in hub.repos


def test_a_trainer_with_a_card_of_its_own_keeps_it(hub, tmp_path):
    class Own(Trainer):
        def create_model_card(self, **options):
            (tmp_path / "README.md").write_text("---\nlicense: mit\n---\nMine.\n")

    original = trainer_of("text", tmp_path, hub_model_id="user/model")
    trainer = Own(
        original.model,
        original.args,
        train_dataset=original.train_dataset,
        eval_dataset=original.eval_dataset,
        compute_metrics=accuracy,
    )
    with_aswa(trainer)
    trainer.train()
    trainer.push_to_hub()
    assert files(hub)["README.md"].endswith(b"Mine.\n")
    assert "aswa_trajectory.json" in files(hub)


@pytest.mark.parametrize(
    ("fault", "step"),
    [
        (lambda hub: hub.fail("create", 403, times=math.inf), "create the repository"),
        (lambda hub: hub.cut("commit", when="before", times=math.inf), "upload the files"),
    ],
    ids=["forbidden", "cut"],
)
def test_a_push_that_fails_at_the_end_leaves_a_model_to_push_later(fault, step, hub, tmp_path, caplog):
    logging.getLogger("aswa_hf").propagate = True
    fault(hub)
    trainer = trainer_of("text", tmp_path / "run")
    callback = with_aswa(trainer, metric="accuracy", push_to_hub="user/model")
    assert trainer.train().global_step == 18
    assert callback.pushed is None
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert f"failed at the step: {step}" in message
    assert message.endswith(f"to push it: aswa-hf push {tmp_path / 'run'} user/model")
    assert TOKEN not in message
    hub.faults.clear()
    run_command("push", tmp_path / "run", "user/model")
    assert set(files(hub)) == HISTORY | TEXT


def test_what_would_fail_after_training_is_refused_before_it(hub, tmp_path, monkeypatch):
    trainer = trainer_of("text", tmp_path)
    with pytest.raises(ValueError, match=r"push_to_hub=True\) does not name a repository"):
        with_aswa(trainer, push_to_hub=True)
    with pytest.raises(ValueError, match="'model' is not the name of a repository"):
        with_aswa(trainer, push_to_hub="model")
    with_aswa(trainer, push_to_hub="user/model")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("aswa_hf.trainer.hub.get_token", lambda: None)
    with pytest.raises(HubError, match="There is no token for ASWACallback"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert hub.log == []


def test_a_run_that_keeps_its_running_weights_says_so(hub, tmp_path):
    trainer = trainer_of("text", tmp_path)
    with_aswa(trainer, metric="accuracy", apply=None, push_to_hub="user/model")
    trainer.train()
    card = files(hub)["README.md"].decode()
    assert "the last epoch weights of a training run" in card
    assert "They are the running model's weights at the end of training; nothing is averaged." in card
    assert "| ASWA |" in card


def test_a_run_that_ends_with_the_trainers_best_checkpoint_says_so(hub, tmp_path):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "accuracy", "save_strategy": "epoch"}
    trainer = make_trainer("text", tmp_path, num_train_epochs=3, hub_model_id="user/model", **best)
    with_aswa(trainer, metric="accuracy", apply=None, push_to_hub=True)
    trainer.train()
    card = files(hub)["README.md"].decode()
    assert "the best checkpoint weights of a training run" in card
    assert "They are those of the checkpoint with the best accuracy, which the Trainer loads at the end" in card


def test_a_strategy_given_as_a_function_is_described_as_it_is(hub, tmp_path):
    trainer = trainer_of("conv", tmp_path)
    strategies = {"mine": lambda model: ASWA(model, batchnorm="average", hard_updates=False, greater_is_better=False)}
    with_aswa(trainer, metric="loss", strategies=strategies, apply="mine", push_to_hub="user/model")
    trainer.train()
    card = files(hub)["README.md"].decode()
    assert "Adaptive Stochastic Weight Averaging used the validation loss" in card
    assert "The statistics of BatchNorm layers were averaged like the weights." in card


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("BertForSequenceClassification", "text-classification"),
        ("BertForTokenClassification", "token-classification"),
        ("BertForQuestionAnswering", "question-answering"),
        ("BertForMaskedLM", "fill-mask"),
        ("LlamaForCausalLM", "text-generation"),
        ("GPT2LMHeadModel", "text-generation"),
        ("ViTForImageClassification", "image-classification"),
        ("DetrForObjectDetection", "object-detection"),
        ("Wav2Vec2ForSequenceClassification", "audio-classification"),
        ("ASTForAudioClassification", "audio-classification"),
        ("Wav2Vec2ForCTC", "automatic-speech-recognition"),
        ("BartForConditionalGeneration", "text2text-generation"),
        ("BertModel", None),
    ],
)
def test_the_task_of_a_card_is_found_by_the_class_of_the_model_or_its_parent(name, task):
    library = getattr(transformers, name)
    for kind in (library, type("Mine", (library,), {})):
        assert _task(object.__new__(kind)) == task


def test_the_task_of_a_timm_model_is_image_classification():
    from aswa_hf.vision.classifier import timm_classifier

    assert _task(timm_classifier("test_resnet", 2)) == "image-classification"
    assert _task(ConvNet()) is None


class NamedClasses(torch.utils.data.Dataset):
    """Somebody's dataset of images, with names of its own for them."""

    class_names = ("dark", "gray", "bright")

    def __init__(self, rows):
        self.rows = rows
        self.labels = [row["labels"] for row in rows]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class NoImages(NamedClasses):
    def __getitem__(self, index):
        row = self.rows[index]
        return {"inputs": row["pixel_values"], "labels": row["labels"]}


class OnInputs(ConvNet):
    def forward(self, inputs, labels=None):
        return super().forward(inputs, labels)


@pytest.mark.parametrize(
    ("model", "data", "reason"),
    [
        (ConvNet, NamedClasses, "AttributeError: 'dict' object has no attribute 'logits'"),
        (OnInputs, NoImages, "KeyError: 'pixel_values'"),
    ],
    ids=["a model that returns a dict", "a dataset without pixels"],
)
def test_an_example_that_fails_is_left_out_with_a_warning(model, data, reason, hub, tmp_path, caplog):
    logging.getLogger("aswa_hf").propagate = True
    trainer = trainer_of("conv", tmp_path / "run", model=model())
    trainer.train_dataset, trainer.eval_dataset = data(trainer.train_dataset), data(list(trainer.eval_dataset))
    trainer.kg = "what other trainers call by this name"
    callback = with_aswa(trainer, metric="accuracy", push_to_hub="user/model")
    assert trainer.train().global_step == 18
    result, warning = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert result.startswith("ASWA: ")
    assert warning == f"The card will show no example: {reason}"
    assert "example" not in json.loads(files(hub)["aswa_trajectory.json"])["run"]
    assert f"| **ASWA** | **{callback.strategies['aswa'].score:.4f}** |" in files(hub)["README.md"].decode()


def test_a_run_of_the_command_line_is_finished_without_an_example_if_that_fails(tmp_path, monkeypatch, caplog):
    from aswa_hf import KGERun, train_kge
    from aswa_hf.kge import LinkPredictor

    def fails(*args, **options):
        raise ValueError("the scores overflow")

    monkeypatch.setattr(LinkPredictor, "predict", fails)
    logging.getLogger("aswa_hf").propagate = True
    run = KGERun(dataset="countries", model="distmult", dim=4, epochs=1, strategies=("aswa", "last"))
    finished = train_kge(run, tmp_path / "run")
    assert "The card will show no example: ValueError: the scores overflow" in caplog.messages
    assert finished.results["example"] is None
    card = write_repository(tmp_path / "run", tmp_path / "repository", "user/model") / "README.md"
    assert "predictor = LinkPredictor.from_pretrained" in card.read_text()


def test_a_run_that_cannot_be_described_ends_with_its_ensemble_and_a_history(tmp_path, caplog):
    class Odd(ConvNet):
        def get_base_model(self, depth):  # the name is PEFT's
            return self.body[:depth]

    logging.getLogger("aswa_hf").propagate = True
    trainer = trainer_of("conv", tmp_path / "run", model=Odd())
    callback = with_aswa(trainer, metric="accuracy")
    trainer.train()
    result, message = caplog.messages
    assert result.startswith("ASWA: ")
    assert message.startswith("The card will not describe the training run: TypeError: ")
    assert "missing 1 required positional argument: 'depth'" in message
    trajectories, about = load_trajectories(tmp_path / "run" / "aswa_trajectory.json")
    assert (trajectories["aswa"], about["run"]) == (callback.strategies["aswa"].trajectory, {})
    averaged = callback.strategies["aswa"].average.averaged
    assert all(torch.equal(weights_of(trainer.model)[name], tensor) for name, tensor in averaged.items())


def test_of_two_processes_one_pushes_and_a_failure_stops_neither(hub, tmp_path, monkeypatch):
    hub.fail("create", 403)  # the push of the callback; the later one of the Trainer succeeds
    for name, value in hub.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.delenv("HF_HUB_DISABLE_XET")
    ranks = launch("text", tmp_path / "run", script=str(__file__), bare=True)
    assert [about["pushed"] for _, about in ranks] == [None, None]
    assert (steps(hub, "create"), steps(hub, "commit")) == (2, 1)
    assert set(files(hub)) >= HISTORY | TEXT


def push_in_two_processes(kind, folder):
    """What each of the two processes does."""
    from pathlib import Path

    from safetensors.torch import save_file

    trainer = trainer_of(kind, folder, hub_model_id="user/model")
    callback = with_aswa(trainer, push_to_hub=True)
    trainer.train()
    trainer.evaluate()  # on both, or neither would come back
    trainer.push_to_hub()
    rank = trainer.args.process_index
    save_file({"one": torch.ones(1)}, Path(folder) / f"rank{rank}.safetensors")
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps({"pushed": callback.pushed}))


if __name__ == "__main__":
    import sys

    push_in_two_processes(*sys.argv[1:])
