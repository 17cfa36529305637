"""The command line as a user meets it: real processes, their output, exit status and files."""

import json
import os
import subprocess
import sys

from aswa_hf.trajectory import load_trajectories


def run(*arguments, cwd):
    environment = os.environ | {"COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "aswa_hf.cli", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)


def test_demo_prints_a_table_and_writes_trajectory_and_picture(tmp_path):
    result = run("demo", "--epochs", "2", "--output-dir", "out", cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    trajectories, about = load_trajectories(tmp_path / "out" / "trajectory.json")
    assert set(trajectories) == {"last", "best", "swa", "ema", "aswa"} == set(about["test"])
    assert (tmp_path / "out" / "trajectory.png").read_bytes().startswith(b"\x89PNG")
    for name, trajectory in trajectories.items():
        assert len(trajectory) == 2
        row = next(line for line in result.stdout.splitlines() if line.startswith(f"│ {name} "))
        assert f"{100 * trajectory[-1].score:.2f}" in row
        assert f"{100 * about['test'][name]:.2f}" in row
    # The scores are those of the strategies' weights: the last epoch's is the running model's.
    assert trajectories["last"][-1].score == trajectories["aswa"][-1].running_score
    content = json.loads((tmp_path / "out" / "trajectory.json").read_text())
    assert all(abs(sum(s["alphas"]) - 1) < 1e-9 for s in content["strategies"].values())


def test_bad_input_is_one_line_and_a_failing_exit_status(tmp_path):
    result = run("demo", "--model", "resnet_of_dreams", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1].startswith("aswa-hf: timm has no model 'resnet_of_dreams'.")
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())

    (tmp_path / "file").write_text("in the way")
    result = run("demo", "--epochs", "1", "--output-dir", "file", cwd=tmp_path)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert (tmp_path / "file").read_text() == "in the way"

    assert run("demo", "--epochs", "0", cwd=tmp_path).returncode == 2


def test_help_shows_an_example(tmp_path):
    assert "aswa-hf demo --epochs 20" in run("demo", "--help", cwd=tmp_path).stdout
    assert "demo" in run(cwd=tmp_path).stdout
