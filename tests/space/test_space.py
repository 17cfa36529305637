"""What an application shows, without gradio: questions, pictures, texts, histories, and the files of a Space."""

import importlib.util
import itertools
import json
import math
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata

import pytest
import torch
import yaml
from commands import outcome
from hub_client import TOKEN, files, hub_in_process
from PIL import Image
from places import ROOT
from safetensors.torch import load_file, save_file
from space_runs import HOSTILE, LONG, adapter_run, image_run, link_run, trajectory

from aswa_hf.hub import HubError
from aswa_hf.space import push_space, render, write_space
from aswa_hf.space.images import Images
from aswa_hf.space.links import MAX_RECENT, Clicks, Links, Question, question_text
from aswa_hf.space.source import Reloading, open_source
from aswa_hf.space.text import Texts
from aswa_hf.trajectory import Trajectory, save_trajectories


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return link_run(tmp_path_factory.mktemp("links") / "run")


@pytest.fixture(scope="module")
def links(run):
    return Links(open_source(run))


# Questions


def test_answers_are_the_models_best_with_known_ones_marked(links):
    found = links.ask("a", "likes", k=3)
    best = links.predictor.predict(head="a", relation="likes", k=3)
    assert [one.label for one in found] == best["tail"].tolist()
    assert [one.score for one in found] == pytest.approx(best["score"].tolist(), rel=1e-5)
    everything = {one.label: one.known for one in links.ask("a", "likes", k=10)}
    assert everything == {"a": None, "b": "train", "c": "validation", HOSTILE: None, LONG.strip(): None}
    assert all(0 <= one.share <= 1 for one in found)


def test_the_question_turned_round_asks_for_heads(links):
    found = links.ask("a", "knows", "head", k=10)
    assert [one.label for one in found] == links.predictor.predict(relation="knows", tail="a", k=10)["head"].tolist()
    assert {one.label for one in found if one.known} == {"c", "b"}


def test_labels_are_completed_in_the_order_of_their_fit(links):
    assert links.complete("B") == ["b", LONG.strip()]
    assert links.complete("LIKE", "relation") == ["likes"]
    assert links.complete("") == links.predictor.vocab.entities
    assert links.complete("x" * 10_000) == []


@pytest.mark.parametrize(
    ("entity", "relation", "message"),
    [
        ("", "likes", "Choose an entity first"),
        (None, "likes", "Choose an entity first"),
        ("a", "", "Choose a relation first"),
        ("x" * 10_000, "likes", "10,000 characters"),
        ("nobody", "likes", "There is no entity 'nobody'"),
        ("a", "hates", "There is no relation 'hates'"),
    ],
)
def test_bad_questions_are_answered_with_what_to_do(links, entity, relation, message):
    with pytest.raises(ValueError, match=message):
        links.ask(entity, relation)


def test_hops_are_put_together_and_taken_back():
    question = Question().start("a").follow("likes").start("b").follow("knows", True).from_all().follow("likes")
    assert question_text(question) == "( a —likes→ ? and b —(backwards) knows→ ? ) —likes→ ?"
    assert str(question.query()) == "ip: a, likes, b, ^knows, likes"
    assert str(question.joined_by("or").query()) == "up: a, likes, b, ^knows, likes"
    for _ in range(6):
        question = question.undo()
    assert question == Question()


@pytest.mark.parametrize(
    ("clicks", "message"),
    [
        (lambda: Question().follow("likes"), "Start from an entity first"),
        (lambda: Question().start("a").start("b"), "has no relation yet"),
        (lambda: Question().start("a").query(), "not complete"),
        (lambda: Question().start("a").follow("likes").from_all(), "two or more paths"),
    ],
)
def test_clicks_in_a_wrong_order_say_what_is_missing(clicks, message):
    with pytest.raises(ValueError, match=message):
        clicks()


