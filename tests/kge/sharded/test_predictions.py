"""Predictions, similar entities and multi-hop answers of sharded entities are those of one process."""

import pytest
import sharded_jobs
from sharded_jobs import assert_near


@pytest.mark.parametrize("world", [2, 3])
def test_the_best_of_every_shard_are_merged(processes, folder, world):
    expected = sharded_jobs.predict(folder)
    assert len(expected["heads"]["scores"]) < 13, "known answers are left out"
    for found in processes.run("sharded_jobs.predict", world, folder):
        assert_near(found, expected)
