"""The documentation: what it shows of source and results is fresh, its code runs, and the names and files in it exist."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from docs import draw_rooms, renew

ROOT = Path(__file__).parent.parent
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (*renew.PAGES, ROOT / "CONTRIBUTING.md")}
FENCE = re.compile(r"```(\w*)[^\n]*\n(.*?)```", re.DOTALL)
RUNNING = [name for name, text in PAGES.items() if name != "README.md" and "```python\n" in text]


@pytest.mark.parametrize("name", draw_rooms.PICTURES)
def test_pictures_are_drawn_from_the_source(name: str) -> None:
    drawn = draw_rooms.PICTURES[name]()
    assert (draw_rooms.FIGURES / name).read_text() == drawn, "the source has changed; run: python docs/renew.py"


@pytest.mark.parametrize("page", PAGES)
def test_what_is_made_of_results_and_source_is_fresh(page: str) -> None:
    assert renew.renewed(PAGES[page], renew.FROM_FILES) == PAGES[page], "run: python docs/renew.py"


def test_every_part_is_made_by_something_and_none_is_empty() -> None:
    parts = [match for text in PAGES.values() for match in renew.BLOCK.finditer(text)]
    assert {match[2] for match in parts} == {*renew.FROM_FILES, *renew.FROM_COMMANDS}
    for match in parts:
        assert match[3].strip(), f"{match[2]}; run: python docs/renew.py --run"


def test_an_arrow_upwards_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    imports = draw_rooms.room_imports()
    imports["solver"].add("session")
    monkeypatch.setattr(draw_rooms, "room_imports", lambda: imports)
    with pytest.raises(ValueError, match="solver imports session"):
        draw_rooms.rooms_svg()


def test_a_budget_goes_the_way_that_is_drawn() -> None:
    """The functions of the picture are called in its order when a budget is solved."""
    import torch

    import gcsolve

    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
    expected = [step.function for step in draw_rooms.WAY]
    remaining = list(expected)

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and remaining:
            code, module = frame.f_code, frame.f_globals.get("__name__", "")
            if f"{module}:{code.co_qualname}" == remaining[0]:
                remaining.pop(0)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        gcsolve.solve(model, torch.randn(256, 64), budget=0.9)
    finally:
        sys.setprofile(before)
    assert not remaining, f"after {expected[len(expected) - len(remaining) - 1]} {remaining[0]} was not called"


@pytest.mark.heavy
@pytest.mark.parametrize("page", RUNNING)
def test_code_of_a_page_runs_from_top_to_bottom(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for language, code in FENCE.findall(PAGES[page]):
        if language == "python":
            exec(compile(code, page, "exec"), names)
    capsys.readouterr()


@pytest.mark.heavy
def test_the_factory_of_the_training_page_is_whole() -> None:
    import torch

    (code,) = [code for _, code in FENCE.findall(PAGES["docs/training.md"]) if "def small" in code]
    names: dict[str, Any] = {"torch": torch}
    exec(compile(code, "my_models.py", "exec"), names)
    model, x, loss = names["small"]()
    assert loss(model(x)).ndim == 0


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_known_to_the_command_line(page: str) -> None:
    from gcsolve.cli import _parser

    for language, code in FENCE.findall(PAGES[page]):
        if language == "sh":
            for line in code.replace("\\\n", " ").splitlines():
                if line.startswith("gcsolve "):
                    _parser().parse_args(shlex.split(line)[1:])


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    """Paths in backticks from the repository's root, or within gcsolve/; folders end in a slash."""
    code = re.findall(r"`([^`\n]+)`", FENCE.sub("", renew.BLOCK.sub("", PAGES[page])))
    words = [word for text in code for word in text.split() if "/" in word or word.endswith(".py")]
    for word in words:
        if re.fullmatch(r"[\w./*]+(\.(py|txt|json|md|svg|png)|/)", word) and not word.startswith(("http", "my_")):
            places = (ROOT, ROOT / "gcsolve", ROOT / "tests")
            assert any(any(place.glob(word.rstrip("/"))) for place in places), f"{page}: {word}"


@pytest.mark.parametrize("page", PAGES)
def test_names_of_the_package_exist(page: str) -> None:
    for dotted in set(re.findall(r"\bgcsolve(?:\.[A-Za-z_]\w*)+", PAGES[page])):
        assert _exists(dotted), f"{page}: {dotted}"


def _exists(dotted: str) -> bool:
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            thing: Any = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for name in parts[cut:]:
            if not hasattr(thing, name) and name not in getattr(thing, "__dataclass_fields__", {}):
                return False
            thing = getattr(thing, name, None)
        return True
    return False
