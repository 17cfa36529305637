"""A run that is killed and resumed ends as if nothing had happened."""

import shutil
import threading
from pathlib import Path

import pytest
from killed_runs import assert_bit_identical
from training import make_trainer, with_aswa
from transformers import TrainerCallback

from aswa_hf._utils.locks import hold, locked, release
from aswa_hf.checkpoint import AVERAGE_FILE
from aswa_hf.run_folder import checkpoint_damage
from aswa_hf.trainer.files import LOCK, saved_state


@pytest.mark.parametrize(
    ("kind", "save_strategy", "kills"),
    [
        ("text", "epoch", [1, 2, 3, 4, 5]),
        ("conv", "epoch", [1, 2, 3, 4, 5]),
        ("lora", "epoch", [3]),
        ("conv", "steps", [3]),
    ],
)
def test_killed_after_any_epoch_and_resumed_the_run_is_bit_identical(kind, save_strategy, kills, tmp_path):
    assert_bit_identical(kind, tmp_path, save_strategy, kills)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize(
    ("name", "damage", "told"),
    [
        ("trainer_state.json", lambda path: path.write_text(""), r"trainer_state.json has 0 bytes instead of \d+"),
        ("optimizer.pt", cut, r"optimizer.pt has \d+ bytes instead of \d+"),
        ("model.safetensors", flip_a_bit, "the content of model.safetensors has changed"),
        (f"aswa/{AVERAGE_FILE}", flip_a_bit, f"the content of aswa/{AVERAGE_FILE} has changed"),
        (f"aswa/{AVERAGE_FILE}", Path.unlink, f"aswa/{AVERAGE_FILE} is missing"),
    ],
    ids=["empty state", "truncated optimizer", "flipped weight", "flipped average", "no average"],
)
def test_a_damaged_checkpoint_is_refused_before_it_is_loaded(finished, name, damage, told, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    damage(tmp_path / "checkpoint-12" / name)
    with_aswa(resumed := make_trainer("conv", tmp_path, num_train_epochs=3))
    match = rf"checkpoint-12 is damaged: {told}. Resume from the newest valid one: .*checkpoint-6'\)"
    with pytest.raises(ValueError, match=match):
        resumed.train(resume_from_checkpoint=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert checkpoint_damage(tmp_path / "checkpoint-12") is None


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of two epochs."""
    folder = tmp_path_factory.mktemp("finished")
    with_aswa(trainer := make_trainer("conv", folder, num_train_epochs=2))
    trainer.train()
    return folder


def test_files_that_others_add_to_a_checkpoint_do_not_make_it_invalid(tmp_path):
    class Adds(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            (tmp_path / f"checkpoint-{state.global_step}" / "notes.txt").write_text("saved")

    with_aswa(trainer := make_trainer("conv", tmp_path, num_train_epochs=1))
    trainer.add_callback(Adds())
    trainer.train()
    assert (tmp_path / "checkpoint-6" / "notes.txt").exists()
    assert checkpoint_damage(tmp_path / "checkpoint-6") is None


def test_a_state_of_an_older_version_without_a_marker_is_resumed_and_one_without_averages_is_not(finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    (tmp_path / "checkpoint-12" / "aswa" / "commit.json").unlink()
    callback = with_aswa(resumed := make_trainer("conv", tmp_path, num_train_epochs=3))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-12"))
    assert [record.epoch for record in callback.strategies["aswa"].trajectory] == [1, 2, 3]

    for name in ("commit.json", AVERAGE_FILE):
        (tmp_path / "checkpoint-18" / "aswa" / name).unlink()
    with_aswa(resumed := make_trainer("conv", tmp_path, num_train_epochs=4))
    with pytest.raises(ValueError, match=r"no averaging state.*Resume from the newest valid one: .*checkpoint-12"):
        resumed.train(resume_from_checkpoint=True)


def test_of_two_states_of_one_step_the_committed_one_counts(finished, tmp_path):
    """A step that is saved twice: killed in the second save, the state of the first belongs to its checkpoint."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    checkpoint = tmp_path / "checkpoint-12"
    shutil.copytree(checkpoint / "aswa", tmp_path / "_aswa-12")
    assert saved_state(checkpoint, 12) == checkpoint / "aswa"
    (checkpoint / "aswa" / "commit.json").unlink()  # what moving the second state begins with
    assert saved_state(checkpoint, 12) == tmp_path / "_aswa-12"


def test_a_checkpoint_of_a_sharded_run_is_refused_by_one_that_is_not(finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    (tmp_path / "checkpoint-12" / "pytorch_model_fsdp_0").mkdir()
    with_aswa(resumed := make_trainer("conv", tmp_path, num_train_epochs=3))
    with pytest.raises(ValueError, match=r"saved by a run with sharded weights .* one with complete weights"):
        resumed.train(resume_from_checkpoint=True)


def test_a_checkpoint_of_a_run_without_the_callback_starts_averages_afresh(tmp_path):
    make_trainer("conv", tmp_path, num_train_epochs=2).train()
    callback = with_aswa(resumed := make_trainer("conv", tmp_path, num_train_epochs=4))
    resumed.train(resume_from_checkpoint=True)
    assert [record.epoch for record in callback.strategies["aswa"].trajectory] == [3, 4]


def test_a_checkpoint_elsewhere_is_found_by_name_only(tmp_path):
    with_aswa(trainer := make_trainer("conv", tmp_path / "first", num_train_epochs=2))
    trainer.train()
    checkpoint = tmp_path / "first" / "checkpoint-12"

    with_aswa(resumed := make_trainer("conv", tmp_path / "second", num_train_epochs=3))
    with pytest.raises(FileNotFoundError, match="resume_from"):
        resumed.train(resume_from_checkpoint=str(checkpoint))

    callback = with_aswa(
        resumed := make_trainer("conv", tmp_path / "second", num_train_epochs=3), resume_from=checkpoint
    )
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert [record.epoch for record in callback.strategies["aswa"].trajectory] == [1, 2, 3]


def test_resuming_with_other_strategies_is_refused(tmp_path):
    with_aswa(trainer := make_trainer("conv", tmp_path, num_train_epochs=2))
    trainer.train()
    with_aswa(resumed := make_trainer("conv", tmp_path, num_train_epochs=3), strategies=("aswa", "ema"))
    with pytest.raises(ValueError, match="holds the strategies aswa, but this run has aswa, ema"):
        resumed.train(resume_from_checkpoint=True)


def test_two_trainers_in_one_folder_are_refused_and_one_may_train_again(tmp_path):
    other = threading.Thread(target=hold, args=(tmp_path, LOCK))
    other.start()
    other.join()
    with_aswa(trainer := make_trainer("conv", tmp_path, num_train_epochs=1))
    with pytest.raises(BlockingIOError, match=r"Another Trainer with ASWACallback is training in .* output_dir"):
        trainer.train()
    release(tmp_path, LOCK)
    trainer.train()
    trainer.train()

    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise ConnectionError

    trainer.add_callback(Fails())
    with pytest.raises(ConnectionError):
        trainer.train()
    with_aswa(again := make_trainer("conv", tmp_path, num_train_epochs=1))
    again.train()
    with locked(tmp_path, LOCK):
        pass
