"""The paper's tables: their figures, the runs they need, and our numbers beside the paper's."""

import csv
import io
import json
import sys

import pytest
import torch
from places import ROOT
from rich.console import Console
from torch import nn

from aswa_hf.comparison import build_strategies, named_factories
from aswa_hf.experiments import KGERun
from aswa_hf.reproduce.figures import paper_figures
from aswa_hf.reproduce.grid import shown
from aswa_hf.reproduce.runs import GridRun, is_trained, plan
from aswa_hf.reproduce.show import as_terminal_tables, rows, title
from aswa_hf.reproduce.tables import COMPARED, KGE, TABLES, find_dataset, find_models, find_table

LINKS = TABLES["link-prediction"]


def links_run(dataset, model, seed, epochs):
    return GridRun(dataset, KGERun(dataset=dataset, model=model, seed=seed, epochs=epochs, strategies=COMPARED[KGE]))


def write_run(run, folder, scores):
    """A finished run as `train` leaves it, with a test MRR for each strategy."""
    place = folder / run.name
    place.mkdir(parents=True)
    (place / "settings.json").write_text(json.dumps(run.settings.to_settings({}, 1)))
    strategies = {name: {"test": {"mrr": score, "hits@1": 0.5}} for name, score in scores.items()}
    (place / "results.json").write_text(json.dumps({"strategies": strategies}))


def test_the_papers_swa_averages_from_the_first_epoch_on():
    model = nn.Linear(1, 1, bias=False)
    factories = named_factories(["swa", "swa-all"])
    strategies = build_strategies(factories, model, {"hard_updates": True, "greater_is_better": True}, total=4)
    for epoch in range(4):
        with torch.no_grad():
            model.weight.fill_(float(2**epoch))
        for strategy in strategies.values():
            strategy.update(lambda: 0.0)
    found = {name: strategy.average.averaged["weight"].item() for name, strategy in strategies.items()}
    assert found == {"swa": 8.0, "swa-all": (1 + 2 + 4 + 8) / 4}
    assert strategies["swa-all"].alphas == [0.25] * 4


def test_the_figures_are_those_of_the_paper():
    means = {
        name: {row: tuple(f.mean for f in cells) for row, cells in paper_figures(name).items()}
        for name, table in TABLES.items()
        if table.figures
    }
    assert {table: len(found) for table, found in means.items()} == {
        "cifar": 24,
        "cifar-epochs": 9,
        "cifar-ratios": 4,
        "link-prediction": 36,
        "nell": 36,
        "multi-hop": 12,
        "train-fit": 24,
    }
    assert means["link-prediction"]["FB15K-237", "keci", "aswa"] == (0.256, 0.184, 0.279, 0.398)
    assert means["link-prediction"]["YAGO3-10", "qmult", "swa-all"] == (0.398, 0.329, 0.439, 0.525)
    assert means["nell"]["NELL-995-h75", "complex", "last"] == (0.200, 0.142, 0.223, 0.312)
    assert means["train-fit"]["FB15K-237", "qmult", "aswa"] == (0.666, 0.568, 0.725, 0.843)
    assert means["multi-hop"]["FB15K-237", "qmult", "aswa"] == (0.004, 0.005, 0.183, 0.002, 0.117, 0.072, 0.003)
    assert paper_figures("cifar")["CIFAR-10", "preresnet164_cifar", "aswa"] == ((96.27, 0.01),)
    assert paper_figures("cifar")["CIFAR-100", "wrn28_10_cifar", "fge"] == ((82.27, None),)
    assert paper_figures("cifar-epochs")["CIFAR-10", "vgg16_cifar", "last"][4] == (89.1, 1.0)
    assert paper_figures("cifar-ratios")["CIFAR-10:0.2", "vgg16_bn_cifar", "aswa"][-1] == (94.2, 0.0)
    with pytest.raises(KeyError, match="no figures of a table 'imagenet'"):
        paper_figures("imagenet")


@pytest.mark.parametrize("name", [name for name, table in TABLES.items() if table.figures])
def test_every_figure_has_a_run_and_a_column(name):
    table = TABLES[name]
    for (dataset, model, strategy), cells in paper_figures(name).items():
        assert dataset.partition(":")[0] in table.datasets
        assert model in table.models
        assert strategy in (*COMPARED[table.task], *["fge"] * table.fge)
        assert len(cells) == len(table.figures)
    with (ROOT / "aswa_hf" / "reproduce" / "paper_figures.tsv").open(encoding="utf-8", newline="") as file:
        columns = [row["column"] for row in csv.DictReader(file, delimiter="\t") if row["table"] == name]
    assert columns == [*table.figures] * len(paper_figures(name))


def test_tables_that_need_the_same_run_share_it():
    def names(table):
        return [run.name for run in plan(TABLES[table], ["complex"], ["FB15K-237"], [0, 1], None)]

    assert names("link-prediction") == ["fb15k-237-complex-0-256", "fb15k-237-complex-1-256"]
    assert names("link-prediction") == names("train-fit") == names("multi-hop")
    assert names("strategies") == ["fb15k-237-complex-0-256-strategies", "fb15k-237-complex-1-256-strategies"]


