"""Multi-hop queries: their text, and their answers against exhaustive search in plain Python."""

import numpy as np
import pytest
import torch
from slow_queries import NORMS, SlowAnswers, random_query

from aswa_hf.kge import RESCAL, And, ComplEx, DistMult, Hop, KGEConfig, KGVocab, LinkPredictor, Or, Query, answer_query
from aswa_hf.kge.queries.answering import BeamSearch
from aswa_hf.kge.queries.language import MAX_HOPS, SHAPES
from aswa_hf.kge.queries.truth import TRUTHS, lowest

DEEPER = [
    "e0, r0, r1, ^r2, r0",
    "e0, r0, ^r1 & (e1, r1 | e2, r2, r0)",
    "((e0, r0 & e1, ^r0), r1 | e2, r2), r0 & e3, r1",
    "(e0, r0 & e1, r1 & e2, r2) | (e3, r0 | e4, r1)",
]


def build_predictor(cls=ComplEx, entities=6, seed=0, scale=12, **options):
    """In double precision: which entities a beam follows does not depend on the order of a sum."""
    torch.manual_seed(seed)
    vocab = KGVocab([f"e{i}" for i in range(entities)], ["r0", "r1", "r2"])
    model = cls(KGEConfig(num_entities=entities, num_relations=3, dim=8, initializer="normal", **options)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return LinkPredictor(model, vocab)


def scores(predictor, query, **options):
    answers = answer_query(predictor, query, k=predictor.vocab.num_entities, **options)
    assert answers["score"].is_monotonic_decreasing
    assert answers["rank"].tolist() == list(range(1, len(answers) + 1))
    return dict(zip(answers["answer"], answers["score"], strict=True))


def some_queries(predictor, seed=0):
    random = np.random.default_rng(seed)
    return [random_query(shape, predictor.vocab, random) for shape in SHAPES] + [Query.parse(text) for text in DEEPER]


# The text form


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("1p: a, r", Hop("a", "r")),
        ("2p: a, r, s", Hop(Hop("a", "r"), "s")),
        ("3p: a, r, s, t", Hop(Hop(Hop("a", "r"), "s"), "t")),
        ("2i: a, r, b, s", And(Hop("a", "r"), Hop("b", "s"))),
        ("3i: a, r, b, s, c, t", And(Hop("a", "r"), Hop("b", "s"), Hop("c", "t"))),
        ("ip: a, r, b, s, t", Hop(And(Hop("a", "r"), Hop("b", "s")), "t")),
        ("pi: a, r, s, b, t", And(Hop(Hop("a", "r"), "s"), Hop("b", "t"))),
        ("2u: a, r, b, s", Or(Hop("a", "r"), Hop("b", "s"))),
        ("up: a, r, b, s, t", Hop(Or(Hop("a", "r"), Hop("b", "s")), "t")),
    ],
)
def test_the_nine_shapes_are_read_and_written(text, query):
    assert Query.parse(text) == query
    assert str(query) == text
    assert query.shape == text[:2]


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("a,r", Hop("a", "r")),
        (" new york , lies in ", Hop("new york", "lies in")),
        ("a, r & b, s | c, t", Or(And(Hop("a", "r"), Hop("b", "s")), Hop("c", "t"))),
        ("a, r & (b, s | c, t)", And(Hop("a", "r"), Or(Hop("b", "s"), Hop("c", "t")))),
        ("(a, r | b, s), ^t, u", Hop(Hop(Or(Hop("a", "r"), Hop("b", "s")), "t", True), "u")),
        ("((a, r))", Hop("a", "r")),
        ("""'x, "y"', "it's \\"so\\"" """, Hop('x, "y"', 'it\'s "so"')),
        ("2p: côte d'ivoire, ^r, s", Hop(Hop("côte d'ivoire", "r", True), "s")),
    ],
)
def test_paths_are_joined_by_signs_and_parentheses(text, query):
    assert Query.parse(text) == query
    assert Query.parse(str(query)) == query


def test_any_label_survives_the_text():
    strange = [
        "a, b",
        "a & b",
        "(a)",
        "|",
        "^",
        "^a",
        '"',
        "'",
        "\\",
        '\\"',
        " a ",
        "",
        "2p: a",
        "pi:",
        "a\nb",
        "a:b",
        "日本",
    ]
    for one in strange:
        for other in strange:
            deep = Hop(Or(And(Hop(one, other), Hop(other, one, True)), Hop(one, one)), other, True)
            for query in (Hop(one, other), Hop(Hop(other, one, True), other), deep):
                assert Query.parse(str(query)) == query


