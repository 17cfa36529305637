"""The code of every page under docs/ runs as it stands, from top to bottom, and the commands are such as there are."""

import re
import shlex

import pytest
from hub_client import TOKEN, hub_in_process, image_run, kge_run, run_command
from places import ROOT
from training import ConvNet, accuracy, image_data, make_trainer
from transformers import Trainer
from typer.main import get_command

from aswa_hf import ASWACallback
from aswa_hf.cli import app
from aswa_hf.hub import push_to_hub

PAGES = sorted((ROOT / "docs").glob("*.md"))
LOADED_BY = """
import timm
from transformers import AutoModel, AutoModelForImageClassification

import aswa_hf.vision
from aswa_hf.kge import LinkPredictor
"""
# What a command of a page needs that is not on every machine: data, several processes, a Hub, a browser.
ELSEWHERE = ("data/", "--data-dir", "path/to", "PATH", "uoft-cs/", " me/", "trainer-output", "serve", "a/model")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    assert blocks
    if "from trl import" in text:
        pytest.importorskip("trl")  # it needs a newer Python than this package
    names = {}
    for code in blocks:
        exec(code, names)


def hub_blocks(page):
    """The blocks of code that need a model, data or a Hub that the page does not make."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"^```py\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_code_that_needs_a_hub_runs_with_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with hub_in_process(monkeypatch) as hub:
        hub.add_user("me", TOKEN)
        kge, image, cifar = kge_run(tmp_path / "kge"), image_run(tmp_path / "image"), tmp_path / "cifar"
        run_command(
            *("train", "image", "--dataset", "digits", "--model", "preresnet20_cifar", "--image-size", 16),
            *("--epochs", 1, "--train-size", 40, "--val-ratio", 0.1, "--output-dir", cifar),
        )
        push_to_hub(kge, "me/countries-keci-aswa", tag="v1.0")
        push_to_hub(image, "me/digits-aswa")
        push_to_hub(cifar, "me/cifar10-preresnet20-aswa")
        names = {
            **{"Trainer": Trainer, "ASWACallback": ASWACallback, "metrics": accuracy, "model": ConvNet()},
            **{"args": make_trainer("conv", tmp_path / "start", num_train_epochs=2).args},
            **{"train": image_data(48, seed=1), "validation": image_data(32, seed=2)},
        }
        (start,) = hub_blocks("index.md")
        exec(start, names)
        assert "me/start" in hub.repos
        pushing, *loading = hub_blocks("hub.md")
        names["trainer"] = make_trainer("conv", tmp_path / "pushed", num_train_epochs=2)
        exec(pushing, names)
        assert "me/model" in hub.repos
        assert len(loading) == 2
        hub.run("\n".join([LOADED_BY, *loading]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Found only:UserWarning")  # the embedded graph is small
@pytest.mark.parametrize("name", ["kge", "multi-hop", "sharded", "tutorial", "vision"])
def test_the_commands_of_a_page_on_embedded_data_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = 0
    for arguments in commands(ROOT / "docs" / f"{name}.md"):
        line = " ".join(arguments)
        if not any(part in line for part in ELSEWHERE) or "--dry-run" in line:
            run_command(*arguments)
            ran += 1
    assert ran


def commands(page):
    """The arguments of every `aswa-hf` in the blocks of shell code."""
    text = page.read_text(encoding="utf-8")
    for code in re.findall(r"^```bash\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        for line in code.replace("\\\n", " ").splitlines():
            if line.strip().startswith("aswa-hf "):
                yield shlex.split(re.sub(r"\$\w+", "0", line), comments=True)[1:]


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_the_commands_of_a_page_have_the_options_they_are_given(page):
    for arguments in commands(page):
        command, context, rest = get_command(app), None, arguments
        while hasattr(command, "resolve_command"):
            context = command.make_context(command.name, list(rest), parent=context)
            name, command, rest = command.resolve_command(context, rest)
        command.make_context(name, list(rest), parent=context)  # raises for what it does not know


def test_a_command_with_an_option_that_does_not_exist_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```bash\naswa-hf predict run --head a --relaton b\n```\n")
    with pytest.raises(Exception, match="--relaton"):
        test_the_commands_of_a_page_have_the_options_they_are_given(page)
