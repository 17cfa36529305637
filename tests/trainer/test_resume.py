"""A run that is killed and resumed ends as if nothing had happened."""

import pytest
from killed_runs import assert_bit_identical
from training import make_trainer, with_aswa

from aswa_hf.checkpoint import AVERAGE_FILE


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


def test_resuming_without_the_averaging_state_names_the_last_complete_checkpoint(tmp_path):
    with_aswa(trainer := make_trainer("conv", tmp_path, num_train_epochs=3))
    trainer.train()
    (tmp_path / "checkpoint-18" / "aswa" / AVERAGE_FILE).unlink()
    with_aswa(resumed := make_trainer("conv", tmp_path, num_train_epochs=4))
    with pytest.raises(ValueError, match=r"no averaging state.*Resume from checkpoint-12, the last complete"):
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
