"""What pip installs: the torch releases that CI runs, and a package whose types can be read."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _torch_bounds() -> tuple[Version, Version]:
    """The oldest torch that is allowed, and the first that is not."""
    (torch_requirement,) = [r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "torch"]
    bounds = {specifier.operator: Version(specifier.version) for specifier in torch_requirement.specifier}
    assert bounds.keys() == {">=", "<"}
    return bounds[">="], bounds["<"]


def test_the_torch_that_runs_is_one_that_pip_would_install() -> None:
    oldest, beyond = _torch_bounds()
    assert oldest <= Version(Version(torch.__version__).base_version) < beyond


def test_the_table_of_what_is_supported_names_the_oldest_and_the_newest_torch() -> None:
    oldest, beyond = _torch_bounds()
    newest = f"{beyond.major}.{beyond.minor - 1}"
    supported = (ROOT / "docs" / "supported.md").read_text()
    rows = re.findall(r"^\| (2\.\d+)(?:, the oldest supported)? \|.*every change", supported, re.MULTILINE)
    assert sorted(rows, key=Version) == [f"{oldest.major}.{oldest.minor}", newest]


def test_types_are_in_the_wheel() -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="needs hatchling (extra dev)")
    files = {file.distribution_path for file in wheel.WheelBuilder(str(ROOT)).recurse_included_files()}
    assert "gcsolve/py.typed" in files
    assert "gcsolve/solver/milp/one_rerun.py" in files
    assert not any(file.startswith("tests") for file in files)


def test_the_files_that_run_with_the_oldest_torch_exist() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    names = re.search(r'^QUICK="(.*?)"', script, re.MULTILINE | re.DOTALL)
    assert names is not None
    assert [name for name in names[1].split() if not (ROOT / name).is_file()] == []
