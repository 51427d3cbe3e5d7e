"""What a solver from outside answers is checked here: it is replayed, and nothing of its own word is taken."""

from __future__ import annotations

import time
import traceback
from dataclasses import replace
from pathlib import Path

from gcsolve.errors import InvalidSchedule, SolverError
from gcsolve.problem import Problem
from gcsolve.schedule import Compute, Free, Schedule
from gcsolve.solver.base import ROUNDING, Certificate, Solution, Solver, Status, judged
from gcsolve.util.checks import number, whole

_UNANSWERED = (Status.INFEASIBLE, Status.TIME_LIMIT, Status.UNSUITED)
_PACKAGE = Path(__file__).parents[1]
_ADVICE = "gcsolve.solver.base.judged(name, problem, schedule, solve_s=..., gap=gap) makes a Solution of a Schedule"


def checked_answer(solver: Solver, problem: Problem, time_limit_s: float, gap: float) -> Solution:
    """What `solver` answers, under its own name, with peak, overhead, gap, status and seconds as found here.

    Raises:
        SolverError: it raised, answered with no `Solution`, with a schedule that the simulator refuses, or with a bound
            that its own schedule goes below. The text names the solver, what is wrong and what to do.
    """
    says = f"solver {solver.name!r} ({type(solver).__name__})"
    started = time.perf_counter()
    try:
        answer = solver.solve(problem, time_limit_s=time_limit_s, gap=gap)
    except Exception as error:
        raise SolverError(
            f"{says} raised {type(error).__name__}{_at(error)}: {error}. A budget that it cannot meet is a Solution without a "
            "schedule (gcsolve.solver.base.unanswered), not an exception"
        ) from error
    if not isinstance(answer, Solution):
        raise SolverError(f"{says} answered with {type(answer).__name__}, not with a gcsolve.Solution; {_ADVICE}")
    if not isinstance(answer.status, Status) or not isinstance(answer.certificate, Certificate):
        raise SolverError(
            f"{says} answered with status={answer.status!r}, certificate={answer.certificate!r}; they are a gcsolve.Status and "
            f"a gcsolve.solver.base.Certificate, one of {', '.join(Certificate.__members__)}. {_ADVICE}"
        )
    if answer.max_runs is not None:
        whole("max_runs", answer.max_runs, least=1, of=f" in the answer of {says}", error=SolverError)
    for name in ("lower_bound", "any_bound"):
        number(name, getattr(answer, name), of=f" in the answer of {says}", error=SolverError)
    if answer.schedule is None:
        return _without_schedule(answer, solver.name, says, problem)
    try:
        found = judged(
            solver.name,
            problem,
            answer.schedule,
            solve_s=time.perf_counter() - started,
            gap=gap,
            lower_bound=answer.lower_bound,
            certificate=answer.certificate,
            any_bound=answer.any_bound,
            max_runs=answer.max_runs,
        )
    except InvalidSchedule as error:
        raise SolverError(
            f"{says} answered with a schedule that cannot be run: {error}. gcsolve.simulate(problem, schedule) replays it; "
            "gcsolve.schedule.schedule_from_order(graph, order) writes the frees of an order of nodes"
        ) from error
    fits = found.status is not Status.OVER_BUDGET  # a plan over the budget may be cheaper than any that fits
    for name in ("lower_bound", "any_bound"):
        told = getattr(answer, name)
        if fits and told > found.overhead + ROUNDING:
            raise SolverError(
                f"{says} says that no schedule has an overhead below {name}={told:g}, and its own schedule has "
                f"{found.overhead:g}; without a proof, leave {name} at 0 and certificate at Certificate.NO_BOUND"
            )
    return replace(found, schedule=_in_ints(answer.schedule))


def _without_schedule(answer: Solution, name: str, says: str, problem: Problem) -> Solution:
    if answer.status not in _UNANSWERED:
        known = ", ".join(status.name for status in _UNANSWERED)
        raise SolverError(
            f"{says} answered with status {answer.status.name} and no schedule; without one it is {known}"
        )
    of = f" in the answer of {says}"
    nodes, least = len(problem.graph.nodes), answer.least_bytes
    if least is not None and whole("least_bytes", least, of=of, error=SolverError) <= problem.budget_bytes:
        raise SolverError(
            f"{says} has no schedule for a budget of {problem.budget_bytes} bytes and says that it reaches "
            f"least_bytes={least}, which is no more; answer with that schedule, or leave least_bytes out"
        )
    if (
        answer.least_node is not None
        and not 0 <= whole("least_node", answer.least_node, of=of, error=SolverError) < nodes
    ):
        raise SolverError(f"{says} answered with least_node={answer.least_node}, which is outside 0..{nodes - 1}")
    return replace(answer, solver=name)


def _in_ints(schedule: Schedule) -> Schedule:
    """The schedule with plain ints where the solver had numpy's."""
    plain = (Compute(int(a.node)) if isinstance(a, Compute) else Free(int(a.value)) for a in schedule.actions)
    return Schedule(tuple(plain))


def _at(error: Exception) -> str:
    """ " at file:line" of the last line outside gcsolve that led to the error; "" where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not Path(frame.filename).is_relative_to(_PACKAGE)]
    return f" at {Path(outside[-1].filename).name}:{outside[-1].lineno}" if outside else ""
