"""The loop with a model that accelerate has sharded (FSDP2): it decides as with DDP, and resumes on its shards."""

import signal

import pytest
import torch
from loop_jobs import results, run_jobs
from training import assert_same_tensors

from aswa_hf.loop.checkpoints import checkpoints

PLAIN = {"kind": "plain", "accumulate": 1, "processes": 2}
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
        SHARDED | {"folder": root / "three", "processes": 3},
    )
    assert [status[1] for status in statuses[2:4]] == 2 * [-signal.SIGKILL]
    return root


def ended(folder, processes=2):
    """The weights and history of a run, which all its processes agree on."""
    (tensors, about), *others = results(folder, processes)
    assert all(other == about for _, other in others)
    assert about["processes"] == processes
    return tensors, about


def test_a_sharded_run_decides_and_ends_as_one_of_whole_weights(runs):
    whole, about = ended(runs / "whole")
    sharded, sharded_about = ended(runs / "sharded")
    assert not about["sharded"]
    assert sharded_about["sharded"]
    for name, records in about["records"].items():
        assert [record["decision"] for record in sharded_about["records"][name]] == [r["decision"] for r in records]
    assert len({record["decision"] for record in about["records"]["aswa"]}) >= 2
    for name, tensor in whole.items():
        torch.testing.assert_close(sharded[name], tensor, rtol=1e-6, atol=1e-7)


def test_a_killed_sharded_run_goes_on_bit_for_bit(runs):
    # Six steps an epoch: all are saved up to the ninth, then the last of each.
    steps = [int(path.name.removeprefix("checkpoint-")) for path in checkpoints(runs / "killed")]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8, 12, 18, 24, 30]
    tensors, about = ended(runs / "killed")
    expected, expected_about = ended(runs / "sharded")
    assert about == expected_about
    assert_same_tensors(tensors, expected)


def test_a_sharded_run_goes_on_with_another_number_of_processes(runs):
    _, about = ended(runs / "three", 3)
    _, expected = ended(runs / "sharded")
    assert about["sharded"]
    assert about["history"][0] == expected["history"][0]
    assert [record["epoch"] for record in about["records"]["aswa"]] == [1, 2, 3, 4, 5]
    # The loss of an epoch is the mean over all of it, whoever had the beginning.
    losses = [history[1]["train_loss"] for history in (about["history"], expected["history"])]
    assert losses[0] == pytest.approx(losses[1], rel=0.2)
