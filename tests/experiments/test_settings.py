"""KGERun and ImageRun as the only source of settings: the flags, settings.json and the command follow from them."""

import json
import math
import shlex
from dataclasses import MISSING, replace

import pytest
import torch
from commands import call
from torch import nn
from typer.main import get_command

import aswa_hf.experiments.image
import aswa_hf.experiments.kge
from aswa_hf.cli import app
from aswa_hf.comparison import NAMED, named_factories
from aswa_hf.experiments.settings import (
    DEFAULT_STRATEGIES,
    PRECISIONS,
    SCHEMES,
    SCORERS,
    ImageRun,
    KGERun,
    SettingError,
    run_of,
)
from aswa_hf.kge.modeling_kge import SCORERS as MODELS
from aswa_hf.kge.training import BALANCED
from aswa_hf.kge.training import SCHEMES as TRAINING_SCHEMES
from aswa_hf.strategies import STRATEGIES
from aswa_hf.vision.training import chosen_precision

KINDS = {"kge": KGERun, "image": ImageRun}
SHORTEST = [KGERun(dataset="countries"), ImageRun(dataset="digits")]
# Every setting has another value than its default.
CHANGED = [
    KGERun(
        dataset="my graphs/UMLS",
        model="keci",
        dim=96,
        epochs=6,
        batch_size=30,
        lr=1e-05,
        optimizer="adagrad",
        weight_decay=0.01,
        schedule="plateau",
        plateau_factor=0.5,
        plateau_patience=2,
        scheme="negative_sampling",
        loss="binary",
        negatives=8,
        shared_negatives=True,
        shard_entities=True,
        adversarial_temperature=0.5,
        entity_dropout=0.2,
        relation_dropout=0.3,
        query_dropout=0.4,
        regularizer="n3",
        regularization=0.05,
        relation_prediction=0.5,
        initializer="normal",
        initializer_range=0.001,
        eval_every=2,
        p=1,
        q=2,
        strategies=("swa-all", "last"),
        apply="auto",
        seed=3,
        keep=2,
    ),
    ImageRun(
        dataset="user/images",
        model="resnet18",
        recipe="vgg16",
        epochs=4,
        batch_size=50,
        lr=0.02,
        fge=True,
        fge_cycle=1.5,
        image_size=24,
        augment=False,
        val_ratio=0.25,
        train_size=500,
        bn_batches=6,
        precision="bf16",
        strategies=("ema", "aswa"),
        apply="aswa",
        seed=5,
        keep=3,
    ),
    KGERun(dataset="user/graph", shard_entities=True, label_smoothing=0.1),  # which excludes some of the others
]


