"""The torch-free front door: a problem in, a solution out."""

from __future__ import annotations

from gcsolve.errors import ArgumentError
from gcsolve.problem import Problem
from gcsolve.solver.base import Solution, Solver
from gcsolve.solver.custom import checked_answer
from gcsolve.solver.registry import get_solver, is_built_in
from gcsolve.util.checks import check_limits


def solve_problem(
    problem: Problem, solver: str | Solver = "auto", *, time_limit_s: float = 60.0, gap: float = 0.005
) -> Solution:
    """Solve `problem` by a registered method or a solver of your own.

    Args:
        problem: graph, costs and budget.
        solver: a name in `gcsolve.solvers()`, or an object with `name` and `solve`.
        time_limit_s: seconds after which the best plan so far is returned. Where "auto" and "retention" have none by then,
            they finish the search for a first one, whose work is counted and not timed.
        gap: (plan cost - bound) / plan cost, over total step cost, at which to stop.

    Returns:
        the solution; a budget that cannot be met is a status there, not an exception. The answer of a solver of your own
        is replayed: peak, overhead, gap and status are the simulator's.

    Raises:
        ArgumentError: no problem, unknown solver, or a time limit or gap that is negative or no number.
        SolverError: a solver of your own raised, or its answer does not hold.

    Examples:
        >>> edges = [(0, 1), (1, 2), (2, 3), (1, 4), (3, 4), (0, 5), (4, 5)]
        >>> chain = Problem.from_arrays([1] * 6, [4, 4, 4, 1, 1, 1], edges, 3, budget_bytes=16)
        >>> solve_problem(chain).overhead
        0.0
    """
    if not isinstance(problem, Problem):
        raise ArgumentError(
            f"problem is of type {type(problem).__name__}, not a gcsolve.Problem; Problem.from_arrays and "
            "Problem.from_networkx make one"
        )
    check_limits(time_limit_s, gap)
    method = get_solver(solver)
    if is_built_in(method):
        return method.solve(problem, time_limit_s=time_limit_s, gap=gap)
    return checked_answer(method, problem, time_limit_s, gap)
