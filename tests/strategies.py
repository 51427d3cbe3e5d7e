"""Random training-shaped problems for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from gcsolve.graph import Graph, Node, Value
from gcsolve.problem import Problem


@st.composite
def problems(draw: st.DrawFn, max_forward: int = 5, max_backward: int = 4, plain: bool = False) -> Problem:
    """A forward, mostly a chain with skips, then a backward that reads into it.

    Unless `plain`: nodes with up to three outputs, pinned values, nodes that run once, workspace, external bytes and
    values of 0 bytes. The budget is some number up to a little more than all values together.
    """
    nodes: list[Node] = []
    values: list[Value] = []
    forward = draw(st.integers(1, max_forward))
    backward = draw(st.integers(0, max_backward))
    last: list[int] = []  # outputs of the node before
    for i in range(forward + backward):
        is_backward = i >= forward
        earlier = [
            v for v in range(len(values)) if v not in last and not (is_backward and values[v].producer >= forward)
        ]
        inputs = set(draw(st.lists(st.sampled_from(earlier), max_size=2))) if earlier else set()
        if last and (is_backward or draw(st.integers(0, 3))):
            inputs.add(draw(st.sampled_from(last)))
        if is_backward:
            mirror = nodes[max(0, 2 * forward - 1 - i)].outputs
            inputs.add(mirror[draw(st.integers(0, len(mirror) - 1))])
        count = 1 if plain else draw(st.sampled_from([1, 1, 1, 2, 3]))
        outputs = []
        for _ in range(count):
            pinned = not plain and draw(st.sampled_from([False] * 7 + [True]))
            outputs.append(len(values))
            values.append(Value(f"v{len(values)}", draw(st.integers(1 if plain else 0, 12)), i, pinned))
        once = is_backward or (not plain and draw(st.sampled_from([False] * 7 + [True])))
        workspace = 0 if plain else draw(st.sampled_from([0, 0, 0, 5]))
        nodes.append(Node(f"n{i}", tuple(sorted(inputs)), tuple(outputs), workspace, rerunnable=not once))
        last = outputs
    external = () if plain else (("parameters", draw(st.integers(0, 9))),)
    graph = Graph(tuple(nodes), tuple(values), forward, external)
    cost = draw(st.lists(st.integers(0, 9), min_size=len(nodes), max_size=len(nodes)))
    everything = graph.external_bytes + sum(v.size_bytes for v in values)
    return Problem(graph, tuple(float(c) for c in cost), draw(st.integers(0, everything + 4)))


@st.composite
def orders(draw: st.DrawFn, problem: Problem) -> list[int]:
    """Node orders with random reruns of what has run and may be rerun."""
    order: list[int] = []
    for i in range(len(problem.graph.nodes)):
        again = [a for a in range(i) if problem.graph.nodes[a].rerunnable]
        if again:
            order += draw(st.lists(st.sampled_from(again), max_size=2))
        order.append(i)
    return order
