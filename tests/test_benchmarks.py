"""Benchmarks in their smallest size: those whose figures the pages show are not run often."""

import json

import warm
from places import ROOT


def test_both_variants_of_dense_aswa_follow_the_same_run(tmp_path):
    command = [ROOT / "benchmarks" / "snapshot_score.py", "countries", "--epochs", 2, "--seeds", 0]
    run = warm.run(*command, "--json", tmp_path / "found.json")
    assert run.returncode == 0, run.stderr[-3000:]
    (found,) = json.loads((tmp_path / "found.json").read_text())["runs"]
    assert (found["epochs"], found["seed"]) == (2, 0)
    # With one step per epoch, Θ̄ is the running model.
    assert found["dense-aswa"] == found["unscored"]


def test_the_scale_of_a_run_that_dies_and_resumes_is_measured(tmp_path):
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


def test_larger_tables_follow_from_the_measured_step_and_the_printed_assumptions(tmp_path):
    # A step of one query and one negative at d = 1 moves 4·(8·3 + 6) = 120 bytes, takes 6 operations and sends 1 byte:
    # with these limits a nanosecond for each of the three. It took six, twice the least.
    one = {"step_s": 6e-9, "bytes_per_step": 1, "copied_gb_per_s": 120, "gflop_per_s": 6, "exchanged_gb_per_s": 1}
    header = {"d": 1, "queries": 1, "negatives": 1, "CPU": "a CPU", "load before": 0.5}
    measured = {"header": header, "sizes": {"10": one, "9": dict.fromkeys(one, 1)}}
    (tmp_path / "scale.json").write_text(json.dumps(measured))
    run = warm.run(ROOT / "benchmarks" / "scale.py", "--table", tmp_path / "scale.json")
    assert run.returncode == 0, run.stderr[-3000:]
    about, _, *lines = run.stdout.splitlines()
    assert about.startswith("Measured with 10 entities at d = 1 (a CPU, load 0.5)")
    assert "That is 50% of what these limits allow. Assumed: a GPU reaches the same share of 2,000 GB/s of" in about
    assert about.endswith("Time per epoch is derived, not measured.")
    assert len(lines) == 2 + 3 * 7
    # 5 million rows of 512 bytes; 1,068 steps of 2·(3.50 ms for 7.00 GB of memory + 3.44 ms for 206 GFLOP).
    assert "| 5 million | 1 | 2.6 GB | 5.1 GB | 7.7 GB | 0.0 MB | 0.0 MB | 15 s |" in lines
    # 213,623 steps of 2·(0.063 ms for 126 MB + 0.054 ms for 3.22 GFLOP + 0.210 ms for 2·(1,024 + 4,096)·512 bytes).
    assert lines[-1] == "| 1,000 million | 64 | 8.0 GB | 16.1 GB | 24.1 GB | 5.2 MB | 1.1 MB | 2.3 min |"
