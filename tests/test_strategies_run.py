"""Strategies beside a training run: they do not influence it, survive failing evaluations, and can be resumed."""

from __future__ import annotations

import copy
import math
import random
import re
import signal
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training import assert_same_tensors

from aswa_hf import (
    ASWA,
    BEMA,
    EMA,
    SWA,
    SWAD,
    BestCheckpoint,
    BestEMA,
    Decision,
    DenseASWA,
    LastCheckpoint,
    PowerEMA,
)
from aswa_hf.strategies import STRATEGIES

ALL = sorted(STRATEGIES)


def network(dropout: float = 0.3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(dropout), nn.ReLU(), nn.Linear(6, 2))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(32, 4, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def build(name: str, model: nn.Module, **options):
    batches = DataLoader(data(), batch_size=8, shuffle=True)
    own = {"bema": {"every": 2}}  # its default needs longer runs
    return STRATEGIES[name](model, **{"train_batches": batches, **own.get(name, {}), **options})


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(ours, theirs) -> bool:
    """Equality of nested states, tensors bit for bit."""
    if isinstance(ours, torch.Tensor):
        return isinstance(theirs, torch.Tensor) and ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return isinstance(theirs, dict) and list(ours) == list(theirs) and all(same(ours[k], theirs[k]) for k in ours)
    return ours == theirs


class Training:
    """Three steps of SGD with momentum per epoch, with every kind of randomness a run has."""

    def __init__(self, names: list[str]):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.loader = DataLoader(data(), batch_size=12, shuffle=True)
        self.strategies = {name: build(name, self.model) for name in names}

    def epoch(self) -> None:
        self.model.train()
        for inputs, labels in self.loader:
            noise = random.random() + np.random.rand()
            loss = nn.functional.cross_entropy(self.model(inputs * noise), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            for strategy in self.strategies.values():
                strategy.step()
        for strategy in self.strategies.values():
            strategy.update(self.validate)

    @torch.inference_mode()
    def validate(self) -> float:
        """Draws random numbers of every kind, as a validation with a shuffling loader and dropout left on does."""
        self.model.eval()
        self.model[2].train()
        correct = 0.0
        for inputs, labels in DataLoader(data(), batch_size=10, shuffle=True):
            correct += (self.model(inputs).argmax(1) == labels).sum().item() + 1e-6 * random.random()
        return correct + 1e-6 * np.random.rand()

    def everything(self) -> dict:
        return {
            "weights": snapshot(self.model),
            "momentum": copy.deepcopy(self.optimizer.state_dict()["state"]),
            "gradients": {name: p.grad.clone() for name, p in self.model.named_parameters()},
            "python": random.getstate(),
            "numpy": [str(part.tolist() if isinstance(part, np.ndarray) else part) for part in np.random.get_state()],
            "torch": torch.get_rng_state(),
        }


def test_strategies_that_shadow_a_run_do_not_change_a_bit_of_it():
    alone, shadowed = Training([]), Training(ALL)
    states = []
    for training in (alone, shadowed):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        states.append([])
        for _ in range(4):
            training.epoch()
            states[-1].append(training.everything())
    assert same(dict(enumerate(states[0])), dict(enumerate(states[1])))
    assert all(strategy.members for strategy in shadowed.strategies.values())


def test_strategies_do_not_influence_each_other():
    together = Training(ALL)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    for _ in range(4):
        together.epoch()
    for name in ALL:
        alone = Training([name])
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        for _ in range(4):
            alone.epoch()
        assert same(alone.strategies[name].state_dict(), together.strategies[name].state_dict()), name


# Which weights are evaluated, and when


def evaluations(strategy, points: int = 3, **given) -> list[list[float]]:
    """The weight in the model at each call of evaluate, by decision point; the running weights are 1, 2, 3."""
    calls = []
    for index in range(points):
        strategy.model.weight.data.fill_(index + 1)
        calls.append([])

        def evaluate(seen=calls[-1]) -> float:
            seen.append(round(strategy.model.weight.item(), 4))
            return len(calls) + (len(seen) - 1) / 2  # the look-ahead is better: always a soft update

        strategy.step()
        strategy.update(evaluate, **given)
    return calls


def scalar() -> nn.Module:
    return nn.Linear(1, 1, bias=False)


def test_aswa_evaluates_the_running_weights_then_the_lookahead():
    assert evaluations(ASWA(scalar())) == [[1.0], [2.0, 1.5], [3.0, 2.0]]


def test_aswa_does_not_evaluate_running_weights_whose_score_it_is_given():
    assert evaluations(ASWA(scalar()), running_score=0.5) == [[], [1.5], [2.0]]


def test_aswa_without_hard_updates_evaluates_once():
    assert evaluations(ASWA(scalar(), hard_updates=False)) == [[1.0], [1.5], [2.0]]


def test_the_other_strategies_evaluate_once_at_most():
    assert evaluations(SWA(scalar(), start=1)) == [[], [2.0], [2.5]]
    assert evaluations(SWA(scalar()), running_score=0.5) == [[], [1.5], [2.0]]
    assert evaluations(EMA(scalar(), decay=0.5)) == [[1.0], [1.5], [2.25]]
    assert evaluations(BestCheckpoint(scalar())) == [[1.0], [2.0], [3.0]]
    assert evaluations(BestCheckpoint(scalar()), running_score=0.5) == [[], [], []]
    assert evaluations(LastCheckpoint(scalar())) == [[1.0], [2.0], [3.0]]
    assert evaluations(LastCheckpoint(scalar()), running_score=0.5) == [[], [], []]


# Evaluations that fail


def raises(error: type[BaseException]):
    def fail():
        raise error("validation failed")

    return fail


FAILURES = {
    "error": (raises(RuntimeError), RuntimeError, "validation failed"),
    "interrupt": (raises(KeyboardInterrupt), KeyboardInterrupt, "validation failed"),
    "none": (lambda: None, TypeError, r"evaluate\(\) must return one number, the validation score, got NoneType"),
    "dict": (lambda: {"accuracy": 0.5}, TypeError, "got dict: {'accuracy': 0.5}"),
    "two numbers": (lambda: torch.tensor([0.1, 0.2]), TypeError, "got Tensor"),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize(
    ("name", "points_before", "failing_call"),
    [
        ("aswa", 0, 1),
        ("aswa", 2, 1),
        ("aswa", 2, 2),
        # BEMA has no average yet after the first step.
        *((name, points, 1) for name in ALL if name != "aswa" for points in (0, 2) if (name, points) != ("bema", 0)),
    ],
)
def test_an_evaluation_that_fails_leaves_model_and_state_as_they_were(name, points_before, failing_call, failure):
    fail, error, message = FAILURES[failure]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    strategy = build(name, model)

    def move() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        strategy.step()

    for index in range(points_before):
        move()
        strategy.update(lambda index=index: 0.1 * index)
    move()
    before, state, rng, calls = snapshot(model), strategy.state_dict(), torch.get_rng_state(), []

    def evaluate():
        calls.append(torch.rand(3))
        return fail() if len(calls) == failing_call else 0.9

    with pytest.raises(error, match=message):
        strategy.update(evaluate)
    assert len(calls) == failing_call
    assert same(snapshot(model), before)
    # Only that an EMA has looked after its statistics, of which this model has none, may be remembered.
    assert same(strategy.state_dict() | {"stale": None}, state | {"stale": None})
    assert torch.equal(torch.get_rng_state(), rng)
    strategy.update(lambda: 0.9)
    assert len(strategy.trajectory) == points_before + 1


@pytest.mark.parametrize("score", [torch.tensor(0.5), torch.tensor([0.5]), np.float64(0.5), np.float32(0.5)])
def test_a_score_may_be_any_single_number(score):
    aswa = ASWA(scalar())
    aswa.update(lambda: score)
    assert aswa.score == 0.5
    assert type(aswa.score) is float


@pytest.mark.parametrize("name", ALL)
def test_an_empty_ensemble_cannot_be_put_into_the_model(name):
    strategy = build(name, scalar())
    reason = r"(update\(\) has not been called yet|it averages every \d steps, and there were 0)"
    with pytest.raises(RuntimeError, match=f"The {name} ensemble is empty: {reason}"):
        strategy.apply()
    with pytest.raises(RuntimeError, match=f"The {name} ensemble is empty"), strategy.swapped():
        pass


@pytest.mark.parametrize(
    ("strategy", "score", "running", "reason"),
    [
        (lambda: SWA(scalar(), start=5), math.nan, math.nan, "no snapshot was due"),
        (lambda: ASWA(scalar()), math.nan, math.nan, "no decision point had a finite score"),
        (lambda: BestEMA(scalar()), math.nan, 0.5, "no decision point had a finite score"),
        (lambda: EMA(scalar(), every=10), 0.5, 0.5, "it averages every 10 steps, and there were 2"),
        (lambda: PowerEMA(scalar(), every=10), None, None, "it averages every 10 steps, and there were 2"),
    ],
)
def test_an_empty_ensemble_says_why_it_is_empty(strategy, score, running, reason):
    strategy = strategy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            strategy.step()
            if score is not None:
                strategy.update(lambda: score, running_score=running)
    with pytest.raises(RuntimeError, match=f"ensemble is empty: {reason}"):
        strategy.apply()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (EMA, {"decay": "x"}, r"decay must be in \[0, 1\), got 'x'"),
        (BEMA, {"kappa": "a"}, r"kappa must be in \[0, 1\], got 'a'"),
        (BEMA, {"eta": math.inf}, "eta must be a number of at least 0, got inf"),
        (SWAD, {"tolerance_ratio": "a"}, "tolerance_ratio must be a number of at least 0, got 'a'"),
        (PowerEMA, {"narrow": None}, r"narrow must be in \[0.001, 0.28\], got None"),
        (SWA, {"start": "a"}, "start must be an epoch .* got 'a'"),
        (SWA, {"start": True}, "start must be an epoch .* got True"),
        (SWA, {"total": 0}, "total must be a whole number of at least 1 or None, got 0"),
        (SWA, {"start": 9, "total": 5}, "start=9 leaves none of total=5 decision points"),
        (EMA, {"dcay": 0.9}, "EMA has no option 'dcay'. Did you mean 'decay'"),
        (ASWA, {"evry": 2}, "ASWA has no option 'evry'. Its options: "),
        (DenseASWA, {"evry": 2}, "DenseASWA has no option 'evry'. Did you mean 'every'"),
    ],
)
def test_what_a_class_cannot_use_is_named_when_it_is_built(kind, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        kind(scalar(), **options)


# State


def test_what_is_no_state_is_refused():
    with pytest.raises(TypeError, match=r"Expected what state_dict\(\) of a strategy returned, got NoneType"):
        ASWA(scalar()).load_state_dict(None)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("interrupted_after", [0, 1, 3])
def test_a_run_resumed_from_a_state_equals_one_that_was_not_interrupted(name, interrupted_after):
    scores = [(0.5, 0.4), (0.6, 0.3, 0.7), (0.7, 0.9, 0.65), (0.65, 0.2, 0.8), (0.9, 0.8, 0.7)]

    def move(model: nn.Module, epoch: int) -> None:
        generator = torch.Generator().manual_seed(epoch)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator))

    def run(strategy, epochs: range) -> None:
        for epoch in epochs:
            move(strategy.model, epoch)
            strategy.step()
            strategy.update(iter(scores[epoch]).__next__)

    torch.manual_seed(0)
    model = network()
    whole = build(name, copy.deepcopy(model))
    run(whole, range(5))
    first = build(name, copy.deepcopy(model))
    run(first, range(interrupted_after))
    state, weights = first.state_dict(), snapshot(first.model)
    run(first, range(interrupted_after, 5))  # a state that was taken does not change when training continues

    resumed = build(name, network())
    resumed.model.load_state_dict(weights)
    resumed.load_state_dict(state)
    for tensor in state["averaged"].values():
        tensor.fill_(math.nan)  # nor does the strategy when somebody else uses the state
    run(resumed, range(interrupted_after, 5))
    assert same(resumed.state_dict(), whole.state_dict())
    assert same(snapshot(resumed.model), snapshot(whole.model))
    assert resumed.alphas == whole.alphas


