"""Dense ASWA: the rule against a literal transcription, the means of the steps, resuming inside a segment."""

from __future__ import annotations

import copy
import math
import random

import pytest
import torch
from point import Point, ensemble, take_steps
from torch import nn

from aswa_hf import ASWA, Decision, DenseASWA
from aswa_hf.checkpoint import load_state, save_state

INIT, HARD, SOFT, REJECT = Decision.INIT, Decision.HARD, Decision.SOFT, Decision.REJECT


def decide_on(dense, values: list[float], *scores: float) -> tuple[Decision, float | None]:
    """Steps through `values`; the scores are those of the running model, the snapshot and the look-ahead."""
    take_steps(dense, values)
    decision = dense.update(iter(scores).__next__)
    assert dense.model.value == values[-1]
    return decision, ensemble(dense)


def test_all_decisions_by_hand():
    dense = DenseASWA(Point())
    assert decide_on(dense, [1.0, 3.0], 0.5, 0.4) == (INIT, 3.0)
    assert decide_on(dense, [4.0, 6.0], 0.1, 0.2, 0.6) == (SOFT, 4.0)
    assert decide_on(dense, [0.0, 6.0, 6.0], 0.1, 0.9, 0.7) == (HARD, 4.0)
    assert decide_on(dense, [8.0], 0.8, 0.9, 0.9) == (REJECT, 4.0)  # ties change nothing
    assert decide_on(dense, [1.0, 7.0], 0.95, 0.94, 0.93) == (HARD, 7.0)
    assert decide_on(dense, [1.0, 2.0], 0.1, 0.1, 0.96) == (SOFT, 4.25)
    assert dense.alphas == [0, 0, 0, 0, 0.5, 0.5]
    assert dense.members == 2
    assert dense.score == 0.96
    records = dense.trajectory
    assert [record.running_score for record in records] == [0.5, 0.1, 0.1, 0.8, 0.95, 0.1]
    assert [record.snapshot_score for record in records] == [0.4, 0.2, 0.9, 0.9, 0.94, 0.1]
    assert [record.lookahead_score for record in records] == [None, 0.6, 0.7, 0.9, 0.93, 0.96]
    assert [record.score for record in records] == [0.5, 0.6, 0.9, 0.9, 0.95, 0.96]
    assert type(records).from_json(records.to_json()) == records


def test_the_first_point_takes_the_better_of_snapshot_and_running_model_and_the_snapshot_on_a_tie():
    for running, snapshot, expected in ((0.4, 0.5, 2.0), (0.5, 0.4, 3.0), (0.5, 0.5, 2.0), (math.nan, 0.1, 2.0)):
        dense = DenseASWA(Point())
        if math.isnan(running):
            with pytest.warns(UserWarning, match="running model is nan"):
                assert decide_on(dense, [1.0, 3.0], running, snapshot) == (INIT, expected)
        else:
            assert decide_on(dense, [1.0, 3.0], running, snapshot) == (INIT, expected)
        assert dense.score == max(s for s in (running, snapshot) if not math.isnan(s))


class Literal:
    """The rule as the documentation states it, on one weight in double precision."""

    def __init__(self, greater_is_better: bool, score_snapshot: bool):
        self.sign, self.score_snapshot = (1 if greater_is_better else -1), score_snapshot
        self.theta, self.n, self.score = None, 0, None

    def usable(self, score: float | None) -> float:
        return -math.inf if score is None or not math.isfinite(score) else self.sign * score

    def decide(self, values: list[float], s: float, s_mean: float | None, s_hat: float) -> str:
        mean = sum(values) / len(values)
        candidate, c = values[-1], s
        if self.score_snapshot and not self.usable(s) > self.usable(s_mean):
            candidate, c = mean, s_mean
        if self.n == 0:
            if self.usable(c) == -math.inf:
                return "reject"
            self.theta, self.n, self.score = candidate, 1, c
            return "init"
        if self.usable(c) > self.usable(s_hat) and self.usable(c) > self.usable(self.score):
            self.theta, self.n, self.score = candidate, 1, c
            return "hard"
        if self.usable(s_hat) > self.usable(self.score):
            self.theta, self.n, self.score = (self.n * self.theta + mean) / (self.n + 1), self.n + 1, s_hat
            return "soft"
        return "reject"


