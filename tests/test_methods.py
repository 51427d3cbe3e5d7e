"""The field's methods against each other and against brute force; what is special to one of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gcsolve.problem import Problem
from gcsolve.schedule import schedule_from_order
from gcsolve.simulate import simulate
from gcsolve.solvers._orders import OrderReplay
from gcsolve.solvers.base import Status
from gcsolve.solvers.front import solve_problem
from gcsolve.solvers.greedy import Greedy
from tests.graphs import training_chain
from tests.oracles import slow_simulate
from tests.strategies import orders, problems
from tests.test_solvers import FITS, check, store_all_peak


@settings(max_examples=100, deadline=None)
@given(problems(max_forward=6, max_backward=5), st.data())
def test_the_quick_replay_of_an_order_is_the_simulator(problem: Problem, data: st.DataObject):
    order = data.draw(orders(problem))
    schedule = schedule_from_order(problem.graph, order)
    replay, run = simulate(problem, schedule), OrderReplay(problem).run(order)
    assert max(run.peak_bytes, problem.graph.external_bytes) == replay.peak_bytes
    assert abs(run.rerun_cost - (replay.cost - problem.total_cost)) < 1e-9


# --- greedy ----------------------------------------------------------------------------------------------------------


def test_greedy_drops_what_is_cheapest_for_its_bytes():
    # f0 -> f1 -> f2 -> f3, each read by the backward; f1 costs 1 for 6 bytes, f2 costs 5 for 6 bytes.
    edges = [(0, 1), (1, 2), (2, 3), (3, 4), (2, 5), (4, 5), (1, 6), (5, 6), (0, 7), (6, 7)]
    problem = Problem.from_arrays([2, 1, 5, 1, 1, 1, 1, 1], [6, 6, 6, 6, 1, 1, 1, 1], edges, 4, budget_bytes=19)
    solution = Greedy().solve(problem)
    assert solution.status is Status.FEASIBLE
    assert solution.schedule.runs(problem.graph) == (1, 2, 1, 1, 1, 1, 1, 1)


def test_greedy_goes_below_one_rerun_a_value():
    problem = training_chain(6, 9)  # of this budget's known answer: 22 = 12 + 10 reruns
    solution = Greedy().solve(problem)
    assert solution.status in FITS
    assert max(solution.schedule.runs(problem.graph)) > 2


def test_greedy_works_without_a_backward():
    edges = [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)]
    problem = Problem.from_arrays([1] * 5, [4, 1, 6, 1, 1], edges, budget_bytes=8)
    solution = Greedy().solve(problem)
    assert solution.status is Status.FEASIBLE
    assert solution.schedule.order() == (0, 1, 2, 3, 0, 4)


def test_greedy_takes_no_quadratic_time():
    problem = training_chain(1500, 0, size=16)
    problem = problem.with_budget(store_all_peak(problem) // 2)
    solution = Greedy().solve(problem)
    check(problem, solution)
    assert solution.status in FITS
    assert solution.solve_s < 8  # about one second on an idle machine