def trained_state(name: str = "aswa", model: nn.Module | None = None, **options) -> dict:
    strategy = build(name, model or nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), **options)
    strategy.update(lambda: 0.5)
    return strategy.state_dict()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            lambda: trained_state(model=nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))),
            r"'1\.weight' is \(2, 3\) in the saved state but \(1, 3\) in the model",
        ),
        (
            lambda: trained_state(model=nn.Sequential(nn.Linear(2, 3))),
            r"'1\.weight' \(1, 3\) is in the model but not in the saved state",
        ),
        (
            lambda: trained_state(model=nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(1, 1))),
            r"'2\.weight' \(1, 1\) is in the saved state but not",
        ),
        (
            lambda: trained_state(
                model=nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.BatchNorm1d(1, affine=False))
            ),
            r"differing buffer: '2\.running_mean' \(1,\)",
        ),
        (lambda: trained_state("best"), "state of strategy 'best', expected 'aswa'"),
        (
            lambda: trained_state(greater_is_better=False),
            "saved with greater_is_better=False, this strategy has greater_is_better=True",
        ),
    ],
)
def test_a_state_of_another_model_strategy_or_direction_is_refused_and_nothing_changes(state, message):
    aswa = build("aswa", nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    aswa.update(lambda: 0.7)
    before = aswa.state_dict()
    with pytest.raises(ValueError, match=message):
        aswa.load_state_dict(state())
    assert same(aswa.state_dict(), before)


def test_an_empty_state_empties_the_ensemble():
    model = scalar()
    aswa, empty = ASWA(model), ASWA(model).state_dict()
    aswa.update(lambda: 0.5)
    aswa.load_state_dict(empty)
    assert (aswa.members, aswa.score, len(aswa.trajectory), aswa.average.is_empty) == (0, None, 0, True)
    assert aswa.update(lambda: 0.1) is Decision.INIT


@pytest.mark.parametrize(("scores", "decision"), [([0.2, 0.1, 0.9], "soft"), ([0.2, 0.9, 0.1], "hard")])
def test_an_interrupt_while_a_decision_is_carried_out_comes_when_it_is_complete(scores, decision, monkeypatch):
    model = nn.Linear(2, 2)
    aswa = ASWA(model)
    aswa.update(lambda: scores[0])
    with torch.no_grad():
        model.weight += 1
    changed = {"soft": "blend", "hard": "assign"}[decision]
    original = getattr(type(aswa.average), changed)

    def interrupted(self, *args, **kwargs):
        original(self, *args, **kwargs)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(type(aswa.average), changed, interrupted)
    remaining = iter(scores[1:])
    with pytest.raises(KeyboardInterrupt):
        aswa.update(lambda: next(remaining))
    assert [record.decision.value for record in aswa.trajectory] == ["init", decision]
    assert aswa.score == 0.9
    assert aswa.members == {"soft": 2, "hard": 1}[decision]
    expected = model.weight - (0.5 if decision == "soft" else 0)
    torch.testing.assert_close(aswa.average.averaged["weight"], expected.detach())


def test_strategies_that_never_average_need_no_training_batches():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for strategy in (BestCheckpoint(model), LastCheckpoint(model)):
        strategy.update(lambda: 1.0)
        with strategy.swapped():
            assert torch.equal(model[1].running_mean, strategy.average.copied["1.running_mean"])


def test_a_score_instead_of_a_function_is_explained():
    with pytest.raises(
        TypeError, match=r"takes a function that returns the validation score, got float.*running_score="
    ):
        ASWA(nn.Linear(1, 1)).update(0.5)


def without(key):
    return lambda state: {name: value for name, value in state.items() if name != key}


def with_weight(**changes):
    """A state whose averaged weight is another tensor."""
    return lambda state: state | {"averaged": {name: changes["to"](t) for name, t in state["averaged"].items()}}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        *((without(key), f"no '{key}'") for key in ("members", "score", "stale", "records", "averaged", "buffers")),
        (lambda state: state | {"members": "x"}, "'members' of this state is 'x'. Expected a whole number"),
        (lambda state: state | {"members": -1}, "'members' of this state is -1"),
        (lambda state: state | {"members": True}, "'members' of this state is True"),
        (lambda state: state | {"members": 0}, "has 0 members, and 1 in its last record"),
        (lambda state: state | {"score": math.inf}, "has the score inf, which its last record does not have"),
        (lambda state: state | {"score": math.nan}, "has the score nan"),
        (lambda state: state | {"score": "0.5"}, "'score' of this state is '0.5'. Expected a number"),
        (lambda state: state | {"stale": "no"}, "'stale' of this state is 'no'. Expected"),
        (lambda state: state | {"records": [{"index": 0}]}, "'records' of this state are damaged"),
        (lambda state: state | {"averaged": "x"}, "'averaged' of this state is 'x'"),
        (lambda state: state | {"averaged": {}}, "but 0 averages"),
        (with_weight(to=lambda t: t.long()), "does not hold floating-point numbers"),
        (with_weight(to=lambda t: t / 0), "holds NaN or infinite values"),
        (with_weight(to=lambda t: t[:1]), "belongs to another model"),
        (with_weight(to=lambda t: t.tolist()), "is a list in the saved state, not a tensor"),
    ],
)
def test_a_state_with_impossible_values_is_refused_and_changes_nothing(change, told):
    def follow(*scores):
        aswa = ASWA(nn.Linear(2, 2))
        for score in scores:
            aswa.update(lambda score=score: score)
        return aswa

    state, aswa = follow(0.25).state_dict(), follow(0.5, 0.75)
    before = aswa.state_dict()
    with pytest.raises(ValueError, match=re.escape(told)):
        aswa.load_state_dict(change(state))
    after = aswa.state_dict()
    assert_same_tensors(after.pop("averaged"), before.pop("averaged"))
    assert after == before
    aswa.load_state_dict(state)
    assert (aswa.members, aswa.score) == (1, 0.25)


