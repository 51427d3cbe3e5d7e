"""The least budget that has a plan, the op that sets it, and what is proven of lower ones.

`least_kept_budget`: with one rerun a value at most. Bisection over the budget. A probe asks the MILP of `retention.py` for any
plan at that budget (the cost objective with a loose gap: it leads to plans much faster than minimising the peak itself),
replays it, repairs it, adds the rows that overflow, and asks again. A plan lowers the upper end; a proof of infeasibility
raises the lower one; a probe that runs out of its time share does neither.

`least_budget`: with any number of reruns. Bisection over the levels of `first_plan.py`, by the methods that `solve` begins
with: what is found here at a budget, `solve` finds there again.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gcsolve.problem import Problem
from gcsolve.schedule import Schedule, order_from_kept, schedule_from_order
from gcsolve.simulate import simulate
from gcsolve.solver.blocks import twins
from gcsolve.solver.first_plan import FirstPlans
from gcsolve.solver.floor import peak_floor
from gcsolve.solver.milp.one_rerun import Choices, Program, add_overflowing
from gcsolve.solver.search.kept_repair import repair, starts
from gcsolve.solver.search.kept_replay import KeptReplay, KeptRun
from gcsolve.solver.search.order_replay import OrderRun

REL_TOLERANCE = 2e-3
"""Stop when the least peak is known to this share of the bytes above the external ones."""
LOOSE_GAP = 0.01
TIED_SHARE = 0.3
PROBE_SHARE = 0.25
"""A probe may take this share of the time that is left."""


@dataclass(frozen=True)
class LeastBudget:
    """`schedule` fits in `bytes`; its peak is at node `node`. No schedule of the class fits below `floor_bytes`."""

    bytes: int
    floor_bytes: int
    node: int
    schedule: Schedule
    solve_s: float


def least_kept_budget(problem: Problem, time_limit_s: float = 15.0) -> LeastBudget:
    """The least peak of a plan that reruns each value at most once, within `REL_TOLERANCE` unless time runs out."""
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
    return LeastBudget(peak, min(lower, peak), node, schedule, time.perf_counter() - started)


def least_budget(
    problem: Problem, time_limit_s: float = 15.0, *, above_bytes: int = 0, peak_bytes: int | None = None
) -> LeastBudget:
    """The least budget for which `FirstPlans` has a plan, with any number of reruns.

    Args:
        time_limit_s: no probe begins that is likely to end later.
        above_bytes: look for budgets above this only.
        peak_bytes: of some plan; a budget of that size is probed first.
    """
    started = time.perf_counter()
    plans = FirstPlans(problem)
    levels = [level for level in plans.levels if level > above_bytes] or plans.levels[-1:]
    search = _LevelSearch(levels, plans.store_all, started + time_limit_s)
    if peak_bytes is not None:
        search.probe(min(bisect_left(levels, peak_bytes), search.reached), plans.quick)
    for plan_at in (plans.quick, plans.at):  # each may find plans at levels at which the one before did not
        search.missed = -1
        search.probe(0, plan_at)  # the floor itself is often enough
        search.bisect(plan_at)
    floor = max([plans.floor_bytes, *(budget + 1 for budget in plans.infeasible)])
    schedule = schedule_from_order(problem.graph, search.plan.order)
    node = int(search.plan.order[int(search.plan.bytes_at.argmax())]) if search.plan.order else 0
    least = min(levels[search.reached], plans.store_all.peak_bytes)
    return LeastBudget(least, min(floor, least), node, schedule, time.perf_counter() - started)


class _LevelSearch:
    """Bisection: `plan` fits the level at `reached`; at `missed` no plan was found."""

    def __init__(self, levels: list[int], plan: OrderRun, deadline: float) -> None:
        self.levels, self.plan, self.deadline = levels, plan, deadline
        self.reached, self.missed = len(levels) - 1, -1

    def probe(self, place: int, plan_at: Callable[[int], OrderRun | None]) -> bool:
        """Whether there is a plan for the level at `place`."""
        plan = plan_at(self.levels[place])
        if plan is None:
            self.missed = max(self.missed, place)
            return False
        self.plan, self.reached = plan, min(self.reached, place)
        return True

    def bisect(self, plan_at: Callable[[int], OrderRun | None]) -> None:
        """Probe between `missed` and `reached` until they meet or a probe would end after the deadline."""
        longest = 0.0
        while self.reached > self.missed + 1 and time.perf_counter() + longest < self.deadline:
            started = time.perf_counter()
            self.probe((self.missed + self.reached) // 2, plan_at)
            longest = max(longest, time.perf_counter() - started)


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
