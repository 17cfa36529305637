"""Configuration of knowledge-graph embedding models. Self-contained: it is shipped with every model on the Hub."""

# No `from __future__ import annotations`: @strict checks types, but not those written as strings.
import math
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

INITIALIZERS = ("xavier_normal", "xavier_uniform", "normal", "uniform")
REGULARIZERS = ("n3", "l2")
LOSSES = ("binary", "softmax", "softmax-query")


@strict
class KGEConfig(PreTrainedConfig):
    """Configuration of a link predictor.

    Args:
        num_entities, num_relations: sizes of the vocabulary, inverse relations not counted.
        dim: real numbers per entity, whatever the scorer: ComplEx uses them as dim/2 complex numbers, and so on.
        scorer: "distmult", "complex", "qmult", "keci", "rescal" or "tucker"; the model classes fill it in.
        inverse_relations: whether every relation r has an inverse at r + num_relations, used to predict heads.
        p, q: for Keci, the number of basis vectors of the Clifford algebra that square to +1 and to −1.
        loss: over the labels of a query: "binary" (a yes or no for every entity), "softmax" (one choice per triple:
            1vsAll at the cost of KvsAll) or "softmax-query" (one choice per query, spread over its true tails).
        input_dropout, query_dropout: on the embeddings of head and relation, and on the query vector.
        entity_dropout, relation_dropout: on all embeddings of entities, also as candidates, and of relations.
        regularizer, regularization: "n3" or "l2" of head, relation and tail, mean over the true triples of a batch,
            and its weight in the loss.
        adversarial_temperature: of the weights that negative samples get by their own scores (0: equal weights);
            for the binary loss of candidates.
        relation_prediction: weight of a second loss, the cross-entropy of the relation given head and tail.
        label_smoothing: ε of the training labels (1 − ε)·y + ε/num_entities.
        initializer, initializer_range: of the embeddings; the range is for "normal" (std) and "uniform" (±).
    """

    model_type = "kge"

    num_entities: int = 1
    num_relations: int = 1
    dim: int = 128
    scorer: str | None = None
    inverse_relations: bool = True
    p: int = 0
    q: int = 1
    loss: str = "binary"
    input_dropout: float | int = 0.0
    query_dropout: float | int = 0.0
    entity_dropout: float | int = 0.0
    relation_dropout: float | int = 0.0
    regularizer: str | None = None
    regularization: float | int = 0.0
    relation_prediction: float | int = 0.0
    adversarial_temperature: float | int = 0.0
    label_smoothing: float | int = 0.0
    initializer: str = "xavier_normal"
    initializer_range: float | int = 0.1

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        for name in ("num_entities", "num_relations", "dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name in (
            "p",
            "q",
            "regularization",
            "relation_prediction",
            "adversarial_temperature",
            "initializer_range",
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)}.")
        for name in ("input_dropout", "query_dropout", "entity_dropout", "relation_dropout", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}.")
        if self.loss not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {self.loss!r}.")
        if self.initializer not in INITIALIZERS:
            raise ValueError(f"initializer must be one of {', '.join(INITIALIZERS)}, got {self.initializer!r}.")
        if self.regularizer not in (None, *REGULARIZERS):
            raise ValueError(f"regularizer must be one of {', '.join(REGULARIZERS)}, got {self.regularizer!r}.")
        if self.regularization and self.regularizer is None:
            raise ValueError(
                f"regularization={self.regularization} has no effect without a regularizer: set regularizer to "
                f"one of {', '.join(REGULARIZERS)}."
            )

    @property
    def num_relation_embeddings(self) -> int:
        """The number of rows of the relation table."""
        return self.num_relations * (2 if self.inverse_relations else 1)