def test_the_weights_of_a_run_that_diverged_are_resumed_as_they_are():
    model = nn.Linear(2, 2)
    last = LastCheckpoint(model)
    nn.init.constant_(model.weight, math.nan)
    with pytest.warns(UserWarning, match="counts as worse"):
        last.update(lambda: math.nan)
    resumed = LastCheckpoint(nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="The last weights of this state hold NaN or infinite values"):
        resumed.load_state_dict(last.state_dict())
    assert resumed.average.averaged["weight"].isnan().all()


def test_update_is_refused_where_the_model_holds_averaged_weights():
    model = nn.Linear(2, 2)
    aswa, other = ASWA(model), LastCheckpoint(model)
    aswa.update(lambda: 0.5)
    for strategy in (aswa, other):
        with aswa.swapped(), pytest.raises(RuntimeError, match=r"update\(\) was called inside swapped\(\)"):
            strategy.update(lambda: 0.6)
    with aswa.swapped(), aswa.swapped():
        pass
    other.update(lambda: 0.6)
    assert len(aswa.trajectory) == len(other.trajectory) == 1


def test_an_evaluation_that_changes_the_mode_is_put_right():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.BatchNorm1d(2))
    model.train()
    model[2].eval()  # frozen statistics
    aswa = ASWA(model, batchnorm="copy")
    for score in (0.1, 0.2):
        aswa.update(lambda score=score: model.eval() and score)
        assert [module.training for module in model.modules()] == [True, True, True, False]


