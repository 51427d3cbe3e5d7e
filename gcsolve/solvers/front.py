"""The torch-free front door: a problem in, a solution out."""

from __future__ import annotations

import math

from gcsolve.errors import ArgumentError
from gcsolve.problem import Problem
from gcsolve.solvers.base import Solution, Solver
from gcsolve.solvers.registry import get_solver


def solve_problem(
    problem: Problem, solver: str | Solver = "auto", *, time_limit_s: float = 60.0, gap: float = 0.005
) -> Solution:
    """Solve `problem` by a registered method or a solver of your own.

    Args:
        problem: graph, costs and budget.
        solver: a name in `gcsolve.solvers()`, or an object with `name` and `solve`.
        time_limit_s: seconds after which the best plan so far is returned.
        gap: (plan cost - bound) / plan cost, over total step cost, at which to stop.

    Returns:
        the solution; a budget that cannot be met is a status there, not an exception.

    Raises:
        ArgumentError: unknown solver, or a time limit or gap that is negative or no number.

    >>> edges = [(0, 1), (1, 2), (2, 3), (1, 4), (3, 4), (0, 5), (4, 5)]
    >>> chain = Problem.from_arrays([1] * 6, [4, 4, 4, 1, 1, 1], edges, 3, budget_bytes=16)
    >>> solve_problem(chain).overhead
    0.0
    """
    for name, number in (("time_limit_s", time_limit_s), ("gap", gap)):
        if not (math.isfinite(number) and number >= 0):
            raise ArgumentError(f"{name}={number!r} must be a finite number ≥ 0")
    return get_solver(solver).solve(problem, time_limit_s=time_limit_s, gap=gap)
