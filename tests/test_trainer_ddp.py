"""Two processes under DistributedDataParallel decide alike and hold the same ensemble."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from training import assert_same_tensors

SCRIPT = Path(__file__).with_name("ddp_run.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(kind: str, folder: Path, *flags: str) -> list[tuple[dict, dict]]:
    """Runs the job on two gloo processes; gives each rank's tensors and history."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    run = subprocess.Popen(
        [*command, str(SCRIPT), kind, str(folder), *flags],
        env=os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        errors = run.communicate(timeout=120)[1]
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)  # the launcher and both ranks
        raise
    assert run.returncode == 0, errors[-3000:]
    ranks = []
    for rank in (0, 1):
        tensors = load_file(folder / f"rank{rank}.safetensors")
        ranks.append((tensors, json.loads((folder / f"rank{rank}.json").read_text())))
    return ranks


@pytest.mark.parametrize("kind", ["text", "conv"])
def test_two_processes_decide_alike_and_hold_the_same_ensemble(kind, tmp_path):
    (tensors, about), (other_tensors, other_about) = launch(kind, tmp_path)
    assert about["world_size"] == 2
    # 96 examples in batches of 8 on two processes: the data is split, not repeated.
    assert about["steps"] == 6 * 6
    assert len(about["histories"]["aswa"]) == 6
    assert about == other_about
    assert_same_tensors(tensors, other_tensors)
    assert any(name.startswith("aswa/") for name in tensors)


def test_ranks_whose_scores_and_statistics_differ_agree_on_those_of_rank_0(tmp_path):
    (tensors, about), (other_tensors, other_about) = launch("conv", tmp_path, "--disagree")
    assert about == other_about
    assert_same_tensors(tensors, other_tensors)
    assert any(name.startswith("ema/") and name.endswith("running_mean") for name in tensors)


def test_two_processes_resume_bit_identically(tmp_path):
    (straight, about), _ = launch("conv", tmp_path / "straight")
    launch("conv", tmp_path / "resumed", "--stop")
    (resumed, resumed_about), (other, _) = launch("conv", tmp_path / "resumed", "--resume")
    assert resumed_about == about
    assert_same_tensors(resumed, straight)
    assert_same_tensors(resumed, other)
