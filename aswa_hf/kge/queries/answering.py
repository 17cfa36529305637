"""Multi-hop queries answered by beam search with a link predictor (complex query decomposition).

An atom r(x, y) is true to the degree σ(⟨q(x, r), e_y⟩). A conjunction is the t-norm ⊤ of its parts, a disjunction the
dual t-conorm ⊥, and ∃x is the maximum over x. A hop from a query with truth values v gives an entity y the value

    max over x in the beam of  ⊤(v(x), σ(⟨q(x, r), e_y⟩)),

where the beam contains the entities with the greatest v. With all entities in the beam this is exhaustive search.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from aswa_hf._utils.checks import check_choice, check_whole_number
from aswa_hf._utils.distributed import on_every_rank
from aswa_hf.kge.modeling_kge import KGEModel
from aswa_hf.kge.predict import LinkPredictor
from aswa_hf.kge.queries.language import Query, Structure
from aswa_hf.kge.queries.truth import FALSE, NORMS, TRUTHS, lowest, truth_of
from aswa_hf.kge.ranking import SCORES_ON_CPU, SCORES_ON_DEVICE, score_answers
from aswa_hf.kge.vocab import KGVocab, take_labels

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

# The maximum number of rows scored at a time: RESCAL and TuckER build a matrix for each.
MAX_ROWS = 2048
DIVERGED = (
    "The model has diverged: its weights or scores are not finite numbers. Train it again with a smaller "
    "learning rate."
)


class Step(NamedTuple):
    """An atom in the chain of an answer: `relation` leads from `source` to `target`, with this truth value."""

    source: str
    relation: str
    target: str
    truth: float

    def __str__(self) -> str:
        return f"{self.source} –{self.relation}→ {self.target} ({self.truth:#.3g})"


def answer_query(
    model: LinkPredictor,
    query: str | Query | Sequence[str | Query],
    k: int = 10,
    *,
    beam: int = 10,
    tnorm: str = "product",
    truth: str = "sigmoid",
    chains: bool = False,
    batch_size: int | None = None,
) -> pd.DataFrame:
    """The `k` best answers to a query, or to each of several, with their truth values.

        predictor = LinkPredictor.from_pretrained("runs/countries")
        answer_query(predictor, "2p: france, neighbor, locatedin", k=3, chains=True)

    `beam` is the number of entities kept for a variable between two hops, `tnorm` one of "product", "min"
    and "lukasiewicz", and `truth` how logits become truth values: "sigmoid", or "minmax" or "softmax" over the
    candidates. `chains` adds the steps that lead to each answer: for a union, those of its most likely branch.
    `batch_size` bounds the memory: at most this many rows of truth values for all entities are computed at a time.
    """
    import pandas as pd

    predictor = checked_predictor(model)
    check_whole_number("k", k)
    several = [query] if isinstance(query, (str, Query)) else query
    if not isinstance(several, Iterable):
        raise TypeError(f"Expected a query, or a list of queries, got {query!r}.")
    queries = [part if isinstance(part, Query) else Query.parse(part) for part in several]
    search = BeamSearch(predictor.model, beam=beam, tnorm=tnorm, truth=truth, batch_size=batch_size)
    names = predictor.vocab.entities
    tables: list[Any] = [None] * len(queries)
    with search.evaluating():
        for structure, rows, ids in by_structure(queries, predictor.vocab):
            for part in range(0, len(rows), 1 if chains else search.rows):
                some = slice(part, part + (1 if chains else search.rows))
                tree = search.tree(structure, ids[some])
                every = search.odds(tree)
                odds, answers = search.lowest(every, min(k, len(names)))
                search.memory.release(every)
                for row, score, answer in zip(rows[some], truth_of(odds).cpu(), answers.cpu(), strict=True):
                    columns = {
                        "query": str(queries[row]),
                        "answer": take_labels(names, answer.numpy()),
                        "score": score.numpy(),
                    }
                    columns["rank"] = np.arange(1, len(answer) + 1)
                    tables[row] = pd.DataFrame(columns)
                    if chains:
                        tables[row]["chain"] = [
                            [_labeled(step, predictor.vocab) for step in steps]
                            for _, steps in search.chains(tree, answer.tolist())
                        ]
    if not tables:
        return pd.DataFrame(columns=["query", "answer", "score", "rank", *["chain"] * chains])
    return pd.concat(tables, ignore_index=True)


def by_structure(queries: Sequence[Query], vocab: KGVocab) -> Iterator[tuple[Structure, list[int], Tensor]]:
    """Groups queries by structure: yields it, the indices of its queries, and their labels as a row of ids each."""
    groups: dict[Structure, list[int]] = {}
    for row, query in enumerate(queries):
        groups.setdefault(query.structure, []).append(row)
    for structure, rows in groups.items():
        columns = []
        for labels in zip(*(queries[row].labels() for row in rows), strict=True):
            kinds, names = zip(*labels, strict=True)
            if kinds[0] == "entity":
                columns.append(vocab.entity_ids(list(names)))
            else:
                backwards = np.array([kind == "inverse" for kind in kinds])
                columns.append(vocab.relation_ids(list(names)) + backwards * vocab.num_relations)
        yield structure, rows, torch.from_numpy(np.stack(columns, axis=1))


@dataclass
class _Node:
    """A part of many queries of one structure: a column of ids for each label."""

    kind: str
    parts: list[_Node]
    ids: Tensor | None = None  # of entities or relations
    beam: tuple[Tensor, Tensor] | None = None  # values and entities at the source of a hop, set by the search


class BeamSearch:
    """Computes the odds against all entities as answers to many queries of one structure at a time."""

    def __init__(
        self,
        model: KGEModel,
        *,
        beam: int = 10,
        tnorm: str = "product",
        truth: str = "sigmoid",
        batch_size: int | None = None,
    ):
        check_whole_number("beam", beam)
        if batch_size is not None:
            check_whole_number("batch_size", batch_size)
        for name, value, known in (("tnorm", tnorm, NORMS), ("truth", truth, TRUTHS)):
            check_choice(name, value, known)
        # Entities may be spread over processes: then each computes the odds against its own.
        module: Any = model.entity_embeddings
        self.shard: Any = module if hasattr(module, "merge_best") else None
        if self.shard is not None and truth != "sigmoid":
            raise ValueError(f"truth={truth!r} compares all entities, which are sharded here. Use truth='sigmoid'.")
        finite = all(parameter.isfinite().all() for parameter in model.parameters())
        if not (finite if self.shard is None else on_every_rank(finite, module.weight.device)):
            raise ValueError(DIVERGED)
        self.model = model
        self.conjunction, self.disjunction = NORMS[tnorm]
        self.truth = TRUTHS[truth]
        weight = model.entity_embeddings.weight.detach()
        self.entities = weight.to(torch.promote_types(weight.dtype, torch.float32))
        device = weight.device
        total: int = len(weight) if self.shard is None else self.shard.largest
        self.beam = min(beam, model.config.num_entities)
        scores = SCORES_ON_CPU if device.type == "cpu" else SCORES_ON_DEVICE
        self.rows = batch_size or max(1, min(MAX_ROWS, scores // total))
        self.memory = _Memory(self.entities, self.rows)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Disables dropout and gradients."""
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train(training)

    def tree(self, structure: Structure, ids: Tensor) -> _Node:
        """The tree of queries of one structure, given as a row of ids each."""
        return _tree(structure, iter(ids.to(self.entities.device).T))

    def odds(self, node: _Node) -> Tensor:
        """The odds (B, |E|) against all entities as answers: 1/truth − 1. The caller releases their memory."""
        if node.kind == "p":
            (source,) = node.parts
            if source.kind == "e":
                heads: Tensor = source.ids  # type: ignore[assignment]
                return self._atoms(heads.unsqueeze(1), node.ids).squeeze(1).clamp_(max=FALSE)  # type: ignore[arg-type]
            before = self.odds(source)
            node.beam = self.lowest(before, self.beam)
            self.memory.release(before)
            return self._hop(*node.beam, node.ids)  # type: ignore[arg-type]
        combine = self.conjunction if node.kind == "i" else self.disjunction
        result = self.odds(node.parts[0])
        for part in node.parts[1:]:
            other = self.odds(part)
            result = combine(result, other).clamp_(max=FALSE)
            self.memory.release(other)
        return result

    def lowest(self, odds: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The `k` lowest odds of each row and their entities; raises ValueError if scores overflow."""
        found = lowest(odds, min(k, odds.shape[1]))
        if self.shard is not None:
            found = self.shard.merge_best(*found, k, largest=False)
        if not found[0].isfinite().all():
            raise ValueError(DIVERGED)
        return found

    def chains(self, node: _Node, targets: list[int]) -> list[tuple[Tensor, list[tuple[int, int, int, Tensor]]]]:
        """The odds against each target as an answer to the only query of a searched tree, and the steps to it."""
        if node.kind == "p":
            return self._hop_chains(node, targets)
        found = []
        for branches in zip(*(self.chains(part, targets) for part in node.parts), strict=True):
            odds = [value.clone() for value, _ in branches]
            if node.kind == "i":
                found.append((reduce(self.conjunction, odds), [step for _, steps in branches for step in steps]))
            else:
                best = min(branches, key=lambda branch: branch[0].item())
                found.append((reduce(self.disjunction, odds), best[1]))
        return found

    def _hop_chains(self, node: _Node, targets: list[int]) -> list[Any]:
        (source,) = node.parts
        relation: Tensor = node.ids  # type: ignore[assignment]
        if source.kind == "e":
            heads: Tensor = source.ids  # type: ignore[assignment]
            values = torch.zeros_like(heads, dtype=self.entities.dtype)
        else:
            values, heads = (tensor[0] for tensor in node.beam)  # type: ignore[union-attr]
        blocks = []
        for some in heads.split(self.rows):
            block = self._atoms(some.unsqueeze(0), relation)
            columns = block[0, :, targets] if self.shard is None else self.shard.take_columns(block[0], targets)
            blocks.append(columns.clamp_(max=FALSE))
            self.memory.release(block)
        atoms = torch.cat(blocks)
        best = self.conjunction(atoms.clone(), values.unsqueeze(1)).argmin(0)
        chosen = heads[best].tolist()
        reached = [(value, []) for value in values[best]] if source.kind == "e" else self.chains(source, chosen)
        found = []
        for column, (target, head, (value, steps)) in enumerate(zip(targets, chosen, reached, strict=True)):
            atom = atoms[best[column], column]
            found.append((self.conjunction(atom.clone(), value), [*steps, (head, int(relation), target, atom)]))
        return found

    def _hop(self, values: Tensor, sources: Tensor, relations: Tensor) -> Tensor:
        """The odds against each entity after a hop: the lowest over the beam, a block of rows at a time."""
        queries, beam = sources.shape
        width = min(beam, self.rows)
        height = max(1, self.rows // width)
        result = self.memory.take(queries)
        for first in range(0, queries, height):
            some = slice(first, first + height)
            for left in range(0, beam, width):
                part = slice(left, left + width)
                atoms = self._atoms(sources[some, part], relations[some])
                found = self.conjunction(atoms, values[some, part].unsqueeze(2))
                if left == 0:
                    torch.amin(found, dim=1, out=result[some])
                else:
                    torch.minimum(result[some], found.amin(dim=1), out=result[some])
                self.memory.release(atoms)
        return result.clamp_(max=FALSE)

    def _atoms(self, heads: Tensor, relations: Tensor) -> Tensor:
        """The odds (B, b, |E|) against the atoms from heads (B, b) along relations (B,) to all entities."""
        model, relations = self.model, relations.unsqueeze(1)
        out = self.memory.take(heads.numel())
        if model.config.inverse_relations or bool((relations < model.config.num_relations).all()):
            queries = model.query(heads, relations).to(self.entities.dtype).flatten(0, 1)
            out.addmm_(queries, self.entities.T, beta=0, alpha=-1)
        else:
            sources, by = (ids.flatten().cpu().numpy() for ids in (heads, relations.expand_as(heads)))
            out.copy_(score_answers(model, sources, by, model.config.num_relations)).neg_()
        truth: Tensor = self.truth(out).unflatten(0, heads.shape)
        return truth


class _Memory:
    """Reusable rows of |E| numbers: allocating memory would cost about as much as the computation in it."""

    def __init__(self, like: Tensor, rows: int):
        self.like, self.rows = like, rows
        self.free: list[Tensor] = []
        self.in_use: dict[int, Tensor] = {}

    def take(self, rows: int) -> Tensor:
        if rows > self.rows:
            return self.like.new_empty(rows, len(self.like))
        block = self.free.pop() if self.free else self.like.new_empty(self.rows, len(self.like))
        self.in_use[block.data_ptr()] = block
        return block[:rows]

    def release(self, tensor: Tensor) -> None:
        block = self.in_use.pop(tensor.data_ptr(), None)
        if block is not None:
            self.free.append(block)


def _tree(structure: Structure, columns: Iterator[Tensor]) -> _Node:
    if structure == "e":
        return _Node("e", [], next(columns))
    parts = [_tree(part, columns) for part in structure[1:]]
    return _Node(structure[0], parts, next(columns) if structure[0] == "p" else None)


def _labeled(step: tuple[int, int, int, Tensor], vocab: KGVocab) -> Step:
    head, relation, tail, odds = step
    backwards, label = relation >= vocab.num_relations, vocab.relations[relation % vocab.num_relations]
    return Step(vocab.entities[head], "^" * backwards + label, vocab.entities[tail], float(truth_of(odds)))


def checked_predictor(model: Any) -> LinkPredictor:
    """Returns the model if it is a `LinkPredictor`; raises TypeError otherwise."""
    if not isinstance(model, LinkPredictor):
        raise TypeError(
            f"Queries consist of labels and need a LinkPredictor, got {type(model).__name__}. Build one with "
            "LinkPredictor(model, kg.vocab), or LinkPredictor.from_pretrained(folder)."
        )
    return model
