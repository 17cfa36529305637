"""Questions asked with labels, checked against the model's own scores."""

import numpy as np
import pytest
import torch
from kge_graphs import random_graph

from aswa_hf.kge import ComplEx, KGVocab, LinkPredictor


@pytest.fixture(params=[True, False], ids=["inverses", "no inverses"])
def predictor(request, tmp_path):
    kg = random_graph(tmp_path / "graph")
    torch.manual_seed(0)
    # In double precision the order of answers does not depend on the order of a sum.
    return LinkPredictor(ComplEx(kg.config(dim=8, inverse_relations=request.param)).double(), kg.vocab, kg)


def plain_scores(predictor, head=None, relation=None, tail=None):
    """The score of every entity in the open place, one triple at a time."""
    model, vocab = predictor.model, predictor.vocab
    r = vocab.relation_id(relation)
    found = {}
    for candidate in vocab.entities:
        h, t = vocab.entity_id(head or candidate), vocab.entity_id(tail or candidate)
        triple = (t, r + vocab.num_relations, h) if head is None and model.config.inverse_relations else (h, r, t)
        with torch.no_grad():
            found[candidate] = model.score(*(torch.tensor([x]) for x in triple)).item()
    return found


@pytest.mark.parametrize("question", [{"head": "e3", "relation": "r1"}, {"relation": "r2", "tail": "e5"}])
def test_the_best_answers_in_order_with_their_scores(predictor, question):
    expected = sorted(plain_scores(predictor, **question).items(), key=lambda item: -item[1])[:4]
    answers = predictor.predict(**question, k=4)
    open_place = "tail" if "head" in question else "head"
    assert answers[open_place].tolist() == [label for label, _ in expected]
    assert answers["score"].tolist() == pytest.approx([score for _, score in expected], rel=1e-5)
    assert answers["rank"].tolist() == [1, 2, 3, 4]
    for place, label in question.items():
        assert set(answers[place]) == {label}


def test_several_questions_at_once_are_the_single_ones(predictor):
    together = predictor.predict(head=["e0", "e7"], relation="r0", k=3)
    apart = [predictor.predict(head=head, relation="r0", k=3) for head in ("e0", "e7")]
    assert together["tail"].tolist() == [*apart[0]["tail"], *apart[1]["tail"]]
    assert together["head"].tolist() == ["e0"] * 3 + ["e7"] * 3
    with pytest.raises(ValueError, match=r"the same length, got \[2, 3\]"):
        predictor.predict(head=["e0", "e7"], relation=["r0", "r1", "r2"])


def test_candidates_and_known_answers_limit_what_comes_back(predictor):
    scores = plain_scores(predictor, head="e1", relation="r1")
    chosen = ["e9", "e2", "e4"]
    answers = predictor.predict(head="e1", relation="r1", candidates=[*chosen, "e2"])
    assert answers["tail"].tolist() == sorted(chosen, key=lambda label: -scores[label])

    vocab, kg = predictor.vocab, predictor.kg
    for question, given, place in (({"head": "e1"}, 0, 2), ({"tail": "e2"}, 2, 0)):
        triples = np.concatenate([kg.triples(split) for split in kg])
        rows = (triples[:, given] == vocab.entity_id(*question.values())) & (triples[:, 1] == vocab.relation_id("r1"))
        known = {vocab.entities[i] for i in triples[rows, place]}
        answers = predictor.predict(**question, relation="r1", k=100, exclude_known=True)
        assert set(answers["tail" if place == 2 else "head"]) == set(vocab.entities) - known
        assert known
    without_graph = LinkPredictor(predictor.model, vocab)
    with pytest.raises(ValueError, match=r"needs the known triples.*kg=load_kg"):
        without_graph.predict(head="e1", relation="r1", exclude_known=True)


