"""`retention` beside the cheap methods: its overhead is never above theirs at the same budget.

`greedy` reruns a value as often as it pays, so it also finds plans below what one rerun a value can reach; the bound that
such a plan is held against is the one for any schedule.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from gcsolve.problem import Problem
from gcsolve.solvers.base import ANY_SCHEDULE, Solution, Solver, judged
from gcsolve.solvers.blocks import Blocks
from gcsolve.solvers.chen import Chen
from gcsolve.solvers.greedy import Greedy
from gcsolve.solvers.minimum import peak_floor
from gcsolve.solvers.retention import Retention
from gcsolve.solvers.store_all import StoreAll
from gcsolve.solvers.uniform import Uniform, UniformSqrt

CHEAP: tuple[Solver, ...] = (StoreAll(), Uniform(), UniformSqrt(), Blocks(), Chen(), Greedy())


@dataclass(frozen=True)
class Auto:
    name: ClassVar[str] = "auto"

    def solve(self, problem: Problem, *, time_limit_s: float = 60.0, gap: float = 0.005) -> Solution:
        started = time.perf_counter()
        found = [s.solve(problem, time_limit_s=time_limit_s, gap=gap) for s in CHEAP]
        left = max(0.1, time_limit_s - (time.perf_counter() - started))
        solved = Retention().solve(problem, time_limit_s=left, gap=gap)
        fitting = [s for s in found if s.schedule is not None and s.peak_bytes <= problem.budget_bytes]
        cheapest = min(fitting, key=lambda s: (s.overhead, s.peak_bytes), default=None)
        if cheapest is None:
            solved = _with_least(solved, found, problem)
        elif solved.schedule is None or cheapest.overhead < solved.overhead:
            solved = _with_bounds(cheapest, solved, problem, gap)
        return replace(solved, solver=self.name, solve_s=time.perf_counter() - started)


def _with_bounds(plan: Solution, proven: Solution, problem: Problem, gap: float) -> Solution:
    """`plan` with what `retention` proved; a bound for one rerun a value says nothing of a plan that reruns more."""
    assert plan.schedule is not None
    one_rerun = max(plan.schedule.runs(problem.graph)) <= 2 and proven.schedule is not None
    return judged(
        plan.solver,
        problem,
        plan.schedule,
        solve_s=0.0,
        gap=gap,
        lower_bound=proven.lower_bound if one_rerun else proven.any_bound,
        certificate=proven.certificate if one_rerun else ANY_SCHEDULE,
        any_bound=proven.any_bound,
    )


def _with_least(solved: Solution, found: Sequence[Solution], problem: Problem) -> Solution:
    """When nothing fits: the plan with the least peak, if one goes below what one rerun a value reaches."""
    if solved.schedule is not None or peak_floor(problem)[0] > problem.budget_bytes:
        return solved  # a plan, or proven for every schedule
    least = min(found, key=lambda s: s.peak_bytes)
    return least if solved.least_bytes is None or least.peak_bytes < solved.least_bytes else solved
