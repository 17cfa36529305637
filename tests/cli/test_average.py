"""`aswa-hf average` as a user meets it: output, exit status and files."""

import json
import shutil
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
import warm
from commands import outcome
from safetensors.torch import load_file, save_file
from transformers import set_seed

from aswa_hf.experiments import ImageRun, KGERun, train_image, train_kge
from aswa_hf.hub import write_repository
from aswa_hf.kge import DistMult, KGETrainer, LinkPredictor, evaluate_link_prediction, load_kg, paper_arguments
from aswa_hf.trajectory import load_trajectories


@pytest.fixture
def run_here(tmp_path, monkeypatch, capsys):
    """The command in this process: exit status, output, errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "path", list(sys.path))

    return partial(outcome, capsys, "average")


@pytest.fixture(scope="module")
def trainer_folder(tmp_path_factory):
    """A Trainer's folder with six checkpoints of a link predictor."""
    folder = tmp_path_factory.mktemp("trained") / "plain"
    kg = load_kg("countries-s1")
    set_seed(0)
    options = {"save_strategy": "epoch", "eval_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    args = paper_arguments(str(folder), num_train_epochs=6, learning_rate=0.1, **options)
    KGETrainer(DistMult(kg.config(dim=16)), args, kg).train()
    return folder


@pytest.fixture(scope="module")
def kge_run(tmp_path_factory):
    """A run of `aswa-hf train kge` on a folder of triples."""
    folder = tmp_path_factory.mktemp("run")
    data = folder / "graph"
    data.mkdir()
    kg = load_kg("countries-s1")
    for split, name in (("train", "train"), ("validation", "valid"), ("test", "test")):
        lines = [
            "\t".join((kg.vocab.entities[h], kg.vocab.relations[r], kg.vocab.entities[t]))
            for h, r, t in kg.triples(split)
        ]
        (data / f"{name}.txt").write_text("\n".join(lines) + "\n")
    for seed in (0, 1):
        run = KGERun(dataset=str(data), model="distmult", dim=16, epochs=4, strategies=("last",), seed=seed)
        train_kge(run, folder / f"seed-{seed}")
    return folder


def test_a_trainers_folder_of_a_link_predictor_with_its_dataset(trainer_folder, run_here, tmp_path):
    status, out, err = run_here(trainer_folder, "--dataset", "countries-s1", "-o", "averaged")
    assert status == 0, err
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[:6]] == [f"checkpoint-{step}" for step in range(1, 7)]
    assert lines[-1] == "Written to averaged"
    kg = load_kg("countries-s1")
    predictor = LinkPredictor.from_pretrained("averaged", kg=kg)
    for split in ("validation", "test"):
        found = evaluate_link_prediction(predictor.model, kg, split)
        assert any(line.startswith(f"{split:10s} mrr {found['mrr']:.4f}   hits@1") for line in lines)
    trajectories, about = load_trajectories("averaged/aswa_trajectory.json")
    assert trajectories["aswa"][-1].score == evaluate_link_prediction(predictor.model, kg, "validation")["mrr"]
    assert about["run"]["strategies"]["aswa"]["test"] == evaluate_link_prediction(predictor.model, kg, "test")
    alphas = json.loads((tmp_path / "averaged" / "aswa_trajectory.json").read_text())["strategies"]["aswa"]["alphas"]
    states = [load_file(trainer_folder / f"checkpoint-{step}" / "model.safetensors") for step in range(1, 7)]
    for name, tensor in load_file("averaged/model.safetensors").items():
        expected = sum(alpha * state[name].double() for alpha, state in zip(alphas, states, strict=True))
        torch.testing.assert_close(tensor, expected.float(), rtol=0, atol=1e-7)
    # It is an ordinary run folder to others.
    assert (write_repository("averaged", "repository", "me/averaged") / "README.md").is_file()


