"""Ruin and repair: never dearer, always valid and within the budget, and worth its time."""

from __future__ import annotations

import math

import pytest

from gcsolve.problem import Problem
from gcsolve.schedule import schedule_from_order
from gcsolve.solver import retention
from gcsolve.solver.brute_force import BruteForce
from gcsolve.solver.greedy import greedy_order
from gcsolve.solver.search.order_replay import OrderReplay, OrderRun
from gcsolve.solver.search.ruin_recreate import rebuilt
from tests.oracles import slow_simulate
from tests.test_methods import random_problem


def test_the_greedy_s_plans_come_nearer_to_the_optimum():
    dearer_before = dearer_after = 0
    for seed in range(150):
        problem = random_problem(seed)
        run = greedy_order(problem, deadline=math.inf)
        if run.peak_bytes > problem.budget_bytes or not run.rerun_cost:
            continue
        again = rebuilt(OrderReplay(problem), run, deadline=math.inf)
        peak, cost = slow_simulate(problem, schedule_from_order(problem.graph, again.order).as_tuples())
        assert peak == again.peak_bytes <= problem.budget_bytes
        assert cost - problem.total_cost == pytest.approx(again.rerun_cost)
        optimum = BruteForce().solve(problem, gap=0.0).overhead * problem.total_cost
        assert optimum - 1e-9 <= again.rerun_cost <= run.rerun_cost
        dearer_before += run.rerun_cost > optimum + 1e-9
        dearer_after += again.rerun_cost > optimum + 1e-9
    assert dearer_before > 0
    assert dearer_after <= dearer_before / 2


def two_segments() -> tuple[OrderReplay, list[int]]:
    """A chain of 8 values for its own backward, in room for 6, and a plan that makes more again than it must."""
    forward = [(i, i + 1) for i in range(7)]
    backward = [(i, i + 1) for i in range(7, 15)] + [(i, 15 - i) for i in range(8)]
    problem = Problem.from_arrays([1] * 16, [1] * 16, forward + backward, 8, budget_bytes=6)
    order = list(range(8))
    for t in range(8, 16):
        order += [*range(1, 15 - t + 1), t]
    return OrderReplay(problem), order


def test_it_stops_at_what_is_enough_and_at_the_deadline_and_repeats_itself():
    replay, order = two_segments()
    run = replay.run(order)
    assert run.peak_bytes <= 6
    better = rebuilt(replay, run, deadline=math.inf)
    assert better.rerun_cost < run.rerun_cost
    assert rebuilt(replay, run, deadline=math.inf).order == better.order
    assert rebuilt(replay, run, deadline=-math.inf) is run
    assert rebuilt(replay, run, deadline=math.inf, enough=run.rerun_cost) is run
    assert rebuilt(replay, run, deadline=math.inf, patience=0.0) is run


def test_a_plan_near_what_is_proven_is_not_searched_for_patiently(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[float, float]] = []

    def looked(replay: OrderReplay, run: OrderRun, *, patience: float = 1.0, **_: float) -> OrderRun:
        asked.append((run.rerun_cost / replay.problem.total_cost, patience))
        return run

    monkeypatch.setattr(retention, "rebuilt", looked)
    for seed in range(1, 60, 2):  # without a backward nothing is proven before
        retention.Retention(find_least=False).solve(random_problem(seed), gap=0.0)
    assert {patience for overhead, patience in asked if overhead < retention.FAR} == {retention.FIRST_PATIENCE}
    assert {patience for overhead, patience in asked if overhead >= retention.FAR} == {1.0}
