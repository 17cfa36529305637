"""Recalibration of BatchNorm: right statistics, the same for every batch format, and no trace left behind."""

from __future__ import annotations

import copy
import inspect
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, TensorDataset

from aswa_hf import ASWA, EMA, SWA, Decision
from aswa_hf._utils.defaults import BN_BATCHES
from aswa_hf.batchnorm import Recalibration, default_train_batches
from aswa_hf.comparison import build_strategies


class Net(nn.Module):
    """BatchNorm on the input, where its statistics can be computed by hand, and one deeper in."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.first = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(dropout)
        self.hidden = nn.Linear(3, 4)
        self.second = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 1)

    def forward(self, x, labels=None):
        return self.out(torch.relu(self.second(self.hidden(self.drop(self.first(x))))))


def make_batches(count: int = 4, shape: tuple[int, ...] = (6, 3)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) * 2 + 5 for _ in range(count)]


def by_hand(batches: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean over batches of the batch mean and of the unbiased batch variance, per channel, in float64."""
    per_channel = [b.double().transpose(0, 1).flatten(1) for b in batches]
    return (
        torch.stack([c.mean(1) for c in per_channel]).mean(0),
        torch.stack([c.var(1, unbiased=True) for c in per_channel]).mean(0),
    )


def assert_statistics(layer: nn.Module, batches: list[torch.Tensor]) -> None:
    mean, variance = by_hand(batches)
    torch.testing.assert_close(layer.running_mean.double(), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer.running_var.double(), variance, rtol=1e-5, atol=1e-6)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


# The statistics


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm1d, (6, 3)),
        (nn.BatchNorm1d, (6, 3, 5)),
        (nn.BatchNorm2d, (4, 3, 2, 5)),
        (nn.BatchNorm3d, (4, 3, 2, 2, 3)),
        (nn.SyncBatchNorm, (4, 3, 2, 5)),
    ],
)
def test_statistics_are_the_mean_over_batches_of_batch_mean_and_unbiased_variance(layer, shape):
    model, batches = layer(3), make_batches(shape=shape)
    Recalibration(model, batches)()
    assert_statistics(model, batches)


FORMATS = {
    "tensors": lambda b: b,
    "tuples": lambda b: (b, torch.zeros(6)),
    "lists": lambda b: [b, torch.zeros(6)],
    "dicts": lambda b: {"x": b, "labels": torch.zeros(6)},
}


@pytest.mark.parametrize("name", FORMATS)
def test_batches_may_be_tensors_tuples_lists_or_dicts(name):
    model, batches = Net(), make_batches()
    Recalibration(model, [FORMATS[name](b) for b in batches])()
    assert_statistics(model.first, batches)


def test_a_forward_of_ones_own_takes_any_batch():
    model, batches = Net(), make_batches()
    pairs = [{"image": b, "name": "x"} for b in batches]
    Recalibration(model, pairs, forward=lambda batch: model(batch["image"] + 1))()
    assert_statistics(model.first, [b + 1 for b in batches])


def test_a_function_that_returns_batches_is_called_for_every_pass():
    model, batches, calls = Net(), make_batches(), []

    def read():
        calls.append(1)
        return iter(batches)

    recalibrate = Recalibration(model, read)
    recalibrate()
    model.first.running_mean.fill_(9.0)
    recalibrate()
    assert_statistics(model.first, batches)
    assert len(calls) == 2


def test_only_the_first_bn_batches_are_read():
    model, batches, read = Net(), make_batches(5), []

    def counted():
        for batch in batches:
            read.append(batch)
            yield batch

    Recalibration(model, counted, limit=2)()
    assert len(read) == 2
    assert_statistics(model.first, batches[:2])


