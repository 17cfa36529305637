"""LAWA, BestEMA, BEMA, SWAD and PowerEMA against literal transcriptions on numbers made by hand."""

from __future__ import annotations

import math
import random
from collections import deque

import numpy as np
import pytest
import torch
from point import Point, ensemble, take_steps
from torch import nn

from aswa_hf import BEMA, EMA, LAWA, SWA, SWAD, BestEMA, Decision, PowerEMA, SWADMax
from aswa_hf.strategies import STRATEGIES

INIT, HARD, SOFT, REJECT = Decision.INIT, Decision.HARD, Decision.SOFT, Decision.REJECT


def walk(count: int, seed: int = 0) -> list[float]:
    generator = random.Random(seed)
    return [generator.uniform(-2, 2) for _ in range(count)]


# LAWA


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_lawa_is_the_mean_of_the_last_k_snapshots(k):
    lawa, values = LAWA(Point(), k=k), walk(8)
    for index, value in enumerate(values):
        lawa.model.move(value)
        seen = []
        decision = lawa.update(lambda seen=seen: seen.append(lawa.model.value) or 0.1)
        latest = values[max(0, index + 1 - k) : index + 1]
        assert decision is (INIT if index == 0 else SOFT if k > 1 else HARD)
        assert ensemble(lawa) == pytest.approx(sum(latest) / len(latest))
        assert seen == [pytest.approx(ensemble(lawa))]
        assert lawa.members == len(latest)
        assert lawa.alphas == [0.0] * (index + 1 - len(latest)) + [1 / len(latest)] * len(latest)
    assert sum(not part.is_empty for part in lawa.parts.values()) == k - 1


@pytest.mark.parametrize("points", [0, 1, 4])
def test_lawa_without_the_memory_for_a_snapshot_is_unchanged(points, monkeypatch):
    lawa = LAWA(Point(), k=3)
    for value in walk(points):
        lawa.model.move(value)
        lawa.update(lambda: 0.1)
    before = lawa.state_dict()
    full = MemoryError("full")
    monkeypatch.setattr(LAWA, "_keep", lambda self, point: (_ for _ in ()).throw(full))
    lawa.model.move(9.0)
    with pytest.raises(MemoryError):
        lawa.update(lambda: 0.7)
    after = lawa.state_dict()
    assert repr(after) == repr(before)


def test_lawa_refuses_a_k_out_of_range_and_the_state_of_another_k():
    for k in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="k must be a whole number of at least 1"):
            LAWA(Point(), k=k)
    with pytest.raises(ValueError, match="saved with k=3, this strategy has k=5"):
        LAWA(Point()).load_state_dict(LAWA(Point(), k=3).state_dict())


@pytest.mark.parametrize("kind", [kind for kind in STRATEGIES.values() if kind.name != "swa"])
def test_before_the_first_decision_there_are_no_weights_of_snapshots(kind):
    assert kind(Point()).alphas == []


@pytest.mark.parametrize(
    ("kind", "option", "saved", "ours"),
    [
        (SWA, "start", 0, 3),
        (SWA, "start", 0.75, 1),
        (EMA, "decay", 0.9, 0.5),
        (EMA, "every", 1, 2),
        (EMA, "warmup", True, False),
        (BestEMA, "decay", 0.9, 0.5),
        (PowerEMA, "every", 1, 2),
        (BEMA, "kappa", 0.5, 0.9),
        (BEMA, "eta", 0.2, 0.1),
        (BEMA, "rho", 10.0, 5.0),
        (BEMA, "every", 400, 100),
    ],
)
def test_a_run_is_resumed_with_the_rule_that_it_began_with(kind, option, saved, ours):
    state = kind(Point(), **{option: saved}).state_dict()
    kind(Point(), **{option: saved}).load_state_dict(state)
    with pytest.raises(ValueError, match=f"saved with {option}={saved}, this strategy has {option}={ours}"):
        kind(Point(), **{option: ours}).load_state_dict(state)
    del state[option]  # as states were
    kind(Point(), **{option: ours}).load_state_dict(state)


# BestEMA


