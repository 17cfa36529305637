"""What the ranks of a run with sharded entities do in the tests, started by `fsdp_run.Processes`; most return what
their rank saw. Called in the tests' own process, they are the run on one process that the others are compared with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kge_graphs import random_graph
from torch.utils.data import DataLoader

from aswa_hf._utils.distributed import rank, world_size
from aswa_hf.kge import KGEModel, modeling_kge
from aswa_hf.kge.data import KnowledgeGraph, load_kg
from aswa_hf.kge.optimizers import RowwiseAdagrad
from aswa_hf.kge.sharded import shard_entities
from aswa_hf.kge.training import training_examples

OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "adagrad-rowwise": lambda parameters: RowwiseAdagrad(parameters, lr=0.1),
}


def graph(folder: Path) -> KnowledgeGraph:
    """A graph whose entities no small number of processes divides; the tests write it before the ranks read it."""
    return load_kg(folder / "graph") if (folder / "graph").exists() else random_graph(folder / "graph", entities=13)


def make(kg: KnowledgeGraph, scorer: str = "keci", dtype: torch.dtype = torch.float64, **options: Any) -> KGEModel:
    """A model with the same weights on every process; sharded if there are several."""
    torch.manual_seed(0)
    model = KGEModel(kg.config(scorer=scorer, dim=8, **options)).to(dtype)
    return shard_entities(model) if dist.is_initialized() else model


def whole(model: KGEModel) -> dict[str, Any]:
    """All weights of a model as lists, the same on every rank."""
    shard = model.entity_embeddings
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if dist.is_initialized():
        found = {name: t for name, t in found.items() if not name.startswith("entity")}
        found["entity_embeddings.weight"] = shard.gather_columns(shard.weight.detach().T.contiguous()).T
    return {name: tensor.tolist() for name, tensor in sorted(found.items())}


def several(folder: Path, jobs: dict[str, dict[str, Any]], kind: str = "train") -> dict[str, Any]:
    """The results of several jobs by name, one after the other in the same processes."""
    modeling_kge.CHUNK_ON_CPU = 60  # numbers: more blocks than one, of queries and of entities
    return {name: globals()[kind](folder, **options) for name, options in jobs.items()}


def train(
    folder: Path,
    *,
    optimizer: str = "adam",
    scheme: str = "kvsall",
    epochs: int = 3,
    scorer: str = "keci",
    shared: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """The losses of a short run, and its weights."""
    kg = graph(folder)
    model = make(kg, scorer, **options)
    steps = OPTIMIZERS[optimizer](model.parameters())
    examples = training_examples(kg, scheme, inverses=True, negatives=5, shared_negatives=shared)
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(examples, 16, shuffle=True, collate_fn=lambda batch: batch, generator=generator)
    torch.manual_seed(2)
    losses = []
    for _ in range(epochs):
        for batch in loader:
            steps.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            steps.step()
            losses.append(loss.item())
    rows = len(model.entity_embeddings.weight)
    return {"losses": losses, "weights": whole(model), "rows": rows, "rank": rank(), "world": world_size()}
