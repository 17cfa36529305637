"""The arithmetic of every strategy, on weights and scores that can be followed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from aswa_hf import ASWA, EMA, SWA, BestCheckpoint, Decision, DenseASWA, LastCheckpoint

INIT, HARD, SOFT, REJECT = Decision.INIT, Decision.HARD, Decision.SOFT, Decision.REJECT


class Point(nn.Module):
    """A model of two equal weights, set by hand where training would move them."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, dtype=dtype))

    @property
    def value(self) -> float:
        assert self.w[0] == self.w[1]
        return self.w[0].item()

    @value.setter
    def value(self, value: float) -> None:
        with torch.no_grad():
            self.w.fill_(value)


def ensemble(strategy) -> float:
    with strategy.swapped():
        return strategy.model.value


def follow(strategy, points: list[tuple[float, float, float]]) -> list[tuple[Decision, float]]:
    """Runs over (weights, running score, look-ahead score); returns every decision with the ensemble after it."""
    seen = []
    for value, running, lookahead in points:
        strategy.model.value = value
        decision = strategy.update(lambda lookahead=lookahead: lookahead, running_score=running)
        assert strategy.model.value == value
        seen.append((decision, ensemble(strategy) if strategy.members else None))
    return seen


# ASWA


def test_aswa_by_hand():
    aswa = ASWA(Point())
    assert follow(
        aswa,
        [
            (1.0, 0.5, 0.0),
            (3.0, 0.4, 0.6),
            (10.0, 0.9, 0.7),
            (20.0, 0.8, 0.95),  # forgetting the snapshot of the hard update would give 20
            (100.0, 0.1, 0.2),
            (30.0, 0.1, 0.97),
        ],
    ) == [(INIT, 1.0), (SOFT, 2.0), (HARD, 10.0), (SOFT, 15.0), (REJECT, 15.0), (SOFT, 20.0)]
    assert aswa.alphas == [0, 0, 1 / 3, 1 / 3, 0, 1 / 3]
    assert aswa.members == 3
    assert aswa.score == 0.97
    assert [r.score for r in aswa.trajectory] == [0.5, 0.6, 0.9, 0.95, 0.95, 0.97]
    assert [r.members for r in aswa.trajectory] == [1, 2, 1, 2, 2, 3]
    assert [r.running_score for r in aswa.trajectory] == [0.5, 0.4, 0.9, 0.8, 0.1, 0.1]
    assert [r.lookahead_score for r in aswa.trajectory] == [None, 0.6, 0.7, 0.95, 0.2, 0.97]
    aswa.apply()
    assert aswa.model.value == 20.0


def test_aswa_for_a_loss_where_smaller_is_better():
    aswa = ASWA(Point(), greater_is_better=False)
    assert follow(aswa, [(1.0, 2.0, 9.0), (3.0, 2.5, 1.5), (8.0, 1.0, 1.2), (9.0, 1.1, 1.0)]) == [
        (INIT, 1.0),
        (SOFT, 2.0),
        (HARD, 8.0),
        (REJECT, 8.0),
    ]
    assert aswa.score == 1.0


def test_without_hard_updates_a_better_running_model_is_only_averaged_in():
    aswa = ASWA(Point(), hard_updates=False)
    points = [(1.0, 0.5, 0.0), (3.0, 0.9, 0.6), (10.0, 0.99, 0.1)]
    assert follow(aswa, points) == [(INIT, 1.0), (SOFT, 2.0), (REJECT, 2.0)]


def test_a_reject_leaves_the_ensemble_bit_for_bit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    aswa = ASWA(model)
    scores = iter([0.1, 0.1, 0.2, 0.1, 0.3, 0.1, 0.2])
    decisions = []
    for _ in range(4):
        kept = aswa.state_dict()["averaged"]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter))
        running = [p.detach().clone() for p in model.parameters()]
        decisions.append(aswa.update(scores.__next__))
        assert all(torch.equal(p, r) for p, r in zip(model.parameters(), running, strict=True))
        changed = [
            name for name, t in aswa.average.averaged.items() if name not in kept or not torch.equal(t, kept[name])
        ]
        assert bool(changed) == (decisions[-1] is not REJECT)
    assert decisions == [INIT, SOFT, SOFT, REJECT]


def test_a_score_that_is_not_finite_leaves_the_ensemble_empty_and_the_next_point_begins_it():
    aswa = ASWA(Point())
    for unusable in (math.nan, math.inf, -math.inf):
        aswa.model.value = 1.0
        with pytest.warns(UserWarning, match="running model is (nan|inf|-inf) at decision point"):
            assert aswa.update(lambda score=unusable: score) is REJECT
    assert (aswa.members, aswa.score, aswa.alphas) == (0, None, [0, 0, 0])
    assert follow(aswa, [(5.0, 0.5, 0.0)]) == [(INIT, 5.0)]


