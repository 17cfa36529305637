"""Damaged weights of a link predictor are refused by name, never replaced by random numbers."""

import shutil

import pytest
import torch
import warm
from kge_graphs import random_graph
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from aswa_hf.kge import ComplEx, KGEModel, LinkPredictor

LOADERS = (
    KGEModel.from_pretrained,
    ComplEx.from_pretrained,
    AutoModel.from_pretrained,
    LinkPredictor.from_pretrained,
)


@pytest.fixture
def saved(tmp_path):
    kg = random_graph(tmp_path / "graph")
    ComplEx(kg.config(dim=4)).save_pretrained(tmp_path / "model")
    kg.vocab.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def damage(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def set_one(value):
    def change(tensors):
        tensors["entity_embeddings.weight"][1, 2] = value

    return change


@pytest.mark.parametrize("load", LOADERS, ids=["KGEModel", "ComplEx", "AutoModel", "LinkPredictor"])
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda t: t.pop("relation_embeddings.weight"), "'relation_embeddings.weight' is missing"),
        (lambda t: t.update(extra=torch.zeros(1)), "'extra' is unexpected"),
        (
            lambda t: t.update({"relation_embeddings.weight": torch.zeros(3, 3)}),
            r"shape \(3, 3\), expected \(\d+, 4\)",
        ),
        (set_one(float("nan")), "'entity_embeddings.weight' has NaN or infinity"),
        (set_one(float("-inf")), "'entity_embeddings.weight' has NaN or infinity"),
    ],
    ids=["missing", "unexpected", "shape", "nan", "infinite"],
)
def test_weights_that_do_not_fit_are_refused_by_name(saved, load, change, complaint):
    damage(saved, change)
    with pytest.raises(ValueError, match=complaint):
        load(saved)


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_truncated_file_is_refused(saved, size):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises((ValueError, OSError), match=str(saved)):
        LinkPredictor.from_pretrained(saved)


def test_a_pickle_is_not_opened(saved):
    tensors = load_file(saved / "model.safetensors")
    torch.save(tensors, saved / "pytorch_model.bin")
    (saved / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        LinkPredictor.from_pretrained(saved)


def test_of_an_unfinished_run_a_checkpoint_is_named(saved):
    run = saved.parent / "run"
    shutil.copytree(saved, run / "checkpoint-12")
    with pytest.raises(OSError, match=r"run was not finished\. Resume it with --resume, .* such as .*checkpoint-12\."):
        LinkPredictor.from_pretrained(run)
    LinkPredictor.from_pretrained(run / "checkpoint-12")


def test_whole_numbers_for_weights_are_refused(saved):
    damage(saved, lambda t: t.update({"relation_embeddings.weight": t["relation_embeddings.weight"].int()}))
    with pytest.raises(ValueError, match=r"whole numbers of type torch\.int32: 'relation_embeddings\.weight'"):
        LinkPredictor.from_pretrained(saved)


def test_commands_refuse_files_in_one_line_without_what_libraries_log(saved):
    def complaint(*command):
        # A process that has not imported the libraries: they read then how much to log.
        ended = warm.run("-m", "aswa_hf", *command, bare=True)
        assert (ended.returncode, ended.stdout) == (1, "")
        return ended.stderr.strip().splitlines()

    queries = saved.parent / "queries.parquet"
    queries.write_bytes(b"PAR1")
    line, *_ = found = complaint("evaluate", saved, "--dataset", saved.parent / "graph", "--queries", queries)
    assert len(found) == 1, found
    assert line.startswith(f"aswa-hf: {queries} does not contain queries")
    damage(saved, lambda t: t.pop("relation_embeddings.weight"))
    assert complaint("predict", saved, "--head", "e1", "--relation", "r1") == [
        f"aswa-hf: The weights of {saved} do not fit ComplEx: 'relation_embeddings.weight' is missing."
    ]


def test_the_loading_information_is_still_to_be_had(saved):
    model, info = KGEModel.from_pretrained(saved, output_loading_info=True)
    assert (type(model), info["missing_keys"]) == (ComplEx, set())
