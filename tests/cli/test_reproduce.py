"""`aswa-hf reproduce` as a user meets it: grids that run, are killed, go on, fail in part."""

import json
import os
import signal
from functools import partial
from pathlib import Path

import commands
import pytest
import torch
from moments import at, die

import aswa_hf.experiments.kge  # noqa: F401  here and not in every forked process
from aswa_hf.kge import LinkPredictor, evaluate_link_prediction, load_kg

COUNTRIES = ("--datasets", "countries", "--models", "complex")


call = partial(commands.call, "reproduce")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def mrr(rows, strategy, column="mrr"):
    return next(row["columns"][column] for row in rows if row["strategy"] == strategy)


@pytest.mark.filterwarnings("default:Found only .* queries")  # the graph is small
def test_a_table_is_run_once_and_shared_with_the_others(here, capsys):
    options = (*COUNTRIES, "--seeds", "0-1", "--epochs", "2")
    assert call("link-prediction", *options, "--dry-run") == 0
    assert capsys.readouterr().out == "countries-complex-0-2: to do\ncountries-complex-1-2: to do\n"
    assert not (here / "runs").exists()

    assert call("link-prediction", *options, "--json") == 0
    printed = capsys.readouterr()
    content = json.loads(printed.out)
    assert "2/2 complex on countries, seed 1, 2 epochs: " in printed.err
    assert "not the setting of the paper" in content["title"]
    assert (content["failed"], content["missing"]) == ({}, {})
    folders = [here / "runs" / f"countries-complex-{seed}-2" for seed in (0, 1)]
    results = [json.loads((folder / "results.json").read_text()) for folder in folders]
    for strategy in ("aswa", "swa-all", "swa", "ema", "best", "last"):
        scores = [result["strategies"][strategy]["test"]["mrr"] for result in results]
        cell = mrr(content["rows"], strategy)
        assert (cell["ours"], cell["runs"], cell["paper"]) == (pytest.approx(sum(scores) / 2), 2, None)
    assert results[1]["command"].startswith(
        "aswa-hf train kge --dataset countries --epochs 2 --strategies aswa,swa-all,swa,ema,best,last --seed 1"
    )
    assert all((folder / "train.log").exists() for folder in folders)

    # The next tables evaluate the same runs, and do not touch them.
    written = [(folder / "results.json").stat().st_mtime_ns for folder in folders]
    assert call("train-fit", *options, "--dry-run") == 0
    assert capsys.readouterr().out.splitlines()[0] == "countries-complex-0-2: trained, to be evaluated"
    assert call("train-fit", *options, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    kg = load_kg("countries")
    fits = [
        evaluate_link_prediction(LinkPredictor.from_pretrained(f, kg=kg).model, kg, "train")["mrr"] for f in folders
    ]
    assert mrr(rows, "aswa")["ours"] == pytest.approx(sum(fits) / 2)

    assert call("multi-hop", *options, "--seeds", "0", "--json") == 0
    printed = capsys.readouterr()
    assert 0 < mrr(json.loads(printed.out)["rows"], "last", "2p")["ours"] <= 1
    found = json.loads((folders[0] / "multi-hop.json").read_text())
    assert found["queries"]["2i"] == 500
    assert found["settings"] == {"per_shape": 500, "seed": 0, "beam": 10}
    assert not (folders[1] / "multi-hop.json").exists()

    assert call("multi-hop", *options, "--seeds", "0") == 0
    printed = capsys.readouterr()
    assert "1 of 1 runs are already done." in printed.err
    assert "MRR of the hard answers of multi-hop queries" in printed.out
    assert [(folder / "results.json").stat().st_mtime_ns for folder in folders] == written


def test_what_fails_is_reported_and_the_others_continue(here, capsys):
    broken = here / "data" / "Broken"
    broken.mkdir(parents=True)
    for split in ("train", "valid", "test"):
        (broken / f"{split}.txt").write_text("only two\n")
    asked = ("--datasets", "Broken,WN18RR,countries", "--models", "distmult", "--seeds", "0", "--epochs", "1")
    assert call("link-prediction", *asked, "--json") == 1
    printed = capsys.readouterr()
    content = json.loads(printed.out)
    assert list(content["failed"]) == ["broken-distmult-0-1"]
    assert "train.txt" in content["failed"]["broken-distmult-0-1"]
    assert "WN18RR is missing: there is no folder of that name in data" in content["missing"]["WN18RR"]
    assert "Traceback" not in printed.err
    rows = {row["dataset"]: row["columns"]["mrr"] for row in content["rows"] if row["strategy"] == "aswa"}
    assert rows["countries"]["runs"] == 1
    assert (rows["WN18RR"]["ours"], rows["WN18RR"]["paper"]) == (None, 0.354)

    # Where nothing can be run there is no table to show.
    assert call("link-prediction", "--datasets", "UMLS", *asked[2:]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("UMLS is missing: there is no folder of that name in data")

    # Another run in the folder is not mistaken for this one.
    settings = here / "runs" / "countries-distmult-0-1" / "settings.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"lr": 1.0}))
    assert call("link-prediction", "--datasets", "countries", *asked[2:]) == 1
    assert "lr was 1.0, is 0.1" in capsys.readouterr().err


def test_a_killed_grid_resumes_where_it_was(here, capsys):
    asked = ("link-prediction", *COUNTRIES, "--seeds", "0-1", "--epochs", "3", "--output-dir")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more do not survive a fork
    try:
        second = here / "killed" / "countries-complex-1-3"
        child = os.fork()
        if child == 0:
            at("on_save", lambda args, state: die() if Path(args.output_dir).name == second.name else None)
            os._exit(call(*asked, "killed"))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert not (second / "results.json").exists()
        first = (here / "killed" / "countries-complex-0-3" / "results.json").stat().st_mtime_ns
        assert call(*asked, "killed", "--dry-run") == 0
        states = capsys.readouterr().out.splitlines()
        assert states[0] == "countries-complex-0-3: done"
        assert states[1].startswith("countries-complex-1-3: at epoch ")

        assert call(*asked, "killed", "--json") == 0
        printed = capsys.readouterr()
        assert "1 of 2 runs are already done." in printed.err
        assert (here / "killed" / "countries-complex-0-3" / "results.json").stat().st_mtime_ns == first
        rows = json.loads(printed.out)["rows"]
        assert call(*asked, "straight", "--json") == 0
        assert json.loads(capsys.readouterr().out)["rows"] == rows
    finally:
        torch.set_num_threads(threads)


def test_images_with_fge(here, capsys):
    asked = ("--datasets", "digits", "--models", "preresnet20", "--seeds", "0", "--epochs", "2")
    assert call("cifar", *asked, "--train-size", "40", "--bn-batches", "1", "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert [row["strategy"] for row in content["rows"]] == ["last", "best", "ema", "swa", "aswa", "fge"]
    results = json.loads(
        (here / "runs" / "digits-preresnet20_cifar-0-2-40images-bn1-fge" / "results.json").read_text()
    )
    for row in content["rows"]:
        test = results["strategies"][row["strategy"]]["test"]["accuracy"]
        assert row["columns"]["accuracy"]["ours"] == pytest.approx(100 * test)
    assert call("cifar", *asked, "--train-size", "40", "--bn-batches", "1", "--dry-run") == 0
    assert capsys.readouterr().out == "digits-preresnet20_cifar-0-2-40images-bn1-fge: done\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["imagenet"], "There is no table 'imagenet'. Expected one of cifar, cifar-epochs"),
        (["nell", "--models", "bert"], "--models: there is no 'bert'. Table nell takes distmult"),
        (["nell", "--seeds", "zero"], "--seeds zero: expected whole numbers of at least 0"),
        (["nell", "--epochs", "0"], "--epochs 0: expected whole numbers of at least 1"),
        (["nell", "--epochs", "10,20"], "the runs of table nell have one length"),
        (["nell", "--seeds", "3-1"], "--seeds '3-1' contains no number"),
        (["nell", "--train-size", "9"], "--train-size 9 is for tables of images; table nell is about knowledge"),
        (["nell", "--precision", "bf16"], "--precision bf16 is for tables of images; table nell is about knowledge"),
        (["cifar", "--precision", "bf61"], "precision has the unknown value 'bf61'. Did you mean 'bf16'?"),
        (["nell", "--val-ratio", "0.3"], "--val-ratio 0.3 is for tables of images; table nell is about knowledge"),
        (["cifar", "--val-ratio", "1"], "val_ratio must be above 0 and below 1, got 1."),
        (["nell", "--rates", "0.1"], "--rates 0.1 is for tables of robustness; the runs of table nell have one rate"),
        (["robustness", "--rates", "0.1,fast"], "--rates 0.1,fast: expected numbers above 0"),
        (["robustness", "--rates", "0"], "--rates 0: expected numbers above 0"),
        (["robustness", "--rates", "nan"], "--rates nan: expected numbers above 0"),
    ],
)
def test_bad_input_is_one_line(here, arguments, complaint):
    said = call(*arguments)
    assert said.startswith("aswa-hf: ")
    assert complaint in said
    assert "\n" not in said


def test_robustness_is_measured_at_several_learning_rates_and_drawn(here, capsys):
    options = (*COUNTRIES, "--epochs", "2", "--rates", "0.01,0.1", "--seeds", "0")
    assert call("robustness", *options, "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert list(mrr(content["rows"], "aswa", "0.1")) == list(mrr(content["rows"], "dense-aswa", "0.01"))
    found = {row["strategy"]: row["epochs"] for row in content["times"]}
    # The best single epoch reaches its own score, and averages that keep the best are never behind it.
    assert min(filter(None, found["best"].values())) >= min(filter(None, found["aswa"].values()))
    assert (here / "runs" / "robustness.png").stat().st_size > 0
    assert call("robustness", *options) == 0
    assert "epochs to a validation mrr of" in capsys.readouterr().out
    # A seed that lacks a learning rate is not compared with one that has all.
    (found,) = (here / "runs").glob("*-0-2-lr0.1-robustness")
    (here / "runs" / found.name.replace("-0-2-", "-1-2-")).write_text("not a folder")
    assert call("robustness", *options[:-1], "0,1", "--json") == 1
    shown = capsys.readouterr()
    assert "Seed 1 of complex on countries is left out: it lacks some of the learning rates." in shown.err
    again = json.loads(shown.out)
    assert (again["rows"], again["times"]) == (content["rows"], content["times"])
