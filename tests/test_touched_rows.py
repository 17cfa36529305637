"""Averages of tables of which an optimizer writes few rows: as those of any weights, without a pass over the table."""

import copy

import pytest
import torch
from torch import nn

from aswa_hf import ASWA, EMA, SWA, DenseASWA
from aswa_hf._utils import touched_rows
from aswa_hf.averaging import WeightAverage
from aswa_hf.kge.optimizers import RowwiseAdagrad

ROWS = 20


class Table(nn.Module):
    """An embedding whose gradient is sparse, and a weight whose gradient is not."""

    def __init__(self, rows=ROWS):
        super().__init__()
        self.embedding = nn.Embedding(rows, 3, sparse=True)
        self.scale = nn.Parameter(torch.ones(1, 3))

    def train_on(self, optimizer, *rows):
        optimizer.zero_grad()
        (self.embedding(torch.tensor(rows)) * self.scale).exp().sum().backward()
        optimizer.step()

    @property
    def table(self):
        return self.embedding.weight


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Table()


def started(model):
    """An optimizer that has written rows 1 and 2, and an average taken after that."""
    optimizer = RowwiseAdagrad(model.parameters(), lr=0.1)
    model.train_on(optimizer, 1, 2)
    average = WeightAverage(model)
    average.assign()
    return optimizer, average


def rows_of(average):
    return average._different["embedding.weight"].indices().tolist()


def test_the_rows_that_may_differ_are_those_written_since_the_assignment(model):
    optimizer, average = started(model)
    assert rows_of(average) == []
    model.train_on(optimizer, 4, 7, 4)
    model.train_on(optimizer, 7)
    assert rows_of(average) == [4, 7]
    average.blend(0.5)
    assert rows_of(average) == [4, 7]
    average.assign()
    assert rows_of(average) == []
    assert torch.equal(average.averaged["embedding.weight"], model.table)


def test_lookahead_blend_and_swap_are_those_of_the_whole_table(model):
    optimizer, average = started(model)
    expected = model.table.detach().clone()
    for members, rows in enumerate([(4, 7), (0, 4), (19,)], start=1):
        model.train_on(optimizer, *rows)
        running, weight = model.table.detach().clone(), 1 / (members + 1)
        expected = torch.lerp(expected, running, weight)
        with average.lookahead(weight):
            assert torch.equal(model.table, expected)
        assert torch.equal(model.table, running)
        average.blend(weight)
        assert torch.equal(average.averaged["embedding.weight"], expected)
        with average.swapped():
            assert torch.equal(model.table, expected)
        assert torch.equal(model.table, running)
        assert rows_of(average) == sorted({4, 7, *((0,) if members > 1 else ()), *((19,) if members > 2 else ())})


def test_the_other_rows_are_neither_read_nor_written(monkeypatch):
    monkeypatch.setattr("aswa_hf.averaging._SAMPLED", 2)
    model = Table(rows=101)
    optimizer, average = started(model)
    model.train_on(optimizer, 5)
    # Not what the average of row 8 is: who reads that row would notice.
    average.averaged["embedding.weight"][8] = torch.nan
    running = model.table.detach().clone()
    with average.lookahead(0.5):
        assert model.table.isfinite().all()
        assert (model.table != running).any(1).nonzero().flatten().tolist() == [5]
    average.blend(0.5)
    average.assign()
    assert average.averaged["embedding.weight"].isnan().any(1).nonzero().flatten().tolist() == [8]


def test_the_running_weights_are_restored_after_an_error(model):
    optimizer, average = started(model)
    model.train_on(optimizer, 4, 7)
    before = copy.deepcopy(model.state_dict())
    for block in (average.lookahead(0.5), average.swapped()):
        with pytest.raises(KeyError), block:
            raise KeyError
        assert all(map(torch.equal, model.state_dict().values(), before.values()))
    assert rows_of(average) == [4, 7]


def load_other_weights(model, optimizer):
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})


def change_one_row(model, optimizer):
    with torch.no_grad():
        model.table[11] += 1


def take_a_dense_step(model, optimizer):
    model.table.grad = torch.ones_like(model.table)
    optimizer.step()


def move_the_weights(model, optimizer):
    model.table.data = model.table.data * 2


def scale_all_rows_unnoticed(model, optimizer):
    model.table.data.mul_(2)


def change_a_row_unnoticed(model, optimizer):
    model.table.data[11] += 1
    touched_rows.forget(model.table)


def step_in_the_swap_of_another(model, optimizer):
    other = WeightAverage(model)
    other.assign()
    with other.swapped():
        model.train_on(optimizer, 3)


