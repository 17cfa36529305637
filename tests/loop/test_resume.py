"""A loop that is killed or stopped at any moment and started again ends as if nothing had happened."""

import signal
from pathlib import Path

import pytest
from loop_jobs import results, run_jobs
from training import assert_same_tensors

from aswa_hf.loop.checkpoints import checkpoints

# Eleven batches an epoch: six optimizer steps, or eleven where gradients are not accumulated.
CONV = {"kind": "conv"}
UNSEEDED = {"kind": "conv", "seedable": False, "accumulate": 1}
WORKER = {"kind": "conv", "workers": 1}
LINKS = {"kind": "kvsall", "accumulate": 1}
BY_STEPS = {"kind": "conv", "every": "4 steps"}
EVERY_STEP = {"save_steps": 1, "save_total_limit": 1}
INTERRUPTED = [
    ("first step", CONV, EVERY_STEP | {"send": signal.SIGKILL, "after": 3}),
    ("second epoch", CONV, EVERY_STEP | {"send": signal.SIGKILL, "after": 19}),
    ("last batch", CONV, EVERY_STEP | {"send": signal.SIGKILL, "after": 22}),
    ("half saved", CONV, EVERY_STEP | {"send": signal.SIGKILL, "while_saving": 9}),
    ("half saved epoch", CONV, {"send": signal.SIGKILL, "while_saving": 18}),
    ("terminated", CONV, {"send": signal.SIGTERM, "after": 15}),
    ("terminated at the end", CONV, {"send": signal.SIGTERM, "after": 22}),
    ("interrupted", CONV, {"send": signal.SIGINT, "after": 28}),
    ("unseeded", UNSEEDED, EVERY_STEP | {"send": signal.SIGKILL, "after": 13}),
    ("worker", WORKER, EVERY_STEP | {"send": signal.SIGKILL, "after": 17}),
    ("by steps", BY_STEPS, EVERY_STEP | {"send": signal.SIGKILL, "after": 21}),
    ("by steps at a decision", BY_STEPS, {"save_steps": 4, "send": signal.SIGKILL, "after": 17}),
    ("links", LINKS, EVERY_STEP | {"send": signal.SIGKILL, "after": 2}),
]
STRAIGHT = {
    "straight": CONV,
    "straight by steps": BY_STEPS,
    "straight unseeded": UNSEEDED,
    "straight worker": WORKER,
    "straight links": LINKS,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, dict[str, int]]:
    """The folder of all runs, and how each of those that were sent a signal ended at first."""
    root = tmp_path_factory.mktemp("runs")
    jobs = [{**job, "folder": root / name} for name, job in STRAIGHT.items()]
    for name, job, end in INTERRUPTED:
        jobs += [{**job, **end, "folder": root / name}, {**job, "folder": root / name}]
    # Nothing is left to do for the last one.
    jobs.append({**CONV, "folder": root / "terminated", "send": signal.SIGKILL, "after": 1})
    statuses = [status for (status,) in run_jobs(*jobs)]
    ended = {name: statuses[len(STRAIGHT) + 2 * i] for i, (name, *_) in enumerate(INTERRUPTED)}
    return root, ended | {"again": statuses[-1]}


@pytest.mark.parametrize(("name", "job", "end"), INTERRUPTED, ids=[name for name, *_ in INTERRUPTED])
def test_interrupted_anywhere_and_started_again_a_run_is_bit_identical(name, job, end, runs):
    root, ended = runs
    expected = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}
    assert ended[name] == expected[end["send"]]
    ((tensors, about),) = results(root / next(straight for straight, found in STRAIGHT.items() if found is job))
    ((resumed, resumed_about),) = results(root / name)
    assert len({record["decision"] for record in about["records"]["aswa"]}) >= 2
    assert resumed_about == about
    assert_same_tensors(resumed, tensors)


def test_no_half_written_checkpoint_is_left_and_old_ones_are_dropped(runs):
    root, _ = runs
    assert [path.name for path in checkpoints(root / "half saved")] == ["checkpoint-24", "checkpoint-30"]
    assert [path.name for path in checkpoints(root / "half saved epoch")] == ["checkpoint-24", "checkpoint-30"]
    assert not list(root.glob("*/.checkpoint-*"))


def test_a_finished_run_is_not_trained_again(runs):
    root, ended = runs
    assert ended["again"] == 0  # it would have been killed
    assert results(root / "terminated")[0][1] == results(root / "straight")[0][1]
