"""What was pushed is loaded from the Hub: without this package, by revision, from the cache; faults are named."""

import json
import re

import pytest
import timm
import torch
from hub_client import TOKEN, image_run, kge_run
from hub_server import HubServer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageClassification
from without_package import WITHOUT_THE_PACKAGE

import aswa_hf.vision  # noqa: F401 (registers architectures with timm)
from aswa_hf import ASWA
from aswa_hf.hub import save_run, write_repository

LOADING = """
import timm, torch
from transformers import AutoModel, AutoModelForImageClassification

def load(**options):
    model = AutoModel.from_pretrained("user/kge", trust_remote_code=True, **options).eval()
    scores = model.score_tails(torch.tensor([0, 1]), torch.tensor([0, 1]))
    classifier = AutoModelForImageClassification.from_pretrained("user/image", **options).eval()
    own = AutoModelForImageClassification.from_pretrained("user/cifar", trust_remote_code=True, **options).eval()
    return scores, classifier(images).logits, own(images.expand(1, 3, 16, 16)).logits

images = torch.linspace(-1, 1, 256).view(1, 1, 16, 16)
with torch.no_grad():
    scores, logits, own = load(revision="v1")
    for options in {}, {"revision": "v1", "local_files_only": True}:
        assert all(torch.equal(one, other) for one, other in zip(load(**options), (scores, logits, own)))
    by_timm = timm.create_model("hf-hub:user/image", pretrained=True).eval()(images)
    assert torch.equal(by_timm, logits)
    assert torch.equal(timm.create_model("hf-hub:user/image@v1", pretrained=True).eval()(images), logits)
assert not any(name.partition(".")[0] == "aswa_hf" for name in sys.modules)
print([found.flatten().tolist() for found in (scores, logits, own)])
"""

MISSING = ("entities.json", "model.safetensors", "config.json", "aswa_trajectory.json")


def cifar_run(folder):
    """A network of ours, with statistics of BatchNorm that are not those of a new one."""
    model = timm.create_model("preresnet20_cifar", num_classes=3)
    with torch.no_grad():
        model(torch.linspace(-2, 2, 4 * 3 * 16 * 16).view(4, 3, 16, 16))
    aswa = ASWA(model, batchnorm="copy")
    aswa.update(lambda: 0.5)
    aswa.apply()
    return save_run(model, folder, aswa, metric="accuracy")


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    """The files of a link predictor's and of an image classifier's repository."""
    folder = tmp_path_factory.mktemp("runs")
    found = {}
    for name, run in (("kge", kge_run), ("image", image_run), ("cifar", cifar_run)):
        files = write_repository(run(folder / name), folder / f"{name}-files", f"user/{name}")
        found[name] = {path.name: path.read_bytes() for path in files.iterdir()}
    return found


@pytest.fixture
def hub(repositories):
    with HubServer(token=TOKEN) as server:
        for name, files in repositories.items():
            server.add_repo(f"user/{name}", files, private=True)
            server.repos[f"user/{name}"].tags["v1"] = server.repos[f"user/{name}"].commits[-1].oid
        yield server


def test_models_are_loaded_without_the_package_by_revision_from_the_cache_and_offline(hub, repositories, tmp_path):
    first = hub.run(WITHOUT_THE_PACKAGE + LOADING)
    scores, logits, own = json.loads(first)
    assert (len(scores) > 500, len(logits), len(own)) == (True, 10, 3)
    # With the package, in timm alone, and from the folder of the run, it is the same network.
    local = tmp_path / "cifar"
    local.mkdir()
    for name, content in repositories["cifar"].items():
        (local / name).write_bytes(content)
    images = torch.linspace(-1, 1, 256).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    with torch.no_grad():
        by_timm = timm.create_model(f"local-dir:{local}", pretrained=True).eval()(images)
        ours = AutoModelForImageClassification.from_pretrained(local).eval()(images).logits
    torch.testing.assert_close(by_timm, torch.tensor([own]))
    torch.testing.assert_close(ours, torch.tensor([own]))
    card = repositories["cifar"]["README.md"].decode()
    assert 'AutoModelForImageClassification.from_pretrained("user/cifar", trust_remote_code=True)' in card
    assert "trust_remote_code" not in repositories["image"]["README.md"].decode()
    asked = len(hub.log)
    assert hub.run(WITHOUT_THE_PACKAGE + LOADING, HF_HUB_OFFLINE="1") == first
    assert len(hub.log) == asked