def test_of_batches_in_a_fixed_order_evenly_spaced_ones_are_taken():
    # The first ones could all be of one class.
    batches = make_batches(7)
    images = torch.cat(batches)
    sequential = DataLoader(TensorDataset(images), batch_size=len(batches[0]))
    for source in (batches, tuple(batches), sequential, lambda: sequential):
        model = Net()
        Recalibration(model, source, limit=3)()
        assert_statistics(model.first, [batches[0], batches[2], batches[4]])
    shuffled = DataLoader(TensorDataset(images), batch_size=len(batches[0]), shuffle=True)
    model, read = Net(), []
    Recalibration(model, shuffled, limit=3, forward=lambda batch: read.append(batch) or model(batch[0]))()
    assert len(read) == 3
    assert_statistics(model.first, [batch for (batch,) in read])


def test_by_default_a_strategy_recalibrates_on_at_most_bn_batches():
    assert inspect.signature(ASWA).parameters["bn_batches"].default == BN_BATCHES
    for limit in (BN_BATCHES, None):
        given = {} if limit == BN_BATCHES else {"bn_batches": limit}
        for kind in (ASWA, SWA, EMA):
            assert kind(Net(), train_batches=make_batches(), **given).recalibrate.limit == limit


def test_without_dropout_it_equals_torchs_update_bn():
    torch.manual_seed(0)
    model = Net()
    reference = copy.deepcopy(model)
    batches = make_batches()
    update_bn(batches, reference)
    Recalibration(model, batches)()
    for ours, theirs in ((model.first, reference.first), (model.second, reference.second)):
        assert torch.equal(ours.running_mean, theirs.running_mean)
        assert torch.equal(ours.running_var, theirs.running_var)


def test_dropout_is_off_and_no_random_number_is_missed():
    torch.manual_seed(0)
    model = Net(dropout=0.9)
    plain = copy.deepcopy(model)
    plain.drop = nn.Identity()
    batches = make_batches()

    def augmented():
        return [b + torch.randn(()) * 0 + random.random() * 0 + np.random.rand() * 0 for b in batches]

    Recalibration(plain, batches)()
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    Recalibration(model, augmented)()
    assert torch.equal(model.second.running_var, plain.second.running_var)
    assert random.getstate() == before[0]
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), before[1], strict=True))
    assert torch.equal(torch.get_rng_state(), before[2])


def test_random_augmentation_is_the_same_in_every_pass():
    model, means = Net(), []
    recalibrate = Recalibration(model, lambda: [b + torch.randn_like(b) for b in make_batches()])
    for seed in (1, 2):
        torch.manual_seed(seed)
        recalibrate()
        means.append(model.first.running_mean.clone())
    assert torch.equal(*means)


@pytest.mark.parametrize("failing", [False, True])
def test_modes_and_momentum_are_restored_even_if_the_pass_fails(failing):
    model = Net()
    model.train()
    model.out.eval()
    model.first.momentum, model.second.momentum = 0.3, None
    model.first.num_batches_tracked.fill_(17)
    modes = [m.training for m in model.modules()]
    recalibrate = Recalibration(model, [torch.zeros(6, 99)] if failing else make_batches())
    if failing:
        with pytest.raises((RuntimeError, ValueError)):
            recalibrate()
    else:
        recalibrate()
        assert model.first.num_batches_tracked.item() == 17
        assert model.second.num_batches_tracked.item() == 0
    assert [m.training for m in model.modules()] == modes
    assert (model.first.momentum, model.second.momentum) == (0.3, None)


class FrozenBatchNorm(nn.BatchNorm1d):
    def train(self, mode: bool = True):
        return super().train(False)


def test_a_layer_that_stays_in_evaluation_mode_keeps_its_statistics():
    model = Net()
    model.first = FrozenBatchNorm(3)
    model.first.running_mean.fill_(5.0)
    before = state(model.first)
    Recalibration(model, make_batches())()
    assert_same(state(model.first), before)
    assert not torch.equal(model.second.running_mean, torch.zeros(4))


def test_a_layer_without_running_statistics_is_left_alone():
    model, batches = Net(), make_batches()
    model.second = nn.BatchNorm1d(4, track_running_stats=False)
    Recalibration(model, batches)()
    assert model.second.running_mean is None
    assert_statistics(model.first, batches)


