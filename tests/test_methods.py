"""The field's methods against each other and against brute force; what is special to one of them."""

from __future__ import annotations

import random
import time
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gcsolve.problem import Problem
from gcsolve.schedule import schedule_from_order
from gcsolve.simulate import simulate
from gcsolve.solver.base import Certificate, Solution, Status
from gcsolve.solver.brute_force import BruteForce
from gcsolve.solver.checkmate import Checkmate
from gcsolve.solver.front import solve_problem
from gcsolve.solver.greedy import Greedy
from gcsolve.solver.knapsack import Knapsack, fill
from gcsolve.solver.moccasin import Moccasin
from gcsolve.solver.revolve import Revolve, forward_steps, revolve_steps, split
from gcsolve.solver.rotor import Rotor
from gcsolve.solver.search.chain import chain_of, order_of
from gcsolve.solver.search.order_replay import OrderReplay
from tests.graphs import Known, diamond, known, layered, training_chain, unit_chain
from tests.oracles import best_cost
from tests.strategies import orders, problems
from tests.test_solvers import FITS, QUICK, check, store_all_peak


def random_problem(seed: int, most: int = 9) -> Problem:
    """A random DAG of up to `most` nodes; even seeds: training-shaped; odd: any node may be rerun. The budget lies between
    the least that any schedule needs (at times one byte below) and the store-all peak, more often low than high."""
    rng = random.Random(seed)
    n = rng.randint(5, most)
    edges = {(u, v) for v in range(1, n) for u in rng.sample(range(v), min(v, rng.randint(1, 3)))}
    edges |= {(v - 1, v) for v in range(1, n) if rng.random() < 0.7}
    start = None
    if seed % 2 == 0:
        start = (n + 1) // 2
        edges |= {(max(0, start - 1 - k), start + k) for k in range(n - start)}
    sizes, costs = [rng.randint(1, 9) for _ in range(n)], [rng.randint(0, 9) for _ in range(n)]
    problem = Problem.from_arrays(costs, sizes, edges, start, budget_bytes=0)
    least = BruteForce().solve(problem).least_bytes or 0
    room = store_all_peak(problem) - least
    return problem.with_budget(least - 1 if rng.random() < 0.1 else least + round(room * rng.random() ** 2))


def extra(problem: Problem, cost: float) -> float:
    """Overhead of a schedule of that cost."""
    return (cost - problem.total_cost) / (problem.total_cost or 1.0)


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


# --- revolve ---------------------------------------------------------------------------------------------------------


@cache
def steps_needed(steps: int, slots: int) -> float:
    """Griewank and Walther's recursion, written down."""
    if steps <= 1:
        return 0
    if slots == 0:
        return float("inf")
    return min(p + steps_needed(steps - p, slots - 1) + steps_needed(p, slots) for p in range(1, steps))


def forward_runs(problem: Problem, order: tuple[int, ...] | list[int]) -> int:
    return sum(i < problem.graph.backward_start for i in order)


def test_revolve_meets_the_binomial_counts():
    for steps in range(1, 129):
        problem = unit_chain(steps, 1)
        chain, replay = chain_of(problem.graph), OrderReplay(problem)
        assert len(chain.segments) == steps
        for slots in range(1, 13):
            least = steps_needed(steps, slots)
            assert forward_steps(steps, slots) == least
            if steps > 1:
                p = split(steps, slots)
                assert p + steps_needed(steps - p, slots - 1) + steps_needed(p, slots) == least
            order = order_of(chain, revolve_steps(steps, slots))
            assert replay.run(order).peak_bytes <= unit_chain(1, slots).budget_bytes
            assert forward_runs(problem, order) == least


@pytest.mark.parametrize(
    ("steps", "slots", "runs"), [(10, 2, 20), (32, 4, 75), (64, 8, 137), (100, 10, 222), (128, 12, 279), (128, 1, 8128)]
)
def test_revolve_finds_the_checkpoints_that_fit(steps: int, slots: int, runs: int):
    problem = unit_chain(steps, slots)
    for solver in (Revolve(), Revolve(slots=slots)):
        solution = solver.solve(problem)
        check(problem, solution)
        assert solution.status in FITS
        assert forward_runs(problem, solution.schedule.order()) == runs


@pytest.mark.parametrize(("steps", "slots"), [(4, 1), (4, 2), (5, 2), (6, 2), (6, 3), (7, 2)])
def test_no_schedule_beats_revolve_on_unit_chains(steps: int, slots: int):
    assert best_cost(unit_chain(steps, slots)) == steps_needed(steps, slots)


