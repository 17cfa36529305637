"""Every scorer agrees with itself on all paths, and with its formula written out in plain Python."""

import itertools
import math

import pytest
import torch
from transformers import AutoConfig, AutoModel

from aswa_hf.kge import KGEConfig, KGEModel
from aswa_hf.kge.modeling_kge import RESCAL, ComplEx, DistMult, Keci, QMult, TuckER, loss_over_entities

ENTITIES, RELATIONS, DIM = 7, 3, 12
MODELS = [
    (DistMult, {}),
    (ComplEx, {}),
    (QMult, {}),
    (Keci, {"p": 0, "q": 1}),
    (Keci, {"p": 2, "q": 3}),
    (Keci, {"p": 3, "q": 0}),
    (RESCAL, {}),
    (TuckER, {}),
]
every_model = pytest.mark.parametrize(
    ("cls", "options"), MODELS, ids=lambda value: getattr(value, "__name__", str(value))
)


def build(cls, **options):
    torch.manual_seed(0)
    config = KGEConfig(num_entities=ENTITIES, num_relations=RELATIONS, dim=DIM, initializer="normal", **options)
    return cls(config).double()


def all_queries():
    pairs = torch.tensor(list(itertools.product(range(ENTITIES), range(2 * RELATIONS))))
    return pairs[:, 0], pairs[:, 1]


# ---- the formulas, from multiplication tables ----

# basis · basis = sign · basis: Hamilton's i² = j² = k² = ijk = −1, each product written out
HAMILTON = {
    ("1", "1"): (1, "1"), ("1", "i"): (1, "i"), ("1", "j"): (1, "j"), ("1", "k"): (1, "k"),
    ("i", "1"): (1, "i"), ("i", "i"): (-1, "1"), ("i", "j"): (1, "k"), ("i", "k"): (-1, "j"),
    ("j", "1"): (1, "j"), ("j", "i"): (-1, "k"), ("j", "j"): (-1, "1"), ("j", "k"): (1, "i"),
    ("k", "1"): (1, "k"), ("k", "i"): (1, "j"), ("k", "j"): (-1, "i"), ("k", "k"): (-1, "1"),
}  # fmt: skip


def clifford_product(a: tuple[int, ...], b: tuple[int, ...], p: int) -> tuple[int, tuple[int, ...]]:
    """e_a · e_b for base elements given as sorted index tuples: swap neighbors into order, then cancel squares."""
    factors, sign = [*a, *b], 1
    for _ in factors:
        for i in range(len(factors) - 1):
            if factors[i] > factors[i + 1]:
                factors[i], factors[i + 1] = factors[i + 1], factors[i]
                sign = -sign
    result = []
    while factors:
        if len(factors) > 1 and factors[0] == factors[1]:
            sign *= 1 if factors[0] <= p else -1
            factors = factors[2:]
        else:
            result.append(factors.pop(0))
    return sign, tuple(result)


def algebra_score(h, r, t, blocks, product):
    """Σ over components of ⟨h·r, t⟩, h·r expanded base element by base element."""
    size = DIM // len(blocks)
    total = 0.0
    for n in range(size):
        parts = {}
        for (i, a), (j, b) in itertools.product(enumerate(blocks), enumerate(blocks)):
            sign, c = product(a, b)
            parts[c] = parts.get(c, 0.0) + sign * h[i * size + n] * r[j * size + n]
        total += sum(parts.get(c, 0.0) * t[k * size + n] for k, c in enumerate(blocks))
    return total


def plain_score(model, h, r, t):
    config = model.config
    if isinstance(model, DistMult):
        return sum(a * b * c for a, b, c in zip(h, r, t, strict=True))
    if isinstance(model, ComplEx):
        half = DIM // 2
        values = [[complex(x[i], x[half + i]) for i in range(half)] for x in (h, r, t)]
        return sum(a * b * c.conjugate() for a, b, c in zip(*values, strict=True)).real
    if isinstance(model, QMult):
        return algebra_score(h, r, t, "1ijk", lambda a, b: HAMILTON[a, b])
    if isinstance(model, Keci):
        basis = [(), *((i,) for i in range(1, config.p + config.q + 1))]
        return algebra_score(h, r, t, basis, lambda a, b: clifford_product(a, b, config.p))
    indices = range(DIM)
    if isinstance(model, RESCAL):
        return sum(h[i] * r[i * DIM + j] * t[j] for i in indices for j in indices)
    core = model.core.tolist()
    return sum(core[i][j][k] * h[i] * r[j] * t[k] for i in indices for j in indices for k in indices)


