"""Draws docs/figures/rooms.svg and docs/figures/budget.svg from the package's own source: `python docs/draw_rooms.py`.

rooms.svg: the rooms of `gcsolve` and every import between them, read from the files. Each room has a place in a grid here;
an import that would point upwards, or to a room in the same row, is an error, and so is a room without a place.
budget.svg: the functions that one budget passes through in `gcsolve.solve`, in order; a function that is gone is an error.

`tests/test_docs.py` compares the committed pictures with what this script draws, and the way of the budget with a real call.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "gcsolve"
FIGURES = ROOT / "docs" / "figures"


@dataclass(frozen=True)
class Room:
    """A box of the first picture: the parts of `gcsolve` that it stands for, what it owns, and its place in the grid."""

    title: str
    owns: str
    column: float
    row: int
    parts: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return self.parts or (self.title,)


ROOMS = (
    Room("doors", "command line, demo, the public names", 0.5, 0, ("cli", "demo", "__main__", "")),
    Room("api", "solve, minimum_budget, load_plan", 0.5, 1),
    Room("plan", "Plan: what can be done with a record", 0.5, 2),
    Room("evaluation", "verify, compare, fit", 0, 3),
    Room("serialization", "a plan as a JSON file, and back", 1, 3),
    Room("report", "tables, figures, the HTML page", 0, 4),
    Room("session", "one traced call, from which plans come", 1, 4),
    Room("plan_record", "a plan as data: PlanRecord, Decision", 0, 5),
    Room("execution", "Schedule → a module that trains", 1, 5),
    Room("solver", "methods and proofs; no torch", 0, 6),
    Room("lowering", "joint graph → Problem", 1, 6),
    Room("numbers", "graph, problem, schedule, simulate; no torch", 0, 7, ("graph", "problem", "schedule", "simulate")),
    Room("capture", "model → joint graph; torch's functions", 1, 7),
    Room("cost", "bytes, FLOPs, seconds; devices", 1, 8),
    Room("ops", "facts about one op; running it alone", 1, 9),
    Room("util", "checks, sizes, trees of tensors, progress", 0, 9),
    Room("errors", "every exception", 0, 10),
    Room("_torch", "the one door to torch's private names", 1, 10),
)
BASE = frozenset({"util", "_torch", "errors"})
"""Rooms that nearly all import: named in the boxes, without arrows."""


@dataclass(frozen=True)
class Step:
    """One function on the way of a budget: where it is, what it does, and the value that it hands on."""

    lane: str
    function: str
    does: str
    hands_on: str


WAY = (
    Step("api", "gcsolve.api:solve", "takes the arguments", "budget=0.5"),
    Step("util", "gcsolve.util.sizes:check_budget", "refuses what is no size", ""),
    Step("session", "gcsolve.session:Session.of", "has the call traced and costed", "the call"),
    Step("capture", "gcsolve.capture.trace:trace", "model → joint graph", "Trace"),
    Step("lowering", "gcsolve.lowering.costed:costed", "adds bytes and seconds", "Problem"),
    Step("session", "gcsolve.session:Session.budget_bytes", "knows the store-all peak", "0.5, peak"),
    Step("util", "gcsolve.util.sizes:budget_bytes", "fraction or text → bytes", "bytes"),
    Step("plan", "gcsolve.plan:Plan.solved", "asks for a solution", "bytes"),
    Step("session", "gcsolve.session:Session.solution", "refuses what is proven impossible", "bytes"),
    Step("numbers", "gcsolve.problem:Problem.with_budget", "the budget joins the step", "Problem"),
    Step("solver", "gcsolve.solver.front:solve_problem", "runs one method", "Schedule"),
    Step("numbers", "gcsolve.simulate:simulate", "judges the peak", "Solution"),
    Step("plan", "gcsolve.plan:Plan.of", "asks for the record, adds the verbs", "Solution"),
    Step("session", "gcsolve.session:Session.record", "has it carried out", "Schedule"),
    Step("execution", "gcsolve.execution.emit:emit", "writes forward and backward", "graphs"),
    Step("execution", "gcsolve.execution.planned_module:planned_module", "makes the module", ""),
)
LANES = ("api", "plan", "session", "execution", "lowering", "capture", "solver", "numbers", "util")


# --- what the source says -----------------------------------------------------------------------------------------------


def modules() -> dict[str, Path]:
    """Dotted name of each module of the package → its file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def own_imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Modules of the package that a file imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in known or node.module in known:
                    yield whole if whole in known else node.module


