"""Balanced sampling: every triple once in an epoch, and the gradients of one process."""

from collections import Counter

import pytest
import sharded_jobs
import torch
from sharded_jobs import assert_near
from torch.nn import functional as F

from aswa_hf.kge.graph import with_inverses
from aswa_hf.kge.optimizers import RowwiseAdagrad

PER_PAIR, EPOCHS = 5, 3


def steps_of(ranks):
    """For every step and rank: heads, relations, tails, weights and negatives, by the entities' ids."""
    for step in zip(*(rank["seen"] for rank in ranks), strict=True):
        yield [
            {
                "heads": torch.tensor(batch["heads"]),
                "relations": torch.tensor(batch["relations"]),
                "weights": torch.tensor(batch["weights"]),
                "tails": torch.tensor([row for other in step for row in other["sent"][number][:PER_PAIR]]),
                "negatives": torch.tensor([row for other in step for row in other["sent"][number][PER_PAIR:]]),
            }
            for number, batch in enumerate(step)
        ]


def reference(folder, steps):
    """The losses and weights of one process that computes the whole step, with gradients of the whole table."""
    model = sharded_jobs.make(sharded_jobs.graph(folder), "complex", loss="softmax")
    optimizer = RowwiseAdagrad(model.parameters(), lr=0.1)
    losses = []
    for parts in steps:
        total, count = 0, 0
        for part in parts:
            queries = model.query(part["heads"], part["relations"])
            true = (queries * model.entity_embeddings(part["tails"])).sum(1, keepdim=True)
            scores = torch.cat([true, queries @ model.entity_embeddings(part["negatives"]).T], 1)
            each = F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long), reduction="none")
            total, count = total + (part["weights"] * each).sum(), count + part["weights"].sum()
        loss = total / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "weights": sharded_jobs.whole(model)}


@pytest.mark.parametrize("world", [2, 3])
def test_sampled_training_is_that_of_one_process_and_sees_every_triple_once(processes, folder, world):
    ranks = processes.run("sharded_jobs.sample", world, folder)
    steps = list(steps_of(ranks))
    expected = reference(folder, steps)
    kg = sharded_jobs.graph(folder)
    triples = Counter(map(tuple, with_inverses(kg.triples("train"), kg.num_relations).tolist()))
    seen = Counter()
    for parts in steps:
        for part in parts:
            columns = zip(*(part[name].tolist() for name in ("heads", "relations", "tails", "weights")), strict=True)
            seen += Counter((h, r, t) for h, r, t, weight in columns if weight)
    assert seen == Counter({triple: EPOCHS * count for triple, count in triples.items()})
    for found in ranks:
        assert_near({key: found[key] for key in expected}, expected)
        assert found["untouched"] == 0
        assert 0 < found["balance"] <= 1
    places = sum(len(part["weights"]) for parts in steps for part in parts)
    assert ranks[0]["balance"] == pytest.approx(seen.total() / places)


def test_row_wise_adagrad_treats_sparse_and_dense_gradients_alike():
    torch.manual_seed(0)
    tables = [torch.nn.Parameter(torch.ones(5, 3)) for _ in range(2)]
    optimizers = [RowwiseAdagrad([table], lr=0.5) for table in tables]
    for rows in ([0, 3, 3], [3, 4]):
        values = torch.randn(len(rows), 3)
        sparse = torch.sparse_coo_tensor([rows], values, (5, 3), check_invariants=True)
        tables[0].grad, tables[1].grad = sparse, sparse.to_dense()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(tables[0], tables[1])
    decaying = RowwiseAdagrad([tables[0]], weight_decay=0.5)
    with pytest.raises(ValueError, match=r"weight_decay=0.5 would change every row"):
        decaying.step()
