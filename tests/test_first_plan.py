"""The least budget that has a plan, and that `solve` has a plan for it, and for a little more, whatever its time limit."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from torch import nn

import gcsolve
from gcsolve.problem import Problem
from gcsolve.schedule import schedule_from_order
from gcsolve.simulate import simulate
from gcsolve.solver.base import Status
from gcsolve.solver.first_plan import FirstPlans
from gcsolve.solver.floor import peak_floor
from gcsolve.solver.front import solve_problem
from gcsolve.solver.minimum import least_budget
from gcsolve.solver.retention import Retention
from tests.graphs import layered, message_passing, radiance_field, training_chain, two_way_recurrence
from tests.strategies import problems
from tests.test_solvers import FITS, check, store_all_peak

KINDS = {
    "radiance field": radiance_field,
    "message passing": message_passing,
    "two-way recurrence": two_way_recurrence,
    "blocks": lambda: layered(8, 0),
    "chain": lambda: training_chain(40, 0, size=16),
}
MORE = (1.0, 1.001)
SOLVE_S = 0.5


def assert_has_a_plan(problem: Problem, solver: str = "auto", time_limit_s: float = SOLVE_S) -> None:
    solution = solve_problem(problem, solver, time_limit_s=time_limit_s)
    check(problem, solution)
    assert solution.status in FITS, solution


@settings(max_examples=60, deadline=None)
@given(problems(max_forward=6, max_backward=5))
def test_solve_has_a_plan_for_the_least_budget_of_a_random_graph(problem: Problem):
    least = least_budget(problem)
    assert peak_floor(problem)[0] <= least.floor_bytes <= least.bytes <= store_all_peak(problem)
    assert simulate(problem, least.schedule).peak_bytes <= least.bytes
    for solver in ("auto", "retention"):
        assert_has_a_plan(problem.with_budget(least.bytes), solver)
        assert_has_a_plan(problem.with_budget(int(1.001 * least.bytes)), solver)


@pytest.mark.parametrize("kind", KINDS)
def test_solve_has_a_plan_for_the_least_budget_and_a_little_more(kind: str):
    problem = KINDS[kind]()
    least = least_budget(problem, time_limit_s=4)
    assert least.bytes < 0.6 * store_all_peak(problem)
    replay = simulate(problem, least.schedule)
    action = least.schedule.actions[replay.peak_action]
    assert replay.peak_bytes <= least.bytes
    assert least.node == getattr(action, "node", None)
    for factor in MORE:
        assert_has_a_plan(problem.with_budget(int(factor * least.bytes)))


@pytest.mark.parametrize("kind", KINDS)
def test_no_clock_decides_whether_there_is_a_plan(kind: str):
    """With its deadline long past, the search still has a plan for a budget that it had one for, and the same."""
    problem = KINDS[kind]()
    least = least_budget(problem, time_limit_s=2)
    for factor in MORE:
        allowed = problem.with_budget(int(factor * least.bytes))
        first, again = (FirstPlans(allowed).find(deadline=-math.inf) for _ in range(2))
        assert first is not None
        assert again is not None
        assert first.order == again.order
        schedule = schedule_from_order(problem.graph, first.order)
        assert simulate(allowed, schedule).peak_bytes <= allowed.budget_bytes


def test_a_time_limit_of_zero_still_finds_a_plan():
    problem = message_passing()
    least = least_budget(problem, time_limit_s=2)
    for solver in ("auto", "retention"):
        assert_has_a_plan(problem.with_budget(least.bytes), solver, time_limit_s=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_levels_begin_at_the_floor_and_rise_by_more_than_a_thousandth(kind: str):
    problem = KINDS[kind]()
    plans = FirstPlans(problem)
    assert plans.levels[0] == peak_floor(problem)[0]
    assert plans.levels[-2] < store_all_peak(problem) <= plans.levels[-1]
    for lower, higher in zip(plans.levels, plans.levels[1:], strict=False):
        assert max(lower + 1, math.floor(1.001 * lower)) <= higher <= max(lower + 1, 1.003 * lower)


def test_a_refused_budget_is_told_the_least_that_is_not():
    problem = two_way_recurrence(8)
    floor, _ = peak_floor(problem)
    for solver in ("auto", Retention()):
        refused = solve_problem(problem.with_budget(floor - 1), solver, time_limit_s=2)
        assert refused.status is Status.INFEASIBLE
        assert refused.least_bytes is not None
        assert refused.least_node is not None
        assert_has_a_plan(problem.with_budget(refused.least_bytes))


class RadianceField(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(39 if k == 0 else 103 if k == 2 else 64, 64) for k in range(5))
        self.density, self.colour = nn.Linear(64, 1), nn.Linear(64, 3)

    def forward(self, points: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
        encoded = [points, *(f(2**k * points) for k in range(6) for f in (torch.sin, torch.cos))]
        inputs = hidden = torch.cat(encoded, -1)
        for k, layer in enumerate(self.layers):
            hidden = torch.relu(layer(torch.cat([hidden, inputs], -1) if k == 2 else hidden))
        opaque = 1 - torch.exp(-nn.functional.softplus(self.density(hidden))[..., 0] * depths)
        reached = torch.cumprod(1 - opaque + 1e-10, -1)
        return ((opaque * reached)[..., None] * torch.sigmoid(self.colour(hidden))).sum(1)


class MessagePassing(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2))
        self.updates = nn.ModuleList(nn.Linear(13 * width, width) for _ in range(2))

    def forward(
        self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor, degree: torch.Tensor
    ) -> torch.Tensor:
        for pair, update in zip(self.pairs, self.updates, strict=True):
            message = torch.relu(pair(torch.cat([x[source], x[target]], -1)))
            index, zeros = target[:, None].expand_as(message), torch.zeros_like(x)
            mean = zeros.scatter_add(0, index, message) / degree
            square = zeros.scatter_add(0, index, message * message) / degree
            extremes = [zeros.scatter_reduce(0, index, message, how, include_self=False) for how in ("amax", "amin")]
            parts = torch.cat([mean, torch.sqrt(torch.relu(square - mean * mean) + 1e-5), *extremes], -1)
            scale = torch.log(degree + 1)
            x = x + torch.relu(update(torch.cat([x, parts, parts * scale, parts / scale], -1)))
        return x


class TwoWayRecurrence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers, self.head = nn.Embedding(50, 16), nn.GRU(16, 16, bidirectional=True), nn.Linear(32, 10)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(words))[0])


def _field() -> tuple[nn.Module, object]:
    return RadianceField(), (torch.randn(32, 16, 3), torch.rand(32, 16))


def _messages() -> tuple[nn.Module, object]:
    target = torch.cat([torch.arange(60), torch.randint(60, (240,))])
    degree = torch.bincount(target, minlength=60).float()[:, None]
    return MessagePassing(), (torch.randn(60, 16), torch.randint(60, (300,)), target, degree)


def _sequence() -> tuple[nn.Module, object]:
    return TwoWayRecurrence(), torch.randint(50, (10, 8))


@pytest.mark.heavy
@pytest.mark.parametrize("make", [_field, _messages, _sequence])
def test_models_are_planned_at_their_least_budget(make: Callable[[], tuple[nn.Module, object]]):
    torch.manual_seed(0)
    model, example = make()
    plan = gcsolve.solve(model, example, budget=1.0, cost="flops")
    least = plan.minimum_budget(time_limit_s=5)
    assert least.floor_bytes <= least.bytes <= least.one_rerun_bytes < plan.baseline_peak_bytes
    for factor in (*MORE, 1.02):
        allowed = int(factor * least.bytes)
        tight = plan.at(budget=f"{allowed}B", time_limit_s=3)
        assert simulate(tight.problem, tight.schedule).peak_bytes <= allowed
