"""Every example runs with one command; here in its fast mode, and resumed."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(example, *arguments, cwd):
    command = [sys.executable, str(EXAMPLES / example), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_trainer_callback_trains_saves_and_resumes(tmp_path):
    fast = ["--max_train_images", "64", "--disable_tqdm", "true"]
    output = run("trainer_callback.py", *fast, "--num_train_epochs", "2", cwd=tmp_path)
    folder = tmp_path / "runs" / "trainer_callback"
    assert (folder / "model.safetensors").exists()
    assert (folder / "checkpoint-4" / "aswa" / "average.safetensors").exists()
    assert [line.split()[0] for line in output.splitlines() if " test accuracy " in line] == ["aswa", "last"]

    resume = ["--num_train_epochs", "3", "--resume_from_checkpoint", str(folder / "checkpoint-4")]
    run("trainer_callback.py", *fast, *resume, cwd=tmp_path)
    assert (folder / "checkpoint-6" / "aswa" / "average.safetensors").exists()


def test_image_classification_compares_strategies_fge_and_both_runs(tmp_path):
    output = run(
        "image_classification.py", "--train_size", "300", "--epochs", "2", "--model", "test_resnet", cwd=tmp_path
    )
    rows = [line.split(" test accuracy ") for line in output.splitlines() if " test accuracy " in line]
    kinds = ("aswa", "swa", "ema", "best", "last", "fge")
    assert [row[0].strip() for row in rows] == [f"seed {s}, {kind}" for s in (0, 1) for kind in kinds] + ["both runs"]
    assert all(0 <= float(row[1]) <= 1 for row in rows)
    folder = tmp_path / "runs" / "image_classification" / "seed-1"
    assert (folder / "model.safetensors").exists()
    assert len(list((folder / "fge").glob("snapshot-*.safetensors"))) == 2
