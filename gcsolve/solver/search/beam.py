"""A beam search backwards over the order: what must be live when each node has run for the first time, and what that costs.

Begin behind the last node, where only pinned values are live, and go back node by node. Behind node t a *state* is the
set S of values that must be live. Where t fits beside S (its inputs, outputs and workspace), one step back leaves

    (S less t's outputs) with t's inputs

Where it does not, something in S must be made after t, by a rerun: that takes the rerun's inputs instead, at the cost of
its node, if they fit beside the rest of S. So a state holds only what is read later, and a path is an order. Of the
states behind each node those are carried on that no other beats in cost and bytes both, then those that only few
beat, up to `width`.

Where no state is left, the search begins anew with *dives*: from two states behind a node it goes on rerunning until as
little as possible is left of what a state and its ancestors take, so that tight nodes find states to begin with. Dives
cost time and lead away from cheap plans: first there are none, then some where little room is left, then some behind
every node.

All limits are counts of states, so the answer does not depend on the machine's speed. A shortest path search over the
same states would be exact; on real graphs there are far too many.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from gcsolve.problem import Problem
from gcsolve.solver.search.bitsets import bits, members

STATES_PER_NODE = 1000
"""States expanded behind one node, dives aside."""
EXPANDED_STATES = 200_000
"""States expanded in one search."""
GENERATED_STATES = 1_500_000
"""States generated in one search."""


@dataclass(frozen=True)
class BeamSettings:
    """`width`: states carried on. Dives begin behind a node whose states all take `dive_share` of the room or more, or of
    which there is one at most; None: no dives. A dive expands `dive_states` states."""

    width: int
    dive_share: float | None = None
    dive_states: int = 0


SEARCHES = (BeamSettings(100), BeamSettings(30, 0.6, 50), BeamSettings(30, 0.0, 200))

Trail = tuple[int, "Trail | None"]
"""The nodes of an order, first to last."""


class _Path(NamedTuple):
    """The way from a state to the end: cost of its reruns and the rest, bytes of the state, nodes that run."""

    cost: float
    live_bytes: int
    trail: Trail | None


def beam_order(problem: Problem, *, deadline: float = math.inf) -> list[int] | None:
    """An order that fits; None when the searches found none."""
    for settings in SEARCHES:
        order = _Beam(problem, settings, deadline).search()
        if order is not None:
            return order
    return None


class _Beam:
    def __init__(self, problem: Problem, settings: BeamSettings, deadline: float) -> None:
        graph = problem.graph
        self.settings, self.deadline = settings, deadline
        self.expanded = self.generated = 0
        self.total_cost = problem.total_cost or 1.0
        self.cost = problem.cost
        self.room = max(1, problem.budget_bytes - graph.external_bytes)
        self.size = [v.size_bytes for v in graph.values]
        self.producer = [v.producer for v in graph.values]
        self.rerunnable = [n.rerunnable and not any(graph.values[v].pinned for v in n.outputs) for n in graph.nodes]
        self.workspace = [n.workspace_bytes for n in graph.nodes]
        self.inputs = [bits(n.inputs) for n in graph.nodes]
        self.outputs_removed = [~bits(n.outputs) for n in graph.nodes]
        self.input_sizes = [[(1 << v, self.size[v]) for v in n.inputs if self.size[v]] for n in graph.nodes]
        self.output_sizes = [[(1 << v, self.size[v]) for v in n.outputs if self.size[v]] for n in graph.nodes]
        self.output_bytes = [sum(self.size[v] for v in n.outputs) for n in graph.nodes]
        self.pinned = bits(i for i, v in enumerate(graph.values) if v.pinned)
        # by node: its outputs with all values that they are computed from; with all that are computed from them
        self.ancestors = [bits(n.outputs) for n in graph.nodes]
        for i, node in enumerate(graph.nodes):
            for v in node.inputs:
                self.ancestors[i] |= self.ancestors[self.producer[v]]
        self.descendants = [bits(n.outputs) for n in graph.nodes]
        for i in reversed(range(len(graph.nodes))):
            for v in graph.nodes[i].outputs:
                for j in graph.readers[v]:
                    self.descendants[i] |= self.descendants[j]

    def search(self) -> list[int] | None:
        states = {self.pinned: _Path(0.0, self._bytes(self.pinned), None)}
        for t in reversed(range(len(self.cost))):
            behind: dict[int, _Path] = {}
            self._cheapest(states, t, behind)
            if self._dives_behind(behind):
                least = min(states, key=lambda s: (states[s].live_bytes, s))
                cheapest = min(states, key=lambda s: (states[s].cost, s))
                for state in dict.fromkeys((least, cheapest)):
                    self._dive(state, states[state], t, behind)
            if not behind or self._spent():
                return None
            states = self._carried_on(behind)
        best = min(states, key=lambda s: (states[s].cost, states[s].live_bytes, s))
        order = []
        trail = states[best].trail
        while trail is not None:
            i, trail = trail
            order.append(i)
        return order

    def _bytes(self, state: int) -> int:
        return sum(self.size[v] for v in members(state))

    def _spent(self) -> bool:
        spent = self.expanded > EXPANDED_STATES or self.generated > GENERATED_STATES
        return spent or time.perf_counter() > self.deadline

    def _dives_behind(self, behind: dict[int, _Path]) -> bool:
        share = self.settings.dive_share
        if share is None:
            return False
        return len(behind) < 2 or min(path.live_bytes for path in behind.values()) >= share * self.room

    def _growth(self, state: int, i: int) -> tuple[int, int]:
        """(bytes beside `state` while i runs, bytes that the state before i takes more than `state`)."""
        new = 0
        for bit, size in self.input_sizes[i]:
            if not state & bit:
                new += size
        for bit, size in self.output_sizes[i]:
            if not state & bit:
                new += size
        return new + self.workspace[i], new - self.output_bytes[i]

    def _step(self, state: int, path: _Path, t: int, growth: int, behind: dict[int, _Path]) -> None:
        """Node t runs for the first time."""
        before = (state & self.outputs_removed[t]) | self.inputs[t]
        other = behind.get(before)
        if other is None or other.cost > path.cost:
            behind[before] = _Path(path.cost, path.live_bytes + growth, (t, path.trail))

    def _reruns(self, state: int, path: _Path, t: int) -> Iterator[tuple[int, int, _Path]]:
        """(node rerun, state before it, path from there) for every rerun behind t."""
        room = self.room - path.live_bytes
        producers: set[int] = set()
        rest = state
        while rest:
            lowest = rest & -rest
            rest ^= lowest
            i = self.producer[lowest.bit_length() - 1]
            if i in producers:
                continue
            producers.add(i)
            if i < t and self.rerunnable[i]:
                self.generated += 1
                beside, growth = self._growth(state, i)
                if beside <= room:
                    before = (state & self.outputs_removed[i]) | self.inputs[i]
                    yield i, before, _Path(path.cost + self.cost[i], path.live_bytes + growth, (i, path.trail))

    def _cheapest(self, states: dict[int, _Path], t: int, behind: dict[int, _Path]) -> None:
        """Reruns behind t only where t does not fit, cheapest and least over first."""

        def entry(state: int, path: _Path) -> tuple[float, int, _Path, int, int]:
            beside, growth = self._growth(state, t)
            over = path.live_bytes + beside - self.room
            return path.cost / self.total_cost + max(0, over) / self.room, state, path, over, growth

        least_cost = {state: path.cost for state, path in states.items()}
        heap = [entry(state, path) for state, path in states.items()]
        heapq.heapify(heap)
        expanded = 0
        while heap and expanded < STATES_PER_NODE:
            _, state, path, over, growth = heapq.heappop(heap)
            if least_cost[state] < path.cost:
                continue
            expanded += 1
            if over <= 0:
                self._step(state, path, t, growth, behind)
                continue
            for _, before, longer in self._reruns(state, path, t):
                if least_cost.get(before, math.inf) > longer.cost:
                    least_cost[before] = longer.cost
                    heapq.heappush(heap, entry(before, longer))
        self.expanded += expanded

    def _dive(self, state: int, path: _Path, t: int, behind: dict[int, _Path]) -> None:
        """Reruns behind t as far as they go, least bytes in the state and all its ancestors first."""
        ancestors = 0
        for v in members(state):
            ancestors |= self.ancestors[self.producer[v]]
        seen = {state}
        heap = [(self._bytes(state | ancestors), state, path)]
        expanded = 0
        while heap and expanded < self.settings.dive_states:
            family_bytes, state, path = heapq.heappop(heap)
            expanded += 1
            beside, growth = self._growth(state, t)
            if path.live_bytes + beside <= self.room:
                self._step(state, path, t, growth, behind)
            for i, before, longer in self._reruns(state, path, t):
                if before not in seen:
                    seen.add(before)
                    # what i makes is left out, unless something in the state is computed from it
                    lost = 0 if before & self.descendants[i] else self.output_bytes[i]
                    heapq.heappush(heap, (family_bytes - lost, before, longer))
        self.expanded += expanded

    def _carried_on(self, behind: dict[int, _Path]) -> dict[int, _Path]:
        """The states to go on with: layer by layer, those that none of the rest beats in cost and bytes both."""
        rest = sorted(behind.items(), key=lambda item: (item[1].cost, item[1].live_bytes, item[0]))
        carried: list[tuple[int, _Path]] = []
        while rest and len(carried) < self.settings.width:
            least_bytes = math.inf
            layer, others = [], []
            for item in rest:
                better = item[1].live_bytes < least_bytes
                (layer if better else others).append(item)
                if better:
                    least_bytes = item[1].live_bytes
            carried += layer
            rest = others
        return dict(carried[: self.settings.width])
