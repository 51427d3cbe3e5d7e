"""Lesson: every registered solver on every reference graph; no method's own word is trusted."""

from __future__ import annotations

import importlib
import math
import os
import pkgutil
import subprocess
import sys

import pytest
from hypothesis import given, settings

import gcsolve.solver
from gcsolve.errors import ArgumentError
from gcsolve.problem import Problem
from gcsolve.schedule import schedule_from_order
from gcsolve.simulate import simulate
from gcsolve.solver import auto as auto_solver
from gcsolve.solver.base import Solution, Solver, Status
from gcsolve.solver.blocks import block_of, twins
from gcsolve.solver.chen import Chen, chen_kept
from gcsolve.solver.front import solve_problem
from gcsolve.solver.registry import SOLVERS, get_solver, solvers
from gcsolve.solver.uniform import Uniform, uniform_kept
from tests.graphs import Known, known, layered, training_chain
from tests.oracles import best_cost, best_kept_cost, slow_simulate
from tests.strategies import problems

FITS = (Status.OPTIMAL, Status.FEASIBLE)
ONCE = ("store_all", "uniform", "uniform_sqrt", "blocks", "chen", "knapsack")
"""Methods that rerun a value at most once; the others may go below what these reach. `test_methods.py` has more."""
CHEAP = tuple(solver.name for solver in auto_solver.CHEAP)
QUICK = tuple(name for name in solvers() if name not in ("checkmate", "moccasin", "brute_force"))


def check(problem: Problem, solution: Solution) -> None:
    """What holds for every answer of every solver."""
    assert solution.solve_s >= 0
    assert solution.any_bound >= 0
    if solution.schedule is None:
        assert solution.status in (Status.INFEASIBLE, Status.TIME_LIMIT, Status.UNSUITED)
        assert solution.overhead == math.inf  # never the least of several
        return
    peak, cost = slow_simulate(problem, solution.schedule.as_tuples())
    assert solution.peak_bytes == peak
    assert (solution.status in FITS) == (peak <= problem.budget_bytes)
    assert solution.overhead == pytest.approx((cost - problem.total_cost) / (problem.total_cost or 1.0))
    if solution.status in FITS:  # a plan over the budget may be cheaper than any that fits
        assert solution.lower_bound <= solution.overhead
        assert solution.any_bound <= solution.overhead
    assert 0 <= solution.gap <= 1
    if solution.status is Status.OVER_BUDGET:
        assert solution.least_bytes == peak
        assert solution.least_node is not None


def store_all_peak(problem: Problem) -> int:
    return simulate(problem, schedule_from_order(problem.graph, range(len(problem.graph.nodes)))).peak_bytes


@pytest.mark.parametrize("case", known(), ids=lambda case: case.name)
def test_the_known_answers_are_what_brute_force_finds(case: Known):
    assert best_kept_cost(case.problem) == case.kept_cost
    assert best_cost(case.problem) == case.any_cost


@pytest.mark.parametrize("case", known(), ids=lambda case: case.name)
@pytest.mark.parametrize("name", solvers())
def test_every_solver_on_every_known_graph(name: str, case: Known):
    problem = case.problem
    solution = solve_problem(problem, name, gap=0.0)
    assert solution.solver == name
    check(problem, solution)
    if case.any_cost is None:
        assert solution.status not in FITS
        return
    assert solution.any_bound <= case.any_cost / problem.total_cost - 1 + 1e-9
    least = case.kept_cost if name in ONCE else case.any_cost
    if least is None:
        assert solution.status not in FITS
    elif solution.status in FITS:
        assert solution.overhead >= least / problem.total_cost - 1 - 1e-9
    if name in ("retention", "auto"):
        assert solution.overhead == pytest.approx(case.any_cost / problem.total_cost - 1)
        assert solution.status is Status.OPTIMAL


@pytest.mark.parametrize("name", solvers())
def test_the_repr_of_an_answer_is_one_short_line(name: str):
    for budget in (25, 18, 8):
        solution = solve_problem(training_chain(6, budget), name, gap=0.0)
        assert repr(solution).startswith(f"<Solution of {name}: {solution.status.name}, ")
        assert "\n" not in repr(solution)
        assert len(repr(solution)) < 160
    best = solve_problem(training_chain(6, 24), "brute_force", gap=0.0)
    assert repr(best) == (
        "<Solution of brute_force: OPTIMAL, overhead 8.33%, peak 22 B, bound 8.33% (ANY_SCHEDULE), gap 0.00%, 13 computes>"
    )
    none = solve_problem(training_chain(6, 8), "brute_force")
    assert repr(none) == "<Solution of brute_force: INFEASIBLE, no schedule, least budget found 9 B>"


