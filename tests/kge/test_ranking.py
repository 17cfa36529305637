"""Filtered ranking against a slow reference that does what the definition says."""

import math

import numpy as np
import pytest
import torch
from kge_graphs import random_graph

from aswa_hf.kge import KGEConfig, evaluate_link_prediction
from aswa_hf.kge.graph import TailsByQuery, with_inverses
from aswa_hf.kge.modeling_kge import ComplEx, DistMult


def build(kg, cls=ComplEx, steps=32, **options):
    """A model with weights in steps of 1/`steps`: float32 holds its scores exactly, in whatever order they are summed.

    Scores that differ do so by 2⁻¹⁵ at least, and equal ones are equal.
    """
    torch.manual_seed(3)
    config = KGEConfig(num_entities=kg.num_entities, num_relations=kg.num_relations, dim=8, **options)
    model = cls(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter * steps).round() / steps)
    return model


def slow_metrics(model, kg, split, ks=(1, 3, 10)):
    """Ranks every triple of the split on its own, candidate by candidate."""
    truths = {tuple(row) for name in kg for row in kg.triples(name).tolist()}
    inverse = model.config.inverse_relations
    ranks = []

    def score(h, r, t, by_head):
        triple = (t, r + kg.num_relations, h) if by_head and inverse else (h, r, t)
        return model.score(*(torch.tensor([x]) for x in triple)).item()

    for h, r, t in set(map(tuple, kg.triples(split).tolist())):
        for by_head in (False, True):
            own = score(h, r, t, by_head)
            rank = 1.0
            for candidate in range(kg.num_entities):
                other = (candidate, r, t) if by_head else (h, r, candidate)
                if other in truths:
                    continue
                found = score(*other, by_head)
                if found == own:
                    rank += 0.5
                elif found > own:
                    rank += 1
            ranks.append(rank)
    ranks = np.array(ranks)
    metrics = {"mrr": (1 / ranks).mean()} | {f"hits@{k}": (ranks <= k).mean() for k in ks}
    return metrics | {"mean_rank": ranks.mean()}


@pytest.mark.parametrize("inverse_relations", [True, False])
@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize("ties", [False, True])
def test_metrics_equal_those_of_the_slow_reference(inverse_relations, split, ties, tmp_path):
    for seed in range(3):
        kg = random_graph(tmp_path / str(seed), seed=seed)
        model = build(kg, inverse_relations=inverse_relations)
        if ties:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(parameter.sign())
        expected = slow_metrics(model, kg, split)
        for batch_size in (None, 1, 5):
            found = evaluate_link_prediction(model, kg, split, batch_size=batch_size)
            assert found == pytest.approx(expected)


def test_the_batches_can_be_tracked(tmp_path):
    kg = random_graph(tmp_path)
    model = build(kg)
    seen = []

    def track(batches):
        for batch in batches:
            yield batch
            seen.append((batch, len(batches)))

    assert evaluate_link_prediction(model, kg, batch_size=2, track=track) == evaluate_link_prediction(
        model, kg, batch_size=2
    )
    assert [batch for batch, _ in seen] == list(range(0, 2 * seen[0][1], 2))


def test_a_constant_scorer_is_at_chance(tmp_path):
    kg = random_graph(tmp_path, entities=40, triples=400)
    model = build(kg, DistMult)
    torch.nn.init.zeros_(model.entity_embeddings.weight)
    found = evaluate_link_prediction(model, kg, "test", ks=(1, 5))
    expected = slow_metrics(model, kg, "test", ks=(1, 5))
    assert found == pytest.approx(expected)
    assert found["hits@1"] == 0
    assert list(found) == ["mrr", "hits@1", "hits@5", "mean_rank"]