def test_clicks_that_arrive_in_any_order_make_the_question_in_which_they_were_made():
    made = [("start", "a"), ("follow", "likes", False), ("start", "b"), ("follow", "knows", True), ("ask",)]
    for order in itertools.permutations(enumerate(made, 1)):
        clicks, asked = Clicks(), None
        for number, click in order:
            clicks = clicks.add(number, *click)
            asked = clicks.asked(number) or asked
        assert question_text(clicks.replay()[0]) == "a —likes→ ? and b —(backwards) knows→ ?"
        assert asked == clicks.replay()[0]
        assert clicks.replay()[1] == ""
    assert clicks.next == 6
    assert clicks.add(6, "undo").asked(6) is None  # a click after the question does not ask it again


def test_a_refused_click_changes_nothing_and_says_why_until_the_next_one():
    clicks = Clicks().add(1, "start", "a").add(2, "start", "b")
    question, problem = clicks.replay()
    assert question == Question().start("a")
    assert "has no relation yet" in problem
    assert clicks.add(3, "follow", "likes", False).replay() == (Question().start("a").follow("likes"), "")


def test_the_number_of_clicks_that_are_kept_is_bounded():
    clicks = Clicks().add(1, "start", "a")
    for number in range(2, 3 * MAX_RECENT, 2):
        clicks = clicks.add(number, "follow", "likes", False).add(number + 1, "undo")
    assert len(clicks.recent) == MAX_RECENT
    assert clicks.replay() == (Question().start("a"), "")


def test_multi_hop_answers_have_their_chains(links):
    question = Question().start("a").follow("likes").follow("likes")
    found = links.chains(question, k=3)
    assert [len(one["chain"]) for one in found] == [2, 2, 2]
    assert all(one["chain"][0].source == "a" and one["chain"][1].target == one["label"] for one in found)
    html = render.chains(question_text(question), found)
    assert html.count("<ol") == 3


def test_neighbors_are_known_ones_first_and_then_predicted(links):
    edges = links.neighborhood("a", known=8, predicted=2)
    assert {(e.relation, e.other, e.outgoing, e.known) for e in edges if e.known} == {
        ("likes", "b", True, "train"),
        ("likes", "c", True, "validation"),
        ("knows", "c", False, "train"),
        ("knows", "b", False, "test"),
    }
    predicted = [e for e in edges if e.known is None]
    assert len(predicted) == 2
    assert not {e.other for e in predicted} & {"a", "b", "c"}


def test_the_labels_of_neighbors_stay_within_the_picture(links):
    html = render.neighborhood("a", links.neighborhood("a"))
    for svg in re.findall("<svg.*?</svg>", html):
        width, height = map(int, re.search(r'viewBox="0 0 (\d+) (\d+)"', svg).groups())
        for x, y, text in re.findall(r'<text[^>]* x="(\d+)" y="(\d+)"[^>]*>(?:<title>.*?</title>)?([^<]*)', svg):
            assert 3.6 * len(text) <= int(x) <= width - 3.6 * len(text)
            assert 10 < int(y) < height
    assert html.count("<svg") == 2  # wide, and for phones


# Other people's text


def test_labels_with_markup_stay_text_everywhere(links, run):
    pieces = [
        render.answers(HOSTILE, links.ask(HOSTILE, "likes"), True),
        render.neighborhood(HOSTILE, links.neighborhood(HOSTILE)),
        render.chains(HOSTILE, links.chains(Question().start(HOSTILE).follow("likes"))),
        render.error(ValueError(HOSTILE)),
        render.classes([(HOSTILE, 0.5)]),
        render.texts({"averaged": HOSTILE}),
    ]
    for html in pieces:
        assert "<img" not in html
        assert "&lt;img" in html


def test_two_users_at_once_get_their_own_answers(links):
    expected = {label: [one.label for one in links.ask(label, "likes")] for label in ("a", "b", "c")}
    wrong = []

    def ask(label):
        found = [[one.label for one in links.ask(label, "likes")] for _ in range(20)]
        wrong.extend(labels for labels in found if labels != expected[label])

    users = [threading.Thread(target=ask, args=(label,)) for label in expected]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert wrong == []