@pytest.mark.parametrize("warmup", [True, False])
@pytest.mark.parametrize("greater_is_better", [True, False])
def test_best_ema_is_the_ema_of_the_best_decision_point(warmup, greater_is_better):
    options = {"decay": 0.7, "warmup": warmup, "greater_is_better": greater_is_better}
    best, ema = BestEMA(Point(), **options), EMA(Point(), **options)
    scores = [0.3, 0.5, 0.5, math.nan, 0.4, 0.9, 0.1]
    sign = 1 if greater_is_better else -1
    kept: tuple[float, float, list[float]] | None = None
    for index, score in enumerate(scores):
        for strategy in (best, ema):
            take_steps(strategy, walk(3, seed=index))
        now = ensemble(ema)
        seen = []
        if math.isnan(score):
            with pytest.warns(UserWarning, match="ema weights is nan"):
                ema.update(lambda: math.nan)
            with pytest.warns(UserWarning, match="ema weights is nan"):
                assert best.update(lambda: math.nan) is REJECT
        else:
            ema.update(lambda score=score: score)
            decision = best.update(lambda score=score, seen=seen: seen.append(best.model.value) or score)
            assert seen == [now]
            if kept is None or sign * score > sign * kept[1]:
                assert decision is (INIT if kept is None else HARD)
                kept = now, score, ema.alphas
            else:
                assert decision is REJECT
        assert (ensemble(best), best.score) == kept[:2]
        assert best.alphas == pytest.approx(kept[2] + [0.0] * (index + 1 - len(kept[2])))
        assert sum(best.alphas) == pytest.approx(1)


def test_best_ema_needs_steps_and_something_to_decide_by():
    with pytest.raises(RuntimeError, match=r"BestEMA averages optimizer steps: call its step\(\)"):
        BestEMA(Point()).update(lambda: 0.5)
    best = BestEMA(Point(), every=2)
    best.step()
    with pytest.raises(TypeError, match="BestEMA decides by validation"):
        best.update()
    assert best.update(lambda: 0.5) is REJECT


# BEMA


def literal_bema(
    initial: float, values: list[float], kappa: float, eta: float, rho: float, every: int
) -> float | None:
    ema, result = initial, None
    for t, value in enumerate(values, start=1):
        if t % every == 0:
            beta, alpha = (rho + t) ** -kappa, (rho + t) ** -eta
            ema = (1 - beta) * ema + beta * value
            result = ema + alpha * (value - initial)
    return result


@pytest.mark.parametrize("options", [{"every": 1}, {"every": 3}, {"every": 2, "kappa": 0.7, "eta": 0.4, "rho": 5.0}])
def test_bema_is_the_ema_with_its_bias_corrected(options):
    bema, values = BEMA(Point(1.5), **options), walk(12)
    given = {"kappa": 0.5, "eta": 0.2, "rho": 10.0} | options
    for index in range(0, 12, 2):
        take_steps(bema, values[index : index + 2])
        expected = literal_bema(1.5, values[: index + 2], **given)
        began = any(record.members for record in bema.trajectory)
        assert bema.update(lambda: 0.5) is (REJECT if expected is None else SOFT if began else INIT)
        assert ensemble(bema) == (None if expected is None else pytest.approx(expected))
    assert sum(bema.alphas) == pytest.approx(1)


def test_the_weights_of_bema_rebuild_it():
    bema, values = BEMA(Point(1.5), every=1), walk(6)
    for value in values:
        take_steps(bema, [value])
        bema.update(lambda: 0.5)
    first = 1.0
    for t in range(1, 7):
        first *= 1 - (10 + t) ** -0.5
    first -= 16**-0.2  # the weight of the initial weights, which is counted for the first point
    rebuilt = sum(a * v for a, v in zip(bema.alphas, values, strict=True)) + first * (1.5 - values[0])
    assert ensemble(bema) == pytest.approx(rebuilt)


def test_bema_has_the_constants_of_trl_and_refuses_others_that_make_no_sense():
    bema = BEMA(Point())
    assert (bema.kappa, bema.eta, bema.rho, bema.every) == (0.5, 0.2, 10.0, 400)
    for name, value in (("kappa", -0.1), ("kappa", 1.5), ("eta", -0.1), ("rho", 0.0), ("rho", math.inf), ("every", 0)):
        with pytest.raises(ValueError, match=f"{name} must be"):
            BEMA(Point(), **{name: value})


def test_bema_does_not_extrapolate_statistics():
    norm = nn.BatchNorm1d(1)  # its first variance is 1
    bema = BEMA(norm, every=1, batchnorm="average")
    with torch.no_grad():
        for _ in range(5):
            norm.running_var.fill_(0.01)
            bema.step()
    assert bema.average.averaged["running_var"] == bema.ema.averaged["running_var"]
    assert 0.01 < bema.average.averaged["running_var"] < 1


