"""Measures the table of docs/language-models.md: every task and seed of `examples/finetune_lora.py`.

    python scripts/measure_language.py [--tasks countries sums] [--schedules linear constant] [--seeds 0 1 2]

Writes `results/language/<task>-<schedule>-<seed>.json`; a result that is there already is not measured
again. `make tables` then fills the page.
"""

from __future__ import annotations

import argparse
import itertools
import json
import runpy
import time
from pathlib import Path

from aswa_hf.checkpoint import library_versions

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "language"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default="runs/language", help="where the runs are kept")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--tasks", nargs="+", default=["countries", "sums"])
    parser.add_argument("--schedules", nargs="+", default=["linear", "constant"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    given = parser.parse_args()
    finetune = runpy.run_path(str(ROOT / "examples" / "finetune_lora.py"))["finetune"]
    given.results.mkdir(parents=True, exist_ok=True)
    for task, schedule, seed in itertools.product(given.tasks, given.schedules, given.seeds):
        path = given.results / f"{task}-{schedule}-{seed}.json"
        if path.exists():
            continue
        began = time.perf_counter()
        folder = Path(given.runs) / path.stem
        # The base model has nothing to do with the schedule of its fine-tuning.
        bases = sorted(Path(given.runs).glob(f"{task}-*-{seed}/base/model.safetensors"))
        run = finetune(task, seed=seed, folder=folder, schedule=schedule, base=bases[0].parent if bases else None)
        decisions = [record.decision.value for record in run["callback"].strategies["aswa"].trajectory]
        result = {
            "task": task,
            "schedule": schedule,
            "model": type(run["trainer"].model.get_base_model()).__name__,
            "seed": seed,
            "steps": run["trainer"].state.global_step,
            "strategies": run["results"],
            "decisions": {kind: decisions.count(kind) for kind in ("init", "soft", "hard", "reject")},
            "seconds": round(time.perf_counter() - began, 1),
            "versions": library_versions(),
            "command": f"python scripts/measure_language.py --tasks {task} --schedules {schedule} --seeds {seed}",
        }
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
