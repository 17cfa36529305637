"""What the ranks of a run with sharded entities do in the tests, started by `fsdp_run.Processes`; most return what
their rank saw. Called in the tests' own process, they are the run on one process that the others are compared with.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from kge_graphs import random_graph
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from aswa_hf import ASWA
from aswa_hf._utils import shard_files
from aswa_hf._utils.distributed import rank, world_size
from aswa_hf._utils.sharding import RowSharded
from aswa_hf._utils.training_state import load_weights, save_training
from aswa_hf.experiments.kge import train_kge
from aswa_hf.experiments.settings import KGERun
from aswa_hf.kge import KGEConfig, KGEModel, LinkPredictor, answer_query, evaluate_link_prediction, modeling_kge
from aswa_hf.kge.data import KnowledgeGraph, load_kg
from aswa_hf.kge.optimizers import RowwiseAdagrad
from aswa_hf.kge.queries.ranking import evaluate_queries
from aswa_hf.kge.queries.sampling import generate_queries
from aswa_hf.kge.ranking import rank_triples
from aswa_hf.kge.sharded import BalancedBatches, build_sharded, files, load_sharded, shard_entities
from aswa_hf.kge.sharded import ranking as sharded_ranking
from aswa_hf.kge.training import training_examples
from aswa_hf.loop import fit

OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "adagrad-rowwise": lambda parameters: RowwiseAdagrad(parameters, lr=0.1),
}


def graph(folder: Path) -> KnowledgeGraph:
    """A graph whose entities no small number of processes divides; the tests write it before the ranks read it."""
    return load_kg(folder / "graph") if (folder / "graph").exists() else random_graph(folder / "graph", entities=13)


def make(kg: KnowledgeGraph, scorer: str = "keci", values: int = 0, **options: Any) -> KGEModel:
    """A model with the same weights on every process, sharded if there are several; `values` bounds whole numbers."""
    torch.manual_seed(0)
    model = KGEModel(kg.config(scorer=scorer, dim=8, **options)).double()
    for parameter in model.parameters() if values else ():
        parameter.data.copy_(torch.randint(-values, values + 1, parameter.shape))
    return shard_entities(model) if dist.is_initialized() else model


def whole(model: KGEModel) -> dict[str, Any]:
    """All weights of a model as lists, the same on every rank."""
    shard = model.entity_embeddings
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if dist.is_initialized():
        found = {name: t for name, t in found.items() if not name.startswith("entity")}
        found["entity_embeddings.weight"] = shard.gather_columns(shard.weight.detach().T.contiguous()).T
    return {name: tensor.tolist() for name, tensor in sorted(found.items())}


def assert_near(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-10) -> None:
    """Nested dicts of lists of numbers are equal up to rounding."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_near(found[key], value, tolerance)
        else:
            torch.testing.assert_close(
                torch.tensor(found[key]).double(), torch.tensor(value).double(), rtol=0, atol=tolerance
            )


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


def real_graph(
    folder: Path,
    data: str,
    name: str,
    *,
    dtype: str = "float32",
    dim: int = 32,
    optimizer: str = "adam",
    lr: float = 0.02,
    epochs: int = 3,
    weights: str | None = None,
) -> dict[str, Any]:
    """A run on a published graph, with a decision after every epoch; rank 0 writes its weights to `name`.

    Also the ranks of the test triples by the weights in `weights`, in float64: the order of sums decides nothing.
    """
    signal.alarm(0)  # it takes longer than the others
    kg = load_kg(data)
    torch.manual_seed(0)
    model = KGEModel(kg.config(scorer="complex", dim=dim)).to(getattr(torch, dtype))
    if dist.is_initialized():
        shard_entities(model)
    kinds = {"adam": torch.optim.Adam, "adagrad-rowwise": RowwiseAdagrad}
    steps, aswa = kinds[optimizer](model.parameters(), lr=lr), ASWA(model)
    examples = training_examples(kg, "kvsall", inverses=True)
    losses = []
    for epoch in range(epochs):
        order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(1024):
            steps.zero_grad()
            loss = model(**examples.__getitems__(batch.tolist())).loss
            loss.backward()
            steps.step()
            losses.append(loss.item())
        aswa.update(lambda: evaluate_link_prediction(model, kg, "validation")["mrr"])
    rows = len(model.entity_embeddings.weight)
    found = {"losses": losses, "rows": rows, "decisions": [one["decision"] for one in aswa.trajectory.to_json()]}
    table = model.entity_embeddings.weight.detach()
    if dist.is_initialized():
        table = model.entity_embeddings.gather_columns(table.T.contiguous()).T
    if rank() == 0:
        named = {"entities": table.contiguous(), "relations": model.relation_embeddings.weight.detach()}
        save_file(named, folder / f"{name}.safetensors")
    given = load_file(folder / f"{weights or name}.safetensors")
    model = KGEModel(kg.config(scorer="complex", dim=dim)).double()
    model.entity_embeddings.weight.data.copy_(given["entities"])
    model.relation_embeddings.weight.data.copy_(given["relations"])
    if dist.is_initialized():
        shard_entities(model)
    return found | {"ranks": sorted(rank_triples(model, kg, "test").tolist())}