# SWAD


def literal_swad(losses: list[float], segments: list[float], n_s: int, n_e: int, r: float) -> list[float]:
    """Algorithm 1 of the paper, with segments for iterations; before it begins, the last segment."""
    t_s, t_e, limit = None, len(losses) - 1, None
    for i in range(len(losses)):
        if limit is None:
            if i >= n_s - 1 and losses[i - n_s + 1] == min(losses[i - n_s + 1 : i + 1]):
                t_s, limit = i - n_s + 1, (1 + r) / n_s * sum(losses[i - n_s + 1 : i + 1])
        elif i >= n_e - 1 and limit < min(losses[i - n_e + 1 : i + 1]):
            t_e = i - n_e
            break
    return segments[-1:] if t_s is None else segments[t_s : t_e + 1]


@pytest.mark.parametrize("rule", [(3, 6, 0.3), (2, 3, 0.1), (3, 2, 0.2), (1, 1, 0.0), (4, 1, 0.05), (1, 4, 0.3)])
@pytest.mark.parametrize("seed", range(4))
def test_swad_is_algorithm_1_of_its_paper(rule, seed):
    options = dict(zip(("n_converge", "n_tolerance", "tolerance_ratio"), rule, strict=True))
    swad = SWAD(Point(), greater_is_better=False, **options)
    generator = random.Random(seed)
    losses, segments = [], []
    for index in range(18):
        values = walk(generator.choice([1, 2, 5]), seed=100 * seed + index)
        losses.append(1 + (index - 6) ** 2 / 30 + generator.uniform(0, 0.4))  # falls, then rises
        segments.append(sum(values) / len(values))
        take_steps(swad, values)
        swad.update(lambda: 0.5, running_score=losses[-1])
        chosen = literal_swad(losses, segments, *rule)
        assert ensemble(swad) == pytest.approx(sum(chosen) / len(chosen))
        assert swad.members == len(chosen)
        weights = dict(zip(segments, swad.alphas, strict=True))
        assert [segment for segment in segments if weights[segment]] == chosen
        assert sum(swad.alphas) == pytest.approx(1)
    assert len(chosen) < 18 or rule[0] == 1  # which begins at the first point


def published_swad(losses: list[float], n_s: int, n_e: int, r: float) -> list[int]:
    """How often each segment counts in the code that was published with the paper, khanrc/swad."""
    latest, tolerated = deque(maxlen=n_s), deque(maxlen=n_e)
    counted: list[int] = []
    minimum, limit = None, math.inf
    for i in range(len(losses)):
        latest.append(i)
        tolerated.append(i)
        if minimum is None:
            if len(latest) == n_s and losses[latest[0]] == min(losses[j] for j in latest):
                minimum, limit = latest[0], (1 + r) / n_s * sum(losses[j] for j in latest)
                before = list(tolerated)[: n_e - n_s + 1]
                high = [place for place, j in enumerate(before) if losses[j] > limit]
                counted += before[(high[-1] + 1 if high else 0) + 1 :]
        elif tolerated[0] >= minimum:
            if limit < min(losses[j] for j in tolerated):
                break
            counted.append(tolerated[0])
    else:
        tolerated.popleft()
        while tolerated and min(losses[j] for j in tolerated) <= limit:
            counted.append(tolerated.popleft())
    return [counted.count(j) for j in range(len(losses))]


@pytest.mark.parametrize(
    ("losses", "published", "ours"),
    [
        # A steep fall: the same.
        ([3, 2.5, 2, 1.8, 1.6, 1, 1.1, 1.1, 1.2, 1.2, 1.1] + [2] * 7, 5 * [0] + 6 * [1] + 7 * [0], "as published"),
        # A low segment before the minimum: begins there, and counts the minimum twice.
        ([3, 2.9, 2.8, 2.7, 1.3, 1.2, 1] + 5 * [1.2] + 8 * [2], 5 * [0] + [1, 2, 1, 1, 1, 1, 1] + 8 * [0], 6),
        # An early minimum: counted three times, and the two segments after it twice.
        ([1.0] + 6 * [1.1, 1.2], [3, 2, 2] + 10 * [1], 0),
    ],
)
def test_swad_differs_from_the_published_code_only_around_the_minimum(losses, published, ours):
    assert published_swad(losses, 3, 6, 0.3) == published
    swad = SWAD(Point(), greater_is_better=False)
    for index, loss in enumerate(losses):
        take_steps(swad, [float(index)])
        swad.update(running_score=loss)
    end = len(published) - published[::-1].index(1)
    first = published.index(1) if ours == "as published" else ours
    assert swad.alphas == [1 / (end - first) if first <= index < end else 0 for index in range(len(losses))]


