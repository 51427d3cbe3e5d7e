"""Rotor: dynamic programme for chains of unequal segments, on the segments of any training graph.

Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains" (2019; ACM TOMS
2024), the algorithm of the tool rotor; Zhao et al., "Rockmate" (ICML 2023) for the menu. Persistent plans: what is
stored stays until its backward has run. C(i, j, m) is the least cost of taking segments i .. j forward and then
backward, their inlet stored (and counted elsewhere), with m bytes to spend:

    C(i, j, m) = min of
        keep i       over the menu o of segment i:   tape(i) + C(i+1, j, m - bytes of o and of the outlet) + again(i, o)
        store at s   over i < s <= j:   forward(i .. s-1) + C(s, j, m - outlet of s-1) + C(i, s-1, m)
    C(i, i, m) = min over o:   tape(i) + again(i, o)

each alternative only where the largest total while it runs is at most m.

| paper | here |
|---|---|
| stage, F_∅, F_ck | segment (`search/chain.py`), `Step("forward")`; its inlet stays as long as the plan wants it |
| F_all, B | `Step("tape")`, `Step("backward")` |
| a, ā | outlet; the tape |
| o_f, o_b (overheads of an op) | the largest total of the segment's own replay, workspace and temporaries included |
| memory slots | `SLOTS`, sizes rounded up, the budget down |

The menu of a segment: keep its whole tape, or drop the values that are cheapest for their bytes, up to several
thresholds, and make them again within its backward. What lives anyway (gradients, values kept always) is counted at
every moment from the given order.

Large segments leave more to the menu, small ones more to the recursion, so the programme is run on both, and on some
between. Every plan is replayed in exact bytes; since rounding wastes a part, the programme is run again with a somewhat larger
or smaller allowance, `TRIES` times, and the cheapest replay that fits is taken. A graph without cuts or without a
backward is one segment: the menu is then all there is.

Cost: O(segments³ × SLOTS), vectorised; at most `MOST_SEGMENTS` segments, neighbours being merged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from gcsolve.problem import Problem
from gcsolve.solver.base import Solution
from gcsolve.solver.search.chain import Chain, Segment, Step, backward_order, chain_of, order_of, outlet_of
from gcsolve.solver.search.order_replay import OrderReplay, OrderRun, best_order, judged_order

SLOTS = 400
MOST_SEGMENTS = 72
TRIES = 6
COARSER = (1, 2, 3, 4, 6, 9)
"""The programme is run with so many segments merged into one: fewer segments have richer menus."""
MENU = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 1.0)
"""Shares of a tape's bytes that the options of the menu drop at most, cheapest cost per byte first."""
CLOSE = 0.01
"""Stop when the replayed peak is this close to the budget."""


