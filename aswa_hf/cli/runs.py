"""A run folder: the ensemble as a loadable model, checkpoints, trajectory, log and results."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback, set_seed
from transformers.trainer_utils import get_last_checkpoint

from aswa_hf.checkpoint import library_versions
from aswa_hf.cli.progress import narrated
from aswa_hf.files import write_text
from aswa_hf.kge import KGEConfig, KGEModel, KGETrainer, evaluate_link_prediction, load_kg, paper_arguments
from aswa_hf.trainer import ASWACallback
from aswa_hf.trajectory import plot_trajectories

RESULTS, LOG, PICTURE = "results.json", "train.log", "trajectory.png"


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
) -> dict[str, Any]:
    """Trains a link predictor and fills its run folder; gives what results.json holds."""
    console = Console()
    checkpoint = _checked_folder(output_dir, resume)
    kg = load_kg(dataset)
    console.print(f"{kg}")
    set_seed(seed)
    config = KGEConfig(num_entities=kg.num_entities, num_relations=kg.num_relations, dim=dim, scorer=scorer, p=p, q=q)
    model = KGEModel(config)
    args = paper_arguments(
        str(output_dir),
        num_train_epochs=epochs,
        per_device_train_batch_size=batch_size,
        learning_rate=lr,
        seed=seed,
        disable_tqdm=True,
        save_strategy="steps",
        save_total_limit=1,
    )
    trainer = KGETrainer(model, args, kg, scheme=scheme)
    # About ten checkpoints a run, each at the end of an epoch: the evaluations cost more than a lost tenth.
    steps_per_epoch = -(-len(trainer.train_dataset) // batch_size)
    args.save_steps = steps_per_epoch * max(1, epochs // 10)
    callback = ASWACallback(trainer, metric="mrr", strategies=strategies, apply=strategies[0])
    trainer.add_callback(callback)
    trainer.add_callback(_LogFile(output_dir / LOG))

    start = time.perf_counter()
    with narrated(trainer, callback, console, show="changes"):
        trainer.train(resume_from_checkpoint=checkpoint)
    seconds = {"train": time.perf_counter() - start}
    trainer.save_model()

    start = time.perf_counter()
    results: dict[str, Any] = {}
    for name, strategy in callback.strategies.items():
        with strategy.swapped():
            results[name] = {split: evaluate_link_prediction(model, kg, split) for split in ("validation", "test")}
    seconds["evaluate"] = time.perf_counter() - start
    content = {
        "task": "link-prediction",
        "dataset": kg.name,
        "model": scorer,
        "seed": seed,
        "epochs": epochs,
        "dim": dim,
        "strategies": results,
        "seconds": seconds,
        "versions": library_versions(),
        "command": shlex.join(["aswa-hf", *sys.argv[1:]]),
    }
    write_text(output_dir / RESULTS, json.dumps(content, indent=2) + "\n")
    trajectories = {name: strategy.trajectory for name, strategy in callback.strategies.items()}
    plot_trajectories(trajectories, output_dir / PICTURE, metric="MRR", title=f"{type(model).__name__} on {kg.name}")
    console.print(results_table(results))
    console.print(f"Written to {output_dir}; predict with: aswa-hf predict {output_dir} --head … --relation …")
    return content


def results_table(results: dict[str, Any]) -> Table:
    """Validation and test metrics of each strategy, the best test MRR bold."""
    table = Table(title="Filtered ranking over heads and tails")
    metrics = ("mrr", "hits@1", "hits@3", "hits@10")
    for column in ("strategy", "validation MRR", *(f"test {name}" for name in metrics)):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    best = max(result["test"]["mrr"] for result in results.values())
    for name, result in results.items():
        test = [f"{result['test'][metric]:.4f}" for metric in metrics]
        style = "bold" if result["test"]["mrr"] == best else None
        table.add_row(name, f"{result['validation']['mrr']:.4f}", *test, style=style)
    return table


def _checked_folder(output_dir: Path, resume: bool) -> str | None:
    """The checkpoint to resume from, if asked for; a folder with another run in it is not written over."""
    last = get_last_checkpoint(str(output_dir)) if output_dir.is_dir() else None
    if resume:
        if last is None:
            raise ValueError(f"--resume: there is no checkpoint in {output_dir}. Start the run without --resume.")
        return last
    if last is not None or (output_dir / RESULTS).exists():
        raise ValueError(f"{output_dir} holds a run already. Choose another --output-dir, or go on with --resume.")
    return None


class _LogFile(TrainerCallback):
    """Everything the Trainer logs, a JSON object a line."""

    def __init__(self, path: Path):
        self.path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, **logs}) + "\n")