def rank_all(
    folder: Path, *, values: int = 0, queries: int | None = None, scores: int | None = None, broken: bool = False
) -> dict[str, Any]:
    """The sorted ranks of the test triples and the metrics; embeddings of few whole numbers have many ties."""
    kg = graph(folder)
    model = make(kg, "complex", values)
    if broken and rank() == world_size() - 1:
        model.entity_embeddings.weight.data[-1, 0] = torch.nan
    if scores is not None:
        sharded_ranking.SCORES_ON_CPU, sharded_ranking.FEWEST_QUERIES = scores, 3
    ranks = rank_triples(model, kg, "test", queries)
    found = {"ranks": ["nan" if r != r else r for r in ranks.tolist()]}
    return found if broken else found | {"metrics": evaluate_link_prediction(model, kg, "test")}


def follow(
    folder: Path,
    name: str,
    *,
    epochs: int = 4,
    kill: tuple[int, int] | None = None,
    full: int | None = None,
    resume: bool = True,
    save_steps: int | None = None,
    optimizer: str = "adagrad-rowwise",
    **options: Any,
) -> dict[str, Any]:
    """A run of `fit` with all kinds of strategies; `kill` is (rank, step), `full` the rank without space."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    assert accelerator.num_processes == world_size()
    kg = graph(folder)
    model = make(kg, query_dropout=0.1, **options)
    steps = OPTIMIZERS[optimizer](model.parameters())
    examples = training_examples(kg, "kvsall", inverses=True)
    loader = DataLoader(examples, 16, shuffle=True, collate_fn=lambda batch: batch)
    torch.manual_seed(5)
    seen = 0

    def loss(module: Any, batch: Any) -> Any:
        nonlocal seen
        seen += 1
        if kill is not None and (rank(), seen) == tuple(kill):
            os.kill(os.getpid(), signal.SIGKILL)
        return module(**batch).loss

    if full == rank():
        shard_files.save_file = no_space
    run = fit(
        accelerator, model, steps, loader, lambda: evaluate_link_prediction(model, kg, "validation"), epochs=epochs,
        loss=loss, metric="mrr", strategies=("aswa", "dense-aswa", "ema", "best"), checkpoint_dir=folder / name,
        resume=resume, save_steps=save_steps, save_total_limit=None, progress=False,
    )  # fmt: skip
    found = {"running": whole(model)} if run.applied is None else {}
    for key, strategy in run.strategies.items():
        with strategy.swapped():
            found[key] = whole(model)
    local = {key: sum(t.numel() for t in s.average.averaged.values()) for key, s in run.strategies.items()}
    records = {key: trajectory.to_json() for key, trajectory in run.trajectories.items()}
    test = evaluate_link_prediction(model, kg, "test")
    return {"weights": found, "records": records, "test": test, "history": run.history, "local": local}


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def save_and_load(folder: Path, name: str) -> dict[str, Any]:
    """Saves a model as an ordinary one, and loads it in parts."""
    files.CHUNK = 16  # two rows at a time
    model = make(graph(folder), "tucker")
    model.save_pretrained(folder / name)
    again = load_sharded(folder / name)
    same = all(map(torch.equal, model.state_dict().values(), (t.double() for t in again.state_dict().values())))
    return {"weights": whole(model), "same": same, "class": type(again).__name__}


def experiment(
    folder: Path, name: str, *, resume: bool = False, kill: int | None = None, **settings: Any
) -> dict[str, Any]:
    """A run of `train_kge`; the last rank is killed at its step `kill`."""
    callbacks = [KilledAt(kill)] if kill is not None and rank() == world_size() - 1 else []
    options = {"dim": 8, "epochs": 6, "batch_size": 32, "lr": 0.05, "query_dropout": 0.1, "shard_entities": True}
    options |= {"strategies": "aswa,ema,best", "keep": 3} | settings
    run = KGERun(dataset=str(folder / "graph"), model="keci", **options)
    finished = train_kge(run, folder / name, resume=resume, callbacks=callbacks)
    return {"strategies": finished.results["strategies"], "weights": whole(finished.model), "world": world_size()}


class KilledAt(TrainerCallback):
    """Kills its process after a step."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def bad_inputs(folder: Path) -> dict[str, str]:
    """The errors that this rank has, by what was wrong on it or on another one."""
    kg = graph(folder)
    model = make(kg)
    queries = [torch.tensor([0, 1, 2]), torch.tensor([0, 1, 0])]
    fewer = [ids[rank() :] for ids in queries]
    labels = {"labels": torch.tensor([3, 4, 5]), "label_offsets": torch.tensor([0, 1, 2, 3])}
    other = KGEModel(kg.config(scorer="keci", dim=8))  # of random weights, other ones on each rank
    torch.manual_seed(rank())
    other._init_weights(other.entity_embeddings)
    larger = make(random_graph(folder / f"larger-{rank()}", entities=14))
    save_training(folder / "larger.safetensors", larger)
    cut = KnowledgeGraph(dict(kg), vocab=kg.vocab, name="cut")
    cut["test"] = kg["test"].select(range(len(kg["test"]) - rank()))
    dropping = make(kg, query_dropout=0.5)
    torch.manual_seed(rank())
    attempts = {
        "fewer queries": lambda: model(*fewer, labels=torch.tensor([3, 4, 5][rank() :])),
        "other tails": lambda: model(*queries, **labels | {"labels": labels["labels"] + rank()}),
        "other random numbers": lambda: dropping(*queries, **labels),
        "a matrix of labels": lambda: model(*queries, labels=torch.zeros(3, 13)),
        "other weights": lambda: shard_entities(other),
        "other relations": lambda: build_sharded(KGEConfig(num_relations=3 + rank(), num_entities=9, scorer="keci")),
        "too many processes": lambda: RowSharded(world_size() - 1),
        "another table": lambda: load_weights(folder / "larger.safetensors", model),
        "no file": lambda: load_weights(folder / f"{'larger' if rank() else 'nothing'}.safetensors", larger),
        "other triples": lambda: evaluate_link_prediction(model, cut, "test"),
        "no inverse relations": lambda: make(kg, inverse_relations=False),
        "dropout of entities": lambda: make(kg, entity_dropout=0.1),
        "sharded twice": lambda: shard_entities(model),
        "no space": lambda: save_without_space(model, folder / "no space"),
    }  # fmt: skip
    return {name: error_of(attempt) for name, attempt in attempts.items()}