def test_a_model_that_is_replaced_answers_with_the_new_weights_and_in_between_with_the_old(tmp_path):
    import torch

    run = link_run(tmp_path / "run")
    links = Links(open_source(run))
    before = links.ask("a", "likes")
    weights = run / "model.safetensors"
    complete = weights.read_bytes()
    weights.write_bytes(complete[: len(complete) // 2])  # half of a file
    assert links.ask("a", "likes") == before
    model = links.predictor.model
    with torch.no_grad():
        model.entity_embeddings.weight.mul_(-2)
    model.save_pretrained(run)
    assert links.ask("a", "likes") != before


def test_a_value_that_cannot_be_loaded_at_first_raises(tmp_path):
    def load():
        raise OSError("no model")

    with pytest.raises(OSError, match="no model"):
        Reloading(load, [tmp_path / "file"]).get()


# Pictures and texts


def test_an_image_is_classified_as_the_model_sees_it(tmp_path):
    import numpy as np
    import PIL.Image
    import timm
    import torch

    from aswa_hf.space.images import Images

    run = image_run(tmp_path / "run")
    images = Images(open_source(run))
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16), dtype=np.uint8)
    found = images.classify(PIL.Image.fromarray(pixels), k=3)
    model = timm.create_model(f"local-dir:{run}", pretrained=True).eval()
    about = model.pretrained_cfg
    inputs = (torch.from_numpy(pixels)[None, None].float() / 255 - about["mean"][0]) / about["std"][0]
    with torch.no_grad():
        shares = model(inputs)[0].softmax(-1)
    assert [int(name) for name, _ in found] == shares.topk(3).indices.tolist()
    assert [share for _, share in found] == pytest.approx(shares.topk(3).values.tolist(), rel=1e-4)
    assert len(images.classify(PIL.Image.new("RGBA", (300, 20)))) == 10
    with pytest.raises(ValueError, match="Drop a picture first"):
        images.classify(None)


def test_examples_are_test_images_of_the_run(tmp_path):
    import numpy as np

    from aswa_hf.experiments.image import load_images
    from aswa_hf.experiments.settings import ImageRun
    from aswa_hf.space.images import write_examples

    run = image_run(tmp_path / "run")
    settings = vars(ImageRun(dataset="digits")) | {"dataset": {"name": "digits", "source": "digits"}}
    (run / "settings.json").write_text(json.dumps(settings, default=list))
    paths = write_examples(open_source(run), tmp_path / "examples", count=4)
    assert len(paths) == 4
    assert [path.name[0] for path in paths] == ["0", "1", "2", "3"]
    test = load_images(ImageRun(dataset="digits"))["test"]
    for path in paths:  # pixel by pixel, so that they are classified as in the evaluation
        with Image.open(path) as picture:
            assert np.array_equal(np.asarray(picture), test[int(path.stem.rpartition("-")[2])]["image"])
    assert len(write_examples(open_source(image_run(tmp_path / "other")), tmp_path / "none")) == 0


def test_the_averaged_and_the_running_adapter_continue_a_text(tmp_path):
    pytest.importorskip("peft")
    from aswa_hf.space.text import Texts

    source = open_source(adapter_run(tmp_path / "run"))
    assert source.kind == "text"
    texts = Texts(source)
    found = texts.complete("the cat sat", 8)
    assert list(found) == ["averaged", "running"]
    assert found["averaged"] != found["running"]
    assert texts.complete("the cat sat", 8) == found  # switching back and forth changes nothing
    for bad, message in (("", "Write a text"), ("x " * 10_000, "20,000 characters"), ("cat " * 80, "for only 64")):
        with pytest.raises(ValueError, match=message):
            texts.complete(bad)


@pytest.fixture
def no_gradio(monkeypatch):
    def version(name, found=metadata.version):
        if name == "gradio":
            raise metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr("aswa_hf.space.folder.metadata.version", version)


