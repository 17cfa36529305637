"""Runs pushed to a Hub on loopback: one commit, a card that tells the truth, and models that anyone loads."""

import errno
import hashlib
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from commands import call
from hub_client import (
    TOKEN,
    assert_nothing_pickled,
    files,
    hub_in_process,
    image_run,
    kge_run,
    numbers_of,
    run_command,
    steps,
)
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from aswa_hf import ASWA
from aswa_hf.hub import HubError, push_to_hub, read_history, save_run, write_repository
from aswa_hf.hub.card import read_card_data, render


@pytest.fixture(scope="module", name="kge_run")
def _kge_run(tmp_path_factory):
    return kge_run(tmp_path_factory.mktemp("kge") / "run")


@pytest.fixture(scope="module", name="image_run")
def _image_run(tmp_path_factory):
    return image_run(tmp_path_factory.mktemp("image") / "run")


@pytest.fixture
def hub(monkeypatch):
    with hub_in_process(monkeypatch) as server:
        yield server


def push(hub, run, repo="user/model", **options):
    return push_to_hub(run, repo, endpoint=hub.endpoint, **options)


def contents(folder):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(folder).rglob("*") if path.is_file()}


def test_a_repository_comes_in_one_commit_and_holds_what_it_should(hub, kge_run):
    url = push(hub, kge_run, private=True, tag="v1.0", running=True)
    assert url.endswith("user/model")
    repo = hub.repos["user/model"]
    assert repo.private
    pushed = repo.files("main")
    assert set(pushed) - {".gitattributes"} == {
        "README.md",
        "aswa_trajectory.json",
        "config.json",
        "configuration_kge.py",
        "entities.json",
        "model.safetensors",
        "modeling_kge.py",
        "preprocessor_config.json",
        "relations.json",
        "trajectory.png",
    }
    assert pushed["model.safetensors"] == (kge_run / "model.safetensors").read_bytes()
    assert repo.files("v1.0") == pushed
    checkpoint = max(kge_run.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    assert repo.files("running")["model.safetensors"] == (checkpoint / "model.safetensors").read_bytes()
    assert b"The weights of user/model at the end of training" in repo.files("running")["README.md"]
    assert steps(hub, "commit") == 2  # one for each branch
    assert_nothing_pickled(pushed | repo.files("running"))
    everything = b"".join(pushed.values()).decode("latin-1") + repr(hub.log)
    assert TOKEN not in everything


def test_pushing_again_changes_nothing(hub, kge_run):
    push(hub, kge_run)
    commits = len(hub.repos["user/model"].commits)
    push(hub, kge_run)
    assert len(hub.repos["user/model"].commits) == commits


@pytest.mark.parametrize(
    ("fault", "step"),
    [
        (lambda hub: hub.fail("create", 401, times=math.inf), "create the repository"),
        (lambda hub: hub.fail("create", 500, times=math.inf), "create the repository"),
        (lambda hub: hub.fail("preupload", 403, times=math.inf), "upload the files"),
        (lambda hub: hub.fail("commit", 500, times=math.inf), "upload the files"),
        (lambda hub: hub.cut("commit", when="before", times=math.inf), "upload the files"),
        (lambda hub: hub.fail("tag", 403, times=math.inf), "create the tag v1"),
    ],
    ids=["no-permission", "no-create", "forbidden", "no-commit", "cut", "no-tag"],
)
def test_a_failed_push_names_its_step_and_can_be_repeated(hub, kge_run, fault, step):
    before = contents(kge_run)
    fault(hub)
    with pytest.raises(HubError, match=step) as caught:
        push(hub, kge_run, tag="v1")
    assert TOKEN not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert contents(kge_run) == before
    hub.faults.clear()
    push(hub, kge_run, tag="v1")
    assert hub.repos["user/model"].files("v1")["model.safetensors"] == (kge_run / "model.safetensors").read_bytes()


def test_a_commit_whose_answer_was_lost_is_recognized_and_not_made_twice(hub, kge_run):
    hub.cut("commit", when="after", times=math.inf)
    push(hub, kge_run, tag="v1")
    repo = hub.repos["user/model"]
    assert [commit.title for commit in repo.commits] == ["initial commit", "Add ASWA checkpoint"]
    assert repo.tags["v1"] == repo.commits[-1].oid
    hub.faults.clear()
    push(hub, kge_run, tag="v1")
    assert len(repo.commits) == 2


def test_a_push_that_another_one_overtakes_makes_no_commit_and_can_be_repeated(hub, kge_run, image_run, monkeypatch):
    send = HfApi.create_commit

    def send_late(self, *arguments, **options):
        monkeypatch.setattr(HfApi, "create_commit", send)
        push(hub, image_run)
        return send(self, *arguments, **options)

    monkeypatch.setattr(HfApi, "create_commit", send_late)
    with pytest.raises(HubError, match=r"another user has committed to main .* then push again.*A commit has"):
        push(hub, kge_run)
    repo = hub.repos["user/model"]
    assert [commit.title for commit in repo.commits[1:]] == ["Add ASWA checkpoint"]
    assert repo.files("main")["model.safetensors"] == (image_run / "model.safetensors").read_bytes()
    push(hub, kge_run)
    assert repo.files("main")["model.safetensors"] == (kge_run / "model.safetensors").read_bytes()


def test_weights_of_an_earlier_push_do_not_stay_beside_those_of_this_one(hub, kge_run, tmp_path):
    old = ["adapter_config.json", "adapter_model.safetensors", "model-1.safetensors", "model.safetensors.index.json"]
    others = ["notes.txt", "onnx/model-1.safetensors"]
    hub.add_repo("user/model", dict.fromkeys([*old, *others], b"{}"))
    run = shutil.copytree(kge_run, tmp_path / "run")
    checkpoint = max(run.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    (checkpoint / "model.safetensors").rename(checkpoint / "model-2.safetensors")
    (checkpoint / "model.safetensors.index.json").write_text("{}")
    (checkpoint / "aswa" / "commit.json").unlink()
    push(hub, run, running=True)
    assert steps(hub, "commit") == 2
    assert set(files(hub)) & {*old, *others} == set(others)
    weights = {name for name in files(hub, revision="running") if "safetensors" in name and "/" not in name}
    assert weights == {"model-2.safetensors", "model.safetensors.index.json"}


def test_what_shall_be_private_is_not_pushed_to_a_public_repository(hub, kge_run):
    hub.add_repo("user/model", {})
    with pytest.raises(HubError, match=r"step: create the repository \(it already exists and is public"):
        push(hub, kge_run, private=True)
    assert steps(hub, "commit") == 0
    hub.repos["user/model"].private = True
    push(hub, kge_run, private=True)
    assert steps(hub, "commit") == 1


def test_a_tag_is_never_moved(hub, kge_run):
    push(hub, kge_run, tag="v1")
    push(hub, kge_run, tag="v1")  # the same commit
    repo = hub.repos["user/model"]
    before = dict(repo.tags), dict(repo.branches)
    with pytest.raises(
        HubError, match=r"step: create the tag v1 \(it already marks another commit, .* main has not changed\)"
    ):
        push(hub, kge_run, tag="v1", notes="Another card.")
    assert (repo.tags, repo.branches) == before


def test_a_push_reads_and_writes_no_pickle(hub, image_run, monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("a pickle")

    for name in ("pickle.load", "pickle.loads", "pickle.dump", "pickle.dumps", "torch.load", "torch.save"):
        monkeypatch.setattr(name, refuse)
    push(hub, image_run, running=True)
    assert_nothing_pickled(files(hub) | files(hub, revision="running"))


def test_the_token_is_in_no_log_of_a_push_that_fails(hub, kge_run):
    hub.fail("commit", 500, times=math.inf)
    code = """
import logging, sys, time
time.sleep = lambda seconds: None
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
import huggingface_hub
huggingface_hub.logging.set_verbosity_debug()
from aswa_hf.hub import push_to_hub
try:
    push_to_hub(sys.argv[1], "user/model")
except OSError:
    logging.exception("pushing")
logging.getLogger("httpx").debug("the end")
"""
    printed = hub.run(code, kge_run, HF_DEBUG="1", HF_HUB_DISABLE_XET=None)
    assert "failed at the step: upload the files" in printed
    assert "api/models/user/model/commit" in printed  # requests are logged, and so would be their headers
    assert "DEBUG:httpx:the end" in printed
    assert TOKEN not in printed
    assert TOKEN not in "".join(path.read_text("latin-1") for path in kge_run.rglob("*") if path.is_file())


def test_a_server_that_repeats_the_token_does_not_get_it_into_the_error(hub, kge_run):
    hub.fail("commit", 400, message=f"not with {TOKEN}")
    with pytest.raises(HubError, match=r"not with \*\*\*"):
        push(hub, kge_run)


def test_a_model_of_any_loop_is_pushed_with_the_history_of_its_weights(hub, tmp_path):
    import timm

    model = timm.create_model("test_resnet", num_classes=3)
    aswa = ASWA(model, batchnorm="copy")
    scores = iter([0.5, 0.4, 0.6])
    for _ in range(2):
        aswa.update(lambda: next(scores))
        nn.init.normal_(model.fc.weight)
    with pytest.raises(ValueError, match=r"does not hold the aswa weights\. Call the strategy's apply\(\)"):
        push(hub, model, strategies=aswa, metric="accuracy")
    aswa.apply()
    with pytest.raises(ValueError, match="pushed with the history of its weights"):
        push(hub, model)
    other = ASWA(nn.Linear(1, 1))
    other.update(lambda: 1.0)
    with pytest.raises(TypeError, match=r"A Linear cannot be saved for the Hub\. Expected a model with"):
        push(hub, other.model, strategies=other)
    assert hub.log == []
    about = {"task": "image-classification", "dataset": "me/shapes", "seed": 3}
    push(hub, model, strategies={"aswa": aswa}, metric="accuracy", about=about)
    pushed = files(hub)
    assert set(pushed) == {"README.md", "aswa_trajectory.json", "config.json", "model.safetensors", "trajectory.png"}
    assert b"| **ASWA** | **0.6000** |" in pushed["README.md"]
    assert b"The statistics of BatchNorm layers are the running model's." in pushed["README.md"]
    trajectories, told = read_history(write(pushed, tmp_path / "downloaded"))
    assert trajectories == {"aswa": aswa.trajectory}
    assert told["run"]["seed"] == 3


def write(contents, folder):
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


def test_without_a_token_nothing_is_sent(hub, kge_run, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("aswa_hf.hub.push.get_token", lambda: None)
    with pytest.raises(HubError, match="no token to push with"):
        push_to_hub(kge_run, "user/model", endpoint=hub.endpoint)
    assert hub.log == []


def test_a_link_predictor_is_loaded_by_label_by_revision_and_offline(hub, kge_run):
    push(hub, kge_run, tag="v1")
    code = """
from aswa_hf.kge import LinkPredictor
for options in {}, {"local_files_only": True}:
    predictor = LinkPredictor.from_pretrained("user/model", revision="v1", **options)
    print(predictor.predict(head="albania", relation="locatedin", k=1)["tail"][0])
"""
    best = hub.run(code).split()
    assert best[0] == best[1]
    assert hub.run(code, HF_HUB_OFFLINE="1").split() == best


@pytest.mark.parametrize("kind", ["kge", "image"])
def test_every_number_of_a_card_is_the_trajectory_files(kind, kge_run, image_run, tmp_path):
    run = {"kge": kge_run, "image": image_run}[kind]
    folder = write_repository(run, tmp_path / "repository", "user/model")
    content = json.loads((folder / "aswa_trajectory.json").read_text())
    known = {f"{number:.{digits}f}" for number in numbers_of(content) for digits in (2, 4)}
    known |= {f"{number:.4f}" for number in read_card_data(folder, "user/model").alphas}
    text = (folder / "README.md").read_text()
    tables = [line for line in text.splitlines() if line.startswith("|") and "---" not in line]
    shown = re.findall(r"\d+\.\d+", "\n".join(tables))
    assert len(shown) >= 10
    assert set(shown) <= known
    data = render(read_card_data(folder, "user/model")).data
    strategies = content["run"]["strategies"]["aswa"]
    for result in data.eval_results:
        assert result.metric_value == strategies[result.dataset_split][result.metric_type]
    # and a changed figure would be noticed
    content["run"]["strategies"]["aswa"]["test"] = dict.fromkeys(strategies["test"], 0.123456)
    (folder / "aswa_trajectory.json").write_text(json.dumps(content))
    assert "0.1235" in str(render(read_card_data(folder, "user/model")))
    assert "0.1235" not in text


def test_a_card_says_where_aswa_did_not_win(kge_run, tmp_path):
    folder = write_repository(kge_run, tmp_path / "repository", "user/model", license="mit", notes="For testing.")
    path = folder / "aswa_trajectory.json"
    content = json.loads(path.read_text())

    def verdict(**scores):
        for name, result in content["run"]["strategies"].items():
            result["test"]["mrr"] = scores.get(name, 0.1)
        path.write_text(json.dumps(content))
        return str(render(read_card_data(folder, "user/model", license="mit", notes="For testing.")))

    assert "On the test split ASWA did best of all in mrr." in verdict(aswa=0.5)
    assert "ASWA did **not** win: SWA and EMA did better in mrr" in verdict(aswa=0.5, swa=0.6, ema=0.7)
    assert "no strategy did better in mrr, and the last epoch did equally well" in verdict(aswa=0.5, last=0.5)
    assert "license: mit" in verdict()
    assert "For testing." in verdict()


def test_what_is_not_a_run_is_refused(kge_run, tmp_path):
    with pytest.raises(ValueError, match="There is no folder"):
        write_repository(tmp_path / "nothing", tmp_path / "out", "user/model")
    with pytest.raises(
        ValueError, match=r"has no aswa_trajectory\.json and no model\.safetensors: it is not a finished run"
    ):
        write_repository(tmp_path, tmp_path / "out", "user/model")
    with pytest.raises(ValueError, match="is not empty"):
        write_repository(kge_run, kge_run, "user/model")
    lost = tmp_path / "lost"
    lost.mkdir()
    shutil.copyfile(kge_run / "aswa_trajectory.json", lost / "aswa_trajectory.json")
    (lost / "model.safetensors").write_bytes(b"12345678")
    with pytest.raises(ValueError, match=r"model.safetensors is not a safetensors file"):
        write_repository(lost, tmp_path / "out", "user/model")
    (lost / "model.safetensors").unlink()
    (lost / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    with pytest.raises(ValueError, match=r"lacks model-1\.safetensors: its model cannot be loaded"):
        write_repository(lost, tmp_path / "out", "user/model")
    for name, text in (("damaged", "{"), ("foreign", '{"a": 1}')):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"")
        (folder / "aswa_trajectory.json").write_text(text)
        with pytest.raises(ValueError, match=r"aswa_trajectory\.json (is not a JSON file|has no 'format')"):
            write_repository(folder, tmp_path / "out", "user/model")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lost", ["config.json", "entities.json", "relations.json", "modeling_kge.py"])
def test_a_run_that_lost_what_its_model_is_loaded_with_is_refused(lost, kge_run, tmp_path):
    run = shutil.copytree(kge_run, tmp_path / "run")
    (run / lost).unlink()
    with pytest.raises(ValueError, match=f"run lacks {lost}: its model cannot be loaded"):
        write_repository(run, tmp_path / "out", "user/model")
    assert not (tmp_path / "out").exists()


def test_a_run_with_damaged_or_unfit_files_is_refused_by_their_names(kge_run, tmp_path):
    run = shutil.copytree(kge_run, tmp_path / "run")
    for name, text, error in (
        ("config.json", "{", r"config\.json is not a JSON file, or is damaged: Expecting"),
        ("config.json", "[]", r"config\.json contains \[\], expected an object"),
        ("relations.json", '["a"]', r"relations\.json has 1 labels, the model 2 relations"),
        ("entities.json", '["a", "a"]', r"entities\.json is damaged"),
    ):
        kept = (run / name).read_text()
        (run / name).write_text(text)
        with pytest.raises(ValueError, match=error):
            write_repository(run, tmp_path / "out", "user/model")
        (run / name).write_text(kept)
    assert not (tmp_path / "out").exists()


def test_weights_that_do_not_fit_or_are_not_finite_are_not_shipped(kge_run, image_run, tmp_path):
    def damaged(source, name, change):
        run = shutil.copytree(source, tmp_path / name)
        tensors = load_file(run / "model.safetensors")
        change(tensors)
        save_file(tensors, run / "model.safetensors", metadata={"format": "pt"})
        return run

    for source, name, change, error in (
        (kge_run, "kge", lambda t: t.pop("relation_embeddings.weight"), "'relation_embeddings.weight' is missing"),
        (image_run, "missing", lambda t: t.pop("fc.weight"), r"'fc.weight' is missing, expected \(10, "),
        (
            image_run,
            "shape",
            lambda t: t.update({"fc.bias": torch.zeros(9)}),
            r"'fc.bias' is \(9,\), expected \(10,\)",
        ),
        (image_run, "nan", lambda t: t["fc.bias"].fill_(float("nan")), "NaN or infinite numbers in 'fc.bias'"),
        (image_run, "whole", lambda t: t.update({"fc.bias": t["fc.bias"].int()}), r"'fc.bias' is torch.int32 \(10,\)"),
        (kge_run, "whole-kge", lambda t: t.update({name: t[name].int() for name in t}), "are whole numbers"),
    ):
        with pytest.raises(ValueError, match=error):
            write_repository(damaged(source, name, change), tmp_path / "out", "user/model")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("existed", [False, True])
def test_a_repository_that_could_not_be_written_whole_leaves_no_files(kge_run, tmp_path, monkeypatch, existed):
    def fail(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    if existed:
        (tmp_path / "out").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("aswa_hf.hub.repository.write_card", fail)
        with pytest.raises(OSError, match="No space left"):
            write_repository(kge_run, tmp_path / "out", "user/model")
    assert (tmp_path / "out").exists() == existed
    write_repository(kge_run, tmp_path / "out", "user/model")  # and can be repeated


def test_running_weights_that_are_damaged_or_do_not_fit_are_not_shipped(hub, kge_run, tmp_path):
    def damaged(change, marker=False):
        run = shutil.copytree(kge_run, tmp_path / "run", dirs_exist_ok=True)
        (last,) = run.glob("checkpoint-*")
        tensors = load_file(last / "model.safetensors")
        change(tensors)
        save_file(tensors, last / "model.safetensors", metadata={"format": "pt"})
        if not marker:
            (last / "aswa" / "commit.json").unlink()
        return run

    name = "relation_embeddings.weight"
    for change, marker, error in (
        (lambda t: t[name].add_(1), True, r"checkpoint-\d+ is damaged: the content of model.safetensors has changed"),
        (lambda t: t[name].fill_(float("nan")), False, f"NaN or infinite numbers in '{name}'"),
        (lambda t: t.pop(name), False, f"'{name}' differs"),
        (lambda t: t.update({name: t[name][:-1]}), False, f"'{name}' differs"),
        (lambda t: t.update({name: t[name].int()}), False, f"'{name}' differs"),
    ):
        with pytest.raises(ValueError, match=error):
            push(hub, damaged(change, marker), running=True)
    assert hub.log == []


@pytest.mark.parametrize("tag", ["", "a b", "v1..2", ".v1", "v1.lock", "v1/", "-v", "a~1", "@"])
def test_an_invalid_tag_is_refused_before_anything_is_sent(tag, hub, kge_run, tmp_path):
    with pytest.raises(ValueError, match="is not the name of a tag"):
        push(hub, kge_run, tag=tag)
    complaint = call("push", kge_run, "user/model", "--tag", tag, "--dry-run", tmp_path / "out")
    assert "is not the name of a tag" in complaint
    assert hub.log == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["", "model", "user/", "user/model/more", "user/my model", "user/model.git"])
def test_an_invalid_name_of_a_repository_is_refused_before_anything_is_written_or_sent(name, hub, kge_run, tmp_path):
    with pytest.raises(ValueError, match=f"^'{name}' is not the name of a repository. Expected owner/name"):
        push(hub, kge_run, name)
    with pytest.raises(ValueError, match="is not the name of a repository"):
        write_repository(kge_run, tmp_path / "out", name)
    assert hub.log == []
    assert not (tmp_path / "out").exists()


def test_a_dry_run_writes_the_exact_files_and_sends_nothing(hub, kge_run, tmp_path):
    printed = run_command("push", kge_run, "user/model", "--dry-run", tmp_path / "repository")
    assert "nothing pushed" in printed
    push(hub, kge_run)
    pushed = hub.repos["user/model"].files("main")
    for path in (tmp_path / "repository").iterdir():
        assert pushed[path.name] == path.read_bytes()
    assert set(pushed) - {".gitattributes"} == {path.name for path in (tmp_path / "repository").iterdir()}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda tensors: tensors.pop("classifier.weight"), "'classifier.weight' is missing"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "'extra' is unexpected"),
        (lambda tensors: tensors.update({"classifier.bias": torch.zeros(7)}), "classifier.bias"),
    ],
    ids=["missing", "unexpected", "shape"],
)
def test_a_model_of_transformers_is_only_shipped_with_all_its_weights(tmp_path, change, told):
    config = BertConfig(vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
    model = BertForSequenceClassification(config)
    aswa = ASWA(model)
    aswa.update(lambda: 0.5)
    aswa.apply()
    run = save_run(model, tmp_path / "run", aswa, metric="accuracy")
    tensors = load_file(run / "model.safetensors")
    change(tensors)
    save_file(tensors, run / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=re.escape(told)):
        write_repository(run, tmp_path / "repository", "user/model")
    assert not (tmp_path / "repository").exists()
