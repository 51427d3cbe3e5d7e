from __future__ import annotations

import networkx
import pytest

from gcsolve.errors import InvalidGraph
from gcsolve.graph import Graph, Node, Value
from gcsolve.problem import Problem

ARRAYS = {"cost": [1, 2, 3], "bytes": [4, 5, 6], "edges": [(0, 1), (1, 2), (0, 2)], "backward_start": 2}


def test_from_arrays_makes_one_value_a_node_and_reruns_only_the_forward():
    problem = Problem.from_arrays(**ARRAYS, budget_bytes=20, names=["a", "b", "c"])
    assert [node.inputs for node in problem.graph.nodes] == [(), (0,), (0, 1)]
    assert [node.rerunnable for node in problem.graph.nodes] == [True, True, False]
    assert [v.size_bytes for v in problem.graph.values] == [4, 5, 6]
    assert problem.total_cost == 6.0
    assert problem.with_budget(7).budget_bytes == 7
    assert problem.graph.nodes[1].name == "b"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"bytes": [4, 5]}, "bytes has 2"),
        ({"edges": [(1, 1)]}, r"\(1, 1\)"),
        ({"edges": [(0, 3)]}, r"\(0, 3\)"),
        ({"backward_start": 4}, "backward_start=4"),
        ({"cost": [1, float("nan"), 3]}, "nan"),
        ({"cost": [1, -2, 3]}, r"-2\.0"),
        ({"cost": [1, float("inf"), 3]}, "inf"),
        ({"bytes": [4, -5, 6]}, "-5"),
        ({"budget_bytes": -1}, "budget_bytes=-1"),
    ],
)
def test_bad_arrays_are_refused(changes, says):
    with pytest.raises(InvalidGraph, match=says):
        Problem.from_arrays(**(ARRAYS | {"budget_bytes": 20} | changes))


def test_costs_must_match_the_nodes():
    graph = Graph((Node("a", (), (0,)),), (Value("x", 1, 0),), 1)
    with pytest.raises(InvalidGraph, match="2 costs for 1 nodes"):
        Problem(graph, (1.0, 2.0), 5)


def test_from_networkx_keeps_a_topological_insertion_order_and_sorts_another():
    graph = networkx.DiGraph()
    for name, cost in (("a", 1), ("b", 2), ("c", 3)):
        graph.add_node(name, cost=cost, bytes=cost * 10)
    graph.add_edges_from([("a", "b"), ("b", "c")])
    problem = Problem.from_networkx(graph, budget_bytes=99, backward_start="c")
    assert [node.name for node in problem.graph.nodes] == ["a", "b", "c"]
    assert problem.graph.backward_start == 2

    turned = networkx.DiGraph()
    turned.add_nodes_from([("c", {"cost": 3, "bytes": 30}), ("a", {"cost": 1, "bytes": 10})])
    turned.add_edge("a", "c")
    problem = Problem.from_networkx(turned, budget_bytes=99)
    assert [node.name for node in problem.graph.nodes] == ["a", "c"]
    assert problem.cost == (1.0, 3.0)
