"""The README: its example runs and prints what it shows, its table is what was measured, its commands are those of CI."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:e[-+]\d+)?")

PERCENT_POINTS = 0.1
"""How far a percentage may be from what the README shows: a fresh solve stops anywhere inside its gap."""
RELATIVE = 2e-4
"""The like for bytes, MB and losses, as a share."""


def test_at_most_1200_words():
    assert len(README.split()) <= 1200


def test_opens_with_the_two_commands():
    first, second = re.findall(r"```sh\n(.*?)\n```", README, re.DOTALL)[:2]
    assert first.endswith(" && .venv/bin/gcsolve demo")
    assert second.endswith(" && .venv/bin/python -m pytest")


def test_ci_runs_the_readmes_test_command():
    pattern = re.search(r'grep -m 1 -E "(.*?)" README.md', (ROOT / ".ci" / "run").read_text())
    assert pattern is not None
    assert len(re.findall(pattern[1], README, re.MULTILINE)) == 1


def test_what_it_does_not_do_is_five_lines():
    (section,) = re.findall(r"## What it does not do\n\n(.*?)\n<!--", README, re.DOTALL)
    lines = section.splitlines()
    assert len(lines) == 5
    assert all(line.startswith("- ") for line in lines)


def test_no_measured_figure_is_copied_by_hand():
    """Shares, sizes and times stand only where docs/renew.py or a command put them."""
    text = re.sub(r"<!-- renew:\w+ -->.*?<!-- /renew -->", "", README, flags=re.DOTALL)
    text = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    assert not re.findall(r"\d[\d.,]* ?(?:%|[kMG]i?B\b|s\b|×|x\b)", text)


# --- the table against the peers --------------------------------------------------------------------------------------


def _peers() -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / "peers.json").read_text())["models"]


def _table() -> list[list[str]]:
    (text,) = re.findall(r"<!-- renew:peers -->\n(.*?)<!-- /renew -->", README, re.DOTALL)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def test_every_number_of_the_table_was_measured():
    heads, _, *rows = _table()
    models = _peers()
    assert [head.lower().replace("-", "") for head in heads[1:]] == list(models)
    names = [name for name in models["gpt2"]["rows"] if not name.startswith("gcsolve")]
    assert len(rows) == len(names)
    for name, (_, *cells) in zip(names, rows, strict=True):
        for model, cell in zip(models.values(), cells, strict=True):
            if name not in model["rows"]:
                assert cell == "–"
                continue
            peer, own = model["rows"][name], model["rows"][f"gcsolve at {name}"]
            share, theirs, ours = (float(x) for x in NUMBER.findall(cell))
            assert share == pytest.approx(100 * peer["peak_bytes"] / model["rows"]["eager"]["peak_bytes"], abs=0.501)
            assert theirs == pytest.approx(peer["time_ratio"], abs=0.00501)
            assert ours == pytest.approx(own["time_ratio"], abs=0.00501)
            assert ("†" in cell) == ("WRONG" in peer["same"])
            assert ("‡" in cell) == ("DIFFER" in peer["same"])


def test_all_steps_of_gcsolve_there_are_bitwise_equal():
    rows = [(name, row) for model in _peers().values() for name, row in model["rows"].items()]
    own = [row["same"] for name, row in rows if name.startswith("gcsolve")]
    assert own
    assert set(own) == {"bitwise"}


# --- the example ------------------------------------------------------------------------------------------------------


def _example() -> tuple[str, str]:
    (example,) = re.findall(r"```python\n(.*?)```.*?```\n(.*?)```", README, re.DOTALL)
    return example


def differences(printed: str, shown: str) -> list[str]:
    """Where two outputs of the example differ in words, or in numbers by more than the tolerances. Times are not compared."""
    found = []
    lines, expected = printed.strip().splitlines(), shown.strip().splitlines()
    if len(lines) != len(expected):
        return [f"{len(lines)} lines printed, {len(expected)} shown"]
    for line, other in zip(lines, expected, strict=True):
        same_words = NUMBER.sub("#", line) == NUMBER.sub("#", other)
        timed = line.startswith("step time")
        if not same_words or not (timed or all(map(_close, NUMBER.finditer(line), NUMBER.finditer(other)))):
            found.append(f"printed {line!r}, shown {other!r}")
    return found


def _close(number: re.Match[str], shown: re.Match[str]) -> bool:
    value, expected = (float(match[0].replace(",", "").rstrip(".")) for match in (number, shown))
    if number.string[number.end() :].startswith("%"):
        return abs(value - expected) <= PERCENT_POINTS
    return abs(value - expected) <= RELATIVE * abs(expected)


def test_the_comparison_notices_figures_that_moved():
    _, shown = _example()
    assert not differences(shown, shown)
    moved = {
        "peak 155": "peak 156",
        "overhead 2": "overhead 3",
        "below 2": "below 1",
        "loss: 6": "loss: 5",
        "3 steps": "2 steps",
    }
    for old, new in moved.items():
        assert old in shown
        assert differences(shown.replace(old, new, 1), shown), old
    # What once stood here unnoticed, beside what was printed.
    before = "OPTIMAL: peak 155498688 of 155534528 bytes; overhead 21.88%"
    after = "OPTIMAL: peak 155427968 of 155534528 bytes; overhead 21.74%"
    assert differences(after, before)


@pytest.mark.heavy
def test_example_prints_what_the_readme_shows(capsys):
    code, shown = _example()
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "all bitwise equal" in printed
    assert not differences(printed, shown), "run: python docs/renew.py --run"
