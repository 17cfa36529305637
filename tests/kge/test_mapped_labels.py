"""The labels of a numbered graph stay on disk, and are used as those of any other graph."""

import json

import numpy as np
import pyarrow as pa
import pytest

from aswa_hf.kge import KGVocab, vocab
from aswa_hf.kge.vocab import MappedLabels, take_labels

LABELS = ["zürich", "new_york", "Bern", "são paulo", "東京", "Lyon", '"quoted"']
RELATIONS = ["in", "near"]


@pytest.fixture
def both(tmp_path, monkeypatch):
    """A vocabulary of labels on disk in three batches, read two at a time, and one of the same in memory."""
    monkeypatch.setattr(vocab, "_AT_A_TIME", 2)
    schema = pa.schema([("label", pa.string())])
    with pa.ipc.new_stream(str(tmp_path / "labels.arrow"), schema) as file:
        for start, stop in ((0, 3), (3, 4), (4, 7)):
            file.write_batch(pa.record_batch([pa.array(LABELS[start:stop])], schema=schema))
    with pa.memory_map(str(tmp_path / "labels.arrow")) as source:
        column = pa.ipc.open_stream(source).read_all()["label"]
    return KGVocab(MappedLabels(column), RELATIONS), KGVocab(LABELS, RELATIONS)


def test_labels_on_disk_are_a_list(both):
    labels = both[0].entities
    assert len(labels) == both[0].num_entities == 7
    assert labels[0] == "zürich"
    assert labels[-1] == '"quoted"'
    assert labels[np.int64(4)] == "東京"
    assert labels[1:5] == LABELS[1:5]
    assert labels[::3] == LABELS[::3]
    assert list(labels) == LABELS
    assert labels == LABELS
    assert not LABELS != labels  # noqa: SIM300, SIM202 (a list on the left)
    assert labels != LABELS[:-1]
    assert labels != [*LABELS[:-1], "other"]
    assert "Lyon" in labels
    assert "Paris" not in labels
    assert 3 not in labels
    with pytest.raises(IndexError, match=r"There is no label 7: there are 7\."):
        labels[7]


def test_both_find_the_same_ids_and_labels(both):
    asked = ["東京", "Bern", "Bern", "zürich"]
    for one in both:
        assert one.entity_ids(asked).tolist() == [4, 2, 2, 0]
        assert one.entity_ids(pa.chunked_array([asked[:1], asked[1:]])).tolist() == [4, 2, 2, 0]
        assert one.entity_ids(np.array(asked, dtype=object)).dtype == np.int64
        assert one.entity_ids([]).tolist() == []
        assert one.entity_id("Lyon") == 5
        assert one.relation_ids(["near"]).tolist() == [1]
        assert take_labels(one.entities, np.array([[4, 2], [2, 0]])).tolist() == [["東京", "Bern"], ["Bern", "zürich"]]
        assert take_labels(one.entities, np.array([], dtype=np.int64)).tolist() == []
    assert both[0].same_as(both[1])
    assert both[1].same_as(both[0])
    assert not both[0].same_as(KGVocab(LABELS[::-1], RELATIONS))


@pytest.mark.parametrize("ask", ["New York", None, 3, ["Bern", "New York"], "Bern "])
def test_both_have_the_same_errors(both, ask):
    messages = []
    for one in both:
        with pytest.raises((TypeError, ValueError)) as caught:
            one.entity_ids(ask) if isinstance(ask, list) else one.entity_id(ask)
        messages.append(f"{caught.type.__name__}: {caught.value}")
    assert messages[0] == messages[1]
    with pytest.raises(TypeError, match="Expected a list of entity labels, got the text 'Bern'"):
        both[0].entity_ids("Bern")


def test_both_are_saved_as_the_same_files(both, tmp_path):
    for name, one in zip(("mapped", "plain"), both, strict=True):
        one.save_pretrained(tmp_path / name)
    for file in ("entities.json", "relations.json", "preprocessor_config.json"):
        assert (tmp_path / "mapped" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
    assert json.loads((tmp_path / "mapped" / "entities.json").read_text(encoding="utf-8")) == LABELS
    assert KGVocab.from_pretrained(tmp_path / "mapped").same_as(both[0])
