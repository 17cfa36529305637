"""Sharded entities have the ranks of one process."""

import pytest
import sharded_jobs

# With whole numbers every score is exact, whoever computes it; with few of them most are tied.
JOBS = {
    "random weights": {},
    "ties": {"values": 1},
    "ties, by small blocks": {"values": 1, "scores": 9},
    "ties, few queries at a time": {"values": 2, "queries": 2},
    "one diverged row": {"broken": True},
}


@pytest.mark.parametrize("world", [2, 3])
def test_the_ranks_are_those_of_one_process(processes, folder, world):
    ranks = processes.run("sharded_jobs.several", world, folder, jobs=JOBS, kind="rank_all")
    for name, options in JOBS.items():
        expected = sharded_jobs.rank_all(folder, **{k: v for k, v in options.items() if k != "scores"})
        # By blocks of one query and the other order of targets, these come in other batches.
        for found in ranks:
            assert sorted(map(str, found[name]["ranks"])) == sorted(map(str, expected["ranks"]))
            if "metrics" in expected:
                assert found[name]["metrics"] == pytest.approx(expected["metrics"], rel=1e-12)
    tied = [rank for rank in ranks[0]["ties"]["ranks"] if rank != int(rank)]
    assert tied, "there must be ties, at half ranks"
    assert set(ranks[0]["one diverged row"]["ranks"]) == {"nan"}
