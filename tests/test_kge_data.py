"""Knowledge graphs: the built-in countries, files of every kind, ids, what is odd about them, and bad input."""

from __future__ import annotations

import copy
import gzip
import os
import pickle
import re
import time
import warnings
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict

import aswa_hf.kge
from aswa_hf.kge.data import KGVocab, KnowledgeGraph, load_kg

TRIPLES = {
    "train": [("a", "likes", "b"), ("b", "likes", "c"), ("c", "knows", "a")],
    "valid": [("a", "likes", "c")],
    "test": [("b", "knows", "a"), ("c", "likes", "c")],
}
REAL = Path(os.environ.get("ASWA_KG_DATA", Path(__file__).parents[2] / "shared" / "data" / "kg"))


def write(folder: Path, triples=TRIPLES, *, suffix: str = ".txt", line: str = "{}\t{}\t{}\n", **contents) -> Path:
    """A folder with a file per split; `contents` replaces whole files: train="a\\tb\\n", or bytes."""
    folder.mkdir(exist_ok=True)
    for split, rows in triples.items():
        content = contents.get(split, "".join(line.format(*row) for row in rows))
        (folder / (split + suffix)).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def labelled(kg: KnowledgeGraph, split: str) -> list[tuple[str, str, str]]:
    entities, relations = kg.vocab.entities, kg.vocab.relations
    return [(entities[h], relations[r], entities[t]) for h, r, t in kg.triples(split)]


def assert_holds(kg: KnowledgeGraph, triples=TRIPLES) -> None:
    assert labelled(kg, "train") == triples["train"]
    assert labelled(kg, "validation") == triples["valid"]
    assert labelled(kg, "test") == triples["test"]


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


# The built-in graph


def facts() -> tuple[set, dict[str, str], dict[str, str], dict[str, set[str]], dict[str, str]]:
    """The raw facts of countries.tsv, read here anew."""
    lines = (Path(aswa_hf.kge.__file__).parent / "countries.tsv").read_text(encoding="ascii").split("\n")
    rows = [line.split("\t") for line in lines[1:-1]]
    assert lines[0].split("\t") == ["country", "subregion", "region", "split", "neighbors"]
    subregion, region, split = ({row[0]: row[i] for row in rows} for i in (1, 2, 3))
    return {row[0] for row in rows}, subregion, region, {row[0]: set(row[4].split(" ")) - {""} for row in rows}, split


def test_the_facts_about_countries_are_clean():
    countries, subregion, region, neighbors, _ = facts()
    assert 240 <= len(countries) <= 255
    assert set(region.values()) == {"africa", "americas", "asia", "europe", "oceania"}
    assert len(set(subregion.values())) == 22
    assert len({(subregion[c], region[c]) for c in countries}) == 22, "a subregion lies in one region"
    labels = [*countries, *set(subregion.values()), *set(region.values())]
    assert len(labels) == len(set(labels)), "a label means one thing"
    assert all(re.fullmatch("[a-z]+(_[a-z]+)*", label) for label in labels)
    for country, around in neighbors.items():
        assert around <= countries - {country}
        assert all(country in neighbors[other] for other in around)
    assert neighbors["france"] >= {"germany", "spain", "italy"}
    assert neighbors["iceland"] == set()
    assert neighbors["portugal"] == {"spain"}
    assert neighbors["kosovo"] == {"albania", "montenegro", "north_macedonia", "serbia"}
    assert (subregion["france"], region["france"]) == ("western_europe", "europe")
    assert (subregion["chile"], region["chile"]) == ("south_america", "americas")


def test_hidden_countries_have_a_neighbour_that_is_not_hidden():
    countries, _, _, neighbors, split = facts()
    hidden = {country for country in countries if split[country] != "train"}
    assert [list(split.values()).count(name) for name in ("validation", "test")] == [24, 24]
    assert all(neighbors[country] - hidden for country in hidden)


