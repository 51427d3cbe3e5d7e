"""Joint graph -> Graph: which storages an op reads and makes, what is pinned, and what must run only once.

Views are folded away (a view reads and keeps its storage), so a node of `Graph` is one op that makes storage. Four kinds
of node are added:

| node | stands for |
|---|---|
| `rng_state` | before each random op: the generator's state, from which a rerun draws the same numbers |
| `forward_end` | reads what the forward returns, so that it lives until then |
| `tangents` | makes the output gradients that the backward starts from |
| `step_end` | reads what the caller holds after the step: outputs and gradients |
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import assert_never

import torch
from torch import fx

from gcsolve._torch import storage_key
from gcsolve.capture.joint import GraphOutput, InputItself, Joint, ViewOfInput, ViewOfOutput
from gcsolve.capture.trace import Trace
from gcsolve.errors import TraceError
from gcsolve.graph import Graph, Node, Value
from gcsolve.lowering.node_facts import (
    backward_nodes,
    deciding_inputs,
    is_view,
    may_rerun,
    module_path,
    source_line,
    tensors_of,
)
from gcsolve.ops.facts import is_random

_CHECKS = {"aten._assert_tensor_metadata.default", "aten._assert_scalar.default", "aten.sym_constrain_range.default"}
"""Ops that only check what was traced."""

_SAME_TENSOR = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
"""Ops that return their very input, under another name for autograd; no autograd runs inside the emitted graphs."""

CPU_RNG_STATE_BYTES = 5056
CUDA_RNG_STATE_BYTES = 16


@dataclass(frozen=True)
class Lowered:
    """The Graph and the way back to the joint graph.

    Attributes:
        graph: the step for the solvers.
        origin: for each node of `graph`, the fx node that it stands for: None for `forward_end`, `tangents` and
            `step_end`; the random op for `rng_state`.
        value_of: fx node -> index of the value whose storage it makes or views.
        external: fx nodes that are, or view, what lives through the whole step.
        views: fx nodes that make no storage of their own.
        in_place: sums of gradients that are written into their first operand.
        rng_of: index of a random op's node -> index of its `rng_state`.
        forward_end: index of that node.
    """

    graph: Graph
    origin: tuple[fx.Node | None, ...]
    value_of: dict[fx.Node, int]
    external: frozenset[fx.Node]
    views: frozenset[fx.Node]
    in_place: frozenset[fx.Node]
    rng_of: dict[int, int]
    forward_end: int

    @cached_property
    def tensor_of(self) -> dict[int, torch.Tensor]:
        """Index of a value -> the fake tensor that fills its storage; generator states and numbers have none."""
        tensors_by_value = ((v, tensors_of(n)) for n, v in self.value_of.items() if n not in self.views)
        return {v: tensors[0] for v, tensors in tensors_by_value if tensors}


def lower(
    trace: Trace,
    external: Sequence[tuple[str, int]],
    round_bytes: Callable[[int], int],
    workspace: Callable[[fx.Node], int],
) -> Lowered:
    """The `Graph` of a cleaned trace, with the way back.

    Args:
        external: (kind, bytes) of what lives through the whole step.
        round_bytes: bytes the target's allocator takes for a storage of that many bytes.
        workspace: bytes an op allocates beside its outputs while it runs.

    Raises:
        TraceError: an op returns a view of its input beside a new tensor.
    """
    return _Lowering(trace, round_bytes, workspace).run(external)


# --- before: a graph without what has no effect ---------------------------------------------------------------------------


def clean(joint: Joint) -> None:
    """Drop what has no effect from the joint graph, and keep the old content of mutated inputs that backward reads."""
    graph = joint.graph_module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and str(node.target) in _CHECKS:
            graph.erase_node(node)
        elif node.target in _SAME_TENSOR and graph.output_node() not in node.users:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()
    backward = backward_nodes(joint)
    primals = joint.primal_nodes
    for _, index in joint.mutations:
        if any(user in backward for view in _with_views(primals[index]) for user in view.users):
            _copy_old_content(graph, primals[index])
    joint.graph_module.recompile()


def _with_views(source: fx.Node) -> set[fx.Node]:
    """The node and all views of it."""
    views, stack = {source}, [source]
    while stack:
        for user in stack.pop().users:
            if is_view(user) and user not in views:
                views.add(user)
                stack.append(user)
    return views


def _copy_old_content(graph: fx.Graph, source: fx.Node) -> None:
    """Let all readers of an input that the step overwrites read a copy of it, made when the step begins."""
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        old = graph.call_function(torch.ops.aten.clone.default, (source,))
    content = source.meta["val"]
    with content.fake_mode:
        old.meta = {"val": content.clone()}
    for user in list(source.users):
        if user is not old:
            user.replace_input_with(source, old)


# --- one pass over the joint graph ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Half:
    """Forward or backward. `pinned`: the storages made in it that the caller holds; `pinned_kind`: what these are."""

    rerunnable: bool
    pinned: frozenset[int]
    pinned_kind: str


class _Lowering:
    """One pass over the joint graph; its fields become a `Lowered`."""

    def __init__(self, trace: Trace, round_bytes: Callable[[int], int], workspace: Callable[[fx.Node], int]) -> None:
        self.trace = trace
        self.joint = trace.joint
        self.round_bytes = round_bytes
        self.workspace = workspace
        self.nodes: list[Node] = []
        self.values: list[Value] = []
        self.origin: list[fx.Node | None] = []
        self.value_of: dict[fx.Node, int] = {}
        self.by_storage: dict[int, int] = {}  # storage -> its value
        self.external: set[fx.Node] = set()
        self.external_storages: set[int] = set()
        self.views: set[fx.Node] = set()
        self.rng_of: dict[int, int] = {}
        self.sums: dict[int, int] = {}  # storage of a gradient sum -> the storage that it is written into
        self.in_place: set[fx.Node] = set()
        self.mutated: frozenset[int] = frozenset()  # storages of the inputs that the step overwrites

    def run(self, external: Sequence[tuple[str, int]]) -> Lowered:
        joint, graph = self.joint, self.joint.graph_module.graph
        primals, tangents = joint.primal_nodes, joint.tangent_nodes
        for node in (*primals, *(n for n in graph.nodes if n.op == "get_attr")):
            self._add_external(node)
        self.mutated = self._storages(primals[index] for _, index in joint.mutations)
        forward_results = joint.results[: joint.n_forward_outputs]
        returned = [n for n in forward_results if n is not None]
        gradients = [n for position, _ in joint.gradients if (n := joint.results[position]) is not None]
        new_contents = {position for position, _ in joint.mutations}
        outputs = [n for at, n in enumerate(forward_results) if at not in new_contents and n is not None]
        backward = backward_nodes(joint)
        self._find_sums_in_place(backward)
        ops = [n for n in graph.nodes if n.op == "call_function"]

        half = _Half(rerunnable=True, pinned=self._storages(returned), pinned_kind="outputs")
        for node in ops:
            if node not in backward:
                self._add_op(node, half)
        forward_end = self._add_sink("forward_end", self._reads(returned))
        unread_gradients = self._add_tangents(primals, tangents)
        half = _Half(rerunnable=False, pinned=self._storages(gradients), pinned_kind="gradients")
        for node in ops:
            if node in backward:
                self._add_op(node, half)
        self._add_sink("step_end", (*self._reads([*outputs, *gradients, *tangents]), *unread_gradients))
        return Lowered(
            graph=Graph(
                nodes=tuple(self.nodes),
                values=tuple(self.values),
                backward_start=forward_end + 1,
                external=tuple(external),
            ),
            origin=tuple(self.origin),
            value_of=self.value_of,
            external=frozenset(self.external),
            views=frozenset(self.views),
            in_place=frozenset(self.in_place),
            rng_of=self.rng_of,
            forward_end=forward_end,
        )

    # --- storages ---

    def _storage(self, t: torch.Tensor) -> int:
        """The storage that `t` lives in, in the planned step."""
        key = storage_key(t)
        while key in self.sums:
            key = self.sums[key]
        return key

    def _storages(self, nodes: Iterable[fx.Node]) -> frozenset[int]:
        return frozenset(self._storage(t) for node in nodes for t in tensors_of(node))

    def _is_known(self, t: torch.Tensor) -> bool:
        return self._storage(t) in self.by_storage or self._storage(t) in self.external_storages

    def _reads(self, nodes: Iterable[fx.Node]) -> tuple[int, ...]:
        """The values that reading those nodes reads."""
        return tuple(sorted({self.value_of[node] for node in nodes if node in self.value_of}))

    def _find_sums_in_place(self, backward: set[fx.Node]) -> None:
        """Find the sums of a tensor's gradients that autograd's engine writes into the first of them: into a storage that
        the backward made, that nothing reads any more, and that the first operand fills."""
        graph = self.joint.graph_module.graph
        order = {node: at for at, node in enumerate(graph.nodes)}
        made_in_backward: dict[int, list[fx.Node]] = {}
        others: set[int] = set()
        for node in graph.nodes:
            for t in tensors_of(node):
                if node in backward and node.op == "call_function":
                    made_in_backward.setdefault(storage_key(t), []).append(node)
                else:
                    others.add(storage_key(t))
        for node in graph.nodes:
            if node not in backward or node.target is not torch.ops.aten.add.Tensor or node.kwargs:
                continue
            first, second = node.args[:2]
            if not (isinstance(first, fx.Node) and isinstance(second, fx.Node)):
                continue
            into, total = first.meta["val"], node.meta["val"]
            key = self._storage(into)
            if key in others or key == self._storage(second.meta["val"]) or not _fills(into, total):
                continue
            if all(order[user] <= order[node] for part in made_in_backward[key] for user in part.users):
                self.sums[storage_key(total)] = key
                made_in_backward[key] += made_in_backward[storage_key(total)]
                self.in_place.add(node)

    # --- nodes and values ---

    def _append(self, node: Node, origin: fx.Node | None) -> int:
        self.nodes.append(node)
        self.origin.append(origin)
        return len(self.nodes) - 1

    def _add_value(self, name: str, size_bytes: int, *, pinned: bool = False, kind: str = "activations") -> int:
        """A value that the next node makes."""
        self.values.append(Value(name=name, size_bytes=size_bytes, producer=len(self.nodes), pinned=pinned, kind=kind))
        return len(self.values) - 1

    def _add_external(self, node: fx.Node) -> None:
        self.external.add(node)
        self.external_storages.update(self._storage(t) for t in tensors_of(node))

    def _add_op(self, node: fx.Node, half: _Half) -> None:
        outputs = tensors_of(node)
        if node.target is operator.getitem:
            self._add_element(node)
        elif node in self.in_place:
            self._add_sum_in_place(node)
        elif outputs and all(map(self._is_known, outputs)):
            storage = self._storage(outputs[0])
            base = next(a for a in node.all_input_nodes if any(self._storage(t) == storage for t in tensors_of(a)))
            self._add_view(node, base)
        elif any(map(self._is_known, outputs)):
            raise TraceError(
                f"{node.name} ({node.target}) returns a view of its input beside a new tensor; not supported"
            )
        else:
            self._add_computation(node, half)

    def _add_element(self, node: fx.Node) -> None:
        """One output of an op that has several."""
        op = node.args[0]
        assert isinstance(op, fx.Node)
        if op in self.views or op in self.external:
            self._add_view(node, op)
        else:
            self.value_of[node] = self.by_storage[self._storage(tensors_of(node)[0])]

    def _add_view(self, node: fx.Node, base: fx.Node) -> None:
        self.views.add(node)
        if base in self.value_of:
            self.value_of[node] = self.value_of[base]
        else:
            self.external.add(node)

    def _add_sum_in_place(self, node: fx.Node) -> None:
        self.value_of[node] = self.by_storage[self._storage(tensors_of(node)[0])]
        self._append(
            Node(
                name=node.name,
                inputs=self._reads(node.all_input_nodes),
                outputs=(),
                rerunnable=False,
                op="aten.add_.Tensor",
                module=module_path(node),
                source=source_line(node),
            ),
            node,
        )

    def _add_computation(self, node: fx.Node, half: _Half) -> None:
        """An op that makes storage."""
        reads = self._reads(node.all_input_nodes)
        replayable = half.rerunnable and is_random(node)
        if replayable:
            reads = tuple(sorted((*reads, self._add_rng_state(node))))
        outputs = self._add_outputs(node, half)
        reads_mutated = not self.mutated.isdisjoint(self._storages(deciding_inputs(node)))
        workspace_bytes = self.workspace(node)
        if replayable:
            self.rng_of[len(self.nodes)] = len(self.nodes) - 1
            # Just before it draws, a replay takes the generator's present state once more.
            output_bytes = sum(self.values[v].size_bytes for v in outputs)
            workspace_bytes = max(workspace_bytes, self._rng_state_bytes(node) - output_bytes)
        self._append(
            Node(
                name=node.name,
                inputs=reads,
                outputs=outputs,
                workspace_bytes=workspace_bytes,
                rerunnable=half.rerunnable and not reads_mutated and bool(outputs) and may_rerun(node),
                op=str(node.target),
                module=module_path(node),
                source=source_line(node),
            ),
            node,
        )

    def _add_outputs(self, node: fx.Node, half: _Half) -> tuple[int, ...]:
        """The values of the storages that the op makes, or of the number that it returns: one that costs nothing and is
        never made again."""
        tensors = tensors_of(node)
        if not tensors and node.meta.get("val") is not None:
            self.value_of[node] = self._add_value(node.name, 0, pinned=True)
            return (self.value_of[node],)
        outputs: list[int] = []
        for t in tensors:
            storage = self._storage(t)
            if self.by_storage.get(storage) in outputs:
                continue
            pinned = storage in half.pinned
            self.by_storage[storage] = self._add_value(
                node.name if len(tensors) == 1 else f"{node.name}.{len(outputs)}",
                self.round_bytes(t.untyped_storage().nbytes()),
                pinned=pinned,
                kind=half.pinned_kind if pinned else "activations",
            )
            outputs.append(self.by_storage[storage])
        if isinstance(node.meta.get("val"), torch.Tensor):
            self.value_of[node] = outputs[0]
        return tuple(outputs)

    def _add_rng_state(self, node: fx.Node) -> int:
        """The node that takes the generator's state before a random op; returns its value."""
        name = f"{node.name}.rng_state"
        state = self._add_value(name, self._rng_state_bytes(node))
        self._append(
            Node(
                name=name,
                inputs=(),
                outputs=(state,),
                rerunnable=False,
                op="rng_state",
                module=module_path(node),
            ),
            node,
        )
        return state

    def _rng_state_bytes(self, node: fx.Node) -> int:
        on_cpu = not self.trace.target and all(t.device.type == "cpu" for t in tensors_of(node))
        return self.round_bytes(CPU_RNG_STATE_BYTES if on_cpu else CUDA_RNG_STATE_BYTES)

    def _add_sink(self, name: str, inputs: tuple[int, ...]) -> int:
        return self._append(Node(name=name, inputs=inputs, outputs=(), rerunnable=False, op=name), None)

    def _add_tangents(self, primals: Sequence[fx.Node], tangents: Sequence[fx.Node]) -> tuple[int, ...]:
        """The node that makes the output gradients; returns those of its values that no node of the backward reads."""
        for node in tangents:
            tensor = node.meta["val"]
            size_bytes = self.round_bytes(tensor.untyped_storage().nbytes())
            self.value_of[node] = self._add_value(node.name, size_bytes, pinned=True, kind="tangents")
            self.by_storage[self._storage(tensor)] = self.value_of[node]
        unread = tuple(
            self._add_value(name, self.round_bytes(t.numel() * t.element_size()), pinned=True, kind="tangents")
            for name, t in dict(self._unread_gradients(primals)).items()
        )
        outputs = (*(self.value_of[node] for node in tangents), *unread)
        self._append(Node(name="tangents", inputs=(), outputs=outputs, rerunnable=False, op="tangents"), None)
        return unread

    def _unread_gradients(self, primals: Sequence[fx.Node]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor of the same size) of the gradients that autograd holds outside the planned backward: of outputs
        that are inputs or views, of what is viewed, and of inputs of which the backward has no gradient."""
        with_gradient = {index for _, index in self.joint.gradients}
        trace, results = self.trace, self.joint.results
        for plan, takes, path in zip(self.joint.outputs, trace.takes_gradient, trace.output_paths, strict=True):
            if not takes:
                continue
            match plan:
                case GraphOutput():
                    continue
                case InputItself():
                    primal = primals[plan.input]
                    yield f"gradient of {path}", primal.meta["val"]
                    if plan.input not in with_gradient:
                        yield f"gradient of {primal.name}", primal.meta["val"]
                case ViewOfInput() | ViewOfOutput():
                    view = results[plan.position]
                    viewed = primals[plan.input] if isinstance(plan, ViewOfInput) else results[plan.base]
                    assert view is not None
                    assert viewed is not None
                    yield f"gradient of {path}", view.meta["val"]
                    yield f"gradient of {viewed.name} from its views", viewed.meta["val"]
                case _:
                    assert_never(plan)


def _fills(storage_of: torch.Tensor, content: torch.Tensor) -> bool:
    """Whether `content` can be written into `storage_of`, and then fills its whole storage."""
    alike = (
        storage_of.dtype == content.dtype
        and storage_of.shape == content.shape
        and storage_of.stride() == content.stride()
    )
    return alike and storage_of.numel() * storage_of.element_size() == storage_of.untyped_storage().nbytes() > 0