@pytest.mark.filterwarnings("ignore:The validation score")
@pytest.mark.parametrize("greater_is_better", [True, False])
@pytest.mark.parametrize("score_snapshot", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_the_rule_is_its_literal_transcription(seed, greater_is_better, score_snapshot):
    random.seed(seed)
    options = {"greater_is_better": greater_is_better, "score_snapshot": score_snapshot}
    dense, literal = DenseASWA(Point(), **options), Literal(greater_is_better, score_snapshot)
    best = -math.inf
    for _ in range(12):
        values = [random.randint(-8, 8) / 4 for _ in range(random.choice([1, 2, 4]))]
        # Few distinct scores, so that ties are common; better ones become possible over time.
        scores = [
            random.choice([math.nan, math.inf, *(k / 8 for k in range(len(dense.trajectory) + 2))]) for _ in "123"
        ]
        running, snapshot, lookahead = scores
        given = [running] + [snapshot] * score_snapshot + [lookahead] * (dense.members > 0)
        assert decide_on(dense, values, *given)[0].value == literal.decide(values, running, snapshot, lookahead)
        assert (dense.members, dense.score) == (literal.n, literal.score)
        assert ensemble(dense) == (None if literal.theta is None else pytest.approx(literal.theta, abs=1e-5))
        # Never below any epoch's score, nor any snapshot's.
        best = max([best, literal.usable(running), *([literal.usable(snapshot)] if score_snapshot else [])])
        assert literal.usable(dense.score) >= best
    if dense.members:
        assert sum(dense.alphas) == pytest.approx(1)


def test_alphas_rebuild_the_ensemble_from_the_means():
    torch.manual_seed(0)
    dense, means = DenseASWA(Point()), []
    for epoch, values in enumerate(torch.randn(6, 5).tolist()):
        take_steps(dense, values)
        scores = [0.0, 10 * epoch + 1.0, 10 * epoch + (2.0 if epoch % 3 else 0.5)]
        dense.update(iter(scores).__next__)
        means.append(sum(values) / len(values))
    assert {decision.value for decision in dense.trajectory.decisions} == {"init", "soft", "hard"}
    assert ensemble(dense) == pytest.approx(sum(a * m for a, m in zip(dense.alphas, means, strict=True)), abs=1e-6)


# What a segment is


def test_every_second_step_is_counted_from_the_start_of_the_segment():
    dense = DenseASWA(Point(), every=2)
    assert decide_on(dense, [9.0, 1.0, 9.0, 3.0, 9.0], 0.1, 0.2) == (INIT, 2.0)
    assert decide_on(dense, [9.0, 4.0], 0.1, 0.1, 0.3) == (SOFT, 3.0)
    # No second step in this segment: the running weights are its snapshot.
    assert decide_on(dense, [6.0], 0.1, 0.1, 0.4) == (SOFT, 4.0)


def test_without_step_the_running_weights_are_the_snapshot_with_a_warning():
    dense = DenseASWA(Point(2.0))
    with pytest.warns(UserWarning, match=r"DenseASWA\.step\(\) was not called after optimizer steps") as caught:
        assert dense.update(lambda: 0.5) is INIT
    assert caught[0].filename == __file__
    assert ensemble(dense) == 2.0


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_an_interval_that_is_not_a_number_of_steps_is_refused(every):
    with pytest.raises(ValueError, match="every must be a whole number of at least 1"):
        DenseASWA(Point(), every=every)


def test_it_needs_something_to_decide_by():
    with pytest.raises(TypeError, match="DenseASWA decides by validation"):
        DenseASWA(Point()).update(running_score=0.5)


def test_without_hard_updates_only_the_lookahead_is_evaluated():
    dense, seen = DenseASWA(Point(), hard_updates=False), []

    def evaluate() -> float:
        seen.append(dense.model.value)
        return float(len(seen))

    take_steps(dense, [1.0, 3.0])
    assert dense.update(evaluate) is INIT
    take_steps(dense, [4.0, 8.0])
    assert dense.update(evaluate) is SOFT
    assert seen == [3.0, 2.0, 4.0]


# Like ASWA


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def batches() -> list[torch.Tensor]:
    return list(torch.randn(5, 8, 4, generator=torch.Generator().manual_seed(1)))


def move(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
        model.train()(torch.randn(8, 4, generator=generator).to(parameter.dtype))  # moves the BatchNorm statistics


def states_equal(ours: dict, theirs: dict) -> bool:
    tensors = [key for key, value in ours.items() if isinstance(value, dict)]
    return list(ours) == list(theirs) and all(
        ours[key].keys() == theirs[key].keys() and all(torch.equal(ours[key][n], theirs[key][n]) for n in ours[key])
        if key in tensors
        else ours[key] == theirs[key]
        for key in ours
    )


@pytest.mark.parametrize("batchnorm", ["recalibrate", "average", "copy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_one_step_per_decision_and_no_score_of_the_snapshot_it_is_aswa_bit_for_bit(batchnorm, dtype):
    torch.manual_seed(0)
    model = network().to(dtype)
    options = {"batchnorm": batchnorm, "train_batches": [batch.to(dtype) for batch in batches()]}
    aswa, dense = ASWA(model, **options), DenseASWA(model, score_snapshot=False, **options)
    for point, scores in enumerate([(0.5, 0.4), (0.4, 0.6), (0.9, 0.7), (0.1, 0.2), (0.2, 0.95), (0.3, 0.97)]):
        move(model, point)
        dense.step()
        decisions = [s.update(iter(scores[:1] if point == 0 else scores).__next__) for s in (aswa, dense)]
        assert decisions[0] is decisions[1]
        theirs = aswa.state_dict()
        ours = {key: value for key, value in dense.state_dict().items() if key in theirs}
        assert states_equal(ours | {"strategy": "aswa"}, theirs)
    assert aswa.alphas == dense.alphas
    assert {d.value for d in aswa.trajectory.decisions} == {"init", "soft", "hard", "reject"}


def test_every_candidate_is_evaluated_with_statistics_of_its_own_weights():
    torch.manual_seed(0)
    model = network()
    dense = DenseASWA(model, train_batches=batches())

    def evaluate() -> float:
        seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return next(scores)

    for point, wanted in enumerate([(0.1, 0.5), (0.1, 0.2, 0.6), (0.1, 0.9, 0.2)]):
        seen, scores = [], iter(wanted)
        for step in range(3):
            move(model, 10 * point + step)
            dense.step()
        running = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        dense.update(evaluate)
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in running.items())
        for candidate in seen[1:]:
            hidden = torch.stack([batch @ candidate["0.weight"].T + candidate["0.bias"] for batch in batches()])
            torch.testing.assert_close(candidate["1.running_mean"], hidden.mean((0, 1)))
        with dense.swapped():
            kept = seen[wanted.index(max(wanted))]
            assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in kept.items())


def test_bf16_weights_are_averaged_in_float32():
    torch.manual_seed(0)
    model = nn.Linear(40, 30, bias=False).bfloat16()
    dense, snapshots = DenseASWA(model), []
    for _ in range(64):
        with torch.no_grad():
            model.weight.add_(0.1 * torch.randn(30, 40).bfloat16())
        snapshots.append(model.weight.detach().double())
        dense.step()
    dense.update(iter([0.1, 0.5]).__next__)
    mean = torch.stack(snapshots).mean(0)
    torch.testing.assert_close(dense.average.averaged["weight"].double(), mean, rtol=1e-5, atol=1e-6)


# Resuming


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_run_resumed_in_the_middle_of_a_segment_equals_one_that_was_not_interrupted(cut, tmp_path):
    scores = [(0.5, 0.4), (0.1, 0.2, 0.6), (0.1, 0.9, 0.7)]

    def run(dense: DenseASWA, steps: range) -> None:
        for step in steps:
            move(dense.model, step)
            dense.step()
            if step % 3 == 2:
                dense.update(iter(scores[step // 3]).__next__)

    torch.manual_seed(0)
    model = network()
    whole, first, resumed = (DenseASWA(copy.deepcopy(model), train_batches=batches()) for _ in range(3))
    run(whole, range(9))
    run(first, range(cut))
    save_state(tmp_path, {"dense": first})
    resumed.model.load_state_dict(first.model.state_dict())
    load_state(tmp_path, {"dense": resumed})
    assert states_equal(resumed.state_dict(), first.state_dict())
    run(resumed, range(cut, 9))
    assert states_equal(resumed.state_dict(), whole.state_dict())
    assert whole.trajectory.decisions == [INIT, SOFT, HARD]


@pytest.mark.parametrize(("name", "value"), [("every", 2), ("score_snapshot", False), ("hard_updates", False)])
def test_a_state_of_another_rule_is_refused(name, value):
    dense, other = DenseASWA(Point()), DenseASWA(Point(), **{name: value})
    with pytest.raises(ValueError, match=f"saved with {name}={value}"):
        dense.load_state_dict(other.state_dict())


def test_a_failing_evaluation_changes_nothing():
    for failing in (1, 2, 3):
        dense = DenseASWA(Point())
        decide_on(dense, [1.0, 3.0], 0.5, 0.4)
        take_steps(dense, [5.0, 6.0])
        before, calls = dense.state_dict(), []

        def evaluate(failing=failing, calls=calls) -> float:
            calls.append(1)
            if len(calls) == failing:
                raise RuntimeError("validation failed")
            return 0.9

        with pytest.raises(RuntimeError, match="validation failed"):
            dense.update(evaluate)
        assert dense.model.value == 6.0
        assert states_equal(dense.state_dict(), before)