@pytest.mark.parametrize("n_tolerance", [1, 2, 3])
def test_swad_keeps_its_valley_when_the_run_diverges(n_tolerance):
    swad = SWAD(Point(), n_converge=2, n_tolerance=n_tolerance)
    for index, score in enumerate([0.1, 0.5, 0.4, 0.45]):
        take_steps(swad, [float(index)])
        swad.update(lambda: 0.5, running_score=score)
    assert ensemble(swad) == 2  # the mean of points 1 to 3
    for _ in range(n_tolerance + 1):
        take_steps(swad, [math.nan])
        with pytest.warns(UserWarning, match="counts as worse than any number"):
            swad.update(lambda: swad.model.value, running_score=math.nan)
    assert swad.trajectory.decisions[-1] is REJECT
    assert (ensemble(swad), swad.score) == (2, 2)
    assert swad.alphas == [0, 1 / 3, 1 / 3, 1 / 3] + [0] * (n_tolerance + 1)


@pytest.mark.parametrize("evaluated", [True, False])
@pytest.mark.parametrize("n_converge", [1, 2])
def test_swad_returns_to_the_statistics_of_its_valley_when_the_run_diverges(n_converge, evaluated):
    model = nn.BatchNorm1d(2)
    swad = SWAD(model, n_converge=n_converge, n_tolerance=2, batchnorm="copy")

    def move(value: float, score: float) -> None:
        with torch.no_grad():
            for tensor in (model.weight, model.bias, model.running_mean, model.running_var):
                tensor.fill_(value)
        swad.step()
        mean = model.running_mean
        swad.update((lambda: mean[0].item()) if evaluated else None, running_score=score)

    for value, score in enumerate([0.5, 0.4, 0.45]):
        move(float(value), score)
    for _ in range(2):
        with pytest.warns(UserWarning, match="counts as worse than any number"):
            move(math.nan, math.nan)
    assert swad.trajectory.decisions[-1] is REJECT
    assert swad.score == (2 if evaluated else None)
    with swad.swapped():
        assert model.weight.tolist() == [1, 1]  # the mean of points 0 to 2
        assert model.running_mean.tolist() == model.running_var.tolist() == [2, 2]  # those of point 2


def test_swad_returns_to_the_statistics_of_a_point_before_its_valley_was_found():
    model = nn.BatchNorm1d(1)
    swad = SWAD(model, n_converge=3, n_tolerance=2, batchnorm="copy")
    # The valley begins at point 0, which is known at point 2; points 2 and 3 are worse than its limit.
    for value, score in enumerate([1.0, 0.9, 0.1, 0.1]):
        with torch.no_grad():
            model.weight.fill_(value)
            model.running_mean.fill_(value)
        swad.step()
        swad.update(running_score=score)
    assert swad.alphas == [0.5, 0.5, 0, 0]
    with swad.swapped():
        assert (model.weight.item(), model.running_mean.item()) == (0.5, 1)


def test_a_state_without_an_average_that_swad_may_return_to_is_refused():
    swad = SWAD(Point(), n_converge=2, n_tolerance=3)
    for value, score in enumerate([0.5, 0.45, 0.1]):
        take_steps(swad, [float(value)])
        swad.update(running_score=score)
    state = swad.state_dict()
    assert {"earlier-0", "earlier-1"} <= set(state["parts"])
    for name in ("earlier-0", "earlier-1"):
        others = {key: value for key, value in state.items() if not key.startswith(f"{name}.")}
        others["parts"] = [part for part in state["parts"] if part != name]
        with pytest.raises(ValueError, match=f"The average '{name}.averaged' of this state is missing"):
            SWAD(Point(), n_converge=2, n_tolerance=3).load_state_dict(others)


