"""Losses and penalties against their definitions over dense matrices: in float32, in bfloat16, for extreme scores."""

import pytest
import torch
from torch.nn import functional as F

from aswa_hf.kge import KGEConfig
from aswa_hf.kge.modeling_kge import RESCAL, ComplEx, DistMult, Keci, QMult, TuckER, loss_over_entities

KINDS = ("binary", "softmax", "softmax-query")
ENTITIES, QUERIES, DIM = 211, 37, 24


def labels(seed=0):
    """The true tails of queries, of which the first has none and the second has many."""
    generator = torch.Generator().manual_seed(seed)
    dense = torch.rand(QUERIES, ENTITIES, generator=generator, dtype=torch.float64) < 0.02
    dense[0] = False
    dense[1, ::2] = True
    tails = [row.nonzero()[:, 0][torch.randperm(int(row.sum()), generator=generator)] for row in dense]
    offsets = torch.tensor([0, *(len(of_query) for of_query in tails)]).cumsum(0)
    return torch.cat(tails), offsets, dense.double()


def numbers(scale=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [scale * torch.randn(count, DIM, generator=generator, dtype=dtype) for count in (QUERIES, ENTITIES)]


def by_definition(kind, scores, dense, smoothing):
    """The loss of a matrix of scores, from a matrix of probabilities that labels are to have."""
    if kind == "binary":
        return F.binary_cross_entropy_with_logits(scores, dense * (1 - smoothing) + smoothing / ENTITIES)
    counts = dense.sum(1, keepdim=True)
    if kind == "softmax":  # every triple is a query of its own
        rows, tails = dense.nonzero(as_tuple=True)
        targets = F.one_hot(tails, ENTITIES).double() * (1 - smoothing) + smoothing / ENTITIES
        return -(targets * scores[rows].log_softmax(1)).sum() / len(rows)
    targets = torch.where(counts > 0, dense / counts.clamp_min(1) * (1 - smoothing) + smoothing / ENTITIES, 0)
    return -(targets * scores.log_softmax(1)).sum() / len(scores)


def compare(ours, expected, inputs, doubles, tolerance):
    torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=tolerance)
    found, wanted = torch.autograd.grad(ours, inputs), torch.autograd.grad(expected, doubles)
    for mine, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.double(), reference, rtol=tolerance, atol=tolerance)
    # A tolerance that a gradient of zeros would also meet says nothing.
    assert all(reference.abs().max() > 100 * tolerance for reference in wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-10)])
def test_value_and_gradients_are_those_of_dense_autograd(kind, smoothing, dtype, tolerance):
    tails, offsets, dense = labels()
    inputs = [x.requires_grad_() for x in numbers(0.3, dtype)]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    ours = loss_over_entities(*inputs, tails, offsets, smoothing, kind=kind)
    compare(ours, by_definition(kind, doubles[0] @ doubles[1].T, dense, smoothing), inputs, doubles, tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_beyond_what_exp_can_express_have_the_dense_loss_too(kind):
    tails, offsets, dense = labels()
    inputs = [x.requires_grad_() for x in numbers(30.0, torch.float64)]  # scores of some thousands, of both signs
    doubles = [x.detach().requires_grad_() for x in inputs]
    ours = loss_over_entities(*inputs, tails, offsets, 0.1, kind=kind)
    compare(ours, by_definition(kind, doubles[0] @ doubles[1].T, dense, 0.1), inputs, doubles, 1e-10)


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_under_autocast_only_products_are_rounded(kind, smoothing):
    """Embeddings of −1, 0 and 1 times 1 + 2⁻¹⁰, which bfloat16 rounds to 1: whole numbers as scores."""
    tails, offsets, dense = labels()
    generator = torch.Generator().manual_seed(2)
    inputs = [
        (torch.randint(-1, 2, (count, DIM), generator=generator) * (1 + 2**-10)).requires_grad_()
        for count in (QUERIES, ENTITIES)
    ]
    with torch.autocast("cpu", torch.bfloat16):
        ours = loss_over_entities(*inputs, tails, offsets, smoothing, kind=kind)
    doubles = [x.detach().bfloat16().double().requires_grad_() for x in inputs]
    scores = doubles[0] @ doubles[1].T
    expected = by_definition(kind, scores, dense, smoothing)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=0)
    exact = loss_over_entities(*inputs, tails, offsets, smoothing, kind=kind)
    assert exact.item() != pytest.approx(ours.item(), rel=1e-4)  # the products were rounded

    # Rounded are the probabilities and their products with the embeddings; what the labels add is not.
    q, e = (x.detach() for x in doubles)
    counts = dense.sum(1)
    weights = (counts / counts.sum() if kind == "softmax" else (counts > 0) / QUERIES).unsqueeze(1)
    probabilities = weights * scores.detach().softmax(1)
    bounds = probabilities @ e.abs(), probabilities.T @ q.abs()
    rounding = torch.finfo(torch.bfloat16).eps / 2
    wanted = torch.autograd.grad(expected, doubles)
    for mine, reference, bound in zip(torch.autograd.grad(ours, inputs), wanted, bounds, strict=True):
        assert mine.dtype == torch.float32
        assert ((mine - reference).abs() <= 2.2 * rounding * bound + 1e-6).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cls", [DistMult, ComplEx, QMult, Keci, RESCAL, TuckER])
