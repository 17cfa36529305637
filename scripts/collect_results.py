"""Keeps what the runs of `aswa-hf reproduce` measured, small enough for the repository: `collect_results.py RUNS…`.

Of each run folder: `results/<task>/<run>.json` (of runs with all strategies `results/strategies/<run>.json`), the same
for what other tables measured with its weights, and of its log the validation scores and decisions, a line for each
epoch, as `results/logs/<run>.tsv`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "results"
DECISIONS = ("reject", "soft", "hard", "init")
PARTS = ("results.json", "train-fit.json", "multi-hop.json")


def rounded(content: Any) -> Any:
    """The same with six digits after the point, which is more than the deviation between seeds."""
    if isinstance(content, dict):
        return {name: rounded(value) for name, value in content.items()}
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
    columns = ["loss", "last", "best", "ema", "swa", "swa-all", "aswa", "decision", "members"]
    columns = [name for name in columns if any(name in row for row in epochs.values())]
    lines = ["\t".join(["epoch", *columns])]
    lines += ["\t".join([str(epoch), *(row.get(name, "") for name in columns)]) for epoch, row in epochs.items()]
    return "\n".join(lines) + "\n"


def collect(run: Path) -> None:
    for part in PARTS:
        if (run / part).is_file():
            content = json.loads((run / part).read_text(encoding="utf-8"))
            for name in ("example", "command", "settings"):  # names of folders, and what the run's name says
                content.pop(name, None)
            task = "strategies" if run.name.endswith("-strategies") else content["task"]
            target = RESULTS / task / f"{run.name}.json"
            target.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(rounded(content), separators=(",", ":"), ensure_ascii=False)
            target.write_text(text + "\n", encoding="utf-8")
    if run.name.endswith("-strategies"):
        return
    (RESULTS / "logs").mkdir(parents=True, exist_ok=True)
    (RESULTS / "logs" / f"{run.name}.tsv").write_text(short_log(run / "train.log"), encoding="utf-8")


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        for results in sorted(Path(folder).rglob("results.json")):
            collect(results.parent)
