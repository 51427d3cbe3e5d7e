"""A `Plan` keeps what was asked of it; errors travel between processes; the logger says what is planned, and nothing else."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
from functools import cache
from typing import Any, get_type_hints

import pytest
import torch
from torch import nn

import gcsolve
from gcsolve import errors
from gcsolve.plan_record import SolverOptions
from gcsolve.session import Settings, StepOptions


def _mlp() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.GELU())]), torch.randn(256, 32)


@cache
def _plan() -> gcsolve.Plan:
    return gcsolve.solve(*_mlp(), budget=0.9, solver="greedy", time_limit_s=7.0, gap=0.25)


# --- plan.at -----------------------------------------------------------------------------------------------------------


def test_at_keeps_solver_limit_and_gap() -> None:
    again = _plan().at(budget=0.8)
    assert again.solver_options == SolverOptions("greedy", 7.0, 0.25)
    assert again.solution.solver == "greedy"
    assert again.budget_bytes == int(0.8 * again.baseline_peak_bytes)


def test_at_keeps_the_budget_when_another_solver_is_asked() -> None:
    again = _plan().at(solver="store_all", budget=1.0).at(solver="chen")
    assert again.budget_bytes == again.baseline_peak_bytes
    assert again.solver_options == SolverOptions("chen", 7.0, 0.25)


def test_at_takes_zero_as_a_gap_that_is_given() -> None:
    assert _plan().at(gap=0.0, budget=1.0).solver_options.gap == 0.0


# --- what a plan says --------------------------------------------------------------------------------------------------


def test_the_breakdown_is_largest_first() -> None:
    sizes = list(_plan().breakdown.values())
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == _plan().peak_bytes


def test_reprs_are_one_short_line() -> None:
    for thing in (_plan(), _plan().solution, _plan().schedule, _plan().problem, _plan().problem.graph):
        assert len(repr(thing).splitlines()) == 1
        assert len(repr(thing)) < 300, type(thing)


def test_a_copy_of_a_plan_is_a_plan_of_its_own_module() -> None:
    other = copy.deepcopy(_plan())
    assert other.module is not _plan().module
    assert other.schedule == _plan().schedule


# --- the step options, alike in all public functions -------------------------------------------------------------------


def test_the_public_functions_take_the_same_step_options() -> None:
    options = set(get_type_hints(StepOptions))
    checked = inspect.signature(Settings.checked).parameters
    assert options == {name for name, p in checked.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    solve = inspect.signature(gcsolve.solve).parameters
    assert {name: solve[name].default for name in options} == {name: checked[name].default for name in options}


@pytest.mark.parametrize("function", [gcsolve.minimum_budget, gcsolve.compare])
def test_an_unknown_keyword_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match="grad_outputs"):
        function(*_mlp(), grad_outputs="all")


def test_fit_takes_what_solve_takes() -> None:
    def make(batch: int) -> tuple[nn.Module, torch.Tensor]:
        return _mlp()[0], torch.randn(batch, 32)

    loss = {"loss": lambda output: output.square().mean()}
    step = gcsolve.fit(make, [64], device="rtx4090", budget="50MB", **loss, gradient_accumulation=True)
    fewer = gcsolve.fit(make, [64], device="rtx4090", budget="50MB", **loss, scope="activations", backward_from="all")
    assert fewer.rows[0].store_all_bytes < step.rows[0].store_all_bytes
    with pytest.raises(gcsolve.ArgumentError, match="returns a loss, and loss= is given too"):
        gcsolve.fit(lambda batch: (*make(batch), loss["loss"]), [64], device="rtx4090", budget="50MB", **loss)


# --- minimum_budget ----------------------------------------------------------------------------------------------------


def test_the_minimum_budget_is_the_least_that_solve_reaches() -> None:
    least = _plan().minimum_budget(time_limit_s=5)
    assert least.floor_bytes <= least.bytes <= least.one_rerun_bytes
    assert least.floor_bytes <= least.one_rerun_floor_bytes <= least.one_rerun_bytes
    for allowed in (least.bytes, int(1.001 * least.bytes)):
        plan = _plan().at(budget=f"{allowed}B", solver="auto", time_limit_s=3)
        assert plan.peak_bytes <= allowed
    assert least.op


# --- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n, e in vars(errors).items() if isinstance(e, type) and n != "GcsolveError"])
def test_errors_are_pickled_whole(name: str) -> None:
    kind = getattr(errors, name)
    error = kind("in words")
    error.op = "addmm"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == "in words"
    assert vars(again) == vars(error)


def test_an_infeasible_budget_is_pickled_with_its_numbers() -> None:
    with pytest.raises(gcsolve.InfeasibleBudget) as caught:
        _plan().at(budget="1kB")
    again = pickle.loads(pickle.dumps(caught.value))
    assert vars(again) == vars(caught.value)
    assert again.budget_bytes == 1000
    assert again.least_bytes >= again.floor_bytes > 1000
    assert str(again) == str(caught.value)


# --- the logger --------------------------------------------------------------------------------------------------------


def test_the_logger_says_what_is_planned_and_nothing_is_printed(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    model, x = _mlp()
    with caplog.at_level(logging.INFO, logger="gcsolve"):
        plan = gcsolve.solve(model, x, budget=0.9)
        plan.module(x[:100]).sum().backward()
    traced, planned, again, *rest = [record.getMessage() for record in caplog.records]
    assert traced.startswith("traced Sequential for cpu in")
    assert f"{len(plan.problem.graph.nodes)} ops" in traced
    assert planned.startswith("planned Sequential in")
    assert "optimal" in planned
    assert "not planned for" in again
    assert len(rest) == 2  # traced and planned once more
    assert {record.name for record in caplog.records} == {"gcsolve"}
    assert capfd.readouterr() == ("", "")