def test_without_gradio_no_space_is_begun(tmp_path, no_gradio):
    with pytest.raises(ModuleNotFoundError, match=r'pip install "aswa-hf\[space\]"'):
        write_space(tmp_path / "run", tmp_path / "space")
    assert not (tmp_path / "space").exists()


def test_a_space_of_an_adapter_carries_its_base_model(tmp_path):
    pytest.importorskip("peft")
    from aswa_hf.space.text import Texts

    found = Texts(open_source(adapter_run(tmp_path / "run"))).complete("the cat sat", 8)
    with gradio_named():
        folder = write_space(tmp_path / "run", tmp_path / "space")
    assert Texts(open_source(folder / "run")).complete("the cat sat", 8) == found
    assert (folder / "run" / "base" / "model.safetensors").exists()


# Every run


def test_the_ensemble_of_any_decision_point_is_described_with_its_weights(run):
    source = open_source(run)
    text = re.sub("<[^>]+>", " ", render.point(source, 3))
    assert "Epoch 4: soft" in text
    assert "α = 0.3333 for each of 3: epochs 2 to 4. All other weights are 0." in text
    assert "epoch 6" in re.sub("<[^>]+>", " ", render.point(source, 5))
    assert render.history(source, 3).count('class="alpha"') == 2 * 3  # wide and for phones
    assert render.point(source, 10_000) == render.point(source, len(trajectory()) - 1)


def test_strategies_stand_side_by_side(run):
    html = render.strategies(open_source(run))
    assert "validation mrr" in html
    assert "test mrr" in html
    assert "<b>0.3000</b>" in html  # the best on the test split
    assert 'class="known">shipped' in html


def test_the_card_is_that_of_the_folder_or_as_a_push_would_write_it(run, tmp_path):
    assert "ASWA" in open_source(run).card()
    assert not open_source(run).card().startswith("---")
    other = link_run(tmp_path / "run")
    (other / "README.md").write_text("---\ntags: [a]\n---\n# My own card\n![picture](trajectory.png)\n")
    assert open_source(other).card() == "# My own card"
    (other / "README.md").write_text("---\ntags: [a]\n---\n# Model Card for Model ID\n[More Information Needed]\n")
    assert "More Information" not in open_source(other).card()
    assert "ASWA" in open_source(other).card()


def test_a_folder_that_is_no_run_and_one_that_is_not_there_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has neither aswa_trajectory\.json nor config\.json"):
        open_source(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_source(tmp_path / "nowhere")


def test_a_model_without_a_history_can_be_asked(run, tmp_path):
    import shutil

    shutil.copytree(run, tmp_path / "model")
    (tmp_path / "model" / "aswa_trajectory.json").unlink()
    source = open_source(tmp_path / "model")
    assert "history is not known" in render.history(source)
    assert "no results" in render.strategies(source)
    assert source.card() == "This model has no card."


# The files of a Space


@contextmanager
def gradio_named():
    """A Space only names the version of gradio; where it is not installed, let there be one."""
    known = metadata.version
    if importlib.util.find_spec("gradio") is not None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "version", lambda name: "6.0.0" if name == "gradio" else known(name))
        yield


@pytest.fixture(scope="module")
def space(run, tmp_path_factory):
    with gradio_named():
        yield write_space(run, tmp_path_factory.mktemp("space") / "out")


def test_a_space_holds_the_application_the_package_and_the_run(space):
    names = {path.name for path in space.iterdir()}
    assert names == {"README.md", "app.py", "aswa_hf", "requirements.txt", "run"}
    assert {"model.safetensors", "entities.json", "aswa_trajectory.json", "graph.safetensors"} <= {
        path.name for path in (space / "run").iterdir()
    }
    assert (space / "aswa_hf" / "space" / "app.py").exists()
    assert not list(space.rglob("__pycache__"))
    moved = Links(open_source(space / "run"))
    assert moved.ask("a", "likes", k=10)[0].label is not None
    assert {one.known for one in moved.ask("a", "likes", k=10)} == {None, "train", "validation"}


