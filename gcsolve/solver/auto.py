"""`retention`, which begins with the best plan of the cheap methods: its overhead is never above theirs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from gcsolve.problem import Problem
from gcsolve.solver.base import ROUNDING, Certificate, Solution, Solver, judged
from gcsolve.solver.blocks import Blocks
from gcsolve.solver.chen import Chen
from gcsolve.solver.greedy import Greedy
from gcsolve.solver.minimum import least_budget
from gcsolve.solver.retention import Retention
from gcsolve.solver.store_all import StoreAll
from gcsolve.solver.uniform import Uniform, UniformSqrt

CHEAP: tuple[Solver, ...] = (StoreAll(), Greedy(), Uniform(), UniformSqrt(), Blocks(), Chen())
CHEAP_SHARE = 0.2
"""Of the time; what has not begun by then is left out."""


@dataclass(frozen=True)
class Auto:
    name: ClassVar[str] = "auto"

    def solve(self, problem: Problem, *, time_limit_s: float = 60.0, gap: float = 0.005) -> Solution:
        started = time.perf_counter()

        def left() -> float:
            return max(0.1, time_limit_s - (time.perf_counter() - started))

        found: list[Solution] = []
        for solver in CHEAP:
            if left() > (1.0 - CHEAP_SHARE) * time_limit_s:
                found.append(solver.solve(problem, time_limit_s=left(), gap=gap))
        best = min((s for s in found if _fits(s, problem)), key=_rank, default=None)
        begin = best.schedule.order() if best and best.schedule else None
        proven = Retention(begin=begin, find_least=False).solve(problem, time_limit_s=left(), gap=gap)
        if not _fits(proven, problem) and best is None:
            solved = _with_least(proven, found, problem, max(1.0, left()))
        elif best is None or (_fits(proven, problem) and proven.overhead <= best.overhead):
            solved = proven
        else:
            solved = _with_bounds(best, proven, problem, gap)
        return replace(solved, solver=self.name, solve_s=time.perf_counter() - started)


def _fits(solution: Solution, problem: Problem) -> bool:
    return solution.schedule is not None and solution.peak_bytes <= problem.budget_bytes


def _rank(solution: Solution) -> tuple[float, int]:
    return solution.overhead, solution.peak_bytes


def _with_bounds(plan: Solution, proven: Solution, problem: Problem, gap: float) -> Solution:
    """`plan` with what `retention` proved: the bound of its class, unless the plan beats that; and that for any schedule."""
    assert plan.schedule is not None
    binding = proven.schedule is not None and proven.lower_bound <= plan.overhead + ROUNDING
    return judged(
        plan.solver,
        problem,
        plan.schedule,
        solve_s=0.0,
        gap=gap,
        lower_bound=proven.lower_bound if binding else proven.any_bound,
        certificate=proven.certificate if binding else Certificate.ANY_SCHEDULE,
        any_bound=proven.any_bound,
    )


def _with_least(refused: Solution, others: Sequence[Solution], problem: Problem, time_limit_s: float) -> Solution:
    """`refused`, which has no plan, with the least budget for which this solver has one."""
    peak_bytes = min((s.peak_bytes for s in others if s.schedule is not None), default=None)
    least = least_budget(problem, time_limit_s, above_bytes=problem.budget_bytes, peak_bytes=peak_bytes)
    return replace(refused, least_bytes=least.bytes, least_node=least.node)
