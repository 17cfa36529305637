"""A run of `aswa-hf train kge`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import set_seed

from aswa_hf.checkpoint import save_state
from aswa_hf.experiments.running import (
    checked_folder,
    draw,
    is_main_process,
    keep_settings,
    results_table,
    run_console,
    train_and_evaluate,
    write_results,
)
from aswa_hf.kge import (
    KGEModel,
    KGETrainer,
    evaluate_link_prediction,
    load_kg,
    paper_arguments,
)
from aswa_hf.trainer import ASWACallback
from aswa_hf.trainer.files import STATE_FOLDER
from aswa_hf.trainer.hub import link_example

METRICS = {"mrr": "MRR", "hits@1": "Hits@1", "hits@3": "Hits@3", "hits@10": "Hits@10"}


def train_kge(
    *,
    dataset: str,
    output_dir: Path,
    scorer: str,
    dim: int,
    epochs: int,
    batch_size: int,
    lr: float,
    scheme: str,
    p: int,
    q: int,
    strategies: list[str],
    seed: int,
    resume: bool,
    keep: int = 1,
) -> dict[str, Any]:
    """Trains a link predictor and fills its run folder; gives what results.json holds."""
    console = run_console()
    checkpoint = checked_folder(output_dir, resume)
    kg = load_kg(dataset)
    triples = {split: len(kg[split]) for split in kg}
    parts = ", ".join(f"{count:,} {split}" for split, count in triples.items())
    size = f"{kg.num_entities:,} entities, {kg.num_relations:,} relations"
    console.print(f"{kg.name}: {parts} triples, {size}", soft_wrap=True)
    set_seed(seed)
    model = KGEModel(kg.config(scorer=scorer, dim=dim, p=p, q=q))
    args = paper_arguments(
        str(output_dir),
        num_train_epochs=epochs,
        per_device_train_batch_size=batch_size,
        learning_rate=lr,
        seed=seed,
        disable_tqdm=True,
        save_strategy="steps",
        save_total_limit=keep,
    )
    trainer = KGETrainer(model, args, kg, scheme=scheme)
    callback = ASWACallback(trainer, metric="mrr", strategies=strategies, apply=strategies[0])
    settings = {
        "dataset": {"name": kg.name, **triples},
        "model": scorer,
        "dim": dim,
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "scheme": scheme,
        "p": p,
        "q": q,
        "strategies": strategies,
        "seed": seed,
    }
    keep_settings(args, settings, checkpoint)
    results, seconds = train_and_evaluate(
        trainer, callback, checkpoint, lambda split: evaluate_link_prediction(model, kg, split), console
    )
    if is_main_process():
        # A checkpoint has them as they were before its own epoch counted.
        save_state(output_dir / STATE_FOLDER, callback.strategies)
    content = write_results(
        output_dir,
        results,
        seconds,
        task="link-prediction",
        dataset=kg.name,
        model=scorer,
        seed=seed,
        epochs=epochs,
        dim=dim,
        triples=triples,
        example=link_example(model, kg),
    )
    draw(output_dir, callback.strategies, "MRR", f"{type(model).__name__} on {kg.name}")
    console.print(results_table(results, METRICS, "Filtered ranking over heads and tails (%)"))
    ask = f"aswa-hf predict {output_dir} --head … --relation …"
    console.print(f"Written to {output_dir}; predict with: {ask}", soft_wrap=True)
    return content