def test_random_queries_survive_their_text():
    random = np.random.default_rng(0)

    def grown(depth):
        kind = random.integers(4) if depth else 0
        if kind < 2:
            source = grown(depth - 1) if kind else f"e{random.integers(9)}"
            return Hop(source, f"r{random.integers(9)}", bool(random.integers(2)))
        return (And, Or)[kind - 2](*(grown(depth - 1) for _ in range(random.integers(2, 4))))

    for _ in range(300):
        query = grown(4)
        assert Query.parse(str(query)) == query


def test_queries_are_put_together_with_operators():
    a, b, c = Hop("a", "r"), Hop("b", "s"), Hop("c", "t")
    assert a & b & c == And(a, b, c)
    assert a | b & c == Or(a, And(b, c))
    with pytest.raises(TypeError, match="two or more queries"):
        And(a)
    with pytest.raises(TypeError, match="from an entity's label or a query"):
        Hop(3, "r")
    with pytest.raises(TypeError, match="A query is text"):
        Query.parse(3)


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("", 1, "expected an entity, found the end"),
        ("a", 2, "expected ',' and a relation after the entity 'a', found the end"),
        ("a,", 3, "expected a relation, found the end"),
        ("a, , b", 4, "expected a relation, found ','"),
        ("a, r & b", 9, "after the entity 'b', found the end"),
        ("a, r b (c)", 8, r"found '\('; labels that contain one of ,&\|\(\) need quotes"),
        ("(a, r", 6, r"'&', '\|' or '\)', found the end"),
        ("a, r)", 5, r"or the end, found '\)'"),
        ("^a, r", 1, "only relations are followed backwards"),
        ('a, "r', 4, 'the quote " is not closed'),
        ("2p: a, r", 9, r"2p takes entity, relation, relation\), found the end"),
        ("2p: a, r, s, t", 12, r"expected the end \(2p takes entity, relation, relation\), found ','"),
        ("  4p: a, r", 3, "unknown shape '4p', the shapes are 1p, 2p, 3p, 2i, 3i, ip, pi, 2u, up"),
        ("a" + ", r" * 101, 302, f"more than {MAX_HOPS} hops"),
        ("(" * 5000, 101, f"more than {MAX_HOPS} hops"),
    ],
)
def test_malformed_queries_are_refused_with_the_position(text, position, message):
    with pytest.raises(ValueError, match=rf"wrong at position {position}: .*{message}"):
        Query.parse(text)


# Answers


@pytest.mark.parametrize("truth", TRUTHS)
@pytest.mark.parametrize("tnorm", NORMS)
@pytest.mark.parametrize("inverse_relations", [True, False])
def test_a_beam_of_all_entities_is_exhaustive_search(tnorm, truth, inverse_relations):
    for seed in range(2):
        predictor = build_predictor(seed=seed, inverse_relations=inverse_relations)
        slow = SlowAnswers(predictor, tnorm, truth)
        for query in some_queries(predictor, seed):
            found = scores(predictor, query, beam=6, tnorm=tnorm, truth=truth)
            assert found == pytest.approx(slow.exhaustive(query), abs=2e-6), str(query)


@pytest.mark.parametrize("beam", [1, 2, 4])
def test_a_narrow_beam_follows_the_best_at_every_variable(beam):
    predictor = build_predictor(RESCAL, entities=9, scale=6)  # the plain way cannot tell logits beyond 36 apart
    slow = SlowAnswers(predictor)
    differs = 0
    for query in some_queries(predictor):
        found = scores(predictor, query, beam=beam)
        assert found == pytest.approx(slow.beam(query, beam), abs=2e-6), str(query)
        differs += found != pytest.approx(slow.beam(query, 9), abs=2e-6)
    assert differs


def test_queries_in_batches_of_any_size_have_the_answers_of_single_ones(monkeypatch):
    predictor = build_predictor(entities=40)
    random = np.random.default_rng(0)
    queries = [random_query(shape, predictor.vocab, random) for shape in list(SHAPES) * 7]
    apart = [answer_query(predictor, query, k=40) for query in queries]
    rows = []
    product = torch.Tensor.addmm_

    def counted(out, vectors, *args, **options):
        rows.append(len(vectors))
        return product(out, vectors, *args, **options)

    monkeypatch.setattr(torch.Tensor, "addmm_", counted)
    for batch_size, most in ((None, 70), (1, 1), (7, 7), (20, 20), (29, 20)):
        rows.clear()
        together = answer_query(predictor, queries, k=40, batch_size=batch_size)
        assert together["query"].tolist() == [str(query) for query in queries for _ in range(40)]
        expected = np.concatenate([table["score"] for table in apart])
        assert together["score"].to_numpy() == pytest.approx(expected, rel=1e-4)
        assert max(rows) == most


