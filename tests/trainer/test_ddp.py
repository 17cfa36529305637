"""Two processes under DistributedDataParallel decide alike and hold the same ensemble."""

import pytest
from ddp_run import launch
from training import assert_same_tensors


@pytest.mark.parametrize("kind", ["text", "conv"])
def test_two_processes_decide_alike_and_hold_the_same_ensemble(kind, tmp_path):
    (tensors, about), (other_tensors, other_about) = launch(kind, tmp_path)
    assert about["world_size"] == 2
    # 96 examples in batches of 8 on two processes: the data is split, not repeated.
    assert about["steps"] == 6 * 6
    assert len(about["histories"]["aswa"]) == 6
    assert about == other_about
    assert_same_tensors(tensors, other_tensors)
    assert any(name.startswith("aswa/") for name in tensors)


def test_ranks_whose_scores_and_statistics_differ_agree_on_those_of_rank_0(tmp_path):
    (tensors, about), (other_tensors, other_about) = launch("conv", tmp_path, "--disagree")
    assert about == other_about
    assert_same_tensors(tensors, other_tensors)
    assert any(name.startswith("ema/") and name.endswith("running_mean") for name in tensors)


def test_two_processes_resume_bit_identically(tmp_path):
    (straight, about), _ = launch("conv", tmp_path / "straight")
    launch("conv", tmp_path / "resumed", "--stop")
    (resumed, resumed_about), (other, _) = launch("conv", tmp_path / "resumed", "--resume")
    assert resumed_about == about
    assert_same_tensors(resumed, straight)
    assert_same_tensors(resumed, other)