@pytest.mark.parametrize("share", [0.9, 0.6, 0.4])
@pytest.mark.parametrize("name", solvers())
def test_every_solver_on_repeated_blocks(name: str, share: float):
    problem = layered(6, 0)
    problem = problem.with_budget(round(share * store_all_peak(problem)))
    solution = solve_problem(problem, name, time_limit_s=60.0 if name in QUICK else 3.0)
    check(problem, solution)
    auto = solve_problem(problem)
    assert auto.status in FITS
    if solution.status in FITS:
        room = 0.0 if name in CHEAP else 0.005 * (1 + auto.overhead)  # what auto may leave to be found
        assert auto.overhead <= solution.overhead + room + 1e-12


@settings(max_examples=60, deadline=None)
@given(problems(max_forward=7, max_backward=6))
def test_every_solver_on_random_graphs(problem: Problem):
    answers = {name: solve_problem(problem, name, gap=0.0) for name in QUICK}
    for solution in answers.values():
        check(problem, solution)
    fitting = [s.overhead for name, s in answers.items() if s.status in FITS]
    if fitting:
        assert answers["auto"].status in FITS
        assert answers["auto"].overhead <= min(fitting) + 1e-12


def test_every_solver_file_is_registered():
    found = set()
    for module in pkgutil.iter_modules(gcsolve.solver.__path__, "gcsolve.solver."):
        for thing in vars(importlib.import_module(module.name)).values():
            if isinstance(thing, type) and thing is not Solver and hasattr(thing, "solve") and hasattr(thing, "name"):
                found.add(thing)
    assert found == {type(s) for s in SOLVERS.values()}
    assert all(name == s.name and isinstance(s, Solver) for name, s in SOLVERS.items())
    assert solvers()[0] == "auto"


def test_an_unknown_solver_is_refused_with_the_known_ones():
    with pytest.raises(ArgumentError, match=r"'nope'.*auto.*retention.*store_all"):
        get_solver("nope")
    with pytest.raises(ArgumentError, match="neither"):
        get_solver(3)  # type: ignore[arg-type]
    assert get_solver(Uniform(k=2)) == Uniform(k=2)


@pytest.mark.parametrize(
    "bad", [{"gap": -0.1}, {"gap": float("nan")}, {"time_limit_s": -1}, {"time_limit_s": float("inf")}]
)
def test_bad_limits_are_refused(bad):
    with pytest.raises(ArgumentError, match=next(iter(bad))):
        solve_problem(training_chain(2, 99), **bad)


def test_uniform_keeps_boundaries_and_the_last_segment():
    graph = training_chain(6, 99).graph
    assert uniform_kept(graph, 1) >= set(range(6))
    assert uniform_kept(graph, 3) == {1, 3, 4, 5}
    assert solve_problem(training_chain(6, 99), Uniform(k=3)).overhead == pytest.approx(2 / 12)
    assert solve_problem(training_chain(6, 99), Uniform()).overhead == 0.0


def test_chen_closes_a_segment_when_it_is_over_the_threshold():
    graph = training_chain(6, 99).graph  # values of 4 bytes
    assert chen_kept(graph, 7) == {1, 3, 4, 5}
    assert chen_kept(graph, 100) == set(range(6))
    assert solve_problem(training_chain(6, 99), Chen(threshold_bytes=7)).overhead == pytest.approx(2 / 12)


def test_blocks_are_outermost_list_entries_that_repeat():
    problem = layered(3, 10**6)
    block = block_of(problem.graph)
    assert block == [-1, 0, 0, 0, 1, 1, 1, 2, 2, 2, -1]
    solution = solve_problem(problem, "blocks")
    rerun = [
        n.name for n, runs in zip(problem.graph.nodes, solution.schedule.runs(problem.graph), strict=True) if runs > 1
    ]
    assert rerun == ["wide_0", "act_0", "wide_1", "act_1", "wide_2", "act_2"]
    assert block_of(layered(1, 0).graph) == [-1] * 5  # one entry is no list


def test_twins_stand_at_the_same_place_of_their_blocks():
    graph = layered(4, 0).graph
    name = [v.name for v in graph.values]
    same = twins(graph)
    assert {name[v] for v, first in same.items() if name[first] == "wide_0.1"} == {f"wide_{b}.1" for b in range(4)}
    halves = twins(graph, groups=2)
    assert {name[v] for v, first in halves.items() if name[first] == "act_2.0"} == {"act_2.0", "act_3.0"}


def test_importing_the_registry_loads_no_back_end():
    code = (
        "import sys, gcsolve.solver.registry, gcsolve.solver.minimum; "
        "print([m for m in ('ortools', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


PLAN = """
from gcsolve.solver.front import solve_problem
from tests.graphs import layered
from tests.test_methods import random_problem
problems = [layered(6, 2350), *(random_problem(seed) for seed in range(20))]
orders = [s.schedule and s.schedule.order() for s in map(solve_problem, problems)]
print(*orders)
"""


def test_the_same_plan_under_every_hash_seed():
    def started(seed: int) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.Popen([sys.executable, "-c", PLAN], stdout=subprocess.PIPE, text=True, env=environment)

    plans = []
    for first in range(0, 8, 2):
        plans += [process.communicate()[0] for process in [started(first), started(first + 1)]]
    assert len(set(plans)) == 1
    assert plans[0].startswith("(0, 1, 2")