def test_runs_that_differ_have_different_names():
    runs = [
        *plan(TABLES["cifar"], ["vgg16_bn_cifar"], ["CIFAR-10"], [0], None),
        *plan(TABLES["cifar-epochs"], ["vgg16_bn_cifar"], ["CIFAR-10"], [0], None),
        *plan(TABLES["cifar-ratios"], ["vgg16_bn_cifar"], ["CIFAR-10"], [0], None),
        *plan(TABLES["cifar"], ["vgg16_bn_cifar"], ["CIFAR-10"], [0], [30], train_size=10_000, bn_batches=20),
        *plan(TABLES["cifar"], ["vgg16_bn_cifar"], ["CIFAR-10"], [0], None, precision="bf16"),
    ]
    runs += plan(TABLES["cifar-ratios"], ["vgg16_bn_cifar"], ["CIFAR-10"], [0], [300], val_ratio=0.3)
    assert len({run.name for run in runs}) == len(set(runs)) == len(runs) == 1 + 8 + 16 + 1 + 1 + 1
    assert runs[0].name == "cifar-10-vgg16_bn_cifar-0-300-fge"
    assert [run.name for run in runs[-3:]] == [
        "cifar-10-vgg16_bn_cifar-0-30-10000images-bn20-fge",
        "cifar-10-vgg16_bn_cifar-0-300-bf16-fge",
        "cifar-10-vgg16_bn_cifar-0-300-val0.3",
    ]


def test_without_a_length_a_network_trains_as_long_as_its_recipe():
    runs = plan(TABLES["cifar"], ["preresnet164_cifar", "wrn28_10_cifar"], ["CIFAR-10"], [0], None)
    assert [run.epochs for run in runs] == [225, 300]


def test_the_command_of_a_single_run_repeats_it():
    run = links_run("UMLS", "keci", 3, 20).settings
    expected = "aswa-hf train kge --dataset UMLS --model keci --epochs 20 --strategies aswa,swa-all,swa,ema,best,last"
    assert run.command("runs/a") == f"{expected} --seed 3 --output-dir runs/a"
    (image,) = plan(TABLES["cifar"], ["vgg16_bn_cifar"], ["digits"], [0], [2], train_size=100)
    expected = "aswa-hf train image --dataset digits --model vgg16_bn_cifar --epochs 2 --fge --train-size 100"
    expected += " --strategies aswa,swa,ema,best,last"
    assert image.settings.command("runs/b") == f"{expected} --output-dir runs/b"


def test_datasets_are_found_whatever_the_spelling(tmp_path):
    (tmp_path / "kg" / "FB15k-237").mkdir(parents=True)
    (tmp_path / "cifar10").mkdir()
    assert find_dataset(LINKS, "fb15K_237", tmp_path) == str(tmp_path / "kg" / "FB15k-237")
    assert find_dataset(TABLES["cifar"], "CIFAR-10", tmp_path) == str(tmp_path / "cifar10")
    assert find_dataset(TABLES["cifar"], "CIFAR-100", tmp_path) == "uoft-cs/cifar100"
    assert find_dataset(LINKS, "Countries-S2", tmp_path / "none") == "countries-s2"
    assert find_dataset(LINKS, "someone/graph", tmp_path) == "someone/graph"
    with pytest.raises(ValueError, match=r"YAGO3-10 is missing: there is no folder of that name in .*data"):
        find_dataset(LINKS, "YAGO3-10", tmp_path / "data")
    with pytest.raises(ValueError, match="digits is missing"):
        find_dataset(LINKS, "digits", tmp_path)


def test_models_and_tables_that_are_not_there_are_refused():
    assert find_models(TABLES["cifar"], ["vgg16_bn", "VGG16_BN_cifar"]) == ["vgg16_bn_cifar"]
    assert find_models(LINKS, None) == ["distmult", "complex", "qmult", "keci"]
    with pytest.raises(ValueError, match=r"there is no 'vgg16'\. Table link-prediction takes distmult"):
        find_models(LINKS, ["vgg16"])
    with pytest.raises(ValueError, match="There is no table 'cifar-1000'"):
        find_table("cifar-1000")


def test_a_folder_with_another_run_is_not_taken_for_this_one(tmp_path):
    run = links_run("UMLS", "complex", 0, 256)
    assert not is_trained(run, tmp_path)
    write_run(run, tmp_path, {"aswa": 0.9})
    assert is_trained(run, tmp_path)
    settings = json.loads((tmp_path / run.name / "settings.json").read_text())
    (tmp_path / run.name / "settings.json").write_text(json.dumps(settings | {"lr": 0.01, "dim": 32}))
    with pytest.raises(ValueError, match=r"different settings: dim was 32, is 128; lr was 0.01, is 0.1"):
        is_trained(run, tmp_path)
    (tmp_path / run.name / "settings.json").write_text("{")
    with pytest.raises(ValueError, match=r"settings\.json is not a JSON file"):
        is_trained(run, tmp_path)


