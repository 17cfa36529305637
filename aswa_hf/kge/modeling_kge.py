"""Knowledge-graph embedding models. Self-contained: it is shipped with every model on the Hub.

Every score is ⟨q(h, r), e_t⟩, the product of a query vector with the tail's embedding. A scorer defines only how
head and relation form the query; training, ranking and prediction are one matrix product on top of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.utils import ModelOutput

from .configuration_kge import KGEConfig

# Logits computed at a time in training: enough for fast matrix products, and on a CPU few enough for its cache.
CHUNK_ON_CPU = 1 << 22
CHUNK_ON_DEVICE = 1 << 25
# Far below any logit that matters. Smaller ones, which high learning rates produce, lead to denormal numbers in
# sigmoid and products, for which CPUs take many times longer.
FLOOR = -60.0

# The scorers by name; the classes below register themselves.
SCORERS: dict[str, type[KGEModel]] = {}


@dataclass
class KGEOutput(ModelOutput):
    """The training loss, if labels were given, and the scores, if they were computed."""

    loss: Tensor | None = None
    scores: Tensor | None = None


class KGEModel(PreTrainedModel):
    """A link predictor; `KGEModel(config)` returns an instance of the subclass that `config.scorer` names."""

    config_class = KGEConfig
    base_model_prefix = ""
    main_input_name = "heads"
    scorer: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if "scorer" in vars(cls):
            SCORERS[cls.scorer] = cls

    def __new__(cls, config: KGEConfig | None = None, *_args: Any, **_kwargs: Any) -> KGEModel:
        if cls is KGEModel and config is not None:
            if config.scorer not in SCORERS:
                raise ValueError(f"config.scorer must be one of {', '.join(SCORERS)}, got {config.scorer!r}.")
            cls = SCORERS[config.scorer]
        model: KGEModel = super().__new__(cls)
        return model

    def __init__(self, config: KGEConfig):
        if config.scorer not in (None, self.scorer):
            raise ValueError(
                f"{type(self).__name__} needs a config with scorer {self.scorer!r}, got {config.scorer!r}."
            )
        config.scorer = self.scorer
        if config.dim % self.blocks(config):
            raise ValueError(
                f"{type(self).__name__} needs a dim that is a multiple of {self.blocks(config)}, got {config.dim}."
            )
        super().__init__(config)
        self.entity_embeddings = nn.Embedding(config.num_entities, config.dim)
        self.relation_embeddings = nn.Embedding(config.num_relation_embeddings, self.relation_dim(config))
        self.input_dropout = nn.Dropout(config.input_dropout)
        self.query_dropout = nn.Dropout(config.query_dropout)
        self.entity_dropout = nn.Dropout(config.entity_dropout)
        self.relation_dropout = nn.Dropout(config.relation_dropout)
        self.add_parameters(config)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **options: Any) -> Any:
        """Loads a model as usual, but strictly and only from safetensors.

        Raises ValueError if a tensor is missing, unexpected, has a wrong shape, or contains NaN or infinite numbers:
        transformers would replace a missing tensor with random numbers.
        """
        options = {"use_safetensors": True, **options, "ignore_mismatched_sizes": True}  # they are refused below
        try:
            model, info = super().from_pretrained(*args, output_loading_info=True, **options)
        except (OSError, ValueError):
            raise
        except Exception as error:  # many kinds of errors, depending on the files
            reason = " ".join(str(error).split())
            raise ValueError(f"The model in {args[0]} cannot be loaded: {reason}") from error
        problems = [f"{name!r} is missing" for name in info["missing_keys"]]
        problems += [f"{name!r} is unexpected" for name in info["unexpected_keys"]]
        for name, found, expected in info["mismatched_keys"]:
            problems.append(f"{name!r} has the shape {tuple(found)}, expected {tuple(expected)}")
        if problems:
            raise ValueError(f"The weights of {args[0]} do not fit {type(model).__name__}: {min(problems)}.")
        for name, parameter in model.named_parameters():
            if not parameter.is_meta and not parameter.isfinite().all():
                raise ValueError(f"The weights of {args[0]} are not finite numbers: {name!r} has NaN or infinity.")
        return (model, info) if output_loading_info else model

    @staticmethod
    def blocks(_config: KGEConfig) -> int:
        """The number of real numbers per component of an embedding: 2 for complex numbers, and so on."""
        return 1

    @staticmethod
    def relation_dim(config: KGEConfig) -> int:
        """The number of real numbers per relation."""
        return config.dim

    def add_parameters(self, config: KGEConfig) -> None:
        """Adds parameters beside the two embedding tables."""

    def combine(self, h: Tensor, r: Tensor) -> Tensor:
        """q(h, r) for embeddings of heads and relations: the only part that differs between scorers."""
        raise TypeError("KGEModel itself has no scorer: use one of its subclasses.")

    def query(self, heads: Tensor, relations: Tensor) -> Tensor:
        """The query vectors (B, d) of heads and relations given by id."""
        h = self.input_dropout(self.entity_dropout(self.entity_embeddings(heads)))
        r = self.input_dropout(self.relation_dropout(self.relation_embeddings(relations)))
        queries: Tensor = self.query_dropout(self.combine(h, r))
        return queries

    def score(self, heads: Tensor, relations: Tensor, tails: Tensor) -> Tensor:
        """The scores (B,) of triples; tails may also be (B, K), K candidates for each query."""
        return self._scores_of(self.query(heads, relations), tails)

    def _scores_of(self, queries: Tensor, tails: Tensor) -> Tensor:
        candidates: Tensor = self.entity_dropout(self.entity_embeddings(tails))
        if tails.dim() == 1:
            return (queries * candidates).sum(-1)
        return torch.einsum("bd,bkd->bk", queries, candidates)

    def score_tails(self, heads: Tensor, relations: Tensor) -> Tensor:
        """The scores (B, |E|) of all entities as tails."""
        entities: Tensor = self.entity_dropout(self.entity_embeddings.weight)
        return self.query(heads, relations) @ entities.T

    def score_heads(self, relations: Tensor, tails: Tensor) -> Tensor:
        """The scores (B, |E|) of all entities as heads: as tails of the inverse relation, if the model has it."""
        if self.config.inverse_relations:
            return self.score_tails(tails, relations + self.config.num_relations)
        scores = self.entity_embeddings.weight.new_empty(len(tails), self.config.num_entities)
        everything = torch.arange(self.config.num_entities, device=tails.device)
        for relation in relations.unique():
            rows = relations == relation
            wanted = self.entity_embeddings(tails[rows])
            for heads in everything.split(1024):  # RESCAL and TuckER build a matrix for each of them
                found = wanted @ self.query(heads, relation.expand(len(heads))).T
                scores[rows.nonzero(), heads] = found.to(scores.dtype)  # autocast has its own dtype
        return scores

    def forward(
        self,
        heads: Tensor,
        relations: Tensor,
        tails: Tensor | None = None,
        labels: Tensor | None = None,
        label_offsets: Tensor | None = None,
        negatives: Tensor | None = None,
        measured: bool = True,
    ) -> KGEOutput:
        """Scores or, with labels, the training loss.

        The labels of B queries are one of
        - the true tails of all queries, concatenated, with `label_offsets` (B + 1,), where those of each query start
          (KvsAll; the loss never builds the matrix of labels),
        - the one true tail of each query, (B,) integers (1vsAll, cross-entropy),
        - a matrix (B, |E|), or (B, K) for the K candidates in `tails`, with 1 for true.
        With `negatives` (N,), false tails that all queries share, labels are the one true tail of each query.

        With `measured=False` a loss over all entities has its gradients but no value (NaN), which saves up to a
        quarter of the time.
        """
        self._check_batch(heads, relations, tails, labels, label_offsets, negatives)
        scores: Tensor | None = None
        if negatives is not None and labels is not None:
            # The candidates of a query are its true tail and what all have in common: one matrix product.
            queries = self.query(heads, relations)
            shared = self.entity_dropout(self.entity_embeddings(negatives))
            tails = labels.unsqueeze(1)
            scores = torch.cat([self._scores_of(queries, tails), queries @ shared.T], dim=1)
            labels = F.one_hot(torch.zeros_like(labels), scores.shape[1])
        elif labels is None or tails is not None or labels.dim() == 2:
            scores = self.score_tails(heads, relations) if tails is None else self.score(heads, relations, tails)
        if labels is None:
            return KGEOutput(scores=scores)
        smoothing = self.config.label_smoothing if self.training else 0.0
        if scores is not None:
            loss = self._loss_of(scores, labels.to(scores.dtype), smoothing)
        else:
            if len(heads) == 0:
                raise ValueError("The batch is empty: there are no queries to compute a loss for.")
            if label_offsets is not None and len(label_offsets) != len(heads) + 1:
                raise ValueError(
                    f"label_offsets must have one number more than there are queries ({len(heads)}), "
                    f"got {len(label_offsets)}."
                )
            loss = self._loss_over_all(self.query(heads, relations), labels, label_offsets, smoothing, measured)
        if self.training and (self.config.regularization or self.config.relation_prediction):
            counts, true_tails = _true_tails(labels, label_offsets, tails)
            if self.config.regularization:
                loss = loss + self.config.regularization * self._penalty(heads, relations, counts, true_tails)
            if self.config.relation_prediction:
                rows = torch.repeat_interleave(counts)
                found = self._relation_loss(heads[rows], relations[rows], true_tails)
                loss = loss + self.config.relation_prediction * found
        return KGEOutput(loss=loss, scores=scores)

    def _loss_over_all(
        self, queries: Tensor, labels: Tensor, offsets: Tensor | None, smoothing: float, measured: bool
    ) -> Tensor:
        """The loss of queries whose candidates are all entities."""
        entities = self.entity_dropout(self.entity_embeddings.weight)
        return loss_over_entities(queries, entities, labels, offsets, smoothing, measured, self.config.loss)

    def _check_batch(
        self, heads: Tensor, relations: Tensor, tails: Tensor | None, labels: Tensor | None, *others: Tensor | None
    ) -> None:
        """Raises if the model does not support these inputs of `forward`; this one supports all."""

    def _loss_of(self, scores: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        """The loss of a matrix of scores, of all entities or of candidates."""
        if self.config.loss == "binary" and self.config.adversarial_temperature and self.training:
            # Sun et al. (2019): −log σ(true) − Σ w·log σ(−false), the weights w a softmax over the false ones.
            masked = (self.config.adversarial_temperature * scores).masked_fill(labels > 0, -torch.inf)
            weights = masked.softmax(1).detach()
            sums: Tensor = (labels * F.logsigmoid(scores) + weights * F.logsigmoid(-scores)).sum(1)
            return -sums.mean() / 2
        if self.config.loss == "binary":
            targets = labels * (1 - smoothing) + smoothing / scores.shape[-1]
            return F.binary_cross_entropy_with_logits(scores, targets)
        counts = labels.sum(1, keepdim=True)
        if self.config.loss == "softmax-query":
            labels, counts = labels / counts.clamp_min(1), (counts > 0).to(labels.dtype)
        targets = labels * (1 - smoothing) + counts * smoothing / scores.shape[-1]
        total = len(scores) if self.config.loss == "softmax-query" else counts.sum()
        return -(targets * scores.log_softmax(1)).sum() / total

    def _penalty(self, heads: Tensor, relations: Tensor, counts: Tensor, tails: Tensor) -> Tensor:
        """N3 or L2 of head, relation and tail, the mean over triples: query i belongs to `counts[i]` of them.

        N3 takes the moduli of the scorer's own kind of numbers.
        """
        # One lookup for heads and tails: the gradient of each would be a table of all entities.
        entities = self.entity_embeddings(torch.cat([heads, tails]))
        powers = [self._power(entities), self._power(self.relation_embeddings(relations))]
        often = counts.to(entities.dtype)
        used = powers[0][: len(heads)] @ often + powers[0][len(heads) :].sum() + powers[1] @ often
        return used / max(1, len(tails))

    def _power(self, embeddings: Tensor) -> Tensor:
        """Σ|x|³ or Σ|x|² of each embedding."""
        if self.config.regularizer == "l2":
            return embeddings.square().sum(-1)
        squares: Tensor = embeddings.unflatten(-1, (self.blocks(self.config), -1)).square().sum(-2)
        return squares.clamp_min(1e-30).pow(1.5).sum(-1)

    def _relation_loss(self, heads: Tensor, relations: Tensor, tails: Tensor) -> Tensor:
        """The mean cross-entropy of the relations of triples among all relations.

        A score is linear in the relation, so the scores of all relations are one product with its gradient.
        """
        h, t = (self.entity_dropout(self.entity_embeddings(ids)) for ids in (heads, tails))
        table = self.relation_embeddings.weight
        at_zero = table.new_zeros(len(heads), table.shape[1])
        gradient = torch.func.vjp(lambda r: self.combine(h, r), at_zero)[1]
        return F.cross_entropy(gradient(t)[0] @ self.relation_dropout(table).T, relations)

    def get_input_embeddings(self) -> nn.Module:
        return self.entity_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.entity_embeddings = value

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        tensors = [module.weight] if isinstance(module, nn.Embedding) else []
        if module is self and hasattr(self, "core"):
            tensors.append(self.core)
        for tensor in tensors:
            if self.config.initializer == "normal":
                init.normal_(tensor, std=self.config.initializer_range)
            elif self.config.initializer == "uniform":
                init.uniform_(tensor, -self.config.initializer_range, self.config.initializer_range)
            else:
                getattr(init, self.config.initializer + "_")(tensor)


class DistMult(KGEModel):
    """⟨h ∘ r, t⟩, the elementwise product."""

    scorer = "distmult"

    def combine(self, h: Tensor, r: Tensor) -> Tensor:
        return h * r


class Keci(KGEModel):
    """⟨h ∘ r, t⟩ with the product of the Clifford algebra Cl(p, q); embeddings are [1 | e₁ … e_p | … e_{p+q}].

    e_i² = +1 for i ≤ p and −1 above. The parts of the product on e_i e_j have no counterpart in t.
    """

    scorer = "keci"

    @staticmethod
    def blocks(config: KGEConfig) -> int:
        return 1 + config.p + config.q

    def combine(self, h: Tensor, r: Tensor) -> Tensor:
        p = self.config.p
        h, r = (x.unflatten(-1, (self.blocks(self.config), -1)) for x in (h, r))
        h0, h_plus, h_minus = h[..., :1, :], h[..., 1 : p + 1, :], h[..., p + 1 :, :]
        r0, r_plus, r_minus = r[..., :1, :], r[..., 1 : p + 1, :], r[..., p + 1 :, :]
        scalar = h0 * r0 + (h_plus * r_plus).sum(-2, keepdim=True) - (h_minus * r_minus).sum(-2, keepdim=True)
        vector = h0 * r[..., 1:, :] + h[..., 1:, :] * r0
        return torch.cat([scalar, vector], dim=-2).flatten(-2)


class ComplEx(KGEModel):
    """Re⟨h, r, conj(t)⟩ over complex numbers; embeddings are [real | imaginary]."""

    scorer = "complex"

    @staticmethod
    def blocks(_config: KGEConfig) -> int:
        return 2

    def combine(self, h: Tensor, r: Tensor) -> Tensor:
        (h_re, h_im), (r_re, r_im) = h.chunk(2, dim=-1), r.chunk(2, dim=-1)
        return torch.cat([h_re * r_re - h_im * r_im, h_re * r_im + h_im * r_re], dim=-1)


class QMult(KGEModel):
    """⟨h ⊗ r, t⟩ with Hamilton's product of quaternions; embeddings are [1 | i | j | k]."""

    scorer = "qmult"

    @staticmethod
    def blocks(_config: KGEConfig) -> int:
        return 4

    def combine(self, h: Tensor, r: Tensor) -> Tensor:
        a, b, c, d = h.chunk(4, dim=-1)
        w, x, y, z = r.chunk(4, dim=-1)
        product = (
            a * w - b * x - c * y - d * z,
            a * x + b * w + c * z - d * y,
            a * y - b * z + c * w + d * x,
            a * z + b * y - c * x + d * w,
        )
        return torch.cat(product, dim=-1)