@every_model
def test_all_ways_to_score_agree_with_the_formula(cls, options):
    model = build(cls, **options).eval()
    heads, relations = all_queries()
    table = model.score_tails(heads, relations)
    assert table.shape == (len(heads), ENTITIES)
    torch.testing.assert_close(model.query(heads, relations) @ model.entity_embeddings.weight.T, table)
    candidates = torch.arange(ENTITIES).expand(len(heads), -1)
    torch.testing.assert_close(model.score(heads, relations, candidates), table)
    entities, rows = model.entity_embeddings.weight.tolist(), model.relation_embeddings.weight.tolist()
    for i in range(0, len(heads), 5):
        h, r = heads[i].item(), relations[i].item()
        for t in range(ENTITIES):
            expected = plain_score(model, entities[h], rows[r], entities[t])
            assert math.isclose(table[i, t].item(), expected, rel_tol=1e-9, abs_tol=1e-12)
            single = model.score(*(torch.tensor([x]) for x in (h, r, t)))
            assert math.isclose(single.item(), expected, rel_tol=1e-9, abs_tol=1e-12)


@pytest.mark.parametrize(("p", "q", "other"), [(0, 0, DistMult), (0, 1, ComplEx)])
def test_keci_contains_distmult_and_complex(p, q, other):
    keci, simpler = build(Keci, p=p, q=q), build(other)
    simpler.load_state_dict(keci.state_dict())
    torch.testing.assert_close(keci.score_tails(*all_queries()), simpler.score_tails(*all_queries()))


@every_model
def test_gradients_of_the_query_pass_gradcheck(cls, options):
    model = build(cls, **options)
    h, r = (
        table.weight[:3].detach().requires_grad_() for table in (model.entity_embeddings, model.relation_embeddings)
    )
    assert torch.autograd.gradcheck(model.combine, (h, r))


# ---- the loss over all entities ----


def sparse_labels():
    """Five queries with 2, 0, 1, 3 and 1 true tails."""
    return torch.tensor([1, 4, 2, 0, 3, 6, 5]), torch.tensor([0, 2, 2, 3, 6, 7])


def dense_labels(tails, offsets):
    dense = torch.zeros(len(offsets) - 1, ENTITIES, dtype=torch.float64)
    for i in range(len(offsets) - 1):
        dense[i, tails[offsets[i] : offsets[i + 1]]] = 1
    return dense


def dense_loss(kind, scores, labels, smoothing=0.0):
    """The losses as their definitions say, over a matrix of labels."""
    if kind == "binary":
        targets = labels * (1 - smoothing) + smoothing / ENTITIES
        return torch.nn.functional.binary_cross_entropy_with_logits(scores, targets)
    per_triple = [
        torch.nn.functional.cross_entropy(row, column, label_smoothing=smoothing)
        for row, of_row in zip(scores, labels, strict=True)
        for column in of_row.nonzero()[:, 0]
    ]
    if kind == "softmax":
        return sum(per_triple) / len(per_triple)
    counts = [int(count) for count in labels.sum(1)]
    found = iter(per_triple)
    return sum(sum(next(found) for _ in range(count)) / count for count in counts if count) / len(counts)


def assert_same_gradients(ours, theirs, inputs, tolerance=1e-10):
    gradients = (torch.autograd.grad(3 * loss, inputs) for loss in (ours, theirs))
    for mine, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, reference, rtol=tolerance, atol=tolerance)


every_loss = pytest.mark.parametrize("kind", ["binary", "softmax", "softmax-query"])


