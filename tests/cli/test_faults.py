"""What a run may meet: another process in its folder, Ctrl-C, a full disk, too little memory, typing errors."""

import io
import os
import re
import signal
import sys

import pytest
import torch
from commands import call
from moments import at

from aswa_hf._utils.locks import locked
from aswa_hf.kge import KGEConfig, KGEModel, evaluate_link_prediction, load_kg
from aswa_hf.run_folder import newest_checkpoint


def refused(*arguments):
    """What a command says that ends with an error."""
    complaint = call(*arguments)
    assert isinstance(complaint, str)
    assert "\n" not in complaint
    return complaint


def train_and_announce(options, descriptor, errors):
    """A forked process that runs a command, and writes a line to a descriptor after the first step of training."""
    status = 1
    try:
        at("on_step_end", lambda args, state: os.write(descriptor, b"training\n") if state.global_step == 1 else None)
        with errors.open("w") as sys.stderr:
            status = call(*options)
    finally:
        os._exit(status)


def test_a_folder_is_trained_in_by_one_process_and_ctrl_c_says_how_to_resume(tmp_path):
    run = tmp_path / "run"
    options = ["train", "kge", "--dataset", "countries", "--dim", "8", "--epochs", "3000", "--output-dir", str(run)]
    reader, writer = os.pipe()
    first = os.fork()
    if first == 0:
        train_and_announce(options, writer, tmp_path / "errors")
    os.close(writer)
    try:
        with os.fdopen(reader) as announced:
            assert announced.readline() == "training\n"  # or nothing, at once, if the process has ended
        assert refused(*options).startswith(f"aswa-hf: Another process is training in {run}.")
    finally:
        os.kill(first, signal.SIGINT)
        status = os.waitpid(first, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 130
    last = (tmp_path / "errors").read_text().strip().splitlines()[-1]
    assert last == "aswa-hf: interrupted; --resume continues from the last checkpoint"
    # The folder is free again, and has the checkpoint of the first epoch.
    assert "already holds a run" in refused(*options)
    assert newest_checkpoint(run) is not None


def test_a_run_that_is_refused_leaves_no_folder(tmp_path):
    common = "train", "kge", "--output-dir", tmp_path / "run"
    assert "Did you mean 'countries-s3'?" in refused(*common, "--dataset", "countries-s4")
    assert "contains 'aswa' twice" in refused(*common, "--dataset", "countries", "--strategies", "aswa, aswa")
    late = refused(*common, "--dataset", "countries", "--dim", 8, "--epochs", 2, "--strategies", "swa(start=20)")
    assert late.startswith("aswa-hf: The run cannot end with swa: swa starts at decision point 21, and the run has 2")
    memory = refused(*common, "--dataset", "countries", "--dim", 10**12)
    assert memory.startswith("aswa-hf: There is not enough memory for this (")
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_refused_leaves_the_folder_of_a_trainer_that_has_written_nothing_yet(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    reader, writer = os.pipe()
    other = os.fork()
    if other == 0:
        try:
            with locked(run, "_aswa.lock"):  # as ASWACallback does
                os.write(writer, b"locked")
                signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(reader, 6) == b"locked"
        assert "Did you mean" in refused("train", "kge", "--output-dir", run, "--dataset", "countries-s4")
        assert (run / "_aswa.lock").exists()
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    # Then the locks go, but not a folder that was there before.
    (tmp_path / "link").symlink_to(run)
    late = "--dataset", "countries", "--dim", 8, "--epochs", 2, "--strategies", "swa(start=20)"
    assert "cannot end with swa" in refused("train", "kge", "--output-dir", tmp_path / "link", *late)
    assert list(run.iterdir()) == []


@pytest.mark.parametrize("told", ["PytorchStreamWriter failed writing file data/1", "unexpected pos 128 vs 22"])
def test_a_full_disk_ends_a_run_in_one_line(tmp_path, monkeypatch, told):
    def save(*args, **options):
        raise RuntimeError(f"[enforce fail at inline_container.cc:858] . {told}\nframe #0: …")

    monkeypatch.setattr(torch, "save", save)
    common = "train", "kge", "--output-dir", tmp_path / "run", "--dataset", "countries", "--dim", 4, "--epochs", 2
    line = refused(*common)
    assert f"A checkpoint could not be saved in {tmp_path / 'run'}" in line
    assert "is the disk full?" in line


def test_a_lost_process_is_one_line_that_says_how_to_resume(tmp_path, monkeypatch):
    def step(*args, **options):
        raise RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:15519: Connection "
            "reset by peer. This is typically caused by a remote worker hanging or bugs in the application."
        )

    monkeypatch.setattr("aswa_hf.kge.KGETrainer.training_step", step)
    line = refused("train", "kge", "--output-dir", tmp_path / "run", "--dataset", "countries", "--dim", 4)
    assert line == (
        "aswa-hf: Another process of this run has ended or cannot be reached (Read error [127.0.0.1]:15519: "
        "Connection reset by peer): see its output; --resume continues from the last checkpoint"
    )


def test_characters_that_cannot_be_shown_do_not_end_a_run(tmp_path, monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True))
    options = "--dataset", "countries", "--dim", 4, "--epochs", 1, "--strategies", "aswa,last"
    assert call("train", "kge", *options, "--output-dir", tmp_path / "run") == 0
    assert rb"\u2192 saved" in shown.getvalue()