def test_cells_hold_our_mean_and_deviation_and_the_difference_from_the_paper(tmp_path):
    runs = plan(LINKS, ["complex"], ["FB15k-237", "UMLS"], [0, 1, 2], None)
    write_run(runs[0], tmp_path, {"aswa": 0.2, "swa-all": 0.1, "last": 0.1})
    write_run(runs[2], tmp_path, {"aswa": 0.3, "swa-all": 0.2, "last": "nan"})
    found = {(row["dataset"], row["strategy"]): row["columns"] for row in rows(LINKS, runs, tmp_path)}
    cell = found["FB15k-237", "aswa"]["mrr"]
    assert cell == {
        "ours": pytest.approx(0.25),
        "deviation": pytest.approx(0.05 * 2**0.5),
        "runs": 2,
        "paper": 0.206,
        "paper_deviation": None,
        "difference": pytest.approx(0.044),
    }
    assert found["FB15k-237", "swa-all"]["mrr"]["difference"] == pytest.approx(0.15 - 0.143)
    # A score that is not a number is left out of the mean.
    assert found["FB15k-237", "last"]["mrr"]["runs"] == 1
    assert found["FB15k-237", "best"]["mrr"] == dict.fromkeys(cell) | {"runs": 0}
    assert found["FB15k-237", "aswa"]["hits@10"]["ours"] is None
    assert found["FB15k-237", "aswa"]["hits@10"]["paper"] == 0.315
    assert found["UMLS", "aswa"]["mrr"]["paper"] is None


def test_the_table_shows_the_paper_and_the_difference_under_our_number(tmp_path):
    runs = plan(LINKS, ["complex"], ["FB15k-237"], [0], None)
    write_run(runs[0], tmp_path, {"aswa": 0.25})
    console = Console(width=80, record=True, quiet=False, file=io.StringIO())
    for table in as_terminal_tables(LINKS, rows(LINKS, runs, tmp_path)):
        console.print(table)
    lines = [line.split() for line in console.export_text().splitlines()]
    at = lines.index(["aswa", "ours", "0.250", "0.500", "–", "–"])
    assert lines[at + 1] == ["paper", "0.206", "0.148", "0.223", "0.315"]
    assert lines[at + 2] == ["differs", "+0.044", "+0.352", "–", "–"]
    assert ["best", "ours", "–", "–", "–", "–"] in lines


def test_the_title_says_when_the_setting_is_not_the_papers():
    assert "not the setting" not in title(LINKS, plan(LINKS, ["complex"], ["UMLS"], [0], None))
    short = title(LINKS, plan(LINKS, ["complex"], ["UMLS"], [0, 1], [30]))
    assert "epochs: 30; seeds: 0, 1; d = 128" in short
    assert "not the setting of the paper" in short
    images = TABLES["cifar"]
    assert "not the setting" not in title(images, plan(images, ["vgg16_cifar"], ["CIFAR-10"], [0], None))
    assert "not the setting of the paper" in title(
        images, plan(images, ["vgg16_cifar"], ["CIFAR-10"], [0], None, val_ratio=0.3)
    )
    assert "100 training images" in title(
        images, plan(images, ["vgg16_cifar"], ["CIFAR-10"], [0], None, train_size=100)
    )


def test_durations_are_shown_in_the_unit_that_suits_them():
    assert [shown(seconds) for seconds in (3.2, 89, 600, 7200)] == ["3 s", "89 s", "10 min", "2.0 h"]


def test_the_tables_of_the_pages_are_those_of_the_kept_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import tables

    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    assert sum(len(tables.MARKED.findall(text)) for text in texts) > 10
    for page, text in zip(pages, texts, strict=True):
        assert tables.filled_page(text) == text, f"{page.name} is not up to date: make tables"
    sys.modules.pop("tables")


def test_what_is_kept_of_a_log_is_a_line_an_epoch(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import collect_results

    entries = [
        {"epoch": 1.0, "loss": 0.5},
        {"epoch": 1.0, "eval_mrr": 0.1},
        {"epoch": 1.0, "eval_last_mrr": 0.1, "eval_aswa_mrr": 0.1, "aswa/decision": 3, "aswa/members": 1},
        {"epoch": 2.0, "eval_last_mrr": 0.2, "eval_aswa_mrr": 0.25, "aswa/decision": 1, "aswa/members": 2},
    ]
    (tmp_path / "train.log").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert collect_results.short_log(tmp_path / "train.log").splitlines() == [
        "epoch\tloss\tlast\taswa\tdecision\tmembers",
        "1\t0.50000\t0.10000\t0.10000\tinit\t1",
        "2\t\t0.20000\t0.25000\tsoft\t2",
    ]
