"""Writes the tables of measured results into the pages that show them, and draws the trajectories: `make tables`.

The results are those that `collect_results.py` keeps in `results/`. A table is between `<!-- table: … -->` and
`<!-- /table -->`, a sentence within a line between `<!-- figure: … -->` and `<!-- /figure -->`; in the mark are

    <task> <metric> [<dataset>…]    a metric of all strategies by dataset and model; of multi-hop, a shape
    shapes [<dataset>…]             the MRR of multi-hop queries by shape, over all datasets and models
    paper <table> <dataset>         a table of the paper beside our numbers, and the differences
    decisions [<dataset>…]          what ASWA decided, and when
    strategies                      all strategies in the same runs: test MRR or accuracy by dataset and model
    ranks [short]                   their mean ranks, wins and losses, and Wilcoxon's test; or the ranks in a line
    robustness <dataset>            test MRR or accuracy by learning rate
    ranking                         what DenseASWA wins against the usual weights, in a sentence
    headline [<dataset>…]           what strategies lose at ten times the best learning rate, in a sentence
    times <dataset> [<rate>]        epochs to the quality of the best single epoch at the best learning rate, or at one
    faster <dataset> <rate> <high>  the same in a sentence: at a high rate, to the quality of another one
    tuned <metric>                  a metric of all strategies by recipe, beside the published MRR
    costs                           what the runs of recipes took
    bn                              accuracy by the number of batches that BatchNorm statistics are computed on
    snapshot                        DenseASWA with and without the score of its snapshot
    weights                         the first weights of the paper's code beside ours
    hops                            the paper's way to join two hops beside ours
    language                        the loss of fine-tuned language models by task, on validation and held-out data

Without names, all datasets that were run as long as the paper did.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from aswa_hf.comparison import AUTO
from aswa_hf.experiments.settings import DEFAULT_STRATEGIES
from aswa_hf.plotting import Panel, as_png, draw_gains, plot_panels, plot_trajectories
from aswa_hf.reproduce.figures import paper_figures
from aswa_hf.reproduce.ranks import REFERENCES, rankings, shown_p
from aswa_hf.reproduce.robustness import (
    Swept,
    best_rate,
    by_pair,
    by_rate,
    mean_curve,
    panels,
    shown_epochs,
    times_to_quality,
    with_every_rate,
)
from aswa_hf.reproduce.show import ORDER
from aswa_hf.reproduce.tables import IMAGES, KGE, MODELS, TABLES, TUNED, plain
from aswa_hf.reproduce.tuned import COSTS, mean_costs, runs_of_recipes
from aswa_hf.trajectory import Decision, Record, Trajectory

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
STRATEGIES = (*ORDER, AUTO)
LANGUAGE = "language"
LANGUAGE_RATE = 0.01  # of `examples/finetune_lora.py`
SCHEDULES = {"lora-constant": "LoRA, constant rate", "lora-linear": "LoRA, linear decay"}
LABELS = {name: label for models in MODELS.values() for name, label in models.items()} | SCHEDULES
METRICS = {IMAGES: "accuracy", LANGUAGE: "token probability"}
RESULTS_PAGE = "https://github.com/aswa-hf/aswa-hf/blob/main/docs/results.md"
PLACE = {"train-fit": "train", "multi-hop": "queries"}
PAPER_EPOCHS = TABLES[KGE].epochs
MARKED = re.compile(r"(<!-- table: (.*?) -->\n).*?(<!-- /table -->)", flags=re.DOTALL)
SENTENCE = re.compile(r"(<!-- figure: (.*?) -->).*?(<!-- /figure -->)")

Result = dict[str, Any]
Groups = dict[tuple[str, str], list[Result]]


def load_results(task: str, datasets: Iterable[str]) -> Groups:
    """The results of a task by dataset and model: real graphs before the three Countries, models as in the paper."""
    groups: Groups = defaultdict(list)
    asked = {plain(name) for name in datasets}
    for path in sorted((RESULTS / task).glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        as_the_paper = task in (IMAGES, "strategies", "robustness") or result["epochs"] in PAPER_EPOCHS
        if plain(result["dataset"]) in asked or (not asked and as_the_paper):
            groups[result["dataset"], result["model"]].append(result)
    order = list(LABELS)
    return dict(sorted(groups.items(), key=lambda g: (g[0][0].startswith("Countries"), g[0][0], order.index(g[0][1]))))


def language_results() -> list[Result]:
    """The fine-tuned language models, by the probability of the right token: the geometric mean, 1 / perplexity."""
    found = []
    for path in sorted((RESULTS / "language").glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        strategies = {
            name: {split: {METRICS[LANGUAGE]: math.exp(-losses["loss"])} for split, losses in splits.items()}
            for name, splits in result["strategies"].items()
        }
        scores = {
            name: [[epoch, math.exp(-loss)] for epoch, loss in losses] for name, losses in result["losses"].items()
        }
        about = {"dataset": f"{result['task']} (text)", "model": f"lora-{result['schedule']}", "task": LANGUAGE}
        found.append({**result, **about, "strategies": strategies, "scores": scores})
    return found


def score(result: Result, strategy: str, metric: str) -> float:
    value = result["strategies"][strategy][PLACE.get(result["task"], "test")][metric]
    return 100 * (value["mrr"] if isinstance(value, dict) else value)


def strategies_of(groups: Groups) -> list[str]:
    every = [result["strategies"] for results in groups.values() for result in results]
    return [name for name in STRATEGIES if all(name in strategies for strategies in every)]


def metric_table(task: str, metric: str, *datasets: str) -> str:
    """Mean ± standard deviation of a metric over seeds, the best of each row bold."""
    groups = load_results(task, datasets)
    names = strategies_of(groups)
    lines = [f"| dataset | model | {' | '.join(names)} |", "| --- | --- |" + " --- |" * len(names)]
    for (dataset, model), results in groups.items():
        values = {name: [score(result, name, metric) for result in results] for name in names}
        lines.append(f"| {dataset} | {LABELS[model]} | {' | '.join(_cells(values.values()))} |")
    return "\n".join([*lines, "", wins(groups, names, metric)])


def strategies_groups() -> Groups:
    """The runs with all strategies, and "auto": the best on validation of those that `aswa-hf train` compares."""
    groups = load_results("strategies", ())
    for result in language_results():
        if result["lr"] == LANGUAGE_RATE:
            groups.setdefault((result["dataset"], result["model"]), []).append(result)
    for result in (result for results in groups.values() for result in results):
        found, metric = result["strategies"], _metric(result)
        known = [name for name in DEFAULT_STRATEGIES if name in found]
        best = max(known, key=lambda name: found[name]["validation"][metric])
        found[AUTO] = found[best]
    return groups


def strategies_table() -> str:
    """The mean test score of all strategies over seeds, the best of each row bold."""
    groups = strategies_groups()
    names = strategies_of(groups)
    lines = [f"| dataset | model | {' | '.join(names)} |", "| --- | --- |" + " --- |" * len(names)]
    for (dataset, model), results in groups.items():
        means = [[mean(score(result, name, _metric(result)) for result in results)] for name in names]
        lines.append(f"| {dataset} | {LABELS[model]} | {' | '.join(_cells(means))} |")
    return "\n".join(lines)


def ranked_groups() -> tuple[Groups, list[dict[str, Any]]]:
    """The runs with all strategies by pair of dataset and model, and the ranking of strategies over these pairs.

    "auto" is compared with the others and has no rank: it is always equal to one of them.
    """
    groups = distinct_groups(strategies_groups())
    rows = []
    for (dataset, model), results in groups.items():
        for name in strategies_of(groups):
            ours = mean(score(result, name, _metric(result)) for result in results)
            cell = {"dataset": dataset, "model": model, "val_ratio": None, "strategy": name}
            rows.append({**cell, "columns": {"score": {"ours": ours / 100}}})
    single = rankings([row for row in rows if row["strategy"] != AUTO])
    auto = [{**row, "rank": None} for row in rankings(rows) if row["strategy"] == AUTO]
    return groups, single + auto


def ranks_table(length: str = "full") -> str:
    """Mean ranks over pairs of dataset and model, each pair's score the mean over its seeds; "short" is a line."""
    groups, ranked = ranked_groups()
    against = " | ".join(f"{name} wins / ties / losses (p)" for name in REFERENCES)
    lines = [f"| weights | mean rank | {against} |", "| --- | --- |" + " --- |" * len(REFERENCES)]
    if length == "short":
        return ", ".join(f"{row['strategy']} {row['rank']:.1f}" for row in ranked if row["rank"]) + "."
    for row in ranked:
        cells = []
        for name in REFERENCES:
            found = row["against"].get(name)
            p = f" ({shown_p(found['p'])})" if found and found["p"] is not None else ""
            cells.append(f"{found['wins']} / {found['ties']} / {found['losses']}{p}" if found else "")
        rank = f"{row['rank']:.2f}" if row["rank"] else "–"
        lines.append(f"| {row['strategy']} | {rank} | {' | '.join(cells)} |")
    runs = sum(map(len, groups.values()))
    return "\n".join([*lines, "", f"{len(groups)} pairs of dataset and model, {runs} runs."])


