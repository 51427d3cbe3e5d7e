"""The public functions: the pipeline model → trace → costs → solver → emit, as short as it is."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gcsolve.capture.target_kernels import target_kernels
from gcsolve.capture.trace import Trace, parse_example, trace
from gcsolve.cost.base import CostModel, get_cost
from gcsolve.cost.devices import DeviceSpec, get_device
from gcsolve.cost.optimizer_memory import named_optimizer
from gcsolve.errors import ArgumentError, InfeasibleBudget, UnsuitedSolver
from gcsolve.evaluation.verify import VerifyReport, verify
from gcsolve.execution.emit import emit
from gcsolve.execution.planned_module import Steps, is_planned, planned_module, settled_signature
from gcsolve.execution.step import Step, tangent_likes
from gcsolve.graph import Node
from gcsolve.lowering.costed import Costed, costed, storage_bytes
from gcsolve.ops.run import free_memory_bytes, is_here
from gcsolve.plan import Asked, Plan
from gcsolve.problem import Problem
from gcsolve.schedule import schedule_from_order
from gcsolve.simulate import simulate
from gcsolve.solver.base import Solution, Solver, Status
from gcsolve.solver.front import solve_problem
from gcsolve.solver.minimum import minimum_any_budget, minimum_peak, peak_floor, some_plan
from gcsolve.solver.registry import get_solver
from gcsolve.util.checks import check_limits, flag
from gcsolve.util.progress import shown
from gcsolve.util.sizes import budget_bytes, check_budget, size_text
from gcsolve.util.tree import flatten

LOOK_S = 5.0
"""Seconds for a plan to name, once a budget is proven to be too small."""


@dataclass(frozen=True)
class Settings:
    """The keyword arguments that the public functions share, checked."""

    loss: Callable[[Any], Any] | None
    optimizer: Any
    scope: str
    device: DeviceSpec
    cost: CostModel
    all_outputs: bool
    accumulate: bool = False
    autocast_backward: bool = False

    @classmethod
    def checked(
        cls,
        model: nn.Module,
        *,
        loss: Any,
        optimizer: Any,
        scope: str,
        device: Any,
        cost: Any,
        grad_outputs: str,
        accumulate: bool,
        autocast_backward: bool = False,
    ) -> Settings:
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
        if grad_outputs not in ("auto", "all"):
            raise ArgumentError(f'grad_outputs={grad_outputs!r} is not known; known: "auto", "all"')
        spec = get_device(_device_of(model) if device is None else device)
        for name, value in (("accumulate", accumulate), ("autocast_backward", autocast_backward)):
            flag(name, value)
        model_cost, state = get_cost(cost, spec), named_optimizer(optimizer)
        return cls(loss, state, scope, spec, model_cost, grad_outputs == "all", accumulate, autocast_backward)

    def trace(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
        """The step of that call, with the device's kernels."""
        tensors, _ = flatten((args, kwargs), "example_input")
        kernels = target_kernels(self.device, (*model.parameters(), *model.buffers(), *tensors))
        return trace(model, args, kwargs, self.loss, self.all_outputs, kernels, self.autocast_backward)

    def default_budget_bytes(self, model: nn.Module) -> int:
        """The device's memory less its reserve: what is free and what the model has already, where the device is here.

        Raises:
            ArgumentError: scope="activations", which no device's memory says anything about.
        """
        if self.scope != "step":
            raise ArgumentError(
                "scope='activations' has no default budget: the device's memory also holds what it does not count; "
                'give budget_gb=<GB> or budget=<"20GiB" or a fraction of the store-all peak>'
            )
        spec = self.device
        if not is_here(spec):
            return spec.memory_bytes - spec.reserve_bytes
        held = torch.cuda.memory_reserved() if spec.kind == "cuda" else storage_bytes(_real_tensors(model))
        return max(1, free_memory_bytes(spec) + held - spec.reserve_bytes)


def _real_tensors(model: nn.Module) -> list[torch.Tensor]:
    return [t for t in (*model.parameters(), *model.buffers()) if t.device.type != "meta"]


def _captured_tensors(loss: Any) -> list[str]:
    """Names of the tensors a loss function carries with it: closed over, global, bound by default or by partial."""
    if isinstance(loss, functools.partial):
        bound = {**{f"argument {i}": v for i, v in enumerate(loss.args)}, **loss.keywords}
        return [k for k, v in bound.items() if isinstance(v, torch.Tensor)] + _captured_tensors(loss.func)
    if not inspect.isfunction(loss):
        return []
    seen = inspect.getclosurevars(loss)
    defaults = {f"default {i}": v for i, v in enumerate(loss.__defaults__ or ())} | dict(loss.__kwdefaults__ or {})
    return [k for k, v in {**seen.globals, **seen.nonlocals, **defaults}.items() if isinstance(v, torch.Tensor)]


