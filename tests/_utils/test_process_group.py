"""Whoever starts a process group destroys it: also after an error, Ctrl-C or `sys.exit`, and with no thread left."""

import json
import signal
from contextlib import ExitStack

import pytest
import torch.distributed as dist
import warm
from meeting import meeting_place
from places import HELPERS

from aswa_hf import closing_process_group

# How the two processes end.
STATUSES = {
    ("ddp", "return"): [0, 0],
    ("ddp", "error of one"): [1, 1],
    ("ddp", "Ctrl-C"): [-signal.SIGINT, -signal.SIGINT],
    ("ddp", "end_training"): [0, 0],
    ("ddp", "no block"): [0, 0],
    ("sharded", "return"): [0, 0],
    ("sharded", "error"): [1, 1],
    ("sharded", "exit"): [3, 3],
    ("sharded", "end_training"): [0, 0],
    ("command", "return"): [0, 0],
    ("command", "error of one"): [1, 1],
    ("command", "Ctrl-C"): [130, 130],
}


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """What each process of each job leaves."""
    with ExitStack() as stack:
        jobs = [
            [what, way, str(tmp_path_factory.mktemp("leaving")), stack.enter_context(meeting_place(2))]
            for what, way in STATUSES
        ]
        run = warm.run(HELPERS / "leaving.py", json.dumps(jobs))
    assert run.returncode == 0, run.stderr[-3000:]
    return dict(zip(STATUSES, json.loads(run.stdout), strict=True))


@pytest.mark.parametrize(("what", "way"), STATUSES)
def test_a_process_leaves_without_its_group_whichever_way(what, way, left):
    assert [process["status"] for process in left[what, way]] == STATUSES[what, way]
    for process in left[what, way]:
        assert not process["group"]
        # A thread that needs the interpreter after its end aborts the process.
        assert process["threads"] == []


def test_a_group_that_was_there_before_is_left_alone(tmp_path):
    with closing_process_group():  # nothing to close
        pass
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        with closing_process_group():
            pass
        assert dist.is_initialized()
        with pytest.raises(KeyError), closing_process_group():
            raise KeyError
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_a_group_is_destroyed_when_the_block_ends(tmp_path):
    with closing_process_group():
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    assert not dist.is_initialized()


FORKED = """
import os, sys
import torch.distributed as dist
from aswa_hf._utils.process_group import keep_group

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
keep_group()
dist.destroy_process_group()
if child := os.fork():
    print(os.waitpid(child, 0)[1])
"""


def test_a_forked_process_does_not_wait_for_the_threads_of_a_group_that_was_kept(tmp_path):
    run = warm.run("-c", FORKED, tmp_path / "meeting", timeout=120)
    assert (run.returncode, run.stdout) == (0, "0\n"), run.stderr
