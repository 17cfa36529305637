"""Imports go one way, the core needs torch alone, and a plain loop does not pay for what it does not use."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import aswa_hf

PACKAGE = Path(aswa_hf.__file__).parent

# From the bottom up, in the order of the table in CONTRIBUTING.md. A part of the package imports from those before it
# in this list, never from one behind it; a new part is given its place here.
ORDER = [
    "policy",
    "_utils",
    "averaging",
    "batchnorm",
    "trajectory",
    "strategies",
    "ensembles",
    "comparison",
    "schedule",
    "checkpoint",
    "run_folder",
    "hub_requests",
    "style",  # imports nothing
    "plotting",
    "interactive",
    "kge",
    "vision",
    "hub",
    "trainer",  # the callback pushes
    "loop",
    "experiments",
    "checkpoints",
    "report",
    "reproduce",
    "space",
    "cli",
    "__main__",
]
CORE = ORDER[: ORDER.index("checkpoint") + 1]

# What the core may import beside the standard library: at the top of a module, and inside its functions.
# torch needs filelock too.
AT_THE_TOP = {"checkpoint": {"torch", "safetensors"}, "_utils": {"torch", "filelock", "safetensors"}}
IN_FUNCTIONS: dict[str, set[str]] = {"_utils": {"pydantic"}}


def modules() -> dict[str, list[Path]]:
    """The source files by the part of the package they belong to; `aswa_hf/__init__.py` only gathers names."""
    found: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part != "__init__":
            found.setdefault(part, []).append(path)
    return found


def imports(source: str, package: str) -> list[tuple[str, bool]]:
    """The full names a source imports, each with whether this happens at the top; relative names are resolved."""
    tree = ast.parse(source)
    deferred = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) not in deferred) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            # `from aswa_hf import policy` names a module, `from aswa_hf.policy import decide` something in one.
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "aswa_hf" else [base]
            found += [(name, id(node) not in deferred) for name in names]
    return found


def imports_of(part: str) -> list[tuple[str, bool]]:
    found = []
    for path in modules()[part]:
        package = ".".join(path.relative_to(PACKAGE.parent).parent.parts)
        found += imports(path.read_text(encoding="utf-8"), package)
    return found


def violations(part: str, found: list[tuple[str, bool]]) -> list[str]:
    parts = [name.split(".")[1] if "." in name else name for name, _ in found if name.split(".")[0] == "aswa_hf"]
    allowed = ORDER[: ORDER.index(part) + 1]
    return [other for other in parts if other not in allowed]


def test_every_module_has_its_place_in_the_order():
    assert sorted(modules()) == sorted(ORDER), "give a new module its place in ORDER"


@pytest.mark.parametrize("part", ORDER)
def test_imports_go_one_way(part):
    assert violations(part, imports_of(part)) == []


def imported_modules(path: Path) -> set[str]:
    """The modules of the package that a file imports, at its top or in functions."""
    package = ".".join(path.relative_to(PACKAGE.parent).parent.parts)
    known = {module_name(other) for other in PACKAGE.rglob("*.py")}
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: -node.level + 1 or None]) if node.level else ""
            base = ".".join(filter(None, (base, node.module)))
            # `from aswa_hf import policy` imports a module, `from aswa_hf.policy import decide` something in one.
            found |= {name if (name := f"{base}.{alias.name}") in known else base for alias in node.names}
    return (found & known) - {module_name(path)}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_module_imports_one_that_imports_it():
    graph = {module_name(path): imported_modules(path) for path in PACKAGE.rglob("*.py")}
    while ready := {name for name, needed in graph.items() if not needed & graph.keys()}:
        graph = {name: needed for name, needed in graph.items() if name not in ready}
    # `aswa_hf` itself gathers names when they are asked for.
    assert {name: sorted(needed & graph.keys()) for name, needed in graph.items() if name != "aswa_hf"} == {}


@pytest.mark.parametrize("part", CORE)
def test_the_core_imports_the_standard_library_and_torch(part):
    for name, at_the_top in imports_of(part):
        allowed = {"aswa_hf", "torch"} if part not in AT_THE_TOP else {"aswa_hf", *AT_THE_TOP[part]}
        if not at_the_top:
            allowed |= IN_FUNCTIONS.get(part, set())
        top = name.split(".")[0]
        assert top in sys.stdlib_module_names or top in allowed, f"{part} imports {name}"


def test_the_check_sees_every_way_to_import():
    source = (
        "from aswa_hf import policy, strategies\nimport aswa_hf.hub.card\nfrom . import loop\nfrom .cli import main\n"
        "def late():\n    import matplotlib.pyplot\n"
    )
    assert imports(source, "aswa_hf") == [
        ("aswa_hf.policy", True),
        ("aswa_hf.strategies", True),
        ("aswa_hf.hub.card", True),
        ("aswa_hf.loop", True),
        ("aswa_hf.cli", True),
        ("matplotlib.pyplot", False),
    ]
    assert imports("from ..strategies import ASWA", "aswa_hf.kge") == [("aswa_hf.strategies", True)]
    assert violations("averaging", imports(source, "aswa_hf")) == ["strategies", "hub", "loop", "cli"]
    assert violations("policy", [("aswa_hf", True), ("torch", True)]) == ["aswa_hf"]


def test_every_public_name_is_there_and_an_unknown_one_is_an_error():
    for name in aswa_hf.__all__:
        assert getattr(aswa_hf, name).__name__ == name
    assert set(aswa_hf.__all__) <= set(dir(aswa_hf))
    with pytest.raises(AttributeError, match="no attribute 'AWSA'"):
        aswa_hf.AWSA  # noqa: B018


# What is imported in a new process, one after the other, and what must not have been loaded until then, unless by
# `AutoModel`: some versions of transformers import scikit-learn with it.
STEPS = {
    "import aswa_hf; aswa_hf.KGERun(dataset='countries'), aswa_hf.ImageRun(dataset='digits')": "torch numpy typer",
    "import aswa_hf.cli": "torch numpy rich.console",
    "aswa_hf.ASWA, aswa_hf.WeightAverage": "transformers accelerate datasets timm peft sklearn matplotlib",
    "from transformers import AutoModel; theirs = {*sys.modules}": "",
    "from aswa_hf.kge import LinkPredictor, answer_query": "transformers.trainer datasets timm peft sklearn",
}


def test_settings_commands_strategies_and_predictions_load_nothing_slow_that_they_do_not_need():
    code = "import sys\ntheirs = set()\n" + "".join(
        f"{step}\nprint([name for name in {names.split()} if name in {{*sys.modules}} - theirs])\n"
        for step, names in STEPS.items()
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=540)
    assert dict(zip(STEPS, run.stdout.splitlines(), strict=True)) == dict.fromkeys(STEPS, "[]")
