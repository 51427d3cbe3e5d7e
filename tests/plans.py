"""Plans that several tests look at, solved once a process: do not train their modules but in copies."""

from __future__ import annotations

import functools

import torch

import gcsolve
from tests import models
from tests.training import LEAST_S, x


@functools.cache
def mlp_plan(budget: float) -> gcsolve.Plan:
    """Six layers of width 64 on 256 rows at a fraction of the store-all peak; all budgets share one trace and one model."""
    if budget < 1.0:
        return mlp_plan(1.0).at(budget=budget)
    torch.manual_seed(0)
    return gcsolve.solve(models.MLP(6, 64), x(256, 64), budget=1.0)


@functools.cache
def mlp_minimum() -> gcsolve.MinimumBudget:
    """How low the budget of `mlp_plan` can go."""
    return mlp_plan(1.0).minimum_budget(time_limit_s=LEAST_S)