def test_scores_of_triples_and_nearest_entities(predictor):
    expected = plain_scores(predictor, head="e1", relation="r1")
    assert predictor.score("e1", "r1", "e6") == pytest.approx(expected["e6"], rel=1e-5)
    assert predictor.score("e1", "r1", ["e6", "e0"]) == pytest.approx([expected["e6"], expected["e0"]], rel=1e-5)

    with torch.no_grad():
        table = predictor.model.entity_embeddings.weight
        table[predictor.vocab.entity_id("e2")] = 3 * table[predictor.vocab.entity_id("e8")]
    nearest = predictor.nearest("e8", k=2)
    assert nearest["entity"][0] == "e2"
    assert nearest["similarity"][0] == pytest.approx(1)
    assert "e8" not in set(nearest["entity"])


def test_saved_and_loaded_with_its_vocabulary(predictor, tmp_path):
    predictor.model.save_pretrained(tmp_path / "saved")
    predictor.vocab.save_pretrained(tmp_path / "saved")
    loaded = LinkPredictor.from_pretrained(tmp_path / "saved")
    question = {"head": "e3", "relation": "r1"}
    assert loaded.predict(**question).equals(predictor.predict(**question))


@pytest.mark.parametrize(("dtype", "error"), [(torch.float16, 0.02), (torch.bfloat16, 0.02), (torch.float32, 1e-5)])
def test_a_model_of_any_precision_answers(predictor, dtype, error):
    questions = {"head": ["e1", "e5"], "relation": "r1"}
    expected = predictor.predict(**questions, k=12).sort_values(["head", "tail"])["score"].to_numpy()
    assert expected.dtype == np.float64
    nearest = predictor.nearest("e1", k=1)
    score = predictor.score("e1", "r1", "e2")
    predictor.model.to(dtype)
    found = predictor.predict(**questions, k=12).sort_values(["head", "tail"])["score"].to_numpy()
    assert found.dtype == np.float32
    assert found == pytest.approx(expected, abs=error)
    assert predictor.nearest("e1", k=1)["similarity"][0] == pytest.approx(nearest["similarity"][0], abs=error)
    assert predictor.score("e1", "r1", "e2") == pytest.approx(score, abs=error)


def test_a_model_that_diverged_has_no_answers(predictor):
    with torch.no_grad():
        predictor.model.entity_embeddings.weight[3, 0] = torch.nan
    diverged = predictor.vocab.entities[3]
    for ask in (
        lambda: predictor.predict(head="e1", relation="r1"),
        lambda: predictor.predict(relation="r1", tail="e1"),
        lambda: predictor.score("e1", "r1", diverged),
        lambda: predictor.nearest("e1"),
    ):
        with pytest.raises(ValueError, match="weights have diverged"):
            ask()


def test_what_cannot_be_asked(predictor):
    with pytest.raises(ValueError, match=r"Unknown entity 'e99'\. Did you mean"):
        predictor.predict(head="e99", relation="r1")
    with pytest.raises(ValueError, match="Unknown relation 'R1'"):
        predictor.predict(head="e1", relation="R1")
    for question in ({"head": "e1"}, {"relation": "r1"}, {"head": "e1", "relation": "r1", "tail": "e2"}):
        with pytest.raises(ValueError, match="Give head= and relation= to predict tails"):
            predictor.predict(**question)
    for k in (0, 2.5, "3", True):
        with pytest.raises(ValueError, match=f"k must be a whole number of at least 1, got {k!r}"):
            predictor.predict(head="e1", relation="r1", k=k)
        with pytest.raises(ValueError, match="k must be a whole number"):
            predictor.nearest("e1", k=k)
    with pytest.raises(TypeError, match="Expected a label or a list of labels, got 3"):
        predictor.predict(head=3, relation="r1")
    with pytest.raises(TypeError, match="Expected a label or a list of labels, got None"):
        predictor.score("e1", None, "e2")
    with pytest.raises(ValueError, match="do not belong together"):
        LinkPredictor(predictor.model, KGVocab(["a"], ["b"]))