def test_chains_are_the_steps_that_give_the_answer_its_score():
    predictor = build_predictor(entities=8)
    slow = SlowAnswers(predictor)
    for query in [*some_queries(predictor), Query.parse("(e0, r0 | (e1, r0 | e2, r0 & e3, r1)), r2")]:
        table = answer_query(predictor, query, k=8, beam=8, chains=True)
        labels = [label for kind, label in query.labels() if kind == "entity"]
        for answer, score, chain in zip(table["answer"], table["score"], table["chain"], strict=True):
            for step in chain:
                relation, inverse = step.relation.removeprefix("^"), step.relation.startswith("^")
                assert step.truth == pytest.approx(slow.table[step.source, relation, inverse, step.target], abs=2e-6)
            assert chain[-1].target == answer
            assert chain[0].source in labels
            product = np.prod([step.truth for step in chain])
            if "u" in str(query.structure):
                assert product <= score + 1e-6
            else:
                assert product == pytest.approx(score, abs=2e-6)
                assert chain[0].source == labels[0]
    # Every step of a path begins where the one before it ended.
    (chain,) = answer_query(predictor, "e0, r0, r1, r2, r0", k=1, chains=True)["chain"]
    assert [step.source for step in chain] == ["e0", *(step.target for step in chain[:-1])]
    assert [step.relation for step in chain] == ["r0", "r1", "r2", "r0"]
    assert str(chain[0]._replace(target="e1", truth=0.5)) == "e0 –r0→ e1 (0.500)"
    assert str(chain[0]._replace(target="e1", truth=0.000123456)) == "e0 –r0→ e1 (0.000123)"


def test_a_union_shows_the_branch_that_says_most():
    predictor = by_hand([[0, 9, -9], [-9, 3, 1], [0, 0, 0]])
    table = answer_query(predictor, "e0, r0 | e1, r0", k=3, chains=True)
    chains = {
        answer: [step.source for step in chain] for answer, chain in zip(table["answer"], table["chain"], strict=True)
    }
    assert chains["e1"] == ["e0"]
    assert chains["e2"] == ["e1"]


def by_hand(logits):
    """A predictor with one relation, whose logit from entity i to j is `logits[i][j]`."""
    size = len(logits)
    vocab = KGVocab([f"e{i}" for i in range(size)], ["r0"])
    model = RESCAL(KGEConfig(num_entities=size, num_relations=1, dim=size, inverse_relations=False))
    with torch.no_grad():
        model.entity_embeddings.weight.copy_(torch.eye(size))
        model.relation_embeddings.weight.copy_(torch.tensor(logits, dtype=torch.float32).flatten()[None])
    return LinkPredictor(model, vocab)


def test_numbers_by_hand():
    third = float(np.log(1 / 2))  # σ = 1/3
    predictor = by_hand([[0, third, -third], [0, 0, 0], [third, 0, -third]])
    found = scores(predictor, "e0, r0, r0", beam=3)
    # e0 → e2 is 2/3 true; from there e0 is 1/3 true, e1 1/2, e2 2/3; over e0 (1/2) and e1 (1/3) nothing gets better.
    assert found == pytest.approx({"e0": 1 / 4, "e1": 1 / 3, "e2": 4 / 9})
    assert scores(predictor, "e0, r0, r0", beam=1) == pytest.approx({"e0": 2 / 9, "e1": 1 / 3, "e2": 4 / 9})
    assert scores(predictor, "e0, r0 & e2, r0")["e2"] == pytest.approx(4 / 9)
    assert scores(predictor, "e0, r0 | e2, r0")["e2"] == pytest.approx(8 / 9)
    assert scores(predictor, "e0, r0 & e2, r0", tnorm="lukasiewicz")["e2"] == pytest.approx(1 / 3)
    assert scores(predictor, "e0, r0 | e2, r0", tnorm="lukasiewicz")["e2"] == 1
    assert scores(predictor, "e0, r0", truth="minmax") == pytest.approx({"e0": 0.5, "e1": 0, "e2": 1}, abs=1e-6)
    assert scores(predictor, "e1, r0", truth="minmax") == pytest.approx(dict.fromkeys(["e0", "e1", "e2"], 0.5))
    assert scores(predictor, "e1, r0", truth="softmax") == pytest.approx(dict.fromkeys(["e0", "e1", "e2"], 1 / 3))


