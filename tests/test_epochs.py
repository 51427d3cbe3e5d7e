"""Retention with epochs: any number of reruns, against brute force; orders made to fit."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gcsolve.graph import Graph, Node, Value
from gcsolve.problem import Problem
from gcsolve.schedule import schedule_from_order
from gcsolve.simulate import simulate
from gcsolve.solver.base import Certificate, Status
from gcsolve.solver.brute_force import BruteForce
from gcsolve.solver.milp import epochs as _epochs
from gcsolve.solver.milp.epoch_search import EpochSearch
from gcsolve.solver.milp.epochs import EpochProgram, OutOfTime
from gcsolve.solver.minimum import least_budget
from gcsolve.solver.retention import Retention
from gcsolve.solver.search.order_repair import mended
from gcsolve.solver.search.order_replay import OrderReplay
from tests.strategies import orders, problems
from tests.test_methods import check, random_problem


def assert_is_brute_force(problem: Problem) -> None:
    """Never above the optimum of the ascending class, never below that of all schedules; proofs are true."""
    ascending = BruteForce(ascending=True).solve(problem, gap=0.0)
    free = BruteForce().solve(problem, gap=0.0)
    solution = Retention(find_least=False).solve(problem, gap=0.0)
    check(problem, solution)
    if solution.schedule is None:
        assert solution.status is Status.INFEASIBLE
        assert (free if solution.certificate is Certificate.ANY_SCHEDULE else ascending).status is Status.INFEASIBLE
        return
    assert solution.overhead >= free.overhead - 1e-9
    assert solution.any_bound <= free.overhead + 1e-6
    if ascending.status is not Status.INFEASIBLE:
        assert solution.status is Status.OPTIMAL
        assert solution.overhead <= ascending.overhead + 1e-9


@pytest.mark.parametrize("tens", range(30))
def test_retention_is_brute_force(tens: int):
    for seed in range(10 * tens, 10 * tens + 10):
        assert_is_brute_force(random_problem(seed))


@settings(max_examples=80, deadline=None)
@given(problems(max_forward=5, max_backward=4))
def test_retention_knows_pins_workspace_and_single_runs(problem: Problem):
    assume(len(problem.graph.values) <= 10)
    assert_is_brute_force(problem)


@settings(max_examples=60, deadline=None)
@given(problems(max_forward=5, max_backward=4), st.data())
def test_moments_alone_bound_every_schedule(problem: Problem, data: st.DataObject):
    """The program at any moments, without bursts, is feasible for the best schedule of all, and not above it."""
    assume(len(problem.graph.values) <= 10)
    nodes = range(len(problem.graph.nodes))
    moments = data.draw(st.sets(st.sampled_from(nodes), min_size=1))
    answer = EpochProgram(problem, moments).solve(time_limit_s=10, abs_gap=1e-9)
    free = BruteForce().solve(problem, gap=0.0)
    if free.status is not Status.INFEASIBLE:
        assert not answer.infeasible
        assert answer.bound <= free.overhead + 1e-6


@settings(max_examples=60, deadline=None)
@given(problems(max_forward=5, max_backward=5), st.data())
def test_a_plan_to_begin_with_is_a_solution_of_the_program(problem: Problem, data: st.DataObject):
    """Every order's own H and R keep every row at a budget of its own peak: the optimum is not above it."""
    order = data.draw(orders(problem))
    run = OrderReplay(problem).run(order)
    problem = problem.with_budget(run.peak_bytes)
    answer = EpochProgram(problem, range(len(problem.graph.nodes))).solve(time_limit_s=10, abs_gap=1e-9, begin=run)
    assert answer.order is not None
    assert answer.bound <= run.rerun_cost / (problem.total_cost or 1.0) + 1e-6


@settings(max_examples=60, deadline=None)
@given(problems(max_forward=8, max_backward=6), st.data())
def test_a_plan_postponed_and_passed_on_keeps_every_row(problem: Problem, data: st.DataObject):
    run = OrderReplay(problem).run(data.draw(orders(problem)))
    problem = problem.with_budget(run.peak_bytes)
    program = EpochProgram(problem, data.draw(st.sets(st.sampled_from(range(len(problem.graph.nodes))), min_size=1)))
    values = program._as_values(run)
    assert all(var.lower_bound <= x <= var.upper_bound for var, x in values.items())
    for row in program.model.linear_constraints():
        terms = ((row.get_coefficient(var), var) for var in program.model.row_nonzeros(row))
        total = sum(k * values[var] for k, var in terms)
        assert row.lower_bound - 1e-9 <= total <= row.upper_bound + 1e-9
    price = sum(values[r] * problem.cost[i] for again in program.R for i, r in again.items())
    assert price <= run.rerun_cost + 1e-9


