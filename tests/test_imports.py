"""Imports go one way, the core needs torch alone, and a plain loop does not pay for what it does not use."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import aswa_hf

PACKAGE = Path(aswa_hf.__file__).parent

# From the bottom up. A module imports from its own line and those above it; a new module is given its place here.
ORDER = [
    {"policy", "files", "metrics", "signals"},
    {"rng", "distributed"},
    {"sharding"},
    {"averaging", "batchnorm", "trajectory"},
    {"strategy"},
    {"strategies", "ensembles", "shadows"},
    {"checkpoint"},
    {"kge", "vision"},
    {"card"},
    {"hub_files"},
    {"hub"},
    # The callback pushes, so that the Hub stands below the Trainer.
    {"trainer", "trainer_files", "trainer_hub", "trainer_setup", "loop", "loop_setup", "loop_state"},
    {"cli", "existing", "report", "reproduce"},
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
CORE = set().union(*ORDER[: ORDER.index({"checkpoint"}) + 1])

# What the core may import beside the standard library: at the top of a module, and inside its functions.
AT_THE_TOP = {"checkpoint": {"torch", "safetensors"}}
IN_FUNCTIONS = {"trajectory": {"matplotlib"}}


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
    return [other for other in parts if RANK.get(other, len(ORDER)) > RANK[part]]


def test_every_module_has_its_place_in_the_order():
    assert set(modules()) - set(RANK) == set(), "give the new module its place in ORDER"
    assert CORE - {"ensembles"} <= set(modules())


@pytest.mark.parametrize("part", sorted(set(modules()) & set(RANK)))
def test_imports_go_one_way(part):
    assert violations(part, imports_of(part)) == []


@pytest.mark.parametrize("part", sorted(set(modules()) & CORE))
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


def test_importing_the_package_loads_nothing_slow():
    heavy = ("transformers", "accelerate", "datasets", "timm", "peft", "sklearn", "matplotlib", "typer")
    code = (
        "import sys, aswa_hf; aswa_hf.ASWA, aswa_hf.WeightAverage; "
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.strip() == "[]"


def test_every_public_name_is_there_and_an_unknown_one_is_an_error():
    for name in aswa_hf.__all__:
        assert getattr(aswa_hf, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'AWSA'"):
        aswa_hf.AWSA  # noqa: B018


def test_the_command_line_answers_without_loading_torch():
    code = (
        "import sys, aswa_hf.cli; print([name for name in ('torch', 'numpy', 'rich.console') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.strip() == "[]"


def test_every_public_name_is_found():
    import aswa_hf

    assert all(getattr(aswa_hf, name).__name__ == name for name in aswa_hf.__all__)
    assert set(aswa_hf.__all__) <= set(dir(aswa_hf))
