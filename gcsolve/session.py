"""`Session`: a model call that is traced and costed once, and then planned for any number of budgets.

A plan is made in four steps: `Settings.checked` (checks the arguments) -> `TracedCall.of` (trace and costs) ->
`Session.solution` (the solver) -> `Session.record` (the emitted module and the plan's figures).
"""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import nn

from gcsolve.capture.target_kernels import target_kernels
from gcsolve.capture.trace import Trace, parse_example, trace
from gcsolve.cost.base import CostModel
from gcsolve.cost.devices import DeviceSpec, get_device
from gcsolve.cost.local import free_memory_bytes, is_here
from gcsolve.cost.optimizer_memory import named_optimizer
from gcsolve.cost.registry import get_cost
from gcsolve.errors import ArgumentError, InfeasibleBudget, UnsuitedSolver
from gcsolve.execution.emit import emit
from gcsolve.execution.planned_module import Steps, is_planned, planned_module
from gcsolve.execution.signature import settled_signature
from gcsolve.execution.step import Step
from gcsolve.graph import Node
from gcsolve.lowering.costed import Costed, costed, storage_bytes
from gcsolve.plan_record import MinimumBudget, PlanRecord, SolverOptions
from gcsolve.problem import Problem
from gcsolve.schedule import schedule_from_order
from gcsolve.simulate import simulate
from gcsolve.solver.base import Solution, Status
from gcsolve.solver.floor import peak_floor
from gcsolve.solver.front import solve_problem
from gcsolve.solver.minimum import least_budget, least_kept_budget
from gcsolve.solver.registry import get_solver
from gcsolve.util.checks import check_limits, flag
from gcsolve.util.progress import shown
from gcsolve.util.sizes import budget_bytes, check_budget, size_text
from gcsolve.util.tree import flatten

logger = logging.getLogger("gcsolve")

LEAST_BUDGET_S = 5.0
"""Once a budget is proven too small: the seconds spent on finding a budget to name in the error."""


class StepOptions(TypedDict, total=False):
    """The keyword arguments that describe the step, the same in all public functions; `gcsolve.solve` explains them."""

    loss: Callable[[Any], Any] | None
    optimizer: Any
    scope: str
    cost: str | CostModel
    device: Any
    backward_from: str
    gradient_accumulation: bool
    autocast_backward: bool