@pytest.mark.parametrize("task", [1, 2, 3])
def test_countries_follow_the_recipe_exactly(task):
    countries, subregion, region, neighbors, split = facts()
    hidden = {country for country in countries if split[country] != "train"}
    full = {(c, "locatedin", subregion[c]) for c in countries} | {(c, "locatedin", region[c]) for c in countries}
    full |= {(subregion[c], "locatedin", region[c]) for c in countries}
    full |= {(c, "neighbor", other) for c in countries for other in neighbors[c]}
    held_out = {name: {(c, "locatedin", region[c]) for c in countries if split[c] == name} for name in split.values()}
    removed = held_out["validation"] | held_out["test"]
    if task >= 2:
        removed |= {(c, "locatedin", subregion[c]) for c in hidden}
    if task >= 3:
        removed |= {(n, "locatedin", region[n]) for c in hidden for n in neighbors[c]}

    kg = load_kg(f"countries-s{task}")
    assert sorted(labelled(kg, "train")) == sorted(full - removed)
    for name in ("validation", "test"):
        assert sorted(labelled(kg, name)) == sorted(held_out[name])
    assert kg.vocab.relations == ["locatedin", "neighbor"]
    assert (kg.num_entities, kg.num_relations) == (len(countries) + 22 + 5, 2)
    assert set(kg.vocab.entities) == {*countries, *subregion.values(), *region.values()}


def test_countries_is_s1_and_what_one_knows_of_the_world_is_in_it():
    kg = load_kg("countries")
    assert [labelled(kg, split) for split in kg] == [labelled(load_kg("countries-s1"), split) for split in kg]
    train = set(labelled(kg, "train"))
    assert {("france", "neighbor", "germany"), ("germany", "neighbor", "france")} <= train
    assert {("france", "locatedin", "western_europe"), ("western_europe", "locatedin", "europe")} <= train
    assert repr(kg) == "KnowledgeGraph(countries: 275 entities, 2 relations; train 1,120, validation 24, test 24)"


# What a graph gives


def test_a_graph_is_a_dataset_dict_of_int32_ids(tmp_path):
    kg = load_kg(write(tmp_path))
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
    kg = load_kg(write(tmp_path))
    for again in (copy.deepcopy(kg), pickle.loads(pickle.dumps(kg)), kg.with_format("torch")):
        assert isinstance(again, KnowledgeGraph)
        assert repr(again) == repr(kg)
        assert_holds(again)


def test_triples_follow_the_split_when_it_is_replaced(tmp_path):
    kg = load_kg(write(tmp_path))
    kg["train"] = kg["train"].select([2, 0])
    assert kg.triples("train").tolist() == [[2, 1, 0], [0, 0, 1]]


def test_ids_are_given_in_order_of_first_occurrence(tmp_path):
    triples = {
        "train": [("d", "s", "b"), ("a", "r", "d"), ("b", "s", "c")],
        "valid": [("z", "q", "d"), ("a", "r", "y")],
        "test": [("x", "p", "e"), ("y", "r", "a")],
    }
    with pytest.warns(UserWarning, match="do not occur in train"):
        kg = load_kg(write(tmp_path, triples))
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
        kg = load_kg(write(tmp_path, triples))
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
    with pytest.warns(UserWarning, match=r"train holds 2 repetitions .*train\.txt, line 4: \(a, r, b\)") as caught:
        kg = load_kg(
            write(tmp_path, {"train": rows, "valid": [("b", "r", "b")], "test": [("a", "r", "a")]}, train=train)
        )
    assert len(caught) == 1
    assert len(kg["train"]) == 4