def ranking_sentence() -> str:
    """In a sentence: on how many pairs of dataset and model DenseASWA tests better than the usual weights."""
    groups, ranked = ranked_groups()
    against = {row["strategy"]: row["against"].get("dense-aswa") for row in ranked}
    ranks = {row["strategy"]: f"{row['rank']:.1f}" for row in ranked if row["rank"]}
    names = {"ema": "EMA", "swa": "SWA", "best": "the best epoch", "last": "the last epoch"}
    *wins, final = [f"{label} in {against[name]['wins']}" for name, label in names.items()]
    p = shown_p(max(against[name]["p"] for name in names))
    return (
        f"By test score on {len(groups)} pairs of dataset and model, with {len(ranks)} kinds of weights from the same "
        f"runs, ASWA over every step (`dense-aswa`) beats {', '.join(wins)} and {final} (Wilcoxon's test, largest p "
        f"{p}). Its mean rank is {ranks['dense-aswa']}, that of ASWA over epochs {ranks['aswa']} and that of EMA "
        f"{ranks['ema']} "
        f"([table]({RESULTS_PAGE}#all-strategies-in-the-same-runs))."
    )


def swept(*datasets: str) -> list[Swept]:
    """The runs at several learning rates, without those of unfinished seeds."""
    found = [result for results in load_results("robustness", datasets).values() for result in results]
    found += [
        result
        for result in language_results()
        if result["schedule"] == "constant" and (not datasets or plain(result["dataset"]) in map(plain, datasets))
    ]
    runs = [
        Swept(
            result["dataset"],
            result["model"],
            result["lr"],
            result["seed"],
            _metric(result),
            {
                name: score(result, name, _metric(result))
                for name in result["strategies"]
                if name in DEFAULT_STRATEGIES
            },
            {
                name: [(x, 100 * y) for x, y in curve]
                for name, curve in result["scores"].items()
                if name in DEFAULT_STRATEGIES
            },
        )
        for result in found
    ]
    return with_every_rate(runs)


