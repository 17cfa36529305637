"""`LinkPredictor`: predictions of a trained link predictor, by label."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils import cached_file

from aswa_hf._utils.checks import check_whole_number
from aswa_hf._utils.files import refuse_mistyped
from aswa_hf._utils.paths import check_inside
from aswa_hf._utils.pretrained import check_fractions
from aswa_hf._utils.tensors import read_header
from aswa_hf.hub_requests import bounded_requests
from aswa_hf.kge.configuration_kge import KGEConfig
from aswa_hf.kge.modeling_kge import KGEModel
from aswa_hf.kge.vocab import FILES, KEYS, KGVocab, take_labels
from aswa_hf.run_folder import CONFIG, WEIGHTS, check_unchanged, checkpoints, read_config

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

    from aswa_hf.kge.data import KnowledgeGraph

Labels = str | Sequence[str]


class LinkPredictor:
    """A model with its vocabulary and, optionally, the graph whose triples are already known.

    >>> predictor = LinkPredictor.from_pretrained("me/countries-complex-aswa")
    >>> predictor.predict(head="france", relation="locatedin", k=3)
    """

    def __init__(self, model: KGEModel, vocab: KGVocab, kg: KnowledgeGraph | None = None):
        sizes = model.config.num_entities, model.config.num_relations
        if sizes != (vocab.num_entities, vocab.num_relations):
            raise ValueError(
                f"The model has {sizes[0]} entities and {sizes[1]} relations, the vocabulary {vocab.num_entities} and "
                f"{vocab.num_relations}: they do not belong together."
            )
        if kg is not None and not kg.vocab.same_as(vocab):
            raise ValueError("The graph does not have the entities and relations that the model was trained on.")
        self.model: KGEModel = model.eval()
        self.vocab = vocab
        self.kg = kg

    @classmethod
    def from_pretrained(cls, path_or_repo: Any, *, kg: KnowledgeGraph | None = None, **options: Any) -> LinkPredictor:
        """Loads model and vocabulary from a folder or a Hub repository (`revision=`, `token=`, …)."""
        refuse_mistyped(path_or_repo)
        with bounded_requests():
            return cls(*cls._load(path_or_repo, options), kg)

    @staticmethod
    def _load(path_or_repo: Any, options: dict[str, Any]) -> tuple[KGEModel, KGVocab]:
        if Path(path_or_repo).is_dir():
            check_inside(Path(path_or_repo))
        try:
            config = cached_file(path_or_repo, CONFIG, **options)
            if config is None:
                raise FileNotFoundError(f"there is no {CONFIG} in it")
            about = read_config(Path(config))
            kind = about.get("model_type") or about.get("architecture")
            if kind != KGEConfig.model_type:
                raise ValueError(
                    f"{path_or_repo} contains a model of type {kind!r}, not a link predictor. Expected a folder or "
                    "repository with a knowledge-graph embedding, such as `aswa-hf train kge` writes."
                )
            if about.get("scorer") == "keci" and (lost := {"p", "q"} - about.keys()):
                # Another algebra has embeddings of the same size.
                raise ValueError(f"{config} has no {min(lost)!r}, which the scores of Keci depend on.")
            if (weights := Path(path_or_repo) / WEIGHTS).is_file():
                read_header(weights)  # names the damaged file and tensor
            model = KGEModel.from_pretrained(path_or_repo, **options)
            check_fractions(model, Path(config).parent)
        except OSError as error:
            if Path(path_or_repo).is_dir() and (found := checkpoints(path_or_repo)):
                raise OSError(
                    f"The run in {path_or_repo} was not finished. Resume it with --resume, or give one of its "
                    f"checkpoints, such as {found[-1]}. ({error})"
                ) from error
            raise OSError(
                f"Found no link predictor at {str(path_or_repo)!r}: neither a folder with a saved model nor a Hub "
                f"repository ({error})"
            ) from error
        vocab = KGVocab.from_pretrained(path_or_repo, **options)
        check_unchanged(Path(path_or_repo), CONFIG, "*.safetensors*", *FILES.values(), KEYS)
        return model, vocab

    @torch.no_grad()
    def predict(
        self,
        head: Labels | None = None,
        relation: Labels | None = None,
        tail: Labels | None = None,
        *,
        k: int = 10,
        candidates: Sequence[str] | None = None,
        exclude_known: bool = False,
    ) -> pd.DataFrame:
        """The `k` best tails of (head, relation, ?) or heads of (?, relation, tail), with their scores.

        Lists ask several questions at once; a single label beside a list is combined with each of its elements.
        `candidates` limits the answers to these entities, `exclude_known` leaves out answers that the graph contains.
        """
        if relation is None or (head is None) == (tail is None):
            raise ValueError("Give head= and relation= to predict tails, or relation= and tail= to predict heads.")
        check_whole_number("k", k)
        target = "tail" if tail is None else "head"
        given, relations = _broadcast(head if tail is None else tail, relation)  # type: ignore[arg-type]
        entity_ids, relation_ids = self.vocab.entity_ids(given), self.vocab.relation_ids(relations)

        known = self._known(entity_ids, relation_ids, target) if exclude_known else None
        allowed = None if candidates is None else np.unique(self.vocab.entity_ids(candidates))
        k = min(k, self.vocab.num_entities if allowed is None else len(allowed))
        if hasattr(self.model, "best_tails"):  # of entities that are spread over processes
            inverse = self.model.config.num_relations * (target == "head")
            queries = self._tensors(entity_ids, relation_ids + inverse)
            values, answers = self.model.best_tails(*queries, k, known, allowed)
            _finite(values.masked_fill(values == -torch.inf, 0))
        else:
            scores = _finite(self.score_all(entity_ids, relation_ids, target)).clone()
            for row, answers in enumerate(known or ()):
                scores[row, torch.from_numpy(answers).to(scores.device)] = -torch.inf
            values, answers = (scores if allowed is None else scores[:, allowed]).topk(k, dim=1)
            if allowed is not None:
                answers = torch.from_numpy(allowed)[answers.cpu()]
        return self._table(entity_ids, relation_ids, target, answers.cpu().numpy(), values.cpu().numpy())

    @torch.no_grad()
    def score(self, head: Labels, relation: Labels, tail: Labels) -> Any:
        """The score of a triple; of several, given as lists, an array. Greater means more likely true."""
        heads, relations, tails = _broadcast(head, relation, tail)
        ids = self.vocab.entity_ids(heads), self.vocab.relation_ids(relations), self.vocab.entity_ids(tails)
        scores = _finite(self.model.score(*self._tensors(*ids))).cpu().numpy()
        return scores if any(not isinstance(x, str) for x in (head, relation, tail)) else float(scores[0])

    @torch.no_grad()
    def nearest(self, entity: str, k: int = 10) -> pd.DataFrame:
        """The `k` entities with the most similar embeddings, by cosine similarity."""
        import pandas as pd

        check_whole_number("k", k)
        module: Any = self.model.entity_embeddings
        own = self.vocab.entity_id(entity)
        given = module(torch.tensor([own], device=module.weight.device))
        similarities = torch.nn.functional.cosine_similarity(module.weight, given)
        first = getattr(module, "start", 0)  # of the entities that this process holds
        if first <= own < first + len(similarities):
            similarities[own - first] = -torch.inf
        k = min(k, self.vocab.num_entities - 1)
        found = similarities.unsqueeze(0).topk(min(k, len(similarities)), dim=1)
        values, ids = found if not hasattr(module, "merge_best") else module.merge_best(*found, k, largest=True)
        labels = [self.vocab.entities[i] for i in ids[0].tolist()]
        return pd.DataFrame({"entity": labels, "similarity": _finite(values)[0].cpu().numpy()})

    def score_all(self, entities: np.ndarray, relations: np.ndarray, target: str) -> Tensor:
        """The scores of all entities as "tail" or as "head", one row for each pair of ids."""
        if target == "tail":
            return self.model.score_tails(*self._tensors(entities, relations))
        return self.model.score_heads(*self._tensors(relations, entities))

    def _known(self, entities: np.ndarray, relations: np.ndarray, target: str) -> list[np.ndarray]:
        """The answers of each question that the graph contains."""
        if self.kg is None:
            raise ValueError("exclude_known=True needs the known triples: build the predictor with kg=load_kg(…).")
        triples = np.concatenate([self.kg.triples(split) for split in self.kg])
        given, answer = (0, 2) if target == "tail" else (2, 0)
        return [
            triples[(triples[:, given] == entity) & (triples[:, 1] == relation), answer]
            for entity, relation in zip(entities, relations, strict=True)
        ]

    def _tensors(self, *arrays: np.ndarray) -> list[Tensor]:
        device = self.model.entity_embeddings.weight.device
        return [torch.from_numpy(array).to(device) for array in arrays]

    def _table(
        self, given: np.ndarray, relations: np.ndarray, target: str, answers: np.ndarray, scores: np.ndarray
    ) -> pd.DataFrame:
        import pandas as pd

        labels = self.vocab.entities
        rows, columns = answers.shape
        table = {
            "head" if target == "tail" else "tail": np.repeat(take_labels(labels, given), columns),
            "relation": np.repeat(take_labels(self.vocab.relations, relations), columns),
            target: take_labels(labels, answers.ravel()),
            "score": scores.ravel(),
            "rank": np.tile(np.arange(1, columns + 1), rows),
        }
        frame = pd.DataFrame({name: table[name] for name in ("head", "relation", "tail", "score", "rank")})
        # Excluded answers are not returned, even if fewer than k are left.
        return frame[np.isfinite(frame["score"])].reset_index(drop=True)


def _broadcast(*labels: Labels) -> list[list[str]]:
    """Lists of the same length; a single label is repeated."""
    for x in labels:
        if not isinstance(x, Iterable):
            raise TypeError(f"Expected a label or a list of labels, got {x!r}.")
    lists = [x if isinstance(x, str) else list(x) for x in labels]
    lengths = {len(x) for x in lists if not isinstance(x, str)}
    if len(lengths) > 1:
        raise ValueError(f"The lists of a question must have the same length, got {sorted(lengths)}.")
    length = lengths.pop() if lengths else 1
    return [[x] * length if isinstance(x, str) else x for x in lists]


def _finite(numbers: Tensor) -> Tensor:
    """The numbers in at least float32, which numpy supports; raises ValueError if the model has diverged."""
    if not numbers.isfinite().all():
        raise ValueError(
            "The scores of the model are not finite numbers: its weights have diverged. Train it again with a smaller "
            "learning rate."
        )
    return numbers.to(torch.promote_types(numbers.dtype, torch.float32))
