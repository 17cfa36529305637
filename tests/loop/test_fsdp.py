"""The loop with a model that accelerate has sharded (FSDP2): it decides as with DDP, and resumes on its shards."""

import signal

import pytest
import torch
from loop_jobs import results, run_jobs
from safetensors.torch import load_file
from training import assert_same_tensors

from aswa_hf.loop.checkpoints import checkpoints

# With scores of a script: measured ones differ in their last digits, and so might decisions.
PLAIN = {"kind": "plain", "accumulate": 1, "processes": 2, "disagree": True}
SHARDED = PLAIN | {"sharded": True}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of all runs."""
    root = tmp_path_factory.mktemp("runs")
    killed = SHARDED | {"save_steps": 1, "save_total_limit": None, "send": signal.SIGKILL, "after": 9, "to": 1}
    statuses = run_jobs(
        PLAIN | {"folder": root / "whole"},
        SHARDED | {"folder": root / "sharded"},
        killed | {"folder": root / "killed"},
        killed | {"folder": root / "three"},
        SHARDED | {"folder": root / "killed", "save_total_limit": None},
        SHARDED | {"folder": root / "three", "processes": 3, "constant": True},
    )
    assert [status[1] for status in statuses[2:4]] == 2 * [-signal.SIGKILL]
    return root


def ended(folder, processes=2):
    """The weights and history of a run, which all its processes agree on."""
    (tensors, about), *others = results(folder, processes)
    assert all(other == about for _, other in others)
    assert about["processes"] == processes
    return tensors, about


def test_a_sharded_run_measures_decides_and_ends_as_one_of_whole_weights(runs):
    whole, about = ended(runs / "whole")
    sharded, sharded_about = ended(runs / "sharded")
    assert not about["sharded"]
    assert sharded_about["sharded"]
    assert sharded_about["records"] == about["records"]
    assert {record["decision"] for record in about["records"]["aswa"]} == {"init", "soft", "hard", "reject"}
    for row, expected in zip(sharded_about["history"], about["history"], strict=True):
        assert "eval_measured" in row
        assert "eval_aswa_measured" in row
        assert row == pytest.approx(expected, rel=1e-6)
    for name, tensor in whole.items():
        torch.testing.assert_close(sharded[name], tensor, rtol=1e-6, atol=1e-7)


def test_a_killed_sharded_run_resumes_bit_for_bit(runs):
    # Six steps an epoch: all are saved up to the ninth, then the last of each.
    steps = [int(path.name.removeprefix("checkpoint-")) for path in checkpoints(runs / "killed")]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8, 12, 18, 24, 30]
    tensors, about = ended(runs / "killed")
    expected, expected_about = ended(runs / "sharded")
    assert about == expected_about
    assert_same_tensors(tensors, expected)


def test_a_sharded_run_resumes_with_another_number_of_processes(runs):
    _, about = ended(runs / "three", 3)
    _, expected = ended(runs / "sharded")
    assert about["sharded"]
    assert about["history"][0] == expected["history"][0]
    assert [record["epoch"] for record in about["records"]["aswa"]] == [1, 2, 3, 4, 5]
    # The loss of an epoch is the mean over all of it, whoever had the beginning: two batches of each of two processes
    # are one of four for three, and the loss of the other three is 1.
    state = runs / "killed" / "checkpoint-8" / "aswa"
    begun = sum(load_file(state / f"rank-{rank}.safetensors")["loss"].item() for rank in (0, 1)) / 4
    assert about["history"][1]["train_loss"] == pytest.approx((begun + 3) / 4, rel=1e-6)
    assert [row["train_loss"] for row in about["history"][2:]] == [1, 1, 1]
