"""Cards: what they tell in which order, numbers that are the trajectory file's, and those of real runs."""

import importlib.util
import json
import re

import pytest
from hub_client import numbers_of
from huggingface_hub import ModelCard
from places import ROOT

from aswa_hf.hub.card import read_card_data, render
from aswa_hf.trajectory import Decision, Record, Trajectory, encode_number, save_trajectories

CARDS = sorted(path.parent for path in (ROOT / "model_cards").glob("*/README.md"))
SECTIONS = [
    "Use",
    "Results",
    "What is in the average",
    "Cost",
    "Reproduce",
    "BatchNorm",
    "Data and ranking",
    "Limits",
    "Citation",
]
METADATA = {"library_name", "pipeline_tag", "tags", "datasets", "metrics", "model-index"}


def history(*decisions, score=0.5, epochs=None):
    return Trajectory(
        Record(i, i + 1, epochs[i] if epochs else float(i + 1), score, None if i == 0 else score, score, 1, decision)
        for i, decision in enumerate(decisions)
    )


def card_of(folder, *, trajectories=None, config=None, metric="accuracy", greater=True, applied="aswa", **run):
    trajectories = trajectories or {"aswa": history(Decision.INIT, Decision.SOFT)}
    more = {"run": encode_number(run)} if run else {}
    save_trajectories(
        folder / "aswa_trajectory.json",
        trajectories,
        metric=metric,
        greater_is_better=greater,
        applied=applied,
        alphas=more.get("run", {}).pop("alphas", None),
        **more,
    )
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return str(render(read_card_data(folder, "me/model")))


def scores(**values):
    return {name: {"validation": {"accuracy": value}} for name, value in values.items()}


