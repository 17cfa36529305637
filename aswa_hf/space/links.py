"""Questions to a link predictor: labels completed, answers with what is known, multi-hop questions, neighbors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from aswa_hf.kge import And, Hop, LinkPredictor, Or, Query, answer_query
from aswa_hf.run_folder import CONFIG, WEIGHTS
from aswa_hf.space.source import GRAPH, Reloading, Source, in_memory, run_settings

MAX_LABEL = 1000  # characters; longer text is not a label
MAX_HOPS, MAX_PATHS = 6, 4
MAX_RECENT = 50  # number of recent clicks that a late one may still precede
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Answer:
    """An entity with its score; `known` is the split of the graph that already has the triple."""

    label: str
    score: float
    share: float
    """The score as a number between 0 and 1: its probability by the model's own loss."""
    known: str | None


@dataclass(frozen=True)
class Edge:
    """A triple at an entity: from the graph, or (`known=None`) predicted."""

    relation: str
    other: str
    outgoing: bool
    share: float
    known: str | None


@dataclass(frozen=True)
class Question:
    """A multi-hop question that is put together by clicking: paths, how they are joined, and hops from the join."""

    paths: tuple[tuple[str, tuple[tuple[str, bool], ...]], ...] = ()
    join: str = "and"
    after: tuple[tuple[str, bool], ...] = ()
    joined: bool = False
    """Whether the next hop starts from what the paths have in common."""

    @property
    def hops(self) -> int:
        return sum(len(hops) for _, hops in self.paths) + len(self.after)

    def start(self, entity: str) -> Question:
        """Adds a path that starts at an entity."""
        if self.paths and not self.paths[-1][1]:
            raise ValueError("The last path has no relation yet: follow one first.")
        if len(self.paths) >= MAX_PATHS:
            raise ValueError(f"A question has at most {MAX_PATHS} paths.")
        if self.after:
            raise ValueError("The paths are joined already: clear the question to start another one.")
        return Question((*self.paths, (entity, ())), self.join)

    def follow(self, relation: str, backwards: bool = False) -> Question:
        """Adds a hop to the last path, or from the join of all."""
        if not self.paths:
            raise ValueError("Start from an entity first.")
        if self.hops >= MAX_HOPS:
            raise ValueError(f"A question has at most {MAX_HOPS} hops.")
        if self.joined:
            return Question(self.paths, self.join, (*self.after, (relation, backwards)), True)
        entity, hops = self.paths[-1]
        return Question((*self.paths[:-1], (entity, (*hops, (relation, backwards)))), self.join)

    def from_all(self) -> Question:
        """Lets the next hop start from the answers of all paths together."""
        if len(self.paths) < 2 or not self.paths[-1][1]:
            raise ValueError("There must be two or more paths, each with a relation, to continue from them together.")
        return Question(self.paths, self.join, self.after, True)

    def joined_by(self, join: str) -> Question:
        """Joins the paths by "and" or "or"."""
        return Question(self.paths, join, self.after, self.joined)

    def undo(self) -> Question:
        """Removes the last click."""
        if self.after:
            return Question(self.paths, self.join, self.after[:-1], True)
        if self.joined:
            return Question(self.paths, self.join)
        if not self.paths:
            return self
        entity, hops = self.paths[-1]
        paths = (*self.paths[:-1], (entity, hops[:-1])) if hops else self.paths[:-1]
        return Question(paths, self.join)

    def query(self) -> Query:
        """Returns the question as a query; raises ValueError if it is not complete."""
        if not self.paths or any(not hops for _, hops in self.paths):
            raise ValueError("The question is not complete: every path needs an entity and at least one relation.")
        parts: list[Query] = []
        for entity, hops in self.paths:
            step: Any = entity
            for relation, backwards in hops:
                step = Hop(step, relation, backwards)
            parts.append(step)
        query = parts[0] if len(parts) == 1 else (And if self.join == "and" else Or)(*parts)
        for relation, backwards in self.after:
            query = Hop(query, relation, backwards)
        return query


