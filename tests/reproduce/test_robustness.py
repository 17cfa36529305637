"""Quality by learning rate, and the epochs to a given quality, from the results and trajectories of finished runs."""

import json

import pytest

from aswa_hf.plotting import draw_panels, plot_panels
from aswa_hf.reproduce.robustness import (
    Swept,
    as_json,
    as_terminal_tables,
    by_rate,
    epochs_to,
    finished,
    high_rate,
    panels,
    shown_epochs,
    times_to_quality,
    with_every_rate,
)
from aswa_hf.reproduce.runs import plan
from aswa_hf.reproduce.show import rows, title
from aswa_hf.reproduce.tables import TABLES
from aswa_hf.trajectory import Decision, Record, Trajectory, save_trajectories

TABLE = TABLES["robustness"]


def run(rate, seed, best, aswa):
    """A run with a decision at the end of every epoch; the test scores are those of the last one."""
    curves = {"best": list(enumerate(best, 1)), "aswa": list(enumerate(aswa, 1))}
    return Swept("d", "complex", rate, seed, "mrr", {"best": best[-1], "aswa": aswa[-1]}, curves)


RUNS = [
    run(0.01, 0, [0.1, 0.3, 0.5], [0.1, 0.5, 0.6]),
    run(0.01, 1, [0.2, 0.4, 0.6], [0.2, 0.4, 0.6]),
    run(0.1, 0, [0.2, 0.3, 0.4], [0.5, 0.5, 0.5]),
    run(0.1, 1, [0.3, 0.4, 0.4], [0.3, 0.4, 0.5]),
]


def test_the_time_to_a_quality_is_the_first_epoch_that_has_it():
    assert epochs_to([(1, 0.1), (2, 0.3), (3, 0.2), (4, 0.3)], 0.3) == 2
    assert epochs_to([(0.5, 0.1), (1, 0.2)], 0.3) is None


def test_the_quality_to_reach_is_the_best_single_epoch_at_any_rate_of_the_same_seed():
    aswa, best = (next(row for row in times_to_quality(RUNS) if row["strategy"] == name) for name in ("aswa", "best"))
    # The targets are 0.5 for seed 0 and 0.6 for seed 1.
    assert aswa["target"] == pytest.approx(0.55)
    assert best["epochs"] == {0.01: 3, 0.1: None}
    assert aswa["epochs"] == {0.01: 2.5, 0.1: None}
    assert (aswa["reached"], aswa["seeds"]) == ({0.01: 2, 0.1: 1}, 2)
    assert [shown_epochs(aswa, rate) for rate in (0.01, 0.1)] == ["2", "1 of 2 seeds"]
    assert [shown_epochs(best, rate) for rate in (0.01, 0.1)] == ["3", "–"]
    # At the rate 0.1 they are 0.4 and 0.4.
    slow = next(row for row in times_to_quality(RUNS, 0.1) if row["strategy"] == "best")
    assert (slow["target"], slow["epochs"]) == (pytest.approx(0.4), {0.01: 2.5, 0.1: 2.5})
    assert [row["strategy"] for row in as_json(RUNS)] == ["best", "aswa"]
    heading, shown = as_terminal_tables(RUNS, {"complex": "ComplEx"})
    assert "ComplEx on d: epochs to a validation mrr of 0.55" in heading
    assert shown.row_count == 2


def test_scores_are_gathered_by_rate_and_the_high_rate_is_the_next_above_the_best():
    assert by_rate(RUNS, "aswa") == {0.01: [0.6, 0.6], 0.1: [0.5, 0.5]}
    assert high_rate(RUNS) == 0.1
    assert high_rate([one for one in RUNS if one.rate == 0.1]) == 0.1


def test_seeds_that_lack_a_rate_are_left_out_unless_all_do():
    assert with_every_rate(RUNS) == RUNS
    assert with_every_rate(RUNS[:3]) == [RUNS[0], RUNS[2]]
    assert with_every_rate(RUNS[1:3]) == RUNS[1:3]
    other = Swept("other", "complex", 0.3, 1, "mrr", {}, {})
    assert with_every_rate([*RUNS[:3], other]) == [RUNS[0], RUNS[2], other]


def test_curves_have_means_and_ranges_over_seeds(tmp_path):
    ((left, right),) = panels(RUNS, {"complex": "ComplEx"})
    assert left.curves["best"] == {0.01: (0.5, pytest.approx(0.55), 0.6), 0.1: (0.4, 0.4, 0.4)}
    assert right.curves["aswa"][1] == (0.3, pytest.approx(0.4), 0.5)
    assert right.title == "ComplEx on d, learning rate 0.1"
    plot_panels([(left, right)], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    figure = draw_panels([(left, right)], labels={"aswa": "ASWA"}, narrow=True)  # one panel below the other
    assert [axis.get_subplotspec().get_geometry()[:2] for axis in figure.axes] == [(2, 1), (2, 1)]
    assert "ASWA" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_finished_runs_are_read_from_their_folders(tmp_path):
    runs = plan(TABLE, ["complex"], ["CoDEx-S"], [0], [20], [0.01, 0.1])
    assert [one.name for one in runs] == [f"codex-s-complex-0-20-lr{rate}-robustness" for rate in (0.01, 0.1)]
    assert str(runs[1]).endswith("20 epochs, learning rate 0.1")
    folder = tmp_path / runs[0].name
    folder.mkdir()
    records = Trajectory(
        Record(index=i, step=None, epoch=2 * i + 2, running_score=0.1, lookahead_score=None, score=s, members=1,
               decision=Decision.INIT)
        for i, s in enumerate([None, 0.2, float("nan"), 0.3])
    )  # fmt: skip
    save_trajectories(folder / "aswa_trajectory.json", {"best": records}, metric="mrr", greater_is_better=True)
    strategies = {"best": {"test": {"mrr": 0.25}}, "last": {"test": {"mrr": "nan"}}}
    about = {"task": "link-prediction", "dataset": "CoDEx-S", "model": "complex"}
    (folder / "results.json").write_text(json.dumps({**about, "strategies": strategies}))
    (found,) = finished(runs, tmp_path)
    assert (found.rate, found.test, found.curves) == (0.01, {"best": 0.25}, {"best": [(4, 0.2), (8, 0.3)]})
    cells = {row["strategy"]: row["columns"] for row in rows(TABLE, runs, tmp_path)}
    assert {column: cell["ours"] for column, cell in cells["best"].items()} == {"0.01": 0.25, "0.1": None}
    assert title(TABLE, runs) == "Test MRR by learning rate (epochs: 20; seeds: 0)"


@pytest.mark.parametrize("name", ["robustness", "robustness-images"])
def test_the_rates_of_every_sweep_cover_a_factor_of_100(name):
    for sweep in TABLES[name].sweeps.values():
        assert len(sweep.rates) == 5
        assert sweep.rates[-1] / sweep.rates[0] == pytest.approx(100)


def test_a_model_may_stand_for_further_settings():
    (one,) = plan(TABLES["strategies"], ["keci11"], ["UMLS"], [0], None)
    assert (one.settings.model, one.settings.p, one.settings.q, one.settings.dim) == ("keci", 1, 1, 126)
    assert one.name == "umls-keci11-0-256-strategies"
    assert plan(TABLES["strategies"], ["keci"], ["UMLS"], [0], None)[0].model == "keci"
