"""Damaged files of every kind, given to the commands that read them: one line, or the answer of the whole file."""

import difflib
import hashlib
import json
import re
import shutil
import signal
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from bad_inputs import MARKED, cases
from commands import call, outcome
from kge_graphs import random_graph
from safetensors.torch import load_file, save_file
from space_runs import adapter_run

from aswa_hf.kge import generate_queries, save_queries
from aswa_hf.kge.numbered import number_graph
from aswa_hf.run_folder import COMMIT, STATE_FOLDER

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
    "average-run": ["average", "run", "--strategy", "uniform", "--output-dir", "out/average", "--json"],
    "average-aswa": ["average", "old", "--strategy", "aswa", "--output-dir", "out/average", "--json"],
    "average-sharded": ["average", "sharded", "plain", "--strategy", "uniform", "--output-dir", "out/average"],
    "predict-sharded": ["predict", "sharded", *ASK],
    "predict-labeled": ["predict", "run", *ASK, "--known", "labeled"],
    "evaluate-numbered": ["evaluate", "numbered-run", "--json"],
    "evaluate-parquet-queries": ["evaluate", "run", "--queries", "queries.parquet", "--json"],
    "recipe": ["train", "kge", "--recipe", "recipes.yaml/best", "--dataset", "data", "--output-dir", "out/run"],
    "push-adapter": ["push", "adapter", "me/model", "--dry-run", "out/repository"],
    "average-adapter": [
        *("average", "adapter", "adapter/checkpoint-5", "--strategy", "uniform"),
        *("--output-dir", "out/average", "--json"),
    ],
    "predict-marked": ["predict", "marked", *ASK],
    "query-marked": ["query", "marked", "2p: e1, r1, r2", "--json"],
    "evaluate-marked": ["evaluate", "marked", "--json"],
    "evaluate-strategies-marked": ["evaluate", "marked", "--strategies", "aswa,last", "--json"],
    "evaluate-image-marked": ["evaluate", "marked-image", "--json"],
    "report-marked": ["report", "marked", "--output", "out/report.html", "--json"],
    "push-marked": ["push", "marked", "me/model", "--dry-run", "out/repository"],
    "push-image-marked": ["push", "marked-image", "me/model", "--dry-run", "out/repository"],
    "average-marked": ["average", "marked", "run", "--strategy", "uniform", "--output-dir", "out/average"],
    # In a copy, and two epochs longer; judged by its weights.
    "resume-marked": [
        *("train", "kge", "--dataset", "data", "--dim", 4, "--epochs", 5, "--lr", 0.05, "--keep", 3),
        *("--strategies", "aswa,last", "--resume", "--output-dir", "out/run"),
    ],
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
        number_graph("data", "numbered", progress=False)
        train = ["train", "kge", "--dim", 4, "--lr", 0.05, "--keep", 3, "--strategies", "aswa,last", "--dataset"]
        images = ["train", "image", "--dataset", "digits", "--model", "test_resnet", "--image-size", 16, "--epochs", 1]
        images += ["--train-size", 50, "--batch-size", 25, "--val-ratio", 0.1, "--strategies", "aswa"]
        assert call(*train, "data", "--epochs", 3, "--output-dir", "run") == 0
        assert call(*train, "numbered", "--epochs", 1, "--output-dir", "numbered-run") == 0
        assert call(*images, "--output-dir", "image") == 0
        assert call(*COMMANDS["reproduce"]) == 0
    for name in ("run", "image", "numbered-run"):
        shutil.copytree(root / name, root / name.replace("run", "marked").replace("image", "marked-image"))
        (root / name / STATE_FOLDER / COMMIT).unlink()  # all that is read is checked without it too
    adapter_run(root / "adapter")
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
    for name in ("queries.json", "queries.parquet"):
        save_queries(generate_queries(kg, "2p", 5), root / name)
    shutil.copytree(root / "data", root / "labeled")
    (root / "labeled" / "entities.json").write_text(json.dumps({f"e{i}": {"label": f"E {i}"} for i in range(12)}))
    (root / "labeled" / "relations.tsv").write_text("".join(f"r{i}\tR {i}\n" for i in range(3)))
    settings = {"model": "distmult", "dim": 4, "epochs": 1, "lr": 0.1, "strategies": ["aswa", "last"]}
    (root / "recipes.yaml").write_text(yaml.safe_dump({"best": {"about": "tests", "settings": settings}}))
    tensors = load_file(root / "run" / "model.safetensors")
    for folder in ("sharded", "plain"):
        (root / folder).mkdir()
    save_file(tensors, root / "plain" / "model.safetensors")
    for name in ("config.json", "entities.json", "relations.json"):
        shutil.copy(root / "run" / name, root / "sharded")
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
    if command == "resume-marked":
        shutil.copytree(root / "marked", root / "out" / "run", symlinks=True)
    before = snapshot(root)
    with time_limit(30):
        status, answer, complaint = outcome(capsys, *COMMANDS[command])
    assert snapshot(root) == before, "a file outside of the output was written"
    if command in ("resume-marked", "recipe"):  # what it prints has times
        weights = root / "out" / "run" / "model.safetensors"
        answer = hashlib.sha256(weights.read_bytes()).hexdigest() if status == 0 else ""
    for shipped in sorted((root / "out" / "repository").glob("*")):
        # Settings of the model that have no effect may be shipped as they are.
        if shipped.name == "README.md" or (command.endswith("-marked") and shipped.suffix != ".png"):
            answer += f"\n{shipped.name}\n" + shipped.read_text(encoding="utf-8", errors="backslashreplace")
    return status, answer, complaint


