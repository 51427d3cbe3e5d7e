"""Small named problems with known answers.

Every `Known` gives the least cost at its budget over all schedules that keep a value to its last use or make it again
once (`kept_cost`) and over all schedules (`any_cost`); None: nothing fits. The figures are worked out by hand in the
comments, and `test_solvers.py` checks them by brute force too.
"""

from __future__ import annotations

from dataclasses import dataclass

from gcsolve.graph import Graph, Node, Value
from gcsolve.problem import Problem


@dataclass(frozen=True)
class Known:
    name: str
    problem: Problem
    kept_cost: float | None
    any_cost: float | None


def training_chain(ops: int, budget_bytes: int, size: int = 4, cost: float = 1.0) -> Problem:
    """f0 -> f1 -> ...; backward node k reads the value of its forward node and the gradient before it."""
    edges = [(i - 1, i) for i in range(1, ops)]
    for k in range(ops):
        edges += [(ops - 1 - k, ops + k)] + ([(ops + k - 1, ops + k)] if k else [])
    sizes = [size] * ops + [1] * ops
    return Problem.from_arrays([cost] * (2 * ops), sizes, edges, ops, budget_bytes=budget_bytes)


def unit_chain(steps: int, slots: int) -> Problem:
    """The chain and the budget of `revolve.py` for reversing that many steps with that many checkpoints."""
    states = [Node(f"f{k}", (k - 2,) if k > 1 else (), (k - 1,)) for k in range(1, steps)]
    values = [Value(f"x{k}", 1, k - 1) for k in range(1, steps)]
    back: list[Node] = []
    for k in range(steps - 1, -1, -1):
        gradient = len(values)
        values.append(Value(f"g{k}", 0, len(states) + len(back)))
        inputs = ([k - 1] if k else []) + ([gradient - 1] if back else [])
        back.append(Node(f"b{k}", tuple(inputs), (gradient,), workspace_bytes=1, rerunnable=False))
    graph = Graph((*states, *back), tuple(values), len(states))
    return Problem(graph, (1.0,) * len(states) + (0.0,) * len(back), slots + 1)


def diamond(budget_bytes: int) -> Problem:
    """f0 feeds f1 and f2, f3 joins them; the backward reads f3, then f1 and f2, then f0."""
    edges = [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (1, 5), (2, 5), (4, 5), (0, 6), (5, 6)]
    return Problem.from_arrays([1, 2, 3, 1, 1, 1, 1], [4, 4, 4, 1, 1, 1, 1], edges, 4, budget_bytes=budget_bytes)


def long_skip(budget_bytes: int) -> Problem:
    """A chain whose first, large value is also read by the last forward op."""
    edges = [(0, 1), (1, 2), (2, 3), (0, 3), (3, 4), (2, 5), (4, 5), (1, 6), (5, 6), (0, 7), (6, 7)]
    return Problem.from_arrays([2, 1, 1, 1, 1, 1, 1, 1], [8, 4, 4, 2, 1, 1, 1, 1], edges, 4, budget_bytes=budget_bytes)


def fan_out(budget_bytes: int) -> Problem:
    """One value read by three branches, each of which the backward reads."""
    edges = [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4), (3, 5), (4, 5), (2, 6), (5, 6), (1, 7), (6, 7)]
    return Problem.from_arrays([3, 1, 1, 1, 1, 1, 1, 1], [2, 4, 4, 4, 1, 1, 1, 1], edges, 4, budget_bytes=budget_bytes)


def once_and_pinned(budget_bytes: int) -> Problem:
    """A random mask that must not be drawn again, a pinned output, an unread output, workspace, external bytes."""
    nodes = (
        Node("draw", (), (0,), rerunnable=False),
        Node("mul", (0,), (1, 2), workspace_bytes=2),
        Node("out", (1,), (3,)),
        Node("forward_end", (3,), (), rerunnable=False),
        Node("tangent", (), (4,), workspace_bytes=12, rerunnable=False),
        Node("grad_out", (1, 4), (5,), workspace_bytes=3, rerunnable=False),
        Node("grad_mul", (0, 1, 5), (6,), rerunnable=False),
        Node("step_end", (3, 6), (), rerunnable=False),
    )
    values = (
        Value("mask", 2, 0),
        Value("product", 6, 1),
        Value("unread", 1, 1),
        Value("result", 3, 2, pinned=True),
        Value("tangent", 3, 4, pinned=True),
        Value("d_product", 6, 5),
        Value("d_x", 2, 6, pinned=True),
    )
    graph = Graph(nodes, values, 4, (("parameters", 10),))
    return Problem(graph, (1.0, 2.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0), budget_bytes)


