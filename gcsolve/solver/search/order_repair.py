"""Orders made to fit by exact replays: at the peak, let go of a value and make it again before its next reader.

Works on any order, whoever made it: with reruns already, inside the forward or the backward. A *split* of a copy that is
alive at the peak, and not read there, inserts the rerun of its node just before the copy's next reader, with the reruns
of what that lacks. An input whose newest copy is gone is either made again too, or that copy is held on to. The split
that removes most of the overflow per added cost is taken, and again, until the order fits or none helps.
"""

from __future__ import annotations

import time

import numpy as np

from gcsolve.solver.search.order_replay import OrderReplay, OrderRun

STEPS = 400
TRIALS = 10
"""Splits replayed a step, the most promising first."""
WORK = 3_000_000
"""Nodes replayed at most."""
DEEP = 64
"""A split that takes more reruns than this is not looked at."""


def mended(replay: OrderReplay, run: OrderRun, deadline: float, work: int = WORK) -> OrderRun:
    """A run that fits the budget, or with as little overflow as splits could reach. `work`: nodes replayed at most."""
    budget = replay.problem.budget_bytes
    least = max(replay.problem.total_cost, 1e-12) * 1e-6
    for _ in range(STEPS):
        over = run.overflow(budget)
        if run.peak_bytes <= budget or work < 0 or time.perf_counter() > deadline:
            break
        best, best_score = None, 0.0
        for order in _splits(replay, run):
            trial = replay.run(order)
            work -= len(order)
            gone = over - trial.overflow(budget)
            score = gone / max(trial.rerun_cost - run.rerun_cost, least)
            if gone > 0 and score > best_score:
                best, best_score = trial, score
        if best is None:
            break
        run = best
    return run


def _splits(replay: OrderReplay, run: OrderRun) -> list[list[int]]:
    """The most promising orders one split away."""
    graph = replay.problem.graph
    at = int(run.bytes_at.argmax())
    here = run.order[at]
    excess = int(run.bytes_at[at]) - replay.problem.budget_bytes
    own = {*graph.nodes[here].inputs, *graph.nodes[here].outputs}
    spans = _Spans(run)
    found: list[tuple[float, int, int, tuple[int, ...]]] = []
    for c in np.flatnonzero((run.made < at) & (run.end > at)):
        v = int(run.value[c])
        producer = graph.values[v].producer
        if v in own or not replay.size[v] or replay.pinned[v] or not graph.nodes[producer].rerunnable:
            continue
        following = next(place for place in range(at + 1, int(run.end[c]) + 1) if v in replay.inputs[run.order[place]])
        for hold in (False, True):
            closure = _closure(replay, spans, producer, at, following, hold)
            if closure is not None:
                again, held = closure
                gone = min(int(replay.size[v]) - held, excess)
                if gone > 0:
                    cost = sum(replay.problem.cost[i] for i in again)
                    found.append((cost / gone, v, following, again))
    found.sort()
    taken = list(dict.fromkeys((following, again) for _, _, following, again in found))[:TRIALS]
    return [[*run.order[:place], *again, *run.order[place:]] for place, again in taken]


class _Spans:
    """Where copies are live, by value."""

    def __init__(self, run: OrderRun) -> None:
        self.of: dict[int, list[tuple[int, int]]] = {}
        for v, made, end in zip(run.value.tolist(), run.made.tolist(), run.end.tolist(), strict=True):
            self.of.setdefault(v, []).append((made, end))

    def newest(self, v: int, place: int) -> tuple[int, int]:
        """(made, last read) of v's newest copy made before `place`."""
        return max(span for span in self.of[v] if span[0] < place)


def _closure(
    replay: OrderReplay, spans: _Spans, producer: int, at: int, place: int, hold: bool
) -> tuple[tuple[int, ...], int] | None:
    """(nodes to run before `place` so that `producer` can, bytes then held over the peak); None when they are too many.

    `hold`: copies last read after the peak, or before it but after their node could not run again, are held on to.
    """
    graph = replay.problem.graph
    again = {producer}
    stack = [producer]
    held: set[int] = set()
    while stack:
        for u in graph.nodes[stack.pop()].inputs:
            i = graph.values[u].producer
            if i in again:
                continue
            _, end = spans.newest(u, place)
            if end >= place:
                continue  # live there
            if replay.pinned[u] or not graph.nodes[i].rerunnable or (hold and end >= at):
                if end < at:
                    held.add(u)
                continue
            again.add(i)
            if len(again) > DEEP:
                return None
            stack.append(i)
    return tuple(sorted(again)), sum(int(replay.size[u]) for u in held)