class RESCAL(KGEModel):
    """h W_r t; a relation is the matrix W_r [head, tail], stored as one row."""

    scorer = "rescal"

    @staticmethod
    def relation_dim(config: KGEConfig) -> int:
        return config.dim**2

    def combine(self, h: Tensor, r: Tensor) -> Tensor:
        return torch.einsum("...i,...ij->...j", h, r.unflatten(-1, (self.config.dim, -1)))


class TuckER(KGEModel):
    """W ×₁ h ×₂ r ×₃ t with one core tensor W [head, relation, tail] for all relations."""

    scorer = "tucker"

    def add_parameters(self, config: KGEConfig) -> None:
        self.core = nn.Parameter(torch.empty(config.dim, config.dim, config.dim))

    def combine(self, h: Tensor, r: Tensor) -> Tensor:
        return torch.einsum("...ik,...i->...k", torch.einsum("...j,ijk->...ik", r, self.core), h)


def loss_over_entities(
    queries: Tensor,
    entities: Tensor,
    tails: Tensor,
    offsets: Tensor | None = None,
    smoothing: float = 0.0,
    measured: bool = True,
    kind: str = "binary",
    shard: Any = None,
) -> Tensor:
    """The loss of scores ⟨queries, entities⟩ over all entities, without a matrix of labels or of logits.

    With `offsets`, `tails[offsets[i]:offsets[i + 1]]` are the distinct true tails of query i, and the loss is
    - "binary": the mean binary cross-entropy over all queries and entities,
    - "softmax": the mean cross-entropy over all triples, as if each were a query of its own (1vsAll),
    - "softmax-query": the mean cross-entropy over all queries, whose labels are spread evenly over the true tails.
    Without `offsets`, `tails[i]` is the one true tail, and the loss is the mean cross-entropy. Smoothing ε turns the
    labels y of a query or triple into (1 − ε)·y + ε/|E|. Under autocast the products are in its dtype.

    With `measured=False` the value is NaN, but the gradients are correct: the value is up to a quarter of the work.

    If `entities` are only some rows of the table, `shard` says which (see `aswa_hf.kge.sharded`). The value and the
    gradient of the queries are then parts, whose sums over all shards are those of the whole table.
    """
    loss: Tensor
    if offsets is not None and kind == "binary":
        loss = _BinaryCrossEntropy.apply(queries, entities, tails, offsets, smoothing, measured, shard)
    else:
        per_query = kind == "softmax-query"
        loss = _Softmax.apply(queries, entities, tails, offsets, smoothing, measured, per_query, shard)
    return loss


