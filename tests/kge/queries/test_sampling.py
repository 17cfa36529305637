"""Queries sampled from a graph, their files, and the ranking of their hard answers, against plain Python."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from datasets import Dataset, concatenate_datasets
from kge_graphs import labeled, random_graph, write_graph
from slow_queries import SlowAnswers, reached

from aswa_hf.kge import (
    And,
    ComplEx,
    Hop,
    LinkPredictor,
    Or,
    Query,
    evaluate_link_prediction,
    evaluate_queries,
    generate_queries,
    load_kg,
    load_queries,
    save_queries,
)
from aswa_hf.kge.queries.language import SHAPES, build, label_kinds


@pytest.fixture(scope="module")
def kg(tmp_path_factory):
    return random_graph(tmp_path_factory.mktemp("graph"), entities=14, relations=3, triples=90)


def splits(kg):
    """The labeled triples of the training split, and of all splits."""
    return set(labeled(kg, "train")), {triple for split in kg for triple in labeled(kg, split)}


def canonical(query):
    """The same for queries that differ only in the order of their branches."""
    if isinstance(query, Hop):
        return (query.source if isinstance(query.source, str) else canonical(query.source), query.relation)
    return type(query), frozenset(canonical(part) for part in query.parts)


def has_branches_alike(query):
    if isinstance(query, Hop):
        return isinstance(query.source, Query) and has_branches_alike(query.source)
    return len({canonical(part) for part in query.parts}) < len(query.parts)


def is_degenerate(query, triples):
    """Whether two branches are alike, or one of a union leads nowhere."""
    if isinstance(query, Hop):
        return isinstance(query.source, Query) and is_degenerate(query.source, triples)
    return has_branches_alike(query) or not all(reached(part, triples) for part in query.parts)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_query_has_hard_answers_and_the_answers_are_right(kg, shape):
    train, everything = splits(kg)
    queries = generate_queries(kg, shape, n=25, seed=3)
    assert len(queries) == 25
    assert set(queries["shape"]) == {shape}
    for row in queries:
        query = Query.parse(row["query"])
        assert query.shape == shape
        assert set(row["easy"]) == reached(query, train)
        assert set(row["hard"]) == reached(query, everything) - reached(query, train)
        assert row["hard"]
        assert not has_branches_alike(query)
    assert len({canonical(Query.parse(text)) for text in queries["query"]}) == 25


@pytest.mark.parametrize("shape", SHAPES)
def test_all_queries_of_a_small_graph_are_returned(tmp_path, shape):
    kg = random_graph(tmp_path, entities=5, relations=2, triples=16, seed=1)
    train, everything = splits(kg)
    labels = [kg.vocab.entities if kind == "entity" else kg.vocab.relations for kind in label_kinds(SHAPES[shape])]
    kinds = label_kinds(SHAPES[shape])
    expected = set()
    for chosen in itertools.product(*labels):
        query = build(SHAPES[shape], list(zip(kinds, chosen, strict=True)))
        answers = reached(query, everything)
        if len(answers) <= 4 and answers - reached(query, train) and not is_degenerate(query, everything):
            expected.add(canonical(query))
    with pytest.warns(UserWarning, match=rf"Found only {len(expected)} {shape} queries with a hard answer .*not 5000"):
        found = generate_queries(kg, shape, n=5000, max_answers=4)
    assert {canonical(Query.parse(text)) for text in found["query"]} == expected
    assert len(found) == len(expected) > 3


def test_the_seed_decides_which_queries(kg):
    first, again, other = (generate_queries(kg, "pi", n=20, seed=seed) for seed in (1, 1, 2))
    assert first.to_dict() == again.to_dict()
    assert first["query"] != other["query"]
    few = generate_queries(kg, "pi", n=5, seed=1)
    assert few["query"] == first["query"][:5]


def test_validation_answers_can_be_counted_as_easy(kg):
    known = set(labeled(kg, "train")) | set(labeled(kg, "validation"))
    _, everything = splits(kg)
    for row in generate_queries(kg, "2i", n=30, easy_splits=("train", "validation")):
        query = Query.parse(row["query"])
        assert set(row["easy"]) == reached(query, known)
        assert set(row["hard"]) == reached(query, everything) - reached(query, known) != set()
    alone, listed = (generate_queries(kg, "2i", n=5, easy_splits=splits) for splits in ("train", ("train",)))
    assert alone.to_dict() == listed.to_dict()


@pytest.mark.filterwarnings("ignore:.*They are kept")
def test_what_cannot_be_sampled_is_one_clear_error(kg, tmp_path):
    triples = {"train": [("a", "r", "b"), ("c", "r", "b")], "valid": [("a", "s", "d")], "test": [("c", "s", "d")]}
    flat = load_kg(write_graph(tmp_path / "flat", triples))
    assert canonical(Query.parse(generate_queries(flat, "2i", n=1)["query"][0])) == canonical(
        And(Hop("a", "s"), Hop("c", "s"))
    )
    with pytest.raises(ValueError, match=r"The graph flat has no 2p query with a hard answer \(.* walks found none\)"):
        generate_queries(flat, "2p")
    known = load_kg(write_graph(tmp_path / "known", triples | {"valid": triples["train"], "test": triples["train"]}))
    with pytest.raises(ValueError, match=r"has no 1p query with a hard answer \(all its triples are in train\)"):
        generate_queries(known, "1p")
    for options, message in (
        ({"shape": "4p"}, "Unknown shape '4p'. The shapes are 1p, 2p"),
        ({"shape": ["2p"]}, r"Unknown shape \['2p'\]"),
        ({"n": 0}, "n must be a whole number of at least 1, got 0"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        (
            {"easy_splits": ("training",)},
            "easy_splits contains 'training'. The graph has the splits train, validation",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            generate_queries(kg, **({"shape": "1p"} | options))
    with pytest.raises(TypeError, match="Expected a graph as returned by load_kg, got 'countries'"):
        generate_queries("countries", "1p")


@pytest.mark.parametrize("name", ["queries.parquet", "queries.json", "queries.jsonl"])
def test_saved_queries_are_loaded_as_they_were(kg, tmp_path, name):
    queries = concatenate_datasets([generate_queries(kg, shape, n=5) for shape in SHAPES])
    save_queries(queries, tmp_path / name)
    loaded = load_queries(tmp_path / name)
    assert loaded.to_dict() == queries.to_dict()
    assert loaded.features == queries.features
    assert [path.name for path in tmp_path.iterdir()] == [name]
    if name != "queries.parquet":
        lines = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert [line["query"] for line in lines] == queries["query"]


def test_files_that_hold_no_queries_are_refused(tmp_path):
    for name, content in (
        ("a.json", "{nope"),
        ("b.parquet", "x"),
        ("c.json", '{"query": "x", "easy": 3}'),
        ("d.json", ""),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=f"{name} does not contain queries with the columns"):
            load_queries(tmp_path / name)
    with pytest.raises(ValueError, match=r"must end in .parquet, .json, .jsonl, got queries.csv"):
        load_queries("queries.csv")
    with pytest.raises(FileNotFoundError, match="no file of queries"):
        load_queries(tmp_path / "none.json")


# Ranking


def predictor_for(kg, ties=False):
    """A model whose ranks do not depend on the order of a sum: of whole numbers, or in double precision."""
    torch.manual_seed(0)
    model = ComplEx(kg.config(dim=8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.sign() if ties else 3 * parameter)
    return LinkPredictor(model if ties else model.double(), kg.vocab)


def slow_metrics(predictor, queries, tnorm, ks=(1, 3, 10)):
    """Every hard answer ranked on its own, candidate by candidate."""
    slow = SlowAnswers(predictor, tnorm)
    by_shape = {}
    for row in queries:
        # The odds against an entity tell apart what is almost 1.
        values = {y: 1 / value - 1 for y, value in slow.beam(Query.parse(row["query"]), 10).items()}
        ranks = []
        for answer in row["hard"]:
            rank = 1.0
            for other in set(values) - set(row["easy"]) - set(row["hard"]):
                if math.isclose(values[other], values[answer], rel_tol=1e-9):
                    rank += 0.5
                elif values[other] < values[answer]:
                    rank += 1
            ranks.append(rank)
        metrics = [np.mean([1 / rank for rank in ranks]), *(np.mean([rank <= k for rank in ranks]) for k in ks)]
        by_shape.setdefault(row["shape"], []).append(metrics)
    found = {shape: np.mean(metrics, axis=0) for shape, metrics in by_shape.items()}
    found["average"] = np.mean(list(found.values()), axis=0)
    return {shape: dict(zip(["mrr", *(f"hits@{k}" for k in ks)], m, strict=True)) for shape, m in found.items()}


@pytest.mark.parametrize(("ties", "tnorm"), [(False, "product"), (True, "min")])
def test_metrics_equal_those_of_the_slow_reference(tmp_path, ties, tnorm):
    # With ties, a beam of ten must be all entities: which of equal ones it takes is arbitrary. And of equal products,
    # rounding makes different ones.
    kg = random_graph(tmp_path, entities=10 if ties else 14, relations=3, triples=70)
    queries = concatenate_datasets([generate_queries(kg, shape, n=15) for shape in SHAPES])
    predictor = predictor_for(kg, ties)
    expected = slow_metrics(predictor, queries, tnorm)
    assert list(expected) == [*SHAPES, "average"]
    mixed = queries.shuffle(seed=0)
    for batch_size in (None, 1, 4):
        for some in (queries, mixed):
            found = evaluate_queries(predictor, some, tnorm=tnorm, batch_size=batch_size)
            assert set(found) == set(expected)
            for shape, metrics in found.items():
                assert metrics == pytest.approx(expected[shape], rel=1e-6), shape
    assert list(evaluate_queries(predictor, queries, ks=(2,))["2p"]) == ["mrr", "hits@2"]


def test_one_hop_is_link_prediction(kg):
    predictor = predictor_for(kg)
    model, vocab = predictor.model, predictor.vocab
    # Every test triple once, by its tail: what is known of its query is left out of the ranking.
    rows = []
    _, everything = splits(kg)
    for h, r, t in labeled(kg, "test"):
        known = sorted(reached(Hop(h, r), everything) - {t})
        rows.append({"query": str(Hop(h, r)), "easy": known, "hard": [t]})
        known = sorted({x for x, s, y in everything if (s, y) == (r, t)} - {h})
        rows.append({"query": str(Hop(t, r, inverse=True)), "easy": known, "hard": [h]})
    found = evaluate_queries(LinkPredictor(model, vocab), Dataset.from_list(rows))
    expected = evaluate_link_prediction(model, kg, "test")
    assert found["1p"] == pytest.approx({name: expected[name] for name in ("mrr", "hits@1", "hits@3", "hits@10")})


def test_a_query_of_no_named_shape_is_among_the_others(kg):
    rows = [{"query": "e0, r0, r1, r2, r0", "easy": [], "hard": ["e1"]}]
    found = evaluate_queries(predictor_for(kg), Dataset.from_list(rows))
    assert list(found) == ["other", "average"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"query": "1p: e0, r0", "hard": ["e1"]}], "easy is missing from query, hard"),
        ([{"query": "1p: e0, r0", "easy": ["e1"], "hard": []}], "'1p: e0, r0' has no hard answer"),
        ([{"query": "1p: e0, r0", "easy": [], "hard": ["E 1"]}], "Unknown entity 'E 1'. Did you mean 'e1'"),
        ([{"query": "1p: e0", "easy": [], "hard": ["e1"]}], "wrong at position 7"),
    ],
)
def test_queries_that_cannot_be_ranked_are_one_clear_error(kg, rows, message):
    with pytest.raises(ValueError, match=message):
        evaluate_queries(predictor_for(kg), Dataset.from_list(rows))


def test_empty_sets_and_wrong_options_are_refused(kg):
    predictor = predictor_for(kg)
    queries = generate_queries(kg, "2u", n=3)
    with pytest.raises(ValueError, match="no queries to evaluate"):
        evaluate_queries(predictor, queries.select([]))
    with pytest.raises(ValueError, match="beam must be a whole number"):
        evaluate_queries(predictor, queries, beam=0)
    with pytest.raises(ValueError, match="every k of ks must be"):
        evaluate_queries(predictor, queries, ks=(0,))
    with pytest.raises(
        TypeError, match="Expected a Dataset as returned by generate_queries or load_queries, got list"
    ):
        evaluate_queries(predictor, list(queries))


def test_a_model_whose_scores_overflow_has_no_metrics(kg):
    predictor = predictor_for(kg)
    with torch.no_grad():
        for parameter in predictor.model.float().parameters():
            parameter.mul_(1e30)
    with pytest.raises(ValueError, match="has diverged"):
        evaluate_queries(predictor, generate_queries(kg, "1p", n=3))


def test_branches_are_distinguished_by_their_content():
    a, b = Hop("a", "r"), Hop("b", "r")
    assert canonical(And(a, b)) == canonical(And(b, a)) != canonical(Or(a, b))
    assert has_branches_alike(Hop(Or(a, a), "s"))
    assert not has_branches_alike(And(a, b))
