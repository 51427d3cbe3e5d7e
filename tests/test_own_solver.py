"""A solver of one's own is never taken at its word."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy
import pytest
import torch

import gcsolve
from gcsolve.schedule import Compute, Free, Schedule, schedule_from_order
from gcsolve.solver.base import Certificate, Solution, Status, judged, unanswered
from tests import models
from tests.graphs import training_chain

TIGHT = training_chain(6, 20)
KEPT = schedule_from_order(TIGHT.graph, range(len(TIGHT.graph.nodes)))


@dataclass(frozen=True)
class Own:
    """Answers with what `answer` makes of the problem."""

    answer: Callable[[gcsolve.Problem], Any]
    name: str = "own"

    def solve(self, problem: gcsolve.Problem, *, time_limit_s: float = 60.0, gap: float = 0.005) -> Any:
        return self.answer(problem)


def _best(problem: gcsolve.Problem) -> Solution:
    return gcsolve.solve_problem(problem, "brute_force")


def _with(actions: Callable[[tuple[Any, ...]], Any]) -> Callable[[gcsolve.Problem], Solution]:
    """The best answer with its actions changed."""

    def answer(problem: gcsolve.Problem) -> Solution:
        best = _best(problem)
        assert best.schedule is not None
        return replace(best, schedule=Schedule(actions(best.schedule.actions)))

    return answer


def test_peak_overhead_status_and_name_are_those_of_the_replay() -> None:
    def lies(problem: gcsolve.Problem) -> Solution:
        return replace(_best(problem), peak_bytes=1, overhead=0.0, lower_bound=0.0, gap=0.0, solve_s=-5.0)

    truth, found = _best(TIGHT), gcsolve.solve_problem(TIGHT, Own(lies))
    assert truth.overhead > 0
    assert (found.solver, found.schedule) == ("own", truth.schedule)
    assert (found.peak_bytes, found.overhead) == (truth.peak_bytes, truth.overhead)
    assert found.status is Status.FEASIBLE
    assert found.gap > 0
    assert found.solve_s >= 0


def test_an_answer_over_the_budget_says_so() -> None:
    over = gcsolve.solve_problem(TIGHT, Own(lambda p: replace(_best(p), schedule=KEPT)))
    assert over.status is Status.OVER_BUDGET
    assert over.least_bytes == over.peak_bytes > TIGHT.budget_bytes


def test_an_answer_to_another_problem_is_refused_or_over_the_budget() -> None:
    model, x = models.MLP(6, 64), torch.randn(256, 64)
    plan = gcsolve.solve(model, x, budget=1.0)
    with pytest.raises(gcsolve.InfeasibleBudget, match=r"cannot be met by own: .* bytes"):
        plan.at(budget=0.8, solver=Own(lambda _: plan.solution))
    other = gcsolve.solve(models.MLP(3, 64), x, budget=1.0)
    with pytest.raises(gcsolve.SolverError, match=r"'own'.*cannot be run"):
        plan.at(budget=1.0, solver=Own(lambda _: other.solution))


def test_numpy_ints_in_a_schedule_become_ints() -> None:
    numbers = _with(
        lambda actions: tuple(Compute(numpy.int64(a.node)) if isinstance(a, Compute) else a for a in actions)
    )
    found = gcsolve.solve_problem(TIGHT, Own(numbers))
    assert found.schedule is not None
    assert all(type(node) is int for node in found.schedule.order())


def test_no_plan_is_an_answer() -> None:
    found = gcsolve.solve_problem(TIGHT, Own(lambda _: unanswered("wrong name", Status.TIME_LIMIT, solve_s=1.0)))
    assert (found.solver, found.status) == ("own", Status.TIME_LIMIT)


def _raises(_: gcsolve.Problem) -> Any:
    raise IndexError("list index out of range")


BAD_ANSWERS: dict[str, tuple[Callable[[gcsolve.Problem], Any], str]] = {
    "none": (lambda _: None, "answered with NoneType, not with a gcsolve.Solution; gcsolve.solver.base.judged"),
    "schedule": (lambda _: KEPT, "answered with Schedule, not with a gcsolve.Solution"),
    "raises": (_raises, r"raised IndexError at test_own_solver\.py:\d+: list index out of range"),
    "cut": (_with(lambda a: a[: len(a) // 2]), "cannot be run: .* never runs"),
    "empty": (_with(lambda a: ()), "cannot be run: .*n0.* never runs"),
    "list": (_with(list), "tuple of actions"),
    "text": (_with(lambda a: ("run", *a)), "action 0 is 'run', neither a Compute nor a Free"),
    "outside": (_with(lambda a: (*a, Compute(99))), "there is no node 99"),
    "negative": (_with(lambda a: (*a, Free(-1))), "there is no value -1"),
    "float": (_with(lambda a: (Compute(0.0), *a[1:])), r"action 0: there is no node 0\.0"),
    "bool": (_with(lambda a: (Compute(False), *a[1:])), "action 0: there is no node False"),
    "unread": (_with(lambda a: tuple(reversed(a))), "action 0: "),
    "no schedule": (lambda p: replace(_best(p), schedule=None), "status OPTIMAL and no schedule"),
    "status": (lambda p: replace(_best(p), status="optimal"), "status='optimal'"),
    "certificate": (
        lambda p: replace(_best(p), certificate="any schedule"),
        "certificate='any schedule'; .* one of ANY_SCHEDULE, ONE_RERUN, ASCENDING, OWN_CLASS, NO_BOUND",
    ),
    "max runs": (lambda p: replace(_best(p), max_runs=0), "max_runs=0 .* must be a whole number ≥ 1"),
    "nan bound": (lambda p: replace(_best(p), lower_bound=float("nan")), "lower_bound=nan"),
    "bound": (
        lambda p: replace(_best(p), lower_bound=0.9, certificate=Certificate.ANY_SCHEDULE),
        "lower_bound=0.9, and its own",
    ),
    "any bound": (lambda p: replace(_best(p), any_bound=2.0), "any_bound=2, and its own"),
    "least": (
        lambda p: unanswered("own", Status.INFEASIBLE, solve_s=0.0, least_bytes=p.budget_bytes),
        "least_bytes=20",
    ),
    "least node": (lambda _: unanswered("own", Status.INFEASIBLE, solve_s=0.0, least_node=99), "least_node=99"),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_a_bad_answer_names_the_solver_and_what_is_wrong(name: str) -> None:
    answer, text = BAD_ANSWERS[name]
    with pytest.raises(gcsolve.SolverError, match=text) as caught:
        gcsolve.solve_problem(TIGHT, Own(answer))
    assert "solver 'own' (Own)" in str(caught.value)


def test_an_honest_answer_passes_and_names_go_by_any_case() -> None:
    def honest(problem: gcsolve.Problem) -> Solution:
        return judged("own", problem, KEPT, solve_s=0.0, gap=0.0)

    assert gcsolve.solve_problem(TIGHT.with_budget(10**6), Own(honest)).status is Status.OPTIMAL
    assert gcsolve.solve_problem(TIGHT.with_budget(10**6), "STORE_ALL").solver == "store_all"


@pytest.mark.parametrize(
    ("solver", "text"),
    [
        (Own, r"solver=Own is a class; pass an instance, Own\(\)"),
        (Own(_best, name=""), "an object with a name and solve"),
        (Own(_best, name=3), "an object with a name and solve"),  # type: ignore[arg-type]
        (None, "solver=None"),
        ("magic", "known solvers: auto"),
    ],
)
def test_what_is_no_solver(solver: Any, text: str) -> None:
    with pytest.raises(gcsolve.ArgumentError, match=text):
        gcsolve.solve_problem(TIGHT, solver)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"problem": None}, "problem is of type NoneType, not a gcsolve.Problem; Problem.from_arrays"),
        ({"time_limit_s": "a"}, "time_limit_s='a' must be a finite number"),
        ({"time_limit_s": True}, "time_limit_s=True must be"),
        ({"gap": "x"}, "gap='x' must be"),
        ({"gap": None}, "gap=None must be"),
    ],
)
def test_bad_arguments_name_themselves(given: dict[str, Any], text: str) -> None:
    with pytest.raises(gcsolve.ArgumentError, match=text):
        gcsolve.solve_problem(**{"problem": TIGHT, **given})