class _LossOverEntities(torch.autograd.Function):
    """A loss whose forward pass computes both gradients by blocks: the full matrix of logits never exists."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("The loss over all entities has no second derivatives: call it without create_graph.")
        # Divided only here: `grad` contains the loss scale of float16, which keeps small gradients from vanishing.
        factor = grad / ctx.count
        gradients = (factor * gradient for gradient in ctx.saved_tensors)
        return *gradients, *[None] * (len(ctx.needs_input_grad) - 2)


class _BinaryCrossEntropy(_LossOverEntities):
    """Binary cross-entropy by blocks of entities: the gradient of a logit x is σ(x) − label."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        entities: Tensor,
        tails: Tensor,
        offsets: Tensor,
        smoothing: float,
        measured: bool,
        shard: Any,
    ) -> Tensor:
        batch, height = len(queries), len(entities)
        total = height if shard is None else shard.num_rows
        width = max(1, min(height, _chunk_size(queries) // batch))
        starts = range(0, height, width)
        rows = _rows(offsets)
        if shard is not None:
            rows, tails = shard.own(rows, tails)
        order = tails.argsort()
        rows, tails = rows[order], tails[order]
        bounds = torch.searchsorted(tails, torch.tensor([*starts, height], device=tails.device)).tolist()
        q = queries.to(_product_dtype(queries))
        grad_queries, grad_entities = torch.zeros_like(q), torch.empty_like(entities, dtype=q.dtype)
        space = q.new_empty(width * batch)
        loss = _zero(q)
        for start, first, last in zip(starts, bounds, bounds[1:], strict=False):
            block = entities[start : start + width].to(q.dtype)
            logits = torch.mm(block, q.T, out=space[: len(block) * batch].view(len(block), batch))
            true = tails[first:last] - start, rows[first:last]
            if measured:
                loss -= (1 - smoothing) * logits[true].sum(dtype=loss.dtype)
                if smoothing:
                    loss -= smoothing / total * logits.sum(dtype=loss.dtype)
            logits.clamp_(min=FLOOR)
            if measured:
                loss += _softplus_sum(logits.to(loss.dtype))
            torch.sigmoid(logits, out=logits)
            logits.index_put_(true, logits.new_tensor(smoothing - 1), accumulate=True)
            if smoothing:
                logits -= smoothing / total
            torch.mm(logits, q, out=grad_entities[start : start + width])
            grad_queries.addmm_(logits.T, block)
        ctx.count = batch * total
        ctx.save_for_backward(grad_queries.to(queries.dtype), grad_entities.to(entities.dtype))
        return loss / ctx.count if measured else loss.fill_(torch.nan)


class _Softmax(_LossOverEntities):
    """Cross-entropy by blocks of queries.

    All triples of a query have the same logits x, so the sum of their losses is |T|·logsumexp(x) − Σ_{t∈T} x_t: a
    query with many true tails costs one row. Only softmax(x) is a full matrix; what the labels add to both gradients
    are sums over the true tails alone.
    """

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        entities: Tensor,
        tails: Tensor,
        offsets: Tensor | None,
        smoothing: float,
        measured: bool,
        per_query: bool,
        shard: Any,
    ) -> Tensor:
        batch, width = len(queries), len(entities)
        total = width if shard is None else shard.num_rows
        dtype = _product_dtype(queries)
        e, q = entities.to(dtype), queries.to(dtype)
        rows = torch.arange(batch, device=q.device) if offsets is None else _rows(offsets)
        counts = torch.ones_like(rows) if offsets is None else offsets.diff()
        share = entities.new_ones(len(rows)) / (counts[rows] if per_query else 1)
        weights = ((counts > 0) if per_query else counts).to(entities.dtype).unsqueeze(1)
        ctx.count = batch if per_query else len(rows)
        if shard is not None:
            rows, tails, share = shard.own(rows, tails, share)

        # What the labels contribute: Σ label·e for every query, Σ label·q for every entity. The numbers are those of
        # the products, the sums are in the model's dtype; under autocast some scorers have queries in its dtype.
        whole = q.to(entities.dtype)
        labeled = torch.zeros_like(whole).index_add_(0, rows, share.unsqueeze(1) * e[tails].to(whole.dtype))
        labeled *= 1 - smoothing
        grad_entities = torch.zeros_like(entities)
        grad_entities.index_add_(0, tails, (smoothing - 1) * share.unsqueeze(1) * whole[rows])
        if smoothing:
            labeled += smoothing / total * weights * e.sum(0, dtype=whole.dtype)
            grad_entities -= smoothing / total * (weights * whole).sum(0)

        loss = _zero(e)
        if measured:
            loss -= (whole * labeled).sum(dtype=loss.dtype)
        # All shards take the same blocks.
        height = max(1, min(batch, _chunk_size(queries) // (width if shard is None else shard.largest)))
        space = e.new_empty(height, width)
        grad_queries = torch.empty_like(q)
        products = torch.zeros_like(e)
        weighted = weights.to(dtype) * q
        # |x| ≤ ‖q‖·‖e‖: below this bound no probability is denormal, which saves a pass over the matrix.
        steep = q.device.type == "cpu" and bool(2 * q.norm(dim=1).max() * e.norm(dim=1).max() > -FLOOR)
        for start in range(0, batch, height):
            block = slice(start, start + height)
            logits = torch.mm(q[block], e.T, out=space[: len(q[block])])
            if shard is not None:
                logsumexp = shard.softmax_(logits)
                if measured and shard.is_first:
                    loss += (weights[block, 0] * logsumexp).sum(dtype=loss.dtype)
            else:
                if measured:
                    loss += (weights[block, 0] * logits.to(loss.dtype).logsumexp(1)).sum(dtype=loss.dtype)
                torch.softmax(logits, dim=1, out=logits)
            if steep:
                logits.clamp_(min=math.exp(FLOOR))
            torch.mm(logits, e, out=grad_queries[block])
            products.addmm_(logits.T, weighted[block])
        grad_entities += products
        ctx.save_for_backward((weights * grad_queries - labeled).to(queries.dtype), grad_entities)
        return loss / ctx.count if measured else loss.fill_(torch.nan)


def _zero(like: Tensor) -> Tensor:
    """A zero to accumulate a loss in, in float32 at least."""
    return torch.zeros((), dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


def _softplus_sum(x: Tensor) -> Tensor:
    """Σ log(1 + exp(x)) = Σ max(x, 0) − Σ log σ(|x|), in half the time of `softplus`, which has slow cases."""
    return x.relu().sum() - x.abs().sigmoid_().log_().sum()


def _chunk_size(queries: Tensor) -> int:
    return CHUNK_ON_CPU if queries.device.type == "cpu" else CHUNK_ON_DEVICE


def _product_dtype(queries: Tensor) -> torch.dtype:
    """The dtype of the matrix products: under autocast its own, else the model's."""
    device = queries.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else queries.dtype


def _true_tails(labels: Tensor, offsets: Tensor | None, candidates: Tensor | None) -> tuple[Tensor, Tensor]:
    """The number of true tails of each query, and these, concatenated."""
    if labels.dim() == 2:
        rows, columns = (labels > 0).nonzero(as_tuple=True)
        return (labels > 0).sum(1), columns if candidates is None else candidates[rows, columns]
    return torch.ones_like(labels) if offsets is None else offsets.diff(), labels


def _rows(offsets: Tensor) -> Tensor:
    """The query that each label belongs to."""
    counts = offsets.diff()
    return torch.repeat_interleave(torch.arange(len(counts), device=offsets.device), counts)
