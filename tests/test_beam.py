"""The beam backwards over the order, and the floor that every schedule's peak has."""

from __future__ import annotations

import math

import pytest

from gcsolve.problem import Problem
from gcsolve.schedule import schedule_from_order
from gcsolve.solver.base import Status
from gcsolve.solver.brute_force import BruteForce
from gcsolve.solver.floor import peak_floor
from gcsolve.solver.search.beam import beam_order
from gcsolve.solver.search.bitsets import bits, members
from tests.oracles import slow_simulate
from tests.test_methods import random_problem


def test_beam_finds_a_plan_wherever_there_is_one_and_nearly_always_the_best():
    there = best = 0
    for seed in range(100):
        problem = random_problem(seed)
        optimum = BruteForce().solve(problem, gap=0.0)
        order = beam_order(problem, deadline=math.inf)
        assert (order is None) == (optimum.status is Status.INFEASIBLE)
        if order is None:
            continue
        peak, cost = slow_simulate(problem, schedule_from_order(problem.graph, order).as_tuples())
        overhead = cost / problem.total_cost - 1.0
        assert peak <= problem.budget_bytes
        assert overhead >= optimum.overhead - 1e-9
        there += 1
        best += overhead <= optimum.overhead + 1e-9
    assert best >= 0.95 * there > 0


def test_two_ways_to_one_state_may_cost_the_same_but_for_rounding():
    edges = [(1, 3), (3, 4), (2, 5), (1, 6), (3, 6), (4, 6), (5, 6), (0, 7), (2, 7), (3, 7), (0, 8), (4, 8), (7, 8)]
    costs = [0.1, 0.2, 0.7, 0.2, 0.2, 0.2, 0.1, 0.3, 0.2]
    problem = Problem.from_arrays(costs, [1] * 9, edges, budget_bytes=5)
    order = beam_order(problem, deadline=math.inf)
    assert order is not None
    peak, _ = slow_simulate(problem, schedule_from_order(problem.graph, order).as_tuples())
    assert peak <= 5


@pytest.mark.parametrize("seed", range(60))
def test_nothing_fits_below_the_floor(seed: int):
    problem = random_problem(seed)
    floor, _ = peak_floor(problem)
    assert BruteForce().solve(problem.with_budget(floor - 1), gap=0.0).status is Status.INFEASIBLE


def two_made_from_much() -> Problem:
    """Node 4 reads 6 + 6 bytes, and each of these is made from 5: whichever comes last, 6 + 6 + 5 are live."""
    return Problem.from_arrays(
        cost=[1.0] * 5, bytes=[5, 6, 5, 6, 1], edges=[(0, 1), (2, 3), (1, 4), (3, 4)], budget_bytes=17
    )


def test_the_floor_looks_behind_a_node_s_inputs():
    problem = two_made_from_much()
    assert peak_floor(problem) == (17, 4)  # node 4 itself takes 13
    assert BruteForce().solve(problem, gap=0.0).status is Status.OPTIMAL


def test_sets_as_bits():
    assert list(members(bits([70, 3, 3, 0]))) == [0, 3, 70]
