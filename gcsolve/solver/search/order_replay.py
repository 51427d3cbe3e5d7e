"""Orders: how the methods that may rerun a node any number of times evaluate a choice quickly.

`replay_order` gives what `simulate(problem, schedule_from_order(graph, order))` gives, without building the schedule.
It only ranks candidates: what a solver returns still goes through `judged`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gcsolve.problem import Problem
from gcsolve.schedule import schedule_from_order
from gcsolve.solver.base import Certificate, Solution, judged


@dataclass(frozen=True)
class OrderRun:
    """One order, replayed. `order[at]` stands at `bytes_at[at]`; `rerun_cost`: cost of the reruns.

    Copy c of value `value[c]` is made at place `made[c]` and read last at place `end[c]`.
    """

    order: tuple[int, ...]
    bytes_at: np.ndarray
    rerun_cost: float
    value: np.ndarray
    made: np.ndarray
    end: np.ndarray

    @property
    def peak_bytes(self) -> int:
        return int(self.bytes_at.max(initial=0))

    def key(self) -> tuple[float, int]:
        """Cheapest first, then least peak."""
        return self.rerun_cost, self.peak_bytes

    def overflow(self, budget_bytes: int) -> float:
        """How far over budget: the largest excess, plus the mean excess over all moments."""
        excess = np.maximum(self.bytes_at - budget_bytes, 0)
        return float(excess.max() + excess.mean()) if len(excess) else 0.0


class OrderReplay:
    """Replays orders of one problem; the tables that do not depend on the order are made once."""

    def __init__(self, problem: Problem) -> None:
        graph = problem.graph
        self.problem = problem
        self.size = np.array([v.size_bytes for v in graph.values], dtype=np.int64)
        self.workspace = np.array([n.workspace_bytes for n in graph.nodes], dtype=np.int64)
        self.cost = np.array(problem.cost)
        self.inputs = [n.inputs for n in graph.nodes]
        self.outputs = [n.outputs for n in graph.nodes]
        self.pinned = [v.pinned for v in graph.values]

    def run(self, order: Sequence[int]) -> OrderRun:
        last: list[int] = [-1] * len(self.size)
        made: list[int] = [-1] * len(self.size)
        copies: list[tuple[int, int, int]] = []
        seconds: list[tuple[int, int]] = []  # (place, value): a pinned value made again is dropped at once
        for at, i in enumerate(order):
            for v in self.inputs[i]:
                last[v] = at
            for v in self.outputs[i]:
                if made[v] >= 0:
                    if self.pinned[v]:
                        seconds.append((at, v))
                        continue
                    copies.append((v, made[v], last[v]))
                made[v] = last[v] = at
        copies.extend((v, made[v], last[v]) for v in range(len(made)) if made[v] >= 0)
        places = np.array(order, dtype=np.int64)
        table = np.array(copies, dtype=np.int64).reshape(-1, 3)
        size = self.size[table[:, 0]]
        delta = np.bincount(table[:, 1], weights=size, minlength=len(order) + 1)
        delta -= np.bincount(table[:, 2] + 1, weights=size, minlength=len(order) + 1)[: len(delta)]
        total = np.cumsum(delta)[:-1].astype(np.int64)
        total += self.workspace[places] + self.problem.graph.external_bytes
        for at, v in seconds:
            total[at] += self.size[v]
        rerun_cost = math.fsum(self.cost[places]) - self.problem.total_cost
        return OrderRun(tuple(order), total, max(0.0, rerun_cost), table[:, 0], table[:, 1], table[:, 2])


def stages_of(order: Sequence[int]) -> list[int]:
    """For each place the node that runs there or next for the first time."""
    stage, top = [], 0
    for i in order:
        stage.append(top)
        if i == top:
            top += 1
    return stage


def best_order(runs: Iterable[OrderRun], budget_bytes: int) -> OrderRun:
    """The cheapest run within the budget (ties: least peak, then first), or the least peak when none fits."""
    runs = list(runs)
    fitting = [r for r in runs if r.peak_bytes <= budget_bytes]
    if fitting:
        return min(fitting, key=OrderRun.key)
    return min(runs, key=lambda r: (r.peak_bytes, r.rerun_cost))


def judged_order(
    solver: str,
    problem: Problem,
    order: Sequence[int],
    *,
    started: float,
    gap: float,
    lower_bound: float = 0.0,
    certificate: Certificate = Certificate.NO_BOUND,
    any_bound: float = 0.0,
    max_runs: int | None = None,
) -> Solution:
    """The solution that runs `order`, as the simulator sees it."""
    return judged(
        solver,
        problem,
        schedule_from_order(problem.graph, order),
        solve_s=time.perf_counter() - started,
        gap=gap,
        lower_bound=lower_bound,
        certificate=certificate,
        any_bound=any_bound,
        max_runs=max_runs,
    )