def test_mistyped_folders_are_not_taken_for_repositories(tmp_path, monkeypatch):
    (tmp_path / "runs" / "umls-keci").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for command in (
        ["predict", "runs/umls-kecj", "--head", "a", "--relation", "b"],
        ["train", "kge", "--dataset", "runs/umls_keci", "--output-dir", "new"],
        ["train", "image", "--dataset", "runs/umls-kec", "--output-dir", "new"],
    ):
        assert refused(*command).endswith("Did you mean runs/umls-keci?")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "train kge --dataset countries --model complx",
            "--model has the unknown value 'complx'. Did you mean 'complex'?",
        ),
        (
            "train kge --dataset countries --strategies aswa,swaa",
            "--strategies has the unknown value 'swaa'. Did you mean 'swa'?",
        ),
        ("reproduce trian-fit", "There is no table 'trian-fit'. Did you mean 'train-fit'?"),
        ("train image --dataset digit", "There is no dataset 'digit'. Did you mean 'digits'?"),
        ("reproduce link-predictions", "There is no table 'link-predictions'. Did you mean 'link-prediction'?"),
        ("reproduce nell --models complx", "--models: there is no 'complx'. Did you mean 'complex'?"),
        ("average nowhere --strategy unifrm", "--strategy must be one of"),
        ("average nowhere --strategy uniform --decay 2", "--decay must be in"),
        ("train image --dataset digits --recipe vgg61", "There is no recipe 'vgg61'. Did you mean 'vgg16'?"),
        ("train kge --dataset countries --recipe codex-s/complx", "There is no recipe 'codex-s/complx'. Did you mean"),
        ("train kge --dataset countries --recipe my.yaml/best", "There is no file of recipes my.yaml."),
        (
            "train image --dataset digits --model test_resne",
            "timm has no model 'test_resne'. Did you mean 'test_resnet'?",
        ),
        (
            "train image --dataset digits --model preresnet20",
            "timm has no model 'preresnet20'. Did you mean 'preresnet20_",
        ),
        ("train image --dataset digits --val-ratio 2", "--val-ratio must be above 0 and below 1, got 2."),
        ("reproduce cifar --models vgg166", "--models: there is no 'vgg166'. Did you mean 'vgg16'?"),
        ("train kge --dataset countries --dim 7", "--dim must be a multiple of 2 for complex, got 7."),
        ("train kge --dataset countries --model distmult --p 2", "--p is only for model keci, and model is distmult."),
    ],
)
def test_near_misses_are_found_before_anything_is_loaded(command, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.load_dataset", None)
    assert refused(*command.split(), "--output-dir", "run").startswith(f"aswa-hf: {message}")
    assert list(tmp_path.iterdir()) == []


def test_a_mistyped_option_is_one_line(capsys):
    assert call("train", "kge", "--dataset", "countries", "--dims", 3) == 2
    assert capsys.readouterr().err.startswith("aswa-hf: No such option: --dims. Did you mean --dim? See ")


def test_an_unexpected_error_is_one_line_and_with_debug_a_traceback(tmp_path, monkeypatch, capsys):
    def fail(*args, **options):
        raise KeyError("inside")

    monkeypatch.setattr("aswa_hf.kge.LinkPredictor.from_pretrained", fail)
    command = "predict", tmp_path, "--head", "a", "--relation", "b"
    assert refused(*command) == "aswa-hf: unexpected KeyError: 'inside' (use --debug to see where)"
    assert capsys.readouterr().err == ""
    for arguments in (("--debug", *command), (*command, "--debug")):
        assert refused(*arguments).startswith("aswa-hf: unexpected KeyError")
        assert "Traceback" in capsys.readouterr().err
    # An ordinary error has one too.
    assert refused("reproduce", "nothing", "--debug").startswith("aswa-hf: There is no table")
    assert "in find_table" in capsys.readouterr().err


def test_a_model_that_is_not_a_link_predictor_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "timm_wrapper"}')
    said = refused("predict", tmp_path, "--head", "a", "--relation", "b")
    assert "contains a model of type 'timm_wrapper', not a link predictor" in said


