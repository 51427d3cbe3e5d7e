"""The least peak: how far a budget can fall before no kept set fits, and the op that stops it.

Bisection over the budget. A probe asks the MILP of `retention.py` for any plan at that budget (the cost objective
with a loose gap: it leads to plans much faster than minimising the peak itself), replays it, repairs it, adds the rows
that overflow, and asks again. A plan lowers the upper end; a proof of infeasibility raises the lower one; a probe that
runs out of its time share does neither. `minimum_any_budget` does the same with the greedy, the beam and
`milp/epoch_search.py`, for any number of reruns.

`peak_floor` holds for every schedule. A node takes what it reads, makes and works in, plus what always lives. And whatever
must be live together was not there together before: when the last of it was made, the rest was live beside what that
node read. So from a node's inputs one goes back, always to the cheapest of the nodes that may have run last: a search
for the path with the least bottleneck, cut short where it takes long.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from gcsolve.graph import Graph
from gcsolve.problem import Problem
from gcsolve.schedule import Schedule, order_from_kept, schedule_from_order
from gcsolve.simulate import simulate
from gcsolve.solver.blocks import twins
from gcsolve.solver.greedy import greedy_order, thinned
from gcsolve.solver.milp.epoch_search import EpochSearch
from gcsolve.solver.milp.one_rerun import Choices, Program, add_overflowing
from gcsolve.solver.search.beam import beam_order
from gcsolve.solver.search.bitsets import bits, members
from gcsolve.solver.search.kept_repair import repair, starts
from gcsolve.solver.search.kept_replay import KeptReplay, KeptRun
from gcsolve.solver.search.order_replay import OrderReplay, OrderRun

REL_TOLERANCE = 2e-3
"""Stop when the least peak is known to this share of the bytes above the external ones."""
LOOSE_GAP = 0.01
TIED_SHARE = 0.3
PROBE_GAP = 0.005
PROBE_SHARE = 0.25
"""A probe may take this share of the time that is left."""
WAYS = 1000
"""Sets looked at on the ways back from one node."""
ALL_WAYS = 20_000
"""... and from all of them."""


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
    ways = _Ways(problem)
    most = {i: ways.at_most_bytes(i) for i, node in enumerate(graph.nodes) if len(node.inputs) > 1}
    for i in sorted(most, key=lambda i: (-most[i], i)):
        if most[i] <= best or ways.looked > ALL_WAYS:
            break
        total = ways.bottleneck(i, best)
        if total > best:
            best, best_node = total, i
    return best, best_node


def alive_at_least(graph: Graph, node: int) -> list[int]:
    """The values that are alive in every schedule when `node` runs for the first time: pinned ones still to be read,
    and its own. -1, no node: none."""
    if node < 0:
        return []
    own = {*graph.nodes[node].inputs, *graph.nodes[node].outputs}
    pinned = (v for v, value in enumerate(graph.values) if value.pinned and value.producer <= node)
    own.update(v for v in pinned if graph.readers[v] and graph.readers[v][-1] >= node)
    return sorted(own)


class _Ways:
    """Backwards from the inputs of a node: sets of values that must be live together."""

    def __init__(self, problem: Problem) -> None:
        graph = problem.graph
        self.external_bytes = graph.external_bytes
        self.size = [v.size_bytes for v in graph.values]
        self.producer = [v.producer for v in graph.values]
        self.workspace = [n.workspace_bytes for n in graph.nodes]
        self.inputs = [bits(n.inputs) for n in graph.nodes]
        self.outputs = [bits(n.outputs) for n in graph.nodes]
        self.read_bytes = [sum(self.size[v] for v in n.inputs) for n in graph.nodes]
        self.own_bytes = [sum(self.size[v] for v in n.inputs + n.outputs) + n.workspace_bytes for n in graph.nodes]
        self.looked = 0

    def bytes(self, state: int, i: int) -> int:
        """What is live while i runs to make part of `state`, the rest of which is live."""
        together = state | self.inputs[i] | self.outputs[i]
        return self.external_bytes + self.workspace[i] + sum(self.size[v] for v in members(together))

    def at_most_bytes(self, i: int) -> int:
        """The least that one step back takes is not more."""
        makers = [self.producer[v] for v in members(self.inputs[i])]
        return self.external_bytes + self.read_bytes[i] + min(self.own_bytes[q] for q in makers)

    def bottleneck(self, i: int, floor: int) -> int:
        """Bytes that every way to the inputs of i takes at some moment; `floor` where that is not shown to be more."""
        start = self.inputs[i]
        heap = [(floor, 0, start)]
        seen = {start}
        while heap:
            least, _, state = heapq.heappop(heap)
            self.looked += 1
            if not state or len(seen) > WAYS:
                return least
            for q in dict.fromkeys(self.producer[v] for v in members(state)):
                back = (state & ~self.outputs[q]) | self.inputs[q]
                if back not in seen:
                    seen.add(back)
                    heapq.heappush(heap, (max(least, self.bytes(state, q)), -len(seen), back))
        return floor


def minimum_peak(problem: Problem, time_limit_s: float = 15.0) -> MinimumPeak:
    """The least peak of any kept set, within `REL_TOLERANCE` unless time runs out; its proven lower bound; its node."""
    started = time.perf_counter()
    deadline = started + 0.95 * time_limit_s
    replay = KeptReplay(problem)
    graph = problem.graph
    best = least_run(replay.run(kept) for kept in starts(graph))
    lower, _ = peak_floor(problem)
    tolerance = int(REL_TOLERANCE * max(0, best.peak_bytes - graph.external_bytes))
    choices = Choices(replay, tolerance // 4)
    tied = Program(choices, best.peak_bytes, twins(graph))
    best, _ = _bisect(tied, best, lower, tolerance, started + TIED_SHARE * time_limit_s)
    best, proven = _bisect(Program(choices, best.peak_bytes), best, lower, tolerance, deadline)
    lower = max(lower, proven)
    schedule = schedule_from_order(graph, order_from_kept(graph, best.kept))
    peak = simulate(problem, schedule).peak_bytes
    node = int(best.order[int(best.bytes_at.argmax())]) if len(best.order) else 0
    return MinimumPeak(peak, min(lower, peak), node, schedule, time.perf_counter() - started)


def some_plan(problem: Problem, deadline: float) -> OrderRun:
    """The greedy's plan; where it does not fit, the beam's, if that finds one."""
    run = greedy_order(problem, deadline=deadline)
    if run.peak_bytes > problem.budget_bytes:
        order = beam_order(problem, deadline=deadline)
        if order is not None:
            replay = OrderReplay(problem)
            run = thinned(replay, replay.run(order), deadline)
    return run


def minimum_any_budget(problem: Problem, known_bytes: int, time_limit_s: float = 15.0) -> tuple[int, int]:
    """(budget at which a plan with any number of reruns was found, bytes that every schedule needs), by bisection.

    `known_bytes`: a budget that is known to be enough. Between the two, nothing was found or proven in time.
    """
    deadline = time.perf_counter() + time_limit_s
    lower, _ = peak_floor(problem)
    best, missed = known_bytes, lower - 1
    tolerance = max(1, int(REL_TOLERANCE * (known_bytes - problem.graph.external_bytes)))
    while best > missed + tolerance and (left := deadline - time.perf_counter()) > 0:
        # the floor itself is often enough, and often nearly so
        aim = lower if missed < lower else (missed + best) // 2
        run = some_plan(problem.with_budget(aim), time.perf_counter() + PROBE_SHARE * left)
        if run.peak_bytes <= aim:
            best = aim
            continue
        best = min(best, run.peak_bytes)
        until = time.perf_counter() + PROBE_SHARE * left
        search = EpochSearch(problem.with_budget(aim), None, gap=PROBE_GAP, deadline=until, first_plan=True)
        search.run()
        if search.best is not None:
            best = min(best, aim)
        else:
            missed = aim
            if search.infeasible and not search.bursts:
                lower = aim + 1
    return best, min(lower, best)


def _bisect(program: Program, best: KeptRun, lower: int, tolerance: int, deadline: float) -> tuple[KeptRun, int]:
    """(least run found, bytes that the program needs at least)."""
    missed = lower - 1  # no plan was found at this budget: proven, or out of time
    while best.peak_bytes > missed + 1 + tolerance and time.perf_counter() < deadline:
        aim = (missed + best.peak_bytes) // 2
        run, proven = _probe(program, best, aim, deadline)
        if run is not None:
            best = least_run((best, run))
        else:
            missed = aim
            lower = aim + 1 if proven else lower
    return best, lower


def _probe(program: Program, best: KeptRun, aim: int, deadline: float) -> tuple[KeptRun | None, bool]:
    """(a run within `aim` bytes or None, proven that there is none)."""
    until = min(deadline, time.perf_counter() + max(0.5, PROBE_SHARE * (deadline - time.perf_counter())))
    program.set_budget(aim)
    add_overflowing(program, best, aim)
    while (left := until - time.perf_counter()) > 0:
        answer = program.solve(time_limit_s=left, abs_gap=LOOSE_GAP)
        if answer.kept is None:
            return None, answer.infeasible
        run = program.replay.run(answer.kept)
        if run.peak_bytes > aim:
            added = add_overflowing(program, run, aim)
            fixed = repair(program.replay, run, aim, until)
            if fixed is None and not added:
                return None, False
            run = fixed or run
        if run.peak_bytes <= aim:
            return run, False
    return None, False


def least_run(runs: Iterable[KeptRun]) -> KeptRun:
    """The run with the least peak; ties: the cheaper, then the first."""
    return min(runs, key=lambda r: (r.peak_bytes, r.rerun_cost))
