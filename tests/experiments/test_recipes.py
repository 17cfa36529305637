"""Recipes: those of the package are valid, flags come before them, and mistakes are named."""

import pytest
import yaml
from commands import call, outcome

import aswa_hf.experiments.kge
from aswa_hf.experiments import KGERun
from aswa_hf.experiments.recipes import find_recipe, read_recipes, recipes

COMPLEX = find_recipe("fb15k-237/complex")


@pytest.mark.parametrize("recipe", list(recipes()), ids=lambda recipe: recipe.name)
def test_every_recipe_is_a_run_that_its_command_repeats(recipe):
    run = recipe.run(dataset="graph")
    assert {name: getattr(run, name) for name in recipe.settings} == recipe.settings
    assert recipe.about
    assert KGERun.from_settings(run.to_settings({}, 1)) == run


@pytest.fixture
def trained(monkeypatch):
    """The runs that commands would train."""
    runs = []
    monkeypatch.setattr(aswa_hf.experiments.kge, "train_kge", lambda run, *args, **options: runs.append(run))
    return runs


def test_flags_come_before_the_recipe_and_the_recipe_before_defaults(trained):
    command = "train", "kge", "--recipe", "fb15k-237/complex", "--dataset", "graph", "--output-dir", "out"
    assert call(*command) == 0
    # 256 is the default, and not what the recipe says.
    assert call(*command, "--epochs", "256", "--dim", "64") == 0
    assert trained == [COMPLEX.run(dataset="graph"), COMPLEX.run(dataset="graph", epochs=256, dim=64)]


def test_a_file_of_ones_own_has_recipes_too(trained, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"small": {"settings": {"dim": 8, "epochs": 2}}}) + "tiny: {settings: {lr: 1e-3}}")
    assert call("train", "kge", "--recipe", f"{file}/small", "--dataset", "graph", "--output-dir", "out") == 0
    assert call("train", "kge", "--recipe", f"{file}/tiny", "--dataset", "graph", "--output-dir", "out") == 0
    assert trained == [KGERun(dataset="graph", dim=8, epochs=2), KGERun(dataset="graph", lr=0.001)]


def test_recipes_are_listed_with_what_they_reached(capsys):
    status, output, _ = outcome(capsys, "train", "kge", "--recipes")
    assert status == 0
    lines = {line.split()[0]: line.split()[1:] for line in output.splitlines() if line.strip()}
    for recipe in recipes():
        taken = recipe.reached and str(recipe.reached["cpu_seconds"] or "–")  # of a resumed run it is not known
        reached = recipe.reached and [f"{recipe.reached['mrr']['aswa']:.3f}", taken]
        shown = lines[recipe.name]
        assert shown[0] == f"{recipe.published:.3f}"
        assert [shown[1], shown[-1]] == (reached or ["not", "run"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("small: {settings: {dimm: 8}}", "small has the unknown setting 'dimm'. Did you mean 'dim'?"),
        ("small: {settings: {dim: eight}}", "small: dim must be a whole number of at least 1, got 'eight'."),
        ("small: {settings: {query_dropout: 1}}", "query_dropout must be a number of at least 0 below 1, got 1."),
        ("small: {dim: 8}", "small must be a mapping with the key settings."),
        ("small: {settings: {}, note: x}", "small has the unknown key 'note'. Expected about, settings,"),
        ("small: {settings: {}, published: 46.5}", "published must be an MRR between 0 and 1, got 46.5."),
        ("small: {settings: {}, about: [x]}", "small: about must be text, got ['x']."),
        ("small: {settings: {loss: binary, scheme: 1vsall}}", "--loss must be softmax for 1vsall, got 'binary'."),
        ("- small", "is not a file of recipes: expected a mapping"),
        ("small: {settings: [", "is not a file of recipes: while parsing"),
        ("big: {settings: {}}", "There is no recipe '"),
        (
            "small: {settings: {dim: 8, epochs: 2, dim: 16}}",
            "is not a file of recipes: it has 'dim' twice in one mapping.",
        ),
    ],
)
def test_a_mistake_in_a_recipe_is_one_line_before_data_is_loaded(text, problem, tmp_path):
    (tmp_path / "mine.yaml").write_text(text)
    recipe = tmp_path / "mine.yaml" / "small"
    said = call(
        "train", "kge", "--recipe", recipe, "--dataset", tmp_path / "nowhere", "--output-dir", tmp_path / "out"
    )
    assert problem in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--scheme 1vsall --loss binary", "--loss must be softmax for 1vsall, got 'binary'."),
        ("--regularization 0.1", "--regularizer must be given with --regularization 0.1."),
        ("--regularizer n3", "--regularization must be given with --regularizer n3."),
        ("--epochs 10 --eval-every 4", "--eval-every must divide the 10 epochs, got 4."),
        ("--entity-dropout 1", "--entity-dropout must be a number of at least 0 below 1, got 1.0."),
        (
            "--initializer-range 0.5",
            "--initializer-range is only for initializer normal or uniform, and initializer is",
        ),
        (
            "--scheme negative_sampling --loss softmax --adversarial-temperature 1",
            "--adversarial-temperature is only for loss binary, and loss is softmax.",
        ),
        (
            "--scheme negative_sampling --label-smoothing 0.1 --adversarial-temperature 1",
            "--label-smoothing must be 0 with adversarial weights, got 0.1.",
        ),
        ("--recipe wn18/complex", "There is no recipe 'wn18/complex'."),
    ],
)
def test_settings_that_do_not_fit_together_are_refused_before_data_is_loaded(flags, problem, tmp_path):
    assert problem in call("train", "kge", "--dataset", tmp_path, "--output-dir", tmp_path / "out", *flags.split())


def test_a_file_with_aliases_is_refused_before_they_are_expanded(tmp_path):
    lists = ["&a0 [x, x]", *(f"&a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60))]
    path = tmp_path / "own.yaml"
    path.write_text(f"small:\n  settings:\n    dim: [{', '.join(lists)}]\n")
    with pytest.raises(ValueError, match=r"own.yaml is not a file of recipes: it has aliases"):
        list(read_recipes(path))
