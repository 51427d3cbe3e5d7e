"""Train a PyTorch model inside a given amount of memory at the least recomputation that can be proven."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gcsolve.errors import (
    ArgumentError,
    CallError,
    GcsolveError,
    InfeasibleBudget,
    InvalidGraph,
    InvalidSchedule,
    MissingBackend,
    PlanMismatch,
    SolverError,
    TraceError,
    UnsuitedSolver,
)
from gcsolve.graph import Graph, Node, Value
from gcsolve.problem import Problem
from gcsolve.schedule import Compute, Free, Schedule
from gcsolve.simulate import Replay, simulate

if TYPE_CHECKING:
    from gcsolve.api import load_plan, minimum_budget, solve
    from gcsolve.cost.devices import DeviceSpec, devices, register_device
    from gcsolve.cost.flops import register_cost
    from gcsolve.evaluation.compare import Comparison, ComparisonRow, compare
    from gcsolve.evaluation.fit import Fit, FitRow, fit
    from gcsolve.evaluation.verify import VerifyReport
    from gcsolve.plan import Plan
    from gcsolve.plan_record import Decision, MinimumBudget
    from gcsolve.solver.base import Solution, Solver, Status
    from gcsolve.solver.front import solve_problem
    from gcsolve.solver.registry import solvers

__version__ = "0.1.0"

# name -> module; loaded on first use, so that the torch-free half works without torch and importing costs nothing
_LAZY = {
    "solve": "gcsolve.api",
    "minimum_budget": "gcsolve.api",
    "MinimumBudget": "gcsolve.plan_record",
    "Comparison": "gcsolve.evaluation.compare",
    "ComparisonRow": "gcsolve.evaluation.compare",
    "compare": "gcsolve.evaluation.compare",
    "DeviceSpec": "gcsolve.cost.devices",
    "devices": "gcsolve.cost.devices",
    "register_device": "gcsolve.cost.devices",
    "register_cost": "gcsolve.cost.flops",
    "fit": "gcsolve.evaluation.fit",
    "Fit": "gcsolve.evaluation.fit",
    "FitRow": "gcsolve.evaluation.fit",
    "Decision": "gcsolve.plan_record",
    "Plan": "gcsolve.plan",
    "VerifyReport": "gcsolve.evaluation.verify",
    "load_plan": "gcsolve.api",
    "Solution": "gcsolve.solver.base",
    "Solver": "gcsolve.solver.base",
    "Status": "gcsolve.solver.base",
    "solve_problem": "gcsolve.solver.front",
    "solvers": "gcsolve.solver.registry",
}

__all__ = [
    "ArgumentError",
    "CallError",
    "Comparison",
    "ComparisonRow",
    "Compute",
    "Decision",
    "DeviceSpec",
    "Fit",
    "FitRow",
    "Free",
    "GcsolveError",
    "Graph",
    "InfeasibleBudget",
    "InvalidGraph",
    "InvalidSchedule",
    "MinimumBudget",
    "MissingBackend",
    "Node",
    "Plan",
    "PlanMismatch",
    "Problem",
    "Replay",
    "Schedule",
    "Solution",
    "Solver",
    "SolverError",
    "Status",
    "TraceError",
    "UnsuitedSolver",
    "Value",
    "VerifyReport",
    "compare",
    "devices",
    "fit",
    "load_plan",
    "minimum_budget",
    "register_cost",
    "register_device",
    "simulate",
    "solve",
    "solve_problem",
    "solvers",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'gcsolve' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