def layered(draw: random.Random) -> Problem:
    """A chain with skips and the backward that mirrors it; most values are alike in size. Budget: between what the largest
    op takes and what storing everything does."""
    forward = draw.randint(4, 8)
    nodes: list[Node] = []
    values: list[Value] = []
    made: list[list[int]] = []
    for i in range(forward):
        inputs = set(draw.sample(made[-1], 1)) if made and draw.random() < 0.9 else set[int]()
        if made and draw.random() < 0.25:
            inputs.add(draw.choice(draw.choice(made)))
        made.append(list(range(len(values), len(values) + draw.choice([1, 1, 1, 2]))))
        values += [Value(f"v{v}", draw.choice([0, 1, 2, 2, 2, 3, 4]), i, draw.random() < 0.04) for v in made[-1]]
        once = draw.random() < 0.07
        nodes.append(Node(f"n{i}", tuple(inputs), tuple(made[-1]), draw.choice([0, 0, 0, 1, 3]), rerunnable=not once))
    for i in range(forward, 2 * forward):
        inputs = {made[-1][0]}
        if draw.random() < 0.7:
            inputs.add(draw.choice(made[2 * forward - 1 - i]))
        if draw.random() < 0.2:
            inputs.add(draw.choice(draw.choice(made[:forward])))
        made.append([len(values)])
        values.append(Value(f"v{len(values)}", draw.choice([0, 1, 2, 2]), i))
        nodes.append(Node(f"n{i}", tuple(inputs), tuple(made[-1]), draw.choice([0, 0, 1]), rerunnable=False))
    problem = Problem(Graph(tuple(nodes), tuple(values), forward), tuple(float(draw.randint(1, 9)) for _ in nodes), 0)
    stored = OrderReplay(problem).run(range(len(nodes))).peak_bytes
    own = (n.workspace_bytes + sum(values[v].size_bytes for v in {*n.inputs, *n.outputs}) for n in nodes)
    return problem.with_budget(draw.randint(min(max(own), stored - 1), stored - 1))


TELLING = (225, 247, 441, 456, 519, 657, 671, 684)
"""Each shows a condition of `lazy` or `passing` to be needed."""


@pytest.mark.parametrize("seeds", [range(40), range(40, 80), TELLING])
def test_what_need_not_be_looked_at_takes_nothing_from_the_optimum(
    seeds: Iterable[int], monkeypatch: pytest.MonkeyPatch
):
    """Without burst rows and with them (odd seeds): the optimum is that of the program that looks at everything."""
    bound = []
    for seed in seeds:
        draw = random.Random(seed)
        problem = layered(draw)
        nodes = range(len(problem.graph.nodes))
        moments = sorted(draw.sample(nodes, draw.randint(len(nodes) // 2, len(nodes))))
        bursts = [(t, i) for t in moments if seed % 2 and t - 1 in moments for i in range(t) if draw.random() < 0.6]
        reduced = EpochProgram(problem, moments, bursts).solve(time_limit_s=20, abs_gap=1e-7)
        with monkeypatch.context() as patch:
            patch.setattr(_epochs, "_lazy", lambda *_: {})
            patch.setattr(_epochs, "_passing", lambda *_: {})
            whole = EpochProgram(problem, moments, bursts).solve(time_limit_s=20, abs_gap=1e-7)
        assert reduced.infeasible == whole.infeasible
        assert reduced.bound == pytest.approx(whole.bound, abs=1e-6)
        bound.append(whole.bound)
    assert sum(b > 0 for b in bound) > len(bound) / 2


@settings(max_examples=40, deadline=None)
@given(problems(max_forward=4, max_backward=4))
def test_the_least_budget_of_any_schedule_is_between_its_bounds(problem: Problem):
    assume(len(problem.graph.values) <= 10)
    least = BruteForce().solve(problem.with_budget(0), gap=0.0).least_bytes or 0
    found = least_budget(problem)
    assert found.floor_bytes <= least <= found.bytes
    assert simulate(problem, found.schedule).peak_bytes <= found.bytes
    assert Retention().solve(problem.with_budget(found.bytes)).peak_bytes <= found.bytes
    assert found.bytes - least <= 1


@settings(max_examples=80, deadline=None)
@given(problems(max_forward=7, max_backward=6), st.data())
def test_mending_gives_a_valid_order_that_overflows_no_more(problem: Problem, data: st.DataObject):
    replay = OrderReplay(problem)
    begin = replay.run(data.draw(orders(problem)))
    run = mended(replay, begin, time.perf_counter() + 10)
    played = simulate(problem, schedule_from_order(problem.graph, run.order))
    assert played.peak_bytes == run.peak_bytes
    assert run.overflow(problem.budget_bytes) <= begin.overflow(problem.budget_bytes)


def test_more_than_one_rerun_where_it_is_the_only_way():
    """A chain of 10 ops in room for 4 values: with one rerun a value it does not fit."""
    forward = [(i, i + 1) for i in range(9)]
    backward = [(i, i + 1) for i in range(9, 19)] + [(i, 19 - i) for i in range(9)]
    chain = Problem.from_arrays([1] * 20, [1] * 20, forward + backward, 10, budget_bytes=4)
    assert Retention(epochs=False, find_least=False).solve(chain).schedule is None
    solution = Retention().solve(chain, time_limit_s=600, gap=0.0)
    check(chain, solution)
    assert solution.status is Status.OPTIMAL
    assert solution.schedule is not None
    assert max(solution.schedule.runs(chain.graph)) > 2


def test_building_stops_at_the_deadline():
    with pytest.raises(OutOfTime):
        EpochProgram(random_problem(0), [1, 2], deadline=-math.inf)
    search = EpochSearch(random_problem(0).with_budget(0), None, gap=0.0, deadline=-math.inf)
    search.run()
    assert (search.best, search.any_bound, search.infeasible) == (None, 0.0, False)


def test_a_search_whose_deadline_is_put_off_goes_on():
    """It finds what one long run finds."""
    rerun = 0
    for seed in range(40):
        problem = random_problem(seed)
        long, short = (EpochSearch(problem, None, gap=0.0, deadline=-math.inf) for _ in range(2))
        short.run()
        assert short.best is None
        for search in (long, short):
            search.deadline = time.perf_counter() + 600
            search.run()
        assert (short.infeasible, short.best is None) == (long.infeasible, long.best is None)
        if long.best is not None and short.best is not None:
            assert short.best.rerun_cost == pytest.approx(long.best.rerun_cost)
            rerun += short.best.rerun_cost > 0
    assert rerun > 5