@every_loss
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [1, 2 * ENTITIES, 1 << 20])
def test_sparse_loss_equals_the_dense_one(kind, smoothing, chunk, monkeypatch):
    monkeypatch.setattr("aswa_hf.kge.modeling_kge.CHUNK_ON_CPU", chunk)
    torch.manual_seed(1)
    queries = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    entities = torch.randn(ENTITIES, 4, dtype=torch.float64, requires_grad=True)
    tails, offsets = sparse_labels()
    ours = loss_over_entities(queries, entities, tails, offsets, smoothing, kind=kind)
    theirs = dense_loss(kind, queries @ entities.T, dense_labels(tails, offsets), smoothing)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    assert_same_gradients(ours, theirs, (queries, entities))
    assert torch.autograd.gradcheck(
        lambda q, e: loss_over_entities(q, e, tails, offsets, smoothing, kind=kind), (queries, entities)
    )


@every_loss
def test_a_matrix_of_labels_has_the_same_loss(kind):
    tails, offsets = sparse_labels()
    heads, relations = torch.arange(5), torch.arange(5) % 4
    model = build(DistMult, loss=kind, label_smoothing=0.1, regularizer="n3", regularization=0.1)
    sparse = model(heads, relations, labels=tails, label_offsets=offsets).loss
    dense = model(heads, relations, labels=dense_labels(tails, offsets)).loss
    torch.testing.assert_close(sparse, dense, rtol=1e-10, atol=1e-10)
    assert_same_gradients(sparse, dense, list(model.parameters()))


def test_grouped_by_query_the_softmax_is_that_of_every_triple():
    tails, offsets = sparse_labels()
    rows = torch.repeat_interleave(offsets.diff())
    heads, relations = torch.arange(5), torch.arange(5) % 4
    options = {"regularizer": "l2", "regularization": 0.3, "relation_prediction": 0.5}
    model = build(ComplEx, loss="softmax", **options)
    grouped = model(heads, relations, labels=tails, label_offsets=offsets).loss
    by_triple = model(heads[rows], relations[rows], labels=tails).loss
    torch.testing.assert_close(grouped, by_triple, rtol=1e-10, atol=1e-10)
    assert_same_gradients(grouped, by_triple, list(model.parameters()))


@every_model
def test_relations_are_predicted_from_head_and_tail(cls, options):
    model = build(cls, **options, relation_prediction=0.25)
    heads, relations, tails = torch.tensor([0, 3, 5]), torch.tensor([1, 0, 2]), torch.tensor([2, 6, 5])
    both = model(heads, relations, labels=tails).loss
    only_tails = build(cls, **options)(heads, relations, labels=tails).loss
    count = len(model.relation_embeddings.weight)
    scores = torch.stack([model.score(heads, torch.full((3,), r), tails) for r in range(count)], dim=1)
    expected = only_tails + 0.25 * torch.nn.functional.cross_entropy(scores, relations)
    torch.testing.assert_close(both, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["binary", "softmax"])
def test_negatives_that_all_queries_share_are_candidates_of_each(kind):
    model = build(ComplEx, loss=kind, regularizer="n3", regularization=0.1)
    heads, relations, true = torch.tensor([0, 3, 5]), torch.tensor([1, 0, 2]), torch.tensor([2, 6, 5])
    negatives = torch.tensor([4, 1, 4, 0])
    shared = model(heads, relations, labels=true, negatives=negatives).loss
    tails = torch.cat([true.unsqueeze(1), negatives.expand(3, -1)], dim=1)
    labels = torch.tensor([[1.0, 0, 0, 0, 0]]).expand(3, -1)
    apart = model(heads, relations, tails=tails, labels=labels).loss
    torch.testing.assert_close(shared, apart, rtol=1e-10, atol=1e-10)
    assert_same_gradients(shared, apart, list(model.parameters()))


def test_negatives_are_weighed_by_their_own_scores():
    model = build(DistMult, adversarial_temperature=0.5)
    heads, relations, true = torch.tensor([0, 3]), torch.tensor([1, 0]), torch.tensor([2, 6])
    negatives = torch.tensor([4, 1, 0])
    found = model(heads, relations, labels=true, negatives=negatives).loss
    expected = 0.0
    for head, relation, tail in zip(heads, relations, true, strict=True):
        positive = model.score(head[None], relation[None], tail[None])[0]
        scores = torch.stack([model.score(head[None], relation[None], other[None])[0] for other in negatives])
        weights = ((0.5 * scores).exp() / (0.5 * scores).exp().sum()).tolist()
        expected = expected - positive.sigmoid().log() / 4
        expected = expected - sum(w * (-s).sigmoid().log() for w, s in zip(weights, scores, strict=True)) / 4
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert_same_gradients(found, expected, list(model.parameters()))


