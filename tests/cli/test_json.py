"""Commands whose results a program reads: JSON alone on standard output."""

import json

from commands import outcome
from space_runs import link_run


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
