"""Graph, Node, Value: the frozen picture of one training step that every torch-free room works on.

A value is one storage (all views of it are the same value). A node is one op, run in the order of `Graph.nodes`;
nodes before `backward_start` are the forward. What always lives (parameters, buffers, inputs, optimizer state) is
`external`: it costs its bytes at every moment, and reading it needs nothing, so nodes do not list it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from gcsolve.errors import InvalidGraph
from gcsolve.util.checks import whole


@dataclass(frozen=True, slots=True)
class Value:
    """One storage made by a node. `size_bytes` is what the allocator takes for it.

    `pinned`: someone outside holds the first copy (an output, a gradient, a new buffer), so from the moment it is made
    its bytes count until its last reader has run, and a schedule may not free it earlier.
    """

    name: str
    size_bytes: int
    producer: int
    pinned: bool = False
    kind: str = "activations"


@dataclass(frozen=True, slots=True)
class Node:
    """One op: reads the values `inputs`, makes the values `outputs`, needs `workspace_bytes` while it runs.

    A node with `rerunnable=False` runs exactly once. `op`, `module` and `source` say where it comes from.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    workspace_bytes: int = 0
    rerunnable: bool = True
    op: str = ""
    module: str = ""
    source: str = ""

    def where(self) -> str:
        """The node in words, for error texts: name, op, module path, source line."""
        parts = [self.name]
        if self.op:
            parts.append(f"({self.op})")
        if self.module:
            parts.append(f"in module {self.module}")
        if self.source:
            parts.append(f"at {self.source}")
        return " ".join(parts)


@dataclass(frozen=True, repr=False)
class Graph:
    """Nodes in execution order, the values they make, and what always lives.

    Args:
        nodes: execution order; a node may read only values of earlier nodes.
        values: `values[v].producer` is the node that makes value v.
        backward_start: index of the first backward node; `len(nodes)` for a graph without a backward.
        external: (kind, bytes) pairs of what lives through the whole step.

    Raises:
        InvalidGraph: an index, a size or the order is wrong; the text names the node or the value.
    """

    nodes: tuple[Node, ...]
    values: tuple[Value, ...]
    backward_start: int
    external: tuple[tuple[str, int], ...] = field(default=())

    def __post_init__(self) -> None:
        if not 0 <= self.backward_start <= len(self.nodes):
            raise InvalidGraph(f"backward_start={self.backward_start} is outside 0..{len(self.nodes)}")
        made: dict[int, int] = {}
        for i, node in enumerate(self.nodes):
            _size("workspace_bytes", node.workspace_bytes, f" of node {i} ({node.name})")
            for v in node.inputs:
                if v not in made:
                    raise InvalidGraph(f"node {i} ({node.name}) reads value {v}, which no earlier node makes")
            for v in node.outputs:
                if not 0 <= v < len(self.values) or v in made or self.values[v].producer != i:
                    raise InvalidGraph(f"node {i} ({node.name}) lists output {v}, which is not its own value")
                made[v] = i
            if len(set(node.inputs)) != len(node.inputs):
                raise InvalidGraph(f"node {i} ({node.name}) lists an input twice: {node.inputs}")
        for v, value in enumerate(self.values):
            if v not in made:
                raise InvalidGraph(f"value {v} ({value.name}) is made by no node")
            _size("size_bytes", value.size_bytes, f" of value {v} ({value.name})")
        for kind, size in self.external:
            _size("bytes", size, f" of external {kind!r}")

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each value, the nodes that read it, in order."""
        found: list[list[int]] = [[] for _ in self.values]
        for i, node in enumerate(self.nodes):
            for v in node.inputs:
                found[v].append(i)
        return tuple(tuple(r) for r in found)

    @cached_property
    def external_bytes(self) -> int:
        return sum(size for _, size in self.external)

    def is_backward(self, node: int) -> bool:
        return node >= self.backward_start

    def lines(self) -> Iterator[str]:
        """The graph as text, one node a line."""
        yield f"external {self.external_bytes} B"
        for i, node in enumerate(self.nodes):
            if i == self.backward_start:
                yield "-- backward"
            outs = ", ".join(
                f"v{v}:{self.values[v].size_bytes}{'!' if self.values[v].pinned else ''}" for v in node.outputs
            )
            ins = ", ".join(f"v{v}" for v in node.inputs)
            once = "" if node.rerunnable else " once"
            yield f"{i}: {node.name}({ins}) -> {outs or '-'} ws={node.workspace_bytes}{once}"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        """Counts and bytes in one line; `str()` lists the nodes."""
        backward = len(self.nodes) - self.backward_start
        values_bytes = sum(v.size_bytes for v in self.values)
        return (
            f"<Graph: {self.backward_start} forward and {backward} backward nodes, {len(self.values)} values of "
            f"{values_bytes} B together, {self.external_bytes} B external>"
        )


def _size(name: str, size: int, of: str) -> None:
    whole(name, size, floats=False, of=of, error=InvalidGraph)