def layered(blocks: int, budget_bytes: int) -> Problem:
    """Blocks "h.0", "h.1", ... of three ops x -> wide -> wider -> x', between an op "embed" and an op "head"."""
    nodes: list[Node] = []
    values: list[Value] = []
    costs: list[float] = []

    def run(name: str, inputs: tuple[int, ...], sizes: tuple[int, ...], cost: float, module: str, **kind: bool) -> int:
        made = tuple(range(len(values), len(values) + len(sizes)))
        values.extend(Value(f"{name}.{k}", size, len(nodes)) for k, size in enumerate(sizes))
        nodes.append(Node(name, tuple(sorted(inputs)), made, op=name.split("_")[0], module=module, **kind))
        costs.append(cost)
        return made[0]

    x = run("embed", (), (64,), 1.0, "embed")
    saved = []
    for b in range(blocks):
        wide = run(f"wide_{b}", (x,), (192, 4), 6.0, f"h.{b}.up")
        wider = run(f"act_{b}", (wide,), (256,), 1.0, f"h.{b}")
        saved.append((x, wide, wider))
        x = run(f"down_{b}", (wider, x), (64,), 6.0, f"h.{b}.down")
    gradient = run("head", (x,), (64,), 4.0, "head")
    start = len(nodes)
    for x, wide, wider in reversed(saved):
        gradient = run("down_back", (gradient, wider), (256,), 12.0, "", rerunnable=False)
        gradient = run("act_back", (gradient, wide, wide + 1), (192,), 2.0, "", rerunnable=False)
        gradient = run("wide_back", (gradient, x), (64,), 12.0, "", rerunnable=False)
    return Problem(Graph(tuple(nodes), tuple(values), start, (("parameters", 500),)), tuple(costs), budget_bytes)


ForwardOp = tuple[float, int, tuple[int, ...]]
"""(cost, bytes of its value, the ops that it reads)."""


def trained(forward: list[ForwardOp], budget_bytes: int = 0) -> Problem:
    """`forward` with its backward: the backward op of each op reads its inputs and the gradients of its value that its
    readers' backward ops made, costs twice as much, and makes a gradient of each input."""
    nodes = [Node(f"f{i}", tuple(sorted(set(reads))), (i,)) for i, (_, _, reads) in enumerate(forward)]
    values = [Value(f"x{i}", size, i) for i, (_, size, _) in enumerate(forward)]
    costs = [cost for cost, _, _ in forward]
    gradients: list[list[int]] = [[] for _ in forward]
    for i in reversed(range(len(forward))):
        cost, _, reads = forward[i]
        inputs = sorted({*reads, *gradients[i]})
        outputs = []
        for u in sorted(set(reads)):
            outputs.append(len(values))
            gradients[u].append(len(values))
            values.append(Value(f"d{i}.{u}", forward[u][1], len(nodes)))
        nodes.append(Node(f"b{i}", tuple(inputs), tuple(outputs), rerunnable=False))
        costs.append(2 * cost)
    return Problem(Graph(tuple(nodes), tuple(values), len(forward)), tuple(costs), budget_bytes)


def radiance_field(layers: int = 8, frequencies: int = 6) -> Problem:
    """A NeRF: many small ops encode a point, wide layers with one skip, small ops render a ray."""
    ops: list[ForwardOp] = [(1.0, 3, ())]
    for _ in range(2 * frequencies):
        ops += [(1.0, 3, (0,)), (1.0, 3, (len(ops),))]  # a product, its sine or cosine
    ops.append((1.0, 3 * (1 + 2 * frequencies), (0, *range(2, len(ops), 2))))
    encoded = hidden = len(ops) - 1
    for layer in range(layers):
        reads = (hidden, encoded) if layer == layers // 2 else (hidden,)
        ops += [(64.0, 64, reads), (1.0, 64, (len(ops),))]
        hidden = len(ops) - 1
    density = len(ops)
    ops += [(1.0, 1, (hidden,)), (1.0, 1, (density,)), (64.0, 64, (hidden,)), (32.0, 32, (density + 2, encoded))]
    ops += [(1.0, 32, (density + 3,)), (1.0, 3, (density + 4,)), (1.0, 3, (density + 5,))]
    opaque = len(ops)
    ops += [(1.0, 1, (density + 1,)), (1.0, 1, (opaque,)), (1.0, 1, (opaque + 1,)), (1.0, 1, (opaque, opaque + 2))]
    ops += [(1.0, 3, (opaque + 3, density + 6)), (1.0, 1, (opaque + 4,))]
    return trained(ops)