def test_every_scorer_trains_under_autocast(cls, kind):
    """Also those whose query vectors are products, and so of the dtype of autocast."""
    tails, offsets, _ = labels()
    options = {"regularizer": "n3", "regularization": 0.1, "relation_prediction": 0.5, "label_smoothing": 0.1}
    options |= {"initializer": "normal", "initializer_range": 0.5}
    config = KGEConfig(num_entities=ENTITIES, num_relations=3, dim=8, loss=kind, **options)
    torch.manual_seed(0)
    model = cls(config).train()
    heads, relations = torch.arange(QUERIES) % ENTITIES, torch.arange(QUERIES) % 6
    exact = model(heads, relations, labels=tails, label_offsets=offsets).loss
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(heads, relations, labels=tails, label_offsets=offsets).loss
    torch.testing.assert_close(rounded, exact, rtol=0.02, atol=0)
    wanted = torch.autograd.grad(exact, list(model.parameters()))
    for mine, reference in zip(torch.autograd.grad(rounded, list(model.parameters())), wanted, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - reference).norm() <= 0.03 * reference.norm()


def penalty_by_triple(kind, blocks, *factors):
    """Lacroix et al. (2018), as facebookresearch/kbc has it: over all factors of all triples of a batch."""
    total = 0.0
    for factor in factors:
        moduli = factor.unflatten(-1, (blocks, -1)).square().sum(-2).sqrt()
        total = total + (moduli**3 if kind == "n3" else moduli**2).sum()
    return total / len(factors[0])


@pytest.mark.parametrize("kind", ["n3", "l2"])
@pytest.mark.parametrize(("cls", "blocks"), [(DistMult, 1), (ComplEx, 2), (QMult, 4)])
def test_penalties_weigh_head_relation_and_tail_as_often_as_triples_have_them(cls, blocks, kind):
    tails, offsets, _ = labels()
    torch.manual_seed(0)
    sizes = {"num_entities": ENTITIES, "num_relations": 5, "dim": DIM, "initializer": "normal"}
    model = cls(KGEConfig(**sizes, loss="softmax", regularizer=kind, regularization=0.3)).double()
    heads, relations = torch.randint(ENTITIES, (QUERIES,)), torch.randint(10, (QUERIES,))
    loss = model(heads, relations, labels=tails, label_offsets=offsets).loss

    rows = torch.repeat_interleave(torch.arange(QUERIES), offsets.diff())
    entity, relation = model.entity_embeddings, model.relation_embeddings
    fit = F.cross_entropy(model.score_tails(heads[rows], relations[rows]), tails)
    factors = entity(heads[rows]), relation(relations[rows]), entity(tails)
    expected = fit + 0.3 * penalty_by_triple(kind, blocks, *factors)
    parameters = list(model.parameters())
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    for mine, reference in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-10)
