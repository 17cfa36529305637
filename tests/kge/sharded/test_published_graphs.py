"""UMLS and FB15k-237 on one, two and three processes: the losses, weights, decisions and ranks of one process.

ASWA_KG_DATA is a folder that holds the graphs, each in a folder of its name; without it the tests are skipped.
"""

import os
from pathlib import Path

import pytest
import sharded_jobs
import torch
from safetensors.torch import load_file

RUNS = {
    "UMLS in float64": {"graph": "UMLS", "dtype": "float64", "tolerance": 1e-10},
    "UMLS": {"graph": "UMLS", "tolerance": 1e-5},
    "FB15k-237": {"graph": "FB15k-237", "dim": 16, "optimizer": "adagrad-rowwise", "tolerance": 1e-5},
}


@pytest.mark.slow
@pytest.mark.timeout(3600)  # FB15k-237 takes four minutes of CPU time, which is more than ten on busy cores
@pytest.mark.filterwarnings("ignore:FB15k-237 contains labels")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_a_published_graph_is_that_of_one_process(processes, tmp_path, name):
    options = dict(RUNS[name])
    graph, tolerance = options.pop("graph"), options.pop("tolerance")
    data = Path(os.environ.get("ASWA_KG_DATA", ""), graph)
    if not (os.environ.get("ASWA_KG_DATA") and data.is_dir()):
        pytest.skip(f"set ASWA_KG_DATA to a folder that holds {graph}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = sharded_jobs.real_graph(tmp_path, str(data), "alone", **options)
    finally:
        torch.set_num_threads(threads)
    weights = load_file(tmp_path / "alone.safetensors")
    for world in (1, 2, 3):
        job = {"data": str(data), "name": f"on-{world}", "weights": "alone"}
        ranks = processes.run("sharded_jobs.real_graph", world, tmp_path, **job, **options)
        found = load_file(tmp_path / f"on-{world}.safetensors")
        apart = {key: (found[key] - tensor).abs().max().item() for key, tensor in weights.items()}
        losses = max(abs(a - b) for a, b in zip(ranks[0]["losses"], expected["losses"], strict=True))
        print(f"{name} on {world}: rows {[one['rows'] for one in ranks]}, losses {losses:.2g}, weights {apart}")
        assert sum(one["rows"] for one in ranks) == len(weights["entities"])
        assert losses <= tolerance
        assert max(apart.values()) <= tolerance
        for one in ranks:
            assert one["losses"] == ranks[0]["losses"]
            assert one["decisions"] == expected["decisions"]
            assert one["ranks"] == expected["ranks"]
