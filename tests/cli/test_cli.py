"""The command line as a user meets it: real processes, their output, exit status and files."""

import json
import os
import re
import shlex
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import timm
import torch
import warm
from commands import call, outcome
from kge_graphs import random_graph
from places import HELPERS, PACKAGE
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from training import assert_accuracy, assert_same_tensors
from transformers import AutoModelForImageClassification

from aswa_hf.ensembles import PredictionEnsemble
from aswa_hf.trajectory import load_trajectories
from aswa_hf.vision import ImageTensors, as_it_is, load_digits


def run(*arguments, cwd):
    """A command as a process of its own."""
    environment = os.environ | {"COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    return warm.run("-m", "aswa_hf", *arguments, cwd=cwd, env=environment)


@pytest.fixture
def run_here(tmp_path, monkeypatch, capsys):
    """A command in this process, which saves the seconds that importing takes: exit status, output, errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    return partial(outcome, capsys)


def test_demo_prints_a_table_and_json_and_writes_trajectory_and_picture(tmp_path):
    result = run("demo", "--epochs", "2", "--output-dir", "out", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    printed = json.loads(result.stdout)
    assert printed["digits"] == json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(printed["countries"]["strategies"]) == ["last", "best", "aswa"]
    assert [len(question["answers"]) for question in printed["countries"]["questions"]] == [3, 3, 3]
    assert "\x1b" not in result.stderr  # no bars where there is no terminal
    trajectories, about = load_trajectories(tmp_path / "out" / "aswa_trajectory.json")
    tested = about["run"]["strategies"]
    assert set(trajectories) == {"last", "best", "swa", "ema", "aswa"} == set(tested)
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == about["run"]
    assert (tmp_path / "out" / "trajectory.png").read_bytes().startswith(b"\x89PNG")
    for name, trajectory in trajectories.items():
        assert len(trajectory) == 2
        row = next(line for line in result.stderr.splitlines() if line.startswith(f"│ {name} "))
        assert f"{100 * trajectory[-1].score:.2f}" in row
        assert f"{100 * tested[name]['test']['accuracy']:.2f}" in row
    # The scores are those of the strategies' weights: the last epoch's is the running model's.
    assert trajectories["last"][-1].score == trajectories["aswa"][-1].running_score
    content = json.loads((tmp_path / "out" / "aswa_trajectory.json").read_text())
    assert all(abs(sum(s["alphas"]) - 1) < 1e-9 for s in content["strategies"].values())
    # The folder is a model that both libraries load.
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out").eval()
    ours = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).state_dict()
    assert_same_tensors(ours, model.timm_model.state_dict())
    images = ImageTensors(load_digits(train=200, validation=700)["test"], size=32)
    probabilities = PredictionEnsemble(None, [model]).predict(DataLoader(images, 250, collate_fn=as_it_is))
    assert_accuracy(tested["aswa"]["test"]["accuracy"], probabilities, images.labels)


def test_bad_input_is_one_line_and_a_failing_exit_status(tmp_path):
    result = run("demo", "--model", "resnet_of_dreams", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1].startswith("aswa-hf: timm has no model 'resnet_of_dreams'.")
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())

    (tmp_path / "file").write_text("in the way")
    result = run("demo", "--epochs", "1", "--output-dir", "file", cwd=tmp_path)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert (tmp_path / "file").read_text() == "in the way"

    assert run("demo", "--epochs", "0", cwd=tmp_path).returncode == 2


def test_help_shows_an_example(tmp_path):
    assert "aswa-hf demo --epochs 20" in run("demo", "--help", cwd=tmp_path).stdout
    assert "demo" in run(cwd=tmp_path).stdout


def test_help_names_values_in_capitals_only(run_here):
    names = ["demo", "evaluate", "predict", "query", "average", "push", "report", "reproduce", "serve", "space"]
    for command in ([], ["train"], ["train", "kge"], ["train", "image"], *([name] for name in names)):
        status, shown, _ = run_here(*command, "--help")
        assert status == 0
        assert not re.search(r"<\w|\{", shown), shown


def test_a_link_predictor_is_trained_evaluated_asked_and_resumed(run_here, tmp_path):
    train = ("train", "kge", "--dataset", "countries", "--model", "keci", "--dim", "16", "--output-dir", "run")
    status, output, errors = run_here(*train, "--epochs", "4")
    assert status == 0, errors
    folder = tmp_path / "run"
    results = json.loads((folder / "results.json").read_text())
    assert set(results["strategies"]) == {"aswa", "dense-aswa", "swa", "ema", "best", "last"}
    assert results["command"] == " ".join(("aswa-hf", *train[:-2], "--epochs", "4", *train[-2:]))
    for file in ("aswa_trajectory.json", "trajectory.png", "train.log", "entities.json", "model.safetensors"):
        assert (folder / file).exists(), file
    assert f"{100 * results['strategies']['aswa']['test']['mrr']:.2f}" in output

    # The weights at the root of the folder are those of the strategy that did best on validation.
    scores = {name: found["validation"]["mrr"] for name, found in results["strategies"].items()}
    assert scores[results["applied"]] == max(scores.values())
    assert f"{results['applied']} →" in output
    _, output, _ = run_here("evaluate", "run", "--dataset", "countries", "--json")
    assert json.loads(output) == pytest.approx(results["strategies"][results["applied"]]["test"])
    _, output, _ = run_here("predict", "run", "--head", "france", "--relation", "locatedin", "-k", "3", "--json")
    answers = json.loads(output)
    assert [answer["rank"] for answer in answers] == [1, 2, 3]
    assert answers[0]["score"] >= answers[1]["score"] >= answers[2]["score"]

    status, _, errors = run_here(*train, "--epochs", "4")
    assert (status, "run already holds a run" in errors) == (1, True)
    status, _, errors = run_here(*train, "--epochs", "6", "--lr", "0.2", "--dim", "8", "--seed", "1", "--resume")
    assert (status, "--dim was 16, is 8; --lr was 0.1, is 0.2; --seed was 0, is 1." in errors) == (1, True)
    status, _, errors = run_here(*train, "--epochs", "3", "--resume")
    assert (status, "is at epoch 4, so it cannot end after --epochs 3" in errors) == (1, True)
    status, _, errors = run_here(*train, "--epochs", "6", "--resume")
    assert status == 0, errors
    trajectories, _ = load_trajectories(folder / "aswa_trajectory.json")
    assert len(trajectories["aswa"]) == 6
    (folder / "settings.json").unlink()
    status, _, errors = run_here(*train, "--epochs", "6", "--resume")
    assert (status, "settings.json is missing, so the settings of the run are unknown" in errors) == (1, True)


def strict(text):
    """JSON without the numbers that are none."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_folders_may_have_any_name_and_printed_commands_can_be_pasted(run_here, tmp_path):
    data = tmp_path / "[bold] a:smile:b [" / "] [" / "graph]"  # [/…] closes what is not open in rich
    random_graph(data)
    output = tmp_path / "it's $(id)" / "[" / "run]"
    options = ["--dim", 4, "--epochs", 1, "--strategies", "aswa,last"]
    status, printed, complaint = run_here("train", "kge", "--dataset", data, *options, "--output-dir", output)
    assert status == 0, complaint
    assert printed.startswith("graph]: ")
    command = printed.splitlines()[-1].partition("predict with: ")[2]
    assert shlex.split(command)[:3] == ["aswa-hf", "predict", str(output)]
    status, _, complaint = run_here("predict", output, "--head", "e1", "--relation", "r1")
    assert status == 0, complaint


@pytest.mark.filterwarnings("default:The validation score of the")
def test_a_diverged_run_is_one_line_and_saves_no_weights(run_here, tmp_path):
    train = ("train", "kge", "--dataset", "countries", "--dim", "8", "--epochs", "2", "--lr", "1e30")
    for strategies, reason in [("aswa,last", "no decision point had a finite mrr"), ("last", "not finite numbers")]:
        folder = tmp_path / strategies
        status, _, errors = run_here(*train, "--strategies", strategies, "--output-dir", str(folder))
        assert status == 1
        assert errors.strip().splitlines()[-1].startswith("aswa-hf: Training ended without")
        assert reason in errors.strip().splitlines()[-1]
        assert not (folder / "model.safetensors").exists()
        assert not (folder / "results.json").exists()
        logs = [strict(line) for line in (folder / "train.log").read_text().splitlines()]
        assert "nan" in [log.get("eval_mrr") for log in logs]


def test_numbers_that_are_none_and_strategies_without_weights_do_not_spoil_the_results(tmp_path):
    from rich.console import Console
    from torch import nn

    from aswa_hf import BestCheckpoint, LastCheckpoint
    from aswa_hf.experiments.progress import results_table
    from aswa_hf.experiments.running import evaluate_strategies, write_results

    model = nn.Linear(1, 1)
    strategies = {"best": BestCheckpoint(model), "last": LastCheckpoint(model)}
    for strategy in strategies.values():
        with pytest.warns(UserWarning, match="running model is nan"):
            strategy.update(running_score=float("nan"))
    found = evaluate_strategies(strategies, lambda split: {"mrr": float("nan")}, Console(quiet=True))
    assert list(found) == ["last"]
    callback = SimpleNamespace(
        strategies=strategies, score=SimpleNamespace(label="mrr"), greater_is_better=True, applied="last"
    )
    write_results(tmp_path, callback, found, {"train": 1.0}, model="linear", dataset="numbers")
    for content in (
        strict((tmp_path / "results.json").read_text()),
        strict((tmp_path / "aswa_trajectory.json").read_text())["run"],
    ):
        assert content["strategies"] == {"last": {"validation": {"mrr": "nan"}, "test": {"mrr": "nan"}}}
    assert results_table(found, {"mrr": "MRR"}, "", "last").row_count == 1


def test_the_table_marks_what_is_saved_and_what_is_best_and_a_sentence_says_who_did_better(capsys):
    from rich.console import Console

    from aswa_hf.experiments.progress import results_table, verdict

    results = {
        name: {"validation": {"mrr": 0.5}, "test": {"mrr": score}} for name, score in (("aswa", 0.4), ("swa", 0.6))
    }
    Console(width=80).print(results_table(results, {"mrr": "MRR"}, "Ranks", "aswa"))
    printed = capsys.readouterr().out
    assert [line.split("│")[1:-1] for line in printed.splitlines() if "swa" in line] == [
        [" aswa →   ", "      50.00 ", "   40.00 "],
        [" swa      ", "      50.00 ", " * 60.00 "],
    ]
    assert "→ saved   * best test value" in printed
    assert verdict(results, "mrr", "MRR", "aswa") == "On the test split aswa did not win: swa did better in MRR."
    assert verdict(results, "mrr", "MRR", "swa").startswith("On the test split no strategy did better in MRR than swa")
    results["aswa"]["test"]["mrr"] = float("nan")
    assert verdict(results, "mrr", "MRR", "aswa") == "On the test split aswa did not win: swa did better in MRR."


@pytest.mark.parametrize("apply", ["last", "auto"])
def test_the_table_of_a_run_marks_the_strategy_that_was_applied(tmp_path, capsys, apply):
    command = "train", "kge", "--dataset", "countries", "--dim", 4, "--epochs", 2, "--strategies", "best,last"
    assert call(*command, "--apply", apply, "--output-dir", tmp_path / "run") == 0
    applied = strict((tmp_path / "run" / "results.json").read_text())["applied"]
    printed = capsys.readouterr().out
    assert [line.split()[1] for line in printed.splitlines() if "→ " in line and "│" in line] == [applied]
    assert f"MRR than {applied}" in printed or f"On the test split {applied} did not win" in printed


LINKS = "kge --dataset countries --dim 8 --epochs 3 --batch-size 130"
IMAGES = "image --dataset digits --model test_resnet --image-size 16 --train-size 80 --batch-size 20 --epochs 3 --fge"


@pytest.mark.parametrize(("train", "epochs"), [(LINKS, 3), (IMAGES, 3)])
def test_two_processes_make_one_run_folder_and_one_output(train, epochs, tmp_path):
    command = [HELPERS / "forked_ranks.py", PACKAGE / "__main__.py", "train", *train.split()]
    environment = os.environ | {"COLUMNS": "120", "ACCELERATE_USE_CPU": "true"}
    result = warm.run(*command, "--strategies", "aswa,last", "--output-dir", "run", cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("Written to run") == 1
    folder = tmp_path / "run"
    assert json.loads((folder / "settings.json").read_text())["num_processes"] == 2
    strategies = json.loads((folder / "results.json").read_text())["strategies"]
    assert set(strategies) - {"fge"} == {"aswa", "last"}
    logs = [json.loads(line) for line in (folder / "train.log").read_text().splitlines()]
    decided = [log["epoch"] for log in logs if "aswa/decision" in log]
    assert decided == [float(epoch) for epoch in range(1, epochs + 1)]
    (checkpoint,) = folder.glob("checkpoint-*/trainer_state.json")
    state = json.loads(checkpoint.read_text())
    assert state["max_steps"] == state["global_step"]
    if train == IMAGES:  # FGE's two steps are one cycle
        assert (state["max_steps"], strategies["fge"]["members"]) == (6, 1)
        assert [path.name for path in folder.glob("fge/snapshot-*")] == ["snapshot-1.safetensors"]


def test_processes_that_do_not_train_together_are_refused(run_here, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, _, errors = run_here("train", "kge", "--dataset", "countries", "--dim", "8", "--output-dir", "run")
    assert (status, "2 processes were started, but each trains alone" in errors) == (1, True)
    assert not (tmp_path / "run" / "settings.json").exists()


def test_fge_of_a_prolonged_run_sets_out_from_its_own_point(run_here, tmp_path):
    command = ("train", "image", "--dataset", "digits", "--model", "test_resnet", "--image-size", "16", "--fge")
    command += ("--train-size", "100", "--batch-size", "20", "--val-ratio", "0.2", "--strategies", "aswa")
    status, _, errors = run_here(*command, "--epochs", "2", "--output-dir", "a")
    assert status == 0, errors
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for left in (tmp_path / "b" / "fge").iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    for name in ("a", "b"):
        status, _, errors = run_here(*command, "--epochs", "4", "--resume", "--output-dir", name)
        assert status == 0, errors
    prolonged, anew = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("a", "b"))
    assert prolonged["strategies"] == anew["strategies"]
    # Another cycle is another FGE, from the same point.
    status, _, errors = run_here(*command, "--epochs", "4", "--fge-cycle", "1.6", "--resume", "--output-dir", "a")
    assert status == 0, errors
    longer = json.loads((tmp_path / "a" / "results.json").read_text())["strategies"]
    assert longer["aswa"] == prolonged["strategies"]["aswa"]
    # Five steps: the lowest rates of cycles of two are those of steps 1, 3 and 5, of a cycle of eight that of step 4.
    assert (prolonged["strategies"]["fge"]["members"], longer["fge"]["members"]) == (3, 1)
    # A run of five epochs would have had to keep the weights after the fourth.
    status, _, errors = run_here(*command, "--epochs", "5", "--resume", "--output-dir", "a")
    assert (status, "starts from epoch 4, which this run has passed" in errors) == (1, True)


def test_an_image_classifier_is_trained_tested_with_every_strategy_and_loaded_by_both_libraries(run_here, tmp_path):
    command = ("train", "image", "--dataset", "digits", "--model", "test_resnet", "--image-size", "16")
    command += ("--train-size", "300", "--batch-size", "50", "--val-ratio", "0.2", "--fge", "--output-dir", "run")
    status, output, errors = run_here(*command, "--epochs", "5")
    assert status == 0, errors
    folder = tmp_path / "run"
    results = json.loads((folder / "results.json").read_text())
    assert (results["task"], results["epochs"], results["seed"]) == ("image-classification", 5, 0)
    assert results["images"] == {"train": 300, "validation": 260, "test": 497}
    assert list(results["strategies"]) == ["aswa", "dense-aswa", "swa", "ema", "best", "last", "fge"]
    for file in ("aswa_trajectory.json", "trajectory.png", "train.log", "config.json", "model.safetensors"):
        assert (folder / file).exists(), file
    trajectories, _ = load_trajectories(folder / "aswa_trajectory.json")
    assert [record.members for record in trajectories["swa"]] == [0, 0, 1, 2, 3]  # from epoch 126 of 225 on
    for name, found in results["strategies"].items():
        row = next(line for line in output.splitlines() if line.startswith(f"│ {name} "))
        assert f"{100 * found['test']['accuracy']:.2f}" in row
    assert results["strategies"]["fge"]["members"] == 2

    # The weights at the root are the best on validation, for timm and transformers, on images prepared as they say.
    import timm
    from torch.utils.data import DataLoader
    from transformers import AutoModelForImageClassification

    from aswa_hf.ensembles import PredictionEnsemble
    from aswa_hf.vision import ImageTensors, as_it_is, load_digits

    models = [
        timm.create_model(f"local-dir:{folder}", pretrained=True),
        AutoModelForImageClassification.from_pretrained(folder),
    ]
    about = models[0].pretrained_cfg
    test = ImageTensors(
        load_digits(train=1040, validation=260)["test"],
        size=about["input_size"][-1],
        mean=about["mean"],
        std=about["std"],
    )
    loader = DataLoader(test, batch_size=100, collate_fn=as_it_is)
    for model in models:
        alone = PredictionEnsemble(None, [model], forward=lambda model, batch: model(batch["pixel_values"]))
        saved = results["strategies"][results["applied"]]
        assert_accuracy(saved["test"]["accuracy"], alone.predict(loader), test.labels)

    # A finished run that is resumed has nothing left to do, and returns the same.
    status, _, errors = run_here(*command, "--epochs", "5", "--resume")
    assert status == 0, errors
    assert json.loads((folder / "results.json").read_text())["strategies"] == results["strategies"]
    (folder / "fge" / "start.safetensors").unlink()
    status, _, errors = run_here(*command, "--epochs", "5", "--resume")
    assert (status, "the run was started without --fge and is past epoch 4" in errors) == (1, True)


def test_digits_are_drawn_by_class_and_tested_on_the_same_images_whatever_is_left_for_training():
    from aswa_hf.experiments import ImageRun
    from aswa_hf.experiments.image import load_images

    small = load_images(ImageRun(dataset="digits", val_ratio=0.2, train_size=100))
    large = load_images(ImageRun(dataset="digits"))
    # Each digit is about a tenth of the 1,300 that are not for testing.
    for labels, share in [(small["train"], 10), (small["validation"], 26), (large["validation"], 6.5)]:
        counts = [labels["label"][:].count(digit) for digit in range(10)]
        assert all(0.85 * share <= count <= 1.15 * share for count in counts), counts
    assert [len(large[split]) for split in ("train", "validation", "test")] == [1235, 65, 497]
    assert small["test"]["image"][:] == large["test"]["image"][:]


def test_a_killed_image_run_is_resumed_bit_identically(tmp_path):
    command = "train image --dataset digits --model test_resnet --image-size 16 --train-size 200 --batch-size 40"
    command += " --val-ratio 0.2 --epochs 5 --augment --fge"
    run = warm.run(HELPERS / "killed_commands.py", tmp_path, "SIGKILL@2", "SIGTERM@3", "--", *command.split())
    assert run.returncode == 0, run.stderr[-3000:]
    straight, killed = (tmp_path / name for name in ("straight", "killed"))
    for file in ("model.safetensors", *(p.relative_to(straight) for p in straight.glob("fge/*.s*"))):
        # Not the bytes of the files: safetensors writes their metadata in any order.
        expected, found = (load_file(folder / file) for folder in (straight, killed))
        assert expected.keys() == found.keys()
        assert [key for key in expected if not torch.equal(expected[key], found[key])] == [], file
    histories = [load_trajectories(folder / "aswa_trajectory.json")[0] for folder in (straight, killed)]
    assert histories[0] == histories[1]
    for log in ("train.log", "fge/train.log"):
        entries = [
            [(entry["step"], *entry) for entry in map(json.loads, (f / log).read_text().splitlines())]
            for f in (straight, killed)
        ]
        assert entries[1] == entries[0]
    results = [json.loads((folder / "results.json").read_text())["strategies"] for folder in (straight, killed)]
    assert results[0] == results[1]
    assert len(list(killed.glob("fge/snapshot-*"))) == results[0]["fge"]["members"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train image --dataset digits --output-dir i --model resnet_of_dreams", "no model 'resnet_of_dreams'"),
        (
            "train image --dataset digits --output-dir i --recipe cake",
            "There is no recipe 'cake'. Expected one of vgg16",
        ),
        (
            "train image --dataset digits --output-dir i --strategies aswa,best,first",
            "has the unknown value 'first'",
        ),
        ("train image --dataset digits --output-dir i --val-ratio 1.5", "1.5"),
        ("train image --dataset nowhere --output-dir i", "nowhere"),
        ("train image --dataset digits --output-dir i --epochs 1 --fge", "needs --epochs 2 or more"),
        ("train image --dataset digits --output-dir i --epochs 5 --fge --fge-cycle 3", "the last 1 of 5 epochs"),
        ("train image --dataset digits --output-dir i --epochs 5 --fge --fge-cycle 0", "above 0, got 0.0"),
        ("train image --dataset digits --output-dir i --train-size 5000", "train_size is 5000. Expected at least 10"),
        ("train image --dataset digits --output-dir i --precision int4", "--precision has the unknown value 'int4'"),
        ("train image --dataset digits --output-dir i --resume", "no checkpoint in i"),
        ("train kge --dataset nowhere --output-dir a", "nowhere"),
        ("train kge --dataset countries --model transe --output-dir b", "--model has the unknown value 'transe'"),
        ("train kge --dataset countries --output-dir c --resume", "no checkpoint in c"),
        ("predict nothing --head france --relation locatedin", "nothing"),
    ],
)
def test_wrong_questions_are_one_line(arguments, message, run_here):
    status, _, errors = run_here(*arguments.split())
    assert status == 1
    assert message in errors.strip().splitlines()[-1]
    assert errors.strip().splitlines()[-1].startswith("aswa-hf: ")