def test_triples_of_one_split_in_another_are_reported_with_their_line(tmp_path):
    train = [("a", "r", "b"), ("b", "r", "a"), ("b", "r", "b")]
    folder = write(
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


# Files of every kind


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    ("suffix", "line"),
    [
        (".txt", "{}\t{}\t{}\n"),
        (".txt", "{} {} {}\n"),
        (".txt", "  {}   {} {} \n"),
        (".txt", "{},{},{}\n"),
        (".txt", "{}|{}|{}\n"),
        (".tsv", "{}\t{}\t{}\r\n"),
        (".csv", "{},{},{}\n"),
        (".csv", '"{}";"{}";{}\n'),
        (".nt", "<{}> <{}> <{}> .\n"),
        (".nt", "  <{}>\t<{}> <{}>.  # why\n"),
    ],
)
def test_a_folder_of_text_files(tmp_path, suffix, line, zipped):
    folder = write(tmp_path, suffix=suffix, line=line)
    if zipped:
        for file in list(folder.iterdir()):
            file.with_name(file.name + ".gz").write_bytes(gzip.compress(file.read_bytes()))
            file.unlink()
    assert_holds(load_kg(folder))


@pytest.mark.parametrize("names", [("head", "relation", "tail"), ("S", "P", "O"), ("one", "two", "three")])
def test_a_folder_of_parquet_files(tmp_path, names):
    for split, rows in TRIPLES.items():
        columns = dict(zip(names, zip(*rows, strict=True), strict=True))
        table = pa.table({"weight": [0.5] * len(rows), **columns})
        pyarrow.parquet.write_table(table, tmp_path / f"{split}.parquet")
    assert_holds(load_kg(tmp_path))


@pytest.mark.parametrize("name", ["valid", "validation", "dev", "val", "VALID"])
def test_the_validation_file_may_have_any_of_its_usual_names(tmp_path, name):
    write(tmp_path)
    (tmp_path / "valid.txt").rename(tmp_path / f"{name}.txt")
    (tmp_path / "README.md").write_text("a graph")
    (tmp_path / "train_notes.txt").write_text("not a split")
    assert_holds(load_kg(str(tmp_path)))


def test_the_kinds_may_differ_between_the_splits(tmp_path):
    write(tmp_path)
    (tmp_path / "test.txt").unlink()
    (tmp_path / "test.csv").write_text("head,relation,tail\nb,knows,a\nc,likes,c")
    assert_holds(load_kg(tmp_path))


@pytest.mark.parametrize("suffix", [".txt", ".tsv"])
def test_nothing_but_the_separator_has_a_meaning_in_txt_and_tsv(tmp_path, suffix):
    odd = ['"quoted"', "#5", "nan", "NA", "null", "", "a b", 'say "hi', "c,d", "O'Neil", "é ü 中", "None", "1.0", " x"]
    rows = [(label, '"is', odd[i - 1]) for i, label in enumerate(odd)]
    triples = {"train": rows, "valid": [("#5", '"is', "#5")], "test": [("", '"is', "NA")]}
    kg = load_kg(write(tmp_path, triples, suffix=suffix))
    assert_holds(kg, triples)
    assert kg.num_entities == len(odd)


def test_quotes_and_commas_in_csv(tmp_path):
    train = 'a,"says ""hi"", twice",b\n"x\ny",r,NA\n#1,r,\n'
    triples = {
        "train": [("a", 'says "hi", twice', "b"), ("x\ny", "r", "NA"), ("#1", "r", "")],
        "valid": [("a", "r", "b")],
        "test": [("b", "r", "a")],
    }
    assert_holds(load_kg(write(tmp_path, triples, suffix=".csv", line="{},{},{}\n", train=train)), triples)


@pytest.mark.parametrize(
    "header",
    [
        "head,relation,tail",
        '"Head", "Relation", "Tail"',
        "subject,predicate,object",
        "h,r,t",
        "source,relation,target",
    ],
)
def test_a_header_is_recognised(tmp_path, header):
    contents = {
        split: header + "\n" + "".join("{},{},{}\n".format(*row) for row in rows) for split, rows in TRIPLES.items()
    }
    assert_holds(load_kg(write(tmp_path, suffix=".csv", **contents)))


