"""The contract every solver keeps: a frozen settings value with `solve(problem, time_limit_s, gap) -> Solution`."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from gcsolve.problem import Problem
from gcsolve.schedule import Schedule
from gcsolve.simulate import simulate


class Status(enum.Enum):
    """How a solve ended; the value says what to try."""

    OPTIMAL = "optimal: within the asked gap of the bound; nothing to try"
    FEASIBLE = "feasible: fits the budget, not proven optimal; for a proof solver='auto', with more time_limit_s"
    OVER_BUDGET = "over budget: this method's least peak is above the budget; raise the budget or change solver"
    INFEASIBLE = "infeasible: proven that no schedule of this class fits; raise the budget to least_bytes"
    TIME_LIMIT = "time limit: no plan found in time; raise time_limit_s"
    UNSUITED = "unsuited: this method does not take so large a graph; use solver='auto'"


class Certificate(enum.Enum):
    """The class of schedules that `Solution.lower_bound` is proven for; `str()` of a member says it in words."""

    ANY_SCHEDULE = "any schedule in this op order, however often it recomputes"
    ONE_RERUN = (
        "any schedule in this op order that keeps each forward value to its last use or computes it again once, just "
        "before the backward first needs it (values that together take 0.1 % of the budget always kept)"
    )
    ASCENDING = (
        "any schedule in this op order that, between the first runs of two nodes, "
        "reruns each node at most once, in order"
    )
    OWN_CLASS = "any schedule that this method chooses from"
    NO_BOUND = "none: this method proves nothing"

    def __str__(self) -> str:
        return self.value


ROUNDING = 1e-9
"""Gaps closer than this are equal: costs are sums of floats."""


@dataclass(frozen=True, repr=False)
class Solution:
    """What a solver answers.

    `schedule` is None only for INFEASIBLE, TIME_LIMIT and UNSUITED. `overhead`: extra cost / cost of running each node
    once; inf without a schedule.
    `lower_bound`: no schedule of the class `certificate` has a smaller overhead; with `max_runs`, none of that class that
    runs no node more often than that. `any_bound`: the like for any schedule in this op order (0.0 when nothing better is
    proven). `gap`: (T_plan - T_bound) / T_plan over total cost.
    `least_bytes`: for INFEASIBLE and OVER_BUDGET, the least peak of a plan that this method found; `least_node`
    sets it.
    """

    solver: str
    status: Status
    schedule: Schedule | None
    overhead: float
    lower_bound: float
    certificate: Certificate
    any_bound: float
    gap: float
    peak_bytes: int
    solve_s: float
    least_bytes: int | None = None
    least_node: int | None = None
    max_runs: int | None = None

    @property
    def bound_class(self) -> str:
        """The schedules that `lower_bound` holds for, in words."""
        limit = "" if self.max_runs is None else f", and runs no node more than {self.max_runs} times in all"
        return f"{self.certificate}{limit}"

    def __repr__(self) -> str:
        """The answer in one line; the schedule is only counted."""
        if self.schedule is None:
            found = "" if self.least_bytes is None else f", least budget found {self.least_bytes} B"
            return f"<Solution of {self.solver}: {self.status.name}, no schedule{found}>"
        limit = "" if self.max_runs is None else f", at most {self.max_runs} runs a node"
        return (
            f"<Solution of {self.solver}: {self.status.name}, overhead {self.overhead:.2%}, peak {self.peak_bytes} B, "
            f"bound {self.lower_bound:.2%} ({self.certificate.name}{limit}), gap {self.gap:.2%}, "
            f"{len(self.schedule.order())} computes>"
        )


@runtime_checkable
class Solver(Protocol):
    """One method. `name` is its registry key; fields of the implementing frozen dataclass are its settings."""

    name: ClassVar[str]

    def solve(self, problem: Problem, *, time_limit_s: float = 60.0, gap: float = 0.005) -> Solution:
        """The method's best schedule for `problem`; never raises for a budget that it cannot meet."""
        ...


def judged(
    solver: str,
    problem: Problem,
    schedule: Schedule,
    *,
    solve_s: float,
    gap: float,
    lower_bound: float = 0.0,
    certificate: Certificate = Certificate.NO_BOUND,
    any_bound: float = 0.0,
    max_runs: int | None = None,
) -> Solution:
    """A `Solution` whose peak, overhead, gap and status come from the simulator, never from the solver's own word."""
    replay = simulate(problem, schedule)
    reached = (replay.overhead - lower_bound) / (1.0 + replay.overhead)
    if replay.peak_bytes > problem.budget_bytes:
        status = Status.OVER_BUDGET
    elif replay.overhead == 0.0 or (certificate is not Certificate.NO_BOUND and reached <= gap + ROUNDING):
        status = Status.OPTIMAL
    else:
        status = Status.FEASIBLE
    over = status is Status.OVER_BUDGET
    computes = [a for a in schedule.actions[: replay.peak_action + 1] if hasattr(a, "node")]
    return Solution(
        solver=solver,
        status=status,
        schedule=schedule,
        overhead=replay.overhead,
        lower_bound=min(lower_bound, replay.overhead),
        certificate=certificate,
        any_bound=min(any_bound, replay.overhead),
        gap=max(0.0, reached),
        peak_bytes=replay.peak_bytes,
        solve_s=solve_s,
        least_bytes=replay.peak_bytes if over else None,
        least_node=computes[-1].node if over and computes else None,  # type: ignore[union-attr]
        max_runs=max_runs,
    )


def unanswered(
    solver: str,
    status: Status,
    *,
    solve_s: float,
    lower_bound: float = 0.0,
    certificate: Certificate = Certificate.NO_BOUND,
    any_bound: float = 0.0,
    least_bytes: int | None = None,
    least_node: int | None = None,
    max_runs: int | None = None,
) -> Solution:
    """A `Solution` without a schedule."""
    return Solution(
        solver=solver,
        status=status,
        schedule=None,
        overhead=math.inf,
        lower_bound=lower_bound,
        certificate=certificate,
        any_bound=any_bound,
        gap=0.0 if status is Status.INFEASIBLE else 1.0,
        peak_bytes=0,
        solve_s=solve_s,
        least_bytes=least_bytes,
        least_node=least_node,
        max_runs=max_runs,
    )
