"""Trace + device + cost model -> `Costed`: the step's Graph with bytes, FLOPs and cost of every op, without a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from gcsolve._torch import storage_key
from gcsolve.capture.joint import Joint
from gcsolve.capture.module_state import attributes_of
from gcsolve.capture.trace import Trace
from gcsolve.cost.base import Basis, CostModel, OpInfo
from gcsolve.cost.devices import DeviceSpec
from gcsolve.cost.flops import op_info
from gcsolve.cost.optimizer_memory import OptimizerMemory, optimizer_memory
from gcsolve.cost.workspace import Workspace, library_bytes, workspace
from gcsolve.graph import Graph
from gcsolve.lowering.lower import Lowered, clean, lower
from gcsolve.problem import Problem
from gcsolve.schedule import Schedule

LIBRARY_BUFFERS = "library buffers"
"""The kind of external bytes under which a Graph has `library_bytes`."""


@dataclass(frozen=True)
class Costed:
    """A lowered step with the cost of every node.

    Attributes:
        trace, lowered: the traced step, and the Graph of its ops and values.
        problem: the graph and the cost of each node; its budget is 0.
        flops: FLOPs of each node, in node order.
        estimated_workspace: names of the ops whose workspace is estimated, not measured.
        costed_by_bytes: names of the ops without a FLOP formula.
        estimated_cost: names of the ops that the cost model could not measure.
    """

    trace: Trace
    lowered: Lowered
    problem: Problem
    flops: tuple[int, ...]
    estimated_workspace: tuple[str, ...]
    costed_by_bytes: tuple[str, ...]
    estimated_cost: tuple[str, ...] = ()

    def overhead_flops(self, schedule: Schedule) -> float:
        """Recompute FLOPs of `schedule` / FLOPs of the store-all step, both of the ops that have a formula alone."""
        total = sum(self.flops)
        extra = sum(f * (n - 1) for f, n in zip(self.flops, schedule.runs(self.problem.graph), strict=True))
        return extra / total if total else 0.0


def storage_bytes(tensors: Iterable[torch.Tensor], round_bytes: Callable[[int], int] = int) -> int:
    """Bytes of the distinct storages of `tensors`, the bytes of each rounded by `round_bytes`."""
    sizes: dict[int, int] = {}
    for t in tensors:
        sizes[storage_key(t)] = t.untyped_storage().nbytes()
    return sum(round_bytes(size) for size in sizes.values())


def external(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    joint: Joint,
    attributes: Sequence[torch.Tensor],
    optimizer: OptimizerMemory,
    gradient_accumulation: bool,
    round_bytes: Callable[[int], int],
) -> tuple[tuple[str, int], ...]:
    """(kind, bytes) of what is alive during the whole step.

    Args:
        inputs: the flat tensors of the call; one whose storage the model holds is not counted again.
        attributes: tensors in plain attributes of the model's modules, counted as buffers.
        gradient_accumulation: whether gradients of earlier steps are alive.
    """
    others = (*attributes, *joint.constants.values())
    of_model = {storage_key(t) for t in (*model.parameters(), *model.buffers(), *others)}
    return (
        ("parameters", storage_bytes(model.parameters(), round_bytes)),
        ("buffers", storage_bytes((*model.buffers(), *others), round_bytes)),
        ("inputs", storage_bytes((t for t in inputs if storage_key(t) not in of_model), round_bytes)),
        ("optimizer", optimizer.state_bytes),
        ("master weights", optimizer.master_bytes),
        ("accumulated gradients", sum(map(round_bytes, _gradient_bytes(joint))) if gradient_accumulation else 0),
    )


def _gradient_bytes(joint: Joint) -> list[int]:
    """Bytes of each `.grad` that is alive after a step."""
    placeholders = joint.graph_module.graph.find_nodes(op="placeholder")
    outputs: Any = joint.graph_module.graph.output_node().args[0]
    tensors = [placeholders[i].meta["val"] for o, i in joint.gradients if isinstance(outputs[o], fx.Node)]
    return [t.numel() * t.element_size() for t in tensors]


def _with_optimizer_step(graph: Graph, step_bytes: int, gradient_accumulation: bool) -> Graph:
    """The graph whose last node (the end of the step, when the caller holds all outputs and gradients) is the optimizer's
    step too: the optimizer's temporaries, `step_bytes`, are its workspace.

    With gradient accumulation, this step's gradients have been added to the accumulated ones and freed by then.
    """
    freed_bytes = sum(v.size_bytes for v in graph.values if v.kind == "gradients") if gradient_accumulation else 0
    if step_bytes - freed_bytes <= graph.nodes[-1].workspace_bytes:
        return graph
    last = replace(graph.nodes[-1], name="optimizer.step()", workspace_bytes=step_bytes - freed_bytes)
    return replace(graph, nodes=(*graph.nodes[:-1], last))


def _with_copied_gradient(graph: Graph, joint: Joint, round_bytes: Callable[[int], int]) -> Graph:
    """The graph whose last node has as workspace the largest copy of a gradient that autograd makes when it stores `.grad`:
    it copies the gradients with other strides than their parameters have, one after the other."""
    inputs = joint.graph_module.graph.find_nodes(op="placeholder")
    outputs: Any = joint.graph_module.graph.output_node().args[0]
    pairs = [
        (outputs[o].meta["val"], inputs[i].meta["val"]) for o, i in joint.gradients if isinstance(outputs[o], fx.Node)
    ]
    copied = [round_bytes(g.numel() * g.element_size()) for g, t in pairs if not _have_same_layout(g, t)]
    last = replace(graph.nodes[-1], workspace_bytes=max(copied, default=0))
    return replace(graph, nodes=(*graph.nodes[:-1], last))


def _have_same_layout(gradient: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether autograd takes the gradient's strides for the tensor's: a dimension of size 1 may have any but stride 0."""
    strides = zip(gradient.shape, gradient.stride(), tensor.stride(), strict=True)
    return all(a == b if size != 1 else a != 0 for size, a, b in strides)