def test_faulty_repositories_get_errors_that_name_what_is_wrong(hub, repositories):
    good = repositories["kge"]
    entities = json.loads(good["entities.json"])
    faulty = {
        "foreign": good | {"aswa_trajectory.json": b'{"a": 1}'},
        "damaged": good | {"aswa_trajectory.json": good["aswa_trajectory.json"][:100]},
        "unfit": good | {"entities.json": json.dumps(entities[:-1]).encode()},
        "twice": good | {"entities.json": json.dumps(entities[:-1] + entities[:1]).encode()},
        **{
            f"no-{number}": {name: content for name, content in good.items() if name != missing}
            for number, missing in enumerate(MISSING)
        },
    }
    for name, files in faulty.items():
        hub.add_repo(f"user/{name}", files)
    code = """
import json, sys
from aswa_hf.hub import read_history
from aswa_hf.kge import LinkPredictor

def error(call, repo):
    try:
        call(repo)
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""

names = sys.argv[1:]
print(json.dumps({name: [error(call, f"user/{name}") for call in (LinkPredictor.from_pretrained, read_history)]
                  for name in names}))
"""
    found = json.loads(hub.run(code, "kge", *faulty))
    assert found["kge"] == ["", ""]
    loaded, histories = ({name: errors[index] for name, errors in found.items()} for index in (0, 1))
    assert "aswa_trajectory.json has no 'format'." in histories["foreign"]
    assert "is not a JSON file" in histories["damaged"]
    assert "The repository user/no-3 has no aswa_trajectory.json. Expected one pushed by aswa-hf." in histories["no-3"]
    sizes = rf"The model has {len(entities)} entities .* the vocabulary {len(entities) - 1}"
    assert re.search(sizes, loaded["unfit"])
    assert f"distinct, got {entities[0]!r} twice" in loaded["twice"]
    assert "Found no entities.json in user/no-0" in loaded["no-0"]
    assert "Found no link predictor at 'user/no-1'" in loaded["no-1"]
    assert "Found no link predictor at 'user/no-2'" in loaded["no-2"]
    assert "there is no config.json in it" in loaded["no-2"]
    # They do not concern one another.
    assert (loaded["foreign"], loaded["no-3"], histories["unfit"]) == ("", "", "")


def changed(change, folder, repository):
    """A folder with the files of a repository, whose weights are changed."""
    folder.mkdir(parents=True)
    for name, content in repository.items():
        (folder / name).write_bytes(content)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


DAMAGES = {
    "missing": (lambda tensors: tensors.pop("head.fc.weight"), "'timm_model.head.fc.weight' is missing"),
    "unexpected": (lambda tensors: tensors.update(extra=torch.zeros(1)), "'extra' is unexpected"),
    "not finite": (
        lambda tensors: tensors["head.fc.weight"].fill_(float("nan")),
        "'timm_model.head.fc.weight' has NaN or infinity",
    ),
}


@pytest.mark.filterwarnings("ignore:Overwriting")
@pytest.mark.parametrize("damage", DAMAGES)
def test_the_code_in_a_repository_of_images_loads_strictly(repositories, tmp_path, damage):
    change, told = DAMAGES[damage]
    folder = changed(change, tmp_path / damage.replace(" ", "_"), repositories["cifar"])
    with pytest.raises(ValueError, match=re.escape(told)):
        AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True)
