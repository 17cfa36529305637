"""Several strategies at one decision point: what they have in common is computed once."""

import hashlib

import pytest
import torch
from torch import nn

from aswa_hf import ASWA, Decision
from aswa_hf.comparison import Score, build_strategies, check_due, chosen_strategy, decide, named_factories
from aswa_hf.strategies import take_step

OPTIONS = {"greater_is_better": True, "hard_updates": True}


def run(model: nn.Module, names: list[str], points: int, steps: int = 1, **options) -> tuple[dict, list[float], dict]:
    """Moves the weights by hand; returns the strategies, the first weight at each evaluation, and the last metrics."""
    strategies = build_strategies(named_factories(names), model, OPTIONS | options, total=points)
    evaluated: list[float] = []
    first = next(model.parameters())

    def evaluate() -> dict[str, float]:
        evaluated.append(first.flatten()[0].item())
        return {"eval_score": evaluated[-1]}

    known: dict = {}
    torch.manual_seed(0)
    for point in range(points):
        for _ in range(steps):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.rand_like(parameter))
            take_step(strategies.values())
        running = {"eval_score": first.flatten()[0].item()}
        decide(strategies, evaluate, running, Score("score"), known, step=point, epoch=point + 1.0)
    return strategies, evaluated, known


def test_equal_weights_are_evaluated_once():
    names = ["swa-all", "lawa", "best", "last", "ema(decay=0.5)", "best-ema(decay=0.5)"]
    strategies, evaluated, known = run(nn.Linear(3, 2), names, points=3)
    # swa-all and lawa are the same mean until lawa forgets, and the two EMAs the same average; the first point has
    # the running weights only, which are already evaluated.
    assert len(evaluated) == len(set(evaluated)) == 4
    for name, strategy in strategies.items():
        assert known[name]["eval_score"] == strategy.score


def test_dense_aswa_alone_evaluates_equal_weights_once():
    # With one step per decision point, the running model is the snapshot.
    _, evaluated, _ = run(nn.Linear(3, 2), ["dense-aswa"], points=3)
    assert len(evaluated) == 2
    _, evaluated, _ = run(nn.Linear(3, 2), ["dense-aswa"], points=3, steps=2)
    assert len(evaluated) == 5


def test_metrics_follow_the_weights_when_a_valley_ends():
    model, known, options = nn.Linear(1, 1), {}, OPTIONS | {"greater_is_better": False}
    strategies = build_strategies(named_factories(["swad(n_converge=1, n_tolerance=2)"]), model, options, total=6)
    (swad,) = strategies.values()
    for point, loss in enumerate([0.5, 0.1, 0.2, 0.9, 0.95, 0.99]):
        with torch.no_grad():
            model.weight.fill_(point)
        take_step(strategies.values())
        at = {"step": point, "epoch": point + 1.0}
        running = {"eval_score": loss}
        decide(strategies, lambda: {"eval_score": model.weight.item()}, running, Score("score"), known, **at)
        with swad.swapped():
            assert known["swad"]["eval_score"] == swad.score == model.weight.item()
    # The last two losses are worse than 1.3 times the first one: the mean of points 0 to 2 is back.
    assert swad.trajectory.decisions[-2:] == [Decision.REJECT] * 2
    assert swad.score == pytest.approx(1)


COMPANY = [
    "aswa", "dense-aswa", "swa-all", "lawa(k=3)", "ema(decay=0.5)", "best-ema(decay=0.5)", "bema(every=2)",
    "swad(n_converge=2, n_tolerance=2)", "swad-max", "power-ema", "best", "last",
]  # fmt: skip


