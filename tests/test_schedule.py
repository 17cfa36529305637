"""When a run decides: what `every` may be, what `max_eval_share` skips, which examples `fixed_subset` takes."""

import pytest
import torch
from datasets import Dataset, IterableDataset

from aswa_hf.schedule import EvaluationBudget, Every, check_share, check_subset, fixed_subset

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("every", "unit", "count"),
    [
        ("epoch", "epoch", 1),
        ("evaluation", "evaluation", 1),
        (3, "epoch", 3),
        ("3 epochs", "epoch", 3),
        ("500 steps", "step", 500),
        ("1 step", "step", 1),
    ],
)
def test_every_is_epochs_steps_or_evaluations(every, unit, count):
    assert (Every.parse(every).unit, Every.parse(every).count) == (unit, count)


@pytest.mark.parametrize(
    "every", [0, -1, 0.5, 2.0, True, None, "0 steps", "-5 steps", "0.5 steps", "500", "steps", ""]
)
def test_every_that_says_nothing_is_refused(every):
    with pytest.raises(ValueError, match=r"a whole number of epochs, or .* '500 steps', got"):
        Every.parse(every)
    with pytest.raises(ValueError, match=r"got 'evaluation'"):
        Every.parse("evaluation", evaluations=False)


def test_steps_are_due_at_multiples_and_at_the_last_one():
    every = Every.parse("4 steps")
    assert [step for step in range(1, 11) if every.is_due_at_step(step, 10)] == [4, 8, 10]
    assert not any(Every.parse("epoch").is_due_at_step(step, 10) for step in range(1, 11))


class Clock:
    """Replaces `time.perf_counter`."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr("aswa_hf.schedule.time.perf_counter", found := Clock())
    return found


def test_a_decision_is_skipped_if_it_would_take_more_than_the_share(clock):
    budget = EvaluationBudget(0.25)
    asked = []
    for _ in range(8):
        clock.now += 10  # seconds of training
        asked.append(budget.exceeded(CPU))
        if not asked[-1]:
            with budget.spending():
                clock.now += 6
    # 6 of 16 s; then 12 would be of 32 (0.375), 42 (0.29), 52 (0.23); then 18 of 68 (0.26), 78 (0.23); 24 of 94 (0.26)
    assert asked == [False, True, True, False, True, False, True, False]
    assert budget.skipped == 4
    assert budget.spent == 24
    assert "24.0 of 104.0 seconds" in budget.why_skipped()
    assert "max_eval_share=0.25" in budget.why_skipped()
    assert not budget.exceeded(CPU, is_last=True)
    assert budget.skipped == 4


def test_a_resumed_run_continues_the_account(clock):
    budget = EvaluationBudget(0.25)
    with budget.spending():
        clock.now += 6
    clock.now += 4
    state = budget.state_dict()
    clock.now += 1000  # not running
    resumed = EvaluationBudget(0.25)
    resumed.load_state_dict(state)
    assert (resumed.spent, resumed.seconds) == (6, 10)
    assert resumed.exceeded(CPU)
    assert not EvaluationBudget(None).exceeded(CPU)


def test_a_fixed_subset_has_the_same_examples_at_every_call():
    rows = list(range(100))
    taken = list(fixed_subset(rows, 10))
    assert taken == list(fixed_subset(rows, 10)) == sorted(taken)
    assert len(set(taken)) == 10
    assert taken != rows[:10]
    assert list(fixed_subset(rows, 0.1)) == taken
    assert list(fixed_subset(Dataset.from_dict({"x": rows}), 10)["x"]) == taken
    assert fixed_subset(rows, 100) is rows
    assert len(fixed_subset(rows, 0.001)) == 1


def test_a_streamed_dataset_gives_its_first_examples():
    stream = IterableDataset.from_generator(lambda: ({"x": i} for i in range(9)))
    assert [row["x"] for row in fixed_subset(stream, 3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="needs a dataset with a length, got IterableDataset"):
        fixed_subset(stream, 0.5)


@pytest.mark.parametrize("share", [0, -0.1, 1.5, "0.1", True])
def test_a_share_is_above_0_and_at_most_1(share):
    with pytest.raises(ValueError, match="max_eval_share must be a share of the time"):
        check_share(share)


@pytest.mark.parametrize("size", [0, -1, 1.0, 1.5, "10", True])
def test_a_subset_is_a_number_of_examples_or_a_fraction(size):
    with pytest.raises(ValueError, match="eval_subset must be a whole number of examples"):
        check_subset(size)
