"""Joint graph -> Graph: which storages an op reads and makes, what is pinned, and what must run only once.

Views are folded away (a view reads and keeps its storage), so a node of `Graph` is one op that makes storage. Four kinds
of node are added: `rng_state` before each random op (the generator state that a rerun replays), `forward_end` (holds what
the forward returns), `tangents` (the output gradients the backward starts from) and `step_end` (holds what the caller
holds: outputs and gradients).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from gcsolve._torch import storage_key
from gcsolve.capture.joint import MODEL_PREFIX, GraphOutput, InputItself, Joint, ViewOfInput, ViewOfOutput
from gcsolve.capture.trace import Trace
from gcsolve.errors import TraceError
from gcsolve.graph import Graph, Node, Value
from gcsolve.ops.facts import is_random
from gcsolve.util.source import is_user_file, shown_path

_DROPPED = {"aten._assert_tensor_metadata.default", "aten._assert_scalar.default", "aten.sym_constrain_range.default"}

# Autograd's word for the very same tensor; no autograd runs inside the emitted graphs.
_NAMES_ONLY = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)

# Fused recurrent layers (names with "_rnn") run once too: their kernels keep a buffer only in grad mode.
# Discrete choices: a rerun that breaks a tie differently would change the result, so they run once (design notes, 6).
_DISCRETE = {
    "topk", "sort", "argsort", "argmax", "argmin", "multinomial", "nonzero", "unique", "_unique2", "unique_dim",
    "unique_consecutive", "kthvalue", "mode", "median", "nanmedian", "msort", "randperm",
}  # fmt: skip

_KNOWN_NAMESPACES = ("aten", "prims", "torchvision", "gcsolve")

CPU_RNG_STATE_BYTES = 5056
CUDA_RNG_STATE_BYTES = 16


@dataclass(frozen=True)
class Lowered:
    """The Graph and the way back to the joint graph.

    `origin[i]`: the fx node that graph node i stands for (None for `forward_end`, `tangents`, `step_end`; the random op
    for `rng_state`). `value_of`: fx node -> the value whose storage it is or views. `external`: fx nodes that are, or
    view, what always lives. `in_place`: gradient sums that are written into their first operand. `rng_of`: graph node of
    a random op -> graph node of its `rng_state`. `forward_end`: index of that node.
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
        """value -> the fake tensor that it is (of views none); generator states and numbers have none."""
        made = ((v, tensors_of(n)) for n, v in self.value_of.items() if n not in self.views)
        return {v: tensors[0] for v, tensors in made if tensors}


def tensor_text(t: torch.Tensor) -> str:
    """As in "float32[8, 32]"."""
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors a node makes (one, several, or none)."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [v for v in value if isinstance(v, torch.Tensor)]
    return []


