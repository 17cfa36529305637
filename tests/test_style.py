"""Pictures: colors that color-blind readers tell apart, reasons of decisions, and SVG that a page can contain."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from places import ROOT

from aswa_hf import style
from aswa_hf.interactive import describe, reason, trajectory_svg
from aswa_hf.plotting import as_svg, draw_gains
from aswa_hf.strategies import STRATEGIES
from aswa_hf.trajectory import Decision, Record, Trajectory

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
SIGHTS = {
    "full": np.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


def linear(color):
    values = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(color, sight):
    seen = np.clip(np.array(SIGHTS[sight]) @ linear(color), 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ seen
    f = np.cbrt(np.maximum(xyz / [0.9505, 1, 1.089], 1e-6))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(one, other):
    lights = sorted(float(np.array([0.2126, 0.7152, 0.0722]) @ linear(color)) + 0.05 for color in (one, other))
    return lights[1] / lights[0]


@pytest.mark.parametrize("sight", SIGHTS)
def test_strategies_and_decisions_have_colors_that_can_be_told_apart(sight):
    groups = [
        [found.color for found in (*style.STRATEGIES.values(), style.OTHER_STRATEGY)],
        [style.LIGHT[name] for name in ("soft", "hard", "reject")],
        [style.DARK[name] for name in ("soft", "hard", "reject")],
    ]
    for colors in groups:
        for one, other in combinations(colors, 2):
            assert np.linalg.norm(lab(one, sight) - lab(other, sight)) > 9, (sight, one, other)


def test_every_strategy_has_a_color_a_marker_and_a_line_of_its_own():
    assert set(STRATEGIES) < set(style.STRATEGIES)
    styles = [style.strategy_style(name) for name in (*style.STRATEGIES, "another")]
    for channel in ("color", "marker", "line"):
        assert len({getattr(found, channel) for found in styles}) == len(styles), channel
    for found in styles:
        assert contrast(found.color, "#ffffff") >= 2.2, found


def test_no_two_decisions_share_a_marker():
    assert len({marker for _, marker, _ in style.DECISIONS.values()}) == len(Decision)


@pytest.mark.parametrize("colors", [style.LIGHT, style.DARK], ids=["light", "dark"])
def test_text_can_be_read(colors):
    for name in ("ink", "soft-ink", "ours", "lost"):
        for background in ("paper", "card"):
            assert contrast(colors[name], colors[background]) >= 4.5, (name, background)
    for name in ("win", "tie", "loss"):
        assert contrast("#ffffff", colors[name]) >= 4.5, name


def record(index, decision, running, lookahead, score, members):
    return Record(index, index * 10, float(index + 1), running, lookahead, score, members, Decision(decision))


@pytest.fixture
def trajectory():
    return Trajectory(
        [
            record(0, "init", 0.5, None, 0.5, 1),
            record(1, "hard", 0.7, 0.6, 0.7, 1),
            record(2, "soft", 0.6, 0.8, 0.8, 2),
            record(3, "reject", 0.6, 0.75, 0.8, 2),
            record(4, "reject", float("nan"), 0.75, 0.8, 2),
        ]
    )


def test_every_decision_has_its_reason(trajectory):
    assert reason(trajectory, 0) == "There was no ensemble yet: the running weights start it."
    assert "The running model (0.7000) beats the look-ahead (0.6000) and the ensemble (0.5000)" in reason(
        trajectory, 1
    )
    assert "it joins the average as snapshot 2" in reason(trajectory, 2)
    assert "Neither the running model (0.6000) nor the look-ahead (0.7500)" in reason(trajectory, 3)
    assert "running model is not a finite number" in reason(trajectory, 4)
    assert describe(trajectory, 2)[:2] == [
        "Epoch 3: soft",
        "running model 0.6000, look-ahead 0.8000, ensemble 0.8000, 2 snapshots",
    ]


def test_of_dense_aswa_the_reason_names_the_mean_of_the_steps_where_it_decided():
    found = Trajectory(
        replace(one, snapshot_score=mean)
        for one, mean in (
            (record(0, "init", 0.4, None, 0.5, 1), 0.5),
            (record(1, "hard", 0.5, 0.6, 0.7, 1), 0.7),
            (record(2, "hard", 0.8, 0.6, 0.8, 1), 0.7),
            (record(3, "soft", 0.6, 0.9, 0.9, 2), 0.7),
            (record(4, "reject", 0.6, 0.85, 0.9, 2), 0.8),
        )
    )
    for index, text in enumerate(
        (
            "the mean of the steps starts it",
            "The mean of the steps (0.7000) beats the look-ahead (0.6000) and the ensemble (0.5000)",
            "The running model (0.8000) beats the look-ahead (0.6000) and the ensemble (0.7000)",
            "the mean of the steps (0.7000) does not beat the look-ahead: the mean of the steps joins the average",
            "Neither the mean of the steps (0.8000) nor the look-ahead (0.8500)",
        )
    ):
        assert text in reason(found, index)


def test_without_hard_updates_a_running_model_may_be_better_than_the_ensemble():
    found = Trajectory([record(0, "init", 0.5, None, 0.5, 1), record(1, "reject", 0.9, 0.4, 0.5, 1)])
    assert reason(found, 1) == "The look-ahead (0.4000) does not beat the ensemble (0.5000): nothing changes."


def test_the_picture_shows_each_decision_and_the_weights_at_any_point(trajectory):
    svg = trajectory_svg({"aswa": trajectory}, metric="mrr")
    tree = ElementTree.fromstring(svg)
    assert tree.get("aria-label").startswith("Validation mrr over 5 decision points of aswa: 1 hard, 1 soft, 2 reject")
    assert svg.count('class="point"') == 5
    assert svg.count('class="alpha"') == 2  # the hard and the soft snapshot
    assert trajectory_svg({"aswa": trajectory}, chosen=1).count('class="alpha"') == 1
    assert "nan" not in re.sub(r"<text.*?</text>", "", svg)


def test_a_narrow_picture_keeps_its_texts_within_its_width(trajectory):
    for width in (900, 520, 360):
        tree = ElementTree.fromstring(trajectory_svg({"aswa": trajectory}, metric="mrr", width=width))
        assert tree.get("viewBox").split()[2] == str(width)
        texts = [node for node in tree.iter("{http://www.w3.org/2000/svg}text") if node.get("text-anchor") is None]
        assert all(float(node.get("x")) + 6.6 * len(node.text) <= width for node in texts), width
        low = float(tree.get("viewBox").split()[3])
        assert all(float(node.get("y")) < low for node in texts)
    plain = trajectory_svg({"aswa": trajectory}, panel=False, explained=False)
    assert "<title>" not in plain
    assert 'class="band"' not in plain


def test_the_marks_of_many_rejects_are_below_the_ensembles_line():
    many = [record(i, "reject", 0.4, 0.4, 0.5, 1) for i in range(1, 100)]
    svg = trajectory_svg({"aswa": Trajectory([record(0, "init", 0.5, None, 0.5, 1), *many])})
    assert svg.rindex('class="reject"', 0, svg.index('class="ensemble"')) > 0
    inside = svg[svg.index('class="points"') : svg.index("reject: unchanged")]
    assert inside.count('class="reject"') == 1  # of the legend


def test_labels_with_markup_stay_text(trajectory):
    hostile = "<script>alert(1)</script>\"'&"
    svg = trajectory_svg({hostile: trajectory}, metric=hostile)
    assert "<script" not in svg
    ElementTree.fromstring(svg)
    drawn = as_svg(draw_gains({hostile: ([0.1, -0.2], 0.1)}, hostile))
    assert "<script" not in drawn
    ElementTree.fromstring(drawn)


def test_an_empty_or_constant_run_can_be_drawn():
    assert "no decisions yet" in trajectory_svg({"aswa": Trajectory()})
    constant = Trajectory([record(0, "init", 0.5, None, 0.5, 1)])
    ElementTree.fromstring(trajectory_svg({"aswa": constant}))
    failed = Trajectory([record(0, "reject", float("nan"), None, None, 0)])
    ElementTree.fromstring(trajectory_svg({"aswa": failed}))


def test_the_sites_colors_are_those_of_the_style():
    css = (ROOT / "docs" / "assets" / "site.css").read_text(encoding="utf-8")
    assert style.LIGHT["ours"] in css
    assert style.DARK["ours"] in css
