"""Keeps what the runs of `aswa-hf reproduce` measured, small enough for the repository: `collect_results.py RUNS…`.

Of each run folder: `results/<task>/<run>.json` (of runs with all strategies `results/strategies/<run>.json`, of
recipes `results/tuned/<run>.json`, of runs at several learning rates `results/robustness/<run>.json`, with the
validation scores by epoch), the same for what other tables measured with its weights, and of its log the validation
scores and decisions, a line for each epoch, as `results/logs/<run>.tsv`; of runs with all strategies only if they are
short. What recipes reached is also written beside them, for `aswa-hf train kge --recipes`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from aswa_hf.experiments.recipes import REACHED
from aswa_hf.reproduce.show import ORDER
from aswa_hf.reproduce.tables import VARIANTS
from aswa_hf.reproduce.tuned import runs_of_recipes
from aswa_hf.trajectory import load_trajectories

RESULTS = Path(__file__).resolve().parent.parent / "results"
DECISIONS = ("reject", "soft", "hard", "init")
KINDS = ("strategies", "robustness", "tuned")  # as the name of a run ends
LONGEST_LOG = 100  # epochs of a run with all strategies
PARTS = ("results.json", "train-fit.json", "multi-hop.json")


def rounded(content: Any) -> Any:
    """The same with six digits after the point, which is more than the deviation between seeds."""
    if isinstance(content, dict):
        return {name: rounded(value) for name, value in content.items()}
    if isinstance(content, list):
        return [rounded(value) for value in content]
    return round(content, 6) if isinstance(content, float) else content


def short_log(log: Path) -> str:
    """The validation score of every strategy by epoch, tab-separated."""
    epochs: dict[int, dict[str, str]] = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        row = epochs.setdefault(int(entry["epoch"]), {})
        if "loss" in entry:
            row["loss"] = f"{entry['loss']:.5f}"
        for metric in ("mrr", "accuracy"):
            row |= {
                key.removeprefix("eval_").removesuffix(f"_{metric}"): f"{value:.5f}"
                for key, value in entry.items()
                if key.startswith("eval_") and key.endswith(f"_{metric}") and isinstance(value, float)
            }
        if "aswa/decision" in entry:
            row |= {"decision": DECISIONS[entry["aswa/decision"]], "members": str(entry["aswa/members"])}
        if "dense-aswa/decision" in entry:
            row["dense decision"] = DECISIONS[entry["dense-aswa/decision"]]
    columns = ["loss", *ORDER, "decision", "members", "dense decision"]
    columns = [name for name in columns if any(name in row for row in epochs.values())]
    lines = ["\t".join(["epoch", *columns])]
    lines += ["\t".join([str(epoch), *(row.get(name, "") for name in columns)]) for epoch, row in epochs.items()]
    return "\n".join(lines) + "\n"


def model_of(content: dict[str, Any]) -> str:
    """The tables' name of a run's model."""
    settings = content.get("settings") or {}
    for name, variant in VARIANTS.items():
        if all(settings.get(key) == value for key, value in variant.items()):
            return name
    return str(content["model"])


def validation_scores(run: Path) -> dict[str, list[list[float]]]:
    """The epochs of a run's decision points and each strategy's validation score there."""
    trajectories, _ = load_trajectories(run / "aswa_trajectory.json")
    return {
        name: [[record.epoch or record.index + 1, record.score] for record in records if record.score is not None]
        for name, records in trajectories.items()
    }


def collect(run: Path) -> None:
    kind = next((kind for kind in KINDS if run.name.endswith(f"-{kind}")), None)
    for part in PARTS:
        if (run / part).is_file():
            content = json.loads((run / part).read_text(encoding="utf-8"))
            content["model"] = model_of(content)
            if kind == "robustness":
                content |= {"lr": content["settings"]["lr"], "scores": validation_scores(run)}
            for name in ("example", "command", "settings"):  # names of folders, and what the run's name says
                content.pop(name, None)
            target = RESULTS / (kind or content["task"]) / f"{run.name}.json"
            target.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(rounded(content), separators=(",", ":"), ensure_ascii=False)
            target.write_text(text + "\n", encoding="utf-8")
    if kind == "robustness" or (kind and content["epochs"] > LONGEST_LOG):
        return
    (RESULTS / "logs").mkdir(parents=True, exist_ok=True)
    (RESULTS / "logs" / f"{run.name}.tsv").write_text(short_log(run / "train.log"), encoding="utf-8")


def times(runs: list[dict[str, Any]]) -> dict[str, int | None]:
    """The mean times of the runs that were not resumed, of which the time of the first part is not known."""
    whole = [run for run in runs if not run.get("resumed")]
    if not whole:
        return {"seconds": None, "cpu_seconds": None}
    return {
        "seconds": round(fmean(run["seconds"]["train"] + run["seconds"]["evaluate"] for run in whole)),
        "cpu_seconds": round(fmean(run["cpu_seconds"] for run in whole)),
    }


def write_reached() -> None:
    """Writes the means over the runs of each recipe to the file that `--recipes` shows."""
    found = {
        recipe.name: {
            "runs": len(runs),
            "mrr": {
                name: round(fmean(run["strategies"][name]["test"]["mrr"] for run in runs), 4)
                for name in runs[0]["strategies"]
            },
            **times(runs),
        }
        for recipe, runs in runs_of_recipes(RESULTS / "tuned")
    }
    REACHED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        for results in sorted(Path(folder).rglob("results.json")):
            collect(results.parent)
    write_reached()
