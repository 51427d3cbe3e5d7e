"""A schedule laid out in time: what runs when, and in which runs each copy of a value is alive.

One pass over the actions, by the simulator's rules. Figures and page draw what is here, and compute no bytes themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gcsolve.problem import Problem
from gcsolve.schedule import Compute, Schedule, schedule_from_order

CATEGORIES = (
    "parameters",
    "optimizer state",
    "inputs and buffers",
    "gradients",
    "kept activations",
    "recomputed activations",
    "temporaries of backward",
    "workspace",
)
"""The categories of memory, in the order in which they are stacked: bottom to top."""

_PARAMETERS, _OPTIMIZER, _INPUTS, _GRADIENTS, _KEPT, _RECOMPUTED, _TEMPORARY, _WORKSPACE = range(len(CATEGORIES))

_EXTERNAL = {
    "parameters": _PARAMETERS,
    "optimizer": _OPTIMIZER,
    "master weights": _OPTIMIZER,
    "accumulated gradients": _GRADIENTS,
}
"""External kind -> category; every other kind belongs to the inputs and buffers."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a node, from `start` to `end` in the problem's cost unit.

    `again`: the node has run before. `bytes`: those alive while it runs, by category.
    """

    node: int
    again: bool
    start: float
    end: float
    bytes: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes)


@dataclass(slots=True)
class Life:
    """One copy of a value: made in run `first`, alive to the end of run `last`, read in the runs `reads`.

    `copy` is 0 for the first copy of a value, 1 for the one that is recomputed first, and so on.
    """

    value: int
    copy: int
    category: int
    first: int
    last: int = -1
    reads: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Timeline:
    """Runs in order, lives in order of their beginning. `backward`: index of the first run of the backward."""

    problem: Problem
    runs: tuple[Run, ...]
    lives: tuple[Life, ...]
    backward: int

    @property
    def peak(self) -> int:
        """Index of the run at which most bytes are alive (the first, when several are equal)."""
        return max(range(len(self.runs)), key=lambda r: (self.runs[r].total_bytes, -r))

    def alive(self, run: int) -> list[Life]:
        """The copies alive while run `run` runs, largest first."""
        values = self.problem.graph.values
        alive = [life for life in self.lives if life.first <= run <= life.last]
        return sorted(alive, key=lambda life: (-values[life.value].size_bytes, life.value))


def timeline(problem: Problem, schedule: Schedule) -> Timeline:
    """Lay `schedule`, a valid one, out in time."""
    graph = problem.graph
    live_bytes = [0] * len(CATEGORIES)
    for kind, size in graph.external:
        live_bytes[_EXTERNAL.get(kind, _INPUTS)] += size
    live: dict[int, Life] = {}
    copies = [0] * len(graph.values)
    lives: list[Life] = []
    runs: list[Run] = []
    ran: set[int] = set()
    start = 0.0
    for action in schedule.actions:
        if not isinstance(action, Compute):
            life = live.pop(action.value)
            life.last = len(runs) - 1
            live_bytes[life.category] -= graph.values[action.value].size_bytes
            continue
        node = graph.nodes[action.node]
        run = len(runs)
        for v in node.inputs:
            live[v].reads.append(run)
        workspace_bytes = node.workspace_bytes
        for v in node.outputs:
            if v in live:  # a pinned value made again: the new copy goes at once
                workspace_bytes += graph.values[v].size_bytes
                continue
            live[v] = Life(value=v, copy=copies[v], category=_category(problem, v, copies[v]), first=run)
            lives.append(live[v])
            copies[v] += 1
            live_bytes[live[v].category] += graph.values[v].size_bytes
        end = start + problem.cost[action.node]
        runs.append(
            Run(
                node=action.node,
                again=action.node in ran,
                start=start,
                end=end,
                bytes=(*live_bytes[:_WORKSPACE], workspace_bytes),
            )
        )
        ran.add(action.node)
        start = end
    for life in live.values():
        life.last = len(runs) - 1
    backward = next((r for r, run in enumerate(runs) if run.node >= graph.backward_start), len(runs))
    return Timeline(problem, tuple(runs), tuple(lives), backward)


def store_all_timeline(problem: Problem) -> Timeline:
    """The step in which nothing is recomputed."""
    return timeline(problem, schedule_from_order(problem.graph, range(len(problem.graph.nodes))))


def _category(problem: Problem, v: int, copy: int) -> int:
    value = problem.graph.values[v]
    if value.kind == "gradients":
        return _GRADIENTS
    if problem.graph.is_backward(value.producer):
        return _TEMPORARY
    return _RECOMPUTED if copy else _KEPT


def module_groups(paths: Iterable[str], most: int = 26) -> dict[str, str]:
    """path -> the module it is shown under: all paths cut at the same depth, the deepest that leaves at most `most` groups.

    "" (the model's own ops) stays by itself.
    """
    distinct = list(dict.fromkeys(paths))
    group_of = {path: path for path in distinct}
    for depth in range(max((p.count(".") + 1 for p in distinct), default=1), 0, -1):
        group_of = {path: ".".join(path.split(".")[:depth]) for path in distinct}
        if len(set(group_of.values())) <= most:
            break
    return group_of


def shown_bytes(budget_bytes: int, reached_bytes: int) -> int:
    """The bytes up to which a drawing goes.

    A budget far above what the step reaches would squeeze the step into a line at the bottom; it is written beside the
    drawing instead.
    """
    return max(reached_bytes, budget_bytes if budget_bytes <= 1.5 * reached_bytes else 0)


def common_prefix(paths: Sequence[str]) -> str:
    """The leading modules, with a final dot, that all paths share; "" and modules that contain all others do not count."""
    named = sorted({p for p in paths if p}, key=lambda p: (p.count("."), p))
    while len(named) > 1 and all(p.startswith(f"{named[0]}.") for p in named[1:]):
        named = named[1:]
    split = [p.split(".") for p in named]
    shared = 0
    while split and all(len(s) > shared + 1 and s[shared] == split[0][shared] for s in split):
        shared += 1
    return "".join(f"{part}." for part in split[0][:shared]) if split else ""
