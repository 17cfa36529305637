"""The ASWA rule: over arbitrary score sequences, against a literal transcription, and its four special cases."""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from aswa_hf import ASWA, SWA, BestCheckpoint, LastCheckpoint, policy

settings.register_profile("aswa", deadline=None, database=None)  # a busy machine is not a failure
settings.load_profile("aswa")

NAN, INF = math.nan, math.inf
FEW = st.sampled_from([-0.5, 0.0, 0.25, 0.5, 0.5, 1.0, NAN, INF, -INF])  # few values make ties likely
SCORE = FEW | st.floats()
SNAPSHOT = st.floats(-100, 100)
POINTS = st.lists(st.tuples(SNAPSHOT, SCORE, SCORE), min_size=1, max_size=25)
EITHER = st.booleans()


@dataclass
class Run:
    """A run over one-number weights: what the rule decided, and the state after every decision."""

    snapshots: list[float] = field(default_factory=list)
    running_scores: list[float] = field(default_factory=list)
    decisions: list[str] = field(default_factory=list)
    scores: list[float | None] = field(default_factory=list)
    members: list[int] = field(default_factory=list)
    ensembles: list[float | None] = field(default_factory=list)


def simulate(points: list[tuple[float, float, float]], *, hard_updates: bool = True, greater: bool = True) -> Run:
    run = Run()
    ensemble, members, score = None, 0, None
    for snapshot, running, lookahead in points:
        decision = policy.decide(
            members, score, running, lookahead, hard_updates=hard_updates, greater_is_better=greater
        )
        if decision in ("init", "hard"):
            ensemble, score = snapshot, running
        elif decision == "soft":
            ensemble, score = (members * ensemble + snapshot) / (members + 1), lookahead
        members = policy.next_members(members, decision)
        run.snapshots.append(snapshot)
        run.running_scores.append(running)
        run.decisions.append(decision)
        run.scores.append(score)
        run.members.append(members)
        run.ensembles.append(ensemble)
    return run


def by_the_book(n: int, score_a: float, s: float, s_hat: float, hard_updates: bool) -> tuple[str, int, float]:
    """The rule as written in policy.py, word by word, for greater is better."""
    s = s if math.isfinite(s) else -INF
    s_hat = s_hat if math.isfinite(s_hat) else -INF
    if n == 0:
        return ("init", 1, s) if s > -INF else ("reject", 0, score_a)
    if hard_updates and s > s_hat and s > score_a:
        return "hard", 1, s
    if s_hat > score_a:
        return "soft", n + 1, s_hat
    return "reject", n, score_a


@given(POINTS, EITHER)
@settings(max_examples=300)
def test_every_decision_is_that_of_the_written_rule(points, hard_updates):
    run = simulate(points, hard_updates=hard_updates)
    n, score_a = 0, -INF
    for index, (_, s, s_hat) in enumerate(points):
        decision, n, score_a = by_the_book(n, score_a, s, s_hat, hard_updates)
        assert (run.decisions[index], run.members[index]) == (decision, n)
        assert run.scores[index] == (score_a if n else None)


@given(POINTS, EITHER, EITHER)
def test_the_ensembles_score_never_gets_worse(points, hard_updates, greater):
    scores = [s for s in simulate(points, hard_updates=hard_updates, greater=greater).scores if s is not None]
    assert scores == sorted(scores, reverse=not greater)


@given(POINTS, EITHER)
def test_with_hard_updates_the_ensemble_is_at_least_as_good_as_every_running_model_seen(points, greater):
    run = simulate(points, greater=greater)
    for index, score in enumerate(run.scores):
        seen = [s for s in run.running_scores[: index + 1] if math.isfinite(s)]
        if greater:
            assert all(score >= s for s in seen)
        else:
            assert all(score <= s for s in seen)