def clean(joint: Joint) -> None:
    """Drop what has no effect; keep the old content of mutated inputs that backward reads."""
    graph = joint.graph_module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and str(node.target) in _DROPPED:
            graph.erase_node(node)
        elif node.target in _NAMES_ONLY and graph.output_node() not in node.users:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()
    backward = backward_nodes(joint)
    placeholders = graph.find_nodes(op="placeholder")
    for _, at in joint.mutations:
        source = placeholders[at]
        views, stack = {source}, [source]
        while stack:
            for user in stack.pop().users:
                if _is_view(user) and user not in views:
                    views.add(user)
                    stack.append(user)
        if not any(user in backward for view in views for user in view.users):
            continue
        with graph.inserting_after(placeholders[-1]):
            old = graph.call_function(torch.ops.aten.clone.default, (source,))
        value = source.meta["val"]
        old.meta = {"val": torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")}
        with value.fake_mode:
            old.meta["val"] = value.clone()
        for user in list(source.users):
            if user is not old:
                user.replace_input_with(source, old)
    joint.graph_module.recompile()


def _is_view(node: fx.Node) -> bool:
    """Whether every tensor the node makes lives in the storage of one of its inputs."""
    if node.op != "call_function":
        return False
    made = tensors_of(node)
    read = {storage_key(t) for arg in node.all_input_nodes for t in tensors_of(arg)}
    return bool(made) and all(storage_key(t) in read for t in made)


def backward_nodes(joint: Joint) -> set[fx.Node]:
    """Nodes of the backward: what depends on a tangent, and what autograd added for it."""
    nodes = list(joint.graph_module.graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    found = set(placeholders[len(joint.inputs) :])
    for node in nodes:
        if node.op == "call_function" and (
            node.meta.get("partitioner_tag") == "is_backward" or any(arg in found for arg in node.all_input_nodes)
        ):
            found.add(node)
    # what the forward returns belongs to the forward, whatever its tag
    outputs: Any = joint.graph_module.graph.output_node().args[0]
    stack = [n for n in outputs[: joint.n_forward_outputs] if isinstance(n, fx.Node)]
    while stack:
        node = stack.pop()
        if node in found:
            found.discard(node)
        stack.extend(arg for arg in node.all_input_nodes if arg in found)
    return found


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
        self.by_storage: dict[int, int] = {}
        self.external: set[fx.Node] = set()
        self.external_storages: set[int] = set()
        self.views: set[fx.Node] = set()
        self.rng_of: dict[int, int] = {}
        self.sums: dict[int, int] = {}  # storage of a gradient sum -> the storage it is written into
        self.in_place: set[fx.Node] = set()

    def run(self, external: Sequence[tuple[str, int]]) -> Lowered:
        graph = self.joint.graph_module.graph
        placeholders = graph.find_nodes(op="placeholder")
        primals, tangents = placeholders[: len(self.joint.inputs)], placeholders[len(self.joint.inputs) :]
        constants = [n for n in graph.nodes if n.op == "get_attr"]
        for node in (*primals, *constants):
            self._add_external(node)
        mutated = {self._key(primals[at].meta["val"]) for _, at in self.joint.mutations}
        outputs: Any = graph.output_node().args[0]
        forward_out = [n for n in outputs[: self.joint.n_forward_outputs] if isinstance(n, fx.Node)]
        returned = {self._key(t) for n in forward_out for t in tensors_of(n)}
        backward = backward_nodes(self.joint)
        self._sum_in_place(backward)
        gradients = [outputs[at] for at, _ in self.joint.gradients if isinstance(outputs[at], fx.Node)]
        graded = {self._key(t) for n in gradients for t in tensors_of(n)}
        calls = [n for n in graph.nodes if n.op == "call_function"]

        for node in calls:
            if node not in backward:
                self._add_op(node, mutated, returned, "outputs", rerunnable=True)
        self._add_sink("forward_end", forward_out)
        forward_end = len(self.nodes) - 1
        backward_start = len(self.nodes)
        more = self._add_tangents(tangents, primals, outputs)
        for node in calls:
            if node in backward:
                self._add_op(node, mutated, graded, "gradients", rerunnable=False)
        mutation_positions = {at for at, _ in self.joint.mutations}
        held = [n for at, n in enumerate(outputs[: self.joint.n_forward_outputs]) if at not in mutation_positions]
        self._add_sink("step_end", [*(n for n in held if isinstance(n, fx.Node)), *gradients, *tangents], more)
        built = Graph(tuple(self.nodes), tuple(self.values), backward_start, tuple(external))
        return Lowered(
            built,
            tuple(self.origin),
            self.value_of,
            frozenset(self.external),
            frozenset(self.views),
            frozenset(self.in_place),
            self.rng_of,
            forward_end,
        )

    def _key(self, t: torch.Tensor) -> int:
        """The storage that `t` lives in."""
        key = storage_key(t)
        while key in self.sums:
            key = self.sums[key]
        return key

    def _sum_in_place(self, backward: set[fx.Node]) -> None:
        """Find the sums of a value's gradients that autograd's engine writes into the first of them: a storage that the
        backward made, that nothing reads any more and that the first operand fills."""
        graph = self.joint.graph_module.graph
        order = {node: at for at, node in enumerate(graph.nodes)}
        inside: dict[int, list[fx.Node]] = {}
        outside: set[int] = set()
        for node in graph.nodes:
            for t in tensors_of(node):
                if node in backward and node.op == "call_function":
                    inside.setdefault(storage_key(t), []).append(node)
                else:
                    outside.add(storage_key(t))
        for node in graph.nodes:
            if node not in backward or node.target is not torch.ops.aten.add.Tensor or node.kwargs:
                continue
            first, second = node.args[:2]
            if not (isinstance(first, fx.Node) and isinstance(second, fx.Node)):
                continue
            into, made = first.meta["val"], node.meta["val"]
            key = self._key(into)
            if key in outside or key == self._key(second.meta["val"]) or not _fills(into, made):
                continue
            if all(order[user] <= order[node] for held in inside[key] for user in held.users):
                self.sums[storage_key(made)] = key
                inside[key] += inside[storage_key(made)]
                self.in_place.add(node)

    def _add_external(self, node: fx.Node) -> None:
        self.external.add(node)
        self.external_storages.update(self._key(t) for t in tensors_of(node))

    def _reads(self, args: Iterable[fx.Node]) -> tuple[int, ...]:
        return tuple(sorted({self.value_of[arg] for arg in args if arg in self.value_of}))

    def _append(self, node: Node, origin: fx.Node | None) -> int:
        self.nodes.append(node)
        self.origin.append(origin)
        return len(self.nodes) - 1

    def _add_op(
        self, node: fx.Node, mutated: set[int], pinned: set[int], pinned_kind: str, *, rerunnable: bool
    ) -> None:
        if node.target is operator.getitem:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            if source in self.views or source in self.external:
                self._add_view(node, source)
            else:
                self.value_of[node] = self.by_storage[self._key(tensors_of(node)[0])]
            return
        args = node.all_input_nodes
        made = tensors_of(node)
        if node in self.in_place:
            self.value_of[node] = self.by_storage[self._key(made[0])]
            item = Node(
                node.name, self._reads(args), (), 0, False, "aten.add_.Tensor", module_path(node), source_line(node)
            )
            self._append(item, node)
            return
        new = [t for t in made if not self._known(t)]
        if made and not new:
            self._add_view(
                node, next(a for a in args if any(self._key(t) == self._key(made[0]) for t in tensors_of(a)))
            )
            return
        if len(new) != len(made):
            raise TraceError(
                f"{node.name} ({node.target}) returns a view of its input beside a new tensor; not supported"
            )
        reads = self._reads(args)
        random = is_random(node)
        if random and rerunnable:
            state = self._add_rng_state(node)
            reads = tuple(sorted((*reads, state)))
        reads_mutated = any(self._key(t) in mutated for a in what_decides(node) for t in tensors_of(a))
        at = len(self.nodes)
        outputs: list[int] = []
        for t in made:
            key = self._key(t)
            if key in self.by_storage and self.by_storage[key] in outputs:
                continue
            held = key in pinned
            size = self.round_bytes(t.untyped_storage().nbytes())
            name = node.name if len(made) == 1 else f"{node.name}.{len(outputs)}"
            self.values.append(Value(name, size, at, held, pinned_kind if held else "activations"))
            self.by_storage[key] = len(self.values) - 1
            outputs.append(len(self.values) - 1)
        if isinstance(node.meta.get("val"), torch.Tensor):
            self.value_of[node] = outputs[0]
        elif not made and node.meta.get("val") is not None:
            self.values.append(Value(node.name, 0, at, True))  # a number: costs nothing, is never made again
            self.value_of[node] = len(self.values) - 1
            outputs.append(len(self.values) - 1)
        once = not rerunnable or reads_mutated or not outputs or not may_rerun(node)
        workspace = self.workspace(node)
        if random and rerunnable:
            self.rng_of[at] = at - 1
            # Just before it draws, a replay takes the generator's present state once more.
            workspace = max(workspace, self._rng_state_bytes(node) - sum(self.values[v].size_bytes for v in outputs))
        self._append(
            Node(
                node.name,
                reads,
                tuple(outputs),
                workspace,
                not once,
                str(node.target),
                module_path(node),
                source_line(node),
            ),
            node,
        )

    def _known(self, t: torch.Tensor) -> bool:
        return self._key(t) in self.by_storage or self._key(t) in self.external_storages

    def _add_view(self, node: fx.Node, base: fx.Node) -> None:
        self.views.add(node)
        if base in self.value_of:
            self.value_of[node] = self.value_of[base]
        else:
            self.external.add(node)

    def _add_rng_state(self, node: fx.Node) -> int:
        size = self._rng_state_bytes(node)
        at = len(self.nodes)
        self.values.append(Value(f"{node.name}.rng_state", size, at))
        made = Node(f"{node.name}.rng_state", (), (len(self.values) - 1,), 0, False, "rng_state", module_path(node))
        self._append(made, node)
        return len(self.values) - 1

    def _rng_state_bytes(self, node: fx.Node) -> int:
        on_cpu = not self.trace.target and all(t.device.type == "cpu" for t in tensors_of(node))
        return self.round_bytes(CPU_RNG_STATE_BYTES if on_cpu else CUDA_RNG_STATE_BYTES)

    def _add_sink(self, name: str, held: Iterable[fx.Node], more: Sequence[int] = ()) -> None:
        self._append(Node(name, (*self._reads(held), *more), (), rerunnable=False, op=name), None)

    def _add_tangents(self, tangents: Sequence[fx.Node], primals: Sequence[fx.Node], made: Any) -> list[int]:
        """The output gradients; returns the values that no node of the backward reads: of outputs that are inputs, or views of
        inputs or of other outputs, what autograd makes of a view's gradient, as large as what is viewed, and what it keeps as
        the gradient of an input that the backward has none of."""
        at = len(self.nodes)
        outputs = []
        for node in tangents:
            size = self.round_bytes(node.meta["val"].untyped_storage().nbytes())
            self.values.append(Value(node.name, size, at, True, "tangents"))
            self.value_of[node] = len(self.values) - 1
            self.by_storage[self._key(node.meta["val"])] = len(self.values) - 1
            outputs.append(len(self.values) - 1)
        own = len(outputs)
        more: dict[str, fx.Node] = {}
        trace, graded = self.trace, {at for _, at in self.joint.gradients}
        for plan, takes, path in zip(self.joint.outputs, trace.takes_gradient, trace.output_paths, strict=True):
            if not takes:
                continue
            match plan:
                case GraphOutput():
                    pass
                case InputItself():
                    more[f"gradient of {path}"] = primals[plan.input]
                    if plan.input not in graded:
                        more[f"gradient of {primals[plan.input].name}"] = primals[plan.input]
                case ViewOfInput() | ViewOfOutput():
                    more[f"gradient of {path}"] = made[plan.position]
                    base = primals[plan.input] if isinstance(plan, ViewOfInput) else made[plan.base]
                    more[f"gradient of {base.name} from its views"] = base
        for name, node in more.items():
            like = node.meta["val"]
            size = self.round_bytes(like.numel() * like.element_size())
            self.values.append(Value(name, size, at, True, "tangents"))
            outputs.append(len(self.values) - 1)
        self._append(Node("tangents", (), tuple(outputs), rerunnable=False, op="tangents"), None)
        return outputs[own:]


def _fills(into: torch.Tensor, made: torch.Tensor) -> bool:
    """Whether `made` can be written into `into`, and that is all of its storage."""
    alike = into.dtype == made.dtype and into.shape == made.shape and into.stride() == made.stride()
    return alike and into.numel() * into.element_size() == into.untyped_storage().nbytes() > 0


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
    """
    return _Lowering(trace, round_bytes, workspace).run(external)


# In training these normalize by the batch alone; the running statistics only go into the new running statistics, and
# those of a rerun are dropped. So a rerun gives the same values although the buffers have moved on since.
_BATCH_NORMS = ("_native_batch_norm_legit_functional", "_batch_norm_with_update_functional")


def what_decides(node: fx.Node) -> list[fx.Node]:
    """The inputs that a rerun's values depend on: all of them, but for the running statistics of a training BatchNorm."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.name.split("::")[-1] not in _BATCH_NORMS:
        return node.all_input_nodes
    named = {argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)} | node.kwargs
    if named.get("training") is False:
        return node.all_input_nodes
    return [v for name, v in named.items() if isinstance(v, fx.Node) and not name.startswith("running_")]


def may_rerun(node: fx.Node) -> bool:
    """Whether running the op again gives the same value and no second effect."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target.namespace not in _KNOWN_NAMESPACES:
        return False
    name = target._schema.name.split("::")[-1]
    return name not in _DISCRETE and "_rnn" not in name and not target._schema.is_mutable


def module_path(node: fx.Node) -> str:
    """Path of the innermost module the op ran in, as in `model.named_modules()`; "" for the model itself."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    return path.removeprefix(MODEL_PREFIX) if path != MODEL_PREFIX[:-1] else ""


def source_line(node: fx.Node) -> str:
    """ "file:line" of the user's innermost frame, if the trace kept it."""
    for line in reversed((node.meta.get("stack_trace") or "").splitlines()):
        line = line.strip()
        if line.startswith('File "'):
            filename, _, rest = line[6:].partition('", line ')
            if is_user_file(filename):
                return f"{shown_path(filename)}:{rest.split(',')[0]}"
    return ""
