"""Rooms meet only through frozen values: the solver half knows no torch, private torch has one door, importing is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "gcsolve"
TORCH_FREE = ("errors", "checks", "graph", "problem", "schedule", "simulate")


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _torch_free_files() -> list[Path]:
    return [PACKAGE / f"{name}.py" for name in TORCH_FREE] + sorted((PACKAGE / "solvers").glob("*.py"))


@pytest.mark.parametrize("path", _torch_free_files(), ids=lambda p: p.stem)
def test_the_solver_half_imports_no_torch_and_nothing_of_the_torch_half(path: Path) -> None:
    allowed = {f"gcsolve.{name}" for name in TORCH_FREE}
    for name in _imports(path):
        assert name.split(".")[0] != "torch", f"{path.name} imports {name}"
        if name.startswith("gcsolve."):
            assert name.startswith(("gcsolve.solvers", *allowed)), f"{path.name} imports {name}"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)
def test_private_torch_names_have_one_door(path: Path) -> None:
    if path.name == "_torch.py":
        return
    private = {
        n for n in _imports(path) if n.startswith("torch.") and any(part.startswith("_") for part in n.split("."))
    }
    assert not private, f"{path.name} imports {private}"


def test_importing_gcsolve_loads_neither_torch_nor_solver_back_ends_nor_plotting() -> None:
    code = (
        "import sys, gcsolve; gcsolve.Problem; gcsolve.solvers(); "
        "print([m for m in ('torch', 'ortools', 'matplotlib', 'transformers', 'networkx') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)
def test_examples_in_docstrings_are_rendered_as_code(path: Path) -> None:
    """griffe reads the section `Examples:`; of any other name it is text, its prompts quotations and its lists links."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            text = ast.get_docstring(node) or ""
            assert ">>>" not in text.split("Examples:\n")[0], f"{path.name}: {node}"


def test_everything_public_can_be_had() -> None:
    import gcsolve

    for name in gcsolve.__all__:
        assert getattr(gcsolve, name) is not None
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = gcsolve.nothing_of_that_name
