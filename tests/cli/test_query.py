"""Multi-hop queries from the command line, asked of a model that a run left behind."""

import json
import shutil
from math import exp
from pathlib import Path

import pytest
import torch
from commands import call
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from aswa_hf.kge import DistMult, KGEConfig, KGVocab, generate_queries, load_kg, save_queries


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A short run on the built-in graph."""
    folder = tmp_path_factory.mktemp("runs") / "countries"
    call(*f"train kge --dataset countries --dim 8 --epochs 4 --lr 0.5 --apply aswa --output-dir {folder}".split())
    return str(folder)


def test_a_query_is_answered_with_its_chains(run_folder, capsys):
    assert not call("query", run_folder, "2p: france, neighbor, locatedin", "-k", "2", "--chains", "--json")
    answers = json.loads(capsys.readouterr().out)
    assert [answer["rank"] for answer in answers] == [1, 2]
    for answer in answers:
        first, second = answer["chain"]
        assert (first["source"], first["relation"], second["relation"]) == ("france", "neighbor", "locatedin")
        assert (first["target"], second["target"]) == (second["source"], answer["answer"])
        assert first["truth"] * second["truth"] == pytest.approx(answer["score"], rel=1e-5)

    assert not call("query", run_folder, "2p: france, neighbor, locatedin", "-k", "2", "--chains")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["answer", "score", "rank"]
    assert lines[1].split() == [answers[0]["answer"], f"{answers[0]['score']:#.4g}", "1"]
    assert lines[2].startswith("    france –neighbor→ ")
    assert len(lines) == 7


def test_small_scores_and_strange_labels_are_shown(tmp_path, capsys):
    labels = ["a", "b\u2028c", "d\x0be", "f g"]
    model = DistMult(KGEConfig(num_entities=4, num_relations=1, dim=4))
    with torch.no_grad():
        model.entity_embeddings.weight.fill_(1)
        model.relation_embeddings.weight.fill_(-8)  # a logit of -32, the truth value e^-32
    model.save_pretrained(tmp_path)
    KGVocab(labels, ["r"]).save_pretrained(tmp_path)
    capsys.readouterr()
    assert not call("query", str(tmp_path), "a, r", "--json")
    answers = json.loads(capsys.readouterr().out)
    assert {answer["answer"]: answer["score"] for answer in answers} == pytest.approx(dict.fromkeys(labels, exp(-32)))
    assert not call("query", str(tmp_path), "a, r", "--chains")
    lines = capsys.readouterr().out.split("\n")
    assert lines[2].strip().startswith("a –r→ ")
    assert [line.split()[-2:] for line in lines[1:9:2]] == [["1.266e-14", str(rank)] for rank in range(1, 5)]


def test_queries_are_sampled_or_read_and_evaluated(run_folder, tmp_path, capsys):
    command = ["evaluate", run_folder, "--dataset", "countries", "--queries", "2i,2u", "--per-shape", "20"]
    assert not call(*command, "--json")
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["2i", "2u", "average"]
    assert list(found["2i"]) == ["mrr", "hits@1", "hits@3", "hits@10"]

    # The same queries from a file, without the graph.
    save_queries(generate_queries(load_kg("countries"), "2i", n=20), tmp_path / "2i.json")
    assert not call("evaluate", run_folder, "--queries", str(tmp_path / "2i.json"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["mrr", "hits@1", "hits@3", "hits@10"]
    assert lines[1].split() == ["2i", *(f"{value:.4f}" for value in found["2i"].values())]


def test_the_weights_of_a_runs_strategies_are_compared(run_folder, tmp_path, capsys):
    options = ["--dataset", "countries", "--queries", "2i,2u", "--per-shape", "20"]
    run = tmp_path / "run"
    shutil.copytree(run_folder, run)
    (run / "aswa" / "commit.json").unlink()  # without which files may be changed
    assert not call("evaluate", str(run), *options, "--json")
    ensemble = json.loads(capsys.readouterr().out)
    other = tmp_path / "other"
    shutil.copytree(run, other)
    weights = load_file(run / "model.safetensors")
    last = {key: tensor.flip(0) for key, tensor in weights.items()}
    save_file(last, other / "model.safetensors", metadata={"format": "pt"})
    assert not call("evaluate", str(other), *options, "--json")
    running = json.loads(capsys.readouterr().out)
    assert running != ensemble

    tensors = {f"aswa/averaged/{key}": tensor for key, tensor in weights.items()}
    tensors |= {f"last/averaged/{key}": tensor for key, tensor in last.items()}
    with safe_open(run / "aswa" / "average.safetensors", "pt") as averages:
        state = averages.metadata()
    save_file(tensors, run / "aswa" / "average.safetensors", metadata=state)
    assert not call("evaluate", str(run), *options, "--strategies", "last,aswa", "--json")
    assert json.loads(capsys.readouterr().out) == {"last": running, "aswa": ensemble}
    assert not call("evaluate", str(run), *options, "--strategies", "last,aswa")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["MRR", "2i", "2u", "average"]
    assert lines[1].split() == ["last", *(f"{metrics['mrr']:.4f}" for metrics in running.values())]
    assert not call("evaluate", str(run), "--dataset", "countries", "--strategies", "aswa", "--json")
    found = json.loads(capsys.readouterr().out)["aswa"]
    assert found == pytest.approx(json.loads((run / "results.json").read_text())["strategies"]["aswa"]["test"])


def test_a_run_without_final_weights_says_which_it_compares(run_folder, tmp_path, capsys):
    asked = ("--dataset", "countries", "--strategies", "aswa,last", "--json")
    assert not call("evaluate", run_folder, *asked)
    printed = capsys.readouterr()
    results = json.loads((Path(run_folder) / "results.json").read_text())["strategies"]
    for name, metrics in json.loads(printed.out).items():
        assert metrics == pytest.approx(results[name]["test"])
    assert "weights in checkpoint-" not in printed.err

    interrupted = tmp_path / "interrupted"
    shutil.copytree(run_folder, interrupted)
    shutil.rmtree(interrupted / "aswa")
    assert not call("evaluate", str(interrupted), *asked)
    printed = capsys.readouterr()
    assert list(json.loads(printed.out)) == ["aswa", "last"]
    assert "weights in checkpoint-" in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["query", "RUN", "2p: franse, neighbor, locatedin"], "Unknown entity 'franse'. Did you mean 'france'"),
        (["query", "RUN", "2p: france, neighbor"], "wrong at position 21: expected ',' and a relation"),
        (["query", "RUN", "1p: france, neighbor", "--tnorm", "sum"], "tnorm must be one of product, min"),
        (["query", "nowhere", "1p: france, neighbor"], "There is no folder 'nowhere'. Expected a folder, or a repos"),
        (["predict", "nowhere", "--head", "france", "--relation", "neighbor"], "There is no folder 'nowhere'."),
        (["evaluate", "nowhere", "--dataset", "countries"], "There is no folder 'nowhere'."),
        (["query", "RUN", "9z: france, neighbor"], "unknown shape '9z', the shapes are 1p, 2p"),
        (["query", "RUN", "2p france neighbor locatedin"], "written as '2p: entity, relation, relation', with commas"),
        (["query", "nowhere", "1p: france, neighbor", "--truth", "sigmod"], "--truth must be one of sigmoid"),
        (["query", "nowhere", "1p: france, neighbor", "--tnorm", "prodct"], "Did you mean 'product'?"),
        (["predict", "nowhere", "--head", "france"], "Give --head and --relation to predict tails"),
        (["evaluate", "nowhere", "--dataset", "countries", "--split", "tset"], "Did you mean 'test'?"),
        (["evaluate", "MODEL"], "Give the graph with --dataset"),
        (["evaluate", "MODEL", "--queries", "all"], "Give the graph with --dataset"),
        (["evaluate", "RUN", "--dataset", "countries", "--queries", "2p,9p"], "Unknown shape '9p'"),
        (["evaluate", "RUN", "--queries", "none.parquet", "--split", "train"], "--split train is for ranking triples"),
        (["evaluate", "RUN", "--queries", "none.parquet"], "no file of queries at none.parquet"),
        (["evaluate", "RUN", "--strategies", "awsa"], "no weights of the strategy 'awsa'. Did you mean 'aswa'?"),
    ],
)
def test_wrong_questions_are_one_line(run_folder, tmp_path, arguments, message):
    if "MODEL" in arguments:
        shutil.copytree(run_folder, tmp_path / "model")
        (tmp_path / "model" / "settings.json").unlink()
    places = {"RUN": run_folder, "MODEL": str(tmp_path / "model")}
    complaint = call(*(places.get(argument, argument) for argument in arguments))
    assert complaint.startswith("aswa-hf: ")
    assert message in complaint
    assert "\n" not in complaint


def test_a_run_is_evaluated_on_its_own_dataset(run_folder, capsys):
    found = []
    for options in ([], ["--dataset", "countries"]):
        assert not call("evaluate", run_folder, "--split", "validation", "--json", *options)
        found.append(json.loads(capsys.readouterr().out))
    results = json.loads((Path(run_folder) / "results.json").read_text())["strategies"]["aswa"]
    assert found[0] == found[1] == pytest.approx(results["validation"])


def test_a_beam_of_nothing_is_refused(run_folder, capsys):
    assert call("query", run_folder, "1p: france, neighbor", "--beam", "0") == 2
    assert "--beam" in capsys.readouterr().err
