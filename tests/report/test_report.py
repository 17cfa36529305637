"""Reports: the arithmetic by hand and against all 2ⁿ signs, what is counted once, and the page itself."""

from __future__ import annotations

import json
import math
import random
import re
from html.parser import HTMLParser
from itertools import product

import pytest

from aswa_hf import Decision, Trajectory
from aswa_hf.report import write_report
from aswa_hf.report.compare import ALL, behind, by_pair, compare, gains, poolable, strategies_of, twins
from aswa_hf.report.gather import read_run, read_runs
from aswa_hf.report.statistics import holm, signed_rank, spread, win_tie_loss
from aswa_hf.trajectory import Record, save_trajectories


def result(aswa, last, *, dataset="UMLS", model="keci", seed=0, metric="mrr", task="link-prediction", **more):
    """What a run writes, with one metric for two strategies; validation values are others."""
    strategies = {
        name: {"validation": {metric: value if isinstance(value, str) else value + 0.05}, "test": {metric: value}}
        for name, value in (("aswa", aswa), ("last", last))
    }
    about = {"task": task, "dataset": dataset, "model": model, "seed": seed, "epochs": 4}
    return {**about, "strategies": strategies, "seconds": {"train": 2.0, "evaluate": 1.0}, **more}


@pytest.fixture
def save(tmp_path):
    """Writes results under a name and returns the path."""

    def write(name, content):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(content))
        return path

    return write


@pytest.fixture
def runs_of(save):
    return lambda *contents: read_runs([save(f"run-{i}", content) for i, content in enumerate(contents)])[0]


def trajectory(*decisions):
    scores = [0.1, 0.5, 0.6, 0.6, 0.7, 0.7]
    return Trajectory(
        Record(i, 10 * i, i + 1.0, 0.5 - 0.01 * i, 0.6, scores[i], 1, decision) for i, decision in enumerate(decisions)
    )


def run_folder(folder, content, *decisions, **more):
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(content))
    decided = trajectory(*(decisions or (Decision.INIT, Decision.HARD, Decision.SOFT, Decision.REJECT)))
    about = {"metric": "mrr", "greater_is_better": True, **more}
    save_trajectories(folder / "aswa_trajectory.json", {"aswa": decided}, **about)
    return folder


# Statistics


def test_mean_and_sample_deviation_over_seeds():
    found = spread([0.1, 0.2, 0.6])
    assert (found.mean, found.n) == (pytest.approx(0.3), 3)
    assert found.std == pytest.approx(math.sqrt((0.04 + 0.01 + 0.09) / 2))
    assert spread([0.5]).std is None
    assert math.isnan(spread([0.5, math.nan]).mean)


def test_differences_below_the_digits_shown_are_ties():
    assert win_tie_loss([0.2, 0.00004, -0.00004, 0.0, -0.0001]) == (1, 3, 1)


def test_signed_rank_of_five_differences_by_hand():
    # Ranks of the sizes: 3, 1 (negative), 2, 4, 5. Of 32 sign patterns the sums 0 and 1 come up once each.
    found = signed_rank([0.3, -0.1, 0.2, 0.4, 0.5])
    assert (found.n, found.statistic, found.median) == (5, 1.0, 0.3)
    assert found.p == pytest.approx(2 * 2 / 32)


def test_signed_rank_with_shared_ranks_and_zeros_by_hand():
    # The zeros go; ranks 2, 2 (negative), 2, 4. Sums up to 2: none or one of three, so 4 of 16 sign patterns.
    found = signed_rank([0.1, 0.0, -0.1, 0.1, 0.2, 0.0])
    assert (found.n, found.statistic) == (4, 2.0)
    assert found.p == pytest.approx(2 * 4 / 16)
    assert found.median == pytest.approx(0.05)  # zeros included