def robustness_table(*datasets: str) -> str:
    """The test scores by learning rate, the best of each rate bold, and how far each strategy falls below its best."""
    runs = swept(*datasets)
    rates = sorted({run.rate for run in runs})
    found = {name: by_rate(runs, name) for name in STRATEGIES if name in runs[0].test}
    best = {rate: max(round(mean(values[rate]), 1) for values in found.values()) for rate in rates}
    heading = " | ".join(f"{rate:g}" for rate in rates)
    lines = [f"| weights | {heading} | best − worst rate |", "| --- |" + " --- |" * (len(rates) + 1)]
    for name, values in found.items():
        means = {rate: mean(values[rate]) for rate in rates}
        cells = [_spread(values[rate], bold=round(means[rate], 1) == best[rate]) for rate in rates]
        lines.append(f"| {name} | {' | '.join(cells)} | {max(means.values()) - min(means.values()):.1f} |")
    return "\n".join(lines)


def headline(*datasets: str) -> str:
    """In a sentence: what each strategy loses at ten times the learning rate at which a single epoch does best."""
    lost: dict[str, list[float]] = defaultdict(list)
    pairs = by_pair(swept(*datasets))
    for runs in pairs.values():
        rate = best_rate(runs)
        for name in runs[0].test:
            found = by_rate(runs, name)
            high = min(found, key=lambda other: abs(other - 10 * rate))
            lost[name].append(mean(found[rate]) - mean(found[high]))
    points = {name: f"{mean(values):.1f}" for name, values in lost.items()}
    counts = sorted({len({run.seed for run in runs}) for runs in pairs.values()})
    seeds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    graphs = [dataset for dataset, _ in pairs]
    models = " and ".join(dict.fromkeys(LABELS[model] for _, model in pairs))
    where = f"{models} on {', '.join(graphs[:-1])} and {graphs[-1]}"
    return (
        f"**Ten times the learning rate** at which a single epoch does best costs ASWA {points['aswa']} points of "
        f"test MRR, early stopping {points['best']}, SWA {points['swa']}, EMA {points['ema']} and plain training "
        f"{points['last']} (mean of {where}, {seeds} seeds; these models overfit, and on others averaging saves less: "
        f"[more]({RESULTS_PAGE}#at-learning-rates-that-nobody-tuned))."
    )


