"""The default solver against brute force: its optimum, its two bounds, its rows, its least peak."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gcsolve.graph import Graph, Node, Value
from gcsolve.problem import Problem
from gcsolve.schedule import order_from_kept, schedule_from_order
from gcsolve.simulate import simulate
from gcsolve.solver.base import Certificate, Solution, Status
from gcsolve.solver.floor import peak_floor
from gcsolve.solver.milp.highs import STRAY_FILTER
from gcsolve.solver.milp.one_rerun import Choices, Program
from gcsolve.solver.minimum import least_kept_budget
from gcsolve.solver.retention import Retention, _Bounds
from gcsolve.solver.search.kept_replay import NEVER, KeptReplay
from tests.graphs import known, layered, training_chain
from tests.oracles import best_cost, best_kept_cost, droppable, least_kept_peak, play_kept
from tests.strategies import problems

SMALL = 9  # values that can be dropped, for brute force


def overhead(problem: Problem, cost: float) -> float:
    return (cost - problem.total_cost) / (problem.total_cost or 1.0)


@settings(max_examples=150, deadline=None)
@given(problems())
def test_the_optimum_is_what_brute_force_finds(problem: Problem):
    assume(len(droppable(problem)) <= SMALL)
    best = best_kept_cost(problem)
    solution = Retention(epochs=False).solve(problem, gap=0.0, time_limit_s=5)
    if solution.schedule is not None and (best is None or solution.overhead < overhead(problem, best) - 1e-9):
        # the class has no node that is rerun for one output while another is kept; plans found on the way may
        runs = solution.schedule.runs(problem.graph)
        assert any(run > 1 and len(node.outputs) > 1 for run, node in zip(runs, problem.graph.nodes, strict=True))
        return
    if best is None:
        assert solution.status is Status.INFEASIBLE
        assert solution.least_bytes == least_kept_peak(problem) > problem.budget_bytes
        return
    assert solution.status is Status.OPTIMAL
    assert solution.overhead == pytest.approx(overhead(problem, best), abs=1e-9)
    assert solution.lower_bound == pytest.approx(solution.overhead, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(problems(max_forward=4, max_backward=4))
def test_no_schedule_beats_the_any_schedule_bound(problem: Problem):
    assume(len(problem.graph.values) <= 10)
    solution = Retention().solve(problem, gap=0.0, time_limit_s=5)
    best = best_cost(problem)
    if best is None:
        assert solution.status is Status.INFEASIBLE
    else:
        assert solution.status is not Status.INFEASIBLE or solution.certificate is not Certificate.ANY_SCHEDULE
        assert solution.any_bound <= overhead(problem, best) + 1e-9
        if solution.certificate is Certificate.ANY_SCHEDULE:
            assert solution.lower_bound <= overhead(problem, best) + 1e-9


@settings(max_examples=80, deadline=None)
@given(problems(max_forward=7, max_backward=6), st.data())
def test_the_quick_replay_is_the_simulator(problem: Problem, data: st.DataObject):
    kept = [v for v in range(len(problem.graph.values)) if data.draw(st.booleans())]
    run = KeptReplay(problem).run(kept)
    order = order_from_kept(problem.graph, kept)
    replay = simulate(problem, schedule_from_order(problem.graph, order))
    assert tuple(run.order) == order
    assert run.peak_bytes == replay.peak_bytes
    assert run.rerun_cost == pytest.approx(replay.cost - problem.total_cost, abs=1e-9)


def assert_rows_are_the_memory(problem: Problem, kept: set[int]) -> None:
    """With every row present and the kept set given, the program fits exactly at the replayed peak."""
    replay = KeptReplay(problem)
    run = replay.run(kept)
    choices = Choices(replay, 0)
    reruns = {i for i in range(problem.graph.backward_start) if run.rerun_at[i] < NEVER}
    for budget, fits in ((run.peak_bytes, True), (run.peak_bytes - 1, False)):
        program = Program(choices, budget)
        for node, before in run.moments(problem.graph.backward_start):
            program.add_instant(node, before)
        for c in choices.choices.values():
            needed = c.first_native < NEVER or any(j in reruns for j in c.rerun_readers)
            if c.fixed is None and not c.once:
                held = float(c.value in kept and needed)
                program.S[c.value].lower_bound = program.S[c.value].upper_bound = held
            elif c.fixed == 0 and c.value in kept and needed:
                return  # a plan that `Choices` rules out as beaten
        answer = program.solve(time_limit_s=10, abs_gap=1e-9)
        assert (answer.kept is not None) == fits
        if fits:
            assert answer.bound == pytest.approx(run.rerun_cost / (problem.total_cost or 1.0), abs=1e-6)


@settings(max_examples=80, deadline=None)
@given(problems(max_forward=6, max_backward=5), st.data())
def test_the_rows_are_the_memory(problem: Problem, data: st.DataObject):
    kept = {v for v in droppable(problem) if not problem.graph.values[v].size_bytes or data.draw(st.booleans())}
    assume(play_kept(problem, frozenset(kept)) is not None)
    assume(KeptReplay(problem).run(kept).peak_bytes > 0)
    assert_rows_are_the_memory(problem, kept)


def test_a_pinned_output_made_again_counts_once():
    """Its reader has run, so the second copy is the only one; counting both once proved a false infeasibility."""
    nodes = (Node("f", (), (0, 1)), Node("b", (1,), (2,), rerunnable=False), Node("c", (0, 2), (3,), rerunnable=False))
    values = (Value("x", 1, 0), Value("y", 1, 0, pinned=True), Value("u", 0, 1), Value("w", 0, 2))
    assert_rows_are_the_memory(Problem(Graph(nodes, values, 1), (0.0, 0.0, 0.0), 0), set())


def test_what_is_held_for_a_late_rerun_counts_until_then():
    """x (8 B) is kept to make a (4 B) again after the peak at b: a row that lets a come early would save 4 B."""
    edges = [(0, 1), (1, 2), (2, 3), (1, 4), (3, 4), (4, 5)]  # the backward never reads x itself
    bare = Problem.from_arrays([1] * 6, [8, 4, 4, 1, 1, 1], edges, 3, budget_bytes=0)
    nodes = [replace(node, workspace_bytes=10 if i == 3 else 0) for i, node in enumerate(bare.graph.nodes)]
    assert_rows_are_the_memory(replace(bare, graph=replace(bare.graph, nodes=tuple(nodes))), {0, 2})


@settings(max_examples=60, deadline=None)
@given(problems())
def test_the_least_peak_is_what_brute_force_finds(problem: Problem):
    assume(len(droppable(problem)) <= SMALL)
    least = least_kept_budget(problem)
    assert least.bytes == least.floor_bytes == least_kept_peak(problem)
    assert simulate(problem, least.schedule).peak_bytes == least.bytes
    assert peak_floor(problem)[0] <= least.bytes
    assert 0 <= least.node < len(problem.graph.nodes)


def test_infeasible_says_what_would_fit_and_that_fits():
    problem = layered(6, 0)
    floor, _ = peak_floor(problem)
    for budget in (0, floor - 1, floor + 1):
        refused = Retention(epochs=False).solve(problem.with_budget(budget))
        assert refused.status is Status.INFEASIBLE
        assert refused.schedule is None
        assert refused.least_bytes is not None
        assert refused.least_node is not None
        assert Retention().solve(problem.with_budget(refused.least_bytes)).peak_bytes <= refused.least_bytes


def test_no_time_never_means_infeasible():
    problem = layered(12, 0)
    least = least_kept_budget(problem).bytes
    for budget in (least, least + 400):
        solution = Retention().solve(problem.with_budget(budget), time_limit_s=0.0)
        assert solution.status in (Status.TIME_LIMIT, Status.FEASIBLE, Status.OPTIMAL)
        assert solution.peak_bytes <= budget


@pytest.mark.parametrize("problem", [layered(8, 0), training_chain(12, 0, size=16)], ids=["layered", "chain"])
def test_a_falling_budget_never_raises_the_peak_nor_lowers_the_cost(problem: Problem):
    everything = Retention().solve(problem.with_budget(10**9)).peak_bytes
    least = least_kept_budget(problem).bytes
    budgets = [everything - (everything - least) * k // 7 for k in range(8)]
    plans = [Retention().solve(problem.with_budget(b)) for b in budgets]
    assert all(plan.peak_bytes <= b for plan, b in zip(plans, budgets, strict=True))
    peaks = [plan.peak_bytes for plan in plans]
    assert peaks == sorted(peaks, reverse=True)
    for looser, tighter in pairwise(plans):
        assert tighter.overhead >= looser.lower_bound - 1e-9
        assert looser.overhead <= tighter.overhead + 0.005 * (1 + tighter.overhead)


def test_the_certificate_says_which_class():
    room = {
        case.name: Retention(epochs=False).solve(case.problem, gap=0.0)
        for case in known()
        if case.kept_cost is not None
    }
    assert room["chain, room for all"].certificate is Certificate.ANY_SCHEDULE
    assert room["chain, one short"].certificate is Certificate.ANY_SCHEDULE
    assert {s.certificate for s in room.values()} <= {Certificate.ANY_SCHEDULE, Certificate.ONE_RERUN}
    assert all(s.any_bound <= s.lower_bound + 1e-12 for s in room.values())


def test_a_deep_chain_does_not_recurse():
    problem = training_chain(1200, 0)
    problem = problem.with_budget(2600)
    solution = Retention().solve(problem, time_limit_s=20)
    assert solution.status in (Status.OPTIMAL, Status.FEASIBLE)


def test_stray_lines_of_the_back_end_are_dropped_and_no_others(capfd: pytest.CaptureFixture[str]):
    with STRAY_FILTER:
        os.write(1, b"HighsMipSolverData::stray\nkept\nHighs")
        os.write(1, b"MipSolverData::stray again\nin parts, ")
        os.write(1, b"kept without an end")
    print("; after")
    assert capfd.readouterr().out == "kept\nin parts, kept without an end; after\n"


def test_programs_in_several_threads_lose_no_line_of_anyones(capfd: pytest.CaptureFixture[str]):
    """More threads than cores solve MILPs; one prints from Python, one past it, and a child process prints too."""
    problem = training_chain(40, 0)
    problem = problem.with_budget(
        int(0.5 * simulate(problem, schedule_from_order(problem.graph, range(80))).peak_bytes)
    )
    filters: list[bool] = []
    done = threading.Event()

    def solve() -> None:
        for _ in range(3):
            Retention().solve(problem, time_limit_s=5, gap=0.0)

    def write() -> None:
        for i in itertools.count():
            filters.append(STRAY_FILTER._open_blocks > 0)
            os.write(1, f"by hand {i}\n".encode())
            sys.stdout.write(f"printed {i}\n")  # in one piece
            if done.wait(0.001):
                return

    solvers, writer = [threading.Thread(target=solve) for _ in range(4)], threading.Thread(target=write)
    for thread in (writer, *solvers):
        thread.start()
    subprocess.run([sys.executable, "-c", "print('of a child')"], check=True)
    for thread in solvers:
        thread.join()
    done.set()
    writer.join()
    print("after")
    lines = capfd.readouterr().out.splitlines()
    assert any(filters)
    assert sorted(lines[:-1]) == sorted(
        ["of a child", *(f"{who} {i}" for i in range(len(filters)) for who in ("by hand", "printed"))]
    )
    assert lines[-1] == "after"


def test_the_bound_of_a_class_that_the_plan_beats_is_not_its_gap():
    problem = Problem.from_arrays([1.0] * 3, [1] * 3, [(0, 1), (0, 2), (1, 2)], budget_bytes=3)
    order = (0, 1, 0, 2)  # an overhead of 1/3

    def judged(one_rerun: float) -> Solution:
        return _Bounds(any=0.1, one_rerun=one_rerun).judged("", problem, order, 0.0, gap=0.01)

    beaten, binding = judged(0.5), judged(0.33)
    assert (beaten.certificate, beaten.status) == (Certificate.ANY_SCHEDULE, Status.FEASIBLE)
    assert beaten.gap == pytest.approx((1 / 3 - 0.1) / (4 / 3))
    assert (binding.certificate, binding.status) == (Certificate.ONE_RERUN, Status.OPTIMAL)