def rendering_script():
    spec = importlib.util.spec_from_file_location("render", ROOT / "scripts" / "render_model_cards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_cards_of_the_papers_models_and_of_a_cifar_network():
    expected = {
        f"{data}-{model}-0"
        for data in ("umls", "kinship", "countries-s1")
        for model in ("distmult", "complex", "qmult", "keci")
    }
    assert {folder.name for folder in CARDS} == expected | {"cifar10-preresnet20-0"}


@pytest.mark.parametrize("folder", CARDS, ids=lambda folder: folder.name)
def test_a_card_of_a_real_run_is_what_its_trajectory_file_says(folder):
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert text == str(render(read_card_data(folder, f"your-name/{folder.name}")))
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert set(files) == {"README.md", "aswa_trajectory.json", "config.json", "trajectory.png"}
    assert max(files.values()) < 150_000

    # The figures of the tables, looked up in the file without the code that made them.
    content = json.loads((folder / "aswa_trajectory.json").read_text(encoding="utf-8"))
    shown = [row.split("|")[2:-1] for row in text.splitlines() if row.startswith("|") and re.search(r"\d\.\d", row)]
    known = {f"{number:.4f}" for number in numbers_of(content)}
    cells = [cell.strip().strip("*") for row in shown for cell in row]
    assert len(cells) > 10
    assert set(cells) <= known
    results = content["run"]["strategies"]
    names = {"the last epoch": "last", "the best epoch (early stopping)": "best", "SWA": "swa", "EMA": "ema"}
    for split in ("test", "validation"):
        table = text.split(f"| {split} |")[1].split("\n\n")[0]
        metrics = [cell.strip() for cell in table.splitlines()[0].split("|")[:-1]]
        for label, name in names.items():
            row = " | ".join(f"{results[name][split][metric]:.4f}" for metric in metrics)
            assert f"\n| {label} | {row} |" in table
        row = " | ".join(f"**{results['aswa'][split][metric]:.4f}**" for metric in metrics)
        assert f"\n| **ASWA** | {row} |" in table
    main = "accuracy" if content["run"]["task"] == "image-classification" else "mrr"
    ahead = max(results, key=lambda name: results[name]["test"][main]) != "aswa"
    assert ("did **not** win" in text) == ahead
    assert content["run"]["command"] in text
    assert re.search(r"(^|[\s\"'(])/\w|~/", content["run"]["command"]) is None


def test_the_page_of_all_cards_is_up_to_date(tmp_path):
    script = rendering_script()
    for folder in CARDS:
        (tmp_path / folder.name).symlink_to(folder)
    script.write_index(tmp_path)
    assert (tmp_path / "README.md").read_text() == (ROOT / "model_cards" / "README.md").read_text()


@pytest.mark.parametrize("folder", [CARDS[0], CARDS[-1]], ids=lambda folder: folder.name)
def test_the_parts_of_a_card_are_in_order(folder):
    text = (folder / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    assert found == [name for name in SECTIONS if name in found]
    missing = {"Data and ranking"} if "cifar10" in folder.name else set()
    assert set(found) == set(SECTIONS) - missing
    assert text.index("weights of a training run") < text.index("## Use")
    assert text.index("trajectory.png") < text.index("## What is in the average")


def test_the_metadata_names_library_task_data_and_split(tmp_path):
    card = render(read_card_data(CARDS[-1], "me/model"))
    assert CARDS[-1].name == "umls-qmult-0"
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "graph-ml")
    assert {"aswa", "link-prediction"} <= set(card.data.tags)
    assert {(r.task_type, r.dataset_name, r.dataset_config, r.dataset_split) for r in card.data.eval_results} == {
        ("link-prediction", "UMLS", "default", "validation"),
        ("link-prediction", "UMLS", "default", "test"),
    }
    image = render(read_card_data(CARDS[0], "me/model")).data
    assert (image.library_name, image.pipeline_tag) == ("timm", "image-classification")


def test_scores_that_are_not_numbers_are_shown_and_never_win(tmp_path):
    results = {
        name: {split: {"accuracy": value} for split in ("validation", "test")}
        for name, value in (("aswa", 0.5), ("swa", float("nan")), ("ema", float("inf")))
    }
    options = {"task": "image-classification", "dataset": "me/images"}
    text = card_of(tmp_path, strategies=results, **options)
    assert "| SWA | nan |" in text
    assert "ASWA did best of all in accuracy" in text
    results["aswa"]["test"]["accuracy"] = float("nan")
    results["swa"]["test"]["accuracy"] = 0.1
    text = card_of(tmp_path, strategies=results, **options)
    assert "| **ASWA** | **nan** |" in text
    assert "ASWA did **not** win: SWA did better" in text
    # The model index has no place for it.
    card = render(read_card_data(tmp_path, "me/model"))
    assert [(r.dataset_split, r.metric_value) for r in card.data.eval_results] == [("validation", 0.5)]


def test_with_a_loss_the_lower_one_wins(tmp_path):
    losses = {name: {"validation": {"loss": value}} for name, value in (("aswa", 0.4), ("last", 0.3))}
    text = card_of(tmp_path, metric="loss", greater=False, strategies=losses)
    assert "On the validation split ASWA did **not** win: the last epoch did better in loss." in text
    losses["last"]["validation"]["loss"] = 0.5
    assert "ASWA did best of all in loss" in card_of(tmp_path, metric="loss", greater=False, strategies=losses)


def test_a_history_without_anything_else_makes_a_card(tmp_path):
    trajectories = {
        "aswa": history(Decision.INIT, Decision.SOFT, score=0.75),
        "mine": history(Decision.INIT, score=0.25),
        "swa": Trajectory([Record(0, 1, 1.0, 0.3, None, None, 0, Decision.REJECT)]),
    }
    text = card_of(tmp_path, trajectories=trajectories)
    assert "| **ASWA** | **0.7500** |\n| mine | 0.2500 |\n" in text
    assert "SWA |" not in text.replace("ASWA", "")
    assert "## Reproduce" not in text
    assert "| 1–2 | 0.5000 |" in text


def test_the_weights_of_snapshots_are_those_of_the_file_by_epoch(tmp_path):
    decisions = (Decision.INIT, Decision.SOFT, Decision.REJECT, Decision.SOFT)
    text = card_of(
        tmp_path,
        trajectories={"ema": history(*decisions, epochs=[0.5, 1.0, 1.5, 2.0])},
        applied="ema",
        alphas={"ema": [0.125, 0.125, 0.0, 0.75]},
        seed=1,
    )
    assert "| 0.5–1 | 0.1250 |\n| 2 | 0.7500 |\n" in text
    assert (
        "They are an exponential moving average of the running weights, regardless of the validation accuracy." in text
    )


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("aswa", "whether to add the running weights to the average (once)"),
        ("best", "the snapshot with the best validation accuracy"),
        ("last", "the running model's weights at the end of training"),
        ("swa", "the mean of 2 of the 2 snapshots, regardless of the validation accuracy."),
        ("of-a-user", "They are the average of 2 of the 2 snapshots.\n"),
    ],
)
def test_a_strategy_is_described_by_its_rule_whatever_its_name(rule, said, tmp_path):
    trajectories = {"mine": history(Decision.INIT, Decision.SOFT)}
    text = card_of(tmp_path, trajectories=trajectories, applied="mine", rule=rule)
    assert "the mine weights of a training run" in text
    assert said in text
    chosen = "The validation split was used to choose mine, whose results on it are therefore optimistic."
    assert (chosen in text) == (rule in ("aswa", "best"))
    assert ("None of these weights were chosen by their scores." in text) == (rule not in ("aswa", "best"))


def test_only_what_validation_chose_has_optimistic_figures(tmp_path):
    both = {name: {split: {"accuracy": 0.5} for split in ("validation", "test")} for name in ("aswa", "best", "ema")}
    said = (
        "used to choose the best epoch (early stopping) and ASWA, whose results on it are therefore optimistic; the "
        "test split was not used for this choice."
    )
    assert said in card_of(tmp_path, strategies=both, applied="ema", trajectories={"ema": history(Decision.INIT)})


