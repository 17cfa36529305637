"""Readable labels beside a graph of identifiers: shown everywhere, and both are accepted."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aswa_hf.kge import DistMult, KGVocab, LinkPredictor, load_kg

TRIPLES = {"train": "Q1 P1 Q2\nQ3 P1 Q2\nQ1 P2 Q3\nQ4 P2 Q1", "valid": "Q4 P1 Q2", "test": "Q2 P2 Q3"}
ENTITIES = {"Q1": "Bach", "Q2": {"label": "composer", "description": "a trade"}, "Q3": "Bach", "Q9": "nobody"}
RELATIONS = {"P1": "occupation", "P2": "Q1"}


@pytest.fixture
def folder(tmp_path):
    for split, text in TRIPLES.items():
        (tmp_path / f"{split}.txt").write_text(text.replace(" ", "\t"))
    return tmp_path


@pytest.fixture
def kg(folder):
    (folder / "entities.json").write_text(json.dumps(ENTITIES))
    (folder / "relations.tsv").write_text("".join(f"{key}\t{label}\n" for key, label in RELATIONS.items()))
    return load_kg(folder)


def test_labels_are_shown_and_keys_are_accepted(kg):
    # Two are called Bach, Q4 has no label; what an entity is called does not matter to relations.
    assert kg.vocab.entities == ["Bach (Q1)", "composer", "Bach (Q3)", "Q4"]
    assert kg.vocab.relations == ["occupation", "Q1"]
    for name in ("composer", "Q2"):
        assert kg.vocab.entity_id(name) == 1
    assert kg.vocab.entity_ids(["Q3", "Bach (Q1)", "Q4"]).tolist() == [2, 0, 3]
    assert kg.vocab.relation_ids(["P1", "Q1"]).tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"Unknown entity 'compose'. Did you mean 'composer'"):
        kg.vocab.entity_id("compose")


def test_predictions_show_labels_and_the_vocabulary_is_saved_with_both(kg, folder, tmp_path):
    model = DistMult(kg.config(dim=4))
    predictor = LinkPredictor(model, kg.vocab, kg)
    by_key, by_label = predictor.predict("Q1", "P1", k=4), predictor.predict("Bach (Q1)", "occupation", k=4)
    assert set(by_key["tail"]) == set(kg.vocab.entities)
    assert by_key.equals(by_label)
    assert set(by_key["head"]) == {"Bach (Q1)"}
    assert set(by_key["relation"]) == {"occupation"}
    model.save_pretrained(tmp_path / "run")
    kg.vocab.save_pretrained(tmp_path / "run")
    loaded = LinkPredictor.from_pretrained(tmp_path / "run", kg=kg)
    assert (loaded.vocab.entities, loaded.vocab.keys) == (kg.vocab.entities, kg.vocab.keys)
    assert loaded.predict("Q1", "P1", k=4).equals(by_key)
    # A model that was trained before there were labels belongs to the same graph.
    assert (
        LinkPredictor(model, KGVocab(["Q1", "Q2", "Q3", "Q4"], ["P1", "P2"]), kg).predict("Q1", "P1", k=1) is not None
    )
    with pytest.raises(ValueError, match="does not have the entities and relations"):
        LinkPredictor(model, KGVocab(["Q2", "Q1", "Q3", "Q4"], ["P1", "P2"]), kg)


def test_without_labels_nothing_is_added(folder):
    vocab = load_kg(folder).vocab
    assert (vocab.entities, vocab.keys) == (["Q1", "Q2", "Q3", "Q4"], {})
    vocab.save_pretrained(folder / "run")
    assert not (folder / "run" / "keys.json").exists()


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("entities.json", '["Bach"]', "expected an object"),
        ("entities.json", '{"Q1": 3}', "Q1 is 3, expected"),
        ("entities.json", '{"Q1": ""}', "the label of 'Q1' is '', expected text"),
        ("relations.json", '{"P1": {"name": "x"}}', "the label of 'P1' is None, expected text"),
        ("entities.tsv", "Q1\tBach\nQ2\n", r"entities.tsv, line 2: expected an identifier, a tab and a label"),
    ],
)
def test_a_damaged_file_of_labels_is_named(file, text, problem, folder):
    (folder / file).write_text(text)
    with pytest.raises(ValueError, match=problem):
        load_kg(folder)


def test_keys_that_do_not_fit_are_refused(kg, tmp_path):
    kg.vocab.save_pretrained(tmp_path / "run")
    (tmp_path / "run" / "keys.json").write_text('{"entities": ["Q1"]}')
    with pytest.raises(ValueError, match=r"keys.json is damaged: There must be one key for each label"):
        KGVocab.from_pretrained(tmp_path / "run")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\xff\xfeP1\toccupation\n", "relations.tsv cannot be read: 'utf-8' codec"),
        (b"P1\toccupation\nP1\tjob\n", "relations.tsv, line 2: expected an identifier"),
        (b"P1\n", "relations.tsv, line 1"),
        (b"P1\t" + b"x" * 200_000 + b"\n", "relations.tsv cannot be read: field larger than field limit"),
    ],
)
def test_labels_that_are_no_text_of_two_columns_are_refused(folder, content, told):
    (folder / "relations.tsv").write_bytes(content)
    with pytest.raises(ValueError, match=told):
        load_kg(folder)


def test_marks_and_spaces_of_editors_are_no_part_of_labels(folder):
    (folder / "entities.tsv").write_bytes(b"\xef\xbb\xbfQ1\t Bach \r\nQ2\tViva  ldi\r\n")
    (folder / "relations.json").write_text('{"P1": " has\\na\\ttrade "}')
    vocab = load_kg(folder).vocab
    assert vocab.entities[:2] == ["Bach", "Viva ldi"]
    assert vocab.relations[0] == "has a trade"


def test_labels_in_two_files_are_refused(folder):
    (folder / "entities.json").write_text('{"Q1": "Bach"}')
    (folder / "entities.tsv").write_text("Q1\tVivaldi\n")
    with pytest.raises(ValueError, match=r"the labels of entities twice: entities.json and entities.tsv. Keep one"):
        load_kg(folder)


def test_labels_of_another_graph_are_reported(folder):
    (folder / "entities.tsv").write_text("Bach\tQ1\n")
    with pytest.warns(
        UserWarning, match="None of the 1 labels of entities has an identifier of the graph, such as 'Q1'"
    ):
        assert load_kg(folder).vocab.entities[0] == "Q1"


def test_a_part_of_a_name_finds_those_that_contain_it():
    vocab = KGVocab(["Johann Sebastian Bach", "Antonio Vivaldi"], ["occupation"])
    with pytest.raises(ValueError, match=r"Unknown entity 'bach'. Did you mean 'Johann Sebastian Bach'\?"):
        vocab.entity_id("bach")


def test_a_folder_that_is_laid_out_as_a_dataset_has_labels_too(tmp_path):
    (tmp_path / "data").mkdir()
    for split, text in TRIPLES.items():
        columns = zip(*(line.split() for line in text.splitlines()), strict=True)
        table = pa.table(dict(zip(("head", "relation", "tail"), columns, strict=True)))
        name = {"valid": "validation"}.get(split, split)
        pq.write_table(table, tmp_path / "data" / f"{name}-00000-of-00001.parquet")
    (tmp_path / "entities.json").write_text(json.dumps(ENTITIES))
    kg = load_kg(tmp_path, cache_dir=tmp_path / "cache")
    assert kg.vocab.entities == ["Bach (Q1)", "composer", "Bach (Q3)", "Q4"]
