"""WeightAverage: its arithmetic in every dtype and memory layout, exact restoring, and what it refuses."""

from __future__ import annotations

from contextlib import nullcontext
from fractions import Fraction

import pytest
import torch
from torch import nn

from aswa_hf import WeightAverage
from aswa_hf import averaging as averaging_module
from aswa_hf.averaging import take_snapshots

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Weights(nn.Module):
    """A module that holds the given tensors as parameters, as they are in memory."""

    def __init__(self, **tensors: torch.Tensor):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))


def put(model: nn.Module, values) -> None:
    """Writes into the parameters: one number for all, or tensors by name."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.as_tensor(values[name] if isinstance(values, dict) else values))


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype
        assert torch.equal(ours[name], theirs[name]), name


def gappy(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, columns + 3).to(dtype)[:, :columns]


LAYOUTS = {
    "contiguous": lambda dtype: torch.randn(33, 7).to(dtype),
    "one element": lambda dtype: torch.randn(1).to(dtype),
    "scalar": lambda dtype: torch.randn(()).to(dtype),
    "transposed": lambda dtype: torch.randn(33, 7).to(dtype).t(),
    "gaps between rows": lambda dtype: gappy(33, 7, dtype),
    "gaps between elements": lambda dtype: torch.randn(515).to(dtype)[::2],
    "channels last": lambda dtype: torch.randn(5, 3, 3, 3).to(dtype).to(memory_format=torch.channels_last),
}


# Arithmetic


@pytest.mark.parametrize(
    ("of_model", "asked", "kept"),
    [
        (FP32, FP32, FP32),
        (BF16, FP32, FP32),
        (FP16, FP32, FP32),
        (FP64, FP32, FP64),
        (BF16, FP64, FP64),
        (FP32, FP64, FP64),
    ],
)
def test_the_average_is_never_less_precise_than_asked_for_or_than_the_parameter(of_model, asked, kept):
    model = Weights(w=torch.zeros(3, dtype=of_model))
    average = WeightAverage(model, dtype=asked)
    average.assign()
    assert average.averaged["w"].dtype == kept
    assert model.w.dtype == of_model


def test_a_mean_by_hand_over_mixed_dtypes():
    model = Weights(
        w16=torch.zeros(2, dtype=BF16),
        w32=torch.zeros(3),
        w64=torch.zeros(4, dtype=FP64),
        z64=torch.zeros(2, dtype=torch.complex64),
    )
    average = WeightAverage(model)
    put(model, 1.0)
    average.assign()
    put(model, 4.0)
    average.blend(1 / 2)  # 2.5
    put(model, 8.0)
    average.blend(1 / 4)  # 2.5 + 5.5 / 4 = 3.875
    for tensor in average.averaged.values():
        assert torch.equal(tensor, torch.full_like(tensor, 3.875))
    average.apply()
    assert [p.dtype for p in model.parameters()] == [BF16, FP32, FP64, torch.complex64]
    assert torch.equal(model.w16, torch.full((2,), 3.875, dtype=BF16))


@pytest.mark.parametrize(("of_model", "dtype"), [(torch.complex64, FP64), (torch.complex128, FP32)])
def test_averages_that_could_not_be_saved_are_refused(of_model, dtype):
    model = Weights(w=torch.zeros(2), z=torch.zeros(2, dtype=of_model))
    with pytest.raises(ValueError, match=rf"parameter 'z' \({of_model}\) with dtype={dtype} would be complex128"):
        WeightAverage(model, dtype=dtype)


def test_a_bf16_models_average_follows_the_exact_mean_where_a_bf16_average_stops_changing():
    torch.manual_seed(0)
    model = Weights(w=torch.zeros(16, dtype=BF16))
    average = WeightAverage(model)
    in_bf16, exact = torch.zeros(16, dtype=BF16), [Fraction(0)] * 16
    for n in range(1, 801):
        values = (torch.rand(16) + n / 400).to(BF16)
        put(model, values)
        average.assign() if n == 1 else average.blend(1 / n)
        in_bf16.lerp_(values, 1 / n)
        exact = [mean + (Fraction(value) - mean) / n for mean, value in zip(exact, values.tolist(), strict=True)]
    mean = torch.tensor([float(value) for value in exact], dtype=FP64)
    assert (in_bf16.double() - mean).abs().min() > 0.1
    torch.testing.assert_close(average.averaged["w"].double(), mean, rtol=2e-6, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP64])
@pytest.mark.parametrize("kept_in", [FP32, FP64])
def test_the_lookahead_in_the_model_is_bit_for_bit_the_average_once_accepted(layout, dtype, kept_in):
    torch.manual_seed(0)
    model = Weights(w=LAYOUTS[layout](dtype))
    strides = model.w.stride()
    average = WeightAverage(model, dtype=kept_in, device="cpu")
    average.assign()
    for n in range(1, 5):
        before = average.averaged["w"].clone()
        put(model, torch.randn(model.w.shape).to(dtype))
        running = model.w.detach().clone()
        weight = 1 / (n + 1)
        with average.lookahead(weight):
            seen = model.w.detach().clone()
        assert torch.equal(model.w, running)
        average.blend(weight)
        assert torch.equal(average.averaged["w"].to(dtype), seen)
        slow = before.double() + (running.double() - before.double()) / (n + 1)
        torch.testing.assert_close(average.averaged["w"].double(), slow, rtol=1e-6, atol=1e-6)
    assert model.w.stride() == strides


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("gaps", [False, True])
def test_tensors_above_the_chunk_size_are_averaged_piece_by_piece_without_a_seam(monkeypatch, transposed, gaps):
    monkeypatch.setattr(averaging_module, "_CHUNK", 100)
    torch.manual_seed(0)
    weight = gappy(41, 13, BF16) if gaps else torch.randn(41, 13).to(BF16)
    model = Weights(w=weight.t() if transposed else weight)
    average = WeightAverage(model)
    average.assign()
    first = model.w.detach().float()
    put(model, torch.randn(model.w.shape).to(BF16))
    with average.lookahead(0.25):
        seen = model.w.detach().clone()
    average.blend(0.25)
    assert torch.equal(average.averaged["w"], first.lerp(model.w.detach().float(), 0.25))
    assert torch.equal(average.averaged["w"].to(BF16), seen)


def test_a_bf16_tensor_larger_than_the_real_chunk_is_averaged_whole():
    size = averaging_module._CHUNK * 2 + 5
    model = Weights(w=torch.ones(size, dtype=BF16))
    average = WeightAverage(model)
    average.assign()
    put(model, 3.0)
    with average.lookahead(0.5):
        assert model.w.eq(2.0).all()
    average.blend(0.5)
    assert average.averaged["w"].eq(2.0).all()


# Restoring


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 2)).to(BF16)


@pytest.mark.parametrize("inside", ["swapped", "lookahead"])
@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("average_buffers", [False, True])
def test_leaving_the_context_restores_everything_bit_for_bit(inside, error, average_buffers):
    model = network()
    average = WeightAverage(model, average_buffers=average_buffers)
    average.assign()
    put(model, 0.1)  # rounds in bf16: only a kept copy can bring it back
    model[1].running_mean.fill_(0.3)
    model[1].num_batches_tracked.fill_(7)
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients[name] = parameter.grad = torch.randn_like(parameter)
    kept_gradients = {name: grad.clone() for name, grad in gradients.items()}
    before, memory = snapshot(model), {name: p.data_ptr() for name, p in model.named_parameters()}
    context = average.swapped() if inside == "swapped" else average.lookahead(0.5)
    with pytest.raises(error) if error else nullcontext(), context:
        assert not torch.equal(model[3].weight, before["3.weight"])
        assert all(p.requires_grad for p in model.parameters())
        model[1].running_var.fill_(99.0)  # an evaluation that disturbs the buffers
        model[1].num_batches_tracked.add_(1)
        if error is not None:
            raise error
    assert_same(snapshot(model), before)
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == memory[name]
        assert parameter.grad is gradients[name]
        assert torch.equal(parameter.grad, kept_gradients[name])
        assert parameter.requires_grad


@pytest.mark.parametrize("failing_call", [1, 2, 4])
def test_an_interrupt_while_the_lookahead_is_being_written_restores_what_was_written(monkeypatch, failing_call):
    model = network()
    average = WeightAverage(model)
    average.assign()
    put(model, 0.1)
    before, lerp, calls = snapshot(model), torch.lerp, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == failing_call:
            raise KeyboardInterrupt
        return lerp(*args, **kwargs)

    monkeypatch.setattr(torch, "lerp", interrupted)
    with pytest.raises(KeyboardInterrupt), average.lookahead(0.5):
        pass
    assert len(calls) == failing_call
    assert_same(snapshot(model), before)


@pytest.mark.parametrize("enabled", [True, False])
def test_grad_mode_inside_is_the_callers(enabled):
    model = network()
    average = WeightAverage(model)
    with torch.set_grad_enabled(enabled):
        average.assign()
        with average.lookahead(0.5):
            assert torch.is_grad_enabled() is enabled
        with average.swapped():
            assert torch.is_grad_enabled() is enabled
        average.blend(0.5)
        average.apply()
        assert torch.is_grad_enabled() is enabled
    assert not any(tensor.requires_grad for tensor in average.averaged.values())


# Buffers


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("scale", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def fill(self, value: float) -> None:
        for tensor in (self.weight.data, self.scale, self.count, self.scratch):
            tensor.fill_(value)


@pytest.mark.parametrize(("average_buffers", "scale"), [(False, 3.0), (True, 2.0)])
def test_integer_buffers_are_copied_float_ones_on_request_averaged_and_scratch_ones_left(average_buffers, scale):
    model = Buffers()
    average = WeightAverage(model, average_buffers=average_buffers)
    model.fill(1.0)
    average.assign()
    model.fill(3.0)
    average.blend(0.5, with_buffers=True)
    assert set(average.averaged) == ({"weight", "scale"} if average_buffers else {"weight"})
    model.fill(5.0)
    with average.swapped():
        assert model.weight.tolist() == [2.0, 2.0]
        assert model.scale.tolist() == [scale, scale]
        assert model.count.item() == 3
        assert model.scratch.tolist() == [5.0, 5.0]
    assert model.scale.tolist() == [5.0, 5.0]
    assert model.count.item() == 5


def test_buffers_that_are_not_averaged_follow_only_when_asked():
    model = Buffers()
    average = WeightAverage(model)
    model.fill(1.0)
    average.assign()
    model.fill(3.0)
    average.blend(0.5)
    assert average.copied["scale"].tolist() == [1.0, 1.0]
    average.copy_buffers()
    assert average.copied["scale"].tolist() == [3.0, 3.0]
    assert average.copied["count"].item() == 3


# Refusals


def test_what_cannot_be_averaged_is_refused_at_construction():
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"Expected a torch\.nn\.Module to average, got OrderedDict"):
        WeightAverage(model.state_dict())
    for dtype in (BF16, FP16, torch.int32):
        with pytest.raises(ValueError, match=r"dtype must be torch\.float32 or torch\.float64"):
            WeightAverage(model, dtype=dtype)
    with pytest.raises(ValueError, match=r"'bias'.*meta device"):
        WeightAverage(Weights(weight=torch.zeros(1), bias=torch.zeros(1, device="meta")))
    with pytest.raises(ValueError, match="Linear has no trainable floating-point parameter"):
        WeightAverage(model.requires_grad_(False))


def test_an_empty_average_cannot_be_used():
    model = nn.Linear(2, 2)
    average = WeightAverage(model)
    for use in (average.apply, average.copy_buffers, lambda: average.blend(0.5), average.swapped().__enter__):
        with pytest.raises(RuntimeError, match="average is empty"):
            use()


def test_tensors_are_matched_by_name_when_the_model_lists_them_in_another_order():
    model = Weights(a=torch.zeros(2), b=torch.zeros(2))
    average = WeightAverage(model)
    put(model, {"a": [1.0, 1.0], "b": [10.0, 10.0]})
    average.assign()
    first = model.a
    del model.a
    model.register_parameter("a", first)
    assert [name for name, _ in model.named_parameters()] == ["b", "a"]
    put(model, {"a": [3.0, 3.0], "b": [30.0, 30.0]})
    average.blend(0.5)
    average.apply()
    assert model.a.tolist() == [2.0, 2.0]
    assert model.b.tolist() == [20.0, 20.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_averages_in_one_pass_are_those_of_single_passes_bit_for_bit(monkeypatch, dtype):
    monkeypatch.setattr(averaging_module, "_CACHED", 500)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.Linear(40, 7), nn.Linear(7, 3)).to(dtype)
    model[2].weight.data = model[2].weight.data.T.contiguous().T  # not in the usual order in memory
    weights = (1.0, 0.5, 0.001)
    together, alone = ([WeightAverage(model, average_buffers=n == 2) for n in range(3)] for _ in "ab")
    for average in (*together, *alone):
        average.assign()
    for step in range(3):
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.copy_(torch.randn(tensor.shape) + step)
        take_snapshots(zip(together, weights, strict=True))
        for average, weight in zip(alone, weights, strict=True):
            average.assign() if weight == 1 else average.blend(weight, with_buffers=True)
        for ours, theirs in zip(together, alone, strict=True):
            assert all(torch.equal(tensor, theirs.averaged[name]) for name, tensor in ours.averaged.items())
            assert all(torch.equal(tensor, theirs.copied[name]) for name, tensor in ours.copied.items())
