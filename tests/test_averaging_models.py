"""WeightAverage on models as they come: tied, frozen, with adapters, compiled, changed on the way, large."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from aswa_hf import ASWA, WeightAverage
from aswa_hf import averaging as averaging_module


def put(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


class TiedLanguageModel(nn.Module):
    """Input and output embeddings on the same memory: one Parameter, two on one storage, or a transposed view."""

    def __init__(self, tie: str):
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        if tie == "same parameter":
            self.head = self.embed.weight
        elif tie == "same storage":
            self.head = nn.Parameter(self.embed.weight.data)
        else:
            self.head = nn.Parameter(self.embed.weight.data.t())


@pytest.mark.parametrize("tie", ["same parameter", "same storage", "transposed view"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_weights_are_averaged_once_and_stay_tied(tie, dtype):
    model = TiedLanguageModel(tie)
    if dtype != torch.float32:
        model.embed.weight.data = model.embed.weight.data.to(dtype)
        model.head.data = model.embed.weight.data.t() if tie == "transposed view" else model.embed.weight.data
    average = WeightAverage(model)
    put(model, 0.0)
    average.assign()
    put(model, 8.0)
    with average.lookahead(0.25):
        assert model.embed.weight.eq(2.0).all()  # averaged a second time it would be 0.5
        assert model.head.eq(2.0).all()
    assert model.embed.weight.eq(8.0).all()
    average.blend(0.25)
    average.apply()
    assert model.embed.weight.eq(2.0).all()
    assert model.head.data_ptr() == model.embed.weight.data_ptr()
    if tie != "transposed view":
        assert len(average.averaged) == 1


def test_a_buffer_shared_by_two_modules_is_averaged_once():
    model = nn.ModuleList([nn.BatchNorm1d(2), nn.BatchNorm1d(2)])
    model[1].running_mean = model[0].running_mean
    average = WeightAverage(model, average_buffers=True)
    average.assign()
    model[0].running_mean.fill_(8.0)
    with average.lookahead(0.25):
        assert model[1].running_mean.tolist() == [2.0, 2.0]


def test_frozen_and_integer_parameters_are_neither_stored_nor_touched():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    model.register_parameter("codes", nn.Parameter(torch.arange(3), requires_grad=False))
    average = WeightAverage(model)
    average.assign()
    put(model, 5)
    assert list(average.averaged) == ["1.weight", "1.bias"]
    with average.swapped():
        assert model[0].weight.eq(5).all()
        assert model.codes.tolist() == [5, 5, 5]
        assert not model[1].weight.eq(5).any()


def test_of_a_lora_model_only_the_adapter_is_averaged():
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8)
    torch.manual_seed(0)
    lora = LoraConfig(r=2, target_modules=["query"])
    model = get_peft_model(BertModel(config), lora).eval()
    aswa = ASWA(model)
    tokens = torch.arange(6).reshape(2, 3)
    snapshots = []
    for value in (0.1, 0.5):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(value)
        snapshots.append(snapshot(model))
        aswa.update(iter([value, value + 1]).__next__)

    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(aswa.average.averaged) == trained
    assert len(trained) == 4
    assert all("lora_" in name for name in trained)
    with torch.no_grad(), aswa.swapped():
        averaged = model(tokens).last_hidden_state
        for name, parameter in model.named_parameters():
            if name in trained:
                torch.testing.assert_close(parameter.detach(), (snapshots[0][name] + snapshots[1][name]) / 2)
            else:
                assert torch.equal(parameter, snapshots[0][name])
    with torch.no_grad():
        assert not torch.equal(averaged, model(tokens).last_hidden_state)


def compile_counting(module: nn.Module) -> tuple[nn.Module, list[int]]:
    compilations: list[int] = []

    def backend(graph, inputs):
        compilations.append(1)
        return graph.forward

    return torch.compile(module, backend=backend), compilations


@pytest.mark.parametrize("part", ["model", "submodule"])
def test_a_compiled_module_sees_averaged_weights_without_recompiling(part):
    torch.compiler.reset()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    if part == "model":
        model, compilations = compile_counting(plain)
    else:
        plain[0], compilations = compile_counting(plain[0])
        model = plain
    inputs = torch.randn(5, 3)
    average = WeightAverage(model)
    average.assign()
    assert list(average.averaged) == ["0.weight", "0.bias", "1.weight", "1.bias"]

    def by_hand(weight: float) -> torch.Tensor:
        w = {name: t + weight * (1.0 - t) for name, t in average.averaged.items()}
        return F.linear(F.linear(inputs, w["0.weight"], w["0.bias"]), w["1.weight"], w["1.bias"])

    with torch.no_grad():
        torch.testing.assert_close(model(inputs), by_hand(0.0))
        put(model, 1.0)
        torch.testing.assert_close(model(inputs), by_hand(1.0))
        with average.lookahead(0.25):
            torch.testing.assert_close(model(inputs), by_hand(0.25))
        with average.swapped():
            torch.testing.assert_close(model(inputs), by_hand(0.0))
        torch.testing.assert_close(model(inputs), by_hand(1.0))
    assert len(compilations) == 1
    uncompiled = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    assert list(average.averaged) == list(uncompiled.state_dict())


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: torch.compile(nn.DataParallel(m), backend="eager")])
def test_wrappers_do_not_change_the_names(wrap):
    average = WeightAverage(wrap(nn.Linear(2, 2)))
    average.assign()
    assert list(average.averaged) == ["weight", "bias"]


# A model that changed since averaging began


CHANGES = {
    "added": (
        lambda m: m.add_module("2", nn.Linear(2, 2)),
        r"'2\.weight' \(2, 2\) is in the model but not in the average",
    ),
    "removed": (lambda m: m.__delitem__(1), r"'1\.weight' \(2, 3\) is in the average but not in the model"),
    "reshaped": (
        lambda m: setattr(m[1], "bias", nn.Parameter(torch.zeros(5))),
        r"'1\.bias' is \(2,\) in the average but \(5,\)",
    ),
    "frozen": (lambda m: m[1].weight.requires_grad_(False), r"'1\.weight' \(2, 3\) is in the average but not"),
    "unfrozen": (lambda m: m[0].weight.requires_grad_(True), r"'0\.weight' \(3, 2\) is in the model but not"),
    "buffer added": (
        lambda m: m.register_buffer("extra", torch.ones(4)),
        r"buffers changed.*'extra' \(4,\) is in the model",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changed_is_refused_by_name_and_nothing_is_written(change):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    model[0].weight.requires_grad_(False)
    average = WeightAverage(model)
    average.assign()
    kept = {name: tensor.clone() for name, tensor in average.averaged.items()}
    alter, message = CHANGES[change]
    put(model, 2.0)
    alter(model)
    before = snapshot(model)
    for use in (average.assign, lambda: average.blend(0.5), average.lookahead(0.5).__enter__, average.apply):
        with pytest.raises(ValueError, match=message):
            use()
        assert_same(snapshot(model), before)
        assert_same(average.averaged, kept)


# Memory


def allocated(work) -> tuple[int, int]:
    """Bytes that `work` holds at its peak and at its end, as the allocator counts them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        work()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak, live


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_copy_is_kept_and_one_more_while_averaged_weights_are_in_the_model(monkeypatch, dtype):
    monkeypatch.setattr(averaging_module, "_CHUNK", 1000)
    model = nn.Sequential(*[nn.Linear(100, 100) for _ in range(6)]).to(dtype)
    weights = sum(p.numel() for p in model.parameters())
    size = model[0].weight.element_size()
    pieces = 0 if dtype == torch.float32 else 3 * 1000 * 4  # one piece converted, its result, and one rounded back
    average = WeightAverage(model)

    def in_model(context) -> None:
        with context:
            pass

    allocated(lambda: None)  # the profiler's own first use
    assert allocated(average.assign) == (weights * 4, weights * 4)
    assert sum(t.numel() * t.element_size() for t in average.averaged.values()) == weights * 4
    peak, end = allocated(lambda: average.blend(0.5))
    assert peak <= pieces
    assert end == 0
    peak, end = allocated(lambda: in_model(average.lookahead(0.5)))
    assert peak <= weights * size + pieces
    assert end == 0
    assert allocated(lambda: in_model(average.swapped())) == (weights * size, 0)
    assert allocated(average.assign) == (0, 0)
