"""Link predictors whose entity table is spread over processes: the same weights, losses and ranks as on one.

    model = shard_entities(Keci(config))          # keeps the rows of this process
    model = build_sharded(config, seed=0)         # no process ever holds the whole table
    model = load_sharded("folder")

Relations, and TuckER's core, are on every process.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from aswa_hf._utils.distributed import broadcast_from_rank_0, rank, succeeding_together, world_size
from aswa_hf._utils.fingerprints import fingerprint
from aswa_hf.kge.configuration_kge import KGEConfig
from aswa_hf.kge.graph import TailsByQuery
from aswa_hf.kge.modeling_kge import KGEModel, KGEOutput, loss_over_entities
from aswa_hf.kge.sharded.files import read_rows, save_without_weights, write_whole
from aswa_hf.kge.sharded.ranking import pairs, queries_at_a_time, ranks_on_shards, refuse_other_graph
from aswa_hf.kge.sharded.sampling import sampled_loss
from aswa_hf.kge.sharded.table import EntityShard, SumOfGradients, SumOfParts, refuse_differences

if TYPE_CHECKING:
    from aswa_hf.kge.data import KnowledgeGraph

TABLE = "entity_embeddings"
# The prefix of the names of sharded classes.
PREFIX = "Sharded"
_SAME_GRAPH = "All processes must load the same graph, and build the same model."
_SAME_BATCHES = (
    "All processes must work on the same batches: give each the same data, the same seed and a loader that is not "
    "divided among processes."
)


class ShardedKGE(KGEModel):
    """What a link predictor does differently if its entities are sharded; all processes must make the same calls.

    A sharded model is an instance of this class and of its scorer's.
    """

    entity_embeddings: EntityShard  # type: ignore[assignment]
    accepts_loss_kwargs = False  # the Trainer would see `**options` of `forward` as a place for its own

    def _loss_over_all(
        self, queries: Tensor, labels: Tensor, offsets: Tensor | None, smoothing: float, measured: bool
    ) -> Tensor:
        shard = self.entity_embeddings
        queries = SumOfGradients.apply(queries)
        part = loss_over_entities(
            queries, shard.weight, labels, offsets, smoothing, measured, self.config.loss, shard=shard
        )
        loss: Tensor = SumOfParts.apply(part)
        return loss

    def forward(
        self,
        heads: Tensor,
        relations: Tensor,
        *inputs: Any,
        sent: Tensor | None = None,
        weights: Tensor | None = None,
        **options: Any,
    ) -> KGEOutput:
        """Scores or, with labels, the training loss, on every process; the arguments are those of `KGEModel.forward`.

        With `sent` and `weights`, the loss of a batch of `BalancedBatches`, of which each process has another part.
        """
        if sent is not None and weights is not None:
            return KGEOutput(loss=sampled_loss(self, heads, relations, sent, weights))
        return super().forward(heads, relations, *inputs, **options)

    def _check_batch(
        self, heads: Tensor, relations: Tensor, tails: Tensor | None, labels: Tensor | None, *others: Tensor | None
    ) -> None:
        if labels is not None and labels.dim() == 2 and tails is None:
            raise ValueError(
                f"A matrix of labels of all {self.config.num_entities:,} entities is not supported with sharded "
                "entities. Pass the true tails as labels, with label_offsets."
            )
        given = [tensor for tensor in (heads, relations, tails, labels, *others) if tensor is not None]
        numbers = {"the number of queries in a batch": len(given[0])}
        numbers["the content of a batch"] = _checksum(given)
        if self.training and any(isinstance(m, nn.Dropout) and m.p for m in self.modules()):
            device = self.entity_embeddings.weight.device
            state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
            numbers["their random state, which dropout needs"] = _checksum([state])
        refuse_differences(numbers, given[0].device, _SAME_BATCHES)

    def score_tails(self, heads: Tensor, relations: Tensor) -> Tensor:
        """The scores (B, |E|) of all entities as tails, gathered on every process."""
        shard = self.entity_embeddings
        return shard.gather_columns(self.query(heads, relations) @ shard.weight.T)

    def score_heads(self, relations: Tensor, tails: Tensor) -> Tensor:
        """The scores (B, |E|) of all entities as heads, gathered on every process."""
        _require_inverses(self.config)
        return super().score_heads(relations, tails)

    def prepare_ranking(self, kg: KnowledgeGraph, split: str, *queries: TailsByQuery) -> int:
        """Checks that all processes rank the same triples; returns how many queries to rank at a time."""
        refuse_other_graph(self.entity_embeddings, kg, split, *queries)
        return queries_at_a_time(self.entity_embeddings)

    def filtered_ranks(self, heads: Tensor, relations: Tensor, *answers: np.ndarray) -> Tensor:
        """The ranks of the targets of queries; `answers` are targets and known tails, each with offsets."""
        return ranks_on_shards(self.entity_embeddings, self.query(heads, relations), *answers)

    def save_pretrained(self, save_directory: Any, *_args: Any, push_to_hub: bool = False, **_options: Any) -> None:
        """Saves an ordinary model, which a plain `from_pretrained` loads; all processes must call it.

        No process holds the whole table. Only rank 0 writes.
        """
        if push_to_hub:
            raise ValueError(
                "A sharded model is pushed from its folder: save it, then run `aswa-hf push FOLDER REPO`."
            )
        folder = Path(save_directory)
        others = {name: tensor for name, tensor in self.state_dict().items() if not name.startswith(TABLE)}
        with succeeding_together(self.entity_embeddings.weight.device):
            if rank() == 0:
                save_without_weights(_with_one_entity(self.config), folder)
        write_whole(folder / "model.safetensors", f"{TABLE}.weight", self.entity_embeddings, others)

    def best_tails(
        self,
        heads: Tensor,
        relations: Tensor,
        k: int,
        excluded: Sequence[np.ndarray] | None = None,
        allowed: np.ndarray | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The scores of the `k` best tails and their ids, on every process: the best of each shard, merged.

        `excluded` are ids for each query, `allowed` for all; excluded answers have the score −∞.
        """
        shard = self.entity_embeddings
        scores = self.query(heads, relations) @ shard.weight.T
        if excluded is not None:
            offsets = np.cumsum([0, *map(len, excluded)])
            scores[shard.own(*pairs(offsets, np.concatenate(excluded), scores.device))] = -torch.inf
        if allowed is not None:
            ids = torch.from_numpy(allowed).to(scores.device)
            kept = torch.zeros(scores.shape[1], dtype=torch.bool, device=scores.device)
            kept[shard.own(ids, ids)[1]] = True
            scores.masked_fill_(~kept, -torch.inf)
        values, places = scores.topk(min(k, scores.shape[1]), dim=1)
        return shard.merge_best(values, places, k, largest=True)

    def set_input_embeddings(self, value: nn.Module) -> None:
        raise ValueError("The entity table of a sharded model cannot be replaced. Shard the model after that.")


