"""Joint graph + Schedule -> a forward and a backward GraphModule in the planned order.

The generated code takes one list, empties it, and forgets each name after its last use, so the order of the nodes is the
schedule: a value the plan frees has no name left. Views are made where they are read, from the copy that is live then.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gcsolve._torch import boxed_graph_module
from gcsolve.capture.joint import Joint
from gcsolve.errors import InvalidSchedule
from gcsolve.execution.gradient_handoff import begun, first_sums
from gcsolve.lowering.lower import Lowered
from gcsolve.lowering.node_facts import backward_nodes
from gcsolve.ops.facts import generator_of
from gcsolve.schedule import Action, Compute, Schedule


@dataclass(frozen=True)
class Emitted:
    """The two graphs of a plan.

    `forward` takes the inputs of `Joint.inputs` and returns its forward outputs, then the saved values. `backward` takes
    the saved values, the inputs at positions `backward_inputs`, and the tangents, and returns the gradients in the order
    of `Joint.gradients`. `sums`: positions of the inputs whose gradients' sum begins with what the call is handed; where
    there are some, the backward takes that too (`Handed`), last.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    n_saved: int
    backward_inputs: tuple[int, ...]
    sums: tuple[int, ...]


def rng_state(device: torch.device) -> torch.Tensor:
    """State of the default generator of `device`, as the next random op will find it."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


# The default generators are shared by all threads: nobody may draw between the moment a state is read or set and the draw
# that it belongs to.
_DRAWING = threading.RLock()


def draw(op: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """`op(*args, **kwargs)`, not while another thread replays."""
    with _DRAWING:
        return op(*args, **kwargs)


def draw_and_remember(device: torch.device, op: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """(generator state before, `op(*args, **kwargs)`)."""
    with _DRAWING:
        state = rng_state(device)
        return state, op(*args, **kwargs)


def replay(state: torch.Tensor, device: torch.device, op: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """`op(*args, **kwargs)` from generator state `state`; the generator is left as it was found.

    What was found waits outside torch's allocator, so that a replay takes no more memory than the first run did.
    """
    with _DRAWING:
        now = bytearray(rng_state(device).numpy())
        set_rng_state(state, device)
        try:
            return op(*args, **kwargs)
        finally:
            set_rng_state(torch.frombuffer(now, dtype=torch.uint8), device)


def state_of(generator: torch.Generator) -> torch.Tensor:
    """State of a generator that the caller or the model owns, as the next draw from it will find it."""
    return generator.get_state()


def generator_at(state: torch.Tensor, device: torch.device) -> torch.Generator:
    """A generator in that state, for a draw that is replayed: the one that was drawn from is left alone."""
    made = torch.Generator(device)
    made.set_state(state)
    return made


def as_real(z: torch.Tensor) -> torch.Tensor:
    """`view_as_real` as a trace means it: of the numbers, not of numbers still to be conjugated."""
    return torch.view_as_real(z.resolve_conj())


_RESOLVING: dict[Any, Callable[..., Any]] = {torch.ops.aten.view_as_real.default: as_real}


class _Half:
    """One of the two graphs while it is written: which new node holds the live copy of each joint node."""

    def __init__(self, lowered: Lowered, bases: dict[int, fx.Node]) -> None:
        self.lowered = lowered
        self.bases = bases
        self.graph = fx.Graph()
        self.copy_of: dict[fx.Node, fx.Node] = {}
        self.states: dict[int, fx.Node] = {}  # value of an rng_state -> new node that holds it
        self.views_of: dict[int, list[fx.Node]] = {}
        self.sums: dict[fx.Node, int] = {}  # as `first_sums` gives them
        self.handed: fx.Node | None = None
        self.live: set[int] = set()

    def placeholder(self, node: fx.Node) -> fx.Node:
        made = self.graph.placeholder(node.name)
        made.meta = _meta(node)
        self.copy_of[node] = made
        return made

    def get(self, node: fx.Node) -> fx.Node:
        """The live copy of a joint node; a view or a constant is made here when it is not there yet."""
        if node in self.copy_of:
            return self.copy_of[node]
        if node.op == "get_attr":
            made = self.graph.get_attr(str(node.target))
        elif node in self.lowered.views:
            made = self._again(node)
        else:
            raise InvalidSchedule(f"{node.name} ({node.target}) is read where the schedule has no live copy of it")
        self.copy_of[node] = made
        if node in self.lowered.value_of:
            self.views_of.setdefault(self.lowered.value_of[node], []).append(node)
        return made

    def _again(self, node: fx.Node, *helper: Any) -> fx.Node:
        """The op of `node` on live copies; `helper` = (function, leading arguments) calls it through a function."""
        args = fx.map_arg(node.args, self.get)
        kwargs = fx.map_arg(node.kwargs, self.get)
        if node in self.sums:
            first = self.graph.call_function(begun, (args[0], self.handed, self.sums[node]))  # type: ignore[index]
            args = (first, *args[1:])  # type: ignore[misc]
        target: Any = torch.ops.aten.add_.Tensor if node in self.lowered.in_place else node.target
        target = _RESOLVING.get(target, target)
        if helper:
            target, args = helper[0], (*helper[1:], target, *args)  # type: ignore[misc]
        made = self.graph.create_node("call_function", target, args, kwargs, name=node.name)  # type: ignore[arg-type]
        made.meta = _meta(node)
        return made

    def compute(self, index: int, *, rerun: bool, remember: bool) -> None:
        """Write the op of graph node `index` and bind its outputs; a pinned output that is live keeps its first copy.

        Args:
            rerun: it has run before; a random op then replays the generator's state.
            remember: keep the state that a random op found, for that.
        """
        node = self.lowered.origin[index]
        item = self.lowered.graph.nodes[index]
        assert node is not None
        made = self._draw(node, index, rerun, remember) if index in self.lowered.rng_of else self._again(node)
        for v in item.outputs:
            base = self.bases.get(v)
            if base is None or v in self.live:
                continue
            if base is not node:
                element = self.graph.create_node(
                    "call_function", operator.getitem, (made, base.args[1]), name=f"{node.name}_{base.args[1]}"
                )
                element.meta = _meta(base)
                self.copy_of[base] = element
            else:
                self.copy_of[base] = made
        self.live.update(item.outputs)
        if node in self.lowered.in_place:
            self.copy_of[node] = made
            self.views_of.setdefault(self.lowered.value_of[node], []).append(node)

    def _draw(self, node: fx.Node, index: int, rerun: bool, remember: bool) -> fx.Node:
        """A random op: from the device's default generator, or from one that it is given."""
        state = self.lowered.graph.nodes[self.lowered.rng_of[index]].outputs[0]
        device, own = random_device(node), generator_of(node)
        if rerun and own is None:
            return self._again(node, replay, self.states[state], device)
        if rerun:
            given = self.get(own)
            self.copy_of[own] = self.graph.call_function(generator_at, (self.states[state], device))
            made = self._again(node)
            self.copy_of[own] = given
            return made
        if not remember:
            return self._again(node, draw) if own is None else self._again(node)
        self.live.add(state)
        if own is not None:
            self.states[state] = self.graph.call_function(state_of, (self.get(own),))
            return self._again(node)
        both = self._again(node, draw_and_remember, device)
        self.states[state] = self.graph.call_function(operator.getitem, (both, 0))
        made = self.graph.call_function(operator.getitem, (both, 1))
        made.meta = _meta(node)
        return made

    def free(self, value: int) -> None:
        """The copy of `value` and the views made of it have no name from here on."""
        self.live.discard(value)
        self.states.pop(value, None)
        self.copy_of.pop(self.bases.get(value), None)  # type: ignore[arg-type]
        for view in self.views_of.pop(value, ()):
            self.copy_of.pop(view, None)

    def holder(self, value: int) -> fx.Node:
        return self.states[value] if value in self.states else self.copy_of[self.bases[value]]


