"""The smallest size of benchmarks/scale.py: train, decide, save, die, resume and rank."""

import json

import warm
from places import ROOT


def test_the_benchmark_measures_a_run_that_dies_and_resumes(tmp_path):
    sizes = ["--entities", 3000, "--steps", 4, "--per_pair", 64, "--negatives", 16, "--triples", 6000]
    command = [ROOT / "benchmarks" / "scale.py", *sizes, "--folder", tmp_path, "--json", tmp_path / "scale.json"]
    run = warm.run(*command)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads((tmp_path / "scale.json").read_text())["sizes"]["3000"]
    # Per step and process: 2 × 80 embeddings of 16 numbers there and back, the gradient of 100 relations, two numbers.
    assert found["bytes_per_step"] == 4 * (2 * 2 * 80 * 16 + 100 * 16 + 2)
    assert found["score"] == found["again"]
    assert 0 < found["test_mrr"] <= 1
    assert found["least_gb"] == (2 * 1500 * 16 + 1500) * 4 / 1e9
    assert "| triples per second, all processes |" in run.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["scale.json"]
