"""Every notebook runs from top to bottom in a fresh kernel, and what is committed was run and names no machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def _code(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_there_are_five() -> None:
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_outputs_are_committed_and_name_no_machine(path: Path) -> None:
    cells = _code(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs
    for output in outputs:
        assert output["output_type"] != "error"
        assert output.get("name") != "stderr", output
        text = json.dumps(output.get("text") or {k: v for k, v in output["data"].items() if k.startswith("text")})
        assert not re.search(r"(?<![\w.])/(tmp|root|home|work|usr|Users)/", text)


@pytest.mark.heavy
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs_from_a_fresh_kernel(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient (extra dev)")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
