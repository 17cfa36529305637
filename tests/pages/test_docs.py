"""The code of every page under docs/ runs as it stands, from top to bottom, and the commands are such as there are."""

import re
import shlex

import pytest
from places import ROOT
from typer.main import get_command

from aswa_hf.cli import app

PAGES = sorted((ROOT / "docs").glob("*.md"))


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