def test_dropout_of_entities_is_on_candidates_too_and_not_on_relations():
    dropped = build(DistMult, entity_dropout=0.5)
    with torch.no_grad():
        for table in (dropped.entity_embeddings, dropped.relation_embeddings):
            table.weight.fill_(1.0)
    torch.manual_seed(0)
    scores = dropped.score_tails(torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.long))
    # Every number of an embedding is 0 or doubled; with relations dropped too there would be multiples of 8.
    assert set((scores / 4).unique().tolist()) <= set(map(float, range(dropped.config.dim + 1)))
    assert len(scores.unique(dim=0)) > 1
    assert len(scores.unique(dim=1).T) > 1
    apart = build(DistMult, relation_dropout=0.5)
    with torch.no_grad():
        for table in (apart.entity_embeddings, apart.relation_embeddings):
            table.weight.fill_(1.0)
    scores = apart.score_tails(torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.long))
    assert all(row.unique().numel() == 1 for row in scores)


def test_extreme_scores_give_the_dense_loss_too():
    """Scores beyond what exp and sigmoid can tell from 0 and 1."""
    queries = torch.tensor([[-200.0], [-30.0], [0.0], [25.0], [300.0]], dtype=torch.float64, requires_grad=True)
    entities = torch.linspace(-3, 3, ENTITIES, dtype=torch.float64).unsqueeze(1).requires_grad_()
    tails, offsets = sparse_labels()
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-6)):
        ours = loss_over_entities(queries.to(dtype), entities.to(dtype), tails, offsets)
        theirs = torch.nn.functional.binary_cross_entropy_with_logits(
            queries @ entities.T, dense_labels(tails, offsets)
        )
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)
        for mine, reference in zip(
            torch.autograd.grad(ours, (queries, entities)),
            torch.autograd.grad(theirs, (queries, entities)),
            strict=True,
        ):
            torch.testing.assert_close(mine, reference, rtol=tolerance, atol=tolerance)


def test_without_its_value_the_loss_has_the_same_gradients():
    torch.manual_seed(1)
    queries, entities = torch.randn(5, 4, requires_grad=True), torch.randn(ENTITIES, 4, requires_grad=True)
    losses = [loss_over_entities(queries, entities, *sparse_labels(), 0.1, measured) for measured in (True, False)]
    assert losses[0].isfinite()
    assert losses[1].isnan()
    gradients = [torch.autograd.grad(loss, (queries, entities)) for loss in losses]
    for measured, other in zip(*gradients, strict=True):
        assert torch.equal(measured, other)


def test_second_derivatives_are_refused():
    queries = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    entities = torch.randn(ENTITIES, 4, dtype=torch.float64)
    loss = loss_over_entities(queries, entities, *sparse_labels())
    with pytest.raises(RuntimeError, match="has no second derivatives"):
        torch.autograd.grad(loss, queries, create_graph=True)


# Half of the distance from 1 to the next number: what rounding to bfloat16 changes at most.
ROUNDING = torch.finfo(torch.bfloat16).eps / 2


def almost_whole(*shape):
    """−1, 0 and 1 times 1 + 2⁻¹⁰, which bfloat16 rounds to 1: products are whole numbers, however they are summed."""
    return torch.randint(-1, 2, shape) * (1 + 2**-10)


def loss_and_gradients(queries, entities, tails, offsets):
    """Of the rounded weights: the loss in double precision, and each gradient with what roundings may change in it.

    Rounded are the probabilities, at the true tails once more when 1 is taken away, and the gradients.
    """
    q, e = (x.bfloat16().double().requires_grad_() for x in (queries, entities))
    logits = q @ e.T
    if offsets is None:
        loss, labels = torch.nn.functional.cross_entropy(logits, tails), torch.eye(len(e))[tails].double()
        errors, count = logits.softmax(1) - labels, len(q)
    else:
        labels = dense_labels(tails, offsets)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        errors, count = logits.sigmoid() - labels, logits.numel()
    found = torch.autograd.grad(loss, (q, e))
    changed = (ROUNDING * (errors + labels + labels * errors.abs()) / count).detach()
    bounds = changed @ e.detach().abs(), changed.T @ q.detach().abs()
    # A little more for sums in float32.
    return loss, [(g, 1.1 * (bound + ROUNDING * g.abs())) for g, bound in zip(found, bounds, strict=True)]


