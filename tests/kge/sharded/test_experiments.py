"""`KGERun(shard_entities=True)`: the same run on one, two and three processes, resumed on others."""

import json

import pytest
import sharded_jobs
from sharded_jobs import assert_near

from aswa_hf.experiments.evaluation import each_strategy
from aswa_hf.experiments.settings import KGERun, SettingError
from aswa_hf.kge import KGEModel, evaluate_link_prediction, load_kg


@pytest.fixture(scope="module")
def two(processes, folder):
    return processes.run("sharded_jobs.experiment", 2, folder, name="experiment")


def test_a_run_is_the_same_on_one_and_two_processes(two, folder):
    (folder / "alone").mkdir()
    expected = sharded_jobs.experiment(folder, "alone/run")
    for found in two:
        assert found["world"] == 2
        assert_near(found["strategies"], expected["strategies"], 1e-6)


def test_no_norm_of_gradients_is_logged_because_each_process_has_only_those_of_its_rows(two, folder):
    (path, *_) = (folder / "experiment").glob("**/trainer_state.json")
    logged = [entry for entry in json.loads(path.read_text())["log_history"] if "loss" in entry]
    assert logged
    assert not any("grad_norm" in entry for entry in logged)


def test_the_saved_model_evaluates_as_the_run_did(two, folder):
    kg = load_kg(folder / "graph")
    model = KGEModel.from_pretrained(folder / "experiment")
    found = evaluate_link_prediction(model, kg, "test")
    assert found == pytest.approx(two[0]["strategies"]["aswa"]["test"], rel=1e-6)
    names = []
    for name in each_strategy(model, folder / "experiment", ["ema", "best"]):
        names.append(name)
        found = evaluate_link_prediction(model, kg, "test")
        assert found == pytest.approx(two[0]["strategies"][name]["test"], rel=1e-6)
    assert names == ["ema", "best"]


def test_a_killed_run_is_resumed_by_as_many_and_by_more_processes(processes, folder, two):
    # Two steps an epoch, and a checkpoint at the end of each.
    for name in ("killed run", "other run"):
        killed = processes.run("sharded_jobs.experiment", 2, folder, name=name, kill=7, fails=True)
        assert killed[1] == ["signal", 9]
    again = processes.run("sharded_jobs.experiment", 2, folder, name="killed run", resume=True)
    assert [one["weights"] for one in again] == [one["weights"] for one in two]
    assert [one["strategies"] for one in again] == [one["strategies"] for one in two]
    for one in processes.run("sharded_jobs.experiment", 3, folder, name="other run", resume=True):
        assert one["world"] == 3
        assert_near(one["strategies"], two[0]["strategies"], 1e-6)


def test_a_run_with_balanced_sampling_is_killed_and_resumed(processes, folder):
    settings = {"scheme": "balanced_sampling", "optimizer": "adagrad-rowwise", "negatives": 6, "query_dropout": 0.0}
    settings |= {"epochs": 3, "batch_size": 40}
    straight = processes.run("sharded_jobs.experiment", 2, folder, name="balanced", **settings)
    assert straight[0]["weights"] == straight[1]["weights"]
    killed = processes.run("sharded_jobs.experiment", 2, folder, name="cut", kill=8, fails=True, **settings)
    assert killed[1] == ["signal", 9]
    again = processes.run("sharded_jobs.experiment", 2, folder, name="cut", resume=True, **settings)
    assert [one["weights"] for one in again] == [one["weights"] for one in straight]
    assert [one["strategies"] for one in again] == [one["strategies"] for one in straight]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shard_entities": False}, "scheme balanced_sampling must be used with --shard-entities"),
        ({"optimizer": "adam"}, "optimizer must be adagrad-rowwise or adagrad for balanced_sampling, got 'adam'"),
        ({"model": "tucker"}, "model must not be 'tucker' for balanced_sampling"),
        ({"label_smoothing": 0.1}, "label_smoothing must be 0 for balanced_sampling, got 0.1"),
        ({"loss": "binary"}, "loss must be softmax for balanced_sampling, got 'binary'"),
    ],
)
def test_settings_that_balanced_sampling_does_not_have_are_refused(wrong, message):
    settings = {"dataset": "countries", "scheme": "balanced_sampling", "optimizer": "adagrad-rowwise"}
    with pytest.raises(SettingError, match=message):
        KGERun(**settings | {"shard_entities": True} | wrong)