@given(POINTS, EITHER, EITHER)
def test_alphas_sum_to_one_and_rebuild_the_ensemble_from_saved_snapshots(points, hard_updates, greater):
    run = simulate(points, hard_updates=hard_updates, greater=greater)
    for length in range(1, len(points) + 1):
        alphas = policy.ensemble_weights(run.decisions[:length])
        assert len(alphas) == length
        if run.members[length - 1] == 0:
            assert alphas == [0.0] * length
            continue
        assert sum(alphas) == pytest.approx(1.0)
        assert sum(alpha > 0 for alpha in alphas) == run.members[length - 1]
        rebuilt = sum(alpha * snapshot for alpha, snapshot in zip(alphas, run.snapshots[:length], strict=True))
        assert rebuilt == pytest.approx(run.ensembles[length - 1], rel=1e-9, abs=1e-9)


@given(POINTS, EITHER)
def test_smaller_is_better_is_the_mirror_image_of_greater_is_better(points, hard_updates):
    mirrored = [(snapshot, -s, -s_hat) for snapshot, s, s_hat in points]
    one, other = (
        simulate(points, hard_updates=hard_updates),
        simulate(mirrored, hard_updates=hard_updates, greater=False),
    )
    assert one.decisions == other.decisions
    assert one.ensembles == other.ensembles
    assert one.scores == [None if s is None else -s for s in other.scores]


@given(st.integers(1, 9), st.floats(allow_nan=False, allow_infinity=False), EITHER, EITHER)
def test_a_tie_with_the_ensemble_is_a_reject(members, score, hard_updates, greater):
    decision = policy.decide(members, score, score, score, hard_updates=hard_updates, greater_is_better=greater)
    assert decision == "reject"


def test_of_a_better_running_model_and_an_equal_lookahead_the_lookahead_is_taken():
    assert policy.decide(3, 0.5, 0.7, 0.7) == "soft"
    assert policy.decide(3, 0.5, 0.7, 0.6) == "hard"
    assert policy.decide(3, 0.5, 0.6, 0.7) == "soft"
    assert policy.decide(3, 0.5, 0.7, 0.4, hard_updates=False) == "reject"


@given(st.lists(st.sampled_from([NAN, INF, -INF]), max_size=5), SCORE, EITHER, EITHER)
def test_unusable_scores_leave_the_ensemble_empty_and_the_next_point_the_first(
    unusable, lookahead, hard_updates, greater
):
    points = [(1.0, s, lookahead) for s in unusable] + [(7.0, 0.25, lookahead)]
    run = simulate(points, hard_updates=hard_updates, greater=greater)
    assert run.decisions == ["reject"] * len(unusable) + ["init"]
    assert run.members == [0] * len(unusable) + [1]
    assert run.ensembles == [None] * len(unusable) + [7.0]


@pytest.mark.parametrize("unusable", [NAN, INF, -INF])
@pytest.mark.parametrize("greater", [True, False])
def test_an_infinite_score_is_not_better_than_nan_in_either_direction(unusable, greater):
    assert not policy.is_better(unusable, 0.0, greater)
    assert policy.is_better(0.0, unusable, greater)
    assert policy.decide(2, 0.0, unusable, unusable, greater_is_better=greater) == "reject"


@given(st.integers(0, 50))
def test_after_a_hard_update_the_ensemble_has_one_member(members):
    assert policy.next_members(members, "hard") == 1
    assert policy.next_members(members, "soft") == members + 1
    assert policy.next_members(members, "reject") == members


@given(POINTS)
def test_algorithm_1_of_the_paper_looks_at_the_running_score_only_to_begin(points):
    (snapshot, running, lookahead), rest = points[0], points[1:]
    begun = [(snapshot, 0.0 if not math.isfinite(running) else running, lookahead)]
    blind = [(s, NAN, s_hat) for s, _, s_hat in rest]
    run = simulate(begun + rest, hard_updates=False)
    assert run.decisions == simulate(begun + blind, hard_updates=False).decisions
    assert "hard" not in run.decisions


def test_alphas_by_hand():
    decisions = ["reject", "init", "soft", "reject", "hard", "soft", "reject", "soft"]
    assert policy.ensemble_weights(decisions[:1]) == [0]
    assert policy.ensemble_weights(decisions[:4]) == [0, 0.5, 0.5, 0]
    assert policy.ensemble_weights(decisions[:5]) == [0, 0, 0, 0, 1]
    assert policy.ensemble_weights(decisions) == [0, 0, 0, 0, 1 / 3, 1 / 3, 0, 1 / 3]


