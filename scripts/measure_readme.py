"""Measures what the README, docs/results.md and docs/comparison.md show and writes it there: `make readme`.

Runs `aswa-hf demo` with seeds 0 to 4 and `benchmarks/averaging.py`, and fills the places marked `<!-- demo -->`,
`<!-- demo-table -->` and `<!-- benchmark -->`; `python scripts/measure_readme.py demo` only the first two. The demo's
runs are kept in results/demo: `python scripts/measure_readme.py shown` fills its places and draws the picture of seed
0 from them, without a run.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median, stdev

from aswa_hf.plotting import plot_trajectories
from aswa_hf.trajectory import load_trajectories

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "results" / "demo"
PICTURE = ROOT / "docs" / "trajectory.png"
PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md", ROOT / "docs" / "comparison.md")
TABLE = "https://github.com/aswa-hf/aswa-hf/blob/main/docs/results.md#the-demo"
SEEDS = range(5)
STRATEGIES = {
    "last": "the last epoch",
    "best": "the best epoch (early stopping)",
    "swa": "SWA over the last quarter",
    "ema": "EMA",
    "aswa": "**ASWA**",
}


def _tested(run: dict) -> dict[str, float]:
    return {name: result["test"]["accuracy"] for name, result in run["run"]["strategies"].items()}


def measure_demo(folder: Path) -> dict[str, str]:
    """Runs the demo with all seeds, and keeps what it measured."""
    DEMO.mkdir(parents=True, exist_ok=True)
    for seed in SEEDS:
        output = folder / str(seed)
        command = [sys.executable, "-m", "aswa_hf.cli", "demo", "--seed", str(seed), "--output-dir", str(output)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (DEMO / f"seed-{seed}.json").write_bytes((output / "aswa_trajectory.json").read_bytes())
    return shown_demo(folder)


def shown_demo(_folder: Path) -> dict[str, str]:
    """Returns what the README and the results page say about the kept runs, and draws the first one."""
    runs = [json.loads((DEMO / f"seed-{seed}.json").read_text(encoding="utf-8")) for seed in SEEDS]
    trajectories, about = load_trajectories(DEMO / f"seed-{SEEDS[0]}.json")
    plot_trajectories(trajectories, PICTURE, metric=about["metric"], title=f"{about['run']['model']} on digits")
    rows, spreads = [], {}
    for name, label in STRATEGIES.items():
        validation = [100 * run["strategies"][name]["records"][-1]["score"] for run in runs]
        test = [100 * _tested(run)[name] for run in runs]
        spreads[name] = _spread(test)
        rows.append(f"| {label} | {_spread(validation)} | {spreads[name]} | {test[0]:.2f} |")
    scores = [_tested(run) for run in runs]
    others = {name: mean(score[name] for score in scores) for name in STRATEGIES if name != "aswa"}
    second = max(others, key=lambda name: others[name])
    best = sum(all(test["aswa"] > score for name, score in test.items() if name != "aswa") for test in scores)
    decisions = [record["decision"] for record in runs[0]["strategies"]["aswa"]["records"]]
    members = runs[0]["strategies"]["aswa"]["records"][-1]["members"]
    about_demo = (
        "The picture is `aswa-hf demo`: a small timm model overfits 200 handwritten digits. In this run ASWA took "
        f"{decisions.count('soft')} averages, started over {decisions.count('hard')} times and rejected "
        f"{decisions.count('reject')} of {len(decisions)} epochs; {members} snapshots are in the final weights. Over "
        f"seeds {SEEDS[0]} to {SEEDS[-1]} the test accuracy is {spreads['aswa']} % with ASWA and {spreads[second]} % "
        f"with {STRATEGIES[second]}; ASWA is ahead of all others in {best} of {len(runs)} runs ([table]({TABLE}))."
    )
    table = "\n".join(
        [
            f"Accuracy (%) over seeds {SEEDS[0]} to {SEEDS[-1]} (mean ± standard deviation), all strategies in "
            f"the same runs; ASWA is ahead of all others on the test images in {best} of {len(runs)} runs:",
            "",
            "| weights | validation | test | test, seed 0 |",
            "| --- | --- | --- | --- |",
            *rows,
        ]
    )
    return {"demo": about_demo, "demo-table": table}


def measure_benchmark(folder: Path) -> dict[str, str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "averaging.py"), "--json", str(folder / "benchmark.json")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    content = json.loads((folder / "benchmark.json").read_text())
    shown = {
        "WeightAverage.blend": "our update",
        "timm ModelEmaV3.update": "timm `ModelEmaV3`",
        "AveragedModel, get_ema_multi_avg_fn": "torch `AveragedModel`, EMA",
        "AveragedModel.update_parameters": "torch `AveragedModel`, plain",
        "WeightAverage.lookahead, in and out": "our look-ahead in the model and back",
    }
    tables = [table for table in content["tables"] if table["title"].startswith("float32")]
    header = " | ".join(f"{table['parameters'] / 1e6:.0f} M" for table in tables)
    lines = [f"| times one `lerp_` over as many flat numbers | {header} |", "| --- |" + " --- |" * len(tables)]
    for name, label in shown.items():
        ratios = []
        for table in tables:
            seconds = {row["name"]: median(row["seconds"]) for row in table["rows"]}
            ratios.append(f"{seconds[name] / seconds['lerp_']:.2f}")
        lines.append(f"| {label} | {' | '.join(ratios)} |")
    about = content["header"]
    lines += ["", f"(`make bench`: torch {about['torch']}, {about['threads']} threads, float32)"]
    return {"benchmark": "\n".join(lines)}


def _spread(values: list[float]) -> str:
    return f"{mean(values):.2f} ± {stdev(values):.2f}"


def fill(mark: str, text: str) -> None:
    """Replaces what a page has between a mark and its end."""
    pattern = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", flags=re.DOTALL)
    found = [page for page in PAGES if pattern.search(page.read_text(encoding="utf-8"))]
    assert len(found) == 1, f"one page must have a place marked {mark}, found {found}"
    content = found[0].read_text(encoding="utf-8")
    found[0].write_text(pattern.sub(lambda m: f"{m[1]}\n{text}\n\n{m[2]}", content), encoding="utf-8")


def main() -> None:
    measures = {"demo": measure_demo, "benchmark": measure_benchmark, "shown": shown_demo}
    chosen = sys.argv[1:] or ["demo", "benchmark"]
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            for mark, text in measures[name](Path(folder)).items():
                fill(mark, text)


if __name__ == "__main__":
    main()