def test_a_perfect_scorer_ranks_everything_first(tmp_path):
    kg = random_graph(tmp_path)

    class Oracle(DistMult):
        scorer = ""

        def score_tails(self, heads, relations):
            scores = torch.zeros(len(heads), kg.num_entities)
            queries = TailsByQuery.of(with_inverses(kg.triples("test"), kg.num_relations))
            for i, (h, r) in enumerate(zip(heads.tolist(), relations.tolist(), strict=True)):
                row = queries.find(np.array([h]), np.array([r]))
                scores[i, queries.take(row)[0]] = 1
            return scores

    found = evaluate_link_prediction(build(kg, Oracle), kg, "test")
    assert found == {"mrr": 1, "hits@1": 1, "hits@3": 1, "hits@10": 1, "mean_rank": 1}


def test_a_diverged_model_is_not_perfect(tmp_path):
    kg = random_graph(tmp_path)
    model = build(kg)
    with torch.no_grad():
        model.entity_embeddings.weight[0] = torch.nan
    assert math.isnan(evaluate_link_prediction(model, kg, "test")["mrr"])


def test_the_mode_and_the_gradients_of_the_model_are_left_alone(tmp_path):
    kg = random_graph(tmp_path)
    model = build(kg, input_dropout=0.5)
    assert model.training
    first = evaluate_link_prediction(model, kg, "test")
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert evaluate_link_prediction(model, kg, "test") == first  # no dropout


def test_bad_arguments_say_what_is_expected(tmp_path):
    kg = random_graph(tmp_path)
    with pytest.raises(ValueError, match=r"no split 'dev'. Choose one of train, validation, test"):
        evaluate_link_prediction(build(kg), kg, "dev")
    with pytest.raises(ValueError, match="batch_size must be a whole number of at least 1 or None, got 0"):
        evaluate_link_prediction(build(kg), kg, batch_size=0)


def test_tails_are_grouped_by_query():
    triples = np.array([[2, 0, 5], [0, 1, 3], [2, 0, 1], [0, 1, 3], [0, 0, 4]])
    queries = TailsByQuery.of(triples)
    assert list(zip(queries.heads, queries.relations, strict=True)) == [(0, 0), (0, 1), (2, 0)]
    tails, offsets = queries.take(np.array([2, 0, 2]))
    assert tails.tolist() == [1, 5, 4, 1, 5]
    assert offsets.tolist() == [0, 2, 3, 5]
    assert queries.find(np.array([2, 0]), np.array([0, 1])).tolist() == [2, 1]
    assert len(TailsByQuery.of(np.empty((0, 3), dtype=np.int64))) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_are_ranked_exactly(dtype, tmp_path):
    """With more entities than a half-precision number can count."""
    kg = random_graph(tmp_path, entities=3000)
    model = build(kg).to(dtype)
    with torch.no_grad():
        model.entity_embeddings.weight.abs_()
    half = evaluate_link_prediction(model, kg)
    original = model.score_tails
    model.score_tails = lambda *ids: original(*ids).float()
    assert half == evaluate_link_prediction(model, kg)


def test_a_changed_split_is_ranked_again(tmp_path):
    kg = random_graph(tmp_path)
    model = build(kg)
    before = evaluate_link_prediction(model, kg)
    kg["test"] = kg["test"].select([0])
    after = evaluate_link_prediction(model, kg)
    assert after != before
    assert after == pytest.approx(slow_metrics(model, kg, "test"))


@pytest.mark.parametrize("options", [{"ks": (0,)}, {"ks": (2.5,)}, {"batch_size": 0}, {"batch_size": "2"}])
def test_impossible_numbers_are_refused(options, tmp_path):
    kg = random_graph(tmp_path)
    with pytest.raises(ValueError, match=r"must be a whole number of at least 1( or None)?, got"):
        evaluate_link_prediction(build(kg), kg, **options)


def test_without_inverse_relations_autocast_ranks_too(tmp_path):
    kg = random_graph(tmp_path)
    model = build(kg, steps=4, inverse_relations=False)
    exact = evaluate_link_prediction(model, kg)
    assert exact == pytest.approx(slow_metrics(model, kg, "test"))
    # Multiples of 1/64 up to 4 are numbers of bfloat16 too.
    assert model.score_tails(*torch.cartesian_prod(torch.arange(12), torch.arange(3)).T).abs().max() <= 4
    with torch.autocast("cpu", torch.bfloat16):
        assert evaluate_link_prediction(model, kg) == exact
