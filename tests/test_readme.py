"""The README: its example runs and shows what it says, and its commands are the ones that CI uses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_opens_with_the_two_commands():
    first, second = re.findall(r"```sh\n(.*?)\n```", README, re.DOTALL)[:2]
    assert first.endswith(" && .venv/bin/gcsolve demo")
    assert second.endswith(" && .venv/bin/python -m pytest")


def test_ci_runs_the_readmes_test_command():
    pattern = re.search(r'grep -m 1 -E "(.*?)" README.md', (ROOT / ".ci" / "run").read_text())
    assert pattern is not None
    assert len(re.findall(pattern[1], README, re.MULTILINE)) == 1


def test_no_placeholder_is_left():
    assert "_OUTPUT" not in README


def test_the_file_of_factories_is_whole():
    (text,) = [code for code in re.findall(r"```py\n(.*?)```", README, re.DOTALL) if "def small" in code]
    names: dict[str, Any] = {}
    exec(compile(text, "my_models.py", "exec"), names)
    model, x, loss = names["small"]()
    assert loss(model(x)).ndim == 0


@pytest.mark.heavy
def test_example_prints_what_the_readme_shows(capsys):
    code, shown = re.findall(r"```python\n(.*?)```.*?```\n(.*?)```", README, re.DOTALL)[0]
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "all bitwise equal" in printed

    def without_times(text: str) -> list[str]:
        return [line for line in text.splitlines() if not line.startswith("step time")]

    def words(text: str) -> list[list[str]]:
        """Without figures, which move a little with the torch release and the number of threads."""
        return [re.sub(r"[-+]?[0-9][0-9.e+-]*", "#", line).split() for line in without_times(text)]

    assert words(printed) == words(shown)
