"""What a saved or pushed link predictor holds: enough for a process without this package to load it."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
import warm
from huggingface_hub import HfApi
from kge_graphs import random_graph
from safetensors.torch import load_file
from transformers import AutoModel
from without_package import WITHOUT_THE_PACKAGE

from aswa_hf.kge import KGEModel, KGETrainer, KGVocab, paper_arguments
from aswa_hf.kge.modeling_kge import SCORERS

MODEL_FILES = {"config.json", "model.safetensors", "configuration_kge.py", "modeling_kge.py"}
VOCAB_FILES = {"entities.json", "relations.json", "preprocessor_config.json"}

# Loads each folder, leaves the scores of all queries there, and saves the model once more.
STRANGER = f"""{WITHOUT_THE_PACKAGE}
import torch
from safetensors.torch import save_file
from transformers import AutoModel

torch.set_num_threads(1)
for folder in sys.argv[1:]:
    model = AutoModel.from_pretrained(folder, trust_remote_code=True)
    heads = torch.arange(model.config.num_entities).repeat_interleave(model.config.num_relation_embeddings)
    relations = torch.arange(model.config.num_relation_embeddings).repeat(model.config.num_entities)
    with torch.no_grad():
        scores = dict(scores=model.score_tails(heads, relations))
    save_file(scores, folder + "/scores.safetensors")
    model.save_pretrained(folder + "/again")
assert not any(name.partition(".")[0] == "aswa_hf" for name in sys.modules)
"""


def load_without_the_package(folders, tmp_path):
    """The scores that a process which cannot import aswa_hf gets from each folder."""
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    run = warm.run("-c", STRANGER, *folders, cwd=tmp_path, env=environment, bare=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return [load_file(folder / "scores.safetensors")["scores"] for folder in folders]


def all_scores(model):
    heads = torch.arange(model.config.num_entities).repeat_interleave(model.config.num_relation_embeddings)
    relations = torch.arange(model.config.num_relation_embeddings).repeat(model.config.num_entities)
    with torch.no_grad():
        return model.eval().score_tails(heads, relations)


def build(kg, scorer, **options):
    torch.manual_seed(1)
    return KGEModel(kg.config(scorer=scorer, dim=12, initializer="normal", **options))


def names(folder):
    return {file.name for file in folder.iterdir()}


def test_a_process_without_the_package_computes_the_same_scores_for_every_scorer(tmp_path):
    kg = random_graph(tmp_path / "graph")
    models = [build(kg, scorer) for scorer in SCORERS]
    models.append(build(kg, "keci", p=2, q=3, inverse_relations=False))
    folders = [tmp_path / f"model{i}" for i in range(len(models))]
    for model, folder in zip(models, folders, strict=True):
        model.save_pretrained(folder)
        assert names(folder) == MODEL_FILES

    # As the Trainer saves it, with dropout that must not act in a loaded model.
    trained = build(kg, "complex", input_dropout=0.3)
    arguments = paper_arguments(str(tmp_path / "run"), num_train_epochs=2, disable_tqdm=True, use_cpu=True)
    trainer = KGETrainer(trained, arguments, kg)
    trainer.train()
    trainer.save_model()
    assert names(tmp_path / "run") >= MODEL_FILES | VOCAB_FILES
    models.append(trained)
    folders.append(tmp_path / "run")

    assert len({model.config.scorer for model in models}) == 6
    for model, folder, scores in zip(models, folders, load_without_the_package(folders, tmp_path), strict=True):
        assert torch.equal(scores, all_scores(model)), model.config.scorer
        # What the stranger saved is as good as what it loaded, also where the package is installed.
        assert names(folder / "again") == MODEL_FILES
        again = AutoModel.from_pretrained(folder / "again", trust_remote_code=False)
        assert type(again) is type(model)
        assert torch.equal(all_scores(again), all_scores(model))


@pytest.fixture
def uploads(monkeypatch):
    """The files of every commit that would go to the Hub, by path in the repository."""
    commits = []

    def create_repo(self, repo_id, **options):
        return SimpleNamespace(repo_id=repo_id, url=f"https://hub.invalid/{repo_id}")

    def create_commit(self, repo_id, operations, **options):
        files = {}
        for operation in operations:
            with operation.as_file() as file:
                files[operation.path_in_repo] = file.read()
        commits.append((repo_id, files))
        return SimpleNamespace(commit_url="", oid="0" * 40, pr_url=None)

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    monkeypatch.setattr(HfApi, "_validate_yaml", lambda self, *args, **options: None)
    monkeypatch.setattr("huggingface_hub.hf_api.is_xet_available", lambda: False)
    return commits


def store(files, folder):
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_a_pushed_model_and_vocabulary_can_be_loaded(uploads, tmp_path):
    kg = random_graph(tmp_path / "graph")
    model = build(kg, "tucker")
    model.push_to_hub("me/graph-tucker")
    kg.vocab.push_to_hub("me/graph-tucker")
    assert [repo for repo, _ in uploads] == ["me/graph-tucker"] * 2
    assert set(uploads[0][1]) == MODEL_FILES | {"README.md"}
    assert set(uploads[1][1]) - {"README.md"} == VOCAB_FILES
    folder = store(uploads[0][1] | uploads[1][1], tmp_path / "downloaded")
    assert torch.equal(all_scores(AutoModel.from_pretrained(folder)), all_scores(model))
    assert KGVocab.from_pretrained(folder).entities == kg.vocab.entities


def test_a_trainer_pushes_model_code_and_vocabulary_together(uploads, tmp_path):
    kg = random_graph(tmp_path / "graph")
    arguments = paper_arguments(
        str(tmp_path / "run"), num_train_epochs=1, disable_tqdm=True, use_cpu=True, hub_model_id="me/graph-qmult"
    )
    trainer = KGETrainer(build(kg, "qmult"), arguments, kg)
    trainer.train()
    trainer.push_to_hub()
    (repo, files), *others = uploads
    assert (repo, others) == ("me/graph-qmult", [])
    assert set(files) >= MODEL_FILES | VOCAB_FILES | {"README.md"}
    folder = store(files, tmp_path / "downloaded")
    assert torch.equal(all_scores(AutoModel.from_pretrained(folder)), all_scores(trainer.model))
