"""Rooms meet only through frozen values: who may import whom, private torch behind one door, and a light import.

A room is a folder of `gcsolve`, or a file that lies beside them. Imports count wherever they stand: inside functions, and
for types alone.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import networkx as nx
import pytest

PACKAGE = Path(__file__).parent.parent / "gcsolve"
FILES = sorted(PACKAGE.rglob("*.py"))
NUMBERS = frozenset({"graph", "problem", "schedule", "simulate"})
TORCH_FREE = frozenset({"errors", *NUMBERS, "solver"})
TORCH_FREE_UTIL = frozenset({"gcsolve.util.checks", "gcsolve.util"})

BASE = frozenset({"errors", "util"})
TORCH = BASE | {"_torch"}
STEP = TORCH | NUMBERS | {"ops", "cost", "capture", "lowering"}  # from the model to its Problem
SESSION = STEP | {"solver", "execution", "plan_record"}

MAY_IMPORT: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "util": TORCH,
    "_torch": frozenset(),
    "graph": BASE,
    "problem": BASE | {"graph"},
    "schedule": BASE | {"graph"},
    "simulate": BASE | {"graph", "problem", "schedule"},
    "solver": BASE | NUMBERS,
    "ops": TORCH,
    "cost": TORCH | {"ops"},
    "capture": TORCH | {"ops", "cost"},
    "lowering": STEP,
    "execution": STEP,
    "plan_record": STEP | {"solver"},
    "report": STEP | {"solver", "plan_record"},
    "session": SESSION,
    "evaluation": SESSION | {"session", "report"},
    "serialization": SESSION | {"session"},
    "plan": SESSION | {"session", "report", "evaluation", "serialization"},
    "api": SESSION | {"session", "plan", "serialization"},
}
ON_TOP = frozenset({"__init__", "__main__", "cli", "demo"})
"""The doors of the package; no room imports them."""


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


MODULES = {_module(path): path for path in FILES}


def _imports(path: Path) -> set[str]:
    """Modules, and names in modules, that the file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{path.name}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _own_imports(path: Path) -> set[str]:
    """Modules of gcsolve that the file imports."""
    names = {name for name in _imports(path) if name.split(".")[0] == "gcsolve"}
    return {name if name in MODULES else name.rpartition(".")[0] for name in names}


def test_every_room_is_in_the_table() -> None:
    assert {_room(module) for module in MODULES} == {*MAY_IMPORT, *ON_TOP}


def test_the_package_is_not_flat() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 20


@pytest.mark.parametrize("module", MODULES)
def test_a_room_imports_only_what_it_may(module: str) -> None:
    room = _room(module)
    for imported in _own_imports(MODULES[module]):
        other = _room(imported)
        if room in ON_TOP or other == room:
            continue
        assert other in MAY_IMPORT[room], f"{module} imports {imported}: {room} may import {sorted(MAY_IMPORT[room])}"


def test_no_arrow_between_rooms_points_upwards() -> None:
    """The table itself has no circle."""
    rooms = nx.DiGraph((room, other) for room, others in MAY_IMPORT.items() for other in others if other != room)
    rooms.remove_edges_from([("util", "_torch")])
    assert nx.is_directed_acyclic_graph(rooms), nx.find_cycle(rooms)


def test_no_circle_of_imports_between_files() -> None:
    files = nx.DiGraph((module, other) for module, path in MODULES.items() for other in _own_imports(path))
    files.remove_nodes_from([module for module in files if MODULES[module].name == "__init__.py"])
    assert nx.is_directed_acyclic_graph(files), nx.find_cycle(files)


@pytest.mark.parametrize("module", [m for m in MODULES if _room(m) in TORCH_FREE])
def test_the_solver_half_imports_no_torch(module: str) -> None:
    for imported in _imports(MODULES[module]):
        assert imported.split(".")[0] != "torch", f"{module} imports {imported}"
    for imported in _own_imports(MODULES[module]):
        assert _room(imported) in TORCH_FREE or imported in TORCH_FREE_UTIL, f"{module} imports {imported}"


def _private_torch(path: Path) -> set[str]:
    """Private names of torch that the file imports or reaches by attributes, as in `torch._C` or `torch.x._y`."""
    tree = ast.parse(path.read_text())
    chains = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_chain(node)}
    names = {name for name in _imports(path) | chains if name.split(".")[0] == "torch"}
    return {name for name in names if any(_is_private(part) for part in name.split("."))}


def _is_chain(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def _is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


# Ops are public by their schema, whatever their name.
PUBLIC_CHAINS = ("torch.ops.aten._", "torch.ops.gcsolve.")


# Torch's own inner words, which no import or chain that begins at `torch` shows.
PRIVATE_WORDS = frozenset({"_aot_state", "partitioner_tag", "is_gradient_acc"})


def _words(path: Path) -> set[str]:
    """Names of attributes, and strings of one word."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return attributes | {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


@pytest.mark.parametrize("module", [m for m in MODULES if _room(m) != "_torch"])
def test_private_torch_has_one_door(module: str) -> None:
    path = MODULES[module]
    private = {name for name in _private_torch(path) if not name.startswith(PUBLIC_CHAINS)}
    private |= {word for word in _words(path) if word in PRIVATE_WORDS or word.startswith("torch._")}
    assert not private, f"{module} reaches {sorted(private)}; give it a name in gcsolve/_torch.py"


def test_importing_gcsolve_loads_neither_torch_nor_solver_back_ends_nor_plotting() -> None:
    code = (
        "import sys, gcsolve; gcsolve.Problem; gcsolve.solvers(); "
        "print([m for m in ('torch', 'ortools', 'matplotlib', 'transformers', 'networkx') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
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
