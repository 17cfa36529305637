"""What DenseASWA loses without the score of its snapshot (`score_snapshot=False`), and what it saves.

    python benchmarks/snapshot_score.py data/kg/UMLS data/kg/KINSHIP --json results/differences/snapshot_score.json
    python benchmarks/snapshot_score.py countries --epochs 2 --seeds 0

Both variants follow the same runs: the paper's setting, ComplEx.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm
from transformers import PrinterCallback, set_seed

from aswa_hf import ASWACallback, DenseASWA
from aswa_hf.checkpoint import library_versions
from aswa_hf.kge import KGEModel, KGETrainer, evaluate_link_prediction, load_kg, paper_arguments

WITH, WITHOUT = "dense-aswa", "unscored"


def train(dataset: str, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The test and validation MRR of both variants in one run, and how often each was restarted."""
    kg = load_kg(dataset)
    set_seed(seed)
    model = KGEModel(kg.config(scorer="complex"))
    with tempfile.TemporaryDirectory() as folder:
        args = paper_arguments(folder, num_train_epochs=options.epochs, seed=seed, disable_tqdm=True)
        trainer = KGETrainer(model, args, kg)
        strategies = {WITH: DenseASWA, WITHOUT: lambda model: DenseASWA(model, score_snapshot=False)}
        callback = ASWACallback(trainer, metric="mrr", strategies=strategies, apply=WITH)
        trainer.add_callback(callback)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    found: dict[str, Any] = {"dataset": kg.name, "seed": seed, "epochs": options.epochs}
    for name, strategy in callback.strategies.items():
        decisions = [record.decision.value for record in strategy.trajectory]
        with strategy.swapped():
            test = evaluate_link_prediction(model, kg, "test")["mrr"]
        found[name] = {"validation": strategy.score, "test": test, "hard": decisions.count("hard")}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("datasets", nargs="+")
    parser.add_argument("--epochs", type=int, default=256)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path, metavar="PATH", help="adds the runs to those in this file")
    options = parser.parse_args()
    content: dict[str, Any] = {"versions": library_versions(), "runs": []}
    if options.json and options.json.is_file():
        content = json.loads(options.json.read_text())
    for dataset, seed in tqdm([(d, s) for d in options.datasets for s in options.seeds], disable=None):
        content["runs"].append(train(dataset, options, seed))
        print(json.dumps(content["runs"][-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(content) + "\n")
    for kind in ("validation", "test"):
        lost = fmean(run[WITH][kind] - run[WITHOUT][kind] for run in content["runs"])
        print(f"lost without the snapshot's score, {kind} MRR: {100 * lost:.2f} points")


if __name__ == "__main__":
    main()
