"""Trace + device + cost model -> `Costed`: the Graph with its bytes, FLOPs and times, before any budget is known."""

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
"""The external kind of `library_bytes`."""


@dataclass(frozen=True)
class Costed:
    """`problem` has no budget yet; `flops[i]` of node i. Ops by name: `estimated_workspace`, whose workspace was estimated,
    not measured; `costed_by_bytes`, that have no FLOP formula; `estimated_cost`, whose cost was to be measured and could
    not."""

    trace: Trace
    lowered: Lowered
    problem: Problem
    flops: tuple[int, ...]
    estimated_workspace: tuple[str, ...]
    costed_by_bytes: tuple[str, ...]
    estimated_cost: tuple[str, ...] = ()

    def overhead_flops(self, schedule: Schedule) -> float:
        """Recompute FLOPs of `schedule` / store-all step FLOPs, of the ops that have a formula."""
        total = sum(self.flops)
        extra = sum(f * (n - 1) for f, n in zip(self.flops, schedule.runs(self.problem.graph), strict=True))
        return extra / total if total else 0.0


def storage_bytes(tensors: Iterable[torch.Tensor], round_bytes: Callable[[int], int] = int) -> int:
    """Bytes of the distinct storages among `tensors`."""
    found: dict[int, int] = {}
    for t in tensors:
        found[storage_key(t)] = t.untyped_storage().nbytes()
    return sum(round_bytes(size) for size in found.values())


def external(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    joint: Joint,
    held_attributes: Sequence[torch.Tensor],
    optimizer: OptimizerMemory,
    gradient_accumulation: bool,
    round_bytes: Callable[[int], int],
) -> tuple[tuple[str, int], ...]:
    """(kind, bytes) of what lives through the whole step."""
    others = (*held_attributes, *joint.constants.values())
    held = {storage_key(t) for t in (*model.parameters(), *model.buffers(), *others)}
    return (
        ("parameters", storage_bytes(model.parameters(), round_bytes)),
        ("buffers", storage_bytes((*model.buffers(), *others), round_bytes)),
        ("inputs", storage_bytes((t for t in inputs if storage_key(t) not in held), round_bytes)),
        ("optimizer", optimizer.state_bytes),
        ("master weights", optimizer.master_bytes),
        ("accumulated gradients", sum(map(round_bytes, _gradient_bytes(joint))) if gradient_accumulation else 0),
    )


def _gradient_bytes(joint: Joint) -> list[int]:
    """Bytes of each `.grad` that a step leaves behind."""
    placeholders = joint.graph_module.graph.find_nodes(op="placeholder")
    outputs: Any = joint.graph_module.graph.output_node().args[0]
    graded = [placeholders[at].meta["val"] for p, at in joint.gradients if isinstance(outputs[p], fx.Node)]
    return [t.numel() * t.element_size() for t in graded]


def _with_optimizer_step(graph: Graph, step_bytes: int, gradient_accumulation: bool) -> Graph:
    """The graph whose last node, where the caller holds what the step has made, also is the optimizer's step: its
    temporaries are that node's workspace. With accumulation the new gradients are gone by then, added to the old."""
    gone = sum(v.size_bytes for v in graph.values if v.kind == "gradients") if gradient_accumulation else 0
    if step_bytes - gone <= graph.nodes[-1].workspace_bytes:
        return graph
    last = replace(graph.nodes[-1], name="optimizer.step()", workspace_bytes=step_bytes - gone)
    return replace(graph, nodes=(*graph.nodes[:-1], last))


def _with_copied_gradient(graph: Graph, joint: Joint, round_bytes: Callable[[int], int]) -> Graph:
    """The graph whose last node also is autograd's handing out of the gradients: those that are not laid out as their
    parameters it copies, one at a time."""
    inputs = joint.graph_module.graph.find_nodes(op="placeholder")
    outputs: Any = joint.graph_module.graph.output_node().args[0]
    pairs = [
        (outputs[p].meta["val"], inputs[at].meta["val"]) for p, at in joint.gradients if isinstance(outputs[p], fx.Node)
    ]
    copied = [round_bytes(g.numel() * g.element_size()) for g, t in pairs if not _laid_out_alike(g, t)]
    last = replace(graph.nodes[-1], workspace_bytes=max(copied, default=0))
    return replace(graph, nodes=(*graph.nodes[:-1], last))


def _laid_out_alike(gradient: torch.Tensor, tensor: torch.Tensor) -> bool:
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
        scope: "step" counts what always lives and the optimizer's step; "activations" only what forward and backward
            allocate.
        gradient_accumulation: gradients of earlier steps are there when the step begins.
        measure: run ops that may have a workspace once on this machine; else estimate it.
        progress: show a bar while ops are run for their time.
    """
    clean(trace.joint)
    cost = cost.prepare(list(trace.joint.graph_module.graph.nodes), progress)
    block = device.allocator_block_bytes

    def round_bytes(size: int) -> int:
        return -(-size // block) * block

    spaces: dict[fx.Node, Workspace] = {}

    def space(node: fx.Node) -> int:
        spaces[node] = workspace(node, device, measure=measure)
        return spaces[node].size_bytes

    if scope == "step":
        taken = optimizer_memory(optimizer, model.parameters(), device.kind, round_bytes)
        attributes = [t for name, t in attributes_of(model, torch.Tensor).items() if name not in trace.replaced]
        outside = external(model, inputs, trace.joint, attributes, taken, gradient_accumulation, round_bytes)
        libraries = library_bytes(trace.joint.graph_module.graph.nodes, device)
        lowered = lower(trace, (*outside, (LIBRARY_BUFFERS, libraries)), round_bytes, space)
        if not gradient_accumulation:
            lowered = replace(lowered, graph=_with_copied_gradient(lowered.graph, trace.joint, round_bytes))
        lowered = replace(lowered, graph=_with_optimizer_step(lowered.graph, taken.step_bytes, gradient_accumulation))
    else:
        lowered = lower(trace, (), round_bytes, space)
        lowered = replace(lowered, graph=_with_copied_gradient(lowered.graph, trace.joint, round_bytes))
    infos = [_info(node, item.op) for node, item in zip(lowered.origin, lowered.graph.nodes, strict=True)]
    costs = tuple(0.0 if info is None else cost.cost(info) for info in infos)
    problem = Problem(lowered.graph, costs, 0, cost.unit)
    by_basis: dict[Basis, set[str]] = {basis: set() for basis in Basis}
    for info in infos:
        if info is not None:
            by_basis[cost.basis(info)].add(info.target)
    return Costed(
        trace=trace,
        lowered=lowered,
        problem=problem,
        flops=tuple(0 if info is None else info.flops for info in infos),
        estimated_workspace=tuple(
            sorted({str(n.target) for n, w in spaces.items() if not w.measured and w.size_bytes})
        ),
        costed_by_bytes=tuple(sorted(by_basis[Basis.BYTES])),
        estimated_cost=tuple(sorted(by_basis[Basis.FALLBACK])),
    )


def _info(node: fx.Node | None, op: str) -> OpInfo | None:
    return None if node is None or op == "rng_state" else op_info(node)
