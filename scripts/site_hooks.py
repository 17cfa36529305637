"""What mkdocs does beside the pages of docs/: the navigation, the reference of every public name, formulas, links.

A page that is added to docs/ appears under *Guides* without a line here; `ORDER` only decides its place.
"""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent

# Sections in order; a page of docs/ that none of them names is added to the end of the guides.
ORDER: dict[str, list[str]] = {
    "Start": ["index.md", "tutorial.md"],
    "Guides": [
        "choosing.md",
        "callback.md",
        "loop.md",
        "strategies.md",
        "language-models.md",
        "kge.md",
        "multi-hop.md",
        "vision.md",
        "distributed.md",
        "averaging.md",
        "hub.md",
        "space.md",
    ],
    "Background": ["how-it-works.md", "results.md", "comparison.md"],
}
# Modules of the reference: the page, its title, and where its names come from.
REFERENCE = {
    "aswa_hf": "Averages and training",
    "aswa_hf.kge": "Knowledge graphs",
    "aswa_hf.vision": "Images",
    "aswa_hf.loop": "The Accelerate loop",
    "aswa_hf.checkpoints": "Existing checkpoints",
    "aswa_hf.hub": "The Hub",
    "aswa_hf.report": "Reports",
    "aswa_hf.space": "Spaces",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the reference, and puts every page into the navigation."""
    pages = sorted(file.src_uri for file in files.documentation_pages() if "/" not in file.src_uri)
    known = {name for names in ORDER.values() for name in names}
    sections = {title: [name for name in names if name in pages] for title, names in ORDER.items()}
    sections["Guides"] += [name for name in pages if name not in known]
    reference = []
    for module, title in REFERENCE.items():
        if not (ROOT / module.replace(".", "/") / "__init__.py").exists():
            continue
        uri = f"reference/{module.rpartition('.')[2]}.md"
        files.append(File.generated(config, uri, content=reference_page(module, title)))
        reference.append(uri)
    config.nav = [*({title: names} for title, names in sections.items()), {"Reference": reference}]
    return files


def reference_page(module: str, title: str) -> str:
    """Returns a page with the documentation of each name that a module exports."""
    exported = import_module(module)
    lines = [f"# {title}", "", f"`import {module}`", ""]
    for name in exported.__all__:
        value = getattr(exported, name)
        lines += [f"::: {defined_in(module, name, value)}", ""]
    return "\n".join(lines)


def defined_in(module: str, name: str, value: Any) -> str:
    """Returns the full name under which the source of a public name is found."""
    if getattr(value, "__module__", "").startswith("aswa_hf") and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    source = Path(str(import_module(module).__file__)).read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):  # constants, types and modules do not know where they were defined
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return f"{node.module}.{name}"
    return f"{module}.{name}"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Sets formulas as MathML, which browsers show by themselves, and points links out of docs/ at the repository."""
    home = str(config.extra["repository"])

    def link(match: re.Match[str]) -> str:
        target = match[1]
        kind = "tree" if (ROOT / target.partition("#")[0]).is_dir() else "blob"
        return f"]({home}/{kind}/main/{target})"

    parts = re.split(r"(^```.*?^```|`[^`\n]+`)", markdown, flags=re.DOTALL | re.MULTILINE)
    for index in range(0, len(parts), 2):  # outside of code
        text = re.sub(r"\]\(\.\./([^)\s]+)\)", link, parts[index])
        text = re.sub(r"^\$\$\n(.+?)\n\$\$$", lambda m: formula(m[1], "block"), text, flags=re.DOTALL | re.MULTILINE)
        parts[index] = re.sub(r"(?<![\\$\w])\$([^$\n]+)\$(?![\w$])", lambda m: formula(m[1], "inline"), text)
    return "".join(parts)


def formula(latex: str, display: str) -> str:
    markup = convert(" ".join(latex.split()), display=display)
    return f'<div class="formula" tabindex="0">{markup}</div>' if display == "block" else markup
