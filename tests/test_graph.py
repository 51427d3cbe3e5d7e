from __future__ import annotations

import pytest

from gcsolve.errors import GcsolveError, InvalidGraph
from gcsolve.graph import Graph, Node, Value


def two(**changes) -> Graph:
    """a -> b, with one field of node b replaced."""
    b = {"name": "b", "inputs": (0,), "outputs": (1,)} | changes
    return Graph((Node("a", (), (0,)), Node(**b)), (Value("x", 4, 0), Value("y", 2, 1)), 2)


def test_a_valid_graph_knows_its_readers_and_external_bytes():
    graph = Graph(two().nodes, two().values, 1, (("parameters", 3), ("inputs", 4)))
    assert graph.readers == ((1,), ())
    assert graph.external_bytes == 7
    assert [graph.is_backward(i) for i in (0, 1)] == [False, True]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"inputs": (1,)}, "value 1"),
        ({"inputs": (7,)}, "value 7"),
        ({"inputs": (0, 0)}, "twice"),
        ({"outputs": (0,)}, "output 0"),
        ({"outputs": (2,)}, "output 2"),
        ({"outputs": ()}, "value 1"),
        ({"workspace_bytes": -1}, "workspace_bytes=-1"),
        ({"workspace_bytes": 1.5}, r"workspace_bytes=1.5 of node 1 \(b\) must be a whole number"),
        ({"workspace_bytes": True}, "workspace_bytes=True"),
    ],
)
def test_a_broken_graph_is_refused_by_name(changes, names):
    with pytest.raises(InvalidGraph, match=names):
        two(**changes)


def test_negative_size_and_backward_start_outside_are_refused():
    with pytest.raises(InvalidGraph, match="size_bytes=-4"):
        Graph((Node("a", (), (0,)),), (Value("x", -4, 0),), 1)
    with pytest.raises(GcsolveError, match="backward_start=3"):
        Graph(two().nodes, two().values, 3)


def test_it_prints_one_node_a_line():
    values = (Value("x", 4, 0), Value("y", 2, 1, pinned=True))
    graph = Graph((Node("a", (), (0,)), Node("b", (0,), (1,), 5, rerunnable=False)), values, 1, (("inputs", 9),))
    assert str(graph) == "external 9 B\n0: a() -> v0:4 ws=0\n-- backward\n1: b(v0) -> v1:2! ws=5 once"


def test_where_names_op_module_and_source():
    node = Node("addmm_3", (), (), op="aten.addmm", module="h.3.mlp", source="model.py:12")
    assert node.where() == "addmm_3 (aten.addmm) in module h.3.mlp at model.py:12"


def test_its_repr_is_one_line_of_counts_and_bytes():
    graph = Graph(two().nodes, two().values, 1, (("parameters", 3000), ("inputs", 4)))
    text = "<Graph: 1 forward and 1 backward nodes, 2 values of 6 B together, 3004 B external>"
    assert repr(graph) == text
