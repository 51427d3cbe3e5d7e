"""A beam search backwards over the order: what must be live when each node has run for the first time, and what that costs.

Begin behind the last node, where only pinned values are live, and go back node by node. Behind node t a *state* is the
set S of values that must be live. Where t fits beside S (its inputs, outputs and workspace), one step back leaves

    (S less t's outputs) with t's inputs

Where it does not, something in S must be made after t, by a rerun: that takes the rerun's inputs instead, at the cost of
its node, if they fit beside the rest of S. So a state holds only what is read later, and a path is an order. Of the
states behind each node those are carried on that no other beats in cost and bytes both, then those that only few
beat, up to `width`.

Where no state is left, the search begins anew with *dives*: from two states behind each node it goes on rerunning
until as little as possible is left of what a state and its ancestors take, so that tight nodes find states to begin
with. Dives cost time and lead away from cheap plans: first few, then many.
A shortest path search over the same states would be exact; on real graphs there are far too many.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from gcsolve.problem import Problem
from gcsolve.solver.search.bitsets import Weights, bits, members

WIDTH = 100
STATES = 1000
"""Looked at behind one node."""
WORK = 200_000
"""Looked at in one search."""
DIVES = ((0, WIDTH), (8, 30), (1, 30))
"""(nodes from dive to dive or 0: none, width) of the searches."""
DIVE_STATES = 200

Trail = tuple[int, "Trail | None"]
"""The nodes of an order, first to last."""


@dataclass(frozen=True, slots=True, order=True)
class _State:
    cost: float
    bytes: int
    trail: Trail | None = field(compare=False)


def beam_order(problem: Problem, *, deadline: float) -> list[int] | None:
    """An order that fits; None when the search found none."""
    for every, width in DIVES:
        found = _Beam(problem, width, every, deadline).search()
        if found is not None:
            return found
    return None


class _Beam:
    def __init__(self, problem: Problem, width: int, every: int, deadline: float) -> None:
        graph = problem.graph
        self.width, self.every, self.deadline = width, every, deadline
        self.looked = 0
        self.total = problem.total_cost or 1.0
        self.cost = problem.cost
        self.room = problem.budget_bytes - graph.external_bytes
        self.size = Weights([v.size_bytes for v in graph.values]).of
        self.producer = [v.producer for v in graph.values]
        self.rerunnable = [n.rerunnable and not any(graph.values[v].pinned for v in n.outputs) for n in graph.nodes]
        self.workspace = [n.workspace_bytes for n in graph.nodes]
        self.inputs = [bits(n.inputs) for n in graph.nodes]
        self.outputs = [bits(n.outputs) for n in graph.nodes]
        self.pinned = bits(i for i, v in enumerate(graph.values) if v.pinned)
        self.ancestry = [0] * len(graph.nodes)
        for i, node in enumerate(graph.nodes):
            self.ancestry[i] = self.outputs[i]
            for v in node.inputs:
                self.ancestry[i] |= self.ancestry[self.producer[v]]

    def search(self) -> list[int] | None:
        states = {self.pinned: _State(0.0, self.size(self.pinned), None)}
        for t in reversed(range(len(self.cost))):
            behind: dict[int, _State] = {}
            self._cheapest(states, t, behind)
            if self.every and t % self.every == 0:
                least = min(states, key=lambda s: (states[s].bytes, s))
                cheapest = min(states, key=lambda s: (states[s].cost, s))
                for state in dict.fromkeys((least, cheapest)):
                    self._dive(state, states[state], t, behind)
            if not behind or self.looked > WORK or time.perf_counter() > self.deadline:
                return None
            states = self._carried_on(behind)
        best = min(states, key=lambda s: (states[s].cost, states[s].bytes, s))
        order = []
        trail = states[best].trail
        while trail is not None:
            i, trail = trail
            order.append(i)
        return order

    def during(self, state: int, held: int, i: int) -> int:
        """Bytes while i runs and `state` (of `held` bytes) is live."""
        return held + self.size((self.inputs[i] | self.outputs[i]) & ~state) + self.workspace[i]

    def _step(self, state: int, of: _State, t: int, behind: dict[int, _State]) -> None:
        """Node t runs for the first time."""
        back = (state & ~self.outputs[t]) | self.inputs[t]
        known = behind.get(back)
        if known is None or known.cost > of.cost:
            behind[back] = _State(of.cost, self.size(back), (t, of.trail))

    def _reruns(self, state: int, of: _State, t: int) -> Iterator[tuple[int, _State]]:
        """States one rerun away, behind t."""
        for i in dict.fromkeys(self.producer[v] for v in members(state)):
            if i < t and self.rerunnable[i] and self.during(state, of.bytes, i) <= self.room:
                back = (state & ~self.outputs[i]) | self.inputs[i]
                held = of.bytes - self.size(state & self.outputs[i]) + self.size(self.inputs[i] & ~state)
                yield back, _State(of.cost + self.cost[i], held, (i, of.trail))

    def _cheapest(self, states: dict[int, _State], t: int, behind: dict[int, _State]) -> None:
        """Reruns behind t only where t does not fit, cheapest and least over first."""

        def entry(state: int, of: _State) -> tuple[float, int, _State, int]:
            during = self.during(state, of.bytes, t)
            return of.cost / self.total + max(0, during - self.room) / self.room, state, of, during

        seen = {state: of.cost for state, of in states.items()}
        heap = [entry(state, of) for state, of in states.items()]
        heapq.heapify(heap)
        looked = 0
        while heap and looked < STATES:
            _, state, of, during = heapq.heappop(heap)
            if seen[state] < of.cost:
                continue
            looked += 1
            self.looked += 1
            if during <= self.room:
                self._step(state, of, t, behind)
                continue
            for back, after in self._reruns(state, of, t):
                if seen.get(back, float("inf")) > after.cost:
                    seen[back] = after.cost
                    heapq.heappush(heap, entry(back, after))

    def _dive(self, state: int, of: _State, t: int, behind: dict[int, _State]) -> None:
        """Reruns behind t as far as they go, least bytes in the state and all its ancestors first."""

        def entry(state: int, of: _State) -> tuple[int, int, _State]:
            every = state
            for v in members(state):
                every |= self.ancestry[self.producer[v]]
            return self.size(every), state, of

        seen = {state}
        heap = [entry(state, of)]
        looked = 0
        while heap and looked < DIVE_STATES:
            _, state, of = heapq.heappop(heap)
            looked += 1
            self.looked += 1
            if self.during(state, of.bytes, t) <= self.room:
                self._step(state, of, t, behind)
            for back, after in self._reruns(state, of, t):
                if back not in seen:
                    seen.add(back)
                    heapq.heappush(heap, entry(back, after))

    def _carried_on(self, behind: dict[int, _State]) -> dict[int, _State]:
        """The states to go on with: layer by layer, those that none of the rest beats in cost and bytes both."""
        rest = sorted(behind.items(), key=lambda item: (item[1].cost, item[1].bytes, item[0]))
        kept: list[tuple[int, _State]] = []
        while rest and len(kept) < self.width:
            least = None
            layer, others = [], []
            for item in rest:
                better = least is None or item[1].bytes < least
                (layer if better else others).append(item)
                if better:
                    least = item[1].bytes
            kept += layer
            rest = others
        return dict(kept[: self.width])
