"""The ranking of all strategies, on numbers that can be followed by hand."""

import pytest

from aswa_hf.reproduce.ranks import as_terminal_table, rankings
from aswa_hf.reproduce.tables import ALL_STRATEGIES, TABLES
from aswa_hf.strategies import STRATEGIES


def rows(scores):
    """The rows of a table: scores by dataset and strategy."""
    return [
        {"dataset": dataset, "val_ratio": None, "model": "m", "strategy": name, "columns": {"mrr": {"ours": score}}}
        for dataset, found in scores.items()
        for name, score in found.items()
    ]


def test_ranks_and_wins_are_counted_over_complete_pairs():
    scores = {f"d{i}": {"last": 0.1, "aswa": 0.2 + i / 100, "dense-aswa": 0.3 + i / 100} for i in range(4)}
    scores["tie"] = {"last": 0.5, "aswa": 0.4, "dense-aswa": 0.5}
    scores["incomplete"] = {"last": 0.9, "aswa": None, "dense-aswa": 0.1}
    scores["d0"]["bema"] = 0.7
    dense, aswa, last = rankings(rows(scores))
    assert [row["strategy"] for row in (dense, aswa, last)] == ["dense-aswa", "aswa", "last"]
    # Four times first and once shared; four times second and once third; four times third and once shared.
    assert [row["rank"] for row in (dense, aswa, last)] == [(4 + 1.5) / 5, (8 + 3) / 5, (12 + 1.5) / 5]
    # Five differences of one sign: p = 2/2⁵; four and a tie: 2/2⁴.
    assert aswa["against"] == {"dense-aswa": {"wins": 5, "ties": 0, "losses": 0, "p": pytest.approx(2 / 32)}}
    assert last["against"]["dense-aswa"] == {"wins": 4, "ties": 1, "losses": 0, "p": pytest.approx(2 / 16)}
    assert last["against"]["aswa"]["losses"] == 1
    (table,) = as_terminal_table([dense, aswa, last])
    assert table.row_count == 3


def test_few_pairs_have_no_p_value_and_none_no_ranking():
    (_, last) = rankings(rows({"d": {"last": 0.1, "aswa": 0.2}}))
    assert last["against"]["aswa"] == {"wins": 1, "ties": 0, "losses": 0, "p": None}
    assert rankings(rows({"d": {"last": 0.1, "aswa": None}})) == []
    assert list(as_terminal_table([])) == []


def test_the_tables_of_all_strategies_have_all():
    assert set(ALL_STRATEGIES) == set(STRATEGIES)
    assert TABLES["strategies"].strategies == TABLES["strategies-images"].strategies == ALL_STRATEGIES
