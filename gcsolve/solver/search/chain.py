"""A training graph as a chain of segments: what `revolve` and `rotor` plan on.

The forward is cut wherever at most one value that can be made again is still to be read by later forward nodes; that
value is the *boundary* of the segment before the cut. The backward is split, in its own order, into one group a
segment: a node belongs to the segment whose values it reads; one that reads a boundary alone belongs to the segment
that has it as input. The *tape* of a segment is what its group reads of it, the input aside.

Kept always: values that cannot be made again, and values that a group of some other segment reads (long skips into the
backward). A graph with no cut is one segment, and so is one without a backward.

A plan is a sequence of `Step`s, from which `order_of` makes an order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gcsolve.graph import Graph


@dataclass(frozen=True)
class Segment:
    """`nodes`: forward nodes, in order (none for a last segment that is only a backward). `inlet`: the boundary before
    it, `outlet`: its own (None: nothing crosses). `tape`: values that its backward group `backward` reads."""

    nodes: tuple[int, ...]
    inlet: int | None
    outlet: int | None
    tape: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True)
class Chain:
    graph: Graph
    segments: tuple[Segment, ...]
    always: frozenset[int]

    def closure(self, segment: Segment, wanted: Iterable[int], have: Iterable[int] = ()) -> tuple[int, ...]:
        """Nodes of `segment` to rerun for the values `wanted`, given its inlet, what is kept always, and `have`."""
        graph = self.graph
        live = set(have)
        found: set[int] = set()
        stack = list(wanted)
        while stack:
            v = stack.pop()
            i = graph.values[v].producer
            if v in live or v in self.always or v == segment.inlet or i in found:
                continue
            found.add(i)
            stack.extend(graph.nodes[i].inputs)
        return tuple(sorted(found))


@dataclass(frozen=True)
class Step:
    """Run segment `segment`: "forward" keeps its outlet only, "tape" keeps what its backward reads except `dropped`
    (and the outlet, when `onward`), "backward" runs its group, making what was dropped again just in time."""

    what: str
    segment: int
    dropped: frozenset[int] = frozenset()
    onward: bool = True


def chain_of(graph: Graph, most: int | None = None) -> Chain:
    """The chain of `graph`, in at most `most` segments (the ones with least outlets to gain stay together)."""
    first = graph.backward_start
    stays = {v for v, x in enumerate(graph.values) if x.pinned or not graph.nodes[x.producer].rerunnable}
    cuts = _cuts(graph, stays)  # (last node of a segment, its outlet)
    if most is not None and len(cuts) >= most:
        cuts = [cuts[len(cuts) * k // most] for k in range(1, most)]
    ends = [*(k for k, _ in cuts), first - 1]
    outlets: list[int | None] = [v for _, v in cuts]
    starts = [0, *(k + 1 for k in ends[:-1])]
    segment_of = [s for s, (a, b) in enumerate(zip(starts, ends, strict=True)) for _ in range(a, b + 1)]
    # the last segment's only tape value is a boundary too: then what reads it needs no other value of that segment
    tail = {v for v in range(len(graph.values)) if _read_back(graph, v) and v not in stays}
    tail = {v for v in tail if segment_of[graph.values[v].producer] == len(ends) - 1}
    if len(tail) == 1 and first < len(graph.nodes):
        outlets.append(next(iter(tail)))
        starts.append(first)
        ends.append(first - 1)
    outlets.append(None)
    groups = min(
        (_groups(graph, stays, segment_of, outlets, late) for late in (False, True)),
        key=lambda g: sum(graph.values[v].size_bytes for v in _foreign(graph, stays, segment_of, outlets, g)),
    )
    always = stays | _foreign(graph, stays, segment_of, outlets, groups)
    segments = []
    for s, (a, b) in enumerate(zip(starts, ends, strict=True)):
        backward = tuple(first + k for k, group in enumerate(groups) if group == s)
        reads = {v for j in backward for v in graph.nodes[j].inputs if graph.values[v].producer < first}
        inlet = outlets[s - 1] if s else None
        tape = tuple(sorted(reads - always - {inlet}))
        segments.append(Segment(tuple(range(a, b + 1)), inlet, outlets[s], tape, backward))
    return Chain(graph, tuple(segments), frozenset(always))


def order_of(chain: Chain, steps: Sequence[Step]) -> list[int]:
    """The order that takes `steps`: whole segments the first time, afterwards only the nodes that are needed."""
    graph = chain.graph
    order: list[int] = []
    ran: set[int] = set()
    for step in steps:
        segment = chain.segments[step.segment]
        if step.what == "backward":
            order.extend(backward_order(chain, segment, step.dropped))
            continue
        if step.segment not in ran:
            ran.add(step.segment)
            order.extend(segment.nodes)
        elif step.what == "forward":
            order.extend(chain.closure(segment, outlet_of(segment)))
        else:
            wanted = [v for v in segment.tape if v not in step.dropped]
            order.extend(chain.closure(segment, [*wanted, *(outlet_of(segment) if step.onward else ())]))
    if graph.backward_start == 0:
        return list(range(len(graph.nodes)))
    return order


def backward_order(chain: Chain, segment: Segment, dropped: frozenset[int]) -> list[int]:
    """The segment's group, each node after the reruns it needs; what is made again stays until its last reader."""
    graph = chain.graph
    have = set(segment.tape) - dropped
    order: list[int] = []
    for j in segment.backward:
        if dropped:
            again = chain.closure(segment, [v for v in graph.nodes[j].inputs if v in dropped], have)
            order.extend(again)
            have.update(v for i in again for v in graph.nodes[i].outputs)
        order.append(j)
    return order