def test_a_model_is_not_evaluated_on_a_graph_of_another_size():
    kg = load_kg("countries")
    model = KGEModel(KGEConfig(num_entities=kg.num_entities + 1, num_relations=2, dim=4, scorer="distmult"))
    with pytest.raises(ValueError, match="The model has 276 entities and 2 relations, the graph 275 and 2"):
        evaluate_link_prediction(model, kg)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "aswa-hf: No such command 'trian'. Did you mean 'train'?"),
        (["train", "kge"], "aswa-hf: Missing option '--dataset'."),
        (["predict", "run", "--hed", "x"], "aswa-hf: No such option: --hed"),
        (
            ["train", "kge", "--dataset", "countries", "--output-dir", "run", "--epochs", "many"],
            "aswa-hf: Invalid value",
        ),
    ],
)
def test_wrong_usage_is_one_line(arguments, message, capsys):
    assert call(*arguments) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(message)
    assert errors.count("\n") == 1
    assert errors.rstrip().endswith("--help.")


def test_a_command_without_arguments_shows_its_help_once(capsys):
    call("train")
    assert capsys.readouterr().out.count("Usage:") == 1


def commands():
    """All commands, with the words that start them."""
    from typer.main import get_command

    from aswa_hf.cli import app

    found = []
    for name, command in get_command(app).commands.items():
        found += [([name, kind], one) for kind, one in getattr(command, "commands", {}).items()] or [([name], command)]
    return found


def test_help_shows_each_example_in_one_line_and_placeholders_of_one_style(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    for words, command in commands():
        assert call(*words, "--help") == 0
        lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
        examples = re.findall(r"`(aswa-hf [^`]*)`", command.help)
        assert examples
        assert [example for example in examples if example not in lines] == []
        for parameter in command.params:
            if not getattr(parameter, "is_flag", False):
                assert re.fullmatch(r"[A-Z]+([:,|-][A-Z]+)*", parameter.metavar or ""), (words, parameter.name)


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_an_output_folder_that_cannot_be_made_is_one_line(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    message = f"aswa-hf: The folder {place} cannot be created: file is a file. Choose another one."
    assert refused("train", "kge", "--dataset", "countries", "--output-dir", place) == message
    assert refused("train", "image", "--dataset", "digits", "--output-dir", place) == message
    assert refused("demo", "--output-dir", place) == message
    assert (tmp_path / "file").read_text() == "kept"


def test_folders_that_do_not_exist_are_told_with_the_nearest_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "umls-run").mkdir()
    for command in (
        "predict umls-rum --head a --relation b",
        f"predict {tmp_path}/umls-rum --head a --relation b",
        "query umls-rum 2p:a,b,c",
        "evaluate umls-rum",
        "average umls-rum --output-dir new",
        "push umls-rum me/model --dry-run new",
        "report umls-rum",
        "train image --dataset umls-rum --output-dir new",
        "train kge --dataset umls-rum --output-dir new",
    ):
        line = refused(*command.split())
        assert line.startswith("aswa-hf: There is no ") or "does not exist" in line or "cannot be" in line, command
        assert line.endswith("umls-run?"), command
    assert not (tmp_path / "new").exists()


def test_a_run_of_the_other_kind_is_not_resumed(tmp_path):
    (tmp_path / "settings.json").write_text('{"dataset": {"name": "digits"}, "recipe": "vgg16"}')
    said = refused("train", "kge", "--dataset", "countries", "--resume", "--output-dir", tmp_path)
    assert f"{tmp_path} holds a run of `aswa-hf train image`, not of `aswa-hf train kge`" in said


def test_an_image_classifier_without_a_model_type_is_no_link_predictor(tmp_path):
    (tmp_path / "config.json").write_text('{"architecture": "test_resnet", "num_classes": 10}')
    said = refused("predict", tmp_path, "--head", "a", "--relation", "b")
    assert "contains a model of type 'test_resnet', not a link predictor" in said