def test_json_is_all_that_is_printed(trainer_folder, run_here):
    status, out, err = run_here(trainer_folder, "--strategy", "swa", "--start", "0.5", "-o", "averaged", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert [row["alpha"] for row in found["checkpoints"]] == [0, 0, 0, 1 / 3, 1 / 3, 1 / 3]
    assert (found["strategy"], found["folder"], found["evaluations"]) == ("swa", "averaged", 0)


def test_the_evaluation_of_our_link_predictors_is_found_by_itself(kge_run, run_here):
    runs = [kge_run / "seed-0", kge_run / "seed-1"]
    # Data that have been moved, and settings of an older version, which knew a folder by its name alone.
    settings = [(run / "settings.json").read_text() for run in runs]
    for run in runs:
        (run / "aswa" / "commit.json").unlink()  # without which files may be changed
    for source in ({"source": str(kge_run / "moved")}, {}):
        for run, text in zip(runs, settings, strict=True):
            content = json.loads(text)
            del content["dataset"]["source"]
            (run / "settings.json").write_text(json.dumps(content | {"dataset": content["dataset"] | source}))
        status, _, err = run_here(*runs, "-o", "averaged")
        assert status == 1
        assert err.startswith("aswa-hf: The graph of the run could not be loaded; give it with --dataset")
    for run, text in zip(runs, settings, strict=True):
        (run / "settings.json").write_text(text)
    status, out, err = run_here(*runs, "-o", "averaged", "--json", "--strategy", "best")
    assert status == 0, err
    found = json.loads(out)
    for run, row in zip(runs, found["checkpoints"], strict=True):
        last = json.loads((run / "results.json").read_text())["strategies"]["last"]
        assert row["running_score"] == last["validation"]["mrr"]
        if row["alpha"] == 1:
            assert found["results"] == {split: last[split] for split in ("validation", "test")}

    # One checkpoint is kept of a run; another graph is not the run's.
    status, _, err = run_here(runs[0], "-o", "other")
    assert (status, err.count("\n")) == (1, 0)
    assert "only one checkpoint" in err
    status, _, err = run_here(*runs, "--dataset", "countries-s3", "-o", "other")
    assert status == 1
    assert "examples, but 'countries-s3' has" in err


def test_a_run_that_keeps_its_checkpoints_is_averaged_by_itself(run_here, tmp_path):
    run = tmp_path / "run"
    train_kge(KGERun(dataset="countries", model="distmult", dim=4, epochs=4, strategies=("last",), keep=3), run)
    status, out, err = run_here(run, "-o", "averaged", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert [row["name"] for row in found["checkpoints"]] == [f"checkpoint-{step}" for step in (2, 3, 4)]
    assert found["results"].keys() == {"validation", "test"}


def test_image_runs_are_judged_on_their_own_split_with_recalibrated_statistics(run_here, tmp_path):
    run = ImageRun(
        dataset="digits",
        model="test_byobnet",
        batch_size=100,
        image_size=32,
        val_ratio=0.3,
        train_size=300,
        bn_batches=2,
        precision="fp32",
        strategies=("last",),
    )
    for epochs in (1, 2):
        train_image(replace(run, epochs=epochs), tmp_path / str(epochs))
    status, out, err = run_here("1", "2", "-o", "averaged", "--strategy", "uniform", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert found["score"] == found["results"]["validation"]["accuracy"]
    averaged, states = load_file("averaged/model.safetensors"), [load_file(f"{n}/model.safetensors") for n in (1, 2)]
    statistics = [name for name in averaged if name.endswith("running_mean")]
    assert statistics
    assert all(not torch.allclose(averaged[n], (states[0][n] + states[1][n]) / 2) for n in statistics)

    status, out, err = run_here("1", "2", "-o", "best", "--strategy", "best", "--json")
    assert status == 0, err
    for epochs, row in zip((1, 2), json.loads(out)["checkpoints"], strict=True):
        last = json.loads((tmp_path / str(epochs) / "results.json").read_text())["strategies"]["last"]
        # Kernels for another memory layout may turn an image of the 390 that is between two classes.
        assert row["running_score"] == pytest.approx(last["validation"]["accuracy"], abs=1 / 390 + 1e-6)

    # What another split held out has been seen in training.
    settings = json.loads((tmp_path / "2" / "settings.json").read_text())
    (tmp_path / "2" / "settings.json").write_text(json.dumps(settings | {"seed": 1}))
    status, _, err = run_here("1", "2", "-o", "other")
    assert status == 1
    assert "was trained with seed 1" in err


def test_a_function_of_ones_own_judges_any_model(run_here, tmp_path):
    for number in (1.0, 2.0, 6.0):
        save_file({"w": torch.tensor([number])}, tmp_path / f"{number}.safetensors")
    (tmp_path / "own_loss.py").write_text("def distance(state):\n    return abs(state['w'].item() - 3)\n")
    files = ["1.0.safetensors", "2.0.safetensors", "6.0.safetensors"]
    status, out, err = run_here(*files, "--evaluate", "own_loss:distance", "--lower-is-better", "-o", "averaged")
    assert status == 0, err
    assert [line.split()[2:4] for line in out.splitlines()[:3]] == [
        ["0.000", "init"],
        ["1.000", "hard"],
        ["0.000", "reject"],
    ]
    assert "aswa: 1 of 3 checkpoints are in the result. distance 1.0000, after 5 evaluations." in out
    assert load_file("averaged/model.safetensors")["w"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "-o", "out"], "aswa-hf: There is no folder or file nowhere."),
        (["{run}", "-o", "out"], "aswa-hf: The strategy 'aswa' needs validation scores"),
        (["{run}", "-o", "out", "--evaluate", "function"], "aswa-hf: --evaluate takes module:function"),
        (["{run}", "-o", "out", "--evaluate", "no_such:f"], "aswa-hf: --evaluate: no_such cannot be imported (Module"),
        (["{run}", "-o", "out", "--evaluate", "json:f"], "aswa-hf: --evaluate: the module json has no function 'f'"),
        (["{run}", "-o", "out", "--evaluate", "json:dumps"], "aswa-hf: evaluate failed on checkpoint-1: TypeError: "),
        (["{run}", "-o", "out", "--strategy", "mean"], "aswa-hf: --strategy must be one of"),
        (["{run}", "-o", "out", "--strategy", "swa", "--start", "x"], "aswa-hf: --start takes a number"),
        (["{run}", "-o", "out", "--strategy", "lawa", "--start", "3"], "aswa-hf: --start=3 has no effect"),
        (
            ["{run}", "-o", "out", "--strategy", "best", "--soft-only"],
            "aswa-hf: --soft-only has no effect on the strategy best",
        ),
        (["{run}", "-o", ".", "--strategy", "last"], "aswa-hf: . already exists"),
        (["{run}", "-o", "out", "--dataset", "countries-s9"], "aswa-hf: The graph of the run could not be loaded"),
    ],
)
def test_bad_input_is_one_line(arguments, message, trainer_folder, run_here, tmp_path):
    (tmp_path / "here.txt").write_text("")
    status, out, err = run_here(*(argument.format(run=trainer_folder) for argument in arguments))
    assert (status, out) == (1, "")
    assert err.splitlines()[-1].startswith(message)
    assert [path.name for path in tmp_path.iterdir()] == ["here.txt"]