def _meta(node: fx.Node) -> dict[str, Any]:
    return {k: v for k, v in node.meta.items() if k in ("val", "stack_trace", "nn_module_stack")}


def random_device(node: fx.Node) -> torch.device:
    """Device whose generator a random op draws from."""
    value = node.meta["val"]
    first = value if isinstance(value, torch.Tensor) else value[0]
    return first.device


def emit(joint: Joint, lowered: Lowered, schedule: Schedule) -> Emitted:
    """Write `schedule` out as two graphs.

    Raises:
        InvalidSchedule: the schedule reads a value that is not live (the simulator would have refused it too).
    """
    source = joint.graph_module.graph
    placeholders = source.find_nodes(op="placeholder")
    primals, tangents = placeholders[: len(joint.inputs)], placeholders[len(joint.inputs) :]
    outputs: Any = source.output_node().args[0]
    bases = _bases(source, lowered)
    boundary = schedule.actions.index(Compute(lowered.forward_end))
    end = schedule.actions.index(
        Compute(len(lowered.graph.nodes) - 1)
    )  # step_end: what is live there, the caller holds
    runs = schedule.runs(lowered.graph)

    forward = _Half(lowered, bases)
    for node in primals:
        forward.placeholder(node)
    ran = _write(forward, schedule.actions[:boundary], runs, frozenset())
    results = [forward.get(n) if isinstance(n, fx.Node) else n for n in outputs[: joint.n_forward_outputs]]
    for action in schedule.actions[boundary + 1 :]:  # what only the forward's caller held
        if isinstance(action, Compute):
            break
        forward.free(action.value)

    backward = _Half(lowered, bases)
    candidates = [v for v in sorted(forward.live) if v in forward.states or v in bases]
    saved = {v: backward.graph.placeholder(lowered.graph.values[v].name.replace(".", "_")) for v in candidates}
    for v, made in saved.items():
        if v in forward.states:
            backward.states[v] = made
        else:
            made.meta = _meta(bases[v])
            backward.copy_of[bases[v]] = made
    backward.live = set(forward.live)
    for node in (*primals, *tangents):
        backward.placeholder(node)
    read = {node: backward.copy_of[node] for node in primals}
    backward.sums = first_sums(joint, backward_nodes(joint))
    if backward.sums:
        backward.handed = backward.graph.placeholder("handed")
    _write(backward, schedule.actions[boundary + 1 : end], runs, ran)
    gradients = [backward.get(outputs[p]) if isinstance(outputs[p], fx.Node) else None for p, _ in joint.gradients]
    backward.graph.output(tuple(gradients))

    for made in (*saved.values(), *read.values()):
        if not made.users:
            backward.graph.erase_node(made)
    kept = [v for v, made in saved.items() if made.users]
    forward.graph.output((*results, *(forward.holder(v) for v in kept)))
    return Emitted(
        _finished(joint.graph_module, forward.graph, "PlannedForward"),
        _finished(joint.graph_module, backward.graph, "PlannedBackward"),
        len(kept),
        tuple(i for i, node in enumerate(primals) if read[node].users),
        tuple(backward.sums.values()),
    )


def _bases(source: fx.Graph, lowered: Lowered) -> dict[int, fx.Node]:
    """value -> the joint node that is its storage from end to end (no view)."""
    found: dict[int, fx.Node] = {}
    for node in source.nodes:
        if node in lowered.value_of and node not in lowered.views:
            found.setdefault(lowered.value_of[node], node)
    return found


def _write(half: _Half, actions: Sequence[Action], runs: tuple[int, ...], before: frozenset[int]) -> frozenset[int]:
    """Write the actions into one half; returns the nodes that have run so far, `before` included."""
    ran = set(before)
    graph = half.lowered.graph
    replayed = {state for at, state in half.lowered.rng_of.items() if runs[at] > 1}
    for action in actions:
        if not isinstance(action, Compute):
            half.free(action.value)
            continue
        index = action.node
        if graph.nodes[index].op != "rng_state" and half.lowered.origin[index] is not None:
            half.compute(index, rerun=index in ran, remember=half.lowered.rng_of.get(index) in replayed)
        ran.add(index)
    return frozenset(ran)


def _finished(root: fx.GraphModule, graph: fx.Graph, name: str) -> fx.GraphModule:
    graph.lint()
    return boxed_graph_module(root, graph, name)
