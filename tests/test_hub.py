"""Runs pushed to a Hub on loopback: one commit, a card that tells the truth, and models that anyone loads."""

import hashlib
import json
import math
import re
from pathlib import Path

import pytest
from hub_server import HubServer
from typer.testing import CliRunner

from aswa_hf.card import read_card_data, render
from aswa_hf.cli import app
from aswa_hf.hub import HubError, push_to_hub, write_repository

TOKEN = "hf_loopback_secret"


def run_command(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.output


@pytest.fixture(scope="module")
def kge_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kge") / "run"
    run_command(
        *("train", "kge", "--dataset", "countries", "--model", "keci", "--dim", 8, "--epochs", 6),
        *("--lr", 0.05, "--output-dir", folder),
    )
    return folder


@pytest.fixture(scope="module")
def image_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("image") / "run"
    run_command(
        *("train", "image", "--dataset", "digits", "--model", "test_resnet", "--image-size", 16, "--epochs", 2),
        *("--train-size", 100, "--val-ratio", 0.1, "--output-dir", folder),
    )
    return folder


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between its repetitions
    # Clients in this process keep Xet switched on, which this Hub answers by taking all files in the commit itself.
    with HubServer(token=TOKEN, lfs=False) as server:
        yield server


def push(hub, run, repo="user/model", **options):
    return push_to_hub(run, repo, token=TOKEN, endpoint=hub.endpoint, **options)


def contents(folder):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(folder).rglob("*") if path.is_file()}


def test_a_repository_comes_in_one_commit_and_holds_what_it_should(hub, kge_run):
    url = push(hub, kge_run, private=True, tag="v1.0", running=True)
    assert url.endswith("user/model")
    repo = hub.repos["user/model"]
    assert repo.private
    files = repo.files("main")
    assert set(files) - {".gitattributes"} == {
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
    assert files["model.safetensors"] == (kge_run / "model.safetensors").read_bytes()
    assert repo.files("v1.0") == files
    checkpoint = max(kge_run.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    assert repo.files("running")["model.safetensors"] == (checkpoint / "model.safetensors").read_bytes()
    assert sum(request.step == "commit" for request in hub.log) == 2  # one for each branch
    everything = b"".join(files.values()).decode("latin-1") + repr(hub.log)
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
        (lambda hub: hub.cut("commit", times=math.inf), "upload the files"),
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


def test_an_answer_that_was_lost_leads_to_no_second_commit(hub, kge_run):
    hub.cut("commit", when="after", times=math.inf)
    with pytest.raises(HubError, match="upload the files"):
        push(hub, kge_run)
    hub.faults.clear()
    commits = len(hub.repos["user/model"].commits)
    push(hub, kge_run)
    assert len(hub.repos["user/model"].commits) == commits


def test_without_a_token_nothing_is_sent(hub, kge_run, monkeypatch):
    monkeypatch.setattr("aswa_hf.hub.get_token", lambda: None)
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


def test_an_image_classifier_is_loaded_by_timm_and_transformers(hub, image_run):
    push(hub, image_run)
    printed = hub.run(
        """
import timm, torch
from transformers import AutoModelForImageClassification
images = torch.linspace(-1, 1, 256).view(1, 1, 16, 16)
with torch.no_grad():
    one = timm.create_model("hf-hub:user/model", pretrained=True).eval()(images)
    other = AutoModelForImageClassification.from_pretrained("user/model").eval()(images).logits
print(torch.equal(one, other), one.shape[1])
"""
    )
    assert printed.split() == ["True", "10"]


def numbers_of(value):
    """All numbers of a JSON value."""
    if isinstance(value, dict):
        return [number for item in value.values() for number in numbers_of(item)]
    if isinstance(value, list):
        return [number for item in value for number in numbers_of(item)]
    return [value] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


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
    assert "no strategy did better in mrr, and the last epoch did as well" in verdict(aswa=0.5, last=0.5)
    assert "license: mit" in verdict()
    assert "For testing." in verdict()


def test_what_is_no_run_is_refused(kge_run, tmp_path):
    with pytest.raises(ValueError, match="There is no folder"):
        write_repository(tmp_path / "nothing", tmp_path / "out", "user/model")
    with pytest.raises(
        ValueError, match=r"has no aswa_trajectory\.json and no model\.safetensors: it is not a finished run"
    ):
        write_repository(tmp_path, tmp_path / "out", "user/model")
    with pytest.raises(ValueError, match="is not empty"):
        write_repository(kge_run, kge_run, "user/model")
    for name, text in (("damaged", "{"), ("foreign", '{"a": 1}')):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"")
        (folder / "aswa_trajectory.json").write_text(text)
        with pytest.raises(ValueError, match="Expected one written by aswa-hf"):
            write_repository(folder, tmp_path / "out", "user/model")
    assert not (tmp_path / "out").exists()


def test_a_dry_run_writes_the_exact_files_and_sends_nothing(hub, kge_run, tmp_path):
    printed = run_command("push", kge_run, "user/model", "--dry-run", tmp_path / "repository")
    assert "nothing pushed" in printed
    push(hub, kge_run)
    pushed = hub.repos["user/model"].files("main")
    for path in (tmp_path / "repository").iterdir():
        assert pushed[path.name] == path.read_bytes()
    assert set(pushed) - {".gitattributes"} == {path.name for path in (tmp_path / "repository").iterdir()}