def test_an_older_checkpoint_that_a_killed_run_was_deleting_is_removed_by_the_resumed_one(tmp_path):
    run = KGERun(dataset="countries", model="distmult", dim=4, epochs=2, strategies=("aswa",))
    train_kge(run, tmp_path / "run")
    (last,) = (tmp_path / "run").glob("checkpoint-*")
    (tmp_path / "run" / "results.json").unlink()
    (tmp_path / "run" / "aswa" / "commit.json").unlink()
    (tmp_path / "run" / "checkpoint-1").mkdir()
    shutil.copy(last / "trainer_state.json", tmp_path / "run" / "checkpoint-1")
    train_kge(run, tmp_path / "run", resume=True)
    assert list((tmp_path / "run").glob("checkpoint-*")) == [last]


def test_weights_without_the_config_that_others_have_are_refused(kge_run, run_here, tmp_path):
    run = kge_run / "seed-0"
    (tmp_path / "plain").mkdir()
    shutil.copy(run / "model.safetensors", tmp_path / "plain")
    for arguments in ([run, "plain"], ["plain", run], [run, "plain", "--strategy", "uniform"]):
        status, out, err = run_here(*arguments, "-o", "out")
        assert (status, out) == (1, "")
        (line,) = err.splitlines()
        assert line.startswith(f"aswa-hf: plain has no config.json, but {run} has one. ")
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_a_process_of_its_own_names_the_truncated_file(trainer_folder, tmp_path):
    shutil.copytree(trainer_folder, tmp_path / "run")
    file = tmp_path / "run" / "checkpoint-3" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    run = warm.run("-m", "aswa_hf.cli", "average", "run", "--strategy", "uniform", "-o", "out", cwd=tmp_path)
    assert run.returncode == 1
    (line,) = run.stderr.strip().splitlines()
    assert line.startswith("aswa-hf: run/checkpoint-3/model.safetensors is truncated: ")
    assert "but the tensor 'relation_embeddings.weight' ends at byte" in line
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
