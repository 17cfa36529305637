"""Predictions averaged over models, and FGE: the learning rate, the moments of snapshots, what is left unchanged."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from aswa_hf.ensembles import FGE, PredictionEnsemble, cyclical_rate


def classifier(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 4))


def batches(count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(5, 3, generator=generator) for _ in range(count)]


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def by_hand(models: list[nn.Module], data: list[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return sum(torch.softmax(model.eval()(torch.cat(data)).double(), -1) for model in models) / len(models)


# Prediction averaging


@pytest.mark.parametrize("kind", ["models", "states", "readers"])
def test_probabilities_are_the_mean_of_the_members_softmax(kind):
    runs = [classifier(seed) for seed in range(3)]
    states = [state_of(run) for run in runs]
    members = {"models": runs, "states": states, "readers": [lambda s=s: s for s in states]}[kind]
    model = classifier(7)
    found = PredictionEnsemble(model, members).predict(batches())
    torch.testing.assert_close(found.double(), by_hand(runs, batches()), rtol=1e-5, atol=1e-7)
    assert found.shape == (15, 4)


def test_the_model_keeps_its_weights_mode_and_the_random_state():
    model = classifier(7).train()
    model[2].eval()
    members = [state_of(classifier(1)), state_of(classifier(2))]
    before, random = state_of(model), torch.get_rng_state()
    loader = DataLoader(TensorDataset(torch.cat(batches())), batch_size=4)
    PredictionEnsemble(model, members).predict(loader)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert (model.training, model[0].training, model[2].training) == (True, True, False)
    assert torch.equal(torch.get_rng_state(), random)


def test_one_member_is_read_at_a_time_and_the_model_restored_if_reading_fails():
    model, events = classifier(7), []
    before = state_of(model)

    def reader(index):
        def read():
            events.append(f"read {index}")
            if index == 2:
                raise OSError("gone")
            return state_of(classifier(index))

        return read

    def forward(model, batch):
        events.append("forward")
        return {"logits": model(batch)}

    with pytest.raises(OSError, match="gone"):
        PredictionEnsemble(model, [reader(0), reader(1), reader(2)], forward=forward).predict(batches(1))
    assert events == ["read 0", "forward", "read 1", "forward", "read 2"]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_what_cannot_be_averaged_is_refused():
    model = classifier(0)
    with pytest.raises(ValueError, match="at least one member"):
        PredictionEnsemble(model, [])
    with pytest.raises(TypeError, match="Member 1 is a str"):
        PredictionEnsemble(model, [state_of(model), "run-1"])
    with pytest.raises(ValueError, match="pass the model"):
        PredictionEnsemble(None, [state_of(model)])
    with pytest.raises(ValueError, match=r"Member 1 does not fit Sequential.*0\.weight"):
        PredictionEnsemble(model, [state_of(model), {"1.weight": torch.zeros(2)}]).predict(batches())
    with pytest.raises(ValueError, match=r"Member 1 .* shape \(15, 2\).*\(15, 4\)"):
        PredictionEnsemble(model, [model, nn.Linear(3, 2)]).predict(batches())
    with pytest.raises(TypeError, match="read only once"):
        PredictionEnsemble(model, [model]).predict(iter(batches()))
    with pytest.raises(ValueError, match="shuffle=False"):
        PredictionEnsemble(model, [model]).predict(DataLoader(TensorDataset(torch.zeros(4, 3)), shuffle=True))
    for output, kind in (((torch.zeros(5, 4),), "tuple"), ({"loss": torch.zeros(())}, "NoneType")):
        with pytest.raises(TypeError, match=f"returned a {kind}, expected a tensor of logits"):
            PredictionEnsemble(model, [model], forward=lambda m, b, output=output: output).predict(batches())
    with pytest.raises(ValueError, match="no batch"):
        PredictionEnsemble(model, [model]).predict([])


# FGE


def test_the_learning_rate_is_a_triangle_with_its_lowest_point_in_the_middle_of_the_cycle():
    rates = [cyclical_rate(step, 8, high=0.5, low=0.1) for step in range(1, 17)]
    expected = [0.4, 0.3, 0.2, 0.1, 0.2, 0.3, 0.4, 0.5]
    assert rates == pytest.approx(expected * 2)


def test_steps_use_these_rates_and_snapshots_are_the_weights_after_the_lowest_ones():
    model = nn.Linear(1, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=7.0)
    # Somebody else's schedule before must not shift the rates.
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.1)
    fge = FGE(model, optimizer, cycle=4, high=0.8, low=0.2)
    used, weights = [], {}
    for step in range(1, 11):
        used.append(optimizer.param_groups[0]["lr"])
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        fge.step()
        weights[step] = model.weight.detach().clone()
    assert used == pytest.approx([0.5, 0.2, 0.5, 0.8, 0.5, 0.2, 0.5, 0.8, 0.5, 0.2])
    assert list(fge.snapshots) == [2, 6, 10]
    for step, snapshot in fge.snapshots.items():
        assert torch.equal(snapshot["weight"], weights[step])

    points = [torch.tensor([[1.0], [-2.0]])]
    probabilities = fge.ensemble().predict(points)
    expected = sum(torch.softmax(points[0] @ weights[step].T, -1) for step in (2, 6, 10)) / 3
    torch.testing.assert_close(probabilities, expected)


def test_snapshots_are_kept_wherever_one_likes():
    model, kept = nn.Linear(1, 2), {}

    def keep(state, step):
        kept[step] = {name: tensor.clone() for name, tensor in state.items()}
        return lambda: kept[step]

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    fge = FGE(model, optimizer, cycle=2, high=0.2, low=0.1, keep=keep)
    with pytest.raises(RuntimeError, match="first one comes after 1 steps"):
        fge.ensemble()
    for _ in range(3):
        optimizer.step()
        fge.step()
    assert sorted(kept) == [1, 3]
    assert len(fge.ensemble().members) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cycle": 5}, "even number of steps.*got 5"),
        ({"cycle": 0}, "even number of steps"),
        ({"low": 0.9}, "0 ≤ low ≤ high.*low=0.9, high=0.5"),
        ({"high": 0.0, "low": 0.0}, "high above 0"),
        ({"low": -0.1}, "low=-0.1"),
    ],
)
def test_impossible_cycles_are_refused_before_anything_changes(options, message):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=7.0)
    with pytest.raises(ValueError, match=message):
        FGE(model, optimizer, **({"cycle": 4, "high": 0.5, "low": 0.1} | options))
    assert optimizer.param_groups[0]["lr"] == 7.0
