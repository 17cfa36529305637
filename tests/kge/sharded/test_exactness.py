"""Training with sharded entities has the losses, gradients and weights of one process."""

import pytest
import sharded_jobs
import torch


def assert_close(found, expected, tolerance):
    assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weights in expected["weights"].items():
        ours, theirs = torch.tensor(found["weights"][name]), torch.tensor(weights)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


RUNS = {
    "binary, Adam": {},
    "binary with smoothing, AdamW": {"label_smoothing": 0.1, "optimizer": "adamw"},
    "softmax, Adagrad": {"loss": "softmax", "optimizer": "adagrad", "label_smoothing": 0.1},
    "softmax-query, row-wise Adagrad": {"loss": "softmax-query", "optimizer": "adagrad-rowwise", "scorer": "tucker"},
    "1vsAll": {"scheme": "1vsall", "loss": "softmax", "scorer": "rescal"},
    "dropout, N3 and relation prediction": {
        "input_dropout": 0.1, "query_dropout": 0.2, "relation_dropout": 0.1,
        "regularizer": "n3", "regularization": 0.1, "relation_prediction": 0.1, "scorer": "complex",
    },
    "negative sampling": {"scheme": "negative_sampling", "adversarial_temperature": 1.0, "scorer": "qmult"},
    "shared negatives": {"scheme": "negative_sampling", "shared": True, "loss": "softmax", "scorer": "distmult"},
}  # fmt: skip


@pytest.fixture(scope="module")
def on_one_process(folder):
    return {name: sharded_jobs.train(folder, **options) for name, options in RUNS.items()}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_run_on_several_processes_is_the_run_on_one(processes, folder, on_one_process, world):
    ranks = processes.run("sharded_jobs.several", world, folder, jobs=RUNS)
    for number, found in enumerate(ranks):
        for name, expected in on_one_process.items():
            assert found[name]["rows"] == {1: [13], 2: [7, 6], 3: [5, 5, 3]}[world][number]
            assert (found[name]["rank"], found[name]["world"]) == (number, world)
            assert_close(found[name], expected, 1e-10)
