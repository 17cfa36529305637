"""Multi-hop queries as their definitions say, one entity at a time, in plain Python."""

from __future__ import annotations

import itertools
import math
from functools import reduce

import numpy as np
import torch

from aswa_hf.kge import And, Hop, LinkPredictor, Or, Query
from aswa_hf.kge.queries.language import SHAPES, build, label_kinds

NORMS = {
    "product": (lambda a, b: a * b, lambda a, b: 1 - (1 - a) * (1 - b)),
    "min": (min, max),
    "lukasiewicz": (lambda a, b: max(0.0, a + b - 1), lambda a, b: min(1.0, a + b)),
}


class SlowAnswers:
    """Truth values of queries with every atom looked up in a table."""

    def __init__(self, predictor: LinkPredictor, tnorm: str = "product", truth: str = "sigmoid"):
        self.entities, relations = predictor.vocab.entities, predictor.vocab.relations
        self.conjunction, self.disjunction = NORMS[tnorm]
        self.table = {}
        model = predictor.model
        ids = range(len(self.entities))
        for (r, relation), inverse in itertools.product(enumerate(relations), (False, True)):
            for x in ids:
                logits = [self.logit(model, x, r, y, inverse) for y in ids]
                for y, value in zip(self.entities, self.truths(logits, truth), strict=True):
                    self.table[self.entities[x], relation, inverse, y] = value

    @staticmethod
    def logit(model, x, r, y, inverse):
        triple = (x, r, y)
        if inverse:
            triple = (x, r + model.config.num_relations, y) if model.config.inverse_relations else (y, r, x)
        with torch.no_grad():
            return model.score(*(torch.tensor([i]) for i in triple)).item()

    @staticmethod
    def truths(logits, truth):
        if truth == "sigmoid":
            return [1 / (1 + math.exp(-x)) for x in logits]
        if truth == "minmax":
            return [(x - min(logits)) / (max(logits) - min(logits)) for x in logits]
        total = sum(math.exp(x) for x in logits)
        return [math.exp(x) / total for x in logits]

    def exhaustive(self, query: Query) -> dict[str, float]:
        """The best value of the whole formula over all ways to fill in its variables, for each entity."""
        choices = list(itertools.product(self.entities, repeat=variables(query)))
        return {y: max(self.formula(query, y, iter(choice)) for choice in choices) for y in self.entities}

    def formula(self, query, target, choice) -> float:
        if isinstance(query, Hop):
            if isinstance(query.source, str):
                return self.table[query.source, query.relation, query.inverse, target]
            x = next(choice)
            atom = self.table[x, query.relation, query.inverse, target]
            return self.conjunction(self.formula(query.source, x, choice), atom)
        values = [self.formula(part, target, choice) for part in query.parts]
        return reduce(self.conjunction if isinstance(query, And) else self.disjunction, values)

    def beam(self, query, beam: int) -> dict[str, float]:
        """The values of all entities where only the best at each variable are followed."""
        if isinstance(query, Hop):
            if isinstance(query.source, str):
                return {y: self.formula(query, y, iter(())) for y in self.entities}
            before = self.beam(query.source, beam)
            kept = sorted(before, key=lambda x: -before[x])[:beam]
            atoms = {(x, y): self.table[x, query.relation, query.inverse, y] for x in kept for y in self.entities}
            return {y: max(self.conjunction(before[x], atoms[x, y]) for x in kept) for y in self.entities}
        combine = self.conjunction if isinstance(query, And) else self.disjunction
        parts = [self.beam(part, beam) for part in query.parts]
        return {y: reduce(combine, [part[y] for part in parts]) for y in self.entities}


def variables(query: Query) -> int:
    if isinstance(query, Hop):
        return 0 if isinstance(query.source, str) else 1 + variables(query.source)
    return sum(variables(part) for part in query.parts)


def random_query(shape: str, vocab, random: np.random.Generator, inverses: bool = True) -> Query:
    """A query of a shape with labels drawn at random."""
    labels = []
    for kind in label_kinds(SHAPES[shape]):
        if kind == "entity":
            labels.append((kind, str(random.choice(vocab.entities))))
        else:
            labels.append(
                ("inverse" if inverses and random.random() < 0.3 else kind, str(random.choice(vocab.relations)))
            )
    return build(SHAPES[shape], labels)


def reached(query, triples: set[tuple[str, str, str]]) -> set[str]:
    """The answers of a query in a set of triples, as it stands."""
    if isinstance(query, Hop):
        sources = {query.source} if isinstance(query.source, str) else reached(query.source, triples)
        return {t for h, r, t in triples if h in sources and r == query.relation}
    parts = [reached(part, triples) for part in query.parts]
    return set.union(*parts) if isinstance(query, Or) else set.intersection(*parts)