def random_run(names: list[str], seed: int, points: int = 8) -> tuple[dict, dict, int]:
    """Moves the weights at random, with scores of few different values; returns the strategies, the last metrics, and
    the number of evaluations."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    moves, inputs = torch.Generator().manual_seed(seed), torch.randn(12, 4)
    options = OPTIONS | {"train_batches": lambda: inputs.split(4)}
    strategies = build_strategies(named_factories(names), model, options, total=points)
    evaluations: list[dict[str, float]] = []

    def metrics() -> dict[str, float]:
        tensors = model.state_dict().values()
        digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).digest()
        # One of five values that looks random, and that another kernel's rounding does not change.
        total = sum(tensor.double().sum().item() for tensor in tensors)
        return {"eval_score": int(5 * (total % 1)), "eval_all": int.from_bytes(digest[:6], "big")}

    def evaluate() -> dict[str, float]:
        evaluations.append(metrics())
        return evaluations[-1]

    known: dict = {}
    for point in range(points):
        for _ in range(1 + seed % 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=moves))
                model(inputs)  # the running model's own statistics
            take_step(strategies.values())
        decide(strategies, evaluate, metrics(), Score("score"), known, step=point, epoch=point + 1.0)
        for name, strategy in strategies.items():
            if strategy.members:
                with strategy.swapped():
                    assert known[name] == metrics(), (name, seed, point)
    return strategies, known, len(evaluations)


def test_strategies_in_company_are_what_they_are_alone():
    together_evaluated = alone_evaluated = 0
    decisions = {name.partition("(")[0]: set() for name in COMPANY}
    for seed in range(4):
        together, metrics, count = random_run(COMPANY, seed)
        together_evaluated += count
        for text in COMPANY:
            name = text.partition("(")[0]
            alone, alone_metrics, count = random_run([text], seed)
            alone_evaluated += count
            assert alone_metrics[name] == metrics[name], (name, seed)
            assert alone[name].trajectory == together[name].trajectory, (name, seed)
            states = alone[name].state_dict(), together[name].state_dict()
            assert all(torch.equal(a, b) for a, b in zip(*map(tensors, states), strict=True)), (name, seed)
            decisions[name] |= set(together[name].trajectory.decisions)
    assert together_evaluated < alone_evaluated
    # The runs are such that every rule does all that it can.
    for name in ("aswa", "dense-aswa"):
        assert decisions[name] == set(Decision)


def tensors(state: dict) -> list[torch.Tensor]:
    """The tensors of a state in their order."""
    nested = (tensors(value) if isinstance(value, dict) else [value] for value in state.values())
    return [value for values in nested for value in values if isinstance(value, torch.Tensor)]


def test_batchnorm_is_recalibrated_once_for_equal_weights():
    passes: list[int] = []

    def batches() -> list[torch.Tensor]:
        passes.append(1)
        return [torch.ones(4, 3), torch.zeros(4, 3)]

    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    names = ["swa-all", "lawa", "swa(start=0)"]
    strategies, evaluated, _ = run(model, names, points=3, train_batches=batches)
    assert len(evaluated) == len(passes) == 2
    for strategy in strategies.values():
        with strategy.swapped():
            weights, bias = (tensor.detach() for tensor in model[0].parameters())
            expected = (weights.sum(1) + 2 * bias) / 2
            torch.testing.assert_close(model[1].running_mean, expected)


def test_options_by_name_draw_no_random_numbers_that_training_would_draw():
    before = torch.get_rng_state()
    named_factories({"ema": {"decay": 0.9}, "swad": {"n_converge": 2}, "power-ema": {"snapshots": 1}})
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["", "auto", "..", "a/b", "a b", 3])
def test_names_that_metrics_and_checkpoints_cannot_have_are_refused(name):
    with pytest.raises(ValueError, match="cannot be the name of a strategy"):
        named_factories({name: {}})


def test_auto_names_the_averages_that_changed_after_the_last_decision_point():
    strategies, _, _ = run(nn.Linear(3, 2), ["last", "ema", "dense-aswa"], points=2)
    chosen = chosen_strategy("auto", strategies)
    take_step(strategies.values())
    with pytest.warns(UserWarning, match="The weights of ema have changed since the last decision point"):
        assert chosen_strategy("auto", strategies) == chosen == "last"


def test_a_function_that_builds_a_strategy_for_another_model_is_refused():
    other = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"strategies\['mine'\] has built a strategy for another model"):
        build_strategies({"mine": lambda _: ASWA(other)}, nn.Linear(1, 1), OPTIONS)


def test_what_a_run_ends_too_early_for_is_named_before_it_begins():
    names = ["aswa", "bema", "ema(every=10)", "swa(start=3)", "swa-all", "swad(every=10)"]
    strategies = build_strategies(named_factories(names), nn.Linear(1, 1), OPTIONS, total=3)

    def lines(apply: str | None, points: int | None, steps: int | None) -> list[str]:
        return [line.partition(" ")[0] for line in check_due(strategies, apply, points=points, steps=steps)]

    assert lines("aswa", 3, 9) == ["bema", "ema", "swa"]
    assert lines(None, 4, 10) == ["bema"]
    assert lines("auto", None, None) == []
    with pytest.raises(ValueError, match="cannot end with swa: swa starts at decision point 4, and the run has 2"):
        lines("swa", 2, None)
    del strategies["aswa"], strategies["swad"], strategies["swa-all"]
    with pytest.raises(ValueError, match="cannot end with any of its strategies: bema averages every 400 steps, and"):
        lines("auto", 3, 9)