def test_swads_valley_of_a_score_mirrors_that_of_a_loss():
    for sign in (1, -1):
        swad = SWAD(Point(), greater_is_better=sign > 0, n_converge=2, n_tolerance=2, tolerance_ratio=0.1)
        for index, score in enumerate([1.0, 2.0, 1.99, 1.9, 1.7, 1.6]):
            take_steps(swad, [float(index)])
            swad.update(running_score=score if sign > 0 else 4 - score)
        # 2.0 is not beaten by 1.99; 1.7 and 1.6 (of losses 2.3 and 2.4) are more than a tenth worse than their mean.
        assert swad.alphas == ([0, 1 / 3, 1 / 3, 1 / 3, 0, 0])
        assert swad.trajectory.decisions == [INIT, HARD, SOFT, SOFT, SOFT, REJECT]


@pytest.mark.parametrize("greater_is_better", [True, False])
def test_scores_that_do_not_change_are_a_valley_that_does_not_end(greater_is_better):
    # The computed mean of three times 0.1 or 0.7 is greater or less than each of them.
    for score in (0.1, 0.7):
        swad = SWAD(Point(), greater_is_better=greater_is_better, tolerance_ratio=0.0)
        for index in range(10):
            take_steps(swad, [float(index)])
            swad.update(running_score=score)
        assert swad.alphas == [0.1] * 10


def test_swad_refuses_windows_and_tolerances_out_of_range():
    for name, value in (("n_converge", 0), ("n_tolerance", 0), ("n_tolerance", 1.5), ("tolerance_ratio", -0.1)):
        with pytest.raises(ValueError, match=f"{name} must be"):
            SWAD(Point(), **{name: value})
    with pytest.raises(TypeError, match="SWAD decides by validation"):
        SWAD(Point()).update()
    with pytest.raises(ValueError, match="saved with n_tolerance=5, this strategy has n_tolerance=6"):
        SWAD(Point()).load_state_dict(SWAD(Point(), n_tolerance=5).state_dict())


@pytest.mark.parametrize("seed", range(4))
def test_swad_max_starts_at_the_best_running_model_and_ends_at_the_best_mean(seed):
    swad, generator = SWADMax(Point()), random.Random(seed)
    best_running = best_score = -math.inf
    window: list[float] = []
    final: list[float] = []
    for index in range(15):
        values = walk(3, seed=100 * seed + index)
        running, score = generator.choice([0.1, 0.2, 0.3, 0.4]), generator.choice([0.2, 0.3, 0.4, 0.5, 0.6])
        if running > best_running:
            best_running, window = running, []
        window.append(sum(values) / 3)
        if score > best_score:
            best_score, final = score, list(window)
        take_steps(swad, values)
        seen = []
        swad.update(lambda score=score, seen=seen: seen.append(swad.model.value) or score, running_score=running)
        assert seen == [pytest.approx(sum(window) / len(window))]
        assert ensemble(swad) == pytest.approx(sum(final) / len(final))
        assert (swad.members, swad.score) == (len(final), best_score)
        assert sum(swad.alphas) == pytest.approx(1)
        assert sum(alpha > 0 for alpha in swad.alphas) == len(final)


# PowerEMA


def literal_exponent(width: float) -> float:
    """γ, the root of the paper's cubic."""
    return max(root.real for root in np.roots([1, 7, 16 - width**-2, 12 - width**-2]))


def literal_power_ema(values: list[float], width: float) -> float:
    """The mean with weights τ^γ over the run so far, by the recurrence."""
    gamma, average = literal_exponent(width), 0.0
    for t, value in enumerate(values, start=1):
        beta = (1 - 1 / t) ** (gamma + 1)
        average = beta * average + (1 - beta) * value
    return average


def trained_power_ema(points: int = 10, **options) -> tuple[PowerEMA, list[float]]:
    power = PowerEMA(Point(), **options)
    values = [math.sin(t / 40) + t / 100 for t in range(40 * points)]
    for point in range(points):
        take_steps(power, values[40 * point : 40 * point + 40])
        power.update(lambda: 0.5)
    return power, values


def test_power_ema_tracks_two_widths():
    power, values = trained_power_ema()
    assert ensemble(power) == pytest.approx(literal_power_ema(values, 0.1))
    for width in (0.05, 0.1):
        with power.reconstructed(width):
            assert power.model.value == pytest.approx(literal_power_ema(values, width))
    assert power.alphas == pytest.approx(np.diff([0.0, *cumulated()]))
    assert sum(power.alphas) == pytest.approx(1)