def _device_of(model: nn.Module) -> str:
    tensors = _real_tensors(model)
    return str(tensors[0].device) if tensors else "cpu"


@dataclass(frozen=True)
class TracedCall:
    """A traced and costed step, its flat inputs and how long that took."""

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
        started = time.perf_counter()
        tensors, template = flatten((args, kwargs), "example_input")
        with shown(progress, f"tracing {type(model).__name__}"):
            traced = settings.trace(model, args, kwargs)
        real = all(t.device.type != "meta" for t in (*model.parameters(), *model.buffers()))
        made = costed(
            traced,
            model,
            tensors,
            device=settings.device,
            cost=settings.cost,
            optimizer=settings.optimizer,
            scope=settings.scope,
            accumulate=settings.accumulate,
            measure=real,
            progress=progress,
        )
        graph = made.problem.graph
        store_all = simulate(made.problem, schedule_from_order(graph, range(len(graph.nodes)))).peak_bytes
        return cls(made, store_all, settled_signature(model, traced, tensors, template), time.perf_counter() - started)

    def step(self, solution: Solution) -> Step:
        assert solution.schedule is not None
        made = self.costed
        return Step(made.trace, emit(made.trace.joint, made.lowered, solution.schedule), tangent_likes(made.trace))


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
    grad_outputs: str = "auto",
    accumulate: bool = False,
    autocast_backward: bool = False,
    progress: bool | None = None,
) -> Plan:
    """Plan one training step of `model` inside a memory budget at the least recomputation.

    Args:
        model: any module that `torch.export` (non-strict) accepts; weights real, fake or on meta. Never changed.
        example_input: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        budget_gb: allowed peak in GB (1e9 bytes).
        budget: instead, a size ("20GiB") or a fraction of the store-all peak in (0, 1]. Neither: the device's memory (what
            is free of it, when it is here) less a reserve, see `gcsolve.cost.devices.RESERVES`.
        loss: maps the model's output to a scalar, traced with the model; the planned module then returns that scalar.
            None: the output's gradients come from outside.
        optimizer: a `torch.optim` class, its name or an instance, or bytes per parameter: its state, its master weights and
            what its step takes count in the budget.
        scope: "step" counts everything; "activations" only what forward and backward allocate.
        solver: a name in `gcsolve.solvers()`, or a solver object.
        cost: "flops", "roofline" ("auto"), "measured" (each distinct op is run on the device, which must be here; kept in
            the user's cache directory) or a cost object.
        device: where it will run: "cpu", "cuda", or a spec by name ("h200"); default: where the model is. For a GPU that
            the model is not on, the step is traced with that GPU's kernels; such a plan is read here and runs there.
        time_limit_s: seconds for the solver; at the limit the best plan so far is returned.
        gap: (plan - bound) / plan step cost at which the solver may stop.
        grad_outputs: "auto": when the model returns a scalar loss, only scalars are expected to receive gradients;
            "all": every differentiable output is.
        accumulate: gradients of earlier steps are there when the step begins (no `zero_grad` before it), and count.
        autocast_backward: backward will be called inside the autocast block that is around the call, where eager casts
            within some backward formulas too; else it is called outside, as torch advises.
        progress: show what is being done; default: only when standard error is a terminal.

    Returns:
        a `Plan`; `plan.module` trains inside the budget with the original's results.

    Raises:
        InfeasibleBudget: no plan fits; has `least_bytes`, for which a plan was found, `floor_bytes`, which every schedule
            needs, and the op, module and source line that set them.
        TraceError: the model cannot be traced, or has nothing to differentiate.
        ArgumentError: an argument has a value that cannot be used.
        SolverError: a solver of your own raised, or its answer does not hold.

    Examples:
        >>> import torch, gcsolve
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
        >>> plan = gcsolve.solve(model, torch.randn(256, 64), budget=0.9)
        >>> plan.peak_bytes <= plan.budget_bytes
        True
    """
    check_budget(budget_gb, budget)
    get_solver(solver)
    check_limits(time_limit_s, gap)
    args, kwargs = parse_example(example_input)
    settings = Settings.checked(
        model,
        loss=loss,
        optimizer=optimizer,
        scope=scope,
        device=device,
        cost=cost,
        grad_outputs=grad_outputs,
        accumulate=accumulate,
        autocast_backward=autocast_backward,
    )
    made = TracedCall.of(model, args, kwargs, settings, progress)
    session = Session(model, args, kwargs, settings, made)
    return session.plan(session.budget_bytes(budget_gb, budget), solver, time_limit_s, gap, progress)


