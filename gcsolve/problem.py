"""Problem = Graph + costs + budget: all that a solver is given."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from gcsolve.errors import InvalidGraph
from gcsolve.graph import Graph, Node, Value


@dataclass(frozen=True)
class Problem:
    """What to decide: which values of `graph` to keep and which to compute again.

    Args:
        graph: the step.
        cost: what running each node costs, one finite number ≥ 0 a node, in `cost_unit`.
        budget_bytes: allowed peak, external bytes included.
        cost_unit: "s" (seconds), "flops", or another label for costs that are neither.

    Raises:
        InvalidGraph: the costs do not fit the graph, or the budget is negative.
    """

    graph: Graph
    cost: tuple[float, ...]
    budget_bytes: int
    cost_unit: str = "s"

    def __post_init__(self) -> None:
        if len(self.cost) != len(self.graph.nodes):
            raise InvalidGraph(f"{len(self.cost)} costs for {len(self.graph.nodes)} nodes")
        for i, c in enumerate(self.cost):
            if not (math.isfinite(c) and c >= 0):
                raise InvalidGraph(f"cost[{i}] of node {self.graph.nodes[i].name} is {c}; costs are finite and ≥ 0")
        if self.budget_bytes < 0:
            raise InvalidGraph(f"budget_bytes={self.budget_bytes} is negative")

    @cached_property
    def total_cost(self) -> float:
        """Cost of running every node once."""
        return math.fsum(self.cost)

    def with_budget(self, budget_bytes: int) -> Problem:
        return replace(self, budget_bytes=budget_bytes)

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
            bytes: size of each node's value, in bytes.
            edges: (u, v) with u < v: node v reads the value of node u.
            backward_start: only nodes before it may be rerun; None: any node may.
            budget_bytes: allowed peak in bytes.
            names: one a node, for error texts and tables.

        Raises:
            InvalidGraph: lengths differ, an edge points backwards or outside, a size or cost is negative.
        """
        n = len(cost)
        if len(bytes) != n:
            raise InvalidGraph(f"cost has {n} entries and bytes has {len(bytes)}")
        if backward_start is not None and not 0 <= backward_start <= n:
            raise InvalidGraph(f"backward_start={backward_start} is outside 0..{n}")
        inputs: list[set[int]] = [set() for _ in range(n)]
        for u, v in edges:
            if not 0 <= u < v < n:
                raise InvalidGraph(f"edge ({u}, {v}) must have 0 <= u < v < {n}")
            inputs[v].add(u)
        label = [str(name) for name in names] if names is not None else [f"n{i}" for i in range(n)]
        last = n if backward_start is None else backward_start
        nodes = tuple(Node(label[i], tuple(sorted(inputs[i])), (i,), rerunnable=i < last) for i in range(n))
        values = tuple(Value(label[i], int(bytes[i]), i) for i in range(n))
        graph = Graph(nodes, values, last)
        return cls(graph, tuple(float(c) for c in cost), int(budget_bytes), cost_unit="1")

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
        """
        import networkx

        inserted = {node: i for i, node in enumerate(graph.nodes)}
        if all(inserted[u] < inserted[v] for u, v in graph.edges):
            order = list(graph.nodes)
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