def test_a_header_may_name_more_columns_in_another_order(tmp_path):
    contents = {
        split: "id\ttail\trelation\thead\n" + "".join(f"{i}\t{t}\t{r}\t{h}\n" for i, (h, r, t) in enumerate(rows))
        for split, rows in TRIPLES.items()
    }
    assert_holds(load_kg(write(tmp_path, suffix=".tsv", **contents)))


@pytest.mark.parametrize(
    "train",
    [
        b"\xef\xbb\xbfa\tlikes\tb\nb\tlikes\tc\nc\tknows\ta",
        b"a\tlikes\tb\r\nb\tlikes\tc\r\nc\tknows\ta\r\n",
        b"\n\na\tlikes\tb\n\n\nb\tlikes\tc\nc\tknows\ta\n\n",
        b"a\tlikes\tb\rb\tlikes\tc\rc\tknows\ta\r",
    ],
    ids=["byte order mark and no last line end", "Windows", "empty lines", "old Mac"],
)
def test_line_ends_and_marks_of_all_systems(tmp_path, train):
    assert_holds(load_kg(write(tmp_path, train=train)))


def test_n_triples_with_literals_blank_nodes_and_comments(tmp_path):
    train = (
        "# facts\n"
        "<http://x/a> <http://x/p> <http://x/b> .\n"
        "\n"
        '_:n1 <http://x/p> "a \\"quoted\\" . text"@en .\n'
        '<http://x/b> <http://x/q> "5"^^<http://x/int> . # five\n'
        "   # more\n"
        "<http://x/b> <http://x/q> _:n1."
    )
    a, b, p, q = "http://x/a", "http://x/b", "http://x/p", "http://x/q"
    triples = {
        "train": [
            (a, p, b),
            ("_:n1", p, '"a \\"quoted\\" . text"@en'),
            (b, q, '"5"^^<http://x/int>'),
            (b, q, "_:n1"),
        ],
        "valid": [(b, p, a)],
        "test": [(a, q, a)],
    }
    folder = write(tmp_path, triples, suffix=".nt", line="<{}> <{}> <{}> .\n", train=train)
    assert_holds(load_kg(folder), triples)
    (folder / "train.nt").write_text(train + "\n<http://x/a> <http://x/p> .\n")
    with pytest.raises(
        ValueError, match=r"train\.nt, line 8 is not an N-Triples line: '<http://x/a> <http://x/p> \.'"
    ):
        load_kg(folder)
    (folder / "train.nt").write_text("# nothing\n")
    with pytest.raises(ValueError, match="comments and nothing else"):
        load_kg(folder)


# Datasets


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
    kg = load_kg("me/graph", revision="v2", cache_dir=tmp_path)
    assert asked == {"name": "me/graph", "revision": "v2", "cache_dir": str(tmp_path)}
    assert kg.name == "me/graph"
    assert_holds(kg)
    with pytest.raises(ValueError, match="me/half has the splits train, dev, and none for test"):
        load_kg("me/half")


