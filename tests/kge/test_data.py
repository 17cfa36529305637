"""Knowledge graphs: what they give, where they come from, what is odd about them, real and large ones."""

from __future__ import annotations

import copy
import os
import pickle
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict
from kge_graphs import TRIPLES, assert_holds, labeled, write_graph
from places import ROOT

from aswa_hf.kge.data import KnowledgeGraph, load_kg

REAL = Path(os.environ.get("ASWA_KG_DATA", ROOT.parent / "shared" / "data" / "kg"))

# A warning that no test expects is a failure.
pytestmark = pytest.mark.filterwarnings("error::UserWarning")


# What a graph gives


def test_a_graph_is_a_dataset_dict_of_int32_ids(tmp_path):
    kg = load_kg(write_graph(tmp_path))
    assert isinstance(kg, DatasetDict)
    assert list(kg) == ["train", "validation", "test"]
    for split in kg.values():
        assert {name: value.dtype for name, value in split.features.items()} == dict.fromkeys(
            ("head", "relation", "tail"), "int32"
        )
    assert kg["train"][1] == {"head": 1, "relation": 0, "tail": 2}
    assert (kg.num_entities, kg.num_relations, kg.name) == (3, 2, tmp_path.name)
    triples = kg.triples("test")
    assert (triples.dtype, triples.tolist()) == (np.int64, [[1, 1, 0], [2, 0, 2]])


def test_copies_keep_the_labels(tmp_path):
    kg = load_kg(write_graph(tmp_path))
    for again in (copy.deepcopy(kg), pickle.loads(pickle.dumps(kg)), kg.with_format("torch")):
        assert isinstance(again, KnowledgeGraph)
        assert repr(again) == repr(kg)
        assert_holds(again)


def test_triples_follow_the_split_when_it_is_replaced(tmp_path):
    kg = load_kg(write_graph(tmp_path))
    kg["train"] = kg["train"].select([2, 0])
    assert kg.triples("train").tolist() == [[2, 1, 0], [0, 0, 1]]


def test_ids_are_given_in_order_of_first_occurrence(tmp_path):
    triples = {
        "train": [("d", "s", "b"), ("a", "r", "d"), ("b", "s", "c")],
        "valid": [("z", "q", "d"), ("a", "r", "y")],
        "test": [("x", "p", "e"), ("y", "r", "a")],
    }
    with pytest.warns(UserWarning, match="do not occur in train"):
        kg = load_kg(write_graph(tmp_path, triples))
    assert kg.vocab.entities == ["d", "b", "a", "c", "z", "y", "x", "e"]
    assert kg.vocab.relations == ["s", "r", "q", "p"]
    assert_holds(kg, triples)


def test_labels_that_training_does_not_show_are_kept_counted_and_reported(tmp_path):
    triples = {
        "train": [("a", "r", "b")],
        "valid": [("a", "r", "new"), ("new", "r", "newer"), ("b", "r", "a")],
        "test": [("b", "s", "a"), ("new", "s", "new")],
    }
    message = (
        r"validation: 2 entities and 0 relations in 2 triples; test: 1 entities and 1 relations in 2 triples\)\. They"
    )
    with pytest.warns(UserWarning, match=message) as caught:
        kg = load_kg(write_graph(tmp_path, triples))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert kg.unseen == {
        "validation": {"entities": 2, "relations": 0, "triples": 2},
        "test": {"entities": 1, "relations": 1, "triples": 2},
    }
    assert_holds(kg, triples)


def test_repeated_triples_are_kept_and_reported_with_their_line(tmp_path):
    train = "a\tr\tb\n\nb\tr\ta\na\tr\tb\na\tr\tb\n"
    rows = [("a", "r", "b")]
    with pytest.warns(UserWarning, match=r"train contains 2 repetitions .*train\.txt, line 4: \(a, r, b\)") as caught:
        kg = load_kg(
            write_graph(tmp_path, {"train": rows, "valid": [("b", "r", "b")], "test": [("a", "r", "a")]}, train=train)
        )
    assert len(caught) == 1
    assert len(kg["train"]) == 4


def test_triples_of_one_split_in_another_are_reported_with_their_line(tmp_path):
    train = [("a", "r", "b"), ("b", "r", "a"), ("b", "r", "b")]
    folder = write_graph(
        tmp_path, {"train": train, "valid": [("a", "r", "a"), train[2]], "test": [train[0], ("a", "r", "a"), train[1]]}
    )
    with pytest.warns(UserWarning, match="are also in") as caught:
        kg = load_kg(folder)
    messages = [str(warning.message) for warning in caught]
    assert [re.match(".*? the first at", message)[0] for message in messages] == [
        "1 of the 2 triples of validation are also in train, the first at",
        "2 of the 3 triples of test are also in train, the first at",
        "1 of the 3 triples of test are also in validation, the first at",
    ]
    assert "valid.txt, line 2: (b, r, b)" in messages[0]
    assert "test.txt, line 1: (a, r, b)" in messages[1]
    assert "test.txt, line 2: (a, r, a)" in messages[2]
    assert [len(split) for split in kg.values()] == [3, 2, 3]


# Where it comes from


def dataset_repository(folder: Path, columns=("head", "relation", "tail"), validation: str = "validation") -> Path:
    (folder / "data").mkdir(parents=True)
    for split, rows in TRIPLES.items():
        table = pa.table(dict(zip(columns, zip(*rows, strict=True), strict=True)))
        name = validation if split == "valid" else split
        pyarrow.parquet.write_table(table, folder / "data" / f"{name}-00000-of-00001.parquet")
    return folder