def message_passing(layers: int = 3, nodes: int = 8, edges: int = 32) -> Problem:
    """A PNA: gathered pairs, four aggregations that share their parts, three scalings, and a residual sum a layer."""
    ops: list[ForwardOp] = [(4.0, nodes, ())]
    state = 0
    for _ in range(layers):
        first = len(ops)
        ops += [(1.0, edges, (state,)), (1.0, edges, (state,)), (1.0, 2 * edges, (first, first + 1))]
        ops += [(16.0, edges, (first + 2,)), (1.0, edges, (first + 3,))]
        message, mean = first + 4, first + 5
        ops += [(2.0, nodes, (message,)), (1.0, edges, (message,)), (2.0, nodes, (mean + 1,)), (1.0, nodes, (mean,))]
        ops += [(1.0, nodes, (mean + 2, mean + 3)), (1.0, nodes, (mean + 4,)), (2.0, nodes, (message,))]
        ops += [(2.0, nodes, (message,)), (1.0, 4 * nodes, (mean, mean + 5, mean + 6, mean + 7))]
        joined = mean + 8
        ops += [(1.0, 4 * nodes, (joined,)), (1.0, 4 * nodes, (joined,))]
        ops += [(1.0, 13 * nodes, (state, joined, joined + 1, joined + 2)), (16.0, nodes, (joined + 3,))]
        ops += [(2.0, nodes, (joined + 4,)), (1.0, nodes, (joined + 5,)), (1.0, nodes, (state, joined + 6))]
        state = len(ops) - 1
    ops.append((1.0, 1, (state,)))
    return trained(ops)


def two_way_recurrence(steps: int = 12, width: int = 4) -> Problem:
    """A bidirectional GRU, unrolled: two chains of cells of seven small ops over the same inputs, joined at the end."""
    ops: list[ForwardOp] = [(1.0, steps * width, ())]
    ops += [(1.0, width, (0,)) for _ in range(steps)]
    states: list[int] = []
    for order in (range(steps), reversed(range(steps))):
        state = len(ops)
        ops.append((0.5, width, ()))
        for t in order:
            a = len(ops)  # input and state to three gates, the gates, their mix
            ops += [(6.0, 3 * width, (1 + t,)), (6.0, 3 * width, (state,)), (1.0, width, (a, a + 1))]
            ops += [(1.0, width, (a, a + 1)), (1.0, width, (a + 1, a + 2)), (1.0, width, (a, a + 4))]
            ops.append((1.0, width, (a + 3, a + 5, state)))
            state = len(ops) - 1
            states.append(state)
    ops += [(1.0, 2 * steps * width, tuple(states)), (4.0, steps, (len(ops),)), (1.0, 1, (len(ops) + 1,))]
    return trained(ops)


def known() -> list[Known]:
    return [
        # At the end of the forward and while its backward node runs: 6 x 4 + 1 = 25 bytes.
        Known("chain, room for all", training_chain(6, 25), 12.0, 12.0),
        # One value less at that moment: one rerun.
        Known("chain, one short", training_chain(6, 24), 13.0, 13.0),
        # Three of six kept, three rerun.
        Known("chain, half", training_chain(6, 13), 15.0, 15.0),
        # While a value is rerun its input, itself and a gradient are live, 9 bytes: with nothing else kept, f5 .. f1
        # are made again from f0 each time: 4 + 3 + 2 + 1 more runs, no longer one a value.
        Known("chain, only with many reruns", training_chain(6, 9), None, 22.0),
        Known("chain, nothing fits", training_chain(6, 8), None, None),
        Known("diamond, room for all", diamond(14), 10.0, 10.0),
        # f0 (cost 1) is not needed while f3 and its backward run.
        Known("diamond, f0 again", diamond(13), 11.0, 11.0),
        Known("diamond, nothing fits", diamond(11), None, None),
        Known("long skip, room for all", long_skip(19), 9.0, 9.0),
        # f1 (cost 1) is not read by the last forward op.
        Known("long skip, f1 again", long_skip(16), 10.0, 10.0),
        # f0 too must go between its forward readers: a rerun inside the forward, outside the one-rerun class.
        Known("long skip, only with a rerun in the forward", long_skip(15), None, 12.0),
        Known("fan out, room for all", fan_out(14), 10.0, 10.0),
        # The join reads all three branches at once.
        Known("fan out, nothing fits", fan_out(13), None, None),
        # The tangent's workspace is the peak: 10 + mask 2 + product 6 + result 3 + tangent 3 + 12.
        Known("once and pinned, room for all", once_and_pinned(36), 6.0, 6.0),
        # The product (cost 2) is made again from the mask.
        Known("once and pinned, product again", once_and_pinned(33), 8.0, 8.0),
        Known("once and pinned, nothing fits", once_and_pinned(32), None, None),
    ]
