"""Several strategies at one decision point: what they have in common is computed once."""

import pytest
import torch
from torch import nn

from aswa_hf import Decision
from aswa_hf.comparison import Score, build_strategies, decide, named_factories
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


def test_strategies_in_company_are_what_they_are_alone():
    names = ["aswa", "dense-aswa", "swa-all", "lawa", "ema", "best-ema", "swad", "swad-max", "power-ema", "last"]

    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Linear(3, 2)

    together, _, _ = run(model(), names, points=5, steps=3)
    for name in names:
        alone, _, _ = run(model(), [name], points=5, steps=3)
        assert alone[name].trajectory == together[name].trajectory, name


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
