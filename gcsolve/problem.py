"""Problem = Graph + costs + budget: all that a solver is given."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from gcsolve.errors import InvalidGraph
from gcsolve.graph import Graph, Node, Value
from gcsolve.util.checks import number, whole


@dataclass(frozen=True, repr=False)
class Problem:
    """What to decide: which values of `graph` to keep and which to compute again.

    Args:
        graph: the step.
        cost: what running each node costs, one finite number ≥ 0 a node, in `cost_unit`.
        budget_bytes: allowed peak, external bytes included; a whole number.
        cost_unit: "s" (seconds), "flops", or another label for costs that are neither.

    Raises:
        InvalidGraph: the costs do not fit the graph, or the budget is no whole number ≥ 0.
    """

    graph: Graph
    cost: tuple[float, ...]
    budget_bytes: int
    cost_unit: str = "s"

    def __post_init__(self) -> None:
        if not isinstance(self.graph, Graph):
            raise InvalidGraph(f"graph is of type {type(self.graph).__name__}, not a gcsolve.Graph")
        if len(self.cost) != len(self.graph.nodes):
            raise InvalidGraph(f"{len(self.cost)} costs for {len(self.graph.nodes)} nodes")
        for i, c in enumerate(self.cost):
            if not (type(c) is float and 0.0 <= c < math.inf):  # ints and numpy's pass below, where a text is made up
                number(f"cost[{i}]", c, of=f" of node {self.graph.nodes[i].name}", error=InvalidGraph)
        object.__setattr__(self, "budget_bytes", whole("budget_bytes", self.budget_bytes, error=InvalidGraph))

    @cached_property
    def total_cost(self) -> float:
        """Cost of running every node once."""
        return math.fsum(self.cost)

    def with_budget(self, budget_bytes: int) -> Problem:
        return replace(self, budget_bytes=budget_bytes)

    def __repr__(self) -> str:
        unit = "" if self.cost_unit == "1" else f" {self.cost_unit}"
        budget = f"budget {self.budget_bytes} B"
        return f"<Problem: {repr(self.graph)[1:-1]}; cost {self.total_cost:.4g}{unit}, {budget}>"

    @classmethod
    def from_arrays(
        cls,
        cost: Sequence[float],
        bytes: Sequence[int],  # noqa: A002 -- the public word of the front door
        edges: Iterable[tuple[int, int]],
        backward_start: int | None = None,
        *,
        budget_bytes: int,
        names: Sequence[str] | None = None,
    ) -> Problem:
        """A problem on a bare graph: node i makes one value of `bytes[i]` and reads the values of its predecessors.

        Args:
            cost: one number a node (any one unit).
            bytes: size of each node's value, in bytes: whole numbers, ints or not (4, 4.0, numpy's).
            edges: (u, v) with u < v: node v reads the value of node u.
            backward_start: only nodes before it may be rerun; None: any node may.
            budget_bytes: allowed peak in bytes.
            names: one a node, for error texts and tables.

        Raises:
            InvalidGraph: an argument is no list, lengths differ, an edge is no pair of nodes or points backwards or outside,
                a size is no whole number ≥ 0, a cost no finite number ≥ 0. The text names argument, node and value.
        """
        costs = _listed("cost", cost, "numbers, one a node")
        sizes = _listed("bytes", bytes, "whole numbers, one a node")
        n = len(costs)
        label = [f"n{i}" for i in range(n)] if names is None else [str(x) for x in _listed("names", names, "names")]
        for argument, given in (("bytes", sizes), ("names", label)):
            if len(given) != n:
                raise InvalidGraph(f"cost has {n} entries and {argument} has {len(given)}")
        last = n if backward_start is None else whole("backward_start", backward_start, error=InvalidGraph)
        if last > n:
            raise InvalidGraph(f"backward_start={backward_start} is outside 0..{n}")
        inputs: list[set[int]] = [set() for _ in range(n)]
        for u, v in _pairs(edges, n):
            inputs[v].add(u)
        of = [f" of node {name}" for name in label]
        nodes = tuple(Node(label[i], tuple(sorted(inputs[i])), (i,), rerunnable=i < last) for i in range(n))
        values = tuple(
            Value(label[i], whole(f"bytes[{i}]", sizes[i], of=of[i], error=InvalidGraph), i) for i in range(n)
        )
        found = tuple(number(f"cost[{i}]", costs[i], of=of[i], error=InvalidGraph) for i in range(n))
        return cls(Graph(nodes, values, last), found, budget_bytes, cost_unit="1")

    @classmethod
    def from_networkx(
        cls,
        graph: Any,
        *,
        budget_bytes: int,
        backward_start: Any = None,
        cost: str = "cost",
        bytes: str = "bytes",  # noqa: A002
    ) -> Problem:
        """As `from_arrays`, from a `networkx.DiGraph` whose nodes carry the attributes named by `cost` and `bytes`.

        Node order is the graph's own insertion order when that is topological, else a topological sort with ties in
        insertion order. `backward_start` is a node of the graph.

        Raises:
            InvalidGraph: as `from_arrays`; also another kind of graph, a cycle, or a node without one of the attributes.
        """
        import networkx

        if not isinstance(graph, networkx.DiGraph) or graph.is_multigraph():
            raise InvalidGraph(
                f"graph is of type {type(graph).__name__}; from_networkx takes a networkx.DiGraph whose edges point from what "
                "makes a value to what reads it"
            )
        if backward_start is not None and backward_start not in graph:
            raise InvalidGraph(f"backward_start={backward_start!r} is no node of the graph")
        for node, told in graph.nodes(data=True):
            for argument, attribute in (("cost", cost), ("bytes", bytes)):
                if attribute not in told:
                    raise InvalidGraph(
                        f"node {node!r} has no attribute {attribute!r}, only {sorted(map(str, told))}; add it, or say "
                        f"{argument}=<name of the attribute>"
                    )
        inserted = {node: i for i, node in enumerate(graph.nodes)}
        if all(inserted[u] < inserted[v] for u, v in graph.edges):
            order = list(graph.nodes)
        elif not networkx.is_directed_acyclic_graph(graph):
            cycle = " -> ".join(str(edge[0]) for edge in networkx.find_cycle(graph))
            raise InvalidGraph(f"the graph has a cycle, {cycle} and back; a step's graph has none")
        else:
            order = list(networkx.lexicographical_topological_sort(graph, key=inserted.__getitem__))
        place = {node: i for i, node in enumerate(order)}
        return cls.from_arrays(
            [graph.nodes[node][cost] for node in order],
            [graph.nodes[node][bytes] for node in order],
            [(place[u], place[v]) for u, v in graph.edges],
            None if backward_start is None else place[backward_start],
            budget_bytes=budget_bytes,
            names=[str(node) for node in order],
        )


def _listed(argument: str, given: Any, of: str) -> list[Any]:
    """The entries of something that has an order."""
    if not isinstance(given, Iterable) or isinstance(given, (str, Mapping, Set)):
        raise InvalidGraph(f"{argument}={given!r} must be a list of {of}")
    return list(given)


def _pairs(edges: Any, n: int) -> list[tuple[int, int]]:
    """The edges as pairs of node numbers below `n`."""
    if not isinstance(edges, Iterable) or isinstance(edges, str):
        raise InvalidGraph(f"edges={edges!r} must be a list of pairs (u, v) of node numbers")
    found: list[tuple[int, int]] = []
    for k, edge in enumerate(edges):
        pair = tuple(edge) if isinstance(edge, Iterable) and not isinstance(edge, str) else ()
        if len(pair) != 2:
            raise InvalidGraph(f"edges[{k}]={edge!r} must be a pair (u, v) of node numbers")
        u, v = (whole(f"edges[{k}]", end, of=f" in {edge!r}", error=InvalidGraph) for end in pair)
        if not u < v < n:
            raise InvalidGraph(f"edges[{k}]=({u}, {v}) must have 0 <= u < v < {n}")
        found.append((u, v))
    return found
