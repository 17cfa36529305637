"""Runs with sharded entities decide as one process, and resume from the files of their ranks."""

import pytest
import sharded_jobs
import torch
from accelerate import Accelerator
from sharded_jobs import assert_near
from torch.utils.data import DataLoader

from aswa_hf._utils.training_state import load_optimizer, save_training
from aswa_hf.kge import KGEConfig, KGEModel, load_kg
from aswa_hf.kge.optimizers import RowwiseAdagrad
from aswa_hf.kge.sharded import build_sharded, load_sharded
from aswa_hf.kge.training import training_examples
from aswa_hf.loop import fit
from aswa_hf.run_folder import checkpoints


@pytest.fixture(scope="module")
def plain(folder):
    return sharded_jobs.follow(folder, "plain")


@pytest.fixture(scope="module")
def straight(processes, folder):
    return processes.run("sharded_jobs.follow", 2, folder, name="straight")


def test_strategies_decide_as_on_one_process_and_average_their_own_rows(straight, plain):
    numbers = 2 * 3 * 8  # of relations and their inverses
    for rows, found in zip((7, 6), straight, strict=True):
        assert found["local"] == dict.fromkeys(found["local"], rows * 8 + numbers)
        for name, records in plain["records"].items():
            assert [one["decision"] for one in found["records"][name]] == [one["decision"] for one in records]
        assert_near(found["weights"], plain["weights"])
        assert_near(found["test"], plain["test"])
    assert len({one["decision"] for one in plain["records"]["aswa"]}) > 1


def test_a_killed_rank_is_resumed_bit_for_bit(processes, folder, straight):
    killed = processes.run("sharded_jobs.follow", 2, folder, name="killed", kill=[1, 9], save_steps=2, fails=True)
    assert killed[1] == ["signal", 9]
    assert checkpoints(folder / "killed")
    found = processes.run("sharded_jobs.follow", 2, folder, name="killed")
    for one, expected in zip(found, straight, strict=True):
        assert one["weights"] == expected["weights"]
        assert one["records"] == expected["records"]


def test_a_run_resumes_on_another_number_of_processes(processes, folder, straight):
    processes.run("sharded_jobs.follow", 2, folder, name="moved", epochs=2)
    found = processes.run("sharded_jobs.follow", 3, folder, name="moved")
    for one in found:
        assert_near(one["weights"], straight[0]["weights"])
        assert_near(one["test"], straight[0]["test"])


def test_a_full_disk_is_an_error_on_every_rank_and_leaves_the_last_checkpoint(processes, folder):
    processes.run("sharded_jobs.follow", 2, folder, name="full", epochs=1)
    before = checkpoints(folder / "full")
    failed = processes.run("sharded_jobs.follow", 2, folder, name="full", full=1, fails=True)
    assert [kind for kind, _ in failed] == ["error", "error"]
    assert all("No space left on device" in message for _, message in failed)
    assert checkpoints(folder / "full") == before
    processes.run("sharded_jobs.follow", 2, folder, name="full", epochs=2)


def test_a_saved_model_is_an_ordinary_one(processes, folder):
    found = processes.run("sharded_jobs.save_and_load", 3, folder, name="saved")
    model = KGEModel.from_pretrained(folder / "saved", dtype=torch.float64)
    assert type(model).__name__ == "TuckER"
    assert sorted(path.name for path in (folder / "saved").glob("*.safetensors")) == ["model.safetensors"]
    for one in found:
        assert one["same"]
        assert one["class"] == "ShardedTuckER"
        for name, weights in one["weights"].items():
            assert model.state_dict()[name].tolist() == weights


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ('{"weight_map": {"entity_embeddings.weight": "../elsewhere.safetensors"}}', "Expected the name of a file in"),
        (
            '{"weight_map": {"relation_embeddings.weight": "a.safetensors"}}',
            "has no tensor 'entity_embeddings",
        ),
        ('{"weight_map": ["a.safetensors"]}', "weight_map"),
    ],
)
def test_an_index_of_weights_that_does_not_fit_is_named(tmp_path, index, message):
    KGEConfig(num_entities=5, num_relations=2, dim=4, scorer="complex").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=message):
        load_sharded(tmp_path)


def test_a_plain_model_in_several_files_is_loaded_in_parts(tmp_path):
    model = KGEModel(KGEConfig(num_entities=40, num_relations=2, dim=8, scorer="complex"))
    model.save_pretrained(tmp_path, max_shard_size="1KB")
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    for name, tensor in load_sharded(tmp_path).state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])


def test_the_state_of_another_optimizer_is_refused(tmp_path):
    model = build_sharded(KGEConfig(num_entities=5, num_relations=2, dim=4, scorer="complex"))
    save_training(tmp_path / "training.safetensors", model, torch.optim.Adam(model.parameters()))
    load_optimizer(tmp_path / "training.safetensors", model, torch.optim.Adam(model.parameters()))
    with pytest.raises(ValueError, match="holds the state of Adam, not of RowwiseAdagrad"):
        load_optimizer(tmp_path / "training.safetensors", model, RowwiseAdagrad(model.parameters()))


def test_a_second_model_is_refused_before_training(folder, tmp_path):
    accelerator = Accelerator(cpu=True)
    kg = load_kg(folder / "graph")
    model = build_sharded(kg.config(scorer="complex", dim=4))
    accelerator.prepare(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="one model and one optimizer, got 2 and 1"):
        fit(
            accelerator, model, torch.optim.Adam(model.parameters()),
            DataLoader(training_examples(kg, inverses=True), 16, collate_fn=list), lambda: 0.0, epochs=1,
            loss=lambda *_: pytest.fail("it trained"), checkpoint_dir=tmp_path / "run",
        )  # fmt: skip
