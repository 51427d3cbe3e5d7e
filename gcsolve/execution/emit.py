"""Joint graph + Schedule -> a forward and a backward GraphModule in the planned order.

The generated code takes one list, empties it, and forgets each name after its last use, so the order of the nodes is the
schedule: a value that the plan has freed has no name left. Views are made where they are read, from the copy of their value
that is live then.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gcsolve._torch import boxed_graph_module
from gcsolve.capture.joint import Joint
from gcsolve.errors import InvalidSchedule
from gcsolve.execution.draws import draw, draw_and_remember, generator_at, replay, state_of
from gcsolve.execution.gradient_handoff import continue_sum, first_sums
from gcsolve.lowering.lower import Lowered
from gcsolve.lowering.node_facts import backward_nodes
from gcsolve.ops.facts import generator_of
from gcsolve.schedule import Action, Compute, Schedule


@dataclass(frozen=True)
class Emitted:
    """The two graphs of a plan.

    Attributes:
        forward: takes the inputs of `Joint.inputs`; returns the forward's results, then the saved values.
        backward: takes the saved values, the inputs at `backward_inputs`, the tangents, and, where `continued` is not
            empty, the `LaterSums`; returns the gradients in the order of `Joint.gradients`.
        n_saved: how many values are saved.
        backward_inputs: indices of the inputs that the backward reads.
        continued: indices of the inputs whose sum of gradients continues that of later calls.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    n_saved: int
    backward_inputs: tuple[int, ...]
    continued: tuple[int, ...]


def emit(joint: Joint, lowered: Lowered, schedule: Schedule) -> Emitted:
    """Write `schedule` out as two graphs.

    Raises:
        InvalidSchedule: the schedule reads a value that is not live (the simulator would have refused it too).
    """
    boundary = schedule.actions.index(Compute(lowered.forward_end))
    step_end = schedule.actions.index(Compute(len(lowered.graph.nodes) - 1))  # what is live there, the caller holds
    runs = schedule.runs(lowered.graph)
    replayed = frozenset(state for op, state in lowered.rng_of.items() if runs[op] > 1)
    bases = _bases(joint, lowered)

    forward = _Writer(lowered, bases, replayed, ran=set())
    for node in joint.primal_nodes:
        forward.add_placeholder(node)
    forward.write(schedule.actions[:boundary])
    results = [None if n is None else forward.get(n) for n in joint.results[: joint.n_forward_outputs]]
    for action in schedule.actions[boundary + 1 :]:  # values that lived to the end of the forward only as its results
        if isinstance(action, Compute):
            break
        forward.free(action.value)

    backward = _Writer(lowered, bases, replayed, ran=forward.ran)
    saved = {v: backward.add_saved(v) for v in sorted(forward.live) if v in forward.states or v in bases}
    backward.live = set(forward.live)
    inputs = [backward.add_placeholder(node) for node in joint.primal_nodes]
    for node in joint.tangent_nodes:
        backward.add_placeholder(node)
    backward.continue_sums(first_sums(joint, backward_nodes(joint)))
    backward.write(schedule.actions[boundary + 1 : step_end])
    gradients = [joint.results[position] for position, _ in joint.gradients]
    backward.graph.output(tuple(None if n is None else backward.get(n) for n in gradients))

    for placeholder in (*saved.values(), *inputs):
        if not placeholder.users:
            backward.graph.erase_node(placeholder)
    read = [v for v, placeholder in saved.items() if placeholder.users]
    forward.graph.output((*results, *(forward.holder(v) for v in read)))
    return Emitted(
        forward=_graph_module(joint, forward.graph, "PlannedForward"),
        backward=_graph_module(joint, backward.graph, "PlannedBackward"),
        n_saved=len(read),
        backward_inputs=tuple(i for i, placeholder in enumerate(inputs) if placeholder.users),
        continued=tuple(backward.sums.values()),
    )


