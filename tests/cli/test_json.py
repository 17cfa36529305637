"""Commands whose results a program reads: JSON alone on standard output."""

import json

from commands import outcome
from hub_client import hub_in_process
from space_runs import link_run
from typer.main import get_command

from aswa_hf.cli import app


def test_a_training_run_prints_its_results_as_json_and_all_else_as_errors(tmp_path, capsys):
    train = ["train", "kge", "--dataset", "countries", "--dim", "8", "--epochs", "2", "--json"]
    status, out, err = outcome(capsys, *train, "--strategies", "aswa,last", "--output-dir", str(tmp_path / "run"))
    assert status == 0, err
    printed = json.loads(out)
    assert printed == json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))
    assert set(printed["strategies"]) == {"aswa", "last"}
    assert "Written to" in err


def test_a_dry_push_prints_its_files_as_json(tmp_path, capsys):
    run = link_run(tmp_path / "run")
    status, out, err = outcome(capsys, "push", str(run), "me/model", "--dry-run", str(tmp_path / "out"), "--json")
    assert status == 0, err
    printed = json.loads(out)
    assert printed["files"] == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert err == ""


def test_every_command_that_ends_prints_json_if_it_is_asked_to():
    commands = get_command(app).commands
    ending = {name: command for name, command in commands.items() if name not in ("serve", "train")}
    for name, command in (ending | commands["train"].commands).items():
        assert any("--json" in option.opts for option in command.params), name


def test_uploads_are_shown_on_a_terminal_alone(tmp_path, monkeypatch, capsys):
    run = link_run(tmp_path / "run")
    with hub_in_process(monkeypatch):
        status, out, err = outcome(capsys, "push", str(run), "user/model", "--json")
        assert status == 0, err
        assert (list(json.loads(out)), err) == (["url"], "")
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
        status, _, err = outcome(capsys, "push", str(run), "user/model", "--json")
    assert status == 0, err
    assert err.startswith(f"loading {run} …\r\x1b[Kpushing to user/model …\n")