@pytest.mark.parametrize("unusable", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("greater_is_better", [True, False])
def test_a_lookahead_score_that_is_not_finite_warns_at_the_callers_line_and_is_rejected(unusable, greater_is_better):
    aswa = ASWA(Point(), greater_is_better=greater_is_better)
    aswa.update(lambda: 0.5)
    with pytest.warns(UserWarning, match="look-ahead is .* at decision point 1: it counts as worse") as caught:
        assert aswa.update(lambda: unusable, running_score=0.5) is REJECT
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(UserWarning, match="running model is .* at decision point 2") as caught:
        assert aswa.update(iter([unusable, 0.5]).__next__) is REJECT
    assert [warning.filename for warning in caught] == [__file__]


def test_a_bf16_model_gets_the_float32_mean_rounded_once():
    torch.manual_seed(0)
    model = nn.Linear(40, 30).bfloat16()
    aswa = ASWA(model)
    snapshots, in_bf16 = [], None
    for n in range(1, 6):
        with torch.no_grad():
            model.weight.copy_(torch.randn(30, 40))
        snapshots.append(model.weight.detach().clone())
        in_bf16 = snapshots[0] if n == 1 else in_bf16.lerp(snapshots[-1], 1 / n)
        aswa.update(lambda n=n: float(n), running_score=0.0)
    aswa.apply()
    mean = torch.stack(snapshots).double().mean(0)
    spacing = (mean.abs() * 2**-8).clamp_min(2**-20)  # half the distance between bf16 numbers, at most
    assert ((model.weight.double() - mean).abs() <= spacing).all()
    assert ((in_bf16.double() - mean).abs() > spacing).any()
    assert torch.equal(model.weight, aswa.average.averaged["weight"].bfloat16())


def test_aswa_needs_something_to_decide_by():
    with pytest.raises(TypeError, match="ASWA decides by validation"):
        ASWA(Point()).update()
    with pytest.raises(TypeError, match="ASWA decides by validation"):
        ASWA(Point()).update(running_score=0.5)


# SWA


@pytest.mark.parametrize(("start", "total"), [(1, None), (0.25, 4), (0.3, 5)])
def test_swa_is_the_plain_mean_from_its_start_on(start, total):
    swa = SWA(Point(), start=start, total=total)
    points = [(value, 0.5, 0.6) for value in (100.0, 1.0, 4.0, 7.0)]
    assert follow(swa, points) == [(REJECT, None), (INIT, 1.0), (SOFT, 2.5), (SOFT, 4.0)]
    assert swa.alphas == [0, 1 / 3, 1 / 3, 1 / 3]
    assert [r.score for r in swa.trajectory] == [None, 0.5, 0.6, 0.6]


def test_swa_averages_whatever_the_score_is():
    swa = SWA(Point())
    assert follow(swa, [(1.0, 0.9, 0.0), (3.0, 0.1, 0.2)]) == [(INIT, 1.0), (SOFT, 2.0)]
    with pytest.warns(UserWarning, match="swa weights is nan"):
        assert follow(swa, [(8.0, 0.1, math.nan)]) == [(SOFT, 4.0)]
    swa.model.value = 12.0
    assert swa.update() is SOFT
    assert ensemble(swa) == 6.0
    assert swa.score is None


@pytest.mark.parametrize("fraction", [0.29, 0.57, 0.58, 0.7])
def test_a_fraction_of_the_run_is_not_moved_by_rounding(fraction):
    swa = SWA(Point(), start=fraction, total=100)
    decisions = [swa.update() for _ in range(100)]
    assert decisions.index(INIT) == round(fraction * 100)


def test_swa_refuses_a_start_it_cannot_place():
    with pytest.raises(ValueError, match=r"start=0.75 is a fraction of the run: pass total="):
        SWA(Point(), start=0.75).update(lambda: 0.5)
    for start in (-1, 1.0, 5.0, -0.5):
        with pytest.raises(ValueError, match="start must be an epoch"):
            SWA(Point(), start=start, total=10)


# EMA


def take_steps(ema: EMA, values: list[float]) -> None:
    for value in values:
        ema.model.value = value
        ema.step()


def test_ema_by_hand():
    ema = EMA(Point(), decay=0.5)
    for value, expected in ((1.0, 1.0), (3.0, 2.0), (6.0, 4.0), (0.0, 2.0)):
        take_steps(ema, [value])
        assert ensemble(ema) == expected
        assert ema.model.value == value
    assert ema.members == 4


def test_ema_every_second_step_looks_only_at_these():
    ema = EMA(Point(), decay=0.75, every=2)
    take_steps(ema, [99.0])
    assert ema.members == 0
    assert ema.update(lambda: 0.5) is REJECT
    take_steps(ema, [4.0, 99.0, 8.0, 99.0])
    assert ema.update(lambda: 0.5) is INIT
    assert ensemble(ema) == 5.0
    assert ema.members == 2


def test_the_decay_of_a_warming_up_ema_grows_with_its_updates():
    ema = EMA(Point(), decay=0.25, warmup=True)
    expected = 11.0
    take_steps(ema, [11.0])
    for decay, value in ((2 / 11, 22.0), (3 / 12, 4.0), (0.25, 9.0)):
        expected = decay * expected + (1 - decay) * value
        take_steps(ema, [value])
        assert ensemble(ema) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("steps_per_point", [1, 3])
def test_emas_alphas_sum_to_one_and_rebuild_it_from_the_snapshots_of_all_steps(warmup, steps_per_point):
    torch.manual_seed(0)
    ema = EMA(Point(), decay=0.8, warmup=warmup)
    snapshots = torch.randn(4 * steps_per_point).tolist()
    weights: list[float] = []
    for index, value in enumerate(snapshots):
        decay = min(0.8, (1 + index) / (10 + index)) if warmup else 0.8
        weights = [w * decay for w in weights] + [1 - decay if index else 1.0]
        take_steps(ema, [value])
        if (index + 1) % steps_per_point == 0:
            ema.update(lambda: 0.5)
    assert ensemble(ema) == pytest.approx(sum(w * s for w, s in zip(weights, snapshots, strict=True)), abs=1e-5)
    groups = [sum(weights[i : i + steps_per_point]) for i in range(0, len(weights), steps_per_point)]
    assert ema.alphas == pytest.approx(groups)
    assert sum(ema.alphas) == pytest.approx(1.0)


def test_ema_is_scored_once_per_decision_point_with_its_own_weights():
    ema, seen = EMA(Point(), decay=0.5), []
    take_steps(ema, [1.0, 3.0])
    assert ema.update(lambda: seen.append(ema.model.value) or 0.7, running_score=0.1) is INIT
    take_steps(ema, [6.0])
    assert ema.update(lambda: seen.append(ema.model.value) or 0.6, running_score=0.2) is SOFT
    assert seen == [2.0, 4.0]
    take_steps(ema, [0.0])
    ema.update(running_score=0.3)
    assert [r.score for r in ema.trajectory] == [0.7, 0.6, None]  # the score of other weights does not count
    assert [r.running_score for r in ema.trajectory] == [0.1, 0.2, 0.3]


def test_an_ema_whose_step_is_never_called_says_so_and_takes_the_decision_points():
    ema = EMA(Point(), decay=0.5)
    for value, decision, expected in ((1.0, INIT, 1.0), (3.0, SOFT, 2.0)):
        ema.model.value = value
        with pytest.warns(UserWarning, match=r"EMA\.step\(\) was not called") as caught:
            assert ema.update(lambda: 0.5) is decision
        assert caught[0].filename == __file__
        assert ensemble(ema) == expected
    assert ema.alphas == [0.5, 0.5]


def test_ema_refuses_a_decay_or_an_interval_that_is_none():
    for decay in (1.0, -0.1, 1.5):
        with pytest.raises(ValueError, match=r"decay must be in \[0, 1\)"):
            EMA(Point(), decay=decay)
    for every in (0, 1.5, True):
        with pytest.raises(ValueError, match="every must be a whole number of at least 1"):
            EMA(Point(), every=every)


# Best and last


def test_best_keeps_the_first_of_the_best_weights_in_either_direction():
    points = [(1.0, 0.5, 0.0), (2.0, 0.8, 0.0), (3.0, 0.8, 0.0), (4.0, 0.2, 0.0)]
    best, lowest = BestCheckpoint(Point()), BestCheckpoint(Point(), greater_is_better=False)
    assert follow(best, points) == [(INIT, 1.0), (HARD, 2.0), (REJECT, 2.0), (REJECT, 2.0)]
    assert follow(lowest, points) == [(INIT, 1.0), (REJECT, 1.0), (REJECT, 1.0), (HARD, 4.0)]
    assert (best.score, lowest.score) == (0.8, 0.2)
    assert best.alphas == [0, 1, 0, 0]
    with pytest.raises(TypeError, match="BestCheckpoint decides by validation"):
        best.update()


def test_best_waits_for_a_finite_score():
    best = BestCheckpoint(Point())
    with pytest.warns(UserWarning, match="nan"):
        assert follow(best, [(1.0, math.nan, 0.0), (2.0, 0.1, 0.0)]) == [(REJECT, None), (INIT, 2.0)]


def test_last_keeps_the_last_weights_whatever_their_score():
    last = LastCheckpoint(Point())
    assert follow(last, [(1.0, 0.5, 0.0), (2.0, 0.1, 0.0)]) == [(INIT, 1.0), (HARD, 2.0)]
    last.model.value = 3.0
    assert last.update() is HARD
    assert (ensemble(last), last.score, last.alphas) == (3.0, None, [0, 0, 1])


def test_records_tell_where_in_the_run_a_decision_was_taken():
    last = LastCheckpoint(Point())
    last.update(lambda: 0.1)
    last.update(lambda: 0.2, step=40, epoch=1.5)
    assert [(r.index, r.step, r.epoch, r.running_score) for r in last.trajectory] == [
        (0, None, 1, 0.1),
        (1, 40, 1.5, 0.2),
    ]


@pytest.mark.parametrize(
    ("kind", "option"),
    [(ASWA, "greater_is_better"), (ASWA, "hard_updates"), (DenseASWA, "score_snapshot"), (EMA, "warmup")],
)
def test_what_is_neither_true_nor_false_is_refused(kind, option):
    with pytest.raises(TypeError, match=f"{option} must be True or False, got 'no'"):
        kind(torch.nn.Linear(1, 1), **{option: "no"})