@pytest.fixture
def parsed(monkeypatch):
    """Parses the arguments of a command: the run, the folder and the options that it would train with."""
    trained = []
    for module, name in ((aswa_hf.experiments.kge, "train_kge"), (aswa_hf.experiments.image, "train_image")):
        monkeypatch.setattr(module, name, lambda run, folder, **options: trained.append((run, str(folder), options)))

    def parse(*arguments):
        assert call(*arguments) == 0
        return trained.pop()

    return parse


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_setting_has_another_value_than_its_default_in_a_changed_run(kind):
    runs = [run for run in CHANGED if type(run) is kind]
    assert [one.name for one in kind.settings() if all(getattr(run, one.name) == one.default for run in runs)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_is_a_flag_with_the_same_default_and_help(kind):
    command = get_command(app).commands["train"].commands[kind]
    flags = {parameter.name: parameter for parameter in command.params}
    settings = {one.name: one for one in KINDS[kind].settings()}
    of_recipes = {"recipe", "recipes"} if kind == "kge" else set()
    assert flags.keys() == {*settings, "output_dir", "resume", "as_json"} | of_recipes
    for name, one in settings.items():
        flag = flags[name]
        assert f"--{name.replace('_', '-')}" in flag.opts
        assert flag.help == one.help
        assert flag.required == (one.default is MISSING)
        if not flag.required:
            assert flag.default == (",".join(one.default) if isinstance(one.default, tuple) else one.default)


@pytest.mark.parametrize("run", SHORTEST, ids=KINDS)
def test_the_shortest_command_is_the_run_with_all_defaults(run, parsed):
    arguments = ("train", run.kind, "--dataset", run.dataset, "--output-dir", "out")
    assert parsed(*arguments) == (run, "out", {"resume": False})
    assert parsed(*arguments, "--resume") == (run, "out", {"resume": True})


@pytest.mark.parametrize("run", [*SHORTEST, *CHANGED, replace(CHANGED[1], augment=True)])
def test_the_command_of_a_run_is_parsed_as_the_same_run(run, parsed):
    program, *arguments = shlex.split(run.command("runs/my run"))
    assert program == "aswa-hf"
    assert parsed(*arguments) == (run, "runs/my run", {"resume": False})


@pytest.mark.parametrize("run", [*SHORTEST, *CHANGED])
def test_a_run_is_what_its_settings_json_describes(run):
    content = json.loads(json.dumps(run.to_settings({"train": 10, "test": 2}, processes=2)))
    assert content["dataset"] == {"name": run.dataset, "source": run.dataset, "train": 10, "test": 2}
    assert content["num_processes"] == 2
    # A resumed run may change these, so that the file does not have them.
    left_out = {one.name: one.default for one in run.settings() if not one.fixed and one.name != "epochs"}
    assert content.keys() - {"num_processes"} == {one.name for one in run.settings()} - left_out.keys()
    assert run_of(content) == type(run).from_settings(content) == replace(run, **left_out)


def test_a_folder_is_found_from_any_other_folder_by_its_settings(tmp_path, monkeypatch):
    (tmp_path / "data" / "UMLS").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    run = KGERun(dataset="data/UMLS")
    assert (run.dataset_name, run.name) == ("UMLS", "umls-complex-0")
    content = run.to_settings({}, processes=1)
    assert content["dataset"] == {"name": "UMLS", "source": str(tmp_path / "data" / "UMLS")}
    assert run_of(content) == KGERun(dataset=str(tmp_path / "data" / "UMLS"))


# As earlier versions wrote them: without the place of the data.
OLDER_KGE = {
    "dataset": {"name": "countries", "train": 1111, "validation": 24, "test": 24},
    "model": "keci",
    "dim": 16,
    "epochs": 20,
    "batch_size": 1024,
    "lr": 0.1,
    "scheme": "1vsall",
    "p": 0,
    "q": 1,
    "strategies": ["aswa", "last"],
    "seed": 2,
    "num_processes": 1,
}
OLDER_IMAGE = {
    "dataset": {"name": "digits", "train": 300, "validation": 260, "test": 497},
    "model": "test_resnet",
    "recipe": "preresnet20",
    "epochs": 5,
    "batch_size": 50,
    "lr": 0.1,
    "strategies": ["aswa", "swa", "ema", "best", "last"],
    "image_size": 16,
    "augment": False,
    "val_ratio": 0.2,
    "train_size": 300,
    "bn_batches": None,
    "precision": "fp32",
    "seed": 0,
    "num_processes": 1,
}


def test_without_a_choice_the_best_on_validation_is_saved_and_else_the_first_of_the_chosen():
    assert KGERun(dataset="any").shipped == ImageRun(dataset="any").shipped == "auto"
    assert KGERun(dataset="any").describe("out")["apply"] == "auto"
    assert KGERun(dataset="any", apply="aswa").shipped == "aswa"
    assert KGERun(dataset="any", strategies="ema,aswa").shipped == "ema"
    assert "--apply" not in KGERun(dataset="any").command("out")


def test_zero_stands_for_all_batches():
    every = ImageRun(dataset="digits", bn_batches=0)
    assert every.bn_batches is None
    assert every == ImageRun(dataset="digits", bn_batches=None) != ImageRun(dataset="digits")
    assert "--bn-batches 0" in every.command("out")
    assert "--bn-batches" not in ImageRun(dataset="digits").command("out")
    assert ImageRun.from_settings(every.to_settings({}, 1)) == every


def test_settings_of_earlier_versions_are_read():
    links = KGERun(
        dataset="countries", model="keci", dim=16, epochs=20, scheme="1vsall", strategies=("aswa", "last"), seed=2
    )
    images = ImageRun(
        dataset="digits",
        model="test_resnet",
        recipe="preresnet20",
        epochs=5,
        batch_size=50,
        lr=0.1,
        image_size=16,
        augment=False,
        val_ratio=0.2,
        train_size=300,
        bn_batches=None,
        precision="fp32",
        strategies=("aswa", "swa", "ema", "best", "last"),
    )
    assert run_of(OLDER_KGE) == links
    assert run_of(OLDER_IMAGE) == images
    # What a version did not have yet was at its default.
    assert run_of({name: value for name, value in OLDER_KGE.items() if name != "scheme"}) == replace(
        links, scheme="kvsall"
    )


STRATEGY_NAMES = ", ".join(NAMED)


@pytest.mark.parametrize(
    ("kind", "setting", "message"),
    [
        (KGERun, {"dim": 0}, "dim must be a whole number of at least 1, got 0."),
        (KGERun, {"dim": 2.5}, "dim must be a whole number of at least 1, got 2.5."),
        (KGERun, {"dim": True}, "dim must be a whole number of at least 1, got True."),
        (KGERun, {"epochs": None}, "epochs must be a whole number of at least 1, got None."),
        (KGERun, {"seed": -1}, "seed must be a whole number of at least 0, got -1."),
        (KGERun, {"lr": -0.1}, "lr must be a number of at least 0, got -0.1."),
        (KGERun, {"lr": math.nan}, "lr must be a number of at least 0, got nan."),
        (KGERun, {"lr": math.inf}, "lr must be a number of at least 0, got inf."),
        (KGERun, {"lr": "0.1"}, "lr must be a number of at least 0, got '0.1'."),
        (KGERun, {"model": 3}, "model must be text, got 3."),
        (KGERun, {"model": "transe"}, f"model has the unknown value 'transe'. Expected one of {', '.join(SCORERS)}."),
        (
            KGERun,
            {"model": "complx"},
            f"model has the unknown value 'complx'. Did you mean 'complex'? Expected one of {', '.join(SCORERS)}.",
        ),
        (
            KGERun,
            {"scheme": "kvsal"},
            f"scheme has the unknown value 'kvsal'. Did you mean 'kvsall'? Expected one of {', '.join(SCHEMES)}.",
        ),
        (
            KGERun,
            {"strategies": "aswa,awsa"},
            f"strategies has the unknown value 'awsa'. Did you mean 'aswa'? Expected one of {STRATEGY_NAMES}.",
        ),
        (KGERun, {"strategies": ["aswa", "last", "aswa"]}, "strategies contains 'aswa' twice."),
        (KGERun, {"strategies": ()}, f"strategies must name at least one of {STRATEGY_NAMES}, got ()."),
        (KGERun, {"strategies": " , "}, f"strategies must name at least one of {STRATEGY_NAMES}, got ' , '."),
        (
            KGERun,
            {"strategies": ["aswa", 3]},
            f"strategies must be a list of names from {STRATEGY_NAMES}, got ['aswa', 3].",
        ),
        (
            KGERun,
            {"apply": "swad"},
            f"apply must be one of the strategies of the run (auto, {', '.join(DEFAULT_STRATEGIES)}), got 'swad'.",
        ),
        (KGERun, {"strategies": None}, f"strategies must be a list of names from {STRATEGY_NAMES}, got None."),
        (ImageRun, {"epochs": 0}, "epochs must be a whole number of at least 1 or None, got 0."),
        (ImageRun, {"image_size": 4}, "image_size must be a whole number of at least 8 or None, got 4."),
        (ImageRun, {"fge": "yes"}, "fge must be True or False, got 'yes'."),
        (ImageRun, {"augment": 1}, "augment must be True or False or None, got 1."),
        (
            ImageRun,
            {"precision": "bf61"},
            f"precision has the unknown value 'bf61'. Did you mean 'bf16'? Expected one of {', '.join(PRECISIONS)}.",
        ),
    ],
)
def test_a_bad_value_is_an_error_with_the_setting_the_value_and_the_limits(kind, setting, message):
    with pytest.raises(SettingError) as caught:
        kind(dataset="any", **setting)
    assert str(caught.value) == message
    assert [caught.value.name] == list(setting)


def test_strategies_are_given_as_text_or_as_names():
    for strategies in ("aswa, last", ["aswa", "last"], ("aswa", "last")):
        assert KGERun(dataset="countries", strategies=strategies).strategies == ("aswa", "last")


def test_strategies_have_options_in_python_in_settings_and_on_the_command_line():
    options = {"ema": {"decay": 0.9995, "warmup": False}, "dense-aswa": {}, "swa": {"start": 0.5}}
    texts = ("ema(decay=0.9995,warmup=False)", "dense-aswa", "swa(start=0.5)")
    for given in (options, texts, "ema( decay=0.9995, warmup=false ), dense-aswa(), swa(start=0.5)"):
        run = KGERun(dataset="countries", strategies=given)
        assert run.strategies == texts
        assert run.strategy_names == ["ema", "dense-aswa", "swa"]
    assert KGERun.from_settings(run.to_settings({}, 1)) == run
    assert "--strategies 'ema(decay=0.9995,warmup=False),dense-aswa,swa(start=0.5)'" in run.command("out")
    factories = named_factories(run.strategies)
    assert {name: factory.options for name, factory in factories.items()} == options


def test_the_precision_of_an_average_is_given_in_python_and_as_text():
    for given in ("aswa(dtype=float64)", {"aswa": {"dtype": torch.float64}}):
        run = KGERun(dataset="countries", strategies=given)
        assert named_factories(run.strategies)["aswa"](nn.Linear(1, 1)).average.dtype is torch.float64


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("ema(dekay=0.9)", "The strategy 'ema' has no option 'dekay'. Did you mean 'decay'? Its options: "),
        ("ema(decay=1.5)", "decay must be in [0, 1), got 1.5."),
        ("ema(decay=fast)", "The option 'decay' of 'ema' must be float, got 'fast'."),
        ("ema(every=0)", "every must be a whole number of at least 1, got 0."),
        ("swa(start=-1)", "start must be an epoch (0, 1, 2, …) or a fraction of the run in [0, 1), got -1."),
        ("aswa(greater_is_better=False)", "The strategy 'aswa' has no option 'greater_is_better'. "),
        ("dense-aswa(score_snapshot=2)", "The option 'score_snapshot' of 'dense-aswa' must be bool, got 2."),
        ("lawa(k=0)", "k must be a whole number of at least 1, got 0."),
        ("swad(tolerance_ratio=-0.1)", "tolerance_ratio must be a number of at least 0, got -0.1."),
        ("swad(n_tolerance=0)", "n_tolerance must be a whole number of at least 1, got 0."),
        ("power-ema(wide=0.9)", "wide must be "),
        ("bema(eta=-1.0)", "eta must be "),
        ("lawa(bn_batches=0)", "bn_batches must be a whole number of at least 1 or None, got 0."),
        ("aswa(device=gpu)", "device='gpu' cannot hold an average on this machine: Expected one of cpu"),
        ("aswa(device=meta)", "device='meta' holds no numbers."),
        ("aswa(dtype=float16)", "dtype must be torch.float32 or torch.float64, got torch.float16"),
        ("ema(0.9)", "'ema(0.9)': expected options as name=value, each once, got '0.9'."),
        ("ema(decay=0.9", "'ema(decay=0.9' is not a strategy. "),
    ],
)
def test_a_bad_option_of_a_strategy_is_one_line(given, problem):
    with pytest.raises(SettingError) as caught:
        KGERun(dataset="any", strategies=(given, "last"))
    assert str(caught.value).startswith(f"strategies has the invalid value {given!r}: {problem}")
    assert "\n" not in str(caught.value)
    with pytest.raises((TypeError, ValueError)) as caught:
        named_factories([given])
    assert str(caught.value).startswith(problem)