def test_revolve_on_other_graphs():
    assert Revolve().solve(diamond(14)).overhead == 0.0
    whole = Problem.from_arrays([1] * 4, [4, 1, 4, 1], [(0, 1), (1, 2), (2, 3), (0, 3)], budget_bytes=8)
    solution = Revolve().solve(whole)  # no backward: all that is left is to keep everything
    assert solution.status is Status.OVER_BUDGET
    assert solution.schedule.order() == (0, 1, 2, 3)
    blocks = layered(8, 0)
    solution = Revolve().solve(blocks.with_budget(round(0.5 * store_all_peak(blocks))))
    check(blocks.with_budget(round(0.5 * store_all_peak(blocks))), solution)
    assert solution.status in FITS


# --- brute force -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_brute_force_is_the_other_brute_force(seed: int):
    problem = random_problem(seed, most=7)
    best, solution = best_cost(problem), BruteForce().solve(problem, gap=0.0)
    check(problem, solution)
    if best is None:
        assert solution.status is Status.INFEASIBLE
        assert solution.least_bytes is not None
        assert solution.least_bytes > problem.budget_bytes
        assert best_cost(problem.with_budget(solution.least_bytes)) is not None
        assert best_cost(problem.with_budget(solution.least_bytes - 1)) is None
    else:
        assert solution.status is Status.OPTIMAL
        assert solution.overhead == pytest.approx(extra(problem, best))
        assert solution.certificate is Certificate.ANY_SCHEDULE


@settings(max_examples=40, deadline=None)
@given(problems(max_forward=4, max_backward=3))
def test_brute_force_knows_pins_workspace_and_single_runs(problem: Problem):
    if len(problem.graph.values) > 9:
        return
    best, solution = best_cost(problem), BruteForce().solve(problem, gap=0.0)
    check(problem, solution)
    assert (solution.status is Status.INFEASIBLE) == (best is None)
    if best is not None:
        assert solution.overhead == pytest.approx(extra(problem, best))


def test_brute_force_refuses_what_is_too_large():
    solution = solve_problem(training_chain(20, 50), "brute_force")
    assert solution.status is Status.UNSUITED
    assert "large" in solution.status.value
    assert solution.schedule is None


def test_brute_force_with_fewer_runs_is_never_cheaper():
    problem = training_chain(4, 9)
    free = BruteForce().solve(problem, gap=0.0)
    assert free.overhead == pytest.approx(3 / 8)
    assert BruteForce(most_runs=4).solve(problem, gap=0.0).overhead == free.overhead
    assert BruteForce(most_runs=2).solve(problem, gap=0.0).status is Status.INFEASIBLE


def test_a_certificate_and_a_limit_on_runs_say_in_words_what_a_bound_holds_for():
    problem = training_chain(4, 9)
    for settings_, text in (
        ({}, "any schedule in this op order, however often it recomputes"),
        ({"most_runs": 4}, "however often it recomputes, and runs no node more than 4 times in all"),
        ({"ascending": True, "most_runs": 4}, "at most once, in order, and runs no node more than 4 times in all"),
    ):
        solution = BruteForce(**settings_).solve(problem, gap=0.0)
        assert solution.bound_class.endswith(text)
        assert solution.bound_class.startswith(str(solution.certificate))
        assert solution.max_runs == settings_.get("most_runs")
        assert (solution.any_bound > 0) == (not settings_)
    assert str(Certificate.NO_BOUND) == f"{Certificate.NO_BOUND}" == Certificate.NO_BOUND.value


# --- checkmate -------------------------------------------------------------------------------------------------------

RANDOM = range(300)


def agree(problem: Problem, exact: Solution, solution: Solution, outside: bool = False) -> None:
    """`solution` found what `exact` says is the optimum of its class, or (`outside`) a plan of no class where that is
    empty."""
    check(problem, solution)
    if exact.status is Status.INFEASIBLE:
        if not outside:
            assert solution.status is Status.INFEASIBLE
            return
        free = BruteForce().solve(problem, gap=0.0)
        if free.status is Status.INFEASIBLE:
            assert solution.status is Status.INFEASIBLE
        elif solution.schedule is not None:
            assert solution.overhead >= free.overhead - 1e-9
        return
    assert solution.status is Status.OPTIMAL
    assert solution.overhead == pytest.approx(exact.overhead, abs=1e-9)
    assert solution.lower_bound == pytest.approx(exact.overhead, abs=1e-9)