def shard_entities(model: KGEModel, *, sparse: bool = False) -> KGEModel:
    """Replaces the entity table of a model by the rows of this process; the model is changed and returned.

    All processes must hold the same weights. Build the optimizer and the strategies afterwards. Without a process
    group the model keeps all rows.
    """
    if isinstance(model, ShardedKGE):
        raise ValueError("The entities of this model are sharded already.")
    whole = model.entity_embeddings.weight
    if not whole.is_meta:
        refuse_differences(
            {"the weights of the model": _checksum(model.parameters())},
            whole.device,
            "Build or load the same model on every process, with the same seed, before sharding it.",
        )
    shard = _with_shard(model, sparse=sparse, dtype=whole.dtype, device=whole.device)
    with torch.no_grad():
        shard.weight.copy_(whole[shard.start : shard.stop])
    return model


def build_sharded(
    config: KGEConfig, *, seed: int = 0, sparse: bool = False, filled: bool = True, device: Any = None
) -> KGEModel:
    """A new model of which this process only ever holds its rows; `seed` alone determines the entity table.

    Relations are drawn from the global generator, and are rank 0's on every process. With `filled=False` the entities
    have no values yet, for a checkpoint to be loaded.
    """
    model: KGEModel = _with_one_entity(config).to(device)
    shard = _with_shard(model, sparse=sparse, device=model.entity_embeddings.weight.device)
    if filled:
        shard.fill(config.initializer, config.initializer_range, seed)
    broadcast_from_rank_0(p.data for name, p in model.named_parameters() if not name.startswith(TABLE))
    return model


def load_sharded(folder: str | os.PathLike[str], *, sparse: bool = False, device: Any = None) -> KGEModel:
    """The model in a folder; each process reads its rows of the table only. The files may be of a plain model."""
    path = Path(folder)
    config = KGEConfig.from_pretrained(path)
    model: KGEModel = _with_one_entity(config).to(device)
    shard = _with_shard(model, sparse=sparse, device=model.entity_embeddings.weight.device)
    with succeeding_together(shard.weight.device, (OSError, ValueError)), torch.no_grad():
        for name, parameter in model.named_parameters():
            rows, shape = slice(0, len(parameter)), tuple(parameter.shape)
            if parameter is shard.weight:
                rows, shape = slice(shard.start, shard.stop), (shard.num_rows, *shape[1:])
            for place, found in read_rows(path, name, shape, rows):
                if not found.isfinite().all():
                    raise ValueError(f"{path}: {name!r} holds NaN or infinite numbers. Expected finite ones.")
                parameter[place] = found
    return model


def _with_one_entity(config: KGEConfig) -> KGEModel:
    """A plain model of a configuration, with a table of one entity."""
    small = copy.deepcopy(config)
    small.num_entities = 1
    model: KGEModel = KGEModel(small)
    config.scorer = small.scorer
    model.config = copy.deepcopy(config)
    return model


def _with_shard(model: KGEModel, **kind: Any) -> EntityShard:
    """Makes a model a sharded one, with a table whose rows are not set yet."""
    config = model.config
    _require_inverses(config)
    if kind["device"].type != "meta":
        numbers = {f"the number of {what}": getattr(config, f"num_{what}") for what in ("entities", "relations")}
        refuse_differences(numbers | {"dim": config.dim}, kind["device"], _SAME_GRAPH)
    if config.entity_dropout and world_size() > 1:
        raise ValueError(
            f"entity_dropout={config.entity_dropout} is not supported with sharded entities: it draws numbers for the "
            "whole table. Use input_dropout or query_dropout."
        )
    shard = EntityShard(config.num_entities, config.dim, **kind)
    model.entity_embeddings = shard  # type: ignore[assignment]
    kinds = (ShardedKGE, type(model))
    model.__class__ = type(PREFIX + type(model).__name__, kinds, {"__module__": __name__})
    # DistributedDataParallel keeps copies in step, and this is not a copy: it averages the gradients of the others.
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [f"{TABLE}.weight"])
    return shard


def _require_inverses(config: KGEConfig) -> None:
    if not config.inverse_relations:
        raise ValueError(
            "Sharded entities need inverse_relations=True: without them, predicting heads takes a query for every "
            "entity."
        )


def _checksum(tensors: Any) -> int:
    """Returns a number for the content of tensors; different contents practically always have different numbers."""
    return hash(fingerprint(tensor.detach() for tensor in tensors)) >> 1  # −n must fit too
