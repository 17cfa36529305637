"""DeepSpeed ZeRO, stages 1 and 2, on two processes: the decisions of DDP, float32 master weights, resuming."""

from types import SimpleNamespace

import pytest
import torch
from ddp_run import launch
from training import assert_same_tensors

from aswa_hf.trainer.options import _check_deepspeed_supported

slow = pytest.mark.slow  # DeepSpeed compiles an operator at its first start


@pytest.fixture
def on_cpu(monkeypatch):
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


@slow
@pytest.mark.parametrize("stage", [1, 2])
def test_decisions_are_those_of_ddp_and_weights_agree(stage, on_cpu, tmp_path):
    flags = [f"--zero={stage}", "--sgd"]
    (plain, about), _ = launch("text", tmp_path / "ddp", "--sgd")
    (tensors, zero_about), (others, other_about) = launch("text", tmp_path / "zero", *flags, bare=True)
    assert zero_about["world_size"] == 2
    assert zero_about == other_about
    assert_same_tensors(tensors, others)
    for ours, theirs in zip(zero_about["histories"]["aswa"], about["histories"]["aswa"], strict=True):
        assert (ours["step"], ours["decision"]) == (theirs["step"], theirs["decision"])
        # What is evaluated is the look-ahead, not weights that were gathered before.
        if ours["decision"] != "init":
            assert ours["lookahead_score"] == pytest.approx(theirs["lookahead_score"], rel=1e-5)
    for name, tensor in plain.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=1e-6)
    # The ensemble is also what DeepSpeed's own checkpoints would hold.
    for name in [key for key in tensors if key.startswith("masters/")]:
        assert torch.equal(tensors[name], tensors[name.replace("masters/", "model/")])


@slow
def test_averages_are_of_the_float32_master_weights(on_cpu, tmp_path):
    (tensors, _), (others, _) = launch("text", tmp_path, "--zero=2", "--bf16", bare=True)
    assert_same_tensors(tensors, others)
    averaged = {name: t for name, t in tensors.items() if name.startswith("last/")}
    assert all(tensor.dtype is torch.float32 for tensor in averaged.values())
    # Rounded weights would have no bits beyond those of bfloat16.
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in averaged.values())
    for name in [key for key in tensors if key.startswith("masters/")]:
        ensemble = tensors[name.replace("masters/", "aswa/")]
        assert torch.equal(tensors[name], ensemble)
        assert torch.equal(tensors[name.replace("masters/", "model/")], ensemble.bfloat16())


@slow
@pytest.mark.parametrize("flags", [["--zero=1"], ["--zero=2", "--bf16"]], ids=["stage 1", "stage 2 in bf16"])
def test_resumed_a_run_is_bit_identical(flags, on_cpu, tmp_path):
    (straight, about), _ = launch("text", tmp_path / "straight", *flags, bare=True)
    launch("text", tmp_path / "resumed", "--stop", *flags, bare=True)
    (resumed, resumed_about), (other, _) = launch("text", tmp_path / "resumed", "--resume", *flags, bare=True)
    assert resumed_about == about
    assert_same_tensors(resumed, straight)
    assert_same_tensors(resumed, other)


@pytest.mark.parametrize(
    ("stage", "settings", "match"),
    [
        (3, {"stage": 3}, "does not support DeepSpeed ZeRO stage 3.*Use stage 1 or 2"),
        (3, {"stage": 3, "offload_param": {"device": "cpu"}}, "DeepSpeed with offload_param"),
        (2, {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "DeepSpeed with offload_optimizer"),
        (2, {"stage": 2, "offload_optimizer": {"device": "none"}}, None),
        (1, {"stage": 1}, None),
    ],
)
def test_split_and_offloaded_weights_are_refused(stage, settings, match):
    plugin = SimpleNamespace(zero_stage=stage, deepspeed_config={"zero_optimization": settings})
    if match is None:
        _check_deepspeed_supported(plugin)
        return
    with pytest.raises(ValueError, match=match):
        _check_deepspeed_supported(plugin)