@pytest.mark.parametrize("seed", range(8))
def test_signed_rank_is_what_all_sign_patterns_give(seed):
    rng = random.Random(seed)
    differences = [rng.randint(-4, 6) / 10 for _ in range(9)]
    sizes = sorted(abs(d) for d in differences if d)
    rank = {size: (2 * sizes.index(size) + sizes.count(size) + 1) / 2 for size in sizes}
    ranks = [rank[abs(d)] for d in differences if d]
    plus = sum(rank[abs(d)] for d in differences if d > 0)
    statistic = min(plus, sum(ranks) - plus)
    sums = [
        sum(r for r, sign in zip(ranks, signs, strict=True) if sign) for signs in product((0, 1), repeat=len(ranks))
    ]
    found = signed_rank(differences)
    assert found.statistic == statistic
    assert found.p == pytest.approx(min(1.0, 2 * sum(s <= statistic for s in sums) / len(sums)))


def test_signed_rank_of_many_differences_is_scipys():
    from scipy.stats import wilcoxon

    rng = random.Random(0)
    differences = [round(rng.gauss(0.2, 1), 4) for _ in range(40)]
    assert len({abs(d) for d in differences}) == 40
    theirs = wilcoxon(differences, method="exact")
    found = signed_rank(differences)
    assert (found.statistic, found.p) == (theirs.statistic, pytest.approx(theirs.pvalue, rel=1e-9))


@pytest.mark.parametrize("differences", [[], [0.0, 0.0]])
def test_signed_rank_of_nothing_says_nothing(differences):
    found = signed_rank(differences)
    assert (found.n, found.statistic, found.p) == (0, 0.0, 1.0)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


# Comparing


def test_seeds_are_averaged_before_they_count_as_a_pair(runs_of):
    runs = runs_of(
        result(0.5, 0.4, seed=0),
        result(0.5, 0.7, seed=1),
        result(0.9, 0.1, model="qmult"),
        result(0.3, 0.3, model="x"),
    )
    (against,) = compare(by_pair(runs), ["mrr"], "test")
    assert against.gains == pytest.approx({"UMLS · keci": -0.05, "UMLS · qmult": 0.8, "UMLS · x": 0.0})
    assert (against.wins, against.ties, against.losses, against.n) == (1, 1, 1, 2)


def test_a_model_with_the_results_of_another_counts_once_whatever_its_name(runs_of):
    one = [result(0.5 + 0.1 * s, 0.4, model="complex", seed=s) for s in range(2)]
    same = [result(0.5 + 0.1 * s, 0.4, model="keci", seed=s) for s in range(3)]
    other = [result(0.5, 0.4, model="qmult", seed=0), result(0.6001, 0.4, model="qmult", seed=1)]
    elsewhere = [result(0.5 + 0.1 * s, 0.4, dataset="KINSHIP", seed=s) for s in range(2)]
    groups = by_pair(runs_of(*one, *same, *other, *elsewhere))
    assert twins(groups) == {("UMLS", "complex"): ("UMLS", "keci")}  # keci has more seeds


def test_smaller_is_better_for_ranks_and_losses_and_they_are_not_pooled(runs_of):
    content = result(0.5, 0.4)
    for name, rank, loss in (("aswa", 3.0, 0.2), ("last", 5.0, 0.1)):
        content["strategies"][name]["test"] |= {"mean_rank": rank, "loss": loss, "hits@1": 0.5}
    groups = by_pair(runs_of(content))
    assert gains(groups, "last", "mean_rank", "test") == ({("UMLS", "keci"): 2.0}, [])
    assert gains(groups, "last", "loss", "test")[0][("UMLS", "keci")] == pytest.approx(-0.1)
    assert poolable(groups, ["mrr", "mean_rank", "loss", "hits@1"], "test") == ["mrr", "hits@1"]
    (against,) = compare(groups, ["mrr", "hits@1"], "test")
    assert (against.metric, against.wins, against.ties) == (ALL, 1, 1)


def test_a_trajectory_says_which_way_its_metric_is_better(tmp_path):
    folder = run_folder(tmp_path / "run", result(0.5, 0.4, metric="wer"), metric="wer", greater_is_better=False)
    assert gains(by_pair([read_run(folder)]), "last", "wer", "test")[0][("UMLS", "keci")] == pytest.approx(-0.1)


