"""The loop with DeepSpeed ZeRO through accelerate: the decisions of DDP, resuming, what is refused."""

import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from accelerate import DistributedType
from loop_jobs import results, run_jobs
from training import assert_same_tensors
from universal import convert

from aswa_hf.loop.checks import check_accelerator_supported, check_clipping

STAGES = (1, 2, 3)
# With scores of a script: measured ones differ in their last digits, and so might decisions.
PLAIN = {"kind": "single", "accumulate": 1, "processes": 2, "disagree": True}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of all runs."""
    pytest.importorskip("deepspeed")
    root = tmp_path_factory.mktemp("runs")
    jobs = [PLAIN | {"folder": root / "ddp"}]
    stopped = {"save_steps": 1, "save_total_limit": None, "send": signal.SIGTERM, "after": 9, "to": 1}
    for stage in STAGES:
        zero = PLAIN | {"zero": stage}
        jobs += [
            zero | {"folder": root / f"{stage}"},
            zero | stopped | {"folder": root / f"{stage}-stopped"},
            zero | {"folder": root / f"{stage}-stopped", "processes": 3, "fails": True},
            zero | {"folder": root / f"{stage}-stopped", "save_total_limit": None},
        ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        run_jobs(*jobs)
    return root


def ended(folder, processes=2):
    """The weights and history of a run, which all its processes agree on."""
    (tensors, about), *others = results(folder, processes)
    # Each has the state of other parts of the weights.
    assert all(other | {"optimizer": about["optimizer"]} == about for _, other in others)
    assert about["processes"] == processes
    return tensors, about


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_run_decides_and_ends_as_with_ddp(stage, runs):
    whole, about = ended(runs / "ddp")
    tensors, zero_about = ended(runs / f"{stage}")
    assert zero_about["sharded"] == (stage == 3)
    assert zero_about["records"] == about["records"]
    assert {record["decision"] for record in about["records"]["aswa"]} == {"init", "soft", "hard", "reject"}
    for row, expected in zip(zero_about["history"], about["history"], strict=True):
        # What is evaluated is the look-ahead, not weights that were gathered before.
        assert row == pytest.approx(expected, rel=1e-4)
    for name, tensor in whole.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_stopped_run_resumes_bit_for_bit_on_as_many_processes(stage, runs):
    refused = (runs / f"{stage}-stopped" / "rank0.error").read_text()
    assert "was saved by DeepSpeed on 2 processes, and this run has 3" in refused
    tensors, about = ended(runs / f"{stage}-stopped")
    expected, expected_about = ended(runs / f"{stage}")
    assert about == expected_about
    assert_same_tensors(tensors, expected)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_another_number_of_processes_resumes_from_converted_files(stage, tmp_path, monkeypatch):
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    short = PLAIN | {"zero": stage, "epochs": 2, "save_total_limit": 1}
    run_jobs(short | {"folder": tmp_path / "two"})
    stopped, about = ended(tmp_path / "two")
    (checkpoint,) = (tmp_path / "two").glob("checkpoint-*")
    convert(checkpoint / "pytorch_model")
    shutil.copytree(tmp_path / "two", tmp_path / "one")
    # Where it was stopped, all is as it was; from there, three processes continue.
    at_its_end = short | {"folder": tmp_path / "one", "processes": 1, "universal": True}
    run_jobs(at_its_end, at_its_end | {"folder": tmp_path / "two", "processes": 3, "epochs": 5})
    tensors, one_about = ended(tmp_path / "one", processes=1)
    assert one_about["records"] == about["records"]
    assert_same_tensors(tensors, stopped)
    _, three_about = ended(tmp_path / "two", processes=3)
    assert [record["epoch"] for record in three_about["records"]["aswa"]] == [1, 2, 3, 4, 5]
    assert three_about["records"]["aswa"][:2] == about["records"]["aswa"]


def test_offloaded_weights_are_refused():
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    accelerator = SimpleNamespace(
        distributed_type=DistributedType.DEEPSPEED,
        state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config=config)),
    )
    with pytest.raises(ValueError, match="does not support DeepSpeed with offload_param"):
        check_accelerator_supported(accelerator, None, None)


def test_a_norm_that_deepspeed_does_not_clip_to_is_refused(monkeypatch):
    monkeypatch.setattr("aswa_hf.loop.checks.module_of", lambda engine: engine)
    engine = SimpleNamespace(gradient_clipping=lambda: 1.0)
    check_clipping(engine, None)
    check_clipping(engine, 1.0)
    with pytest.raises(ValueError, match=r"DeepSpeed clips gradients to a norm of 1\.0, not to max_grad_norm=0\.5"):
        check_clipping(engine, 0.5)