def test_the_names_are_those_of_the_models_schemes_strategies_and_precisions():
    assert set(SCORERS) == set(MODELS)
    assert (*TRAINING_SCHEMES, BALANCED) == SCHEMES
    assert set(DEFAULT_STRATEGIES) < set(STRATEGIES)
    for kind in KINDS.values():
        (choices,) = [one.choices for one in kind.settings() if one.name == "strategies"]
        assert choices == tuple(NAMED)
    assert {chosen_precision(name) for name in PRECISIONS} == set(PRECISIONS) - {"auto"}


@pytest.mark.parametrize("scorer", SCORERS)
def test_a_dimension_that_a_scorer_refuses_is_refused_before(scorer):
    from aswa_hf.kge import KGEConfig, KGEModel

    for dim in range(1, 10):
        refusals = []
        for build in (
            lambda dim=dim: KGERun(dataset="countries", model=scorer, dim=dim),
            lambda dim=dim: KGEModel(KGEConfig(num_entities=2, num_relations=1, dim=dim, scorer=scorer)),
        ):
            try:
                build()
            except ValueError:
                refusals.append(build)
        assert len(refusals) in (0, 2)


def test_a_number_that_no_computer_holds_is_refused():
    with pytest.raises(ValueError, match="lr must be a number of at least 0, got one that is too large"):
        KGERun(dataset="countries", lr=10**400)