def test_the_rule_imports_nothing():
    tree = ast.parse(Path(policy.__file__).read_text(encoding="utf-8"))
    assert not [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]


# The four relationships of the paper, with the real strategies side by side on one model.


def train(running: list[float], lookahead: list[float], **others):
    """ASWA with scripted scores, and `others` shadowing the same run; returns the strategies and all snapshots."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    aswa = ASWA(model)
    shadows = {name: build(model) for name, build in others.items()}
    snapshots = []
    for s, s_hat in zip(running, lookahead, strict=True):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn_like(parameter)
        snapshots.append(weights(model))
        aswa.update(lambda s_hat=s_hat: s_hat, running_score=s)
        for shadow in shadows.values():
            shadow.update(lambda: 0.0, running_score=s)
    return aswa, shadows, snapshots


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def ensemble(strategy) -> dict[str, torch.Tensor]:
    with strategy.swapped():
        return weights(strategy.model)


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def test_plain_training_is_the_run_in_which_every_update_is_hard():
    aswa, others, snapshots = train([0.1, 0.2, 0.3, 0.4, 0.5], [0.0] * 5, last=LastCheckpoint)
    assert aswa.alphas == [0, 0, 0, 0, 1]
    assert_same(ensemble(aswa), snapshots[-1])
    assert_same(ensemble(aswa), ensemble(others["last"]))


def test_early_stopping_is_the_run_without_a_soft_update():
    aswa, others, snapshots = train([0.1, 0.4, 0.3, 0.6, 0.6, 0.2], [0.0] * 6, best=BestCheckpoint)
    assert [d.value for d in aswa.trajectory.decisions] == ["init", "hard", "reject", "hard", "reject", "reject"]
    assert aswa.alphas == [0, 0, 0, 1, 0, 0]
    assert_same(ensemble(aswa), snapshots[3])
    assert_same(ensemble(aswa), ensemble(others["best"]))


@given(st.lists(FEW, min_size=1, max_size=20), EITHER)
def test_a_lookahead_that_is_never_usable_leads_to_early_stopping(running, greater):
    run = simulate([(float(i), s, NAN) for i, s in enumerate(running)], greater=greater)
    finite = [s for s in running if math.isfinite(s)]
    if not finite:
        assert run.members[-1] == 0
    else:
        best = max(finite) if greater else min(finite)
        assert policy.ensemble_weights(run.decisions).index(1.0) == running.index(best)


def test_swa_from_the_first_epoch_is_the_run_in_which_every_update_is_soft():
    aswa, others, snapshots = train([0.5, 0.1, 0.2, 0.3, 0.4], [0.0, 0.6, 0.7, 0.8, 0.9], swa=SWA)
    assert aswa.alphas == [1 / 5] * 5
    assert_same(ensemble(aswa), ensemble(others["swa"]))
    mean = torch.stack([s["0.weight"] for s in snapshots]).double().mean(0)
    torch.testing.assert_close(ensemble(aswa)["0.weight"].double(), mean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("start", [1, 3])
def test_swa_from_epoch_j_is_a_hard_update_at_j_and_soft_ones_after_it(start):
    running = [0.1, 0.15, 0.2, 0.3, 0.1, 0.2]
    running[start] = 0.5
    lookahead = [0.0, 0.12, 0.25, 0.0, 0.0, 0.0]  # soft and rejected ones before j
    lookahead[start:] = [0.2, 0.6, 0.7, 0.8, 0.9][: 6 - start]
    aswa, others, _ = train(running, lookahead, swa=lambda model: SWA(model, start=start))
    assert [d.value for d in aswa.trajectory.decisions[start:]] == ["hard", *["soft"] * (5 - start)]
    assert aswa.alphas == [0] * start + [1 / (6 - start)] * (6 - start)
    assert_same(ensemble(aswa), ensemble(others["swa"]))