def test_an_average_of_one_snapshot_is_not_called_a_mean(tmp_path):
    text = card_of(tmp_path, trajectories={"aswa": history(Decision.INIT, Decision.REJECT)})
    assert "The\nweights in this repository are one of the 2 snapshots: in the end nothing was averaged." in text
    assert "the mean of" not in text


def test_checkpoints_that_were_averaged_are_named_and_not_called_a_run(tmp_path):
    save_trajectories(
        tmp_path / "aswa_trajectory.json",
        {"greedy": history(Decision.INIT, Decision.SOFT, Decision.REJECT)},
        metric="accuracy",
        greater_is_better=True,
        applied="greedy",
        checkpoints=["checkpoint-10", "checkpoint-20", "checkpoint-30"],
        run={"command": "mine", "batchnorm": "unknown"},
    )
    text = str(render(read_card_data(tmp_path, "me/model")))
    assert "the greedy soup weights of 3 checkpoints.**\nThey are the average of 2 of the 3 snapshots.\n" in text
    assert "All rows come from 3 checkpoints; the row in bold" in text
    assert "| checkpoint | weight of each snapshot, α |" in text
    assert "| checkpoint-10–checkpoint-20 | 0.5000 |" in text
    assert "run" not in text.split("## Use")[0].split("---")[-1]


def test_a_row_that_is_not_there_is_not_said_to_be_bold(tmp_path):
    text = card_of(tmp_path, applied=None, strategies=scores(aswa=0.5, swa=0.6), rule="last")
    assert "All rows come from one training run. \n" in text
    assert "**0." not in text


def test_fge_is_not_said_to_come_from_the_same_run(tmp_path):
    said = (
        "All rows come from one training run, except FGE, which branched off during the run and was trained "
        "separately; the row"
    )
    assert said in card_of(tmp_path, strategies=scores(aswa=0.5, fge=0.6))
    assert "FGE" not in card_of(tmp_path, strategies=scores(aswa=0.5, ema=0.6))


def test_a_configuration_that_is_not_of_transformers_is_not_loaded_with_it(tmp_path):
    assert "from transformers import" not in card_of(tmp_path, config={"width": 3}, model="Net")


def test_how_a_link_predictor_was_ranked_is_in_the_card_only_if_it_was_so(tmp_path):
    config = {"model_type": "kge", "num_entities": 3, "num_relations": 2, "inverse_relations": True}
    assert "Every triple is ranked" in card_of(tmp_path, config=config, task="link-prediction")
    text = card_of(tmp_path, config=config, seed=1)
    assert "3 entities, 2 relations" in text
    assert "Every triple is ranked" not in text


@pytest.mark.parametrize(
    ("batchnorm", "said"),
    [
        (None, "no BatchNorm layers"),
        ("recalibrate", "recomputed on training data (7 batches)"),
        ("average", "averaged like the weights"),
        ("copy", "are the running model's"),
        ("unknown", "is not known"),
    ],
)
def test_a_card_says_how_batchnorm_was_treated(batchnorm, said, tmp_path):
    assert said in card_of(tmp_path, batchnorm=batchnorm, bn_batches=7)


def test_names_from_files_cannot_become_html_markdown_code_or_metadata(tmp_path):
    evil = "<script>alert(1)</script>\n---\nlicense: evil\n# Heading\n```\n| a | [b](javascript:x) `c` **d**"
    strategies = {name: {"validation": {evil: 0.5}, "test": {evil: 0.5}} for name in ("aswa", evil)}
    more = {"task": evil, "dataset": evil, "model": evil, "seed": evil, "epochs": evil, "versions": {evil: evil}}
    example = {"code": evil, "about": evil, "output": evil}
    for config in ({"architecture": evil}, {"model_type": "bert", "architectures": [evil]}, {}):
        card = card_of(
            tmp_path,
            config=config,
            metric=evil,
            trajectories={name: history(Decision.INIT, Decision.SOFT) for name in ("aswa", evil)},
            strategies=strategies,
            command=evil,
            example=example,
            seconds={evil: 1.0},
            **more,
        )
        text = card[card.index("# model") :]
        blocks = re.split(r"^```.*$", text, flags=re.MULTILINE)
        assert len(blocks) % 2 == 1  # every block of code is closed
        prose = "".join(blocks[::2])
        assert "<script" not in prose
        assert "&lt;script&gt;" in prose
        assert "](javascript:x)" not in prose.replace("\\](", "")
        assert [line for line in prose.splitlines() if line.startswith("# ")] == ["# model"]
        tables = [line for line in prose.splitlines() if line.startswith("|")]
        assert {len(re.findall(r"(?<!\\)\|", line)) for line in tables} == {3}
        data = ModelCard(card).data
        assert data.license is None
        assert set(data.to_dict()) <= METADATA
        assert data.to_dict() == render(read_card_data(tmp_path, "me/model")).data.to_dict()
