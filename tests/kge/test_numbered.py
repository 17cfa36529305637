"""Graphs that are numbered in bounded memory and memory-mapped."""

import gzip

import numpy as np
import pyarrow as pa
import pytest
from kge_graphs import labeled, random_graph, write_graph

from aswa_hf.kge import ComplEx, evaluate_link_prediction, load_kg, numbered
from aswa_hf.kge.data import NumberedGraph
from aswa_hf.kge.graph import TailsByQuery
from aswa_hf.kge.numbered import number_graph


@pytest.fixture
def folder(tmp_path):
    random_graph(tmp_path / "text", entities=40, relations=4, triples=300)
    (tmp_path / "text" / "test.txt.gz").write_bytes(gzip.compress((tmp_path / "text" / "test.txt").read_bytes()))
    (tmp_path / "text" / "test.txt").unlink()
    return tmp_path


def test_a_numbered_graph_holds_the_triples_of_the_text(folder, monkeypatch):
    monkeypatch.setattr(numbered, "BLOCK", 300)  # bytes: many blocks of few lines
    found = number_graph(folder / "text", folder / "numbered", memory=1000, progress=False)
    expected = load_kg(folder / "text")
    assert isinstance(load_kg(folder / "numbered"), NumberedGraph)
    assert (found.num_entities, found.num_relations) == (expected.num_entities, expected.num_relations)
    for split in expected:
        assert labeled(found, split) == labeled(expected, split)
        mapped = found.mapped(split)
        assert mapped[:].dtype == np.int32
        np.testing.assert_array_equal(mapped[np.array([1, 0])], found.triples(split)[[1, 0]])
        assert not any(column.flags.owndata for column in mapped.columns), "the ids are read from the file"
    assert sorted(path.name for path in folder.iterdir()) == ["numbered", "text"]


def test_metrics_do_not_depend_on_the_numbers(folder):
    kg, text = number_graph(folder / "text", folder / "numbered", progress=False), load_kg(folder / "text")
    model = ComplEx(text.config(dim=8))
    expected = evaluate_link_prediction(model, text, "test")
    order = text.vocab.entity_ids(kg.labels("entities")), text.vocab.relation_ids(kg.labels("relations"))
    for table, ids in zip((model.entity_embeddings, model.relation_embeddings), order, strict=True):
        rows = ids if len(ids) == len(table.weight) else np.concatenate([ids, ids + len(ids)])
        table.weight.data = table.weight.data[rows]
    assert evaluate_link_prediction(model, kg, "test") == pytest.approx(expected, rel=1e-6)


def test_hashes_of_equal_labels_are_equal_wherever_they_lie():
    labels = pa.array(["a", "entity", "a", "Entität"] + [f"e{k}" for k in range(1000)])
    hashes = numbered._hashes(labels)
    assert hashes[0] == hashes[2]
    assert len(set(hashes.tolist())) == len(labels) - 1
    np.testing.assert_array_equal(numbered._hashes(labels.slice(1, 3)), hashes[1:4])
    shares = np.bincount((hashes % np.uint64(4)).astype(int)) / len(hashes)
    assert shares.min() > 0.2


def test_queries_of_ids_too_large_to_number_their_triples_are_the_same():
    triples = np.random.default_rng(0).integers(0, (9, 3, 9), (200, 3))
    expected, found = TailsByQuery.of(triples), TailsByQuery.of(triples * [2**31, 1, 2**31])
    np.testing.assert_array_equal(found.heads, expected.heads * 2**31)
    np.testing.assert_array_equal(found.relations, expected.relations)
    np.testing.assert_array_equal(found.offsets, expected.offsets)
    np.testing.assert_array_equal(found.tails, expected.tails * 2**31)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\tlikes\tb\nc\tlikes\n", r"train.txt cannot be read after triple 0: .*Expected head, relation and tail"),
        ("a\tlikes\tb\nc\t \td\n", r"train.txt, triple 2 has an empty relation"),
        ("a\tlikes\tb\nc\tlikes\td\0\n", r"train.txt, triple 2 has a zero byte"),
        ("", r"train.txt"),
    ],
)
def test_bad_text_is_an_error_that_leaves_nothing(tmp_path, content, message):
    source = write_graph(tmp_path / "text", train=content)
    with pytest.raises(ValueError, match=message):
        number_graph(source, tmp_path / "numbered", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


@pytest.mark.parametrize("change", [lambda data: data[:-20], lambda data: data[:30] + b"damaged" + data[37:]])
def test_a_damaged_gzip_file_is_named(folder, change):
    path = folder / "text" / "test.txt.gz"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=r"test.txt.gz is not a complete gzip file"):
        number_graph(folder / "text", folder / "numbered", progress=False)


def test_a_disk_without_space_for_the_ids_is_an_error_that_leaves_nothing(folder, monkeypatch):
    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(numbered.os, "posix_fallocate", no_space, raising=False)
    with pytest.raises(OSError, match="No space left on device"):
        number_graph(folder / "text", folder / "numbered", progress=False)
    assert [path.name for path in folder.iterdir()] == ["text"]


def test_labels_that_are_not_used_are_reported(folder):
    (folder / "text" / "entities.tsv").write_text("a\tAnna\n")
    with pytest.warns(UserWarning, match=r"has labels in entities.tsv; a numbered graph shows identifiers instead"):
        number_graph(folder / "text", folder / "numbered", progress=False)


def test_an_existing_folder_and_other_formats_are_refused(folder, tmp_path):
    with pytest.raises(FileExistsError, match="text exists already"):
        number_graph(folder / "text", folder / "text")
    other = write_graph(tmp_path / "csv", suffix=".csv", line="{},{},{}\n")
    with pytest.raises(ValueError, match="cannot be numbered in bounded memory"):
        number_graph(other, tmp_path / "numbered")