def test_values_that_are_not_numbers_are_left_out_and_reported(save, tmp_path):
    paths = [
        save("a", result("nan", 0.4)),
        save("b", result(0.5, 0.4, model="b")),
        save("c", result(0.5, "inf", model="c")),
    ]
    told = write_report(paths, tmp_path / "report.html")
    (comparison,) = told["tasks"][0]["comparisons"]
    assert comparison["gains"] == {"UMLS · b": pytest.approx(0.1)}
    assert any("not finite on UMLS · c and UMLS · keci" in note for note in told["notes"])
    json.dumps(told, allow_nan=False)
    assert "nan" in (tmp_path / "report.html").read_text()


def test_runs_with_other_strategies_are_compared_where_they_meet(runs_of):
    both, with_ema = result(0.5, 0.4, seed=0), result(0.7, 0.6, seed=1)
    with_ema["strategies"]["ema"] = {"test": {"mrr": 0.8}}
    with_ema["strategies"]["swa-all"] = {"test": {"mrr": 0.1}}
    runs = runs_of(both, with_ema)
    assert strategies_of(runs) == ["last", "swa-all", "ema", "aswa"]
    found = {c.other: c.gains["UMLS · keci"] for c in compare(by_pair(runs), ["mrr"], "test")}
    assert found == pytest.approx({"last": 0.1, "swa-all": 0.6, "ema": -0.1})
    (worst,) = behind(by_pair(runs), "mrr", "test")
    assert (worst.other, worst.gap) == ("ema", pytest.approx(0.1))


# Reading


def test_runs_with_other_settings_are_distinguished_and_seeds_are_not(runs_of):
    def settings(seed, lr, dataset):
        return {"dataset": dataset, "model": "keci", "seed": seed, "lr": lr, "strategies": ["aswa"], "recipe": None}

    runs = runs_of(
        result(0.5, 0.4, seed=0, settings=settings(0, 0.1, "UMLS")),
        result(0.6, 0.4, seed=1, settings=settings(1, 0.1, "data/UMLS")),
        result(0.7, 0.4, seed=0, settings=settings(0, 0.2, "UMLS")),
        result(0.8, 0.4, seed=0, model="qmult"),
    )
    assert [(run.model, run.seed) for run in runs] == [
        ("keci, lr 0.1", 0),
        ("keci, lr 0.1", 1),
        ("keci, lr 0.2", 0),
        ("qmult", 0),
    ]


def test_the_same_run_counts_once_and_keeps_its_trajectory(save, tmp_path):
    folder = run_folder(tmp_path / "run", result(0.5, 0.4))
    runs, notes = read_runs([save("a", result(0.5, 0.4)), folder, folder])
    assert [bool(run.trajectories) for run in runs] == [True]
    assert len(notes) == 1
    assert "count once" in notes[0]
    with pytest.raises(
        ValueError, match=r"b\.json and .*run are both keci on UMLS, seed 0 .* but their results differ"
    ):
        read_runs([save("b", result(0.6, 0.4)), folder])


