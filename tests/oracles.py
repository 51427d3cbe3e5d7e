"""Slow, obvious judges: a set-based simulator, and brute force over small graphs. They share no code with gcsolve's."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import chain, combinations

from gcsolve.problem import Problem


class Broken(Exception):
    """The schedule breaks a rule."""


def slow_simulate(problem: Problem, actions: Sequence[tuple[str, int]]) -> tuple[int, float]:
    """(peak bytes, cost of all runs) of [("compute", node) | ("free", value), ...]; raises `Broken`.

    Memory is summed afresh from the set of live values at every step.
    """
    graph = problem.graph

    def total(live: set[int]) -> int:
        return sum(size for _, size in graph.external) + sum(graph.values[v].size_bytes for v in live)

    live: set[int] = set()
    history: list[int] = []
    peak = total(live)
    for what, index in actions:
        if what == "compute":
            node = graph.nodes[index]
            if not set(node.inputs) <= live:
                raise Broken("input not live")
            if not node.rerunnable and index in history:
                raise Broken("runs twice")
            made_again = set(node.outputs) & live
            if any(not graph.values[v].pinned for v in made_again):
                raise Broken("made while live")
            history.append(index)
            second_copies = sum(graph.values[v].size_bytes for v in made_again)
            live = live | set(node.outputs)
            peak = max(peak, total(live) + second_copies + node.workspace_bytes)
        else:
            if index not in live:
                raise Broken("freed while not live")
            readers = {j for j, node in enumerate(graph.nodes) if index in node.inputs}
            if graph.values[index].pinned and not readers <= set(history):
                raise Broken("pinned and still to be read")
            live = live - {index}
    if set(history) != set(range(len(graph.nodes))):
        raise Broken("left out")
    return peak, sum(problem.cost[i] for i in history)


def droppable(problem: Problem) -> list[int]:
    """Forward values that a plan may choose not to keep."""
    graph = problem.graph
    return [
        v
        for v, value in enumerate(graph.values)
        if value.producer < graph.backward_start and not value.pinned and graph.nodes[value.producer].rerunnable
    ]


def kept_sets(problem: Problem) -> Iterator[frozenset[int]]:
    choices = droppable(problem)
    for kept in chain.from_iterable(combinations(choices, k) for k in range(len(choices) + 1)):
        yield frozenset(kept)


def play_kept(problem: Problem, kept: frozenset[int]) -> list[tuple[str, int]] | None:
    """Actions of the plan that keeps `kept` and makes the rest again just in time, once; None when the plan has a node
    made again while one of its outputs is kept (that output would then be dropped before its last use); outputs of 0
    bytes may be kept."""
    graph = problem.graph
    free_to_drop = set(droppable(problem))
    steps: list[int] = list(range(graph.backward_start))
    again: set[int] = set()

    def ask(v: int) -> None:
        i = graph.values[v].producer
        if v not in free_to_drop or v in kept or i in again:
            return
        again.add(i)
        for u in graph.nodes[i].inputs:
            ask(u)

    for b in range(graph.backward_start, len(graph.nodes)):
        before = set(again)
        for v in graph.nodes[b].inputs:
            ask(v)
        steps += [*sorted(again - before), b]
    if any(v in kept and graph.values[v].producer in again and graph.values[v].size_bytes for v in free_to_drop):
        return None
    return with_frees(problem, steps)


def with_frees(problem: Problem, steps: Sequence[int]) -> list[tuple[str, int]]:
    """`steps` with each copy of a value dropped as soon as nothing reads that copy any more."""
    graph = problem.graph
    actions: list[tuple[str, int]] = []
    live: set[int] = set()
    for at, i in enumerate(steps):
        actions.append(("compute", i))
        live |= set(graph.nodes[i].outputs)
        for v in sorted(live):
            wanted = False
            for j in steps[at + 1 :]:
                if v in graph.nodes[j].inputs:
                    wanted = True
                    break
                if v in graph.nodes[j].outputs and not graph.values[v].pinned:
                    break
            if not wanted:
                actions.append(("free", v))
                live.discard(v)
    return actions


def best_kept_cost(problem: Problem) -> float | None:
    """Least cost of any plan that keeps or makes again once, within the budget, by trying every kept set."""
    best: float | None = None
    for kept in kept_sets(problem):
        actions = play_kept(problem, kept)
        if actions is None:
            continue
        peak, cost = slow_simulate(problem, actions)
        if peak <= problem.budget_bytes and (best is None or cost < best):
            best = cost
    return best


def least_kept_peak(problem: Problem) -> int:
    """Least peak of any plan that keeps or makes again once."""
    played = (play_kept(problem, kept) for kept in kept_sets(problem))
    return min(slow_simulate(problem, actions)[0] for actions in played if actions is not None)


def best_cost(problem: Problem) -> float | None:
    """Least cost of any schedule at all in this op order, reruns without limit: shortest path over what is live."""
    graph = problem.graph
    readers = [[j for j, node in enumerate(graph.nodes) if v in node.inputs] for v in range(len(graph.values))]
    external = sum(size for _, size in graph.external)

    def held(live: frozenset[int]) -> int:
        return external + sum(graph.values[v].size_bytes for v in live)

    def steps(done: int, live: frozenset[int]) -> Iterator[tuple[float, tuple[int, frozenset[int]]]]:
        for v in live:
            if not graph.values[v].pinned or all(j < done for j in readers[v]):
                yield 0.0, (done, live - {v})
        native = [done] if done < len(graph.nodes) else []
        for i in [i for i in range(done) if graph.nodes[i].rerunnable] + native:
            node = graph.nodes[i]
            again = set(node.outputs) & live
            if not set(node.inputs) <= live or any(not graph.values[v].pinned for v in again):
                continue
            after = live | set(node.outputs)
            extra = node.workspace_bytes + sum(graph.values[v].size_bytes for v in again)
            if held(after) + extra <= problem.budget_bytes:
                yield problem.cost[i], (max(done, i + 1), after)

    count = 0
    queue: list[tuple[float, int, tuple[int, frozenset[int]]]] = [(0.0, 0, (0, frozenset()))]
    settled: set[tuple[int, frozenset[int]]] = set()
    while queue:
        cost, _, state = heapq.heappop(queue)
        if state in settled:
            continue
        settled.add(state)
        if state[0] == len(graph.nodes):
            return cost
        for extra, following in steps(*state):
            if following not in settled:
                count += 1
                heapq.heappush(queue, (cost + extra, count, following))
    return None
