"""Run the step once with a full memory: whenever an op does not fit, evict what is cheapest to do without.

Dynamic tensor rematerialization (Kirisame et al., ICLR 2021) with the future known: the score of a live value is

    (cost of making it again, missing inputs included)^p / (bytes x ops until one that has not run yet reads it)

with p = 1 (with less, bytes weigh more and lower budgets are reached). A value that no such op reads is dropped at once.
An op whose inputs are gone makes them again first, depth first, its other inputs locked. One pass, no search: it finds
some plan where budgets are tight and reruns many.

Values that cannot be made again count until their last reader; a later rerun that reads them holds them longer, which
only the replay sees.
"""

from __future__ import annotations

import time
from bisect import bisect_right

from gcsolve.problem import Problem

RUNS = 8
"""Give up when the order is longer than this many runs a node."""
DEPTH = 32
"""Missing inputs of missing inputs are counted this deep."""


class _Stuck(Exception):
    """What is locked is too much, the order grew too long, or time is up."""


def evicting_order(problem: Problem, *, deadline: float, cost_power: float = 1.0) -> list[int] | None:
    """An order made by evictions; None when it got stuck. `cost_power`: p above."""
    machine = _Machine(problem, deadline, cost_power)
    try:
        for t in range(len(problem.graph.nodes)):
            machine.now = t
            machine.execute(t)
    except _Stuck:
        return None
    return machine.order


class _Machine:
    def __init__(self, problem: Problem, deadline: float, cost_power: float) -> None:
        graph = problem.graph
        self.problem, self.graph, self.deadline = problem, graph, deadline
        self.cost_power = cost_power
        self.live: dict[int, None] = {}  # a set in insertion order
        self.used = graph.external_bytes
        self.locks = [0] * len(graph.values)
        self.order: list[int] = []
        self.now = 0
        self.producer = [v.producer for v in graph.values]
        self.size = [v.size_bytes for v in graph.values]
        self.stays = [v.pinned or not graph.nodes[v.producer].rerunnable for v in graph.values]
        self.most_runs = RUNS * len(graph.nodes)

    def execute(self, target: int) -> None:
        """Run `target`, first whatever it lacks."""
        frames: list[tuple[int, list[int]]] = [(target, list(self.graph.nodes[target].inputs))]
        while frames:
            i, to_lock = frames[-1]
            if to_lock:
                v = to_lock[-1]
                if v in self.live or self.stays[v]:
                    self.locks[v] += 1
                    to_lock.pop()
                else:
                    p = self.producer[v]
                    frames.append((p, list(self.graph.nodes[p].inputs)))
                continue
            self._run(i)
            frames.pop()
            for v in self.graph.nodes[i].inputs:
                self.locks[v] -= 1
            for v in (*self.graph.nodes[i].inputs, *self.graph.nodes[i].outputs):
                if v in self.live and not self.locks[v] and self._distance(v) is None and v not in _awaited(frames):
                    self._drop(v)

    def _run(self, i: int) -> None:
        if len(self.order) >= self.most_runs or time.perf_counter() > self.deadline:
            raise _Stuck
        node = self.graph.nodes[i]
        new = [v for v in node.outputs if v not in self.live]
        grows = sum(self.size[v] for v in new)
        extra = node.workspace_bytes + sum(self.size[v] for v in node.outputs if v in self.live)
        excess = self.used + grows + extra - self.problem.budget_bytes
        if excess > 0:
            self._evict(excess, set(node.outputs))
        for v in new:
            self.live[v] = None
        self.used += grows
        self.order.append(i)

    def _evict(self, excess: int, own: set[int]) -> None:
        memo: dict[int, float] = {}
        scored = []
        for v in self.live:
            if not self.locks[v] and not self.stays[v] and v not in own and self.size[v]:
                distance = self._distance(v) or 1
                cost = self._again(v, memo, 0) ** self.cost_power
                scored.append((cost / (self.size[v] * distance), v))
        scored.sort()
        for _, v in scored:
            if excess <= 0:
                return
            self._drop(v)
            excess -= self.size[v]
        if excess > 0:
            raise _Stuck

    def _drop(self, v: int) -> None:
        del self.live[v]
        self.used -= self.size[v]

    def _distance(self, v: int) -> int | None:
        """Ops from now to the next that reads v and has not run yet; None: there is none."""
        readers = self.graph.readers[v]
        done = self.now if self.order and self.order[-1] == self.now else self.now - 1
        at = bisect_right(readers, done)
        return readers[at] - self.now + 1 if at < len(readers) else None

    def _again(self, v: int, memo: dict[int, float], depth: int) -> float:
        """Cost of making v again from what is live."""
        i = self.producer[v]
        if i in memo:
            return memo[i]
        cost = self.problem.cost[i]
        memo[i] = cost
        if depth < DEPTH:
            for u in self.graph.nodes[i].inputs:
                if u not in self.live and not self.stays[u]:
                    cost += self._again(u, memo, depth + 1)
        memo[i] = cost
        return cost


def _awaited(frames: list[tuple[int, list[int]]]) -> list[int]:
    """The inputs that the waiting op at the top still has to lock."""
    return frames[-1][1] if frames else []