def costed(
    trace: Trace,
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    *,
    device: DeviceSpec,
    cost: CostModel,
    optimizer: Any,
    scope: str,
    gradient_accumulation: bool,
    measure: bool,
    progress: bool | None = False,
) -> Costed:
    """Give every op of the trace its bytes, workspace, FLOPs and cost.

    Args:
        inputs: the flat tensors of the example input.
        scope: "step" counts what is alive during the whole step and the optimizer's step; "activations" only what forward
            and backward allocate.
        gradient_accumulation: whether gradients of earlier steps are alive when the step begins.
        measure: run ops that may have a workspace once on this machine; else estimate it.
        progress: show a progress bar while the cost model runs ops.
    """
    clean(trace.joint)
    cost = cost.prepare(list(trace.joint.graph_module.graph.nodes), progress)
    workspaces: dict[fx.Node, Workspace] = {}

    def workspace_bytes(node: fx.Node) -> int:
        workspaces[node] = workspace(node, device, measure=measure)
        return workspaces[node].size_bytes

    if scope == "step":
        lowered = _lowered_step(trace, model, inputs, device, optimizer, gradient_accumulation, workspace_bytes)
    else:
        round_bytes = _allocator_rounding(device)
        lowered = lower(trace, (), round_bytes, workspace_bytes)
        lowered = replace(lowered, graph=_with_copied_gradient(lowered.graph, trace.joint, round_bytes))
    infos = [_info(node, item.op) for node, item in zip(lowered.origin, lowered.graph.nodes, strict=True)]
    costs = tuple(0.0 if info is None else cost.cost(info) for info in infos)
    ops_by_basis: dict[Basis, set[str]] = {basis: set() for basis in Basis}
    for info in infos:
        if info is not None:
            ops_by_basis[cost.basis(info)].add(info.target)
    return Costed(
        trace=trace,
        lowered=lowered,
        problem=Problem(lowered.graph, costs, 0, cost.unit),
        flops=tuple(0 if info is None else info.flops for info in infos),
        estimated_workspace=tuple(
            sorted({str(node.target) for node, space in workspaces.items() if not space.measured and space.size_bytes})
        ),
        costed_by_bytes=tuple(sorted(ops_by_basis[Basis.BYTES])),
        estimated_cost=tuple(sorted(ops_by_basis[Basis.FALLBACK])),
    )


def _lowered_step(
    trace: Trace,
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    device: DeviceSpec,
    optimizer: Any,
    gradient_accumulation: bool,
    workspace_bytes: Callable[[fx.Node], int],
) -> Lowered:
    """The lowered trace with all that is alive during the step as external bytes, and the optimizer's step at its end."""
    round_bytes = _allocator_rounding(device)
    optimizer_bytes = optimizer_memory(optimizer, model.parameters(), device.kind, round_bytes)
    attributes = [t for name, t in attributes_of(model, torch.Tensor).items() if name not in trace.replaced]
    outside = external(model, inputs, trace.joint, attributes, optimizer_bytes, gradient_accumulation, round_bytes)
    libraries = library_bytes(trace.joint.graph_module.graph.nodes, device)
    lowered = lower(trace, (*outside, (LIBRARY_BUFFERS, libraries)), round_bytes, workspace_bytes)
    graph = lowered.graph
    if not gradient_accumulation:
        graph = _with_copied_gradient(graph, trace.joint, round_bytes)
    return replace(lowered, graph=_with_optimizer_step(graph, optimizer_bytes.step_bytes, gradient_accumulation))


def _allocator_rounding(device: DeviceSpec) -> Callable[[int], int]:
    """The function from the bytes of a storage to the bytes that the device's allocator uses for it."""
    block = device.allocator_block_bytes
    return lambda size_bytes: -(-size_bytes // block) * block


def _info(node: fx.Node | None, op: str) -> OpInfo | None:
    """The facts for the cost model; None for a node of the Graph that is no op of the trace or saves a generator's state."""
    return None if node is None or op == "rng_state" else op_info(node)
