"""Damaged files of every kind, given to the commands that read them: one line, or the answer of the whole file."""

import difflib
import json
import re
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bad_inputs import cases
from commands import call, outcome
from kge_graphs import random_graph
from safetensors.torch import load_file, save_file

from aswa_hf.kge import generate_queries, save_queries
from aswa_hf.run_folder import COMMIT

ASK = ["--head", "e1", "--relation", "r1", "--json"]
COMMANDS = {
    "predict": ["predict", "run", *ASK],
    "predict-known": ["predict", "run", *ASK, "--known", "data"],
    "query": ["query", "run", "2p: e1, r1, r2", "--json"],
    "evaluate": ["evaluate", "run", "--json"],
    "evaluate-strategies": ["evaluate", "run", "--strategies", "aswa,last", "--json"],
    "evaluate-csv": ["evaluate", "run", "--dataset", "csv", "--json"],
    "evaluate-nt": ["evaluate", "run", "--dataset", "nt", "--json"],
    "evaluate-parquet": ["evaluate", "run", "--dataset", "parquet", "--json"],
    "evaluate-queries": ["evaluate", "run", "--queries", "queries.json", "--json"],
    "evaluate-image": ["evaluate", "image", "--json"],
    "resume": ["train", "kge", "--dataset", "data", "--dim", 4, "--epochs", 1, "--resume", "--output-dir", "run"],
    "report": ["report", "run", "--output", "out/report.html", "--json"],
    "push": ["push", "run", "me/model", "--dry-run", "out/repository"],
    "push-image": ["push", "image", "me/model", "--dry-run", "out/repository"],
    "average": ["average", "old", "--strategy", "uniform", "--output-dir", "out/average", "--json"],
    "average-marked": ["average", "run", "--strategy", "uniform", "--output-dir", "out/average", "--json"],
    "average-aswa": ["average", "old", "--strategy", "aswa", "--output-dir", "out/average", "--json"],
    "average-sharded": ["average", "sharded", "plain", "--strategy", "uniform", "--output-dir", "out/average"],
}
# The dataset, the model, the seed and the epochs of the grid's run.
GRID = [
    "--datasets",
    "data",
    "--models",
    "complex",
    "--seeds",
    0,
    "--epochs",
    2,
    "--data-dir",
    ".",
    "--output-dir",
    "grid",
]
COMMANDS["reproduce"] = ["reproduce", "link-prediction", *GRID, "--json"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Runs of both kinds, checkpoints, graphs in every format and queries, from which nothing is missing."""
    root = tmp_path_factory.mktemp("whole")
    kg = random_graph(root / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        train = ["train", "kge", "--dataset", "data", "--dim", 4, "--epochs", 3, "--lr", 0.05, "--keep", 3]
        images = ["train", "image", "--dataset", "digits", "--model", "test_resnet", "--image-size", 16, "--epochs", 1]
        images += ["--train-size", 50, "--batch-size", 25, "--val-ratio", 0.1, "--strategies", "aswa"]
        assert call(*train, "--output-dir", "run") == 0
        assert call(*images, "--output-dir", "image") == 0
        assert call(*COMMANDS["reproduce"]) == 0
    # Checkpoints of older versions have no checksums.
    shutil.copytree(root / "run", root / "old", ignore=lambda _, names: [n for n in names if n == COMMIT])
    (grid,) = (path for path in (root / "grid").iterdir() if path.is_dir())
    grid.rename(root / "grid" / "run")
    (root / "grid" / grid.name).symlink_to("run")
    for suffix, line in ((".csv", "{},{},{}\n"), (".nt", "<{}> <{}> <{}> .\n")):
        (root / suffix[1:]).mkdir()
        for file in (root / "data").iterdir():
            rows = [row.split("\t") for row in file.read_text().splitlines()]
            (root / suffix[1:] / f"{file.stem}{suffix}").write_text("".join(line.format(*row) for row in rows))
    (root / "parquet").mkdir()
    for split in kg:
        table = kg[split].with_format("arrow")[:]
        names = {"head": kg.vocab.entities, "relation": kg.vocab.relations, "tail": kg.vocab.entities}
        labels = {column: [of[i] for i in table[column].to_pylist()] for column, of in names.items()}
        pq.write_table(pa.table(labels), root / "parquet" / f"{split}.parquet")
    save_queries(generate_queries(kg, "2p", 5), root / "queries.json")
    tensors = load_file(root / "run" / "model.safetensors")
    for folder in ("sharded", "plain"):
        (root / folder).mkdir()
    save_file(tensors, root / "plain" / "model.safetensors")
    weight_map = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        weight_map[name] = f"model-{number}.safetensors"
        save_file({name: tensor}, root / "sharded" / weight_map[name])
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (root / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))
    return root


def snapshot(root):
    """Everything but the output: a command must leave it as it was."""
    files = (path for path in root.rglob("*") if path.relative_to(root).parts[0] != "out" and path.name != ".lock")
    return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in files if not path.is_dir()}


def ask(root, command, capsys):
    """The status, answer and complaint of a command; a card is part of the answer."""
    shutil.rmtree(root / "out", ignore_errors=True)
    (root / "out").mkdir()
    before = snapshot(root)
    status, answer, complaint = outcome(capsys, *COMMANDS[command])
    assert snapshot(root) == before, "a file outside of the output was written"
    card = root / "out" / "repository" / "README.md"
    return status, answer + (card.read_text() if card.exists() else ""), complaint


def failure(root, case, expected, capsys):
    """What is wrong with the answer to a damaged file, or None."""
    path = root / case.file
    kept = path.read_bytes()
    case.apply(root)
    try:
        status, answer, complaint = ask(root, case.command, capsys)
    except AssertionError as error:
        return str(error)
    finally:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.unlink(missing_ok=True)
        path.write_bytes(kept)
    lines = [line for line in complaint.splitlines() if not re.match(r"warning: |\d+ of \d+ runs are", line)]
    if "Traceback" in complaint or re.search(r"aswa-hf: unexpected \w+:", complaint):
        return f"not a message for users: {complaint[-300:]}"
    if status == 0 and re.search(r"Skipped damaged checkpoints in (run|old): checkpoint-2 ", complaint):
        return None  # a damaged checkpoint is left out, and named
    if status == 0:
        lines = difflib.unified_diff(expected.splitlines(), answer.splitlines(), n=0, lineterm="")
        return "another answer, and no error: " + " ".join(list(lines)[3:7])[:300] if answer != expected else None
    if len(lines) != 1 or not lines[0].startswith(("aswa-hf: ", "failed complex on data")) or len(lines[0]) > 1200:
        return f"not one line: {complaint[:500]!r}"
    return None


def check(root, chosen, capsys, monkeypatch):
    monkeypatch.chdir(root)
    expected = {}
    for command in sorted({case.command for case in chosen}):
        status, expected[command], complaint = ask(root, command, capsys)
        assert status == (1 if command == "resume" else 0), complaint
    wrong = {case: problem for case in chosen if (problem := failure(root, case, expected[case.command], capsys))}
    report = "\n".join(
        f"{case.file}, {case.damage} ({case.seed}), {case.command}: {why}" for case, why in wrong.items()
    )
    assert not wrong, f"{len(wrong)} of {len(chosen)}:\n{report}"


@pytest.mark.filterwarnings("always")
def test_a_sample_of_damaged_files_is_one_line_or_has_no_effect(root, capsys, monkeypatch):
    chosen = list(cases())[:: len(list(cases())) // 150]
    check(root, chosen, capsys, monkeypatch)


@pytest.mark.slow
@pytest.mark.filterwarnings("always")
def test_all_damaged_files_are_one_line_or_have_no_effect(root, capsys, monkeypatch):
    chosen = list(cases())
    assert len(chosen) >= 1000
    check(root, chosen, capsys, monkeypatch)