CHANGES = [
    load_other_weights, change_one_row, take_a_dense_step, move_the_weights, scale_all_rows_unnoticed,
    change_a_row_unnoticed, step_in_the_swap_of_another,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("then", [(), (5,)], ids=["", "and a step"])
def test_every_other_change_of_the_table_is_averaged_too(model, change, then):
    optimizer, average = started(model)
    model.train_on(optimizer, 4, 7)
    before = average.averaged["embedding.weight"].clone()
    change(model, optimizer)
    if then:
        model.train_on(optimizer, *then)
    running = model.table.detach().clone()
    with average.lookahead(0.25):
        assert torch.equal(model.table, torch.lerp(before, running, 0.25))
    assert torch.equal(model.table, running)
    average.blend(0.25)
    assert torch.equal(average.averaged["embedding.weight"], torch.lerp(before, running, 0.25))
    average.assign()
    assert torch.equal(average.averaged["embedding.weight"], running)


def test_averages_inside_the_swap_of_another_are_those_of_what_is_in_the_model(model):
    optimizer, outer = started(model)
    inner = WeightAverage(model)
    inner.assign()
    model.train_on(optimizer, 4)
    outer.blend(0.5)
    model.train_on(optimizer, 9)
    running = model.table.detach().clone()
    first, second = outer.averaged["embedding.weight"], inner.averaged["embedding.weight"]
    with outer.swapped():
        with inner.lookahead(0.5):
            assert torch.equal(model.table, torch.lerp(second, first, 0.5))
        assert torch.equal(model.table, first)
        expected = torch.lerp(second, first, 0.5)
        inner.blend(0.5)
        assert torch.equal(inner.averaged["embedding.weight"], expected)
    assert torch.equal(model.table, running)
    with inner.swapped():
        assert torch.equal(model.table, expected)
    assert torch.equal(model.table, running)


def test_an_average_that_was_loaded_or_copied_finds_the_rows_again(model):
    optimizer, average = started(model)
    model.train_on(optimizer, 4, 7)
    loaded, copied = WeightAverage(model), copy.deepcopy(average._different)
    loaded.load(*average.whole())
    model.train_on(optimizer, 9)
    with loaded.swapped():
        assert torch.equal(model.table, average.averaged["embedding.weight"])
    assert rows_of(loaded) == rows_of(average) == [4, 7, 9]
    average._different = copied  # nothing follows these
    with average.swapped():
        assert torch.equal(model.table, average.averaged["embedding.weight"])
    assert rows_of(average) == [4, 7, 9]


def test_of_a_table_of_which_most_rows_differ_all_are_averaged(model):
    optimizer, average = started(model)
    before = average.averaged["embedding.weight"].clone()
    model.train_on(optimizer, *range(11))
    running = model.table.detach().clone()
    assert average._different_rows(average._running()[0]) == {}
    average.blend(0.5)
    assert torch.equal(average.averaged["embedding.weight"], torch.lerp(before, running, 0.5))
    assert rows_of(average) == list(range(11))


def test_rows_of_another_precision_are_averaged_as_a_whole():
    model = Table().to(torch.bfloat16)
    optimizer, average = started(model)
    model.train_on(optimizer, 4)
    assert average._different_rows(average._running()[0]) == {}
    before = average.averaged["embedding.weight"].clone()
    average.blend(0.5)
    assert torch.equal(average.averaged["embedding.weight"], torch.lerp(before, model.table.float(), 0.5))


@pytest.mark.parametrize("kind", [ASWA, DenseASWA, SWA, EMA])
def test_strategies_do_what_they_do_with_dense_steps(kind):
    scores = [0.1, 0.3, 0.2, 0.4, 0.25, 0.5, 0.1, 0.6, 0.2, 0.7, 0.65, 0.9]
    found = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model, values = Table(), iter(scores * 4)
        model.embedding.sparse = sparse
        optimizer = RowwiseAdagrad(model.parameters(), lr=0.1)
        strategy, seen = kind(model), []

        def evaluate(model=model, values=values, seen=seen):
            seen.append(model.table.detach().clone())
            return next(values)

        for epoch in range(5):
            for step in range(2):
                model.train_on(optimizer, (3 * epoch + step) % ROWS, 1)
                strategy.step()
            strategy.update(evaluate)
        found.append((strategy.trajectory.to_json(), seen, strategy.average.averaged, model.table.detach()))
    (sparse_records, *sparse), (dense_records, *dense) = found
    assert sparse_records == dense_records
    torch.testing.assert_close(sparse, dense, rtol=0, atol=1e-7)