@dataclass(frozen=True)
class Session:
    """One traced and costed model call: any number of plans come from it without tracing again."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    settings: Settings
    made: TracedCall

    def budget_bytes(self, budget_gb: float | None, budget: str | float | None) -> int:
        """What the caller wrote, in bytes; nothing: what the device has."""
        if budget_gb is None and budget is None:
            return self.settings.default_budget_bytes(self.model)
        return budget_bytes(budget_gb, budget, self.made.store_all_bytes)

    def plan(
        self, allowed: int, solver: str | Solver, time_limit_s: float, gap: float, progress: bool | None = None
    ) -> Plan:
        with shown(progress, f"solving for {size_text(allowed)}"):
            solution = self.solution(allowed, solver, time_limit_s, gap)
        return self.planned(solution, allowed, Asked(solver, time_limit_s, gap))

    def solution(self, allowed: int, solver: str | Solver, time_limit_s: float, gap: float) -> Solution:
        """The solver's answer alone, nothing emitted; raises for a budget that it does not meet."""
        return _solved(self.made, allowed, solver, time_limit_s, gap)

    def planned(self, solution: Solution, allowed: int, asked: Asked) -> Plan:
        """The plan that carries out `solution`, which other calls are planned like."""

        def replan(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
            again = TracedCall.of(model, args, kwargs, self.settings)
            try:
                return again.step(_solved(again, allowed, asked.solver, asked.time_limit_s, asked.gap))
            except InfeasibleBudget as error:
                error.args = (
                    f"this call differs from those planned so far (shapes, dtypes, arguments or modes), and it was planned "
                    f"for the same {size_text(allowed)}: {error}",
                )
                raise

        steps = Steps(replan, self.settings.loss)
        steps.training = self.model.training
        steps.add(self.made.key, self.made.step(solution))
        return Plan(
            module=planned_module(self.model, steps),
            budget_bytes=allowed,
            baseline_peak_bytes=self.made.store_all_bytes,
            solution=solution,
            asked=asked,
            costed=self.made.costed,
            scope=self.settings.scope,
            device=self.settings.device.name,
            cost=self.settings.cost.name,
            trace_s=self.made.seconds,
            session=self,
        )

    def plan_at(
        self,
        budget_gb: float | None = None,
        *,
        budget: str | float | None = None,
        solver: str | Solver = "auto",
        time_limit_s: float = 60.0,
        gap: float = 0.005,
        progress: bool | None = None,
    ) -> Plan:
        check_budget(budget_gb, budget)
        get_solver(solver)
        check_limits(time_limit_s, gap)
        allowed = self.budget_bytes(budget_gb, budget)
        return self.plan(allowed, solver, time_limit_s, gap, progress)

    def minimum(self, time_limit_s: float = 60.0) -> MinimumBudget:
        check_limits(time_limit_s)
        problem = self.made.costed.problem
        found = minimum_peak(problem, 0.6 * time_limit_s)
        node = problem.graph.nodes[found.node]
        lowest, floor = minimum_any_budget(problem, found.bytes, 0.4 * time_limit_s)
        op = f"{node.name} ({node.op})"
        return MinimumBudget(found.bytes, found.lower_bytes, lowest, floor, op, node.module, node.source)

    def verify(self, plan: Plan, **options: Any) -> VerifyReport:
        return verify(plan, self.model, self.args, self.kwargs, self.settings.loss, self.settings.optimizer, **options)


@dataclass(frozen=True)
class MinimumBudget:
    """How low a budget can go, in bytes.

    `any_bytes`: the least budget for which a plan was found, with any number of reruns: the least for `solve`; no schedule
    at all is below `floor_bytes` (proven). `bytes`, which is never less: the least for which one was found that reruns each
    value at most once (so at less overhead); none of these is below `lower_bytes` (proven). `op`, `module`, `source`: what
    sets `bytes`.
    """

    bytes: int
    lower_bytes: int
    any_bytes: int
    floor_bytes: int
    op: str
    module: str
    source: str


def minimum_budget(
    model: nn.Module,
    example_input: Any,
    *,
    loss: Callable[[Any], Any] | None = None,
    optimizer: Any = None,
    scope: str = "step",
    cost: str | CostModel = "auto",
    device: Any = None,
    time_limit_s: float = 60.0,
    grad_outputs: str = "auto",
    accumulate: bool = False,
    autocast_backward: bool = False,
) -> MinimumBudget:
    """How low a budget `solve` can meet (`any_bytes`), how low one rerun a value goes (`bytes`), and the op that sets that.

    Arguments and errors as for `solve`; with more `time_limit_s`, found and proven figures come closer to each other.
    """
    check_limits(time_limit_s)
    args, kwargs = parse_example(example_input)
    settings = Settings.checked(
        model,
        loss=loss,
        optimizer=optimizer,
        scope=scope,
        device=device,
        cost=cost,
        grad_outputs=grad_outputs,
        accumulate=accumulate,
        autocast_backward=autocast_backward,
    )
    return Session(model, args, kwargs, settings, TracedCall.of(model, args, kwargs, settings)).minimum(time_limit_s)


def _solved(made: TracedCall, allowed: int, solver: str | Solver, time_limit_s: float, gap: float) -> Solution:
    problem = made.costed.problem.with_budget(allowed)
    refuse_below_floor(problem, look_s=min(LOOK_S, time_limit_s))
    solution = solve_problem(problem, solver, time_limit_s=time_limit_s, gap=gap)
    if solution.schedule is None or solution.status is Status.OVER_BUDGET:
        raise infeasible(problem, solution)
    return solution


def refuse_below_floor(problem: Problem, look_s: float = 0.0) -> None:
    """Say at once when the budget is below what no recomputation can lower; `look_s`: seconds to find what would do."""
    graph = problem.graph
    floor, at = peak_floor(problem)
    if problem.budget_bytes >= floor:
        return
    gradients = sum(v.size_bytes for v in graph.values if v.kind == "gradients")
    fixed = [(kind, size) for kind, size in (*graph.external, ("gradients", gradients)) if size]
    total = sum(size for _, size in fixed)
    node = graph.nodes[at] if at >= 0 else None
    needed = f"at least {_exact(floor)} is needed (proven), to run {node.where() if node else 'the step'}"
    if problem.budget_bytes < total:
        parts = " + ".join(f"{kind} {size_text(size)}" for kind, size in fixed)
        needed = f"what lives at the end of every step alone is {parts} = {size_text(total)}, and {needed}"
    least, advice = None, ". Raise the budget above that"
    if look_s > 0:
        least = some_plan(problem.with_budget(floor), time.perf_counter() + look_s).peak_bytes
        advice = f"; the least budget for which a plan was found is {_exact(least)}. Raise the budget to that"
    raise _refusal(
        f"budget {size_text(problem.budget_bytes)} cannot be met: {needed}{advice}, or make the batch, the model or the "
        "optimizer's state smaller; gcsolve.minimum_budget searches longer (`any_bytes`)",
        problem,
        least,
        floor,
        node,
    )


def _exact(size: int) -> str:
    return f"{size_text(size)} ({size} bytes)"


def infeasible(problem: Problem, solution: Solution) -> InfeasibleBudget | UnsuitedSolver:
    """The error that says why `solution` does not meet the budget."""
    if solution.status is Status.UNSUITED:
        return UnsuitedSolver(
            f'solver={solution.solver!r} does not take a graph of {len(problem.graph.nodes)} ops; use solver="auto"'
        )
    node = problem.graph.nodes[solution.least_node] if solution.least_node is not None else None
    floor, _ = peak_floor(problem)
    least, at = solution.least_bytes, node.where() if node else "an op"
    asked = f"budget {size_text(problem.budget_bytes)} cannot be met by {solution.solver}"
    if solution.status is Status.TIME_LIMIT and least is None:
        text = f"{asked} within the time limit; raise time_limit_s or the budget"
    elif least is None:
        text = f"{asked}; gcsolve.minimum_budget looks for the least that can (`any_bytes`)"
    else:
        text = (
            f"{asked}: at least {_exact(floor)} is needed (proven), and the least budget for which it found a plan is "
            f"{_exact(least)}, set by {at}; raise the budget to that"
        )
    return _refusal(text, problem, least, floor, node)


def _refusal(
    text: str, problem: Problem, least_bytes: int | None, floor_bytes: int, node: Node | None
) -> InfeasibleBudget:
    """The error with what would do, what is needed at the least, and the op, module and line that set it."""
    return InfeasibleBudget(
        text,
        budget_bytes=problem.budget_bytes,
        least_bytes=least_bytes,
        floor_bytes=floor_bytes,
        op=f"{node.name} ({node.op})" if node else "",
        module=node.module if node else "",
        source=node.source if node else "",
    )