@pytest.mark.parametrize("offsets", [True, False], ids=["binary", "one-true-tail"])
def test_under_autocast_products_are_bfloat16_and_gradients_float32(offsets):
    torch.manual_seed(1)
    queries, entities = (almost_whole(count, 64).requires_grad_() for count in (5, ENTITIES))
    tails, starts = sparse_labels() if offsets else (torch.tensor([0, 6, 3, 3, 1]), None)
    with torch.autocast("cpu", torch.bfloat16):
        ours = loss_over_entities(queries, entities, tails, starts)
    expected, gradients = loss_and_gradients(queries, entities, tails, starts)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=0)
    # Without roundings every logit is larger by a factor of 1 + 2⁻⁹.
    assert loss_over_entities(queries, entities, tails, starts).item() != pytest.approx(ours.item(), rel=1e-4)
    for mine, (exact, bound) in zip(torch.autograd.grad(ours, (queries, entities)), gradients, strict=True):
        assert mine.dtype == torch.float32
        assert ((mine - exact).abs() <= bound).all()


def test_cross_entropy_in_bfloat16_is_as_exact_as_its_roundings_allow():
    torch.manual_seed(1)
    queries, entities = almost_whole(64, 64).requires_grad_(), almost_whole(5000, 64)
    tails = torch.randint(5000, (64,))
    with torch.autocast("cpu", torch.bfloat16):
        (ours,) = torch.autograd.grad(loss_over_entities(queries, entities, tails), queries)
    assert not torch.equal(ours, torch.autograd.grad(loss_over_entities(queries, entities, tails), queries)[0])
    _, ((exact, bound), _) = loss_and_gradients(queries, entities, tails, None)
    assert ((ours - exact).abs() <= bound).all()


def test_labels_that_do_not_fit_the_queries_are_refused():
    tails, offsets = sparse_labels()
    with pytest.raises(ValueError, match=r"one number more than there are queries \(4\), got 6"):
        build(DistMult)(torch.arange(4), torch.arange(4), labels=tails, label_offsets=offsets)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [1, 2 * ENTITIES, 1 << 20])
def test_the_loss_of_one_true_tail_is_the_cross_entropy(smoothing, chunk, monkeypatch):
    monkeypatch.setattr("aswa_hf.kge.modeling_kge.CHUNK_ON_CPU", chunk)
    torch.manual_seed(1)
    queries = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    entities = torch.randn(ENTITIES, 4, dtype=torch.float64, requires_grad=True)
    tails = torch.tensor([0, 6, 3, 3, 1])
    ours = loss_over_entities(queries, entities, tails, None, smoothing)
    theirs = torch.nn.functional.cross_entropy(queries @ entities.T, tails, label_smoothing=smoothing)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    assert torch.autograd.gradcheck(lambda q, e: loss_over_entities(q, e, tails, None, smoothing), (queries, entities))


@every_model
def test_the_model_has_the_same_loss_for_sparse_and_dense_labels(cls, options):
    model = build(cls, **options, label_smoothing=0.1)
    tails, offsets = sparse_labels()
    heads, relations = torch.arange(5), torch.arange(5)
    sparse = model(heads, relations, labels=tails, label_offsets=offsets)
    dense = model(heads, relations, labels=dense_labels(tails, offsets))
    torch.testing.assert_close(sparse.loss, dense.loss)
    candidates = torch.arange(ENTITIES).expand(5, -1)
    torch.testing.assert_close(
        model(heads, relations, candidates, labels=dense_labels(tails, offsets)).loss, dense.loss
    )
    assert sparse.scores is None
    torch.testing.assert_close(model(heads, relations).scores, dense.scores)


# ---- as Hugging Face models ----


