"""The least peak: how far a budget can fall before no kept set fits, and the op that stops it.

The MILP of `retention.py` with another objective: minimise Z, every memory row bounded by Z instead of the budget.
Rows are added lazily in the same way; each optimum is a lower bound on the least peak of the class, each replayed
kept set an upper one. `peak_floor` is the instant bound: no schedule at all runs a node in less than what it reads,
makes and works in, plus what always lives.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from gcsolve.problem import Problem
from gcsolve.schedule import Schedule, order_from_kept, schedule_from_order
from gcsolve.simulate import simulate
from gcsolve.solvers._kept import KeptReplay, KeptRun
from gcsolve.solvers._program import UNITS, Choices, Program
from gcsolve.solvers._repair import lower_peak

REL_TOLERANCE = 1e-3
"""Stop when the least peak is known to this share of the bytes above the external ones."""


@dataclass(frozen=True)
class MinimumPeak:
    """`bytes` is reached by `schedule` and set by node `node`; no kept set's peak is below `lower_bytes`."""

    bytes: int
    lower_bytes: int
    node: int
    schedule: Schedule
    solve_s: float


def peak_floor(problem: Problem) -> tuple[int, int]:
    """(bytes, node): no schedule's peak is lower than this, because of this node."""
    graph = problem.graph
    pinned = np.zeros(len(graph.nodes) + 1, dtype=np.int64)
    for v, value in enumerate(graph.values):
        if value.pinned:
            readers = graph.readers[v]
            pinned[value.producer] += value.size_bytes
            pinned[(readers[-1] if readers else value.producer) + 1] -= value.size_bytes
    always = np.cumsum(pinned)
    best, best_node = graph.external_bytes, -1
    for i, node in enumerate(graph.nodes):
        own = sum(graph.values[v].size_bytes for v in node.inputs + node.outputs if not graph.values[v].pinned)
        total = graph.external_bytes + int(always[i]) + own + node.workspace_bytes
        if total > best:
            best, best_node = total, i
    return best, best_node


def minimum_peak(problem: Problem, time_limit_s: float = 15.0) -> MinimumPeak:
    """The least peak of any kept set, within `REL_TOLERANCE` unless time runs out; its proven lower bound; its node."""
    started = time.perf_counter()
    deadline = started + 0.95 * time_limit_s
    replay = KeptReplay(problem)
    floor, _ = peak_floor(problem)
    best = replay.run(())
    best = _lower(best, replay.run(range(len(problem.graph.values))))
    lower = floor
    tolerance = int(REL_TOLERANCE * max(0, best.peak_bytes - problem.graph.external_bytes))
    best = _lower(best, lower_peak(replay, best, lower, deadline))
    program = Program(Choices(replay, tolerance // 4), floor, least_peak=True)
    add_worst(program, best)
    while best.peak_bytes > lower + tolerance and time.perf_counter() < deadline:
        answer = program.solve(
            time_limit_s=deadline - time.perf_counter(), abs_gap=tolerance / 2 / program.unit_bytes / UNITS
        )
        lower = max(lower, min(best.peak_bytes, floor + int(answer.bound * UNITS * program.unit_bytes)))
        if answer.kept is None:
            break
        run = replay.run(answer.kept)
        best = _lower(best, run)
        added = add_worst(program, run)
        best = _lower(best, lower_peak(replay, run, lower, deadline))
        if not added:
            break
    schedule = schedule_from_order(problem.graph, order_from_kept(problem.graph, best.kept))
    seen = simulate(problem, schedule)
    node = best.order[int(best.bytes_at.argmax())] if len(best.order) else 0
    return MinimumPeak(seen.peak_bytes, min(lower, seen.peak_bytes), int(node), schedule, time.perf_counter() - started)


def _lower(a: KeptRun, b: KeptRun) -> KeptRun:
    return b if (b.peak_bytes, b.rerun_cost) < (a.peak_bytes, a.rerun_cost) else a


def add_worst(program: Program, run: KeptRun, rows: int = 6) -> int:
    """Add the rows of the highest, spread-out moments of `run` that are not there yet; how many were new."""
    moments = run.moments(program.graph.backward_start)
    apart = max(1, len(run.order) // 40)
    added, taken = 0, []
    for at in np.argsort(-run.bytes_at, kind="stable")[: 20 * rows]:
        if added >= rows:
            break
        if all(abs(int(at) - other) >= apart for other in taken):
            taken.append(int(at))
            added += program.add_instant(*moments[int(at)])
    return added
