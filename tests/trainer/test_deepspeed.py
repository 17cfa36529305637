"""DeepSpeed ZeRO on several processes: the decisions of DDP, float32 master weights, resuming, what is refused."""

import shutil

import pytest
import torch
from ddp_run import launch, started
from language import causal_model
from training import assert_same_tensors, make_trainer, with_aswa
from universal import convert

from aswa_hf._utils.zero import refuse_unsupported_settings

slow = pytest.mark.slow  # DeepSpeed compiles an operator at its first start


@pytest.fixture
def on_cpu(monkeypatch):
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


@pytest.fixture(scope="module")
def with_ddp(tmp_path_factory):
    """What a run without DeepSpeed ends with."""
    return launch("text", tmp_path_factory.mktemp("ddp"), "--sgd")[0]


def assert_agree(with_zero, with_ddp):
    """The same decisions from the same scores, and the same weights but for the last bits."""
    (tensors, about), (expected, expected_about) = with_zero, with_ddp
    for ours, theirs in zip(about["histories"]["aswa"], expected_about["histories"]["aswa"], strict=True):
        assert (ours["step"], ours["decision"]) == (theirs["step"], theirs["decision"])
        # What is evaluated is the look-ahead, not weights that were gathered before.
        if ours["decision"] != "init":
            assert ours["lookahead_score"] == pytest.approx(theirs["lookahead_score"], rel=1e-5)
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=1e-6)


@slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_decisions_are_those_of_ddp_and_weights_agree(stage, on_cpu, with_ddp, tmp_path):
    (tensors, zero_about), (others, other_about) = launch("text", tmp_path, f"--zero={stage}", "--sgd", bare=True)
    assert zero_about["world_size"] == 2
    parts = zero_about.pop("elements"), other_about.pop("elements")
    assert zero_about == other_about
    assert_same_tensors(tensors, others)
    assert_agree((tensors, zero_about), with_ddp)
    # The ensemble is also what DeepSpeed's own checkpoints would hold.
    masters = [key for key in tensors if key.startswith("masters/")]
    for name in masters:
        assert torch.equal(tensors[name], tensors[name.replace("masters/", "model/")])
    # Of every average each process has all elements, or under stage 3 its part.
    elements = sum(tensors[name].numel() for name in masters)
    for first, second in zip(*parts, strict=True):
        assert (first + second, first - second <= len(masters)) == (elements * (1 if stage == 3 else 2), True)


@slow
@pytest.mark.parametrize("stage", [2, 3])
def test_averages_are_of_the_float32_master_weights(stage, on_cpu, tmp_path):
    (tensors, _), (others, _) = launch("text", tmp_path, f"--zero={stage}", "--bf16", bare=True)
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
@pytest.mark.parametrize("flags", ["--zero=1", "--zero=2 --bf16", "--zero=3 --outside", "--zero=3 --bf16"])
def test_resumed_a_run_is_bit_identical(flags, on_cpu, tmp_path):
    flags = flags.split()
    (straight, about), _ = launch("text", tmp_path / "straight", *flags, bare=True)
    launch("text", tmp_path / "resumed", "--stop", *flags, bare=True)
    (resumed, resumed_about), (other, _) = launch("text", tmp_path / "resumed", "--resume", *flags, bare=True)
    assert resumed_about == about
    assert_same_tensors(resumed, straight)
    assert_same_tensors(resumed, other)


@slow
@pytest.mark.filterwarnings("default")  # of TRL and PEFT
def test_an_adapter_that_trl_trains_is_averaged_alone_saved_and_resumed(on_cpu, tmp_path):
    peft = pytest.importorskip("peft")
    pytest.importorskip("trl")
    with_ddp = launch("sft", tmp_path / "ddp", "--sgd", bare=True)[0]
    for stage in (2, 3):
        flags = ["--sgd", f"--zero={stage}"]
        (tensors, zero_about), (others, _) = launch("sft", tmp_path / f"{stage}", *flags, bare=True)
        assert_same_tensors(tensors, others)
        averaged = {name.removeprefix("aswa/"): t for name, t in tensors.items() if name.startswith("aswa/")}
        assert averaged
        assert all("lora_" in name for name in averaged)
        assert_agree((tensors, zero_about), with_ddp)
        loaded = peft.PeftModel.from_pretrained(causal_model(), str(tmp_path / f"{stage}"))
        parameters = dict(loaded.named_parameters())
        assert all(torch.equal(parameters[name], tensor) for name, tensor in averaged.items())

        launch("sft", tmp_path / f"{stage}-resumed", "--stop", *flags, bare=True)
        (resumed, resumed_about), _ = launch("sft", tmp_path / f"{stage}-resumed", "--resume", *flags, bare=True)
        assert resumed_about == zero_about
        assert_same_tensors(resumed, tensors)


@slow
@pytest.mark.parametrize("stage", [2, 3])
def test_another_number_of_processes_resumes_from_converted_files(stage, on_cpu, tmp_path):
    (stopped, about), _ = launch("text", tmp_path / "two", "--stop", f"--zero={stage}", bare=True)
    refused = started("text", tmp_path / "two", "--resume", f"--zero={stage}", bare=True, ranks=1)
    assert refused.returncode != 0
    assert "was saved by DeepSpeed on 2 processes, and this run has 1" in refused.stderr
    convert(tmp_path / "two" / "checkpoint-18" / "global_step18")
    shutil.copytree(tmp_path / "two", tmp_path / "one")

    # Where it was stopped, all is as it was.
    flags = ["--resume", "--universal", f"--zero={stage}"]
    (tensors, one_about), *none = launch("text", tmp_path / "one", *flags, "--ended", bare=True, ranks=1)
    assert not none
    assert one_about["world_size"] == 1
    assert one_about["histories"] == about["histories"]
    for name, tensor in tensors.items():
        kind, _, key = name.partition("/")
        expected = stopped[f"last/{key}"] if kind in ("model", "masters") else stopped[name]
        assert torch.equal(tensor, expected), name

    # From there it continues. Three processes have four steps an epoch, of 24 examples.
    (first, about), *others = launch("text", tmp_path / "two", *flags, bare=True, ranks=3)
    assert about["world_size"] == 3
    assert [record["step"] for record in about["histories"]["aswa"]][:3] == [6, 12, 18]
    assert about["steps"] > 18
    for other, _ in others:
        assert_same_tensors(first, other)


@slow
def test_a_run_without_deepspeed_does_not_resume_from_its_files(on_cpu, tmp_path):
    launch("text", tmp_path, "--stop", "--zero=2", bare=True)
    trainer = make_trainer("text", tmp_path, examples=96)
    with_aswa(trainer, strategies=("aswa", "dense-aswa", "swa", "ema", "best", "last"))
    with pytest.raises(ValueError, match=r"saved by a run with DeepSpeed and complete weights.*this run is one with"):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "with offload_param"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "with offload_optimizer"),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, "with offload_optimizer"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "zero_hpz_partition_size=8"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}, "mics_shard_size=4"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "zero_quantized_weights=True"),
        ({"tensor_parallel": {"autotp_size": 2}}, "autotp_size=2"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}}, None),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1, "mics_shard_size": -1}}, None),
        ({"zero_optimization": {"stage": 1}}, None),
        ({}, None),
    ],
)
def test_weights_that_are_elsewhere_are_refused(config, match):
    if match is None:
        refuse_unsupported_settings(config)
        return
    with pytest.raises(ValueError, match=match):
        refuse_unsupported_settings(config)