def test_a_trajectory_alone_shows_its_last_scores(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    decided = trajectory(Decision.INIT, Decision.HARD)
    save_trajectories(folder / "aswa_trajectory.json", {"aswa": decided}, metric="loss", greater_is_better=False)
    run = read_run(folder)
    assert (run.model, run.scores, run.lower) == ("mine", {"aswa": {"validation": {"loss": 0.5}}}, {"loss"})
    told = write_report([folder], tmp_path / "report.html")
    assert told["tasks"][0]["comparisons"] == []
    assert "were not tested on unseen data" in (tmp_path / "report.html").read_text()


def test_a_trainers_folder_is_shown_by_its_own_account_and_distinguished_by_its_name(tmp_path):
    told = {"model": "Bert", "dataset": None, "seed": 0, "epochs": 4}
    for name, score in (("one", 0.8), ("two", 0.9)):
        scores = {strategy: {"validation": {"loss": 0.3, "accuracy": score}} for strategy in ("aswa", "last")}
        decided = trajectory(Decision.INIT, Decision.HARD)
        (tmp_path / name).mkdir()
        save_trajectories(
            tmp_path / name / "aswa_trajectory.json",
            {"aswa": decided},
            metric="accuracy",
            greater_is_better=True,
            run={**told, "strategies": scores},
        )
    report = write_report([tmp_path / "one", tmp_path / "two"], tmp_path / "report.html")["tasks"][0]
    assert report["metric"] == "accuracy"  # what decided, though the Trainer tells the loss first
    means = {(r["model"], r["strategy"]): r["mean"] for r in report["results"] if r["metric"] == "accuracy"}
    assert means == {("one", "aswa"): 0.8, ("one", "last"): 0.8, ("two", "aswa"): 0.9, ("two", "last"): 0.9}


BROKEN = {
    "a list": ("[1]", "expected an object"),
    "no JSON": ("{", "is not a JSON file"),
    "something else": ("{}", "has no 'task'"),
    "no strategies": (json.dumps(result(1, 0) | {"strategies": {}}), "has no 'strategies'"),
    "strategies are text": (json.dumps(result(1, 0) | {"strategies": "x"}), "'strategies' must map names to results"),
    "a strategy without results": (json.dumps(result(1, 0) | {"strategies": {"aswa": 3}}), "strategy 'aswa' has no"),
    "a value is text": (json.dumps(result("good", 0)), "aswa test mrr must be a number, got 'good'|aswa validation"),
    "a value is true": (json.dumps(result(0.5, True)), "last test mrr must be a number, got True"),
    "the seed is text": (json.dumps(result(1, 0, seed="one")), "'seed' must be an integer"),
    "a broken trajectory": ('{"format": "aswa-trajectory", "version": 1}', "has no 'metric'"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_one_error_with_its_name(tmp_path, kind):
    text, message = BROKEN[kind]
    (tmp_path / "broken.json").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_run(tmp_path / "broken.json")
    assert "broken.json" in str(caught.value)


def test_a_folder_that_is_not_a_run_is_named_with_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="nowhere does not exist"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(
        ValueError, match=f"{tmp_path} is not a run: it has neither results.json nor aswa_trajectory.json.$"
    ):
        read_run(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"nor aswa_trajectory.json.$"):
        read_run(tmp_path)
    run_folder(tmp_path / "run", result(0.5, 0.4))
    with pytest.raises(ValueError, match=r"There are results inside: pass them as .*/\*\.$"):
        read_run(tmp_path)
    (tmp_path / "begun" / "checkpoint-2").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"begun has no results\.json yet: it was not finished"):
        read_runs([tmp_path / "begun"])
    # Beside a run, as runs/* gives it, it is left out and named; what is not there at all is still an error.
    runs, notes = read_runs([tmp_path / "begun", tmp_path / "run"])
    assert [run.source for run in runs] == [str(tmp_path / "run")]
    assert len(notes) == 1
    assert notes[0].startswith(f"Left out: The run in {tmp_path / 'begun'} has no results.json yet")
    with pytest.raises(ValueError, match="nowhere does not exist"):
        read_runs([tmp_path / "nowhere", tmp_path / "run"])


# The page


class Page(HTMLParser):
    """Checks that tags are closed in order, and gathers texts and whatever a page would load."""

    VOID = ("meta", "img", "br", "link", "input", "hr")

    def __init__(self, text):
        super().__init__()
        self.open, self.loaded, self.texts, self.tags = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loaded += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


@pytest.fixture
def many(tmp_path, save):
    """Two link predictors with trajectories, a worse one, the twin of another, and an image classifier."""
    return [
        run_folder(tmp_path / "a", result(0.9, 0.6, model="a <script>")),
        run_folder(tmp_path / "b", result(0.8, 0.7, model="b"), Decision.INIT, Decision.REJECT),
        save("worse", result(0.2, 0.3, model="worse")),
        save("twin", result(0.8, 0.7, model="twin")),
        save("image", result(0.5, 0.5, task="image-classification", dataset="digits", metric="accuracy")),
    ]


def test_the_page_holds_everything_and_loads_nothing(many, tmp_path):
    told = write_report(many, tmp_path / "out" / "report.html")
    text = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    page = Page(text)
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert "@import" not in text
    assert all(target.startswith("#") for target in re.findall(r"(?:url\(|href=\")([^)\"]*)", text))
    assert page.loaded == []
    beside = {path.read_bytes() for path in (tmp_path / "out" / "report_files").iterdir()}
    assert page.tags.count("svg") == len(beside) + 2  # comparisons are there twice, for wide and for narrow screens
    assert "The running model (" in text  # the reasons of decisions
    assert len(beside) == len(told["pictures"]) == 4  # two comparisons, two trajectories
    assert all(picture.startswith(b"\x89PNG") for picture in beside)


def test_an_example_without_code_is_shown_without_any(tmp_path):
    example = {"about": "Probabilities of the first image:", "output": "7  0.9"}
    run = run_folder(tmp_path / "run", result(0.5, 0.4, example=example))
    write_report([run], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<pre>7  0.9</pre>" in text
    assert "None" not in Page(text).text


def test_the_page_says_where_aswa_loses_and_what_was_counted_once(many, tmp_path):
    told = write_report(many, tmp_path / "report.html")
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8")).text
    assert "ASWA has the best mean of all strategies on 2 of 3 (dataset, model) pairs, and is behind" in page
    assert "UMLS · worse : last 0.3000 against ASWA 0.2000" in page
    assert "twin and b have identical results for every seed they share on UMLS" in page
    assert "No strategy did better than ASWA in test accuracy, and at least one did equally well." in page
    assert "1 soft, 1 hard, 1 rejected. 2 of 4 epochs in the average, α = 0.5000 each; last change at epoch 3." in page
    assert "Running model: best 0.5000 at epoch 1, 0.4700 at the end; ASWA 0.6000." in page
    images, links = told["tasks"]
    assert images["comparisons"][0]["ties"] == 1
    (against,) = links["comparisons"]
    assert (against["wins"], against["losses"], against["n"]) == (2, 1, 3)
    assert links["behind"] == [{"dataset": "UMLS", "model": "worse", "strategy": "last", "gap": pytest.approx(0.1)}]


def test_a_test_needs_five_pairs_and_until_then_there_are_no_p_values_bars_or_plots_of_gains(save, tmp_path):
    # Sizes 0.3, 0.1, 0.2, 0.4, 0.5: the only loss has rank 1; of 32 sign patterns two have a sum up to 1.
    gained = {"a": 0.3, "b": -0.1, "c": 0.2, "d": 0.4, "e": 0.5}
    paths = [save(model, result(0.4 + gain, 0.4, model=model)) for model, gain in gained.items()]
    for count in (1, 2, 4, 5):
        (task,) = write_report(paths[:count], tmp_path / "report.html")["tasks"]
        (against,) = task["comparisons"]
        text = (tmp_path / "report.html").read_text(encoding="utf-8")
        page, tested = Page(text), count == 5
        assert against["pairs"] == count
        assert [against[key] for key in ("statistic", "p", "p_holm")] == (
            [1.0, 0.125, 0.125] if tested else [None] * 3
        )
        assert ('class="bar"' in text, "p (Holm)" in page.text, "p-value" in page.text) == (tested,) * 3
        assert ("it needs five or more" in page.text) != tested
        assert any("gains" in path.name for path in (tmp_path / "report_files").iterdir()) == tested
        wins = sum(gain > 0 for gain in list(gained.values())[:count])
        assert count == 1 or f"on {wins} of {count} (dataset, model) pairs" in page.text


def test_metrics_of_few_pairs_do_not_make_many_pairs(save, tmp_path):
    content = result(0.5, 0.4)
    for found in content["strategies"].values():
        found["test"] = {f"hits@{k}": found["test"]["mrr"] + k / 100 for k in range(1, 9)}
    (task,) = write_report([save("a", content)], tmp_path / "report.html")["tasks"]
    assert [len(c["gains"]) for c in task["comparisons"]] == [1] * 8 + [8]
    assert {c["p"] for c in task["comparisons"]} == {None}


def test_only_pairs_with_test_results_of_aswa_and_a_rival_are_won(save, tmp_path):
    untested, alone, elsewhere = (result(0.9, 0.1, model=model) for model in ("untested", "alone", "elsewhere"))
    for found in untested["strategies"].values():
        del found["test"]  # as of a Trainer
    del alone["strategies"]["last"]["test"]
    del elsewhere["strategies"]["aswa"]["test"]
    runs = [result(0.6, 0.5, model="won"), result(0.4, 0.5, model="lost"), untested, alone, elsewhere]
    paths = [save(str(index), content) for index, content in enumerate(runs)]
    (task,) = write_report(paths, tmp_path / "report.html")["tasks"]
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8")).text
    assert [pair["model"] for pair in task["judged"]] == ["lost", "won"]
    assert (
        "best mean of all strategies on 1 of 2 (dataset, model) pairs, and is behind at least one other on 1" in page
    )
    assert "on UMLS · alone, UMLS · elsewhere and UMLS · untested: not counted." in page
    (task,) = write_report(paths[2:], tmp_path / "report.html")["tasks"]
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8")).text
    assert (task["judged"], task["comparisons"]) == ([], [])
    assert "ASWA has the best" not in page


def test_names_that_differ_in_case_are_one_model(save, tmp_path):
    runs = [
        result(0.5, 0.4, model="complex", seed=0),
        result(0.7, 0.4, model="ComplEx", seed=1),
        result(0.9, 0.4, model="ComplEx", dataset="umls", seed=2),
    ]
    (task,) = write_report([save(str(i), run) for i, run in enumerate(runs)], tmp_path / "report.html")["tasks"]
    assert {(row["dataset"], row["model"], row["n"]) for row in task["results"]} == {("UMLS", "ComplEx", 3)}


def test_a_narrow_screen_shows_aswas_column_and_whole_pictures(save, tmp_path):
    content = result(0.5, 0.4)
    for name in ("best", "swa", "ema", "zzz"):
        content["strategies"][name] = content["strategies"]["last"]
    write_report([save("a", content)], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    heads = re.findall(r"<thead><tr><th>dataset</th><th>model</th>(.*?)</tr>", text)
    assert len(heads) == 2
    assert all(re.findall(r">([a-z]+)</th>", head) == ["aswa", "last", "best", "swa", "ema", "zzz"] for head in heads)
    narrow = text.split("@media (max-width: 40rem) {")[1].split("@media")[0]
    assert re.findall(r"\.picture svg \{ ([^}]*) \}", narrow) == ["min-width: 0;"]  # `width: 100%` holds for all
    # The two columns before ASWA's are at most 7rem wide each, of 390 px = 24.4rem less margins.
    assert "tbody th { white-space: normal; overflow-wrap: anywhere; min-width: 5.6rem; max-width: 7rem; }" in narrow


def test_a_report_is_the_same_again_and_in_any_order(many, tmp_path):
    write_report(many, tmp_path / "report.html")
    first = (tmp_path / "report.html").read_bytes()
    write_report(many[::-1], tmp_path / "report.html")
    assert (tmp_path / "report.html").read_bytes() == first


def test_answers_to_queries_are_judged_by_their_average(save, tmp_path):
    paths = []
    for model, gain in (("a", 0.1), ("b", -0.1)):
        found = {
            name: {"queries": {"2p": {"mrr": 0.3}, "average": {"mrr": 0.4 + more}}}
            for name, more in (("aswa", gain), ("last", 0.0))
        }
        paths.append(save(model, result(0, 0, task="multi-hop", model=model) | {"strategies": found}))
    (task,) = write_report(paths, tmp_path / "report.html")["tasks"]
    assert (task["split"], task["metric"]) == ("queries", "average mrr")
    assert [(c["metric"], c["wins"], c["ties"], c["losses"]) for c in task["comparisons"]] == [
        ("2p mrr", 0, 2, 0),
        ("average mrr", 1, 0, 1),
        (ALL, 1, 2, 1),
    ]


def test_runs_without_aswa_are_shown_and_not_judged(save, tmp_path):
    content = result(0.5, 0.4)
    content["strategies"]["ema"] = content["strategies"].pop("aswa")
    (task,) = write_report([save("a", content)], tmp_path / "report.html")["tasks"]
    assert task["comparisons"] == []
    assert "no ASWA weights" in (tmp_path / "report.html").read_text()