def test_columns_without_text_or_values_are_refused(tmp_path):
    write(tmp_path)
    (tmp_path / "train.txt").unlink()

    def refused(message, **columns):
        pyarrow.parquet.write_table(pa.table(columns), tmp_path / "train.parquet")
        with pytest.raises(ValueError, match=message):
            load_kg(tmp_path)

    refused(r"train\.parquet: the columns head, relation, tail must hold .* text", head=[1], relation=[2], tail=[3])
    refused("has the columns a, b, of which 1 hold text. Expected columns named head", a=["x"], b=[1])
    refused(r"train\.parquet, row 2 has no tail", head=["a", "b"], relation=["r", "r"], tail=["a", None])
    empty = pa.array([], type=pa.string())
    refused(r"train\.parquet is empty", head=empty, relation=empty, tail=empty)
    (tmp_path / "train.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"train\.parquet is not a readable parquet file"):
        load_kg(tmp_path)


# Bad input


@pytest.mark.parametrize(
    ("suffix", "train", "message"),
    [
        (".txt", "a\tr\tb\n\na\tb\n", r"line 3 has 2 fields separated by tab, expected 3 .*'a\\tb'"),
        (".txt", "a\tr\tb\na\tb\tc\td\n", "line 2 has 4 fields separated by tab"),
        (".txt", "a\tb\n", "line 1 has 2 fields separated by tab"),
        (".txt", "word\n", "line 1 has 1 field separated by tab"),
        (".txt", "a r b\nc r\n", "line 2 has 2 fields separated by space"),
        (".tsv", "a r b\n", "line 1 is separated by space where tab is expected"),
        (".csv", "head,relation,tail\na,r,b\na,r\n", "line 3 has 2 fields separated by comma"),
        (".txt", "a\tr\tb\na r b\n", r"line 2 is separated by space where tab is expected: 'a r b'"),
        (".txt", "a\tr\tb\na,r,b\n", r"line 2 is separated by comma where tab is expected"),
        (".txt", "a r b\nb r\tc\n", r"line 2 is separated by tab where space is expected"),
        (".txt", "a r b\nb\tr x\tc\n", r"line 2 is separated by tab where space is expected"),
        (".csv", "a,r,b\nb;r;c\n", r"line 2 is separated by semicolon where comma is expected"),
        (".txt", " a r b\n  \nb r\n", "line 3 has 2 fields separated by space"),
        (".csv", 'a,r,b\nb,"r,c\nc,r,a\n', "line 2 has 2 fields separated by comma"),
        (".csv", "h,r,t\n\n", "has a header and nothing else"),
        (".csv", "h,r,t,t\na,b,c,d\n", "line 1 names a column twice"),
        (".txt", "", "is empty"),
        (".nt", " \n\n", "is empty"),
        (".txt", b"a\tr\tb\na\tr\tM\xfcnchen\n", "line 2 is not UTF-8 text: byte 0xfc"),
        (".txt", "a\tr\tb\n".encode("utf-16"), "line 1 is not UTF-8 text: byte 0xff"),
        (".txt", "a\tr\tb\n".encode("utf-16-le"), "line 1 is not UTF-8 text: byte 0x00"),
    ],
)
def test_bad_lines_are_named(tmp_path, suffix, train, message):
    folder = write(tmp_path, suffix=suffix, train=train)
    with pytest.raises(ValueError, match=rf"train\{suffix}.*{message}") as caught:
        load_kg(folder)
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_bad_line_far_into_a_large_file_is_named(tmp_path):
    lines = [f"e{i % 1000}\tr{i % 7}\te{i % 999}_{i}\n" for i in range(100_000)]
    lines[77_777] = "only\ttwo\n"
    with pytest.raises(ValueError, match=r"train\.txt, line 77778 has 2 fields"):
        load_kg(write(tmp_path, train="".join(lines)))


def test_a_missing_split_is_named_with_what_is_there(tmp_path):
    write(tmp_path)
    (tmp_path / "valid.txt").rename(tmp_path / "holdout.txt")
    with pytest.raises(
        FileNotFoundError, match=r"no file of the validation split.*validation or valid or dev.*holdout"
    ):
        load_kg(tmp_path)


def test_two_files_of_one_split_are_refused(tmp_path):
    write(write(tmp_path), suffix=".csv", line="{},{},{}\n")
    with pytest.raises(ValueError, match=r"several files of the train split: train\.csv, train\.txt\. Keep one"):
        load_kg(tmp_path)


def test_a_broken_gzip_file_is_named(tmp_path):
    write(tmp_path)
    (tmp_path / "train.txt").unlink()
    for content in (b"a\tr\tb\n", gzip.compress(b"a\tr\tb\n" * 1000)[:-20]):
        (tmp_path / "train.txt.gz").write_bytes(content)
        with pytest.raises(ValueError, match=r"train\.txt\.gz is not a complete gzip file"):
            load_kg(tmp_path)


def test_a_name_that_is_nothing_lists_what_there_is(tmp_path):
    for name in ("", "countrys", "nobody/nothing", str(tmp_path / "nowhere")):
        with pytest.raises(ValueError, match=r"Found no knowledge graph .*countries-s3.*a folder with.*Hub"):
            load_kg(name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="Found no knowledge graph"):
        load_kg(tmp_path / "empty", cache_dir=tmp_path / "cache")
    file = write(tmp_path / "full") / "train.txt"
    with pytest.raises(ValueError, match=r"is a file\. Expected the folder"):
        load_kg(file)


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
    assert labelled(kg, "validation") == [tuple(line.split("\t")) for line in lines]


def large(folder: Path, triples: int) -> float:
    """Loads a graph of this size and gives the seconds of CPU time it took."""
    random = np.random.default_rng(0)
    columns = random.integers(0, (triples // 10, 500, triples // 10), (triples, 3)).T.astype(str)
    heads, relations, tails = columns
    lines = np.char.add(np.char.add(np.char.add(heads, "\tr"), np.char.add(relations, "\t")), tails)
    train = "\n".join(lines)
    few = "\n".join(lines[:1000])
    folder = write(folder, train=train, valid=few, test=few)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        start = time.process_time()
        kg = load_kg(folder)
        seconds = time.process_time() - start
    assert len(kg["train"]) == triples
    assert labelled(kg, "test") == [tuple(line.split("\t")) for line in lines[:1000]]
    return seconds


def test_a_large_graph(tmp_path):
    large(tmp_path, 200_000)


@pytest.mark.slow
def test_a_million_triples_take_less_than_five_seconds(tmp_path):
    assert large(tmp_path, 1_000_000) < 5


# The vocabulary


def test_a_vocabulary_gives_ids(tmp_path):
    vocab = KGVocab(["france", "new_york", "western_europe"], ["neighbor", "locatedin"])
    assert (vocab.entity_id("new_york"), vocab.relation_id("locatedin")) == (1, 1)
    for labels in (["western_europe", "france"], np.array(["western_europe", "france"])):
        assert vocab.entity_ids(labels).tolist() == [2, 0]
    assert vocab.entity_ids(pa.array(["new_york"])).tolist() == [1]
    assert vocab.entity_ids(pa.chunked_array([["new_york"], ["france"]])).tolist() == [1, 0]
    assert vocab.entity_ids([]).tolist() == []
    assert vocab.relation_ids(["locatedin"]).dtype == np.int64
    assert repr(vocab) == "KGVocab(3 entities, 2 relations)"


def test_an_unknown_label_suggests_the_nearest(tmp_path):
    vocab = load_kg("countries").vocab
    with pytest.raises(ValueError, match=r"Unknown entity 'Frence'\. Did you mean 'france'"):
        vocab.entity_id("Frence")
    with pytest.raises(ValueError, match=r"Unknown entity 'Western Europe'\. Did you mean 'western_europe'"):
        vocab.entity_ids(["france", "Western Europe"])
    with pytest.raises(ValueError, match=r"Unknown relation 'neighbour'\. Did you mean 'neighbor'\?"):
        vocab.relation_id("neighbour")
    with pytest.raises(ValueError, match=r"Unknown relation '42'\. The labels look like 'locatedin', 'neighbor'"):
        vocab.relation_ids(["42"])
    for wrong in (lambda: vocab.entity_id(3), lambda: vocab.entity_ids("france"), lambda: vocab.entity_ids(7)):
        with pytest.raises(TypeError, match="label"):
            wrong()


@pytest.mark.parametrize(
    ("entities", "message"), [(["a", "b", "a"], "'a' twice"), (["a", 3], "text, got 3"), (["a", None], "got None")]
)
def test_labels_are_distinct_texts(entities, message):
    with pytest.raises(ValueError, match=f"entities.*{message}"):
        KGVocab(entities, ["r"])


def test_a_vocabulary_survives_its_files(tmp_path):
    vocab = KGVocab(["é ü 中", "", '"quoted"\n', "nan"], ["r"])
    vocab.entity_ids(["nan"])
    vocab.entity_id("nan")
    vocab.save_pretrained(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "entities.json",
        "preprocessor_config.json",
        "relations.json",
    ]
    assert "quoted" not in (tmp_path / "preprocessor_config.json").read_text()
    again = KGVocab.from_pretrained(tmp_path)
    assert (again.entities, again.relations) == (vocab.entities, vocab.relations)
    again.save_pretrained(tmp_path / "again")
    for file in ("entities.json", "relations.json", "preprocessor_config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / file).read_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'["a", "b"', "delimiter"),
        (b'["\xff"]', "utf-8"),
        (b'{"a": 0}', "it holds a dict"),
        (b'["a", "a"]', "'a' twice"),
        (b'["a", null]', "got None"),
        (b"", "Expecting value"),
    ],
)
def test_a_damaged_vocabulary_is_one_clear_error(tmp_path, content, message):
    KGVocab(["a"], ["r"]).save_pretrained(tmp_path)
    (tmp_path / "entities.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"entities\.json is damaged: .*{message}.*save the vocabulary anew"):
        KGVocab.from_pretrained(tmp_path)


def test_a_vocabulary_that_is_not_there_is_one_clear_error(tmp_path):
    KGVocab(["a"], ["r"]).save_pretrained(tmp_path)
    (tmp_path / "relations.json").unlink()
    with pytest.raises(OSError, match=r"Found no relations\.json in .*save_pretrained"):
        KGVocab.from_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"Found no entities\.json in nobody/nothing"):
        KGVocab.from_pretrained("nobody/nothing", local_files_only=True)


def test_a_vocabulary_comes_from_the_hub_through_its_cache(tmp_path):
    snapshot = tmp_path / "models--me--graph" / "snapshots" / ("0" * 40)
    KGVocab(["a", "b"], ["r"]).save_pretrained(snapshot)
    (tmp_path / "models--me--graph" / "refs").mkdir()
    (tmp_path / "models--me--graph" / "refs" / "v2").write_text("0" * 40)
    vocab = KGVocab.from_pretrained("me/graph", revision="v2", cache_dir=tmp_path)
    assert (vocab.entities, vocab.relations) == (["a", "b"], ["r"])
    with pytest.raises(OSError, match=r"Found no entities\.json in me/graph"):
        KGVocab.from_pretrained("me/graph", revision="v3", cache_dir=tmp_path)


def test_an_upload_holds_the_labels(tmp_path, monkeypatch):
    uploaded = []
    monkeypatch.setattr("transformers.feature_extraction_utils.hf_api", lambda: Mock())
    monkeypatch.setattr(
        KGVocab, "_upload_modified_files", lambda self, folder, *_, **__: uploaded.extend(os.listdir(folder))
    )
    KGVocab(["a"], ["r"]).save_pretrained(str(tmp_path), push_to_hub=True, repo_id="me/graph")
    assert sorted(uploaded) == ["entities.json", "preprocessor_config.json", "relations.json"]


def test_a_vocabulary_is_saved_with_every_checkpoint_of_a_trainer(tmp_path):
    import torch
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(3))

        def forward(self, head, relation, tail):
            return {"loss": self.weight[head].square().sum()}

    kg = load_kg(write(tmp_path / "graph"))
    args = TrainingArguments(
        str(tmp_path / "run"), max_steps=2, save_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
    )
    Trainer(Model(), args, train_dataset=kg["train"], processing_class=kg.vocab).train()
    for step in (1, 2):
        again = KGVocab.from_pretrained(tmp_path / "run" / f"checkpoint-{step}")
        assert (again.entities, again.relations) == (kg.vocab.entities, kg.vocab.relations)