@dataclass(frozen=True)
class Rotor:
    name: ClassVar[str] = "rotor"
    menu: tuple[float, ...] = MENU

    def solve(self, problem: Problem, *, time_limit_s: float = 60.0, gap: float = 0.005) -> Solution:
        started = time.perf_counter()
        replay = OrderReplay(problem)
        runs = [replay.run(range(len(problem.graph.nodes)))]
        if runs[0].peak_bytes > problem.budget_bytes and problem.graph.backward_start < len(problem.graph.nodes):
            segments = len(chain_of(problem.graph, MOST_SEGMENTS).segments)
            for most in sorted({max(1, segments // k) for k in COARSER}):
                tables = _Tables(problem, chain_of(problem.graph, most), self.menu)
                runs += _aimed(tables, replay, problem.budget_bytes, started + 0.8 * time_limit_s)
        best = best_order(runs, problem.budget_bytes)
        return judged_order(self.name, problem, best.order, started=started, gap=gap)


def _aimed(tables: _Tables, replay: OrderReplay, budget: int, deadline: float) -> list[OrderRun]:
    """Replays of the programme's plans at allowances around the budget, bisecting for the largest whose plan fits."""
    external = replay.problem.graph.external_bytes
    room = budget - external
    low, high = 0.0, math.inf  # shares of the room: plans fit at `low`, not at `high`
    aim, runs, took = 1.0, [], 0.0
    for _ in range(TRIES):
        begun = time.perf_counter()
        if begun + took > deadline:
            break
        steps = tables.plan(int(aim * room))
        took = time.perf_counter() - begun
        if steps is None:
            low, aim = aim, min(1.5 * aim, (aim + high) / 2)
            continue
        runs.append(replay.run(order_of(tables.chain, steps)))
        spare = 1.0 - (runs[-1].peak_bytes - external) / room
        if spare < 0:
            high = aim
        elif spare <= CLOSE:
            break
        else:
            low = aim
        aim = (low + high) / 2 if high < math.inf else aim * min(1.25, 1.0 + spare)
    return runs


@dataclass(frozen=True)
class _Option:
    """One way to keep a tape: what is dropped, what making it again costs, bytes held with the outlet, largest total in
    backward."""

    dropped: frozenset[int]
    again: float
    held_bytes: int
    peak_bytes: int


class _Tables:
    """What the programme needs to know of each segment, in bytes above external ones and in cost."""

    def __init__(self, problem: Problem, chain: Chain, menu: Sequence[float]) -> None:
        self.problem, self.chain, self.graph = problem, chain, problem.graph
        graph = self.graph
        self.size = [v.size_bytes for v in graph.values]
        self.segments = chain.segments
        self.outlet = [sum(self.size[v] for v in outlet_of(s)) for s in self.segments]
        self.base, self.between = self._lives_anyway()
        self.menu = [self._options(k, s, menu) for k, s in enumerate(self.segments)]
        self.runs: dict[tuple[int, int, bool], tuple[float, int]] = {}
        self.closures = [
            (
                chain.closure(s, outlet_of(s)),
                chain.closure(s, [*s.tape, *outlet_of(s)]),
                chain.closure(s, s.tape),
            )
            for s in self.segments
        ]

    @cached_property
    def _decided(self) -> set[int]:
        """Values whose life the plan decides: tapes, outlets, and what is made on the way."""
        first = self.graph.backward_start
        return {v for v, value in enumerate(self.graph.values) if value.producer < first and v not in self.chain.always}

    def _lives_anyway(self) -> tuple[np.ndarray, list[int]]:
        """Bytes of what the plan does not decide: while each node runs for the first time (its workspace and outputs
        included), and before each segment's group begins."""
        graph = self.graph
        delta = np.zeros(len(graph.nodes) + 1, dtype=np.int64)
        for v, value in enumerate(graph.values):
            if v not in self._decided:
                delta[value.producer] += value.size_bytes
                delta[max([value.producer, *graph.readers[v]]) + 1] -= value.size_bytes
        alive = np.cumsum(delta)[:-1]
        base = alive + np.array([n.workspace_bytes for n in graph.nodes], dtype=np.int64)
        between, start = [0] * len(self.segments), graph.backward_start
        for k in range(len(self.segments) - 1, -1, -1):
            node = self.segments[k].backward[0] if self.segments[k].backward else start
            made = sum(self.size[v] for v in graph.nodes[node].outputs) if node < len(graph.nodes) else 0
            between[k] = int(alive[min(node, len(graph.nodes) - 1)]) - made if node < len(graph.nodes) else 0
            start = node + len(self.segments[k].backward)
        return base, between

    def _local_peak(self, order: Sequence[int], held: set[int], keep: set[int], base: Sequence[int]) -> int:
        """Largest total while `order` runs: the segment's own values, from `held` on, `keep` staying, plus `base`."""
        graph = self.graph
        last = {v: at for at, i in enumerate(order) for v in graph.nodes[i].inputs}
        live = set(held)
        used = sum(self.size[v] for v in live)
        peak = 0
        for at, i in enumerate(order):
            for v in graph.nodes[i].outputs:
                if v in self._decided and v not in live:
                    live.add(v)
                    used += self.size[v]
            peak = max(peak, used + base[at])
            for v in (*graph.nodes[i].inputs, *graph.nodes[i].outputs):
                if v in live and v not in keep and last.get(v, at) <= at:
                    live.discard(v)
                    used -= self.size[v]
        return peak

    def _options(self, k: int, segment: Segment, menu: Sequence[float]) -> list[_Option]:
        options = [self._option(k, segment, frozenset())]
        price = {
            v: sum(self.problem.cost[i] for i in self.chain.closure(segment, [v], set(segment.tape) - {v}))
            / max(1, self.size[v])
            for v in segment.tape
        }
        whole = sum(self.size[v] for v in segment.tape)
        for share in menu:
            dropped, spent = set(), 0
            for v in sorted(segment.tape, key=lambda v: (price[v], v)):
                if spent + self.size[v] <= share * whole:
                    dropped.add(v)
                    spent += self.size[v]
            if dropped and all(o.dropped != dropped for o in options):
                options.append(self._option(k, segment, frozenset(dropped)))
        return options

    def _option(self, k: int, segment: Segment, dropped: frozenset[int]) -> _Option:
        held = set(segment.tape) - dropped
        order = backward_order(self.chain, segment, dropped)
        base, now = [], self.between[k]
        for i in order:
            if i >= self.graph.backward_start:
                now = int(self.base[i])
                base.append(now)
            else:
                base.append(now + self.graph.nodes[i].workspace_bytes)
        again = [i for i in order if i < self.graph.backward_start]
        kept_inlet = set() if segment.inlet is None else {segment.inlet}
        return _Option(
            dropped,
            sum(self.problem.cost[i] for i in again),
            sum(self.size[v] for v in held.union(outlet_of(segment))),
            self._local_peak(order, held, kept_inlet, base),
        )

    def _forward(self, k: int, what: int, last: int) -> tuple[float, int]:
        """(cost, largest total without the inlet) of running segment k to its outlet (`what` 0), to outlet and tape
        (1), or to its tape (2), while segments up to `last` are on their way."""
        first_time = last == len(self.segments) - 1
        if (k, what, first_time) not in self.runs:
            segment = self.segments[k]
            order = segment.nodes if first_time else self.closures[k][what]
            base = [int(self.base[i]) if first_time else self.graph.nodes[i].workspace_bytes for i in order]
            keep = (set(outlet_of(segment)) if what < 2 else set()) | (set(segment.tape) if what else set())
            cost = sum(self.problem.cost[i] for i in order)
            self.runs[k, what, first_time] = cost, self._local_peak(order, set(), keep, base)
        cost, peak = self.runs[k, what, first_time]
        return cost, peak if first_time else peak + self.between[last]

    def plan(self, room_bytes: int) -> list[Step] | None:
        """The programme at that many bytes above external ones; None when nothing fits."""
        if room_bytes <= 0:
            return None
        n = len(self.segments)
        slot = -(-room_bytes // SLOTS)  # bytes; one byte where the room is small, so that nothing is lost
        count = room_bytes // slot

        def up(size: int) -> int:
            return min(count + 1, int(-(-size // slot)))

        slots = np.arange(count + 1)
        C = np.full((n, n, count + 1), np.inf)
        D = np.full((n, n, count + 1), np.inf)  # C(s, j, m - outlet of s-1)
        choice = np.full((n, n, count + 1), -1, dtype=np.int32)  # menu option o: -2 - o; store at s: s
        for j in range(n):
            to_outlet = [self._forward(k, 0, j) for k in range(j + 1)]
            for i in range(j, -1, -1):
                best, pick = np.full(count + 1, np.inf), np.full(count + 1, -1, dtype=np.int32)
                cost, peak = self._forward(i, 2 if i == j else 1, j)
                for o, option in enumerate(self.menu[i]):
                    need = max(up(option.peak_bytes), up(peak))
                    if i == j:
                        total = np.full(count + 1, float(cost + option.again))
                    else:
                        total = cost + option.again + _shifted(C[i + 1, j], up(option.held_bytes))
                    total[slots < need] = np.inf
                    pick = np.where(total < best, -2 - o, pick)
                    best = np.minimum(best, total)
                if i < j:
                    run, need = 0.0, 0
                    costs, needs = [], []
                    for k in range(i, j):
                        run += to_outlet[k][0]
                        need = max(need, up(to_outlet[k][1] + (self.outlet[k - 1] if k > i else 0)))
                        costs.append(run)
                        needs.append(need)
                    totals = np.array(costs)[:, None] + D[i + 1 : j + 1, j] + C[i, i:j]
                    totals[slots[None, :] < np.array(needs)[:, None]] = np.inf
                    at = totals.argmin(axis=0)
                    least = totals[at, slots]
                    pick = np.where(least < best, at + i + 1, pick)
                    best = np.minimum(best, least)
                C[i, j], choice[i, j] = best, pick
                if i:
                    D[i, j] = _shifted(best, up(self.outlet[i - 1]))
        if not np.isfinite(C[0, n - 1, count]):
            return None
        return self._steps(choice, up, count)

    def _steps(self, choice: np.ndarray, up: Callable[[int], int], count: int) -> list[Step]:
        steps: list[Step] = []
        todo: list[tuple[int, int, int] | Step] = [(0, len(self.segments) - 1, count)]
        while todo:
            task = todo.pop()
            if isinstance(task, Step):
                steps.append(task)
                continue
            i, j, m = task
            pick = int(choice[i, j, m])
            if pick >= 0:
                steps += [Step("forward", k) for k in range(i, pick)]
                todo += [(i, pick - 1, m), (pick, j, m - up(self.outlet[pick - 1]))]
                continue
            option = self.menu[i][-2 - pick]
            steps.append(Step("tape", i, option.dropped, onward=i < j))
            todo.append(Step("backward", i, option.dropped))
            if i < j:
                todo.append((i + 1, j, m - up(option.held_bytes)))
        return steps


def _shifted(row: np.ndarray, by: int) -> np.ndarray:
    """row[m - by], infinite where m < by."""
    if by == 0:
        return row.copy()
    out = np.full_like(row, np.inf)
    if by < len(row):
        out[by:] = row[:-by]
    return out