def test_the_front_matter_is_what_the_hub_reads(space):
    from huggingface_hub import SpaceCard

    card = SpaceCard.load(space / "README.md")
    data = card.data.to_dict()
    assert data["sdk"] == "gradio"
    assert data["sdk_version"] == metadata.version("gradio")
    assert data["app_file"] == "app.py"
    assert data["colorFrom"] in ("red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray")
    assert len(data["short_description"]) <= 60
    assert yaml.safe_load((space / "README.md").read_text(encoding="utf-8").split("---")[1])["title"] == data["title"]


def test_requirements_pin_what_is_installed_without_the_build_of_a_device(space):
    lines = (space / "requirements.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines)
    assert {"gradio", "torch", "transformers", "datasets", "safetensors"} <= set(pinned)
    assert all("+" not in found for found in pinned.values())
    assert pinned["transformers"] == metadata.version("transformers")


@pytest.mark.slow
def test_a_space_runs_with_its_own_copy_of_the_package(space):
    pytest.importorskip("gradio")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import aswa_hf, aswa_hf.space.app, aswa_hf.space.links;"
        "assert aswa_hf.__file__.startswith(sys.argv[1]), aswa_hf.__file__; print('imported')"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(space)], capture_output=True, text=True, timeout=300, cwd=space
    )
    assert found.stdout.strip() == "imported", found.stderr[-2000:]


@pytest.mark.usefixtures("space")
def test_the_command_writes_a_space_and_refuses_a_used_folder(run, tmp_path, capsys):
    status, out, _ = outcome(capsys, "space", str(run), "--output-dir", str(tmp_path / "a"), "--json")
    assert status == 0
    assert json.loads(out)["files"] == ["README.md", "app.py", "aswa_hf", "requirements.txt", "run"]
    assert outcome(capsys, "space", str(run), "--output-dir", str(tmp_path / "a"))[0] == 1
    status, _, err = outcome(capsys, "space", str(run))
    assert status == 1
    assert "Give --output-dir" in err


@pytest.fixture
def hub(monkeypatch):
    with hub_in_process(monkeypatch) as server, gradio_named():
        yield server


def test_a_pushed_space_is_one_commit_with_exactly_the_files_of_the_folder(hub, run, space, capsys):
    status, out, err = outcome(capsys, "space", str(run), "--push", "user/app", "--private", "--json")
    assert status == 0, err
    assert json.loads(out) == {"url": f"{hub.endpoint}/spaces/user/app"}
    repo = hub.repos["spaces/user/app"]
    assert (repo.sdk, repo.private) == ("gradio", True)
    assert [commit.title for commit in repo.commits] == ["initial commit", "Add the application of a run"]
    expected = {path.relative_to(space).as_posix(): path.read_bytes() for path in space.rglob("*") if path.is_file()}
    assert files(hub, "spaces/user/app") == expected
    assert {"app.py", "requirements.txt", "run/model.safetensors", "aswa_hf/space/app.py"} <= set(expected)


def test_a_second_push_replaces_the_first_and_a_third_changes_nothing(hub, run, tmp_path):
    old = {"aswa_hf/removed.py": b"import gone", "run/model-00001-of-00002.safetensors": b"", "notes.md": b"mine"}
    hub.add_repo("user/app", old, type="space")
    push_space(run, "user/app")
    pushed = files(hub, "spaces/user/app")
    assert set(old) & set(pushed) == {"notes.md"}  # what this package did not write stays
    push_space(run, "user/app")
    assert files(hub, "spaces/user/app") == pushed


def test_a_push_that_fails_names_its_step_and_never_the_token_and_can_be_repeated(hub, run, monkeypatch):
    monkeypatch.setattr("aswa_hf.hub_requests.time.sleep", lambda seconds: None)
    hub.fail("commit", 500, math.inf, message=f"not with {TOKEN}")
    with pytest.raises(HubError, match=r"failed at the step: upload the files and commit them") as caught:
        push_space(run, "user/app")
    assert TOKEN not in str(caught.value)
    assert "\n" not in str(caught.value)
    hub.faults.clear()
    hub.cut("commit", when="after")  # recorded, and the answer is lost
    push_space(run, "user/app")
    assert len(hub.repos["spaces/user/app"].commits) == 2
    hub.repos["spaces/user/app"].private = False
    with pytest.raises(HubError, match="already exists and is public"):
        push_space(run, "user/app", private=True)


