"""`aswa-hf reproduce tuned`: the runs of recipes beside the published numbers, and what they took."""

import json

import pytest
from commands import outcome

from aswa_hf.experiments.recipes import find_recipe, recipes
from aswa_hf.reproduce.runs import is_trained
from aswa_hf.reproduce.show import rows, title
from aswa_hf.reproduce.tables import TABLES, TUNED
from aswa_hf.reproduce.tuned import costs, find_recipes, plan_recipes, runs_of_recipes

TABLE = TABLES["tuned"]
COMPLEX = find_recipe("fb15k-237/complex")


def write_run(run, folder, mrr, seconds):
    place = folder / run.name
    place.mkdir(parents=True)
    (place / "settings.json").write_text(json.dumps(run.settings.to_settings({}, 1)))
    content = {
        "epochs": run.epochs,
        "strategies": {name: {"test": {"mrr": mrr, "hits@1": 0.2, "hits@3": 0.3, "hits@10": 0.4}} for name in TUNED},
        "seconds": {"train": seconds, "evaluate": 1.0},
        "cpu_seconds": seconds / 2,
        "memory": {"aswa": 1_000_000, "ema": 3_000_000},
        "peak_memory": 2_000_000_000,
    }
    (place / "results.json").write_text(json.dumps(content))
    return content


def test_a_recipe_has_a_run_of_its_length_for_each_seed():
    runs = plan_recipes([COMPLEX], [0, 3])
    assert [run.name for run in runs] == [f"fb15k-237-complex-{seed}-{runs[0].epochs}-tuned" for seed in (0, 3)]
    assert [run.settings for run in runs] == [
        COMPLEX.run(dataset="fb15k-237", seed=seed, strategies=TUNED) for seed in (0, 3)
    ]
    (short,) = plan_recipes([find_recipe("fb15k-237/distmult")], [0], 7)
    assert (short.epochs, short.settings.eval_every) == (7, 1)


def test_recipes_are_found_by_name_and_graph():
    assert find_recipes(["complex"], ["FB15K-237"]) == [COMPLEX]
    assert {recipe.name for recipe in find_recipes(["rescal"], None)} >= {"codex-s/rescal", "wn18rr/rescal"}
    measured = [recipe for recipe in recipes() if recipe.reached]
    if measured:
        assert find_recipes(None, None) == measured
    with pytest.raises(ValueError, match=r"--models: there is no recipe for 'resca'\. Did you mean 'rescal'"):
        find_recipes(["resca"], None)
    with pytest.raises(ValueError, match="--datasets: there is no recipe for 'UMLS'"):
        find_recipes(None, ["UMLS"])
    with pytest.raises(ValueError, match="There is no recipe tucker for wn18rr"):
        find_recipes(["tucker"], ["wn18rr"])


def test_cells_hold_the_published_number_and_the_difference_from_it(tmp_path):
    runs = plan_recipes([COMPLEX], [0, 1, 2])
    write_run(runs[0], tmp_path, 0.3, 60)
    write_run(runs[1], tmp_path, 0.4, 180)
    assert is_trained(runs[0], tmp_path)
    found = {row["strategy"]: row for row in rows(TABLE, runs, tmp_path)}
    assert set(found) == set(TUNED)
    cell = found["aswa"]["columns"]["mrr"]
    assert (cell["ours"], cell["runs"], cell["paper"]) == (pytest.approx(0.35), 2, COMPLEX.published)
    assert cell["difference"] == pytest.approx(0.35 - COMPLEX.published)
    assert found["aswa"]["columns"]["hits@10"]["paper"] is None
    assert costs(runs, tmp_path) == [
        {"recipe": "fb15k-237/complex", "runs": 2, "train": 2.0, "cpu": 1.0, "peak": 2.0, "averages": 0.004}
    ]
    assert title(TABLE, runs).endswith("(seeds: 0, 1, 2)")


def test_only_complete_runs_of_a_recipe_count_as_reached(tmp_path):
    full, short = plan_recipes([COMPLEX], [0])[0], plan_recipes([COMPLEX], [1], 1)[0]
    for run in (full, short):
        content = write_run(run, tmp_path / "runs", 0.3, 60)
        (tmp_path / f"{run.name}.json").write_text(json.dumps(content))
    ((recipe, contents),) = runs_of_recipes(tmp_path)
    assert recipe == COMPLEX
    assert [content["epochs"] for content in contents] == [full.epochs]


def test_the_command_runs_a_recipe_and_shows_it_beside_what_is_published(tmp_path, monkeypatch, capsys):
    import aswa_hf.experiments.recipes as module

    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "countries.yaml").write_text(
        "small: {about: For a test., published: 0.5, settings: {dim: 8, epochs: 2, loss: softmax, lr: 0.01}}"
    )
    monkeypatch.setattr(module, "FOLDER", tmp_path / "recipes")
    monkeypatch.setattr(module, "REACHED", tmp_path / "recipes" / "reached.json")
    command = "reproduce", "tuned", "--models", "small", "--seeds", "0", "--output-dir", tmp_path / "runs", "--json"
    status, printed, _ = outcome(capsys, *command)
    assert status == 0
    content = json.loads(printed)
    assert {row["strategy"] for row in content["rows"]} == set(TUNED)
    assert all(row["columns"]["mrr"]["paper"] == 0.5 for row in content["rows"])
    (taken,) = content["costs"]
    assert taken["recipe"] == "countries/small"
    assert 0 < taken["cpu"] < 60
    settings = json.loads((tmp_path / "runs" / "countries-small-0-2-tuned" / "settings.json").read_text())
    assert (settings["dim"], settings["loss"], settings["epochs"]) == (8, "softmax", 2)
    (row,) = [row for row in content["rows"] if row["strategy"] == "aswa"]
    status, shown, _ = outcome(capsys, *command[:-1])
    assert status == 0
    assert f"{row['columns']['mrr']['ours']:.3f}" in shown
    assert "published" in shown
    assert "CPU minutes" in shown
