"""The history of a run: through JSON and back, damaged files, and the picture."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import matplotlib
import matplotlib.image
import pytest
from matplotlib import pyplot as plt

from aswa_hf import Decision, Trajectory
from aswa_hf.plotting import draw_trajectories, plot_trajectories
from aswa_hf.trajectory import Record, load_trajectories, save_trajectories

INIT, HARD, SOFT, REJECT = Decision.INIT, Decision.HARD, Decision.SOFT, Decision.REJECT


def record(index: int, decision: Decision, **values) -> Record:
    given = {"step": 10 * index, "epoch": index + 1.0, "running_score": 0.5, "lookahead_score": 0.6, "score": 0.6}
    return Record(index=index, members=1, decision=decision, **{**given, **values})


def history() -> Trajectory:
    return Trajectory(
        [
            record(0, REJECT, step=None, epoch=None, running_score=math.nan, lookahead_score=None, score=None),
            record(1, INIT, running_score=0.1, lookahead_score=None, score=0.1),
            record(2, SOFT, running_score=-math.inf, lookahead_score=1 / 3, score=1 / 3),
            record(3, REJECT, running_score=0.2, lookahead_score=math.inf, score=1 / 3),
            record(4, HARD, running_score=0.7, lookahead_score=0.1, score=0.7),
            record(5, SOFT, running_score=0.1, lookahead_score=0.8, score=0.8),
        ]
    )


def assert_equal(ours: Trajectory, theirs: Trajectory) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert repr(one) == repr(other)  # tells None, NaN and the last digit apart


def strictly(text: str):
    """Reads JSON as other languages do, which have no NaN and no Infinity."""

    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_alphas_are_those_of_the_decisions():
    assert history().alphas == [0, 0, 0, 0, 0.5, 0.5]
    assert Trajectory().alphas == []


def test_decisions_have_codes_for_reporters_of_numbers():
    assert [decision.code for decision in (REJECT, SOFT, HARD, INIT)] == [0, 1, 2, 3]


def test_records_survive_json_with_every_kind_of_score():
    text = json.dumps(history().to_json(), allow_nan=False)
    assert_equal(Trajectory.from_json(strictly(text)), history())


def test_a_file_returns_what_was_saved(tmp_path):
    path = tmp_path / "aswa_trajectory.json"
    empty = Trajectory()
    save_trajectories(
        path, {"aswa": history(), "swa": empty}, metric="mrr", greater_is_better=True, alphas={"swa": [0.25]}, seed=3
    )
    trajectories, rest = load_trajectories(path)
    assert list(trajectories) == ["aswa", "swa"]
    assert_equal(trajectories["aswa"], history())
    assert_equal(trajectories["swa"], empty)
    assert "strategies" not in rest
    assert (rest["metric"], rest["greater_is_better"], rest["seed"]) == ("mrr", True, 3)
    content = strictly(path.read_text())
    assert content["strategies"]["aswa"]["alphas"] == [0, 0, 0, 0, 0.5, 0.5]
    assert content["strategies"]["swa"]["alphas"] == [0.25]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def saved(tmp_path) -> dict:
    path = tmp_path / "good.json"
    save_trajectories(path, {"aswa": history()}, metric="mrr", greater_is_better=True)
    return json.loads(path.read_text())


def without(content: dict, *keys: str) -> dict:
    inner = content
    for key in keys[:-1]:
        inner = inner[key]
    del inner[keys[-1]]
    return content


def with_records(content: dict, records) -> dict:
    content["strategies"]["aswa"]["records"] = records
    return content


DAMAGES = {
    "no strategies": (lambda c: without(c, "strategies"), "has no 'strategies'"),
    "strategies are a list": (lambda c: {**c, "strategies": [1]}, r"strategies is \[1\], expected an object"),
    "no records": (lambda c: without(c, "strategies", "aswa", "records"), "has no 'records' in strategies.aswa"),
    "records are a number": (lambda c: with_records(c, 7), "strategies.aswa.records is 7, expected a list"),
    "a record is text": (lambda c: with_records(c, ["x"]), r"records\[0\] is 'x', expected an object"),
    "a record lacks a key": (
        lambda c: with_records(c, [{"index": 0}]),
        r"has no 'step' in strategies.aswa.records\[0\]",
    ),
    "an unknown decision": (
        lambda c: with_records(c, [c["strategies"]["aswa"]["records"][0] | {"decision": "maybe"}]),
        "decision is 'maybe', expected 'init', 'hard', 'soft' or 'reject'",
    ),
    "a score is text": (
        lambda c: with_records(c, [c["strategies"]["aswa"]["records"][0] | {"score": "good"}]),
        "score is 'good', expected a number",
    ),
    "another format": (lambda c: c | {"format": "aswa-state"}, "format is 'aswa-state', expected 'aswa-trajectory'"),
    "another version": (lambda c: c | {"version": 2}, "version is 2, expected 1"),
    "a list": (lambda c: [c], "expected an object"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_file_is_one_clear_error_with_its_name(tmp_path, damage):
    spoil, message = DAMAGES[damage]
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(spoil(saved(tmp_path))))
    with pytest.raises(ValueError, match=message) as caught:
        load_trajectories(path)
    assert str(path) in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("content", [b"", b'{"format": "aswa-traj', b"\xff\xfe\x00binary"])
def test_a_file_that_is_not_json_is_one_clear_error(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.json is not a JSON file"):
        load_trajectories(path)


def long_history() -> Trajectory:
    decisions = [INIT, SOFT, HARD, SOFT, REJECT, SOFT, REJECT, SOFT]
    return Trajectory(record(i, d, running_score=0.1 * i, score=0.1 * i + 0.05) for i, d in enumerate(decisions))


PICTURES = {
    "full": {"swa": long_history(), "ema": long_history(), "aswa": long_history(), "last": long_history()},
    "every kind of score": {"aswa": history()},
    "empty ensemble": {"aswa": Trajectory([record(i, REJECT, running_score=math.nan, score=None) for i in range(3)])},
    "one point": {"aswa": Trajectory([record(0, INIT)])},
    "no point": {"aswa": Trajectory()},
    "only another strategy": {"best": history()},
}


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_of_any_history_is_a_png(tmp_path, name, recwarn):
    path = tmp_path / "trajectory.png"
    plot_trajectories(PICTURES[name], path, metric="accuracy")
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    height, width = matplotlib.image.imread(path).shape[:2]
    assert (width, height) == (1170, 728)
    assert [str(w.message) for w in recwarn] == []


def test_a_narrow_picture_is_higher_than_wide(tmp_path):
    plot_trajectories(PICTURES["full"], tmp_path / "narrow.png", narrow=True)
    height, width = matplotlib.image.imread(tmp_path / "narrow.png").shape[:2]
    assert (width, height) == (720, 864)


def test_different_histories_give_different_pictures(tmp_path):
    pictures = []
    for name in ("full", "every kind of score", "empty ensemble", "one point"):
        plot_trajectories(PICTURES[name], tmp_path / "picture.png", title="same")
        pictures.append(matplotlib.image.imread(tmp_path / "picture.png"))
    assert all((one != other).any() for one, other in pairwise(pictures))


def test_what_is_outside_the_view_is_listed_and_not_marked_at_its_edge():
    scores = [0.01, 0.1, *(0.8 + 0.01 * i for i in range(10))]
    trajectory = Trajectory(record(i, SOFT if i else INIT, running_score=s, score=s) for i, s in enumerate(scores))
    axis = draw_trajectories({"aswa": trajectory}).axes[0]
    low, high = axis.get_ylim()
    assert 0.1 < low < 0.8 < 0.89 < high
    marked = sorted(tuple(point) for marks in axis.collections for point in marks.get_offsets().tolist())
    assert marked == [(i + 1.0, s) for i, s in enumerate(scores) if s >= 0.8]
    ensemble = next(line for line in axis.lines if line.get_label() == "ASWA ensemble")
    assert list(ensemble.get_ydata()) == scores  # the line leaves the view where it really does
    assert [text.get_text() for text in axis.texts] == ["outside the view: 2 epochs, 1 to 2 (0.01 to 0.1)"]


def test_a_strategy_that_is_ahead_stays_in_view():
    ours = Trajectory(record(i, SOFT if i else INIT, running_score=0.3, score=0.5) for i in range(8))
    other = Trajectory(record(i, SOFT if i else INIT, running_score=0.3, score=0.9) for i in range(8))
    low, high = draw_trajectories({"aswa": ours, "ema": other}).axes[0].get_ylim()
    assert low < 0.3 < 0.9 < high


def test_drawing_leaves_the_users_figures_and_backend_alone(tmp_path):
    matplotlib.use("svg")
    figure = plt.figure()
    try:
        plot_trajectories({"aswa": history()}, tmp_path / "trajectory.png")
        assert plt.get_fignums() == [figure.number]
        assert matplotlib.get_backend().lower() == "svg"
    finally:
        plt.close(figure)
        matplotlib.use("agg")
