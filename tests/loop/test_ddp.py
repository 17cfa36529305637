"""Two processes in the loop: one decision, one ensemble; what stops one of them stops the run, which then resumes."""

import signal
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch
from loop_jobs import results, run_jobs
from training import assert_same_tensors

from aswa_hf.kge import Keci, evaluate_link_prediction, load_kg
from aswa_hf.loop.checkpoints import checkpoints

CONV = {"kind": "conv", "processes": 2}
# With scores of a script: measured ones differ in their last digits, and so might decisions.
PLAIN = {"kind": "plain", "split": True, "accumulate": 1, "disagree": True}
JOBS = {
    "straight": CONV,
    "killed again": CONV | {"save_steps": 1},
    "terminated": CONV | {"send": signal.SIGTERM, "after": 9, "to": 1},
    "resumed": CONV,
    "disagree": CONV | {"disagree": True},
    "one": PLAIN,
    "two": PLAIN | {"processes": 2},
    "kvsall": {"kind": "kvsall", "processes": 2},
    "silent": CONV | {"silent": True},
    "average": CONV | {"batchnorm": "average"},
    "full": CONV | {"full": True, "to": 1},
    "fewer": CONV | {"save_steps": 1, "send": signal.SIGKILL, "after": 9, "to": 0},
    "alone": CONV | {"processes": 1},
}
FOLDERS = {"killed again": "killed", "resumed": "terminated", "alone": "fewer"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of all runs, and how their processes ended."""
    root = tmp_path_factory.mktemp("runs")
    # One of two is killed in the second epoch.
    killed = CONV | {"save_steps": 1, "send": signal.SIGKILL, "after": 10, "to": 1}
    (statuses,) = run_jobs(killed | {"folder": root / "killed"})
    left = [path.name for path in checkpoints(root / "killed")]
    jobs = [{**job, "folder": root / FOLDERS.get(name, name)} for name, job in JOBS.items()]
    ended = dict(zip(JOBS, run_jobs(*jobs), strict=True))
    return root, ended | {"killed": statuses, "left": left}


def both(folder: Path):
    """The weights and histories of a run, after a look at whether its two processes agree."""
    (tensors, about), (other, other_about) = results(folder, processes=2)
    assert about["processes"] == 2
    assert about["kept"] == [True]  # the group, so that no DDP model is the last to drop it
    assert about.pop("agreed")
    assert other_about.pop("agreed")
    assert about == other_about
    assert_same_tensors(tensors, other)
    return tensors, about


def test_two_processes_decide_alike_on_the_same_statistics_and_hold_the_same_ensemble(runs):
    tensors, about = both(runs[0] / "straight")
    # 88 examples in batches of 8 on two processes, gradients of two batches together: the data is split.
    assert about["history"][-1]["step"] == 5 * 3
    assert len({record["decision"] for record in about["records"]["aswa"]}) >= 2
    assert any(name.startswith("aswa/") and name.endswith("running_mean") for name in tensors)


def test_a_killed_rank_ends_the_run_which_resumes_from_the_last_checkpoint(runs):
    root, ended = runs
    assert ended["killed"] == [1, -signal.SIGKILL]  # the other one does not wait for it
    # Batch 10 is in step 5, the second of the second epoch.
    assert ended["left"][-1] == "checkpoint-4"
    tensors, about = both(root / "killed")
    straight, straight_about = both(root / "straight")
    assert about == straight_about
    assert_same_tensors(tensors, straight)


def test_a_signal_to_one_process_stops_all_with_a_checkpoint(runs):
    root, ended = runs
    assert ended["terminated"] == [143, 143]
    tensors, about = both(root / "terminated")
    straight, straight_about = both(root / "straight")
    assert about == straight_about
    assert_same_tensors(tensors, straight)


def test_processes_that_measure_differently_follow_the_first(runs):
    _, about = both(runs[0] / "disagree")
    assert len({record["decision"] for record in about["records"]["aswa"]}) >= 2


def test_only_the_first_process_needs_to_know_the_score(runs):
    assert both(runs[0] / "silent") == (ANY, both(runs[0] / "straight")[1])


def test_averaged_statistics_are_the_same_on_all_processes_in_every_evaluation(runs):
    tensors, _ = both(runs[0] / "average")
    assert any(name.startswith("ema/") and name.endswith("running_mean") for name in tensors)


def test_a_disk_that_is_full_for_one_process_is_reported_by_all(runs):
    root, ended = runs
    assert ended["full"] == [1, 1]
    first, second = ((root / "full" / f"rank{rank}.error").read_text() for rank in (0, 1))
    assert "checkpoint of step 3 could not be saved" in first
    assert "on rank 1: [Errno 28] No space left on device" in first
    assert "No space left on device" in second
    assert checkpoints(root / "full") == []


def test_the_same_global_batch_is_the_same_run_on_one_and_two_processes(runs):
    ((one, about),) = results(runs[0] / "one")
    two, both_about = both(runs[0] / "two")
    assert both_about["records"] == about["records"]
    assert {record["decision"] for record in about["records"]["aswa"]} == {"init", "soft", "hard", "reject"}
    for row, expected in zip(both_about["history"], about["history"], strict=True):
        assert "eval_measured" in row
        assert row == pytest.approx(expected, rel=1e-6)
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name].double(), two[name].double(), rtol=1e-6, atol=1e-7)


def test_link_predictors_are_trained_and_scored_on_two_processes_as_on_one(runs):
    tensors, about = both(runs[0] / "kvsall")
    kg = load_kg("countries")
    model = Keci(kg.config(dim=16, p=1, q=2))
    for name in ("aswa", "dense-aswa", "swa", "ema", "best", "last"):
        weights = {key.partition("/")[2]: t for key, t in tensors.items() if key.startswith(f"{name}/")}
        model.load_state_dict(weights)
        found = evaluate_link_prediction(model, kg, "validation")["mrr"]
        assert found == about["records"][name][-1]["score"]


def test_one_process_resumes_from_the_checkpoint_of_two(runs):
    root, ended = runs
    assert -signal.SIGKILL in ended["fewer"]
    ((_, about),) = results(root / "fewer")
    assert about["processes"] == 1
    assert [record["epoch"] for record in about["records"]["aswa"]] == [1, 2, 3, 4, 5]
