"""What is installed and published: declared dependencies, packaged files, one version, links that work elsewhere."""

from __future__ import annotations

import ast
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from commands import outcome
from places import ROOT

import aswa_hf
from aswa_hf.checkpoint import library_versions

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
HOME = PROJECT["urls"]["Repository"]
RAW = HOME.replace("github.com", "raw.githubusercontent.com")
IMPORTED_AS = {
    "gradio-client": "gradio_client",
    "griffelib": "griffe",
    "huggingface-hub": "huggingface_hub",
    "pillow": "PIL",
    "pyyaml": "yaml",
    "scikit-learn": "sklearn",
}
OPTIONAL = ("space",)  # extras that parts of the package need


def declared(requirements: list[str]) -> set[str]:
    """The modules that the packages of `requirements` are imported as."""
    names = {re.match(r"[\w.-]+", requirement)[0].lower() for requirement in requirements}
    return {IMPORTED_AS.get(name, name) for name in names}


def imported(folder: Path) -> set[str]:
    """The modules that the sources of `folder` import, besides the standard library and their own neighbors."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add(node.module.split(".")[0])
    own = {path.stem for part in ("tests", "benchmarks", "scripts") for path in (ROOT / part).rglob("*.py")}
    return found - sys.stdlib_module_names - own - {"aswa_hf", "tomllib"}  # tomllib: from Python 3.11 on


def test_the_dependencies_are_what_the_package_imports():
    optional = {name for extra in OPTIONAL for name in declared(PROJECT["optional-dependencies"][extra])}
    assert imported(ROOT / "aswa_hf") - optional == declared(PROJECT["dependencies"])


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "examples", "scripts"])
def test_every_import_beside_the_package_is_a_dependency_or_in_an_extra(folder):
    extras = [requirement for extra in PROJECT["optional-dependencies"].values() for requirement in extra]
    assert imported(ROOT / folder) - declared(PROJECT["dependencies"] + extras) == set()


def test_an_undeclared_import_is_found(tmp_path):
    (tmp_path / "module.py").write_text(
        "import os\ndef f():\n    from undeclared.part import g\n    import numpy as np\n"
    )
    assert imported(tmp_path) - declared(["NumPy>=1.26"]) == {"undeclared"}


def test_every_dependency_has_a_lower_bound_and_no_upper_one():
    for requirement in PROJECT["dependencies"]:
        assert re.fullmatch(r"[\w-]+>=[\d.]+", requirement), requirement


def test_every_file_of_the_package_is_in_the_wheel():
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["aswa_hf"]
    package = ROOT / "aswa_hf"
    packaged = {path for pattern in patterns for path in package.glob(pattern)}
    files = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert files == packaged
    # `packages.find` passes over a folder of modules without __init__.py.
    assert {path.parent for path in package.rglob("*.py")} == {path.parent for path in package.rglob("__init__.py")}


def test_there_is_one_version(capsys):
    version = metadata.version("aswa-hf")
    assert aswa_hf.__version__ == version
    assert library_versions()["aswa-hf"] == version
    assert outcome(capsys, "--version") == (0, f"aswa-hf {version}\n", "")


def test_the_changelog_has_an_entry_for_the_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[(.+?)\]", changelog, flags=re.MULTILINE)[:2] == ["Unreleased", PROJECT["version"]]


def test_classifiers_the_workflow_and_the_tools_name_the_same_python_versions():
    classified = [
        match[1] for text in PROJECT["classifiers"] if (match := re.search(r"Python :: (3\.\d+)$", text)) is not None
    ]
    assert PROJECT["requires-python"] == f">={classified[0]}"
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == classified
    assert PYPROJECT["tool"]["mypy"]["python_version"] == classified[0]
    assert PYPROJECT["tool"]["ruff"]["target-version"] == "py" + classified[0].replace(".", "")


def links(page: str) -> list[str]:
    """The targets of links and pictures in Markdown or HTML, outside of code."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\]\(\s*<?([^)\s>]+)", text) + re.findall(r"(?:href|src)=[\"']([^\"']+)", text)


def in_the_checkout(link: str) -> Path | None:
    """The file or folder that a link into the project's home shows."""
    match = re.fullmatch(rf"(?:{HOME}/(?:blob|tree)|{RAW})/main/([^#]+)(?:#.*)?", link)
    return ROOT / match[1] if match else None


def test_every_link_and_picture_of_the_readme_works_on_a_package_index():
    found = links((ROOT / "README.md").read_text(encoding="utf-8"))
    assert [link for link in found if not link.startswith("https://")] == []
    own = [link for link in [*found, *PROJECT["urls"].values()] if link.startswith((HOME + "/", RAW + "/"))]
    assert own
    for link in own:
        if link != PROJECT["urls"]["Issues"]:
            path = in_the_checkout(link)
            assert path is not None, f"{link} does not name a file on the main branch"
            assert path.is_dir() if "/tree/" in link else path.is_file(), f"{link}: {path} does not exist"


def test_a_relative_link_is_found():
    page = (
        '[a](docs/a.md)\n![b](<b.png>)\n<img src="c.png">\n`[d](d.md)`\n```python\nx[e](f)\n```\n[g](https://g.org)\n'
    )
    assert links(page) == ["docs/a.md", "b.png", "https://g.org", "c.png"]