def room_imports() -> dict[str, set[str]]:
    """Title of each room → titles of the rooms that its files import.

    Raises:
        ValueError: a part of the package belongs to no room.
    """
    known = modules()
    title_of = {name: room.title for room in ROOMS for name in room.names}
    room_of = {}
    for module in known:
        part = module.split(".")[1] if "." in module else ""
        if part not in title_of:
            raise ValueError(f"{module} is in no room; give gcsolve/{part} a place in ROOMS of docs/draw_rooms.py")
        room_of[module] = title_of[part]
    imports: dict[str, set[str]] = {room.title: set() for room in ROOMS}
    for module, path in known.items():
        imports[room_of[module]] |= {room_of[other] for other in own_imports(path, known)} - {room_of[module]}
    return imports


def arrows(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """The imports that no longer path implies, without those of `BASE`."""
    drawn = {room: others - BASE for room, others in imports.items()}
    below: dict[str, set[str]] = {}
    for room in sorted(ROOMS, key=lambda room: -room.row):
        below[room.title] = set().union(*(below[other] | {other} for other in drawn[room.title]))
    return {room: {o for o in others if not any(o in below[p] for p in others)} for room, others in drawn.items()}


def functions(path: Path) -> set[str]:
    """Names of the functions and methods that a file defines, as in "Plan.solved"."""

    def inside(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                yield prefix + node.name
            elif isinstance(node, ast.ClassDef):
                yield from inside(node.body, f"{prefix}{node.name}.")

    return set(inside(ast.parse(path.read_text()).body, ""))


# --- the drawings ---------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 262, 76, 30, 36, 20
INK, PALE, LINE, TINTS = "#1f2933", "#52606d", "#3e6b99", {"no torch": "#e8f3e8", "base": "#f0f0f0", "": "#e7eff8"}


LEGEND = (
    "An arrow points from a room to one that it imports.",
    "“also”: its other imports. A path of arrows leads there,",
    "or they are grey boxes, which nearly every room imports.",
    "Green: knows no torch.",
)


def _text(x: float, y: float, words: str, size: float = 11, colour: str = INK, more: str = "") -> str:
    escaped = words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{colour}" {more}>{escaped}</text>'


def _page(width: float, height: float, title: str, body: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        'font-family="Helvetica, Arial, sans-serif">'
    )
    tip = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 8 4 0 8z" fill="{LINE}"/></marker></defs>'
    )
    background = f'<rect width="{width:g}" height="{height:g}" fill="white"/>'
    return "\n".join([head, f"<title>{title}</title>", tip, background, *body, "</svg>"]) + "\n"


def _corner(room: Room) -> tuple[float, float]:
    return MARGIN + room.column * (WIDTH + GAP_X), MARGIN + room.row * (HEIGHT + GAP_Y)


def _box(room: Room, also: list[str]) -> list[str]:
    x, y = _corner(room)
    tint = TINTS["base" if room.title in BASE else "no torch" if "no torch" in room.owns else ""]
    return [
        f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{tint}" stroke="{PALE}"/>',
        _text(x + 10, y + 19, room.title, 13, more='font-weight="bold"'),
        _text(x + 10, y + 36, room.owns),
        *(
            _text(x + 10, y + 52 + 13 * line, words, 9.5, PALE)
            for line, words in enumerate(_wrapped("also: " + ", ".join(also), 46) if also else ())
        ),
    ]


def rooms_svg() -> str:
    """The rooms, an arrow for each import that no longer path implies, and the others as words in the box.

    Raises:
        ValueError: an import points upwards or sideways, or a room has no place.
    """
    place = {room.title: room for room in ROOMS}
    imports = room_imports()
    for room, others in imports.items():
        for other in others:
            if place[other].row <= place[room].row:
                raise ValueError(f"{room} imports {other}, which stands no lower in ROOMS of docs/draw_rooms.py")
    drawn = arrows(imports)
    lines, boxes = [], []
    into = {room: sorted((r for r, o in drawn.items() if room in o), key=lambda r: _corner(place[r])) for room in place}
    for room in ROOMS:
        x, y = _corner(room)
        targets = sorted(drawn[room.title], key=lambda other: _corner(place[other]))
        for i, other in enumerate(targets):
            x2, y2 = _corner(place[other])
            sources = into[other]
            start = x + WIDTH * (i + 1) / (len(targets) + 1)
            end = x2 + WIDTH * (sources.index(room.title) + 1) / (len(sources) + 1)
            bottom, top, bend = y + HEIGHT, y2 - 2, 26
            lines.append(
                f'<path d="M{start:.1f} {bottom:g} C{start:.1f} {bottom + bend:g} {end:.1f} {top - bend:g} {end:.1f} {top:g}" '
                f'fill="none" stroke="{LINE}" stroke-width="1.4" marker-end="url(#tip)"/>'
            )
        also = sorted(imports[room.title] - drawn[room.title])
        boxes += _box(room, also)
    width = 2 * MARGIN + 2 * WIDTH + GAP_X
    rows = 1 + max(room.row for room in ROOMS)
    x, y = MARGIN, MARGIN + 8 * (HEIGHT + GAP_Y)
    legend = [_text(x, y + 20 + 17 * line, words, 11, PALE) for line, words in enumerate(LEGEND)]
    return _page(width, 2 * MARGIN + rows * (HEIGHT + GAP_Y) - GAP_Y, "Rooms of gcsolve", [*lines, *boxes, *legend])


LANE, STEP, BOX_WIDTH, BOX_HEIGHT = 104, 76, 99, 54


def budget_svg() -> str:
    """The way of one budget, downwards: a column for each room, a box for each function, on the lines what is handed on.

    Raises:
        ValueError: a function on the way does not exist.
    """
    known = modules()
    height = 2 * MARGIN + 24 + STEP * len(WAY)
    columns, boxes, lines = [], [], []
    for i, lane in enumerate(LANES):
        x = MARGIN + i * LANE
        tint = TINTS["no torch" if lane in ("solver", "numbers") else "base" if lane in BASE else ""]
        columns += [
            f'<rect x="{x + 2:g}" y="{MARGIN}" width="{LANE - 4}" height="{height - 2 * MARGIN:g}" fill="{tint}"/>',
            _text(x + LANE / 2, MARGIN + 17, lane, 13, more='text-anchor="middle" font-weight="bold"'),
        ]
    centre = [
        (MARGIN + LANE * (LANES.index(step.lane) + 0.5), MARGIN + 24 + STEP * (i + 0.5)) for i, step in enumerate(WAY)
    ]
    for i, step in enumerate(WAY):
        module, _, name = step.function.partition(":")
        if module not in known or name not in functions(known[module]):
            raise ValueError(f"{step.function} is gone; mend WAY in docs/draw_rooms.py")
        x, y = centre[i]
        title = name if len(name) <= 12 else name.rpartition(".")[2]
        boxes += [
            f'<rect x="{x - BOX_WIDTH / 2:g}" y="{y - BOX_HEIGHT / 2:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5" '
            f'fill="white" stroke="{PALE}"/>',
            _text(x, y - 12, title, 11.5, more='text-anchor="middle" font-weight="bold"'),
            *(
                _text(x, y + 4 + 13 * line, words, 10, PALE, 'text-anchor="middle"')
                for line, words in enumerate(_wrapped(step.does, 18))
            ),
        ]
        if i + 1 < len(WAY):
            lines.append(_handed(*centre[i], *centre[i + 1], step.hands_on))
    return _page(2 * MARGIN + LANE * len(LANES), height, "The way of one budget", [*columns, *lines, *boxes])


def _handed(x: float, y: float, x2: float, y2: float, words: str) -> str:
    """An arrow from one box to the next, and what it carries beside where it begins."""
    style = f'fill="none" stroke="{LINE}" stroke-width="1.4" marker-end="url(#tip)"'
    if x == x2:
        down = f'<path d="M{x:g} {y + BOX_HEIGHT / 2:g} V{y2 - BOX_HEIGHT / 2 - 1:g}" {style}/>'
        return down + _text(x + 5, (y + y2) / 2 + 3, words, 10, LINE)
    side = 1 if x2 > x else -1
    begin = x + side * BOX_WIDTH / 2
    across = f'<path d="M{begin:g} {y:g} H{x2:g} V{y2 - BOX_HEIGHT / 2 - 1:g}" {style}/>'
    return across + _text(begin + side * 7, y - 4, words, 10, LINE, f'text-anchor="{"start" if side > 0 else "end"}"')


def _wrapped(words: str, width: int) -> list[str]:
    lines = [""]
    for word in words.split():
        if len(lines[-1]) + len(word) + 1 > width and lines[-1]:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


PICTURES = {"rooms.svg": rooms_svg, "budget.svg": budget_svg}

if __name__ == "__main__":
    for file, draw in PICTURES.items():
        (FIGURES / file).write_text(draw())
