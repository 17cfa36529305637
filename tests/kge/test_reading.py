"""Files of triples: every kind that is read, and what is said of lines that cannot be."""

from __future__ import annotations

import gzip

import pyarrow as pa
import pyarrow.parquet
import pytest
from kge_graphs import TRIPLES, assert_holds, write_graph

from aswa_hf.kge.data import load_kg

# A warning that no test expects is a failure.
pytestmark = pytest.mark.filterwarnings("error::UserWarning")


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
    folder = write_graph(tmp_path, suffix=suffix, line=line)
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
    write_graph(tmp_path)
    (tmp_path / "valid.txt").rename(tmp_path / f"{name}.txt")
    (tmp_path / "README.md").write_text("a graph")
    (tmp_path / "train_notes.txt").write_text("not a split")
    assert_holds(load_kg(str(tmp_path)))


def test_the_kinds_may_differ_between_the_splits(tmp_path):
    write_graph(tmp_path)
    (tmp_path / "test.txt").unlink()
    (tmp_path / "test.csv").write_text("head,relation,tail\nb,knows,a\nc,likes,c")
    assert_holds(load_kg(tmp_path))


@pytest.mark.parametrize("suffix", [".txt", ".tsv"])
def test_nothing_but_the_separator_has_a_meaning_in_txt_and_tsv(tmp_path, suffix):
    odd = ['"quoted"', "#5", "nan", "NA", "null", "a b", 'say "hi', "c,d", "O'Neil", "é ü 中", "None", "1.0", " x"]
    rows = [(label, '"is', odd[i - 1]) for i, label in enumerate(odd)]
    triples = {"train": rows, "valid": [("#5", '"is', "#5")], "test": [("nan", '"is', "NA")]}
    kg = load_kg(write_graph(tmp_path, triples, suffix=suffix))
    assert_holds(kg, triples)
    assert kg.num_entities == len(odd)


def test_quotes_and_commas_in_csv(tmp_path):
    train = 'a,"says ""hi"", twice",b\n"x\ny",r,NA\n#1,r,- \n'
    triples = {
        "train": [("a", 'says "hi", twice', "b"), ("x\ny", "r", "NA"), ("#1", "r", "- ")],
        "valid": [("a", "r", "b")],
        "test": [("b", "r", "a")],
    }
    assert_holds(load_kg(write_graph(tmp_path, triples, suffix=".csv", line="{},{},{}\n", train=train)), triples)


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
    assert_holds(load_kg(write_graph(tmp_path, suffix=".csv", **contents)))


def test_a_first_line_of_letters_is_a_triple_if_its_relation_recurs_and_else_a_header_that_is_announced(tmp_path):
    triples = {"train": [("s", "p", "o"), ("a", "p", "b")], "valid": [("a", "p", "o")], "test": [("s", "p", "b")]}
    assert_holds(load_kg(write_graph(tmp_path, triples, train="s p o\na p b\n")), triples)
    contents = {split: "s\tp\to\n" + "".join("\t".join(row) + "\n" for row in rows) for split, rows in TRIPLES.items()}
    with pytest.warns(
        UserWarning, match=r"the first line, 's\\tp\\to', is read as the names of the columns"
    ) as caught:
        assert_holds(load_kg(write_graph(tmp_path, suffix=".txt", **contents)))
    assert len(caught) == 3


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("a\tr\tb\n\n\tr\tb\n", "line 3 has an empty head"),
        ("a\tr\tb\na\t \tb\n", "line 2 has an empty relation"),
        ("a\tr\t\n", "line 1 has an empty tail"),
    ],
)
def test_an_empty_label_is_refused_with_its_line(tmp_path, train, message):
    with pytest.raises(ValueError, match=rf"train\.txt, {message}\. Give it a label or remove the line\."):
        load_kg(write_graph(tmp_path, train=train))


def test_a_header_may_name_more_columns_in_another_order(tmp_path):
    contents = {
        split: "id\ttail\trelation\thead\n" + "".join(f"{i}\t{t}\t{r}\t{h}\n" for i, (h, r, t) in enumerate(rows))
        for split, rows in TRIPLES.items()
    }
    assert_holds(load_kg(write_graph(tmp_path, suffix=".tsv", **contents)))


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
    assert_holds(load_kg(write_graph(tmp_path, train=train)))


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
    folder = write_graph(tmp_path, triples, suffix=".nt", line="<{}> <{}> <{}> .\n", train=train)
    assert_holds(load_kg(folder), triples)
    (folder / "train.nt").write_text(train + "\n<http://x/a> <http://x/p> .\n")
    with pytest.raises(
        ValueError, match=r"train\.nt, line 8 is not an N-Triples line: '<http://x/a> <http://x/p> \.'"
    ):
        load_kg(folder)
    (folder / "train.nt").write_text("# nothing\n")
    with pytest.raises(ValueError, match="contains only comments"):
        load_kg(folder)


# Bad input


def test_columns_without_text_or_values_are_refused(tmp_path):
    write_graph(tmp_path)
    (tmp_path / "train.txt").unlink()

    def refused(message, **columns):
        pyarrow.parquet.write_table(pa.table(columns), tmp_path / "train.parquet")
        with pytest.raises(ValueError, match=message):
            load_kg(tmp_path)

    refused(r"train\.parquet: the columns head, relation, tail must contain .* text", head=[1], relation=[2], tail=[3])
    refused("has the columns a, b, of which 1 contain text. Expected columns named head", a=["x"], b=[1])
    refused(r"train\.parquet, row 2 has no tail", head=["a", "b"], relation=["r", "r"], tail=["a", None])
    empty = pa.array([], type=pa.string())
    refused(r"train\.parquet is empty", head=empty, relation=empty, tail=empty)
    (tmp_path / "train.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"train\.parquet is not a readable parquet file"):
        load_kg(tmp_path)


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
        (".csv", "h,r,t\n\n", "contains only a header"),
        (".csv", "h,r,t,t\na,b,c,d\n", "line 1 names a column twice"),
        (".txt", "", "is empty"),
        (".nt", " \n\n", "is empty"),
        (".txt", b"a\tr\tb\na\tr\tM\xfcnchen\n", "line 2 is not UTF-8 text: byte 0xfc"),
        (".txt", "a\tr\tb\n".encode("utf-16"), "line 1 is not UTF-8 text: byte 0xff"),
        (".txt", "a\tr\tb\n".encode("utf-16-le"), "line 1 is not UTF-8 text: byte 0x00"),
    ],
)
def test_bad_lines_are_named(tmp_path, suffix, train, message):
    folder = write_graph(tmp_path, suffix=suffix, train=train)
    with pytest.raises(ValueError, match=rf"train\{suffix}.*{message}") as caught:
        load_kg(folder)
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_bad_line_far_into_a_large_file_is_named(tmp_path):
    lines = [f"e{i % 1000}\tr{i % 7}\te{i % 999}_{i}\n" for i in range(100_000)]
    lines[77_777] = "only\ttwo\n"
    with pytest.raises(ValueError, match=r"train\.txt, line 77778 has 2 fields"):
        load_kg(write_graph(tmp_path, train="".join(lines)))


def test_a_broken_gzip_file_is_named(tmp_path):
    write_graph(tmp_path)
    (tmp_path / "train.txt").unlink()
    for content in (b"a\tr\tb\n", gzip.compress(b"a\tr\tb\n" * 1000)[:-20]):
        (tmp_path / "train.txt.gz").write_bytes(content)
        with pytest.raises(ValueError, match=r"train\.txt\.gz is not a complete gzip file"):
            load_kg(tmp_path)