@contextmanager
def time_limit(seconds):
    """Raises AssertionError in the block if it takes longer."""

    def stop(*_):
        raise TimeoutError(f"no end after {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


TRACEBACK, HANG, SILENT, OUTSIDE = "tracebacks", "hangs over 30 s", "silent wrong results", "writes elsewhere"
UNCLEAR = "messages of several lines"


def failure(root, case, expected, capsys):
    """What is wrong with the answer to a damaged file, its kind first, or None."""
    path = root / case.file
    kept = path.read_bytes()
    case.apply(root)
    try:
        status, answer, complaint = ask(root, case.command, capsys)
    except AssertionError as error:
        return OUTSIDE, str(error)
    finally:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.unlink(missing_ok=True)
        path.write_bytes(kept)
    lines = [line for line in complaint.splitlines() if not re.match(r"warning: |\d+ of \d+ runs are", line)]
    if "no end after" in complaint:
        return HANG, complaint[-300:]
    if "Traceback" in complaint or re.search(r"aswa-hf: unexpected \w+:", complaint):
        return TRACEBACK, complaint[-300:]
    skipped = "Skipped damaged checkpoints in " in complaint
    if status == 0 and skipped and case.command.startswith("average"):
        return None  # a damaged checkpoint is left out, and named
    if status == 0 and answer != expected:
        lines = difflib.unified_diff(expected.splitlines(), answer.splitlines(), n=0, lineterm="")
        return SILENT, " ".join(list(lines)[3:7])[:300]
    if status == 0 and case.file in MARKED and not skipped and not case.file.endswith(COMMIT):
        return SILENT, "the damage was not noticed"
    if status == 0:
        return None
    if len(lines) != 1 or not lines[0].startswith(("aswa-hf: ", "failed complex on data")) or len(lines[0]) > 1200:
        return UNCLEAR, f"{complaint[:500]!r}"
    return None


def check(root, chosen, capsys, monkeypatch, record=lambda name, number: None):
    monkeypatch.chdir(root)
    expected = {}
    for command in sorted({case.command for case in chosen}):
        status, expected[command], complaint = ask(root, command, capsys)
        assert status == (1 if command == "resume" else 0), complaint
    wrong = {case: problem for case in chosen if (problem := failure(root, case, expected[case.command], capsys))}
    record(f"damaged inputs, {len({case.file for case in chosen})} kinds of files", len(chosen))
    for kind in (TRACEBACK, HANG, SILENT, OUTSIDE, UNCLEAR):
        record(f"damaged inputs: {kind}", sum(why[0] == kind for why in wrong.values()))
    report = "\n".join(
        f"{case.file}, {case.damage} ({case.seed}), {case.command}: {': '.join(why)}" for case, why in wrong.items()
    )
    assert not wrong, f"{len(wrong)} of {len(chosen)}:\n{report}"


@pytest.mark.filterwarnings("always")
def test_a_sample_of_damaged_files_is_one_line_or_has_no_effect(root, capsys, monkeypatch):
    chosen = list(cases())[:: len(list(cases())) // 150]
    check(root, chosen, capsys, monkeypatch)


@pytest.mark.slow
@pytest.mark.filterwarnings("always")
@pytest.mark.timeout(3000)
def test_all_damaged_files_are_one_line_or_have_no_effect(root, capsys, monkeypatch, record_property):
    chosen = list(cases())
    assert len(chosen) >= 1000
    check(root, chosen, capsys, monkeypatch, record_property)