# Without BatchNorm, and without batches


@pytest.mark.parametrize("layer", [nn.LayerNorm(3), nn.BatchNorm1d(3, track_running_stats=False)])
def test_models_without_batchnorm_statistics_never_ask_for_batches(layer):
    def never():
        raise AssertionError("train_batches was read")

    model = nn.Sequential(layer, nn.Linear(3, 1))
    for strategy in (ASWA(model, train_batches=never), ASWA(model)):
        scores = iter([0.1, 0.1, 0.2])
        strategy.update(scores.__next__)
        assert strategy.update(scores.__next__) is Decision.SOFT
        strategy.apply()


def test_missing_one_shot_and_empty_batches_are_clear_errors():
    with pytest.raises(ValueError, match=r"has BatchNorm layers.*Pass train_batches=your_train_loader"):
        ASWA(Net())
    with pytest.raises(TypeError, match="train_batches is a generator, which can be read only once"):
        ASWA(Net(), train_batches=(b for b in make_batches()))
    with pytest.raises(ValueError, match="bn_batches must be a whole number of at least 1 or None, got 0"):
        ASWA(Net(), train_batches=make_batches(), bn_batches=0)
    with pytest.raises(ValueError, match="train_batches yielded no batch"):
        Recalibration(Net(), [])()
    with pytest.raises(ValueError, match="batchnorm must be one of recalibrate, average, copy, got 'none'"):
        ASWA(Net(), batchnorm="none")


def test_batches_come_with_the_model_only_where_none_are_given():
    model, lent, own = Net(), make_batches(2), make_batches(4)
    with default_train_batches(model, [{"image": b} for b in lent], lambda batch: model(batch["image"])):
        with_lent, with_own = Recalibration(model), Recalibration(model, own, forward=model)
    with_lent()
    assert_statistics(model.first, lent)
    with_own()
    assert_statistics(model.first, own)
    with pytest.raises(ValueError, match="needs training batches"):
        Recalibration(model)


def test_strategies_built_by_functions_have_the_batches_of_the_run_and_nothing_is_left_on_the_model():
    model, batches = Net(), make_batches(2)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    functions = {
        "plain": SWA,
        "whole": lambda model: SWA(model),
        "part": lambda model: SWA(model.first),
        "own": lambda model: SWA(model, train_batches=make_batches(4)),
    }
    options = {"hard_updates": True, "greater_is_better": True}
    strategies = build_strategies(functions, model, {**options, "train_batches": batches, "bn_forward": model})
    for name in ("plain", "whole", "part"):
        model.first.reset_running_stats()
        strategies[name].recalibrate()
        assert_statistics(model.first, batches)
    strategies["own"].recalibrate()
    assert_statistics(model.first, make_batches(4))
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    with pytest.raises(ValueError, match="needs training batches"):
        build_strategies({"swa": lambda model: SWA(model)}, model, options)


# Under the strategies


def train(model: Net, seed: int) -> None:
    """New weights and new running statistics, as an epoch of training leaves them."""
    torch.manual_seed(seed)
    model.train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
        for batch in make_batches(2):
            model(batch * seed)
    model.eval()


def run_two_points(**options):
    """INIT, then SOFT; returns the strategy, both running states, and the state the look-ahead was judged in."""
    torch.manual_seed(0)
    model, judged = Net(), []
    aswa = ASWA(model, **options)
    train(model, 1)
    first = state(model)
    aswa.update(lambda: 0.5)
    train(model, 2)
    second = state(model)
    assert aswa.update(lambda: judged.append(state(model)) or 0.6, running_score=0.1) is Decision.SOFT
    return aswa, first, second, judged[0]