def faster(dataset: str, tuned: str, high: str) -> str:
    """In a sentence: after how many epochs ASWA at a high learning rate has the quality of a tuned one."""
    runs = swept(dataset)
    rows = {row["strategy"]: row for row in times_to_quality(runs, float(tuned))}
    fast = [run for run in runs if run.rate == float(high)]
    reached = {name: row["reached"][float(high)] for name, row in rows.items()}
    shown = {name: f"{count} of {len(fast)}" if count else "no run" for name, count in reached.items()}
    lost = mean(max(score for _, score in run.curves["ema"]) - run.curves["ema"][-1][1] for run in fast)
    single = {rate: epochs for rate, epochs in rows["best"]["epochs"].items() if epochs is not None}
    best = min(single, key=lambda rate: single[rate])
    few, many = rows["aswa"]["epochs"][float(high)], single[float(tuned)]
    test = {name: mean(by_rate(runs, name)[rate]) for name, rate in (("aswa", float(high)), ("best", float(tuned)))}
    return (
        f"**{few:.0f} epochs instead of {many:.0f}**: at a learning rate of {high} ASWA needs that many to reach "
        f"the validation MRR of the best epoch at {tuned}, about the published rate ({LABELS[fast[0].model]} on "
        f"{dataset}, mean of {len(fast)} seeds). On the test split it ends at {test['aswa']:.1f}, that epoch at "
        f"{test['best']:.1f}. Single epochs need at least {single[best]:.0f}, at a rate of {best:g}; at {high} they "
        f"reach it in {shown['best']}, EMA in {shown['ema']} and DenseASWA in {shown['dense-aswa']} runs. From its "
        f"best epoch to the last one, {fast[0].curves['ema'][-1][0]:.0f}, EMA loses {lost:.1f} points of validation "
        f"MRR; ASWA never falls ([more]({RESULTS_PAGE}#at-learning-rates-that-nobody-tuned))."
    )


def times_table(dataset: str, *tuned: str) -> str:
    """After how many epochs each strategy reached the best single epoch of the best learning rate, or of `tuned`."""
    runs = swept(dataset)
    rates = sorted({run.rate for run in runs})
    rows = {row["strategy"]: row for row in times_to_quality(runs, *map(float, tuned))}
    lines = [f"| weights | {' | '.join(f'{rate:g}' for rate in rates)} |", "| --- |" + " --- |" * len(rates)]
    lines += [
        f"| {name} | {' | '.join(shown_epochs(rows[name], rate) for rate in rates)} |"
        for name in STRATEGIES
        if name in rows
    ]
    target = next(iter(rows.values()))["target"]
    return "\n".join([*lines, "", f"The validation score to reach is {target:.1f}, averaged over seeds."])