@every_model
def test_saved_and_loaded_by_every_name(cls, options, tmp_path):
    model = build(cls, **options).float().eval()
    model.save_pretrained(tmp_path)
    for loader in (cls, KGEModel, AutoModel):
        loaded = loader.from_pretrained(tmp_path)
        assert type(loaded) is cls
        assert torch.equal(loaded.score_tails(*all_queries()), model.score_tails(*all_queries()))
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, KGEConfig)
    assert config.scorer == cls.scorer
    wrong = ComplEx if cls is not ComplEx else DistMult
    with pytest.raises(ValueError, match=f"{wrong.__name__} needs .* scorer '{wrong.scorer}', got '{cls.scorer}'"):
        wrong(config)


def test_tables_have_the_documented_shapes():
    for cls, width in ((DistMult, DIM), (RESCAL, DIM**2), (TuckER, DIM)):
        model = build(cls)
        assert model.entity_embeddings.weight.shape == (ENTITIES, DIM)
        assert model.relation_embeddings.weight.shape == (2 * RELATIONS, width)
        assert build(cls, inverse_relations=False).relation_embeddings.weight.shape == (RELATIONS, width)
    assert build(TuckER).core.shape == (DIM, DIM, DIM)


def test_initialisation_follows_the_config():
    def std(**options):
        torch.manual_seed(0)
        model = TuckER(KGEConfig(num_entities=4000, num_relations=50, dim=16, **options))
        return [model.entity_embeddings.weight.std().item(), model.core.std().item()]

    assert std(initializer="normal", initializer_range=0.5) == pytest.approx([0.5, 0.5], rel=0.05)
    assert std(initializer="uniform", initializer_range=0.3) == pytest.approx([0.3 / 3**0.5] * 2, rel=0.05)
    assert std()[0] == pytest.approx((2 / (4000 + 16)) ** 0.5, rel=0.05)


def test_dropout_and_regularisation_only_act_in_training():
    plain = build(DistMult)
    heads, relations = torch.arange(4), torch.arange(4)
    tails, offsets = torch.arange(4), torch.arange(5)
    expected = plain(heads, relations, labels=tails, label_offsets=offsets).loss

    dropping = build(DistMult, input_dropout=0.5, query_dropout=0.5)
    assert dropping(heads, relations, labels=tails, label_offsets=offsets).loss != expected
    assert dropping.eval()(heads, relations, labels=tails, label_offsets=offsets).loss == expected

    # The tails are the heads here.
    h, r = plain.entity_embeddings(heads), plain.relation_embeddings(relations)
    for regularizer, penalty in (
        ("l2", 2 * h.square().sum() + r.square().sum()),
        ("n3", (2 * h.abs() ** 3 + r.abs() ** 3).sum()),
    ):
        model = build(DistMult, regularizer=regularizer, regularization=0.2)
        loss = model(heads, relations, labels=tails, label_offsets=offsets).loss
        torch.testing.assert_close(loss, expected + 0.2 * penalty / 4)
        assert model.eval()(heads, relations, labels=tails, label_offsets=offsets).loss == expected
    # For complex numbers, N3 takes the modulus: √(re² + im²)³.
    model = build(ComplEx, regularizer="n3", regularization=1.0)
    h, r = model.entity_embeddings(heads), model.relation_embeddings(relations)
    cubes = sum((x[:, :6] ** 2 + x[:, 6:] ** 2).pow(1.5).sum() for x in (h, h, r))
    without = build(ComplEx)(heads, relations, labels=tails, label_offsets=offsets).loss
    loss = model(heads, relations, labels=tails, label_offsets=offsets).loss
    torch.testing.assert_close(loss, without + cubes / 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 0}, "dim must be at least 1, got 0"),
        ({"label_smoothing": 1.0}, r"label_smoothing must be in \[0, 1\), got 1.0"),
        ({"initializer": "magic"}, "initializer must be one of xavier_normal"),
        ({"loss": "hinge"}, "loss must be one of binary, softmax, softmax-query, got 'hinge'"),
        ({"entity_dropout": 1}, r"entity_dropout must be in \[0, 1\), got 1"),
        ({"regularizer": "n4"}, "regularizer must be one of n3, l2, got 'n4'"),
        ({"scorer": "transe"}, "config.scorer must be one of distmult, .*, got 'transe'"),
        ({"scorer": "qmult", "dim": 6}, "QMult needs a dim that is a multiple of 4, got 6"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        KGEModel(KGEConfig(**{"num_entities": 3, "num_relations": 2, "scorer": "distmult", **options}))
