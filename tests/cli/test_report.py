"""Reports from the command line, over runs that were really trained."""

import json
from pathlib import Path

import pytest
from commands import call


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Short runs of a model and of its twin, two seeds each."""
    folder = tmp_path_factory.mktemp("runs")
    for model in ("complex", "keci"):
        for seed in (0, 1):
            name = str(folder / f"{model}-{seed}")
            options = f"--dataset countries --dim 8 --epochs 3 --lr 0.5 --model {model} --seed {seed}"
            assert not call("train", "kge", *options.split(), "--output-dir", name)
    return sorted(map(str, folder.iterdir()))


def test_trained_runs_become_one_page(runs, tmp_path, capsys):
    page = tmp_path / "pages" / "all.html"
    assert not call("report", *runs, "--output", str(page), "--json")
    told = json.loads(capsys.readouterr().out)
    (task,) = told["tasks"]
    assert task["counted_once"] == [{"dataset": "countries", "model": "keci", "as": "complex"}]
    measured = [json.loads(Path(run, "results.json").read_text())["strategies"] for run in runs[:2]]
    row = next(r for r in task["results"] if (r["model"], r["split"], r["metric"]) == ("complex", "test", "mrr"))
    values = [strategies[row["strategy"]]["test"]["mrr"] for strategies in measured]
    assert (row["mean"], row["n"]) == (pytest.approx(sum(values) / 2), 2)
    assert sorted(path.name for path in page.parent.iterdir()) == ["all.html", "all_files"]
    assert len(told["pictures"]) == 1 + len(runs)

    assert not call("report", *runs[:1], "--output", str(page))
    printed = capsys.readouterr().out
    table = [line.split() for line in printed.splitlines() if line.startswith("  ")]
    assert table[0] == ["ASWA", "against", "better", "equal", "worse", "median", "gain"]
    assert [row[0] for row in table[1:]] == ["last", "best", "swa", "ema", "dense-aswa"]
    assert all(sum(map(int, row[1:4])) == 1 for row in table[1:])
    assert len({len(line) for line in printed.splitlines() if line.startswith("  ")}) == 1
    assert printed.startswith("link-prediction, test mrr, ")
    assert f"Written: {page}" in " ".join(printed.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "aswa-hf: nowhere does not exist. Expected a run folder"),
        (["."], "aswa-hf: . is not a run: it has neither results.json nor aswa_trajectory.json."),
        ([".", "--output", "page.txt"], "aswa-hf: The report is an HTML page, so --output must end in .html"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    complaint = call("report", *arguments)
    assert complaint.startswith(message)
    assert "\n" not in complaint
    assert list(tmp_path.iterdir()) == []