def _bases(joint: Joint, lowered: Lowered) -> dict[int, fx.Node]:
    """value -> the joint node that fills its storage (the first one, where sums are written into it)."""
    bases: dict[int, fx.Node] = {}
    for node in joint.graph_module.graph.nodes:
        if node in lowered.value_of and node not in lowered.views:
            bases.setdefault(lowered.value_of[node], node)
    return bases


def _graph_module(joint: Joint, graph: fx.Graph, name: str) -> fx.GraphModule:
    graph.lint()
    return boxed_graph_module(joint.graph_module, graph, name)


def as_real(z: torch.Tensor) -> torch.Tensor:
    """`view_as_real` as a trace means it: of the numbers, not of numbers still to be conjugated."""
    return torch.view_as_real(z.resolve_conj())


_RESOLVING: dict[Any, Callable[..., Any]] = {torch.ops.aten.view_as_real.default: as_real}


class _Writer:
    """One of the two graphs while it is written: which new node holds the live copy of each joint node.

    Args:
        bases: as `_bases` gives them.
        replayed: the `rng_state` nodes whose random op is rerun.
        ran: indices of the graph nodes that have run before.
    """

    def __init__(self, lowered: Lowered, bases: dict[int, fx.Node], replayed: frozenset[int], ran: set[int]) -> None:
        self.lowered = lowered
        self.bases = bases
        self.replayed = replayed
        self.ran = set(ran)
        self.graph = fx.Graph()
        self.copy_of: dict[fx.Node, fx.Node] = {}
        self.states: dict[int, fx.Node] = {}  # value of an rng_state -> new node that holds it
        self.views_of: dict[int, list[fx.Node]] = {}
        self.sums: dict[fx.Node, int] = {}
        self.later_sums: fx.Node | None = None
        self.live: set[int] = set()

    def add_placeholder(self, node: fx.Node) -> fx.Node:
        """The placeholder of an input of the joint graph."""
        placeholder = self.graph.placeholder(node.name)
        placeholder.meta = _meta(node)
        self.copy_of[node] = placeholder
        return placeholder

    def add_saved(self, value: int) -> fx.Node:
        """The placeholder of a value that the forward saves."""
        item = self.lowered.graph.values[value]
        placeholder = self.graph.placeholder(item.name.replace(".", "_"))
        if self.lowered.graph.nodes[item.producer].op == "rng_state":
            self.states[value] = placeholder
        else:
            placeholder.meta = _meta(self.bases[value])
            self.copy_of[self.bases[value]] = placeholder
        return placeholder

    def continue_sums(self, sums: dict[fx.Node, int]) -> None:
        """Let the sums that begin at these nodes (as `first_sums` gives them) continue those of later calls."""
        self.sums = sums
        if sums:
            self.later_sums = self.graph.placeholder("later_sums")

    def write(self, actions: Sequence[Action]) -> None:
        graph = self.lowered.graph
        for action in actions:
            if not isinstance(action, Compute):
                self.free(action.value)
                continue
            if graph.nodes[action.node].op != "rng_state" and self.lowered.origin[action.node] is not None:
                self.compute(action.node)
            self.ran.add(action.node)

    def get(self, node: fx.Node) -> fx.Node:
        """The live copy of a joint node; a view or a constant is made here when it is not there yet."""
        if node in self.copy_of:
            return self.copy_of[node]
        if node.op == "get_attr":
            copy = self.graph.get_attr(str(node.target))
        elif node in self.lowered.views:
            copy = self._call(node)
        else:
            raise InvalidSchedule(f"{node.name} ({node.target}) is read where the schedule has no live copy of it")
        self.copy_of[node] = copy
        if node in self.lowered.value_of:
            self.views_of.setdefault(self.lowered.value_of[node], []).append(node)
        return copy

    def holder(self, value: int) -> fx.Node:
        """The new node that holds a live value."""
        return self.states[value] if value in self.states else self.copy_of[self.bases[value]]

    def free(self, value: int) -> None:
        """Give the copy of `value`, and the views made of it, no name from here on."""
        self.live.discard(value)
        self.states.pop(value, None)
        self.copy_of.pop(self.bases.get(value), None)  # type: ignore[arg-type]
        for view in self.views_of.pop(value, ()):
            self.copy_of.pop(view, None)

    def compute(self, index: int) -> None:
        """Write the op of graph node `index` and bind its outputs; a pinned output that is live keeps its first copy."""
        node = self.lowered.origin[index]
        assert node is not None
        call = self._draw(node, index) if index in self.lowered.rng_of else self._call(node)
        outputs = self.lowered.graph.nodes[index].outputs
        for value in outputs:
            base = self.bases.get(value)
            if base is None or value in self.live:
                continue
            if base is node:
                self.copy_of[base] = call
            else:
                element = base.args[1]
                copy = self.graph.create_node(
                    "call_function", operator.getitem, (call, element), name=f"{node.name}_{element}"
                )
                copy.meta = _meta(base)
                self.copy_of[base] = copy
        self.live.update(outputs)
        if node in self.lowered.in_place:
            self.copy_of[node] = call
            self.views_of.setdefault(self.lowered.value_of[node], []).append(node)

    def _call(self, node: fx.Node, *through: Any) -> fx.Node:
        """The op of `node` on live copies.

        Args:
            through: a function that calls the op, and the arguments that it takes before the op's own.
        """
        args = fx.map_arg(node.args, self.get)
        kwargs = fx.map_arg(node.kwargs, self.get)
        if node in self.sums:
            first = self.graph.call_function(continue_sum, (args[0], self.later_sums, self.sums[node]))  # type: ignore[index]
            args = (first, *args[1:])  # type: ignore[misc]
        target: Any = torch.ops.aten.add_.Tensor if node in self.lowered.in_place else node.target
        target = _RESOLVING.get(target, target)
        if through:
            target, args = through[0], (*through[1:], target, *args)  # type: ignore[misc]
        call = self.graph.create_node("call_function", target, args, kwargs, name=node.name)  # type: ignore[arg-type]
        call.meta = _meta(node)
        return call

    def _draw(self, node: fx.Node, index: int) -> fx.Node:
        """A random op: from the device's default generator, or from one that it is given."""
        rng_state = self.lowered.rng_of[index]
        state = self.lowered.graph.nodes[rng_state].outputs[0]
        device, generator = random_device(node), generator_of(node)
        if index in self.ran:
            if generator is None:
                return self._call(node, replay, self.states[state], device)
            return self._draw_again_from(generator, node, self.states[state], device)
        if rng_state not in self.replayed:
            return self._call(node, draw) if generator is None else self._call(node)
        self.live.add(state)
        if generator is not None:
            self.states[state] = self.graph.call_function(state_of, (self.get(generator),))
            return self._call(node)
        both = self._call(node, draw_and_remember, device)
        self.states[state] = self.graph.call_function(operator.getitem, (both, 0))
        call = self.graph.call_function(operator.getitem, (both, 1))
        call.meta = _meta(node)
        return call

    def _draw_again_from(self, generator: fx.Node, node: fx.Node, state: fx.Node, device: torch.device) -> fx.Node:
        """The op with a new generator, in the state that its first run found, in place of the one that it is given."""
        given = self.get(generator)
        self.copy_of[generator] = self.graph.call_function(generator_at, (state, device))
        call = self._call(node)
        self.copy_of[generator] = given
        return call


def random_device(node: fx.Node) -> torch.device:
    """Device whose generator a random op draws from."""
    value = node.meta["val"]
    first = value if isinstance(value, torch.Tensor) else value[0]
    return first.device


def _meta(node: fx.Node) -> dict[str, Any]:
    return {k: v for k, v in node.meta.items() if k in ("val", "stack_trace", "nn_module_stack")}
