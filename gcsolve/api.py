"""The public functions that plan: `solve`, `minimum_budget`, `load_plan`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Unpack

from torch import nn

from gcsolve.cost.base import CostModel
from gcsolve.plan import Plan
from gcsolve.plan_record import MinimumBudget, SolverOptions
from gcsolve.serialization.read import read_plan
from gcsolve.session import Session, Settings, StepOptions, check_request
from gcsolve.solver.base import Solver
from gcsolve.util.checks import check_limits


def solve(
    model: nn.Module,
    example_input: Any,
    budget_gb: float | None = None,
    *,
    budget: str | float | None = None,
    loss: Callable[[Any], Any] | None = None,
    optimizer: Any = None,
    scope: str = "step",
    solver: str | Solver = "auto",
    cost: str | CostModel = "auto",
    device: Any = None,
    time_limit_s: float = 60.0,
    gap: float = 0.005,
    backward_from: str = "scalars",
    gradient_accumulation: bool = False,
    autocast_backward: bool = False,
    progress: bool | None = None,
) -> Plan:
    """Plan one training step of `model` inside a memory budget at the least recomputation.

    Args:
        model: any module that `torch.export` (non-strict) accepts; weights real, fake or on meta. It is not changed.
        example_input: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        budget_gb: the allowed peak in GB (1e9 bytes).
        budget: the allowed peak as a size ("20GiB") or a fraction of the store-all peak in (0, 1], in place of `budget_gb`.
            With neither, it is the device's memory (its free memory, if this machine has the device) less a reserve, see
            `gcsolve.cost.devices.RESERVES`.
        loss: a function from the model's output to a scalar, traced with the model; the planned module then returns that
            scalar. None: the gradients of the outputs come from outside.
        optimizer: a `torch.optim` class, its name or an instance, or its bytes per parameter. Its state, its master weights
            and the temporaries of its step count in the budget.
        scope: "step" counts all memory of the step; "activations" only what forward and backward allocate.
        solver: a name in `gcsolve.solvers()`, or a solver object.
        cost: "flops"; "roofline" ("auto"); "measured" (each distinct op is run on the device, which this machine must have;
            times are kept in the user's cache directory); or a cost object.
        device: where the step will run: "cpu", "cuda", or a spec by name ("h200"); default: where the model is. For a GPU
            that the model is not on, the step is traced with that GPU's kernels; such a plan can be read here and run there.
        time_limit_s: seconds for the solver; at the limit it returns its best plan so far.
        gap: the solver may stop when (cost of the plan's step - cost at the bound) / cost of the plan's step is this small.
        backward_from: the outputs that backward will start from. "scalars": the scalar outputs alone, if there are any
            (a loss); "all": every differentiable output.
        gradient_accumulation: gradients of earlier steps are alive when the step begins (no `zero_grad` before it), and
            count in the budget.
        autocast_backward: backward will be called inside the autocast block that is around the call, where eager mode also
            casts within some backward formulas. False: it is called outside, as torch advises.
        progress: show what is being done; default: only in a terminal or a notebook that a person watches.

    Returns:
        a `Plan`; `plan.module` trains within the budget with the results of `model`.

    Raises:
        InfeasibleBudget: no plan fits. The error has `least_bytes`, a budget for which a plan was found, `floor_bytes`, which
            every schedule needs, and the op, module and source line that set them.
        TraceError: the model cannot be traced, or no output can be differentiated.
        ArgumentError: an argument has a value that cannot be used.
        SolverError: a solver of your own raised, or its answer is not valid.

    Examples:
        >>> import torch, gcsolve
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
        >>> plan = gcsolve.solve(model, torch.randn(256, 64), budget=0.9)
        >>> plan.peak_bytes <= plan.budget_bytes
        True
    """
    options = SolverOptions(solver, time_limit_s, gap)
    check_request(budget_gb, budget, options)
    settings = Settings.checked(
        model,
        loss=loss,
        optimizer=optimizer,
        scope=scope,
        cost=cost,
        device=device,
        backward_from=backward_from,
        gradient_accumulation=gradient_accumulation,
        autocast_backward=autocast_backward,
    )
    session = Session.of(model, example_input, settings, progress)
    return Plan.solved(session, session.budget_bytes(budget_gb, budget), options, progress)


def minimum_budget(
    model: nn.Module, example_input: Any, *, time_limit_s: float = 60.0, **step: Unpack[StepOptions]
) -> MinimumBudget:
    """The least budget that `solve` can meet (`bytes`), the bytes proven to be needed (`floor_bytes`), and more.

    Args:
        model, example_input: as for `solve`.
        time_limit_s: seconds to search; with more time, `bytes` and `floor_bytes` come closer to each other.
        step: loss, optimizer, scope, cost, device, backward_from, gradient_accumulation, autocast_backward, as for `solve`.

    Raises:
        TraceError, ArgumentError: as `solve`.

    Examples:
        >>> import torch, gcsolve
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
        >>> least = gcsolve.minimum_budget(model, torch.randn(256, 64), time_limit_s=5)
        >>> least.floor_bytes <= least.bytes <= least.one_rerun_bytes
        True
    """
    check_limits(time_limit_s)
    return Session.of(model, example_input, Settings.checked(model, **step)).minimum(time_limit_s)


def load_plan(
    path: str | os.PathLike[str],
    model: nn.Module,
    example_input: Any = None,
    *,
    loss: Callable[[Any], Any] | None = None,
    optimizer: Any = None,
    cost: str | CostModel | None = None,
    progress: bool | None = None,
) -> Plan:
    """The plan that `plan.save(path)` wrote, for the same model in this process, with the same schedule; nothing is solved.

    Args:
        path: the file.
        model: the model that was planned (its weights may differ).
        example_input: as for `solve`; required only if the call had arguments that JSON does not hold. Without it,
            `plan.verify` runs on zeros of the planned shapes.
        loss: the function that `solve` was called with, if any, since the file holds no code.
        optimizer: as for `solve`; required only if it was not one of torch.optim.
        cost: as for `solve`; required only if it was an object of yours.
        progress: show what is being done; default: only in a terminal or a notebook that a person watches.

    Returns:
        a `Plan` with the schedule, the budget and the figures of the saved one.

    Raises:
        PlanMismatch: model, mode, autocast, torch release, input or traced graph are not those of the file; the text names
            the first tensor or op that differs, and how it was and is.
        ArgumentError: the file is not a saved plan or is damaged, or an argument that the file cannot hold is missing.
        OSError: the file cannot be read.

    Examples:
        >>> import tempfile, torch, gcsolve
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
        >>> plan = gcsolve.solve(model, torch.randn(256, 64), budget=0.9)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     plan.save(f"{folder}/plan.json")
        ...     again = gcsolve.load_plan(f"{folder}/plan.json", model)
        >>> again.schedule == plan.schedule
        True
    """
    saved = read_plan(path, model, example_input, loss=loss, optimizer=optimizer, cost=cost, progress=progress)
    return Plan.of(saved.session, saved.solution, saved.budget_bytes, saved.options)