@pytest.mark.parametrize("tens", range(len(RANDOM) // 10))
def test_checkmate_is_brute_force(tens: int):
    for seed in RANDOM[10 * tens : 10 * tens + 10]:
        problem = random_problem(seed)
        agree(problem, BruteForce(ascending=True).solve(problem, gap=0.0), Checkmate().solve(problem, gap=0.0), True)


@settings(max_examples=60, deadline=None)
@given(problems(max_forward=5, max_backward=4))
def test_checkmate_knows_pins_workspace_and_single_runs(problem: Problem):
    if len(problem.graph.values) > 10:
        return
    agree(problem, BruteForce(ascending=True).solve(problem, gap=0.0), Checkmate().solve(problem, gap=0.0), True)


@pytest.mark.parametrize("case", known(), ids=lambda case: case.name)
def test_checkmate_on_every_known_graph(case: Known):
    solution = Checkmate().solve(case.problem, gap=0.0)
    if case.any_cost is None:
        assert solution.status is Status.INFEASIBLE
    else:
        assert solution.status is Status.OPTIMAL
        assert solution.overhead == pytest.approx(extra(case.problem, case.any_cost))


def test_more_sweeps_reach_what_one_cannot():
    tight = random_problem(65)  # with no byte to spare, its reruns must go out of the ops' order
    assert BruteForce(ascending=True).solve(tight, gap=0.0).status is Status.INFEASIBLE
    best = BruteForce().solve(tight, gap=0.0)
    assert Checkmate(sweeps=2).solve(tight, gap=0.0).overhead == pytest.approx(best.overhead)


@pytest.mark.parametrize(("steps", "slots"), [(5, 2), (8, 2), (9, 2), (9, 3)])
def test_checkmate_agrees_with_revolve_on_unit_chains(steps: int, slots: int):
    problem = unit_chain(steps, slots)
    solution = Checkmate().solve(problem, gap=0.0)
    assert solution.status is Status.OPTIMAL
    assert forward_runs(problem, solution.schedule.order()) == steps_needed(steps, slots)


def test_checkmate_out_of_time_says_so():
    problem = training_chain(40, 0, size=16)
    problem = problem.with_budget(round(0.3 * store_all_peak(problem)))
    started = time.perf_counter()
    solution = Checkmate().solve(problem, time_limit_s=2.0, gap=0.0)
    assert time.perf_counter() - started < 3.5
    check(problem, solution)
    assert solution.status in (Status.FEASIBLE, Status.OPTIMAL, Status.TIME_LIMIT)
    assert Checkmate(most_nodes=10).solve(problem).status is Status.UNSUITED


# --- rotor -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("budget", "cost"), [(25, 12), (24, 13), (13, 15), (9, 22)])
def test_rotor_is_optimal_on_the_chain_of_the_known_graphs(budget: int, cost: int):
    solution = Rotor().solve(training_chain(6, budget))
    assert solution.status in FITS
    assert solution.overhead == pytest.approx(cost / 12 - 1)


def test_rotor_weighs_unequal_segments():
    # a dear small value and a cheap large one; only one of the two need go
    edges = [(0, 1), (1, 2), (2, 3), (2, 4), (3, 4), (1, 5), (4, 5), (0, 6), (5, 6)]
    problem = Problem.from_arrays([9, 1, 1, 1, 1, 1, 1], [2, 8, 2, 2, 1, 1, 1], edges, 3, budget_bytes=13)
    solution = Rotor().solve(problem)
    check(problem, solution)
    assert solution.overhead == pytest.approx(BruteForce().solve(problem, gap=0.0).overhead)


@pytest.mark.parametrize("share", [0.8, 0.5, 0.35])
def test_rotor_beats_equal_segments_on_repeated_blocks(share: float):
    problem = layered(8, 0)
    problem = problem.with_budget(round(share * store_all_peak(problem)))
    solution = Rotor().solve(problem)
    check(problem, solution)
    assert solution.status in FITS
    assert solution.overhead <= solve_problem(problem, "uniform").overhead


def test_rotor_merges_segments_of_long_chains():
    problem = training_chain(400, 0, size=16)
    problem = problem.with_budget(round(0.3 * store_all_peak(problem)))
    solution = Rotor().solve(problem, time_limit_s=10)
    check(problem, solution)
    assert solution.status in FITS


def test_a_chain_keeps_what_another_segment_reads():
    # f0 -> f1 -> f2; the backward of f2 also reads f0, past the cut after f1
    edges = [(0, 1), (1, 2), (0, 3), (2, 3), (1, 4), (3, 4)]
    chain = chain_of(Problem.from_arrays([1] * 5, [4] * 5, edges, 3, budget_bytes=0).graph)
    assert [s.nodes for s in chain.segments] == [(0,), (1,), (2,), ()]
    assert [s.backward for s in chain.segments] == [(), (), (3, 4), ()]
    assert 0 in chain.always
    assert chain.segments[2].tape == (2,)


# --- knapsack --------------------------------------------------------------------------------------------------------


def test_knapsack_saves_what_is_dearest_for_its_bytes():
    problem = training_chain(6, 13)  # six values of 4 bytes, as dear as each other: half of the peak is half of them
    assert Knapsack(share=0.5).solve(problem).overhead == pytest.approx(3 / 12)
    assert Knapsack(share=1.0).solve(problem).overhead == 0.0
    uneven = Problem(problem.graph, (1, 5, 1, 5, 1, 5, *[1] * 6), 13)
    runs = Knapsack(share=0.5).solve(uneven).schedule.runs(problem.graph)
    assert runs[:6] == (2, 1, 2, 1, 2, 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=7), st.integers(0, 30))
def test_the_knapsack_is_the_best_of_all_subsets(items: list[tuple[int, int]], capacity: int):
    sizes, gains = [size for size, _ in items], [float(gain) for _, gain in items]
    chosen = fill(sizes, gains, capacity)
    assert sum(sizes[k] for k in chosen) <= capacity
    subsets = [[k for k in range(len(items)) if bits >> k & 1] for bits in range(1 << len(items))]
    best = max(sum(gains[k] for k in s) for s in subsets if sum(sizes[k] for k in s) <= capacity)
    assert sum(gains[k] for k in chosen) == best


def test_knapsack_counts_no_peak():
    over = Knapsack().solve(training_chain(8, 12))
    assert over.status is Status.OVER_BUDGET
    assert over.peak_bytes > 12


# --- moccasin --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tens", range(len(RANDOM) // 10))
def test_moccasin_is_brute_force_with_so_many_runs(tens: int):
    for seed in RANDOM[10 * tens : 10 * tens + 10]:
        problem, runs = random_problem(seed), 3 if seed % 5 == 0 else 2
        exact = BruteForce(ascending=True, most_runs=runs).solve(problem, gap=0.0)
        agree(problem, exact, Moccasin(intervals=runs).solve(problem, gap=0.0))


@settings(max_examples=50, deadline=None)
@given(problems(max_forward=4, max_backward=4))
def test_moccasin_knows_pins_workspace_and_single_runs(problem: Problem):
    if len(problem.graph.values) > 9:
        return
    exact = BruteForce(ascending=True, most_runs=2).solve(problem, gap=0.0)
    agree(problem, exact, Moccasin().solve(problem, gap=0.0))


def test_more_intervals_reach_lower_budgets():
    problem = training_chain(6, 9)
    assert Moccasin(intervals=2).solve(problem).status is Status.INFEASIBLE
    solution = Moccasin(intervals=6).solve(problem, gap=0.0)
    assert solution.overhead == pytest.approx(10 / 12)


def test_moccasin_out_of_time_keeps_the_warm_start():
    problem = layered(12, 0)
    problem = problem.with_budget(round(0.5 * store_all_peak(problem)))
    started = time.perf_counter()
    solution = Moccasin().solve(problem, time_limit_s=1.0, gap=0.0)
    assert time.perf_counter() - started < 2.5
    check(problem, solution)
    assert solution.status in FITS
    assert solution.overhead <= Greedy().solve(problem).overhead + 1e-12
    assert Moccasin(most_nodes=10).solve(problem).status is Status.UNSUITED


# --- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tens", range(len(RANDOM) // 10))
def test_no_method_beats_brute_force(tens: int):
    for seed in RANDOM[10 * tens : 10 * tens + 10]:
        problem = random_problem(seed)
        best = BruteForce().solve(problem, gap=0.0)
        for name in QUICK:
            solution = solve_problem(problem, name, gap=0.0)
            check(problem, solution)
            if best.status is Status.INFEASIBLE:
                assert solution.status not in FITS
                continue
            assert solution.any_bound <= best.overhead + 1e-9
            if solution.certificate is Certificate.ANY_SCHEDULE:
                assert solution.lower_bound <= best.overhead + 1e-9
            if solution.status in FITS:
                assert solution.overhead >= best.overhead - 1e-9