CHANGES: dict[str, Callable[..., Question]] = {
    "start": Question.start,
    "follow": Question.follow,
    "join": Question.joined_by,
    "together": Question.from_all,
    "undo": Question.undo,
    "clear": lambda question: Question(join=question.join),
    "ask": lambda question: question,
}


@dataclass(frozen=True)
class Clicks:
    """The clicks that put a question together, in the order in which they were made.

    Quick clicks are separate requests, which may arrive in a different order. So the browser numbers every click, and
    the question is built again from all of them whenever one arrives.
    """

    before: Question = Question()
    """The question as it was before the clicks in `recent`."""
    recent: tuple[tuple[int, str, tuple[Any, ...]], ...] = ()
    """Number, name (a key of `CHANGES`) and arguments of each click that a late one may still precede."""

    @property
    def next(self) -> int:
        return self.recent[-1][0] + 1 if self.recent else 1

    def add(self, number: int, name: str, *arguments: Any) -> Clicks:
        """Adds a click at the place of its number."""
        recent = sorted((*self.recent, (number, name, arguments)), key=lambda click: click[0])
        before = self.before
        while len(recent) > MAX_RECENT:
            before, _ = Clicks(before, (recent.pop(0),)).replay()
        return Clicks(before, tuple(recent))

    def replay(self) -> tuple[Question, str]:
        """Returns the question, and why the last click did not change it, if it was refused."""
        question, problem = self.before, ""
        for _, name, arguments in self.recent:
            problem = ""
            try:
                question = CHANGES[name](question, *arguments)
            except ValueError as error:
                problem = str(error)
        return question, problem

    def asked(self, number: int) -> Question | None:
        """Returns the question of the last "ask", if the click with this number is that "ask" or came before it."""
        asks = [one for one, name, _ in self.recent if name == "ask" and one >= number]
        if not asks:
            return None
        return Clicks(self.before, tuple(click for click in self.recent if click[0] <= asks[-1])).replay()[0]


@dataclass
class Graph:
    """The triples of a graph as ids, each with the number of its split."""

    triples: np.ndarray
    splits: np.ndarray

    def known(self, entity: int, relation: int, *, tails: bool) -> dict[int, str]:
        """Returns the entities that a question is already known to lead to, with their splits."""
        given, asked = (0, 2) if tails else (2, 0)
        rows = np.flatnonzero((self.triples[:, given] == entity) & (self.triples[:, 1] == relation))
        return {int(self.triples[row, asked]): SPLITS[self.splits[row]] for row in rows}

    def around(self, entity: int) -> np.ndarray:
        """Returns the rows with an entity as head or tail."""
        return np.flatnonzero((self.triples[:, 0] == entity) | (self.triples[:, 2] == entity))

    def save(self, path: Path) -> None:
        save_file({"triples": torch.from_numpy(self.triples), "splits": torch.from_numpy(self.splits)}, path)


def read_graph(source: Source, vocab: Any) -> Graph | None:
    """Returns the graph of a run: from its own file, or from its dataset if that is on this machine."""
    path = source.folder / GRAPH
    if path.is_file():
        tensors = load_file(path)
        graph = Graph(tensors["triples"].numpy(), tensors["splits"].numpy())
        entities, relations = graph.triples[:, [0, 2]], graph.triples[:, 1]
        if entities.max(initial=0) >= vocab.num_entities or relations.max(initial=0) >= vocab.num_relations:
            raise ValueError(f"{path} does not belong to the model: it has ids beyond its vocabulary.")
        return graph
    dataset = run_settings(source.folder).get("dataset")
    name = dataset.get("source") if isinstance(dataset, Mapping) else source.about.get("dataset")
    if not isinstance(name, str):
        return None
    from aswa_hf.kge import load_kg

    if not (name.startswith("countries") or Path(name).is_dir()):
        return None
    try:
        kg = load_kg(name)
    except (OSError, ValueError):
        return None
    if not kg.vocab.same_as(vocab):
        return None
    parts = [(kg.triples(split), number) for number, split in enumerate(SPLITS) if split in kg]
    triples = np.concatenate([part for part, _ in parts]).astype(np.int32)
    splits = np.concatenate([np.full(len(part), number, dtype=np.uint8) for part, number in parts])
    return Graph(triples, splits)


