"""The vocabulary of a graph: ids, suggestions, files, the Hub."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from kge_graphs import write_graph

from aswa_hf.kge.data import KGVocab, load_kg

# A warning that no test expects is a failure.
pytestmark = pytest.mark.filterwarnings("error::UserWarning")


def test_a_vocabulary_returns_ids(tmp_path):
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
        (b'["\xff"]', "is not UTF-8 text"),
        (b'{"a": 0}', "contains {'a': 0}, expected a list"),
        (b'["a", "a"]', "'a' twice"),
        (b'["a", null]', r"\[1\] is None, expected a string"),
        (b"", "Expecting value"),
    ],
)
def test_a_damaged_vocabulary_is_one_clear_error(tmp_path, content, message):
    KGVocab(["a"], ["r"]).save_pretrained(tmp_path)
    (tmp_path / "entities.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"entities\.json.*{message}"):
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
        KGVocab,
        "_upload_modified_files",
        lambda self, folder, *_, **__: uploaded.extend(path.name for path in Path(folder).iterdir()),
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

    kg = load_kg(write_graph(tmp_path / "graph"))
    args = TrainingArguments(
        str(tmp_path / "run"), max_steps=2, save_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
    )
    Trainer(Model(), args, train_dataset=kg["train"], processing_class=kg.vocab).train()
    for step in (1, 2):
        again = KGVocab.from_pretrained(tmp_path / "run" / f"checkpoint-{step}")
        assert (again.entities, again.relations) == (kg.vocab.entities, kg.vocab.relations)
