"""The floor: bytes that every schedule of a step needs at its peak, whatever it reruns.

A node takes what it reads, makes and works in, plus what always lives. And whatever must be live together was not there
together before: when the last of it was made, the rest was live beside what that node read. So from a node's inputs one
goes back, always to the cheapest of the nodes that may have run last: a search for the path with the least bottleneck,
cut short after so many sets of values.
"""

from __future__ import annotations

import heapq

import numpy as np

from gcsolve.graph import Graph
from gcsolve.problem import Problem
from gcsolve.solver.search.bitsets import bits, members

SETS_PER_NODE = 1000
"""Sets of values examined on the paths back from one node."""
SETS_IN_ALL = 20_000
"""... and from all nodes."""


def peak_floor(problem: Problem) -> tuple[int, int]:
    """(bytes, node): no schedule's peak is lower than this, because of this node; node -1: because of what always lives."""
    graph = problem.graph
    pinned = np.zeros(len(graph.nodes) + 1, dtype=np.int64)
    for v, value in enumerate(graph.values):
        if value.pinned:
            readers = graph.readers[v]
            pinned[value.producer] += value.size_bytes
            pinned[(readers[-1] if readers else value.producer) + 1] -= value.size_bytes
    pinned_bytes = np.cumsum(pinned)
    floor, floor_node = graph.external_bytes, -1
    for i, node in enumerate(graph.nodes):
        own = sum(graph.values[v].size_bytes for v in node.inputs + node.outputs if not graph.values[v].pinned)
        total = graph.external_bytes + int(pinned_bytes[i]) + own + node.workspace_bytes
        if total > floor:
            floor, floor_node = total, i
    paths = _PathsBack(problem)
    at_most = {i: paths.at_most_bytes(i) for i, node in enumerate(graph.nodes) if len(node.inputs) > 1}
    for i in sorted(at_most, key=lambda i: (-at_most[i], i)):
        if at_most[i] <= floor or paths.examined > SETS_IN_ALL:
            break
        total = paths.bottleneck(i, floor)
        if total > floor:
            floor, floor_node = total, i
    return floor, floor_node


def alive_at_least(graph: Graph, node: int) -> list[int]:
    """The values that are alive in every schedule when `node` runs for the first time: pinned ones still to be read,
    and its own. -1, no node: none."""
    if node < 0:
        return []
    alive = {*graph.nodes[node].inputs, *graph.nodes[node].outputs}
    pinned = (v for v, value in enumerate(graph.values) if value.pinned and value.producer <= node)
    alive.update(v for v in pinned if graph.readers[v] and graph.readers[v][-1] >= node)
    return sorted(alive)


class _PathsBack:
    """Backwards from the inputs of a node: sets of values that must be live together."""

    def __init__(self, problem: Problem) -> None:
        graph = problem.graph
        self.external_bytes = graph.external_bytes
        self.size = [v.size_bytes for v in graph.values]
        self.producer = [v.producer for v in graph.values]
        self.workspace = [n.workspace_bytes for n in graph.nodes]
        self.inputs = [bits(n.inputs) for n in graph.nodes]
        self.outputs = [bits(n.outputs) for n in graph.nodes]
        self.input_bytes = [sum(self.size[v] for v in n.inputs) for n in graph.nodes]
        self.own_bytes = [sum(self.size[v] for v in n.inputs + n.outputs) + n.workspace_bytes for n in graph.nodes]
        self.examined = 0

    def bytes(self, state: int, i: int) -> int:
        """What is live while i runs to make part of `state`, the rest of which is live."""
        together = state | self.inputs[i] | self.outputs[i]
        return self.external_bytes + self.workspace[i] + sum(self.size[v] for v in members(together))

    def at_most_bytes(self, i: int) -> int:
        """The least that one step back takes is not more."""
        producers = [self.producer[v] for v in members(self.inputs[i])]
        return self.external_bytes + self.input_bytes[i] + min(self.own_bytes[p] for p in producers)

    def bottleneck(self, i: int, floor: int) -> int:
        """Bytes that every path to the inputs of i takes at some moment; `floor` where that is not shown to be more."""
        start = self.inputs[i]
        heap = [(floor, 0, start)]
        seen = {start}
        while heap:
            least, _, state = heapq.heappop(heap)
            self.examined += 1
            if not state or len(seen) > SETS_PER_NODE:
                return least
            for p in dict.fromkeys(self.producer[v] for v in members(state)):
                before = (state & ~self.outputs[p]) | self.inputs[p]
                if before not in seen:
                    seen.add(before)
                    heapq.heappush(heap, (max(least, self.bytes(state, p)), -len(seen), before))
        return floor
