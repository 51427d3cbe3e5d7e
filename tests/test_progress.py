"""What long work shows: nothing unless somebody watches, a rich bar in a terminal, a line of text in a bare notebook."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

STEPS = """
from gcsolve.util.progress import bar, shown
with bar(None, 2) as begin:
    begin("first")
    begin("second")
with shown(None, "tracing GPT"):
    pass
"""


def run_steps() -> None:
    exec(STEPS, {})


def test_nothing_is_shown_to_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    run_steps()
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    run_steps()
    assert "second" in terminal.getvalue()
    assert "tracing GPT" in terminal.getvalue()


@pytest.fixture(scope="module")
def shown_in_a_notebook() -> Iterator[Callable[..., list[str]]]:
    """Runs code in a fresh kernel; the texts that stood in the cell's output, one after the other."""
    manager = pytest.importorskip("jupyter_client.manager", reason="needs jupyter_client (extra dev)")
    kernel, client = manager.start_new_kernel(kernel_name="python3")

    def run(code: str, *, watched: bool) -> list[str]:
        bare = (
            "importlib.util.find_spec = lambda n, real=importlib.util.find_spec: n != 'ipywidgets' and real(n) or None"
        )
        code = f"import importlib.util\n{bare}\n{code}"
        found: list[Any] = []
        reply = client.execute_interactive(code, allow_stdin=watched, output_hook=found.append, timeout=60)
        assert reply["content"]["status"] == "ok", reply["content"]
        assert {m["msg_type"] for m in found} <= {"display_data", "update_display_data", "status", "execute_input"}
        return [m["content"]["data"]["text/plain"] for m in found if "data" in m["content"]]

    yield run
    client.stop_channels()
    kernel.shutdown_kernel(now=True)


def test_a_notebook_without_widgets_gets_a_line_of_text_that_goes_away(
    shown_in_a_notebook: Callable[..., list[str]],
) -> None:
    half = "█" * 15 + "░" * 15
    told = ["", "░" * 30 + " 0/2 first", half + " 1/2 second", "", "", "tracing GPT …", ""]
    assert shown_in_a_notebook(STEPS, watched=True) == told


def test_a_notebook_that_runs_by_itself_shows_nothing(shown_in_a_notebook: Callable[..., list[str]]) -> None:
    assert shown_in_a_notebook(STEPS, watched=False) == []
    assert shown_in_a_notebook(STEPS.replace("None", "True"), watched=False)[1].endswith("0/2 first")
