"""`retention`, started from the cheap methods' plans: so its overhead is never above theirs at the same budget."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import ClassVar

from gcsolve.problem import Problem
from gcsolve.solvers.base import Solution, Solver, judged
from gcsolve.solvers.blocks import Blocks
from gcsolve.solvers.chen import Chen
from gcsolve.solvers.retention import Retention
from gcsolve.solvers.store_all import StoreAll
from gcsolve.solvers.uniform import Uniform, UniformSqrt

CHEAP: tuple[Solver, ...] = (StoreAll(), Uniform(), UniformSqrt(), Blocks(), Chen())


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
        better = cheapest is not None and (solved.schedule is None or cheapest.overhead < solved.overhead)
        if cheapest is not None and cheapest.schedule is not None and better:
            solved = judged(
                self.name,
                problem,
                cheapest.schedule,
                solve_s=0.0,
                gap=gap,
                lower_bound=solved.lower_bound,
                certificate=solved.certificate,
                any_bound=solved.any_bound,
            )
        return replace(solved, solver=self.name, solve_s=time.perf_counter() - started)
