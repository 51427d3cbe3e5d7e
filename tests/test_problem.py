from __future__ import annotations

import networkx
import numpy
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
        ({"cost": [1, -2, 3]}, r"cost\[1\]=-2 of node n1 must be a finite number ≥ 0"),
        ({"cost": [1, True, 3]}, r"cost\[1\]=True of node n1"),
        ({"cost": [1, "2", 3]}, r"cost\[1\]='2' of node n1"),
        ({"cost": None}, "cost=None must be a list of numbers"),
        ({"cost": "123"}, "cost='123' must be a list"),
        ({"cost": {0: 1, 1: 2, 2: 3}}, r"cost=\{.* must be a list"),
        ({"cost": [1, float("inf"), 3]}, "inf"),
        ({"bytes": [4, -5, 6]}, "-5"),
        ({"bytes": [4, 1.9, 6]}, r"bytes\[1\]=1.9 of node n1 must be a whole number ≥ 0"),
        ({"bytes": [4, float("nan"), 6]}, r"bytes\[1\]=nan of node n1"),
        ({"bytes": [4, float("inf"), 6]}, r"bytes\[1\]=inf of node n1"),
        ({"bytes": [4, True, 6]}, r"bytes\[1\]=True of node n1"),
        ({"bytes": [4, "5", 6], "names": ["a", "b", "c"]}, r"bytes\[1\]='5' of node b"),
        ({"bytes": None}, "bytes=None must be a list of whole numbers"),
        ({"names": ["a", "b"]}, "cost has 3 entries and names has 2"),
        ({"names": "abc"}, "names='abc' must be a list of names"),
        ({"edges": None}, "edges=None must be a list of pairs"),
        ({"edges": "01"}, "edges='01' must be a list of pairs"),
        ({"edges": [(0, 1), (0, 1, 2)]}, r"edges\[1\]=\(0, 1, 2\) must be a pair"),
        ({"edges": ["01"]}, r"edges\[0\]='01' must be a pair"),
        ({"edges": [1.5]}, r"edges\[0\]=1.5 must be a pair"),
        ({"edges": [(0, 1.5)]}, r"edges\[0\]=1.5 in \(0, 1.5\) must be a whole number"),
        ({"edges": [(-1, 1)]}, r"edges\[0\]=-1 in \(-1, 1\)"),
        ({"edges": [(False, 1)]}, r"edges\[0\]=False"),
        ({"backward_start": 2.5}, "backward_start=2.5 must be a whole number"),
        ({"backward_start": True}, "backward_start=True must be a whole number"),
        ({"budget_bytes": -1}, "budget_bytes=-1"),
        ({"budget_bytes": 16.5}, "budget_bytes=16.5 must be a whole number"),
        ({"budget_bytes": "16"}, "budget_bytes='16' must be a whole number"),
        ({"budget_bytes": None}, "budget_bytes=None"),
        ({"budget_bytes": True}, "budget_bytes=True"),
        ({"budget_bytes": float("nan")}, "budget_bytes=nan"),
    ],
)
def test_bad_arrays_are_refused(changes, says):
    with pytest.raises(InvalidGraph, match=says):
        Problem.from_arrays(**(ARRAYS | {"budget_bytes": 20} | changes))


def test_whole_numbers_of_any_kind_are_sizes():
    rows = {"cost": numpy.arange(3), "bytes": numpy.array([4, 5, 6]), "edges": numpy.array([(0, 1), (1, 2), (0, 2)])}
    problem = Problem.from_arrays(**rows, backward_start=numpy.int64(2), budget_bytes=numpy.int32(20))
    assert problem.graph == Problem.from_arrays(**ARRAYS, budget_bytes=20).graph
    assert [type(v.size_bytes) for v in problem.graph.values] == [int] * 3
    assert type(problem.budget_bytes) is int
    assert Problem.from_arrays(**(ARRAYS | {"bytes": [4.0, 5.0, 6.0]}), budget_bytes=2e1) == Problem.from_arrays(
        **ARRAYS, budget_bytes=20
    )
    with pytest.raises(InvalidGraph, match=r"budget_bytes=7\.5"):
        problem.with_budget(7.5)


def _digraph(kind=networkx.DiGraph, edges=(("a", "b"),), **b):
    graph = kind()
    graph.add_nodes_from([("a", {"cost": 1, "bytes": 2}), ("b", b or {"cost": 1, "bytes": 2})])
    graph.add_edges_from(edges)
    return graph


@pytest.mark.parametrize(
    ("graph", "options", "says"),
    [
        (None, {}, "graph is of type NoneType; from_networkx takes a networkx.DiGraph"),
        (_digraph(networkx.Graph), {}, "graph is of type Graph;"),
        (_digraph(networkx.MultiDiGraph), {}, "graph is of type MultiDiGraph;"),
        (_digraph(edges=[("a", "b"), ("b", "a")]), {}, "has a cycle, a -> b and back"),
        (_digraph(edges=[("a", "a")]), {}, "has a cycle, a and back"),
        (_digraph(bytes=2), {}, r"node 'b' has no attribute 'cost', only \['bytes'\]; .* cost=<name"),
        (_digraph(), {"bytes": "size"}, "node 'a' has no attribute 'size'.* bytes=<name"),
        (_digraph(cost=1, bytes=1.5), {}, r"bytes\[1\]=1.5 of node b must be a whole number"),
        (_digraph(cost=float("nan"), bytes=1), {}, r"cost\[1\]=nan of node b"),
        (_digraph(), {"backward_start": "z"}, "backward_start='z' is no node"),
        (_digraph(), {"backward_start": ["a"]}, r"backward_start=\['a'\] is no node"),
        (_digraph(), {"budget_bytes": 1.5}, "budget_bytes=1.5"),
    ],
)
def test_bad_networkx_graphs_are_refused(graph, options, says):
    with pytest.raises(InvalidGraph, match=says):
        Problem.from_networkx(graph, **({"budget_bytes": 20} | options))


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


def test_its_repr_is_one_line_of_counts_cost_and_bytes():
    problem = Problem.from_arrays(**ARRAYS, budget_bytes=20)
    graph = "Graph: 2 forward and 1 backward nodes, 3 values of 15 B together, 0 B external"
    assert repr(problem) == f"<Problem: {graph}; cost 6, budget 20 B>"
    assert repr(Problem(problem.graph, problem.cost, 2 * 10**9)) == f"<Problem: {graph}; cost 6 s, budget 2000000000 B>"