def test_pushing_without_a_token_says_so(run, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    status, _, err = outcome(capsys, "space", str(run), "--push", "me/space")
    assert status == 1
    assert "There is no token to push with" in err


def test_without_gradio_the_command_says_what_to_install(run, no_gradio, capsys):
    status, _, err = outcome(capsys, "serve", str(run))
    assert status == 1
    assert 'pip install "aswa-hf[space]"' in err
    assert "unexpected" not in err


def test_only_one_module_imports_gradio():
    users = [
        path.name
        for path in (ROOT / "aswa_hf").rglob("*.py")
        if re.search("^ *(import|from) gradio", path.read_text(), re.M)
    ]
    assert users == ["app.py"]


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")  # peft continues, and we do not
@pytest.mark.parametrize("damage", ["missing", "not finite", "pickled"])
def test_weights_that_are_missing_or_not_finite_are_refused_by_name(damage, tmp_path):
    image, text = image_run(tmp_path / "image"), adapter_run(tmp_path / "text")
    for path, load in (
        (image / "model.safetensors", lambda: Images(open_source(image)).classify(Image.new("L", (16, 16)))),
        (text / "adapter_model.safetensors", lambda: Texts(open_source(text)).complete("the cat")),
        (tmp_path / "base" / "model.safetensors", lambda: Texts(open_source(text)).complete("the cat")),
    ):
        kept, tensors = path.read_bytes(), load_file(path)
        name = next(name for name in tensors if tensors[name].is_floating_point())
        if damage == "missing":
            del tensors[name]
        else:
            tensors[name].view(-1)[0] = torch.nan
        save_file(tensors, path, {"format": "pt"})
        expected = name.rpartition(".")[0] or name
        if damage == "pickled":
            path.unlink()
            pickle = {"adapter_model.safetensors": "adapter_model.bin"}.get(path.name, "pytorch_model.bin")
            torch.save(tensors, path.with_name(pickle))
            expected = "safetensors"
        with pytest.raises((ValueError, OSError, RuntimeError), match=re.escape(expected)):
            load()
        path.write_bytes(kept)


def test_the_decisions_shown_are_those_of_the_weights_that_are_shipped(tmp_path):
    run = link_run(tmp_path / "run")
    both = {"aswa": trajectory(), "dense-aswa": trajectory(["init", "soft", "soft", "soft"])}
    for applied, main, members in (("aswa", "aswa", 2), ("dense-aswa", "dense-aswa", 4), ("best", "aswa", 2)):
        save_trajectories(
            run / "aswa_trajectory.json", both, metric="mrr", greater_is_better=True, applied=applied, run={}
        )
        source = open_source(run)
        assert source.main == main
        assert f"{main} ensemble" in render.history(source)
        assert f"for each of {members}" in render.point(source, 99)
    pytest.importorskip("gradio")
    from aswa_hf.space.app import _summary

    assert _summary(source).startswith("The weights of the strategy best. aswa made 8 decisions")


def test_members_are_counted_in_decision_points_if_there_are_several_in_an_epoch(tmp_path):
    run = link_run(tmp_path / "run")
    whole = trajectory(["init", "soft", "soft", "reject", "soft"])
    halves = Trajectory(replace(record, epoch=record.epoch / 2) for record in whole)
    for found, text in ((whole, "epochs 1 to 3, 5."), (halves, "decision points 1 to 3, 5.")):
        save_trajectories(
            run / "aswa_trajectory.json", {"aswa": found}, metric="mrr", greater_is_better=True, applied="aswa", run={}
        )
        assert f"α = 0.25 for each of 4: {text}" in render.point(open_source(run), 4)
