"""Schedule = a tuple of plain actions; which frees follow which computes is derived here, once.

A schedule is fixed by the order of its computes: a copy of a value is freed right after the last reader that comes
before the value is computed again, which is the earliest moment and so never worse than any other. Solvers therefore
say in which order ops run, and `schedule_from_order` writes the frees.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gcsolve.graph import Graph


@dataclass(frozen=True, slots=True)
class Compute:
    """Run node `node`. Its outputs become live; the new copy of a pinned one that is live already is dropped at once."""

    node: int


@dataclass(frozen=True, slots=True)
class Free:
    """Drop the live copy of value `value`."""

    value: int


Action = Compute | Free


_REPR_ACTIONS = 4
"""Actions that `repr` of a schedule shows."""


@dataclass(frozen=True, repr=False)
class Schedule:
    """The actions of one training step, in order."""

    actions: tuple[Action, ...]

    def order(self) -> tuple[int, ...]:
        """The nodes in the order they run, reruns included."""
        return tuple(a.node for a in self.actions if isinstance(a, Compute))

    def runs(self, graph: Graph) -> tuple[int, ...]:
        """How often each node runs."""
        count = [0] * len(graph.nodes)
        for node in self.order():
            count[node] += 1
        return tuple(count)

    def __repr__(self) -> str:
        """Counts and the first actions; `as_tuples` and `lines` list them all."""
        order = self.order()
        runs, frees = len(order), len(self.actions) - len(order)
        first = [f"{kind} {index}" for kind, index in Schedule(self.actions[:_REPR_ACTIONS]).as_tuples()]
        more = [] if len(self.actions) <= _REPR_ACTIONS else ["..."]
        reruns = runs - len(set(order))
        return f"<Schedule: {runs} computes ({reruns} reruns), {frees} frees: {', '.join(first + more)}>"

    def as_tuples(self) -> list[tuple[str, int]]:
        """[("compute", node) | ("free", value), ...]."""
        return [("compute", a.node) if isinstance(a, Compute) else ("free", a.value) for a in self.actions]

    def lines(self, graph: Graph) -> Iterator[str]:
        """The schedule as text, one action a line."""
        seen: set[int] = set()
        for a in self.actions:
            if isinstance(a, Free):
                yield f"free {graph.values[a.value].name}"
                continue
            yield f"{'rerun' if a.node in seen else 'run'} {graph.nodes[a.node].name}"
            seen.add(a.node)


def schedule_from_order(graph: Graph, order: Sequence[int]) -> Schedule:
    """The schedule that runs `order` (node indices, reruns included) and frees each copy as early as it can.

    Every read uses the newest copy. A pinned value keeps its first copy until its last reader.
    """
    last_use: dict[int, int] = {}  # value -> position after which its present copy is not needed
    pinned_again: list[tuple[int, int]] = []  # (value, position) of reruns that make a pinned value again
    freed_after: list[list[int]] = [[] for _ in order]
    for at, i in enumerate(order):
        node = graph.nodes[i]
        for v in node.inputs:
            last_use[v] = at
        for v in node.outputs:
            if v in last_use:
                if graph.values[v].pinned:
                    pinned_again.append((v, at))
                    continue
                freed_after[last_use[v]].append(v)
            last_use[v] = at
    for v, at in last_use.items():
        freed_after[at].append(v)
    for v, at in pinned_again:
        if at > last_use[v]:  # its first copy is gone by then, so this one is live: drop it
            freed_after[at].append(v)
    actions: list[Action] = []
    for at, i in enumerate(order):
        actions.append(Compute(i))
        actions.extend(Free(v) for v in sorted(freed_after[at]))
    return Schedule(tuple(actions))


def order_from_kept(graph: Graph, kept: Iterable[int]) -> tuple[int, ...]:
    """Forward once, then backward with just-in-time reruns of whatever is read and not in `kept`.

    Args:
        kept: values that stay live from the forward for as long as something reads them. Values that cannot be made
            again (pinned, or made by a node that is not rerunnable) are kept when read, listed or not.

    Returns:
        node indices, each forward node at most twice: a value made again stays until its last reader.
    """
    held = set(kept)
    order = list(range(graph.backward_start))
    again: set[int] = set()

    def missing(v: int) -> bool:
        value = graph.values[v]
        i = value.producer
        if i >= graph.backward_start or i in again or v in held:
            return False
        return graph.nodes[i].rerunnable and not value.pinned

    for b in range(graph.backward_start, len(graph.nodes)):
        wanted = {graph.values[v].producer for v in graph.nodes[b].inputs if missing(v)}
        stack = list(wanted)
        while stack:
            for v in graph.nodes[stack.pop()].inputs:
                i = graph.values[v].producer
                if i not in wanted and missing(v):
                    wanted.add(i)
                    stack.append(i)
        again |= wanted
        order.extend(sorted(wanted))
        order.append(b)
    return tuple(order)
