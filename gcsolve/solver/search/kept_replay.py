"""Kept sets: how the methods that "keep these, rerun the rest once" evaluate a choice quickly.

`KeptReplay.run(kept)` gives what `simulate(problem, schedule_from_order(graph, order_from_kept(graph, kept)))` gives,
without building the schedule. It only ranks candidates: what a solver returns still goes through `judged`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from gcsolve.problem import Problem
from gcsolve.schedule import order_from_kept, schedule_from_order
from gcsolve.solver.base import Solution, judged

NEVER = 1 << 30


@dataclass(frozen=True)
class KeptRun:
    """One kept set, replayed. `rerun_cost`: cost of the reruns; `order[at]` stands at `bytes_at[at]`.

    `rerun_at[i]`: the backward node just before which forward node i is rerun, `NEVER` if it is not.
    `spans`: per value, places in the order where its first copy is made, last read, its second made, last read.
    """

    kept: frozenset[int]
    rerun_cost: float
    peak_bytes: int
    order: np.ndarray
    bytes_at: np.ndarray
    rerun_at: np.ndarray
    spans: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]

    def alive(self, at: int) -> np.ndarray:
        """For each value whether it is alive at place `at` of the order."""
        made, read, made_again, read_again = self.spans
        return ((made <= at) & (at <= read)) | ((made_again <= at) & (at <= read_again))

    def key(self) -> tuple[float, int]:
        """Cheapest first, then least peak."""
        return self.rerun_cost, self.peak_bytes

    def burst(self, at: int, first_backward: int) -> int:
        """The backward node that runs at place `at` or next after it; -1 when there is none."""
        later = self.order[at:]
        found = np.flatnonzero(later >= first_backward)
        return int(later[found[0]]) if len(found) and at >= first_backward else -1

    def moments(self, first_backward: int) -> list[tuple[int, int]]:
        """For each place in the order (node, the backward node before which it is a rerun; -1 when it is native)."""
        before, seen = [-1] * len(self.order), False
        coming = -1
        for at in range(len(self.order) - 1, -1, -1):
            if self.order[at] >= first_backward:
                coming, seen = int(self.order[at]), True
            elif seen and at >= first_backward:
                before[at] = coming
        return list(zip(self.order.tolist(), before, strict=True))


class KeptReplay:
    """Replays kept sets of one problem; the arrays that do not depend on the set are made once."""

    def __init__(self, problem: Problem) -> None:
        graph = problem.graph
        self.problem = problem
        self.first_backward = graph.backward_start
        self.size = np.array([v.size_bytes for v in graph.values], dtype=np.int64)
        self.workspace = np.array([n.workspace_bytes for n in graph.nodes], dtype=np.int64)
        self.producer = np.array([v.producer for v in graph.values], dtype=np.int64)
        self.pinned = np.array([v.pinned for v in graph.values], dtype=bool)
        self.cost = np.array(problem.cost)
        self.cost_scale = max(problem.total_cost, 1e-12) * 1e-3
        self.readers = graph.readers
        self.outputs = [node.outputs for node in graph.nodes]
        fw = range(self.first_backward)
        can = [graph.nodes[i].rerunnable for i in fw]
        self.can_rerun = np.array([n.rerunnable for n in graph.nodes], dtype=bool)
        self.can_rerun[self.first_backward :] = False
        # outputs of node i that a rerun can serve, each with its first backward reader and its forward readers
        self.served: list[list[tuple[int, int, tuple[int, ...]]]] = []
        for i in fw:
            rows = []
            for v in graph.nodes[i].outputs:
                if can[i] and not graph.values[v].pinned:
                    native = [j for j in self.readers[v] if j >= self.first_backward]
                    rows.append(
                        (v, native[0] if native else NEVER, tuple(j for j in self.readers[v] if j not in native))
                    )
            self.served.append(rows)
        edges = [(v, j) for v, readers in enumerate(self.readers) for j in readers]
        edges += [(v, graph.values[v].producer) for v in range(len(graph.values))]
        edges.sort()
        self.edge_value = np.array([v for v, _ in edges], dtype=np.int64)
        self.edge_reader = np.array([j for _, j in edges], dtype=np.int64)
        self.edge_own = self.edge_reader == self.producer[self.edge_value]
        self.edge_start = np.searchsorted(self.edge_value, np.arange(len(graph.values)))
        self.made_pinned = np.zeros(len(graph.nodes), dtype=np.int64)
        for v in graph.values:
            if v.pinned:
                self.made_pinned[v.producer] += v.size_bytes

    def rerun_times(self, kept: Iterable[int]) -> np.ndarray:
        """For each forward node, the backward node just before which it is rerun (`NEVER`: it is not)."""
        held = set(kept)
        at = [NEVER] * self.first_backward
        for i in range(self.first_backward - 1, -1, -1):
            best = NEVER
            for v, native, forward_readers in self.served[i]:
                if v not in held:
                    best = min(best, native)
                    for j in forward_readers:
                        best = min(best, at[j])
            at[i] = best
        return np.array(at, dtype=np.int64)

    def run(self, kept: Iterable[int]) -> KeptRun:
        kept = frozenset(kept)
        n, first = len(self.workspace), self.first_backward
        at = self.rerun_times(kept)
        again = np.flatnonzero(at < NEVER)
        # sort key: (moment, rerun before native, index); forward nodes come first in their own order
        moment = np.concatenate([np.full(first, -1, dtype=np.int64), np.arange(first, n), at[again]])
        node = np.concatenate([np.arange(n), again])
        native = np.concatenate([np.ones(n, dtype=np.int64), np.zeros(len(again), dtype=np.int64)])
        perm = np.lexsort((node, native, moment))
        order = node[perm]
        place = np.empty(len(perm), dtype=np.int64)
        place[perm] = np.arange(len(perm))
        native_place = place[:n]
        rerun_place = np.full(n, -1, dtype=np.int64)
        rerun_place[again] = place[n:]
        last_place = np.maximum(native_place, rerun_place)

        if not len(self.size):
            total = np.zeros(len(order), dtype=np.int64)
            spans = (total, total, total, total)
        else:
            remade = (rerun_place[self.producer] >= 0) & ~self.pinned
            remade_at = np.where(remade, rerun_place[self.producer], len(order))
            last_use = np.maximum.reduceat(last_place[self.edge_reader], self.edge_start)
            # the last use of the first copy: the latest read that comes before the value is made again
            limit = remade_at[self.edge_value]
            again_in_time = (last_place[self.edge_reader] < limit) & ~self.edge_own
            read_again = np.where(again_in_time, last_place[self.edge_reader], -1)
            read_first = np.where(native_place[self.edge_reader] < limit, native_place[self.edge_reader], -1)
            first_end = np.maximum.reduceat(np.maximum(read_again, read_first), self.edge_start)
            delta = np.zeros(len(order) + 1, dtype=np.int64)
            np.add.at(delta, native_place[self.producer], self.size)
            np.add.at(delta, first_end + 1, -self.size)
            np.add.at(delta, remade_at[remade], self.size[remade])
            np.add.at(delta, last_use[remade] + 1, -self.size[remade])
            total = np.cumsum(delta[:-1])
            spans = (native_place[self.producer], first_end, remade_at, last_use)
        total = total + self.workspace[order] + self.problem.graph.external_bytes
        if len(again):
            total[place[n:]] += self.made_pinned[again]
        peak = int(total.max()) if len(total) else self.problem.graph.external_bytes
        return KeptRun(kept, math.fsum(self.cost[again]), peak, order, total, at, spans)


def best_kept(runs: Iterable[KeptRun], budget_bytes: int) -> KeptRun:
    """The cheapest run within the budget (ties: least peak, then first), or the least peak when none fits."""
    runs = list(runs)
    fitting = [r for r in runs if r.peak_bytes <= budget_bytes]
    if fitting:
        return min(fitting, key=KeptRun.key)
    return min(runs, key=lambda r: (r.peak_bytes, r.rerun_cost))


def judged_kept(solver: str, problem: Problem, kept: Iterable[int], *, started: float, gap: float) -> Solution:
    """The solution that keeps `kept` and reruns the rest, as the simulator sees it; nothing is proven."""
    schedule = schedule_from_order(problem.graph, order_from_kept(problem.graph, kept))
    return judged(solver, problem, schedule, solve_s=time.perf_counter() - started, gap=gap)