def cumulated() -> list[float]:
    """The weight of the first 40, 80, … of 400 steps: the average of a run that is 1 there and 0 afterwards."""
    return [literal_power_ema([1.0] * n + [0.0] * (400 - n), 0.1) for n in range(40, 401, 40)]


def test_a_width_between_is_the_nearest_combination_of_the_tracked_ones():
    power, values = trained_power_ema(points=16)
    # Of τ^a and τ^b on [0, 1], with the weights of a profile, the inner product is (a + 1)(b + 1) / (a + b + 1).
    wanted, *tracked = [literal_exponent(width) for width in (0.07, 0.1, 0.05)]
    products = [[(a + 1) * (b + 1) / (a + b + 1) for b in tracked] for a in tracked]
    wide, narrow = np.linalg.solve(products, [(a + 1) * (wanted + 1) / (a + wanted + 1) for a in tracked])
    expected = wide * literal_power_ema(values, 0.1) + narrow * literal_power_ema(values, 0.05)
    with power.reconstructed(0.07):
        assert power.model.value == pytest.approx(expected / (wide + narrow), abs=1e-4)


@pytest.mark.parametrize(("width", "snapshots", "tolerance"), [(0.04, 3, 0.002), (0.07, 8, 0.002), (0.15, 8, 0.05)])
def test_other_widths_are_reconstructed_after_training(width, snapshots, tolerance):
    power, values = trained_power_ema(points=16, snapshots=snapshots)
    expected = literal_power_ema(values, width)
    with power.reconstructed(width):
        assert power.model.value == pytest.approx(expected, abs=tolerance)
    assert power.model.value == values[-1]
    assert sum(not part.is_empty for part in power.parts.values()) == 1 + 2 * (snapshots + 1)
    resumed = PowerEMA(Point(), snapshots=snapshots)
    resumed.load_state_dict(power.state_dict())
    resumed.apply(width)
    power.apply(width)
    assert resumed.model.value == power.model.value == pytest.approx(expected, abs=tolerance)


def test_a_width_has_the_statistics_of_the_last_step_whatever_is_in_the_model():
    model = nn.BatchNorm1d(1)
    power = PowerEMA(model, snapshots=2, batchnorm="copy")
    for point in range(4):
        for _ in range(20):
            with torch.no_grad():
                model.weight.fill_(point)
                model.running_mean.fill_(point)
            power.step()
        power.update(lambda: 0.5)
    model.running_mean.fill_(99.0)  # as after another strategy's apply()
    with power.swapped():
        wide = model.weight.item()
    with power.reconstructed(0.1):
        assert (model.weight.item(), model.running_mean.item()) == (pytest.approx(wide), 3)
    assert model.running_mean.item() == 99
    power.apply(0.1)
    assert (model.weight.item(), model.running_mean.item()) == (pytest.approx(wide), 3)


def test_snapshots_of_a_power_ema_stay_spread_over_the_run():
    kept = {}
    for snapshots in (1, 3):
        power, _ = trained_power_ema(points=40, snapshots=snapshots)
        names = (name for name, part in power.parts.items() if name.startswith("wide-") and not part.is_empty)
        kept[snapshots] = sorted(int(name.removeprefix("wide-")) for name in names)
    assert kept == {1: [1280, 1600], 3: [880, 1080, 1360, 1600]}


def test_power_ema_refuses_widths_out_of_range_and_widths_it_did_not_track():
    for options, name in (({"narrow": 0.0}, "narrow"), ({"wide": 0.3}, "wide"), ({"narrow": 0.1}, "narrow")):
        with pytest.raises(ValueError, match=f"{name} must be"):
            PowerEMA(Point(), **options)
    with pytest.raises(ValueError, match="snapshots must be a whole number of at least 0"):
        PowerEMA(Point(), snapshots=-1)
    power, _ = trained_power_ema(points=4)
    with pytest.raises(ValueError, match=r"width 0\.2 cannot be reconstructed from the tracked widths 0\.05 and 0\.1"):
        power.apply(0.2)
    with pytest.raises(ValueError, match=r"width must be in \[0.001, 0.28\]"), power.reconstructed(0.5):
        pass
    with pytest.raises(ValueError, match=r"saved with the widths \[0\.1, 0\.05\]"):
        PowerEMA(Point(), wide=0.2).load_state_dict(power.state_dict())