@dataclass(frozen=True)
class Settings:
    """The `StepOptions` after their checks, with defaults filled in and names resolved."""

    loss: Callable[[Any], Any] | None
    optimizer: Any
    scope: str
    device: DeviceSpec
    cost: CostModel
    backward_from: str
    gradient_accumulation: bool
    autocast_backward: bool

    @classmethod
    def checked(
        cls,
        model: nn.Module,
        *,
        loss: Callable[[Any], Any] | None = None,
        optimizer: Any = None,
        scope: str = "step",
        cost: str | CostModel = "auto",
        device: Any = None,
        backward_from: str = "scalars",
        gradient_accumulation: bool = False,
        autocast_backward: bool = False,
    ) -> Settings:
        """The settings for planning `model`; the other arguments are those of `gcsolve.solve`.

        Raises:
            ArgumentError: an argument has a value that cannot be used.
        """
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"model={type(model).__name__} is not an nn.Module")
        for name, module in model.named_modules():
            if is_planned(module):
                raise ArgumentError(
                    f"{name or 'model'} is a planned module already; plan the original, or use plan.at(...) for another budget"
                )
        if loss is not None and not callable(loss):
            raise ArgumentError(f"loss={loss!r} is not callable; pass a function of the model's output, or None")
        for name in _captured_tensors(loss):
            raise ArgumentError(
                f"loss uses the tensor {name}, which would be the same in every step; make it an input of the model: wrap "
                "the model in a module that takes it and returns the loss, or compute the loss outside (loss=None)"
            )
        if scope not in ("step", "activations"):
            raise ArgumentError(f'scope={scope!r} is not known; known scopes: "step", "activations"')
        if backward_from not in ("scalars", "all"):
            raise ArgumentError(f'backward_from={backward_from!r} is not known; known: "scalars", "all"')
        flag("gradient_accumulation", gradient_accumulation)
        flag("autocast_backward", autocast_backward)
        spec = get_device(_device_of(model) if device is None else device)
        return cls(
            loss=loss,
            optimizer=named_optimizer(optimizer),
            scope=scope,
            device=spec,
            cost=get_cost(cost, spec),
            backward_from=backward_from,
            gradient_accumulation=gradient_accumulation,
            autocast_backward=autocast_backward,
        )

    def trace(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
        """Trace the step of the call `model(*args, **kwargs)` with the device's kernels."""
        tensors, _ = flatten((args, kwargs), "example_input")
        kernels = target_kernels(self.device, (*model.parameters(), *model.buffers(), *tensors))
        return trace(model, args, kwargs, self.loss, self.backward_from == "all", kernels, self.autocast_backward)

    def costs(
        self,
        traced: Trace,
        model: nn.Module,
        inputs: list[torch.Tensor],
        *,
        cost: CostModel,
        measure: bool,
        progress: bool | None = False,
    ) -> Costed:
        """Bytes, workspace, FLOPs and cost of every op of the trace.

        Args:
            inputs: the flat tensors of the call.
            cost: the cost model: `self.cost`, or another if the costs come from a saved plan.
            measure: run ops that may have a workspace once on this machine.
            progress: show a progress bar while ops are run.
        """
        return costed(
            traced,
            model,
            inputs,
            device=self.device,
            cost=cost,
            optimizer=self.optimizer,
            scope=self.scope,
            gradient_accumulation=self.gradient_accumulation,
            measure=measure,
            progress=progress,
        )

    def default_budget_bytes(self, model: nn.Module) -> int:
        """The device's memory less its reserve; if this machine has the device, its free memory and what the model takes of it
        now, less the reserve.

        Raises:
            ArgumentError: scope="activations": that part of the memory has no default.
        """
        if self.scope != "step":
            raise ArgumentError(
                "scope='activations' has no default budget: the device's memory also holds what it does not count; "
                'give budget_gb=<GB> or budget=<"20GiB" or a fraction of the store-all peak>'
            )
        spec = self.device
        if not is_here(spec):
            return spec.memory_bytes - spec.reserve_bytes
        in_use_bytes = torch.cuda.memory_reserved() if spec.kind == "cuda" else storage_bytes(_real_tensors(model))
        return max(1, free_memory_bytes(spec) + in_use_bytes - spec.reserve_bytes)


def _real_tensors(model: nn.Module) -> list[torch.Tensor]:
    """The model's parameters and buffers that are not on meta."""
    return [t for t in (*model.parameters(), *model.buffers()) if t.device.type != "meta"]


def _captured_tensors(loss: Any) -> list[str]:
    """Names of the tensors that the loss function uses beside its argument: from closures, globals, defaults and partials."""
    if isinstance(loss, functools.partial):
        bound = {**{f"argument {i}": v for i, v in enumerate(loss.args)}, **loss.keywords}
        return [k for k, v in bound.items() if isinstance(v, torch.Tensor)] + _captured_tensors(loss.func)
    if not inspect.isfunction(loss):
        return []
    captured = inspect.getclosurevars(loss)
    defaults = {f"default {i}": v for i, v in enumerate(loss.__defaults__ or ())} | dict(loss.__kwdefaults__ or {})
    return [k for k, v in {**captured.globals, **captured.nonlocals, **defaults}.items() if isinstance(v, torch.Tensor)]


def _device_of(model: nn.Module) -> str:
    """The torch device of the model's first real tensor; "cpu" if all are on meta."""
    tensors = _real_tensors(model)
    return str(tensors[0].device) if tensors else "cpu"


@dataclass(frozen=True)
class TracedCall:
    """A traced and costed step.

    Attributes:
        costed: the step without a budget.
        store_all_bytes: its peak when nothing is recomputed.
        key: the signature of the calls that it serves.
        seconds: time spent on trace and costs.
    """

    costed: Costed
    store_all_bytes: int
    key: Any
    seconds: float

    @classmethod
    def of(
        cls,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        settings: Settings,
        progress: bool | None = False,
    ) -> TracedCall:
        """Trace and cost the call `model(*args, **kwargs)`."""
        started = time.perf_counter()
        tensors, template = flatten((args, kwargs), "example_input")
        with shown(progress, f"tracing {type(model).__name__}"):
            traced = settings.trace(model, args, kwargs)
        real = all(t.device.type != "meta" for t in (*model.parameters(), *model.buffers()))
        costs = settings.costs(traced, model, tensors, cost=settings.cost, measure=real, progress=progress)
        graph = costs.problem.graph
        store_all = simulate(costs.problem, schedule_from_order(graph, range(len(graph.nodes)))).peak_bytes
        seconds = time.perf_counter() - started
        logger.info(
            "traced %s for %s in %.1f s: %d ops, store-all peak %s",
            type(model).__name__, settings.device.name, seconds, len(graph.nodes), size_text(store_all),
        )  # fmt: skip
        return cls(costs, store_all, settled_signature(model, traced, tensors, template), seconds)

    def step(self, solution: Solution) -> Step:
        """The emitted forward and backward of the solution's schedule."""
        assert solution.schedule is not None
        traced = self.costed.trace
        return Step(trace=traced, emitted=emit(traced.joint, self.costed.lowered, solution.schedule))


@dataclass(frozen=True)
class Session:
    """A model call with its settings, traced and costed."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    settings: Settings
    call: TracedCall

    @classmethod
    def of(cls, model: nn.Module, example_input: Any, settings: Settings, progress: bool | None = False) -> Session:
        """Trace and cost the call of `model` that `example_input` describes."""
        args, kwargs = parse_example(example_input)
        return cls(model, args, kwargs, settings, TracedCall.of(model, args, kwargs, settings, progress))

    @property
    def problem(self) -> Problem:
        """The step without a budget."""
        return self.call.costed.problem

    def budget_bytes(self, budget_gb: float | None, budget: str | float | None) -> int:
        """The budget that the caller passed, in bytes; if both arguments are None, the default for the device."""
        if budget_gb is None and budget is None:
            return self.settings.default_budget_bytes(self.model)
        return budget_bytes(budget_gb, budget, self.call.store_all_bytes)

    def solution(self, allowed_bytes: int, options: SolverOptions, progress: bool | None = False) -> Solution:
        """Solve for a budget of `allowed_bytes`; nothing is emitted.

        Raises:
            InfeasibleBudget: the solver has no plan within the budget.
        """
        with shown(progress, f"solving for {size_text(allowed_bytes)}"):
            return _solved(self.model, self.call, allowed_bytes, options)

    def record(self, solution: Solution, allowed_bytes: int, options: SolverOptions) -> PlanRecord:
        """The plan of `solution`; its module plans calls with other shapes or modes for the same budget when they come."""

        def replan(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
            logger.info("%s is called as it was not planned for (shapes, dtypes, arguments or modes): planning again",
                        type(model).__name__)  # fmt: skip
            call = TracedCall.of(model, args, kwargs, self.settings)
            try:
                return call.step(_solved(model, call, allowed_bytes, options))
            except InfeasibleBudget as error:
                error.args = (
                    f"this call differs from those planned so far (shapes, dtypes, arguments or modes), and it was planned "
                    f"for the same {size_text(allowed_bytes)}: {error}",
                )
                raise

        steps = Steps(replan, self.settings.loss)
        steps.training = self.model.training
        steps.add(self.call.key, self.call.step(solution))
        return PlanRecord(
            module=planned_module(self.model, steps),
            model_name=type(self.model).__name__,
            budget_bytes=allowed_bytes,
            baseline_peak_bytes=self.call.store_all_bytes,
            solution=solution,
            solver_options=options,
            costed=self.call.costed,
            scope=self.settings.scope,
            device=self.settings.device.name,
            cost=self.settings.cost.name,
            trace_s=self.call.seconds,
        )

    def minimum(self, time_limit_s: float) -> MinimumBudget:
        """The least budgets, searched for `time_limit_s` seconds; see `gcsolve.minimum_budget`."""
        one_rerun = least_kept_budget(self.problem, 0.6 * time_limit_s)
        any_number = least_budget(self.problem, 0.4 * time_limit_s, peak_bytes=one_rerun.bytes)
        least = min(any_number, one_rerun, key=lambda found: found.bytes)
        node = self.problem.graph.nodes[least.node]
        return MinimumBudget(
            bytes=least.bytes,
            floor_bytes=any_number.floor_bytes,
            one_rerun_bytes=one_rerun.bytes,
            one_rerun_floor_bytes=one_rerun.floor_bytes,
            op=f"{node.name} ({node.op})",
            module=node.module,
            source=node.source,
        )


def check_request(budget_gb: float | None, budget: str | float | None, options: SolverOptions) -> None:
    """Check the arguments that can be checked before the model is traced.

    Raises:
        ArgumentError: budget, solver, time limit or gap cannot be used.
    """
    check_budget(budget_gb, budget)
    get_solver(options.solver)
    check_limits(options.time_limit_s, options.gap)


def _solved(model: nn.Module, call: TracedCall, allowed_bytes: int, options: SolverOptions) -> Solution:
    """The solution for a budget of `allowed_bytes`; raises `InfeasibleBudget` if there is none."""
    problem = call.costed.problem.with_budget(allowed_bytes)
    refuse_below_floor(problem, look_s=min(LEAST_BUDGET_S, options.time_limit_s))
    solution = solve_problem(problem, options.solver, time_limit_s=options.time_limit_s, gap=options.gap)
    if solution.schedule is None or solution.status is Status.OVER_BUDGET:
        raise infeasible(problem, solution)
    logger.info(
        "planned %s in %s by %s in %.1f s: %s, peak %s, overhead %.2f %%, gap %.2f %%",
        type(model).__name__, size_text(allowed_bytes), solution.solver, solution.solve_s, solution.status.name.lower(),
        size_text(solution.peak_bytes), 100 * solution.overhead, 100 * solution.gap,
    )  # fmt: skip
    return solution


def refuse_below_floor(problem: Problem, look_s: float = 0.0) -> None:
    """Raise `InfeasibleBudget` if the budget is below the bytes that every schedule needs.

    Args:
        problem: the step with the budget.
        look_s: seconds to look for a plan, whose peak the error then names as a budget that can be met; 0: none is named.
    """
    graph = problem.graph
    floor, index = peak_floor(problem)
    if problem.budget_bytes >= floor:
        return
    gradients = sum(v.size_bytes for v in graph.values if v.kind == "gradients")
    fixed = [(kind, size) for kind, size in (*graph.external, ("gradients", gradients)) if size]
    total = sum(size for _, size in fixed)
    node = graph.nodes[index] if index >= 0 else None
    needed = f"at least {_exact(floor)} is needed (proven), to run {node.where() if node else 'the step'}"
    if problem.budget_bytes < total:
        parts = " + ".join(f"{kind} {size_text(size)}" for kind, size in fixed)
        needed = f"what lives at the end of every step alone is {parts} = {size_text(total)}, and {needed}"
    least, advice = None, ". Raise the budget above that"
    if look_s > 0:
        least = least_budget(problem, look_s).bytes
        advice = f"; the least budget for which a plan was found is {_exact(least)}. Raise the budget to that"
    raise _refusal(
        f"budget {size_text(problem.budget_bytes)} cannot be met: {needed}{advice}, or make the batch, the model or the "
        "optimizer's state smaller; gcsolve.minimum_budget searches longer (`bytes`)",
        problem,
        least,
        floor,
        node,
    )


def _exact(size: int) -> str:
    """Bytes as in "1.23 MB (1234567 bytes)"."""
    return f"{size_text(size)} ({size} bytes)"


def infeasible(problem: Problem, solution: Solution) -> InfeasibleBudget | UnsuitedSolver:
    """The error that says why `solution` does not meet the budget of `problem`."""
    if solution.status is Status.UNSUITED:
        return UnsuitedSolver(
            f'solver={solution.solver!r} does not take a graph of {len(problem.graph.nodes)} ops; use solver="auto"'
        )
    node = problem.graph.nodes[solution.least_node] if solution.least_node is not None else None
    floor, _ = peak_floor(problem)
    least, place = solution.least_bytes, node.where() if node else "an op"
    refusal = f"budget {size_text(problem.budget_bytes)} cannot be met by {solution.solver}"
    if solution.status is Status.TIME_LIMIT and least is None:
        text = f"{refusal} within the time limit; raise time_limit_s or the budget"
    elif least is None:
        text = f"{refusal}; gcsolve.minimum_budget looks for the least that can (`bytes`)"
    else:
        text = (
            f"{refusal}: at least {_exact(floor)} is needed (proven), and the least budget for which it found a plan is "
            f"{_exact(least)}, set by {place}; raise the budget to that"
        )
    return _refusal(text, problem, least, floor, node)


def _refusal(
    text: str, problem: Problem, least_bytes: int | None, floor_bytes: int, node: Node | None
) -> InfeasibleBudget:
    """The error with its figures: the least budget known to suffice, the bytes that are proven to be needed, and the node."""
    return InfeasibleBudget(
        text,
        budget_bytes=problem.budget_bytes,
        least_bytes=least_bytes,
        floor_bytes=floor_bytes,
        op=f"{node.name} ({node.op})" if node else "",
        module=node.module if node else "",
        source=node.source if node else "",
    )
