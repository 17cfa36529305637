"""What makes our numbers differ from the paper's on FB15k-237: first weights, QMult's relations, how hops are joined.

    python benchmarks/paper_differences.py weights data/kg/FB15k-237 --json results/differences/weights.json
    python benchmarks/paper_differences.py quaternions data/kg/FB15k-237 --json results/differences/quaternions.json
    python benchmarks/paper_differences.py hops data/kg/FB15k-237 RUN --json results/differences/hops.json

The paper says none of them. Its authors' library starts embeddings from N(0, 1), the default of torch, where ours
start from Xavier's normal distribution; it divides a relation of QMult by its norms over groups of four neighboring
numbers, which are not the four parts of a quaternion there; and it multiplies logits along a path, not truth values,
so that two unlikely hops make a likely path.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import set_seed

from aswa_hf import ASWACallback
from aswa_hf.checkpoint import library_versions
from aswa_hf.kge import (
    KGEModel,
    KGETrainer,
    LinkPredictor,
    QMult,
    evaluate_link_prediction,
    evaluate_queries,
    generate_queries,
    load_kg,
    paper_arguments,
)

STRATEGIES = ("last", "swa-all", "aswa")


class NormalizedQMult(QMult):
    """QMult with relations as the authors' library uses them: every four neighboring numbers have the norm 1."""

    def combine(self, h: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return super().combine(h, functional.normalize(r.unflatten(-1, (-1, 4)), dim=-1).flatten(-2))


def weights(options: argparse.Namespace) -> dict[str, Any]:
    """The paper's setting from N(0, 1)."""
    return trained(KGEModel, options.model, options)


def quaternions(options: argparse.Namespace) -> dict[str, Any]:
    """The paper's setting from N(0, 1), QMult with normalized relations."""
    return trained(NormalizedQMult, "qmult", options)


def trained(kind: type[KGEModel], scorer: str, options: argparse.Namespace) -> dict[str, Any]:
    """The test results of a run in the paper's setting, from N(0, 1)."""
    kg = load_kg(options.dataset)
    set_seed(options.seed)
    model = kind(kg.config(scorer=scorer, initializer="normal", initializer_range=1.0))
    with tempfile.TemporaryDirectory() as folder:
        trainer = KGETrainer(model, paper_arguments(folder, num_train_epochs=options.epochs, seed=options.seed), kg)
        callback = ASWACallback(trainer, metric="mrr", strategies=STRATEGIES)
        trainer.add_callback(callback)
        trainer.train()
    found = {}
    for name, strategy in callback.strategies.items():
        with strategy.swapped():
            found[name] = {split: evaluate_link_prediction(model, kg, split) for split in options.splits}
    return {
        "dataset": kg.name,
        "model": scorer,
        "seed": options.seed,
        "epochs": options.epochs,
        "strategies": found,
    }


def hops(options: argparse.Namespace) -> dict[str, Any]:
    """MRR of 2p queries with products of truth values and of logits, with the weights a run ships."""
    kg = load_kg(options.dataset)
    predictor = LinkPredictor.from_pretrained(options.run, kg=kg)
    queries = generate_queries(kg, "2p", 500, seed=0)
    return {
        "dataset": kg.name,
        "run": Path(options.run).name,
        "our search": evaluate_queries(predictor, queries)["2p"]["mrr"],
        "truth values": _two_hops(predictor, queries, torch.sigmoid),
        "logits": _two_hops(predictor, queries, lambda logits: logits),
    }


@torch.no_grad()
def _two_hops(
    predictor: LinkPredictor, queries: Any, value: Callable[[torch.Tensor], torch.Tensor], beam: int = 10
) -> float:
    """The MRR of path queries of two hops, with a product of `value`s along the path."""
    model, vocab = predictor.model, predictor.vocab
    means = []
    for row in queries:
        entity, *relations = (label.strip() for label in row["query"].partition(":")[2].split(","))
        first, second = torch.from_numpy(vocab.relation_ids(relations))
        start = torch.tensor([vocab.entity_id(entity)])
        best = value(model.score_tails(start, first[None])[0]).topk(beam)
        onward = value(model.score_tails(best.indices, second.expand(beam)))
        scores = (best.values[:, None] * onward).max(0).values
        hard = torch.from_numpy(vocab.entity_ids(row["hard"]))
        own = scores[hard]
        scores[hard] = -torch.inf
        if row["easy"]:
            scores[torch.from_numpy(vocab.entity_ids(row["easy"]))] = -torch.inf
        greater, equal = (scores > own[:, None]).sum(1), (scores == own[:, None]).sum(1)
        means.append((1 / (1 + greater + equal / 2)).mean().item())
    return float(np.mean(means))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    for measure in (weights, quaternions, hops):
        kind = kinds.add_parser(measure.__name__, help=measure.__doc__)
        kind.set_defaults(measure=measure)
        kind.add_argument("dataset", help="a folder of triples or another graph that load_kg finds")
        kind.add_argument("--json", type=Path, help="where to write what was measured")
        if measure is hops:
            kind.add_argument("run", help="the folder of a run on this graph")
        else:
            if measure is weights:
                kind.add_argument("--model", default="complex")
            kind.add_argument("--splits", nargs="+", default=["test"], help="where to rank (train takes minutes)")
            kind.add_argument("--epochs", type=int, default=30)
            kind.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    content = options.measure(options) | {"versions": library_versions()}
    print(json.dumps(content, indent=2))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
