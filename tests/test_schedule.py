from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gcsolve.graph import Graph, Node, Value
from gcsolve.schedule import Compute, Free, Schedule, order_from_kept, schedule_from_order
from tests.graphs import once_and_pinned, training_chain
from tests.oracles import droppable, play_kept, with_frees
from tests.strategies import orders, problems


def test_a_chain_frees_each_value_after_its_last_reader():
    schedule = schedule_from_order(training_chain(2, 99).graph, range(4))
    assert list(schedule.lines(training_chain(2, 99).graph)) == [
        "run n0",
        "run n1",
        "run n2",
        "free n1",
        "run n3",
        "free n0",
        "free n2",
        "free n3",
    ]


def test_nothing_kept_reruns_just_in_time():
    graph = training_chain(3, 99).graph
    assert order_from_kept(graph, {2}) == (0, 1, 2, 3, 0, 1, 4, 5)
    assert order_from_kept(graph, ()) == (0, 1, 2, 0, 1, 2, 3, 4, 5)
    assert order_from_kept(graph, {0, 1, 2}) == tuple(range(6))


def test_what_cannot_be_made_again_is_kept_listed_or_not():
    graph = once_and_pinned(99).graph
    assert order_from_kept(graph, ()) == (0, 1, 2, 3, 4, 1, 5, 6, 7)


def test_a_pinned_value_made_again_after_its_last_reader_is_dropped_at_once():
    nodes = (Node("f", (), (0, 1)), Node("b", (1,), (2,), rerunnable=False), Node("c", (0, 2), (3,), rerunnable=False))
    values = (Value("x", 1, 0), Value("y", 1, 0, pinned=True), Value("u", 1, 1), Value("w", 1, 2))
    lines = list(schedule_from_order(Graph(nodes, values, 1), (0, 1, 0, 2)).lines(Graph(nodes, values, 1)))
    assert lines == ["run f", "free x", "run b", "free y", "rerun f", "free y", "run c", "free x", "free u", "free w"]


def test_runs_order_and_tuples_agree():
    schedule = Schedule((Compute(0), Compute(1), Free(0), Compute(0)))
    assert schedule.order() == (0, 1, 0)
    assert schedule.runs(training_chain(1, 9).graph) == (2, 1)
    assert schedule.as_tuples() == [("compute", 0), ("compute", 1), ("free", 0), ("compute", 0)]


def test_its_repr_counts_the_actions_and_shows_the_first():
    short, long = Schedule((Compute(0), Free(0))), Schedule((Compute(0), Compute(1), Free(0), Compute(0), Free(1)) * 99)
    assert repr(short) == "<Schedule: 1 computes (0 reruns), 1 frees: compute 0, free 0>"
    assert repr(long) == (
        "<Schedule: 297 computes (295 reruns), 198 frees: compute 0, compute 1, free 0, compute 0, ...>"
    )


@given(problems(), st.data())
def test_frees_come_as_early_as_the_slow_rule_says(problem, data):
    order = data.draw(orders(problem))
    assert schedule_from_order(problem.graph, order).as_tuples() == with_frees(problem, order)


@given(problems(), st.data())
def test_kept_sets_play_as_the_slow_rule_says(problem, data):
    kept = frozenset(v for v in droppable(problem) if data.draw(st.booleans()))
    slow = play_kept(problem, kept)
    if slow is not None:
        order = order_from_kept(problem.graph, kept)
        assert schedule_from_order(problem.graph, order).as_tuples() == slow