@dataclass
class _Loaded:
    predictor: LinkPredictor
    graph: Graph | None
    folded: dict[str, list[str]] = field(default_factory=dict)


class Links:
    """A link predictor that answers questions by label."""

    def __init__(self, source: Source):
        self.source = source
        files = [source.folder / name for name in (WEIGHTS, CONFIG, "entities.json", "relations.json")]
        self._loaded = Reloading(self._load, files)

    def _load(self) -> _Loaded:
        predictor = LinkPredictor.from_pretrained(self.source.folder)
        in_memory(predictor.model)
        vocab = predictor.vocab
        folded = {
            "entity": [label.casefold() for label in vocab.entities],
            "relation": [label.casefold() for label in vocab.relations],
        }
        return _Loaded(predictor, read_graph(self.source, vocab), folded)

    @property
    def predictor(self) -> LinkPredictor:
        return self._loaded.get().predictor

    @property
    def graph(self) -> Graph | None:
        return self._loaded.get().graph

    @property
    def relations(self) -> list[str]:
        return self.predictor.vocab.relations

    @cached_property
    def first(self) -> tuple[str, str]:
        """An entity and a relation to begin with: the head of the first test triple, if there is a graph."""
        loaded = self._loaded.get()
        vocab = loaded.predictor.vocab
        if loaded.graph is None or not len(loaded.graph.triples):
            return vocab.entities[0], vocab.relations[0]
        row = int(np.argmax(loaded.graph.splits))
        head, relation, _ = loaded.graph.triples[row]
        return vocab.entities[head], vocab.relations[relation]

    def complete(self, text: str, what: str = "entity", limit: int = 20) -> list[str]:
        """Returns labels that contain a text: first those that begin with it, then shorter before longer ones."""
        loaded = self._loaded.get()
        labels = getattr(loaded.predictor.vocab, "entities" if what == "entity" else "relations")
        wanted = str(text or "")[:MAX_LABEL].strip().casefold()
        folded = loaded.folded[what]
        if not wanted:
            return list(labels[:limit])
        found = [i for i, label in enumerate(folded) if wanted in label]
        if not found and " " in wanted:
            found = [i for i, label in enumerate(folded) if wanted.replace(" ", "_") in label]
        found.sort(key=lambda i: (not folded[i].startswith(wanted), len(folded[i]), folded[i]))
        return [labels[i] for i in found[:limit]]

    def check_label(self, text: Any, what: str) -> str:
        """Returns a label; raises ValueError with suggestions if it is unknown."""
        label = str(text or "").strip()
        if not label:
            raise ValueError(f"Choose {'an entity' if what == 'entity' else 'a relation'} first.")
        if len(label) > MAX_LABEL:
            raise ValueError(f"The text has {len(label):,} characters, more than any label of this model.")
        loaded = self._loaded.get()
        known = getattr(loaded.predictor.vocab, "entities" if what == "entity" else "relations")
        position = loaded.predictor.vocab._entity_index if what == "entity" else loaded.predictor.vocab._relation_index
        if label in position.positions:
            return label
        near = self.complete(label, what, 3) or self.complete(label[:3], what, 3) or known[:3]
        raise ValueError(f"There is no {what} {label!r} in this model. It has, for example, {', '.join(near)}.")

    @torch.no_grad()
    def ask(self, entity: Any, relation: Any, asked: str = "tail", k: int = 10) -> list[Answer]:
        """Returns the `k` best tails of (entity, relation, ?), or heads of (?, relation, entity)."""
        entity, relation = self.check_label(entity, "entity"), self.check_label(relation, "relation")
        loaded = self._loaded.get()
        predictor, graph = loaded.predictor, loaded.graph
        ids = predictor.vocab.entity_ids([entity]), predictor.vocab.relation_ids([relation])
        scores = predictor.score_all(*ids, asked)[0].float()
        if not scores.isfinite().all():
            raise ValueError("The scores of the model are not finite numbers: its weights have diverged.")
        known = {} if graph is None else graph.known(int(ids[0][0]), int(ids[1][0]), tails=asked == "tail")
        best = scores.topk(min(k, len(scores)))
        shares = self._shares(predictor, scores)[best.indices]
        names = predictor.vocab.entities
        return [
            Answer(names[i], score, share, known.get(i))
            for i, score, share in zip(best.indices.tolist(), best.values.tolist(), shares.tolist(), strict=True)
        ]

    def _shares(self, predictor: LinkPredictor, scores: torch.Tensor) -> torch.Tensor:
        """Scores as probabilities, by the loss that the model was trained with."""
        loss = getattr(predictor.model.config, "loss", None) or "binary"
        return scores.softmax(-1) if str(loss).startswith("softmax") else scores.sigmoid()

    def chains(self, question: Question | str, k: int = 10, beam: int = 10) -> list[dict[str, Any]]:
        """Returns the best answers to a multi-hop question: label, truth value, and the steps that lead to it."""
        query = Query.parse(question) if isinstance(question, str) else question.query()
        for kind, label in query.labels():
            self.check_label(label, "entity" if kind == "entity" else "relation")
        table = answer_query(self.predictor, query, k, beam=beam, chains=True)
        return [
            {"label": row.answer, "truth": float(row.score), "chain": list(row.chain)} for row in table.itertuples()
        ]

    @torch.no_grad()
    def neighborhood(self, entity: Any, known: int = 8, predicted: int = 4) -> list[Edge]:
        """Returns triples at an entity: some of the graph, of as many relations as possible, then predicted ones."""
        entity = self.check_label(entity, "entity")
        loaded = self._loaded.get()
        predictor, graph = loaded.predictor, loaded.graph
        vocab = predictor.vocab
        own = vocab.entity_id(entity)
        edges: list[Edge] = []
        relations: list[int] = list(range(min(vocab.num_relations, 20)))
        if graph is not None:
            rows = graph.around(own)
            by_relation: dict[tuple[int, bool], list[int]] = {}
            seen: set[tuple[int, int]] = set()  # of two triples in opposite directions one is shown
            for row in rows:
                head, relation, tail = (int(value) for value in graph.triples[row])
                if (relation, tail if head == own else head) not in seen:
                    by_relation.setdefault((relation, head == own), []).append(int(row))
                seen.add((relation, tail if head == own else head))
            picked: list[int] = []
            while len(picked) < known and any(by_relation.values()):
                for some in by_relation.values():
                    if some and len(picked) < known:
                        picked.append(some.pop(0))
            for row in picked:
                head, relation, tail = (int(value) for value in graph.triples[row])
                outgoing = head == own
                split = SPLITS[graph.splits[row]]
                edges.append(
                    Edge(vocab.relations[relation], vocab.entities[tail if outgoing else head], outgoing, 1.0, split)
                )
            relations = sorted({relation for relation, outgoing in by_relation if outgoing}) or relations
        candidates: list[Edge] = []
        for relation in relations[:20]:
            ids = np.array([own]), np.array([relation])
            scores = predictor.score_all(*ids, "tail")[0].float()
            shares = self._shares(predictor, scores)
            taken = {own} | (set() if graph is None else set(graph.known(own, relation, tails=True)))
            best = shares.topk(min(len(taken) + 2, len(shares)))
            for i, share in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                if i not in taken:
                    candidates.append(Edge(vocab.relations[relation], vocab.entities[i], True, share, None))
        candidates.sort(key=lambda edge: -edge.share)
        return edges + candidates[:predicted]


def question_text(question: Question) -> str:
    """Returns a question in words, for readers and screen readers."""
    if not question.paths:
        return "Nothing chosen yet."

    def hops(steps: Sequence[tuple[str, bool]]) -> str:
        return "".join(f" —{'(backwards) ' * back}{relation}→ ?" for relation, back in steps)

    paths = f" {question.join} ".join(f"{entity}{hops(steps)}" for entity, steps in question.paths)
    if question.joined:
        return f"( {paths} ){hops(question.after)}"
    return paths
