"""One process that has imported the libraries starts the ranks of all tests here."""

import pytest
import sharded_jobs
from fsdp_run import Processes


@pytest.fixture(scope="session")
def processes():
    running = Processes()
    yield running
    running.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder with the graph of all runs."""
    folder = tmp_path_factory.mktemp("sharded")
    sharded_jobs.graph(folder)
    return folder
