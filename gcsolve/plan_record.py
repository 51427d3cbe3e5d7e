"""The data of a plan: `PlanRecord`, its `Decision`s, and `MinimumBudget`. `Plan` (plan.py) adds the methods."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from gcsolve.lowering.costed import Costed
from gcsolve.lowering.node_facts import tensors_of
from gcsolve.problem import Problem
from gcsolve.schedule import Schedule
from gcsolve.simulate import Replay, simulate
from gcsolve.solver.base import Certificate, Solution, Solver, Status
from gcsolve.util.sizes import size_text


@dataclass(frozen=True)
class Decision:
    """What a plan does with one forward value that backward reads.

    Attributes:
        module, op, source: module path, op and the user's line that compute the value.
        shape, dtype, size_bytes: of the value.
        action: "keep" or "recompute".
        times: how often its op is rerun.
        read_by: the first backward op that reads it.
    """

    module: str
    op: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    action: str
    times: int
    read_by: str


@dataclass(frozen=True)
class SolverOptions:
    """The solver, by name or as an object; its time limit in seconds; and the gap to the bound at which it may stop."""

    solver: str | Solver = "auto"
    time_limit_s: float = 60.0
    gap: float = 0.005


@dataclass(frozen=True)
class MinimumBudget:
    """The least budgets of a step, in bytes.

    Attributes:
        bytes: the least budget for which a plan was found, with any number of reruns; `gcsolve.solve` finds a plan for it.
        floor_bytes: every schedule needs at least this (proven).
        one_rerun_bytes: the least budget found for a plan that recomputes each value at most once, with less overhead.
        one_rerun_floor_bytes: every such plan needs at least this (proven).
        op, module, source: the op at the peak of the plan for `bytes`, its module path, and the user's line.
    """

    bytes: int
    floor_bytes: int
    one_rerun_bytes: int
    one_rerun_floor_bytes: int
    op: str
    module: str
    source: str


@dataclass(frozen=True, repr=False)
class PlanRecord:
    """A schedule for one training step of a model, the module that runs it, and the figures of both.

    Attributes:
        module: trains within the budget with the results of the original, whose parameters, buffers and attributes it shares.
        model_name: the class of the planned model.
        budget_bytes: the budget, counted as `scope` says.
        baseline_peak_bytes: the predicted peak when nothing is recomputed.
        solution: the solver's answer, with bound and gap.
        solver_options: solver, time limit and gap that were asked for.
        costed: the traced and costed step.
        scope: "step" or "activations".
        device, cost: names of the device and of the cost model.
        trace_s: seconds spent on trace and costs; `solution.solve_s` has those of the solver.
    """

    module: nn.Module
    model_name: str
    budget_bytes: int
    baseline_peak_bytes: int
    solution: Solution
    solver_options: SolverOptions
    costed: Costed
    scope: str
    device: str
    cost: str
    trace_s: float

    @property
    def problem(self) -> Problem:
        return self.costed.problem.with_budget(self.budget_bytes)

    @property
    def schedule(self) -> Schedule:
        assert self.solution.schedule is not None
        return self.solution.schedule

    @cached_property
    def replay(self) -> Replay:
        """The simulator's account of the schedule, action by action."""
        return simulate(self.problem, self.schedule)

    @property
    def status(self) -> Status:
        return self.solution.status

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the whole step (of forward and backward alone when scope="activations")."""
        return self.replay.peak_bytes

    @property
    def overhead(self) -> float:
        """Recompute cost / cost of the store-all step, in the plan's cost model."""
        return self.replay.overhead

    @cached_property
    def overhead_flops(self) -> float:
        """Recompute FLOPs / FLOPs of the store-all step, both of the ops that have a formula alone."""
        return self.costed.overhead_flops(self.schedule)

    @property
    def lower_bound(self) -> float:
        """No schedule of the class `certificate` has a smaller overhead."""
        return self.solution.lower_bound

    @property
    def certificate(self) -> Certificate:
        """The class of schedules that `lower_bound` is proven for."""
        return self.solution.certificate

    @property
    def any_bound(self) -> float:
        """No schedule at all in this op order has a smaller overhead."""
        return self.solution.any_bound

    @property
    def gap(self) -> float:
        """(cost of the plan's step - cost of a step at the bound) / cost of the plan's step."""
        return self.solution.gap

    @property
    def breakdown(self) -> dict[str, int]:
        """Bytes by kind at the peak, largest first; they sum to `peak_bytes`."""
        return dict(sorted(self.replay.breakdown, key=lambda part: -part[1]))

    @property
    def peak_at(self) -> str:
        """The op that runs at the peak: name, op, module path, source line."""
        action: Any = self.schedule.actions[self.replay.peak_action]
        return self.problem.graph.nodes[action.node].where()

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        """An entry for each forward value that backward reads, in forward order."""
        graph = self.problem.graph
        runs = self.schedule.runs(graph)
        bases = {v: n for n, v in self.costed.lowered.value_of.items() if n not in self.costed.lowered.views}
        decisions: list[Decision] = []
        for v, value in enumerate(graph.values):
            readers = [r for r in graph.readers[v] if graph.is_backward(r) and graph.nodes[r].op != "step_end"]
            if graph.is_backward(value.producer) or not readers or v not in bases:
                continue
            node = graph.nodes[value.producer]
            tensors = tensors_of(bases[v])
            times = runs[value.producer] - 1
            decisions.append(
                Decision(
                    module=node.module,
                    op=node.op,
                    source=node.source,
                    shape=tuple(tensors[0].shape) if tensors else (),
                    dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
                    size_bytes=value.size_bytes,
                    action="recompute" if times and not value.pinned else "keep",
                    times=times,
                    read_by=graph.nodes[readers[0]].name,
                )
            )
        return tuple(decisions)

    @property
    def _optimizer_note(self) -> list[str]:
        """A line of the summary if the peak is inside the optimizer's step, where no recomputation can lower it; else none."""
        action: Any = self.schedule.actions[self.replay.peak_action]
        last = self.problem.graph.nodes[-1]
        if action.node != len(self.problem.graph.nodes) - 1 or not last.workspace_bytes:
            return []
        return [
            f"the peak is inside optimizer.step(), whose temporaries take {size_text(last.workspace_bytes)}: recomputation "
            "cannot lower it; a fused optimizer (fused=True) takes none"
        ]

    def summary(self) -> str:
        """The plan in a few lines of text."""
        kept = [d for d in self.decisions if d.action == "keep"]
        rerun = [d for d in self.decisions if d.action == "recompute"]
        parts = ", ".join(f"{kind} {size_text(size)}" for kind, size in self.breakdown.items() if size)
        unit = {"s": "time", "flops": "FLOPs"}.get(self.problem.cost_unit, "cost")
        lines = [
            f"{self.solution.solver}: {self.status.name.lower()}, "
            f"peak {size_text(self.peak_bytes)} of budget {size_text(self.budget_bytes)} "
            f"(store-all {size_text(self.baseline_peak_bytes)}, {self.peak_bytes / self.baseline_peak_bytes:.0%})",
            f"overhead {self.overhead:.2%} of {unit} ({self.overhead_flops:.2%} of FLOPs), {self.cost} costs for {self.device}",
            f"bound {self.lower_bound:.2%} for {self.solution.bound_class}"
            + ("" if self.certificate is Certificate.ANY_SCHEDULE else f"; {self.any_bound:.2%} for any schedule")
            + f"; gap {self.gap:.2%}",
            f"at the peak ({parts}) runs {self.peak_at}",
            *self._optimizer_note,
            f"backward reads {len(self.decisions)} forward values: {len(kept)} kept "
            f"({size_text(sum(d.size_bytes for d in kept))}), {len(rerun)} recomputed "
            f"({size_text(sum(d.size_bytes for d in rerun))})",
        ]
        if self.costed.estimated_workspace:
            lines.append(f"workspace estimated, not measured: {_op_names(self.costed.estimated_workspace)}")
        if self.costed.estimated_cost:
            lines.append(f"cost estimated (roofline), not measured: {_op_names(self.costed.estimated_cost)}")
        if self.costed.costed_by_bytes:
            ops, problem = set(self.costed.costed_by_bytes), self.problem
            share = sum(c for c, n in zip(problem.cost, problem.graph.nodes, strict=True) if n.op in ops)
            note = f"no FLOP formula; {share / (problem.total_cost or 1.0):.0%} of the step's {unit}"
            lines.append(f"costed by bytes ({note}): {_op_names(self.costed.costed_by_bytes)}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.summary().splitlines()[0]}>"


def _op_names(ops: tuple[str, ...]) -> str:
    """The ops' short names: "aten.gelu.default" -> "gelu"."""
    return ", ".join(op.removeprefix("aten.").removesuffix(".default") for op in ops)
