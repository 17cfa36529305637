"""The documentation as a site: every page in its navigation, every public name in its reference."""

import sys
from importlib import import_module

import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "scripts"))


def test_the_pictures_of_the_site_are_what_their_script_draws():
    import draw_docs

    assets = ROOT / "docs" / "assets"
    for name, picture in draw_docs.pictures().items():  # the badges show what pyproject.toml says
        assert picture + "\n" == (assets / name).read_text(encoding="utf-8"), name


def test_the_rule_decides_the_four_identities():
    import draw_docs

    kinds = [draw_docs.decisions_of(scores) for _, _, scores in draw_docs.IDENTITIES]
    assert kinds[0] == ["init", *["hard"] * 7]
    assert kinds[1] == ["init", *["hard"] * 3, *["reject"] * 4]
    assert kinds[2] == ["init", *["soft"] * 7]
    assert kinds[3] == ["init", *["hard"] * 3, *["soft"] * 4]


@pytest.fixture
def hooks():
    pytest.importorskip("mkdocs")
    pytest.importorskip("latex2mathml")
    return import_module("site_hooks")


def test_the_reference_has_every_public_name(hooks):
    for module, title in hooks.REFERENCE.items():
        page = hooks.reference_page(module, title)
        assert page.count("\n::: ") == len(import_module(module).__all__)


def test_formulas_become_mathml_and_links_out_of_the_pages_become_links_to_the_repository(hooks):
    from types import SimpleNamespace

    config = SimpleNamespace(extra={"repository": "https://example.org/repo"})
    page = "$\\alpha_i$ costs $5, see [a](../README.md), [b](../examples) and `$x$`\n\n$$\nx^2\n$$\n"
    found = hooks.on_page_markdown(page, None, config, None)
    assert '<math xmlns="http://www.w3.org/1998/Math/MathML" display="inline">' in found
    assert '<div class="formula" tabindex="0"><math' in found
    assert "costs $5" in found
    assert "`$x$`" in found
    assert "(https://example.org/repo/blob/main/README.md)" in found
    assert "(https://example.org/repo/tree/main/examples)" in found


@pytest.fixture
def notebooks():
    pytest.importorskip("nbformat")
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    return import_module("make_notebooks")


def test_the_notebooks_are_those_of_their_script_and_hold_pictures(notebooks):
    import nbformat

    for name in notebooks.NOTEBOOKS:
        saved = nbformat.read(notebooks.FOLDER / f"{name}.ipynb", as_version=4)
        assert [cell.source for cell in saved.cells] == [cell.source for cell in notebooks.notebook(name).cells]
        shown = [output for cell in saved.cells if cell.cell_type == "code" for output in cell.outputs]
        assert any("image/png" in output.get("data", {}) for output in shown)
        assert not any(output.output_type == "error" for output in shown)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trainer", "link_prediction", "existing_checkpoints"])
def test_a_notebook_runs_from_top_to_bottom(notebooks, name):
    found = notebooks.run(notebooks.notebook(name))
    assert all(cell.execution_count for cell in found.cells if cell.cell_type == "code")


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_shows_every_page(tmp_path, monkeypatch):
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    monkeypatch.chdir(ROOT)
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    start = (tmp_path / "index.html").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert (tmp_path / f"{page.stem}.html").exists()
        assert f'href="{page.stem}.html"' in start, f"{page.name} is not in the navigation"
    reference = (tmp_path / "reference" / "aswa_hf.html").read_text(encoding="utf-8")
    for name in import_module("aswa_hf").__all__:
        assert f"{name}</span>" in reference
    assert "https://fonts.g" not in start  # nothing is loaded from elsewhere
