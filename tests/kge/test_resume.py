"""A link predictor whose training is killed and resumed is the one that training would have given anyway."""

import itertools
import json

import pytest
import torch
import warm
from killed_runs import assert_bit_identical
from places import HELPERS
from safetensors.torch import load_file
from training import assert_same_tensors

from aswa_hf.trajectory import load_trajectories

COMMANDS = HELPERS / "killed_commands.py"


@pytest.mark.parametrize(("scheme", "kills"), [("kvsall", [1, 4]), ("negative_sampling", [3])])
def test_killed_and_resumed_with_dropout_and_random_negatives_the_run_is_bit_identical(scheme, kills, tmp_path):
    assert_bit_identical(scheme, tmp_path, "epoch", kills)


def test_a_command_killed_terminated_and_interrupted_and_resumed_has_the_same_results(tmp_path):
    train = "train kge --dataset countries --dim 16 --lr 0.02 --batch-size 256 --scheme negative_sampling --epochs 40"
    # A checkpoint every fourth epoch; the kill comes soon after one, and long before the next.
    run = warm.run(COMMANDS, tmp_path, "SIGKILL@9", "SIGTERM@14", "SIGINT@22", "--", *train.split())
    assert run.returncode == 0, run.stderr[-3000:]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    results, resumed = (json.loads((folder / "results.json").read_text()) for folder in (straight, killed))
    (last,) = straight.glob("checkpoint-*")
    steps = int(last.name.removeprefix("checkpoint-")) // 40
    # A signal that comes with the log of an epoch ends the run after the next one.
    for name, epoch in (("SIGTERM", 15), ("SIGINT", 23)):
        saved = f"{name}: the run is saved in {killed}/checkpoint-{epoch * steps}"
        assert f"{saved}; the same command with --resume resumes it." in run.stderr
    assert resumed["command"] == results["command"].replace(str(straight), str(killed))
    assert resumed["strategies"] == results["strategies"]
    assert_same_tensors(load_file(killed / "model.safetensors"), load_file(straight / "model.safetensors"))
    for of_straight, of_killed in zip(*(averages(folder) for folder in (straight, killed)), strict=True):
        assert_same_tensors(of_killed, of_straight)
    # And it is not the same weights that they all have kept.
    kept = load_file(next(straight.glob("checkpoint-*/aswa/average.safetensors")))
    tables = [kept[f"{name}/averaged/entity_embeddings.weight"] for name in ("swa", "ema", "last")]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(tables, 2))
    trajectories, again = (load_trajectories(folder / "aswa_trajectory.json")[0] for folder in (straight, killed))
    assert again.keys() == trajectories.keys() == {"aswa", "dense-aswa", "swa", "ema", "best", "last"}
    for name, trajectory in trajectories.items():
        assert again[name].to_json() == trajectory.to_json()
        assert len(trajectory) == 40

    # Every line of the log is there once.
    log, log_again = (logged(folder / "train.log") for folder in (straight, killed))
    assert log_again == log
    assert [line["epoch"] for line in log if "loss" in line] == list(range(1, 41))


def logged(path):
    """The lines of a log without times, and without the summary of the last process."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [line for line in lines if "train_runtime" not in line]
    return [{key: value for key, value in line.items() if not key.endswith("runtime")} for line in lines]


def averages(folder):
    """Everything that is averaged, from the one checkpoint that is kept."""
    (checkpoint,) = folder.glob("checkpoint-*")
    return [load_file(file) for file in sorted(checkpoint.rglob("*.safetensors"))]