@pytest.mark.filterwarnings("ignore:.*was not called after optimizer steps:UserWarning")
@pytest.mark.parametrize("steps", range(1, 5))
@pytest.mark.parametrize("points", range(1, 4))
@pytest.mark.parametrize("every", [1, 2])
def test_an_ema_that_decided_before_its_first_step_is_resumed(steps, points, every):
    def start() -> EMA:
        torch.manual_seed(0)
        return EMA(network(), decay=0.5, every=every, batchnorm="copy")

    ema = start()
    for _ in range(points):
        ema.update(lambda: 0.5)
    for _ in range(steps):
        with torch.no_grad():
            ema.model[0].weight.add_(1)
        ema.step()
    resumed = start()
    resumed.load_state_dict(ema.state_dict())
    assert same(resumed.state_dict(), ema.state_dict())


@pytest.mark.parametrize("name", ["dense-aswa", "ema", "power-ema", "swad"])
def test_a_step_while_the_model_holds_averaged_weights_is_refused(name):
    strategy = build(name, network())
    strategy.step()
    strategy.update(lambda: 0.5)
    state = strategy.state_dict()
    with strategy.swapped(), pytest.raises(RuntimeError, match=r"step\(\) was called inside swapped"):
        strategy.step()
    assert same(strategy.state_dict(), state)
