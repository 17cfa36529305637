"""Measures the language models of the documentation: every task and seed of `examples/finetune_lora.py`.

    python scripts/measure_language.py [--tasks countries sums] [--schedules linear constant] [--seeds 0 1 2]
    python scripts/measure_language.py --schedules constant --rates 0.001 0.003 0.01 0.03 0.1

Writes `results/language/<task>-<schedule>-<seed>.json`, with the learning rate in the name if it is not the example's;
a result that is there already is not measured again. All strategies follow each run. `make tables` then fills the
pages.
"""

from __future__ import annotations

import argparse
import itertools
import json
import runpy
import time
from pathlib import Path
from typing import Any

from aswa_hf.checkpoint import library_versions
from aswa_hf.reproduce.tables import ALL_STRATEGIES

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "language"
RATE = 1e-2  # the example's


def measure(example: dict[str, Any], task: str, schedule: str, seed: int, rate: float, runs: Path, name: str) -> Any:
    """What one run ended with, and the validation losses on the way."""
    began = time.perf_counter()
    # The base model has nothing to do with its fine-tuning.
    bases = sorted(runs.glob(f"{task}-*-{seed}*/base/model.safetensors"))
    strategies = {strategy: example["STRATEGIES"].get(strategy, {}) for strategy in ALL_STRATEGIES}
    run = example["finetune"](
        task, seed=seed, folder=runs / name, schedule=schedule, rate=rate, strategies=strategies,
        base=bases[0].parent if bases else None,
    )  # fmt: skip
    trajectories = {name: strategy.trajectory for name, strategy in run["callback"].strategies.items()}
    decisions = [decision.value for decision in trajectories["aswa"].decisions]
    return {
        "task": task,
        "schedule": schedule,
        "lr": rate,
        "model": type(run["trainer"].model.get_base_model()).__name__,
        "seed": seed,
        "steps": run["trainer"].state.global_step,
        "strategies": run["results"],
        "losses": {
            name: [[round(record.epoch, 4), record.score] for record in records if record.score is not None]
            for name, records in trajectories.items()
        },
        "decisions": {kind: decisions.count(kind) for kind in ("init", "soft", "hard", "reject")},
        "seconds": round(time.perf_counter() - began, 1),
        "versions": library_versions(),
        "command": f"python scripts/measure_language.py --tasks {task} --schedules {schedule} --seeds {seed}"
        + ("" if rate == RATE else f" --rates {rate:g}"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default="runs/language", help="where the runs are kept")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--tasks", nargs="+", default=["countries", "sums"])
    parser.add_argument("--schedules", nargs="+", default=["linear", "constant"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rates", nargs="+", type=float, default=[RATE])
    given = parser.parse_args()
    example = runpy.run_path(str(ROOT / "examples" / "finetune_lora.py"))
    given.results.mkdir(parents=True, exist_ok=True)
    for task, schedule, rate, seed in itertools.product(given.tasks, given.schedules, given.rates, given.seeds):
        name = f"{task}-{schedule}-{seed}" + ("" if rate == RATE else f"-lr{rate:g}")
        path = given.results / f"{name}.json"
        if not path.exists():
            result = measure(example, task, schedule, seed, rate, given.runs, name)
            path.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