def outlet_of(segment: Segment) -> tuple[int, ...]:
    return () if segment.outlet is None else (segment.outlet,)


def _cuts(graph: Graph, stays: set[int]) -> list[tuple[int, int | None]]:
    """(node, value): after this forward node, only this value (or none) is still to be read by the forward."""
    first = graph.backward_start
    count, total = [0] * (first + 1), [0] * (first + 1)
    for v, value in enumerate(graph.values):
        readers = [j for j in graph.readers[v] if j < first]
        if v not in stays and readers:
            count[value.producer] += 1
            count[readers[-1]] -= 1
            total[value.producer] += v
            total[readers[-1]] -= v
    cuts, alive, which = [], 0, 0
    for k in range(first - 1):
        alive += count[k]
        which += total[k]
        if alive <= 1:
            cuts.append((k, which if alive else None))
    return [c for c, following in pairwise([*cuts, (first, None)]) if c[1] is None or c[1] != following[1]]


def _read_back(graph: Graph, v: int) -> bool:
    return graph.values[v].producer < graph.backward_start and any(j >= graph.backward_start for j in graph.readers[v])


def _levels(
    graph: Graph, stays: set[int], segment_of: Sequence[int], outlets: Sequence[int | None], j: int
) -> list[int]:
    """Where the values that backward node j reads want it to be."""
    found = []
    for v in graph.nodes[j].inputs:
        i = graph.values[v].producer
        if i < graph.backward_start and v not in stays:
            s = segment_of[i]
            found.append(s + 1 if outlets[s] == v else s)
    return found


def _groups(
    graph: Graph, stays: set[int], segment_of: Sequence[int], outlets: Sequence[int | None], late: bool
) -> list[int]:
    """For each backward node its segment, never rising. `late`: nodes that read out of turn go with earlier ones."""
    first, n = graph.backward_start, len(graph.nodes)
    wish = [_levels(graph, stays, segment_of, outlets, j) for j in range(first, n)]
    level = [min(w) if w else None for w in wish]
    groups = [0] * (n - first)
    now = len(outlets) - 1
    if late:
        for k, want in enumerate(level):
            now = now if want is None else min(now, want)
            groups[k] = now
        return groups
    ahead = 0
    for k in range(n - first - 1, -1, -1):
        want = level[k]
        ahead = ahead if want is None else max(ahead, want)
        groups[k] = ahead
    for k, want in enumerate(level):  # what reads nothing of the forward runs as early as it can
        if want is None:
            groups[k] = now
        now = groups[k]
    return groups


def _foreign(
    graph: Graph, stays: set[int], segment_of: Sequence[int], outlets: Sequence[int | None], groups: Sequence[int]
) -> set[int]:
    """Forward values that some group reads although they are neither of its segment nor its inlet."""
    first = graph.backward_start
    found = set()
    for k, group in enumerate(groups):
        for v in graph.nodes[first + k].inputs:
            i = graph.values[v].producer
            inlet = outlets[group - 1] if group else None
            if i < first and v not in stays and v != inlet and segment_of[i] != group:
                found.add(v)
    return found