def tuned_table(metric: str) -> str:
    """The test scores of recipes over seeds, the best of each row bold."""
    found = runs_of_recipes(RESULTS / "tuned")
    names = [name for name in STRATEGIES if name in TUNED]
    heading = ["recipe", "runs", *(["published"] if metric == "mrr" else []), *names]
    lines = [f"| {' | '.join(heading)} |", "|" + " --- |" * len(heading)]
    for recipe, results in found:
        cells = [recipe.name, str(len(results))]
        if metric == "mrr":
            cells.append("" if recipe.published is None else f"{100 * recipe.published:.1f}")
        cells += _cells([[score(result, name, metric) for result in results] for name in names])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def costs_table() -> str:
    """The mean time and memory of the runs of recipes."""
    lines = [f"| recipe | epochs | {' | '.join(COSTS.values())} |", "| --- | --- |" + " --- |" * len(COSTS)]
    for recipe, results in runs_of_recipes(RESULTS / "tuned"):
        taken = mean_costs(results)
        digits = {"train": 1, "cpu": 1}
        cells = ["–" if taken[key] is None else f"{taken[key]:.{digits.get(key, 2)}f}" for key in COSTS]
        lines.append(f"| {recipe.name} | {results[0]['epochs']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _metric(result: Result) -> str:
    return METRICS.get(result["task"], "mrr")


def shapes_table(*datasets: str) -> str:
    """The mean MRR of each shape of query over all graphs and models, the best of each row bold."""
    groups = {key: distinct(results) for key, results in distinct_groups(load_results("multi-hop", datasets)).items()}
    names = strategies_of(groups)
    lines = [f"| shape | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for shape in (*TABLES["multi-hop"].columns, "average"):
        values = [
            [
                mean(score(result, name, shape) for result in results)
                for results in groups.values()
                if _has(results, shape)
            ]
            for name in names
        ]
        lines.append(f"| {shape} | {' | '.join(_cells([[mean(some)] for some in values]))} |")
    return "\n".join(lines)


def _has(results: list[Result], shape: str) -> bool:
    return all(shape in result["strategies"]["aswa"]["queries"] for result in results)


def paper_table(name: str, dataset: str) -> str:
    """Our numbers, the paper's and the differences, for the strategies that the paper has; ours of the others too."""
    table = TABLES[name]
    groups = load_results(name, [dataset])
    names = strategies_of(groups)
    lines = [f"| model | weights | | {' | '.join(table.columns.values())} |"]
    lines.append("| --- | --- | --- |" + " --- |" * len(table.columns))
    for (_, model), results in groups.items():
        for strategy in names:
            ours = {column: mean(score(result, strategy, column) for result in results) for column in table.columns}
            paper = _paper_row(name, dataset, model, strategy)
            differences = {column: ours[column] - figure for column, figure in paper.items()}
            label = f"{LABELS[model]} | {strategy}"
            for kind, numbers, sign in (("ours", ours, ""), ("paper", paper, ""), ("difference", differences, "+")):
                if numbers:
                    cells = [f"{numbers[c]:{sign}.1f}" if c in numbers else "–" for c in table.columns]
                    lines.append(f"| {label} | {kind} | {' | '.join(cells)} |")
                    label = " | "
    return "\n".join(lines)


def _paper_row(name: str, dataset: str, model: str, strategy: str) -> dict[str, float]:
    for (paper_dataset, *rest), figures in paper_figures(name).items():
        if plain(paper_dataset) == plain(dataset) and rest == [model, strategy]:
            return {column: 100 * figure.mean for column, figure in zip(TABLES[name].figures, figures, strict=True)}
    return {}


def bn_table() -> str:
    """The test accuracy of averaged weights by the number of batches for BatchNorm, and the largest difference."""
    found = json.loads((RESULTS / "differences" / "bn_batches.json").read_text(encoding="utf-8"))
    counts, every = list(next(iter(found["accuracy"].values()))), str(found["available"])
    heading = " | ".join(f"all {count}" if count == every else count for count in counts)
    lines = [f"| weights | {heading} |", "| --- |" + " --- |" * len(counts)]
    lines += [
        f"| {name} | {' | '.join(f'{mean(values[count]):.2f}' for count in counts)} |"
        for name, values in found["accuracy"].items()
    ]
    gaps = [max(abs(mean(v[count]) - mean(v[every])) for v in found["accuracy"].values()) for count in counts]
    return "\n".join([*lines, f"| largest difference | {' | '.join(f'{gap:.2f}' for gap in gaps)} |"])


def snapshot_table() -> str:
    """The test MRR of DenseASWA with and without the score of its snapshot."""
    runs = json.loads((RESULTS / "differences" / "snapshot_score.json").read_text(encoding="utf-8"))["runs"]
    names = ("dense-aswa", "unscored")
    lines = [
        "| dataset | seed | epochs | dense-aswa | without the snapshot's score | difference |",
        "| --- |" + " --- |" * 5,
    ]
    for run in runs:
        scores = [100 * run[name]["test"] for name in names]
        cells = " | ".join(f"{value:.1f}" for value in scores)
        about = " | ".join(str(run[name]) for name in ("dataset", "seed", "epochs"))
        lines.append(f"| {about} | {cells} | {scores[1] - scores[0]:+.1f} |")
    return "\n".join(lines)


def weights_table(kind: str = "weights") -> str:
    """Results on FB15k-237 from other initial weights, or QMult with other relations, beside ours and the paper's."""
    heading, first, others = {
        "weights": ("first weights", "Xavier", {"N(0, 1)": "weights"}),
        "quaternions": (
            "model",
            "ours",
            {"ours, from N(0, 1)": "weights-qmult", "as in the library, from N(0, 1)": "quaternions"},
        ),
    }[kind]
    found = {
        label: json.loads((RESULTS / "differences" / f"{file}.json").read_text(encoding="utf-8"))
        for label, file in others.items()
    }
    ((dataset, model),) = {(run["dataset"], run["model"]) for run in found.values()}
    (ours,) = load_results(KGE, [dataset])[dataset, model]
    columns = TABLES[KGE].columns
    lines = [f"| weights | {heading} | {' | '.join(columns.values())} |", "| --- | --- |" + " --- |" * len(columns)]
    for strategy in next(iter(found.values()))["strategies"]:
        rows = {first: {column: score(ours, strategy, column) for column in columns}}
        for label, run in found.items():
            rows[label] = {column: 100 * run["strategies"][strategy]["test"][column] for column in columns}
        rows["the paper, after more epochs"] = _paper_row(KGE, dataset, model, strategy)
        for label, numbers in rows.items():
            lines.append(f"| {strategy} | {label} | {' | '.join(f'{numbers[column]:.1f}' for column in columns)} |")
    return "\n".join(lines)


def hops_table() -> str:
    """The MRR of paths of two hops by what is multiplied along them."""
    found = json.loads((RESULTS / "differences" / "hops.json").read_text(encoding="utf-8"))
    dataset, model = found["run"].rsplit("-", 3)[:2]
    paper = _paper_row("multi-hop", dataset, model, "aswa")["2p"]
    return "\n".join(
        [
            "| products of | MRR of 2p, weights of ASWA |",
            "| --- | --- |",
            f"| truth values (sigmoid of the logits) | {100 * found['truth values']:.1f} |",
            f"| logits | {100 * found['logits']:.1f} |",
            f"| the paper | {paper:.1f} |",
        ]
    )


def read_log(result: Result) -> list[dict[str, str]]:
    run = f"{result['dataset'].lower()}-{result['model']}-{result['seed']}-{result['epochs']}"
    return read_tsv(RESULTS / "logs" / f"{run}.tsv")


def read_tsv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def decisions_table(*datasets: str) -> str:
    """What ASWA decided, averaged over seeds; "last change" is the epoch of the last soft or hard update."""
    heading = "best epoch | hard | soft | reject | last change | snapshots | validation, best epoch | validation, ASWA"
    lines = [f"| dataset | model | epochs | {heading} |", "| --- | --- |" + " --- |" * 9]
    for (dataset, model), results in load_results(KGE, datasets).items():
        columns = []
        for result in results:
            rows = read_log(result)
            made = [row["decision"] for row in rows]
            running = [float(row["last"]) for row in rows]
            changed = max(number for number, decision in enumerate(made, 1) if decision != "reject")
            counts = [made.count(kind) for kind in ("hard", "soft", "reject")]
            columns.append([running.index(max(running)) + 1, *counts, changed, int(rows[-1]["members"])])
            columns[-1] += [100 * max(running), 100 * float(rows[-1]["aswa"])]
        means = [mean(values) for values in zip(*columns, strict=True)]
        cells = [f"{value:.0f}" for value in means[:-2]] + [f"{value:.1f}" for value in means[-2:]]
        lines.append(f"| {dataset} | {LABELS[model]} | {results[0]['epochs']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def distinct(results: list[Result]) -> list[Result]:
    """Those with different numbers: Keci's default algebra is that of ComplEx, and its runs are the same."""
    return list({json.dumps(result["strategies"], sort_keys=True): result for result in results}.values())


def distinct_groups(groups: Groups) -> Groups:
    return {
        key: results
        for number, (key, results) in enumerate(groups.items())
        if not any(
            [r["strategies"] for r in results] == [r["strategies"] for r in others]
            for others in list(groups.values())[:number]
        )
    }


def wins(groups: Groups, names: list[str], metric: str) -> str:
    """How often ASWA is ahead of, equal to and behind each of the others, run by run."""
    runs = [result for results in distinct_groups(groups).values() for result in results]
    counts = []
    for name in names:
        if name != "aswa":
            gaps = [round(score(result, "aswa", metric) - score(result, name, metric), 2) for result in runs]
            counts.append(
                f"{name} {sum(g > 0 for g in gaps)} / {sum(g == 0 for g in gaps)} / {sum(g < 0 for g in gaps)}"
            )
    once = "; Keci, which is ComplEx here, is not counted" if len(distinct_groups(groups)) < len(groups) else ""
    return f"ASWA is better / equal / worse in {len(runs)} runs than {', '.join(counts)}{once}."


def _cells(values: Iterable[list[float]]) -> list[str]:
    """Means with their deviations, the best bold."""
    values = list(values)
    best = max(round(mean(some), 1) for some in values)
    return [_spread(some, bold=round(mean(some), 1) == best) for some in values]


def _spread(values: list[float], *, bold: bool) -> str:
    shown = f"{mean(values):.1f}"
    spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    return f"**{shown}**{spread}" if bold else shown + spread


# Weights whose validation MRR a page shows by epoch, and what they are called there.
AVERAGES = {
    "last": "running model",
    "ema": "EMA",
    "swa-all": "SWA from the first epoch",
    "swa": "SWA, last quarter",
    "aswa": "ASWA",
}


def average_panels(pairs: list[tuple[str, str]]) -> list[Panel]:
    """Validation MRR by epoch of the running model and of what is averaged from it."""
    found = []
    for dataset, model in pairs:
        (results,) = (found for (_, name), found in load_results(KGE, [dataset]).items() if name == model)
        curves = {}
        for name in AVERAGES:
            points = {int(row["epoch"]): 100 * float(row[name]) for row in read_log(results[0]) if row[name]}
            curves[name] = {epoch: (score, score, score) for epoch, score in points.items()}
        found.append(Panel(f"{LABELS[model]} on {results[0]['dataset']}", "epoch", "validation MRR (%)", curves))
    return found


def logged(run: str) -> dict[str, Trajectory]:
    """The strategies of a run as its log in results/logs/ has them; without the scores of the look-aheads."""
    rows = read_tsv(RESULTS / "logs" / f"{run}.tsv")

    def record(index: int, row: dict[str, str], name: str) -> Record:
        ours = name == "aswa"
        decision, members = (Decision(row["decision"]), int(row["members"])) if ours else (Decision.SOFT, index + 1)
        score = float(row[name]) if row[name] else None
        return Record(index, None, float(row["epoch"]), float(row["last"]), None, score, members, decision)

    names = ("aswa", "swa", "ema")
    return {name: Trajectory(record(i, row, name) for i, row in enumerate(rows)) for name in names}


# Runs whose trajectory a page shows: the picture, the log, its metric and title.
SHOWN = [
    ("umls-keci", "umls-keci-0-256", "MRR", "Keci on UMLS"),
    *(
        (f"cifar10-{s}", f"cifar10-preresnet20-{s}", "accuracy", f"PreResNet-20 on CIFAR-10, seed {s}")
        for s in range(3)
    ),
]


def language_table() -> str:
    """Mean ± standard deviation of the loss over seeds, the lowest of each row bold."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for path in sorted((RESULTS / "language").glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if result["lr"] == LANGUAGE_RATE:
            groups[f"{result['task']} | {result['schedule']}"].append(result)
    names = ["last", "best", "ema", "bema", "swa", "aswa", "dense-aswa"]
    lines = [f"| task | learning rate | data | {' | '.join(names)} |", "| --- | --- | --- |" + " --- |" * len(names)]
    for task, results in groups.items():
        for split, label in (("validation", "validation"), ("test", "held out")):
            losses = [[result["strategies"][name][split]["loss"] for result in results] for name in names]
            best = min(round(mean(values), 3) for values in losses)
            cells = [
                ("**{}**" if round(mean(values), 3) == best else "{}").format(f"{mean(values):.3f}")
                + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")
                for values in losses
            ]
            lines.append(f"| {task} | {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def epoch_panels(*patterns: str, first: int = 1) -> list[Panel]:
    """Validation scores by epoch, from the first one shown, of the runs whose logs match."""
    found = []
    for path in (path for pattern in patterns for path in sorted((RESULTS / "logs").glob(pattern))):
        result = json.loads((RESULTS / "strategies" / f"{path.stem}.json").read_text(encoding="utf-8"))
        rows = [row for row in read_tsv(path) if int(row["epoch"]) >= first]
        curves = {}
        for name in ("last", "ema", "aswa", "dense-aswa"):
            points = {float(row["epoch"]): 100 * float(row[name]) for row in rows if row[name]}
            curves[name] = {epoch: (score, score, score) for epoch, score in points.items()}
        title = f"{LABELS[result['model']]} on {result['dataset']}"
        found.append(Panel(title, "epoch", f"validation {_metric(result)} (%)", curves))
    return found


def gains_over_best() -> dict[str, tuple[list[float], float]]:
    """How far DenseASWA is ahead of the best epoch on test, run by run; by dataset, the smallest validation first."""
    gains: dict[tuple[int, str], list[float]] = defaultdict(list)
    for (dataset, _), results in distinct_groups(load_results("strategies", ())).items():
        for result in results:
            examples = (result.get("triples") or result["images"])["validation"]
            gain = score(result, "dense-aswa", _metric(result)) - score(result, "best", _metric(result))
            gains[examples, dataset].append(gain)
    names = {"cifar10": "CIFAR-10"}
    return {
        f"{names.get(dataset, dataset)} ({count:,})": (found, median(found))
        for (count, dataset), found in sorted(gains.items())
    }


# The graphs of the picture at the top of the README, and what it calls the weights.
HEADLINE = ("CoDEx-S", "KINSHIP")
PUBLISHED_RATE = 0.0003  # of CoDEx-S, to one digit
WEIGHTS = {
    "last": "plain training",
    "best": "early stopping",
    "swa": "SWA",
    "ema": "EMA",
    "aswa": "ASWA",
    "dense-aswa": "DenseASWA",
    "published": f"early stopping at {PUBLISHED_RATE}",
}


def headline_panels(*datasets: str) -> list[Panel]:
    """Validation MRR by epoch at a high learning rate on the first dataset, and test MRR by learning rate on all."""
    by_rate, by_epoch = zip(*(next(panels(swept(dataset), LABELS)) for dataset in datasets), strict=True)
    tuned = mean_curve([run.curves["best"] for run in swept(datasets[0]) if run.rate == PUBLISHED_RATE])
    curves = {**by_epoch[0].curves, "published": tuned}
    first = replace(
        by_epoch[0], y="validation MRR (%)", curves=curves, bottom=0.75 * max(y for _, y, _ in tuned.values())
    )
    return [first, *(replace(panel, y="test MRR (%)") for panel in by_rate)]


OTHERS: dict[str, Callable[..., str]] = {
    "shapes": shapes_table,
    "paper": paper_table,
    "decisions": decisions_table,
    "strategies": strategies_table,
    "ranks": ranks_table,
    "robustness": robustness_table,
    "times": times_table,
    "faster": faster,
    "headline": headline,
    "ranking": ranking_sentence,
    "tuned": tuned_table,
    "costs": costs_table,
    "bn": bn_table,
    "snapshot": snapshot_table,
    "weights": weights_table,
    "hops": hops_table,
    "language": language_table,
}


def filled(mark: re.Match[str]) -> str:
    kind, *arguments = mark[2].split()
    text = OTHERS[kind](*arguments) if kind in OTHERS else metric_table(kind, *arguments)
    return f"{mark[1]}{text}{mark[3]}" if mark.re is SENTENCE else f"{mark[1]}\n{text}\n\n{mark[3]}"


def filled_page(text: str) -> str:
    """A page with all of its tables and sentences."""
    return SENTENCE.sub(filled, MARKED.sub(filled, text))


def draw_pictures(folder: Path) -> None:
    """Draws the pictures of the pages, each also for phones, and that of the README."""
    averages = average_panels([("UMLS", "complex"), ("KINSHIP", "complex"), ("FB15k-237", "complex")])
    for end, narrow in (("", False), ("-narrow", True)):
        plot_panels([averages], folder / f"results{end}.png", labels=AVERAGES, narrow=narrow)
        for picture, run, metric, title in SHOWN:
            place = folder / f"{picture}{end}.png"
            plot_trajectories(logged(run), place, metric=metric, title=title, narrow=narrow)
        if found := epoch_panels("fb15k-237-*-0-*-strategies.tsv", "cifar-10-preresnet*-0-*-strategies.tsv"):
            plot_panels([found], folder / f"many-steps{end}.png", narrow=narrow)
        if found := epoch_panels("digits-*-0-*-strategies.tsv", first=8):
            plot_panels([found], folder / f"digits{end}.png", narrow=narrow)
        figure = draw_gains(gains_over_best(), "DenseASWA above the best epoch (points of test score)", narrow=narrow)
        (folder / f"gains{end}.png").write_bytes(as_png(figure, narrow=narrow))
        if runs := swept():
            plot_panels(list(panels(runs, LABELS)), folder / f"robustness{end}.png", narrow=narrow)
    plot_panels([headline_panels(*HEADLINE)], folder / "rates.png", labels=WEIGHTS)


def main() -> None:
    draw_pictures(ROOT / "docs")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        new = filled_page(text)
        if new != text:
            page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