def test_the_lookahead_is_judged_with_statistics_of_its_own_and_keeps_them():
    batches, passes = make_batches(), []
    aswa, first, second, judged = run_two_points(train_batches=lambda: passes.append(1) or batches)
    assert len(passes) == 1  # the running model needs none
    assert_same(state(aswa.model), second)

    reference = Net()
    reference.load_state_dict(
        {
            name: first[name].lerp(second[name], 0.5) if first[name].is_floating_point() else second[name]
            for name in first
        }
    )
    expected = state(reference)
    update_bn(batches, reference)
    for name in ("first.running_mean", "first.running_var", "second.running_mean", "second.running_var"):
        assert torch.equal(judged[name], reference.state_dict()[name]), name
    for name, _ in reference.named_parameters():
        assert torch.equal(judged[name], expected[name]), name

    with aswa.swapped():
        assert_same(state(aswa.model), judged)
    assert_same(state(aswa.model), second)
    aswa.apply()
    assert_same(state(aswa.model), judged)
    assert len(passes) == 1


@pytest.mark.parametrize(("policy", "weight_of_second"), [("average", 0.5), ("copy", 1.0)])
def test_average_and_copy_take_mean_and_running_statistics(policy, weight_of_second):
    aswa, first, second, judged = run_two_points(batchnorm=policy)
    for name in ("first.running_mean", "second.running_var"):
        expected = torch.lerp(first[name], second[name], weight_of_second)
        assert not torch.equal(first[name], second[name])
        assert torch.equal(judged[name], expected), name
    assert judged["first.num_batches_tracked"].item() == 4
    assert_same(state(aswa.model), second)
    with aswa.swapped():
        assert_same(state(aswa.model), judged)


def test_statistics_of_an_average_without_a_score_are_computed_when_it_is_used_and_once():
    model, batches, passes = Net(), make_batches(), []
    swa = SWA(model, train_batches=lambda: passes.append(1) or batches)
    ema = EMA(model, decay=0.5, train_batches=lambda: passes.append(1) or batches)
    for seed in (1, 2):
        train(model, seed)
        swa.update()
        ema.step()
    running = state(model)
    for strategy in (swa, ema):
        for _ in range(2):
            with strategy.swapped():
                assert_statistics(model.first, batches)
            assert_same(state(model), running)
    assert len(passes) == 2

    swa.update()
    resumed = SWA(model, train_batches=lambda: passes.append(1) or batches)
    resumed.load_state_dict(swa.state_dict())
    with resumed.swapped():
        assert_statistics(model.first, batches)
    assert len(passes) == 3


@pytest.mark.parametrize("use", ["update", "swapped", "apply"])
def test_batches_that_fail_leave_the_running_model_and_the_ensemble(use):
    def broken():
        yield make_batches()[0]
        raise OSError("disk gone")

    model = Net()
    swa = SWA(model, train_batches=broken)
    for seed in (1, 2):
        train(model, seed)
        swa.update()
    running, ensemble = state(model), swa.state_dict()
    uses = {"update": lambda: swa.update(lambda: 0.5), "apply": swa.apply, "swapped": swa.swapped().__enter__}
    with pytest.raises(OSError, match="disk gone"):
        uses[use]()
    assert_same(state(model), running)
    assert_same(swa.state_dict()["averaged"], ensemble["averaged"])
    assert_same(swa.state_dict()["buffers"], ensemble["buffers"])
    assert (swa.members, len(swa.trajectory)) == (2, 2)


def test_a_layer_that_no_batch_reaches_keeps_its_statistics():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.BatchNorm1d(2), nn.BatchNorm1d(2)

        def forward(self, x):
            return self.used(x)

    model = Branches()
    model.unused.running_mean.fill_(3.0)
    model.unused.running_var.fill_(7.0)
    Recalibration(model, [torch.tensor([[0.0, 1.0], [2.0, 5.0]])])()
    assert model.unused.running_mean.tolist() == [3.0, 3.0]
    assert model.unused.running_var.tolist() == [7.0, 7.0]
    assert model.used.running_mean.tolist() == [1.0, 3.0]