def error_of(attempt: Any) -> str:
    try:
        attempt()
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def save_without_space(model: KGEModel, folder: Path) -> None:
    """Rank 0 finds its disk full after the header, when others have rows to send."""
    files.CHUNK, files._bytes = 8, no_space
    model.save_pretrained(folder)


def sample(folder: Path, *, epochs: int = 3, scorer: str = "complex") -> dict[str, Any]:
    """A run with balanced sampling: its losses and weights, and the batches that this rank had, with global ids."""
    kg = graph(folder)
    model = make(kg, scorer, loss="softmax")
    optimizer = RowwiseAdagrad(model.parameters(), lr=0.1)
    batches = BalancedBatches(kg.triples("train").astype("int32"), model, per_pair=5, negatives=3, seed=4)
    losses, seen, touched = [], [], 0
    start = model.entity_embeddings.start
    for epoch in range(epochs):
        batches.set_epoch(epoch)
        for batch in batches:
            before = model.entity_embeddings.weight.detach().clone()
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            assert model.entity_embeddings.weight.grad.is_sparse
            optimizer.step()
            losses.append(loss.item())
            changed = (model.entity_embeddings.weight.detach() != before).any(1).nonzero().flatten()
            touched += not set(changed.tolist()) <= {*batch["heads"].tolist(), *batch["sent"].flatten().tolist()}
            shifts = {"heads": start, "sent": start, "relations": 0, "weights": 0}
            seen.append({name: (batch[name] + shift).tolist() for name, shift in shifts.items()})
    return {"losses": losses, "weights": whole(model), "seen": seen, "balance": batches.balance, "untouched": touched}


def predict(folder: Path) -> dict[str, Any]:
    """Predictions, similar entities, answers to multi-hop queries and their metrics, as text and numbers."""
    kg = graph(folder)
    predictor = LinkPredictor(make(kg, "complex"), kg.vocab, kg)
    r0, r1 = kg.vocab.relations[:2]
    some = kg.vocab.entities[:3]
    ask = predictor.predict
    both = [f"2p: {some[0]}, {r0}, {r1}", f"2i: {some[1]}, {r0}, {some[2]}, {r1}"]
    hops = answer_query(predictor, both, k=4, beam=5)
    chains = answer_query(predictor, f"2p: {some[0]}, {r0}, {r1}", k=3, beam=5, chains=True)
    queries = generate_queries(kg, "2p", n=4)
    return {
        "tails": scores_of(ask(head=some, relation=r0, k=4)),
        "heads": scores_of(ask(relation=r1, tail=some[0], k=20, exclude_known=True)),
        "candidates": scores_of(ask(head=some[0], relation=r0, k=5, candidates=kg.vocab.entities[4:9])),
        "nearest": predictor.nearest(some[0], k=3)["similarity"].tolist(),
        "hops": hops["score"].tolist(),
        "chains": [sum(step.truth for step in chain) for chain in chains["chain"]],
        "metrics": evaluate_queries(predictor, queries, beam=5),
    }  # fmt: skip


def scores_of(table: Any) -> dict[str, list[float]]:
    """The scores of predictions, by question: of equal ones the order of the answers is not determined."""
    return {"scores": table["score"].tolist(), "ranks": table["rank"].tolist()}