def test_logits_whose_sigmoid_rounds_to_one_still_differ():
    # In float32 σ(18) = σ(19) = σ(20) = 1, and the beam of one must still follow the 20.
    predictor = by_hand([[18, 20, 19], [-50, -55, -45], [50, 50, 50]])
    assert answer_query(predictor, "e0, r0")["answer"].tolist() == ["e1", "e2", "e0"]
    table = answer_query(predictor, "e0, r0, r0", beam=1, chains=True)
    assert table["answer"].tolist() == ["e2", "e0", "e1"]
    assert {chain[0].target for chain in table["chain"]} == {"e1"}
    # Logits of any size are answered with numbers between 0 and 1.
    extreme = by_hand([[1e4, -1e4, 0], [-1e4, -1e4, 1e4], [1e4, 0, -1e4]])
    for tnorm in NORMS:
        for truth in TRUTHS:
            for query in ("e0, r0, r0, r0", "(e0, r0 & e1, r0), r0 | e2, r0", "(e0, r0 | e1, r0), r0 & e2, r0"):
                found = list(scores(extreme, query, tnorm=tnorm, truth=truth).values())
                assert all(0 <= value <= 1 for value in found), (tnorm, truth, query, found)


@pytest.mark.parametrize(("columns", "k"), [(5, 3), (40, 10), (1000, 1), (1000, 10), (1237, 7), (5000, 64)])
def test_the_lowest_odds_are_those_of_a_full_sort(columns, k):
    torch.manual_seed(0)
    for odds in (
        torch.rand(6, columns),
        torch.randint(4, (6, columns)).float(),
        torch.arange(columns).float().expand(3, -1),
    ):
        values, places = lowest(odds, k)
        assert torch.equal(values, odds.sort(dim=1).values[:, :k])
        assert torch.equal(odds.gather(1, places), values)
        assert all(len(set(row)) == k for row in places.tolist())


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 0.1), (torch.float16, 0.02), (torch.float32, 1e-5)])
def test_a_model_of_any_precision_answers(dtype, error):
    predictor = build_predictor()
    queries = some_queries(predictor)
    expected = [scores(predictor, query) for query in queries]
    predictor.model.to(dtype)
    for query, before in zip(queries, expected, strict=True):
        assert scores(predictor, query) == pytest.approx(before, abs=error)


def test_dropout_has_no_effect_and_training_continues():
    predictor = build_predictor(DistMult, input_dropout=0.5, query_dropout=0.5)
    expected = scores(predictor, "2p: e0, r0, r1")
    predictor.model.train()
    assert scores(predictor, "2p: e0, r0, r1") == expected
    assert predictor.model.training


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"query": "2p: e0, r0, R 1"}, ValueError, "Unknown relation 'R 1'. Did you mean 'r1'"),
        ({"query": "1p: E 0, r0"}, ValueError, "Unknown entity 'E 0'. Did you mean 'e0'"),
        ({"query": "2p: e0, r0"}, ValueError, "wrong at position 11"),
        ({"query": 7}, TypeError, "a query, or a list of queries, got 7"),
        ({"query": ["1p: e0, r0", 7]}, TypeError, "A query is text"),
        ({"beam": 0}, ValueError, "beam must be a whole number of at least 1, got 0"),
        ({"k": 0}, ValueError, "k must be a whole number of at least 1, got 0"),
        ({"batch_size": -1}, ValueError, "batch_size must be a whole number of at least 1, got -1"),
        ({"tnorm": "sum"}, ValueError, "tnorm must be one of product, min, lukasiewicz, got 'sum'"),
        ({"tnorm": ["min"]}, ValueError, "tnorm must be one of product, min, lukasiewicz, got"),
        ({"truth": "logit"}, ValueError, "truth must be one of sigmoid, minmax, softmax, got 'logit'"),
    ],
)
def test_bad_input_is_one_clear_error(options, error, message):
    with pytest.raises(error, match=message):
        answer_query(build_predictor(), **({"query": "1p: e0, r0"} | options))


def test_what_cannot_answer_is_refused():
    predictor = build_predictor()
    with pytest.raises(TypeError, match=r"need a LinkPredictor, got ComplEx. Build one with LinkPredictor\(model"):
        answer_query(predictor.model, "1p: e0, r0")
    with torch.no_grad():
        predictor.model.relation_embeddings.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="has diverged: its weights or scores"):
        answer_query(predictor, "1p: e0, r0")


@pytest.mark.parametrize("entities", [6, 500])
def test_a_model_whose_scores_overflow_is_refused(entities):
    predictor = build_predictor(entities=entities)
    with torch.no_grad():
        for parameter in predictor.model.float().parameters():
            parameter.mul_(1e30)
    for query in ("1p: e0, r0", "2p: e0, r0, r1"):
        with pytest.raises(ValueError, match="has diverged"):
            answer_query(predictor, query)


def test_no_queries_have_no_answers():
    predictor = build_predictor()
    assert list(answer_query(predictor, [])) == ["query", "answer", "score", "rank"]
    assert list(answer_query(predictor, [], chains=True)) == ["query", "answer", "score", "rank", "chain"]


def test_answering_makes_no_copy_of_the_entities():
    predictor = build_predictor()
    weight = predictor.model.entity_embeddings.weight
    assert BeamSearch(predictor.model).entities.data_ptr() == weight.data_ptr()