@pytest.mark.parametrize(
    "columns", [("head", "relation", "tail"), ("subject", "predicate", "object"), ("x", "y", "z")]
)
def test_a_dataset_repository(tmp_path, columns):
    folder = dataset_repository(tmp_path / "graph", columns)
    kg = load_kg(folder, cache_dir=tmp_path / "cache")
    assert_holds(kg)
    assert kg.name == "graph"


def test_a_dataset_on_the_hub_is_asked_for_with_its_revision(tmp_path, monkeypatch):
    asked = {}

    def load_dataset(name, **options):
        asked.update(options, name=name)
        rows = {
            split: dict(zip("hrt", map(list, zip(*rows, strict=True)), strict=True)) for split, rows in TRIPLES.items()
        }
        return DatasetDict({"train": Dataset.from_dict(rows["train"]), "dev": Dataset.from_dict(rows["valid"])}) | (
            {"test": Dataset.from_dict(rows["test"])} if name == "me/graph" else {}
        )

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.warns(UserWarning, match="me/graph are shown without labels, which could not be looked up"):
        kg = load_kg("me/graph", revision="v2", cache_dir=tmp_path)
    assert asked == {"name": "me/graph", "revision": "v2", "cache_dir": str(tmp_path)}
    assert kg.name == "me/graph"
    assert_holds(kg)
    with pytest.raises(ValueError, match="me/half has the splits train, dev, but none for test"):
        load_kg("me/half")


def test_a_missing_split_is_named_with_what_is_there(tmp_path):
    write_graph(tmp_path)
    (tmp_path / "valid.txt").rename(tmp_path / "holdout.txt")
    with pytest.raises(
        FileNotFoundError, match=r"no file for the validation split.*validation or valid or dev.*holdout"
    ):
        load_kg(tmp_path)


def test_two_files_of_one_split_are_refused(tmp_path):
    write_graph(write_graph(tmp_path), suffix=".csv", line="{},{},{}\n")
    with pytest.raises(ValueError, match=r"several files for the train split: train\.csv, train\.txt\. Keep one"):
        load_kg(tmp_path)


def test_a_name_that_is_nothing_lists_what_there_is(tmp_path):
    with pytest.raises(ValueError, match=r"There is no graph 'countrys'\. Did you mean 'countries'\?"):
        load_kg("countrys")
    for name in ("", "nobody/nothing", str(tmp_path / "nowhere")):
        with pytest.raises(ValueError, match=r"Found no knowledge graph .*countries-s3.*a folder with.*Hub"):
            load_kg(name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="Found no knowledge graph"):
        load_kg(tmp_path / "empty", cache_dir=tmp_path / "cache")
    file = write_graph(tmp_path / "full") / "train.txt"
    with pytest.raises(ValueError, match=r"is a file\. Expected the folder"):
        load_kg(file)


def test_a_folder_without_data_is_refused_without_a_search_of_every_folder_below(tmp_path, monkeypatch):
    (tmp_path / "home" / "projects").mkdir(parents=True)
    write_graph(tmp_path / "home" / "projects" / "graph")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("datasets.load_dataset", None)
    for place in ("/", "~", "~/projects"):
        with pytest.raises(ValueError, match=r"Found no knowledge graph .*the folder .* has no such files"):
            load_kg(place)


# Real graphs and large ones


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("UMLS", (135, 46, 5216, 652, 661)),
        ("KINSHIP", (104, 25, 8544, 1068, 1074)),
        ("FB15k-237", (14541, 237, 272115, 17535, 20466)),
        ("Countries-S1", (271, 2, 1111, 24, 24)),
        ("Countries-S2", (271, 2, 1063, 24, 24)),
        ("Countries-S3", (271, 2, 985, 24, 24)),
    ],
)
def test_published_graphs_have_the_published_sizes(name, counts):
    if not (REAL / name).is_dir():
        pytest.skip(f"{REAL / name} is not here; set ASWA_KG_DATA to the folder of the graphs")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        kg = load_kg(REAL / name)
    assert (kg.num_entities, kg.num_relations, *map(len, kg.values())) == counts
    lines = (REAL / name / "valid.txt").read_text(encoding="utf-8").splitlines()
    assert labeled(kg, "validation") == [tuple(line.split("\t")) for line in lines]


def lines_executed(work) -> int:
    """How many lines of this package `work` goes through."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace if "aswa_hf" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_no_line_is_executed_for_every_triple(tmp_path):
    random, executed = np.random.default_rng(0), []
    for triples in (2_000, 200_000):
        columns = random.integers(0, (1000, 500, 1000), (triples, 3)).T.astype(str)
        heads, relations, tails = columns
        lines = np.char.add(np.char.add(np.char.add(heads, "\tr"), np.char.add(relations, "\t")), tails)
        train, few = "\n".join(lines), "\n".join(lines[:1000])
        folder = write_graph(tmp_path / str(triples), train=train, valid=few, test=few)
        loaded = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            executed.append(lines_executed(lambda folder=folder, loaded=loaded: loaded.append(load_kg(folder))))
        assert len(loaded[0]["train"]) == triples
        assert labeled(loaded[0], "test") == [tuple(line.split("\t")) for line in lines[:1000]]
    assert 0 < executed[1] < 2 * executed[0]
