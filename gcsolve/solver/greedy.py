"""Greedy: drop the value with the least added cost per byte of peak removed, replay, and again until it fits.

A plan is a set of *cuts* (v, t): value v is not carried past the moment when node t runs; and of *holds* (v, t): it is
carried on until node t runs, for a rerun there. Everything else is held as long as a node still to run for the first
time reads it, and what is read and not held is made again just in time, with whatever that takes. One cut costs one
rerun and its missing inputs; a value may be cut any number of times, inside the forward too, and any rerunnable node
may be rerun. So it works on training graphs and on graphs without a
backward alike, below what one rerun a value can reach, and is the incumbent of the exact methods.

At the moment of the peak, with e bytes too many, the score of cutting v there is

    (cost of v's producer + cost of what it needs that is not alive when v is read next) / min(bytes[v], e)

Missing inputs that are alive at the peak itself may as well be held on: a second, cheaper way to make the same cut.
Cuts are taken in the order of their scores until about half of e is gone; then the order is replayed in exact bytes.
Cuts that did not lower the overflow are taken back. Where no cut helps any more, `search/evict.py` makes a plan in one pass.
At the end reruns are taken back, dearest first, as long as it fits.

| Kirisame et al., "Dynamic Tensor Rematerialization" (ICLR 2021) | here |
|---|---|
| evict the least cost / (bytes x staleness) when memory is full | cut the least added cost / bytes at the peak |
| projected cost: evicted neighbours included | cost of v's producer and of its missing inputs |

Differs from DTR in that it plans: a peak that comes later than the eviction is seen by the replay. Cost: some tens to
hundreds of replays of O(order + edges); `WORK` bounds nodes replayed, so plans do not depend on the machine's speed.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from gcsolve.problem import Problem
from gcsolve.solver.base import Solution
from gcsolve.solver.search.evict import evicting_order
from gcsolve.solver.search.order_replay import OrderReplay, OrderRun, best_order, judged_order, stages_of

WORK = 400_000
"""Nodes replayed while cutting."""
THIN_WORK = 100_000
"""Nodes replayed while taking reruns back."""
DEEP = 64
"""A cut that takes more reruns than this is not looked at."""
NEAR = 4
"""Single cuts tried one by one when a batch did not help."""

Pair = tuple[int, int]
"""(value, stage); stage t ends when node t has run for the first time."""


@dataclass(frozen=True)
class Move:
    """A cut and the holds that come with it."""

    cut: Pair
    holds: tuple[Pair, ...] = ()


@dataclass(frozen=True)
class Greedy:
    name: ClassVar[str] = "greedy"

    def solve(self, problem: Problem, *, time_limit_s: float = 60.0, gap: float = 0.005) -> Solution:
        started = time.perf_counter()
        run = greedy_order(problem, deadline=started + 0.9 * time_limit_s)
        return judged_order(self.name, problem, run.order, started=started, gap=gap)


def greedy_order(problem: Problem, *, deadline: float) -> OrderRun:
    """The greedy's order: one that fits, or the one with the least overflow that was found."""
    search = _Search(problem, deadline)
    run = search.lower()
    if run.peak_bytes > problem.budget_bytes:
        order = evicting_order(problem, deadline=deadline)
        if order is not None:
            run = best_order([run, search.replay.run(order)], problem.budget_bytes)
    return thinned(search.replay, run, deadline)


def thinned(replay: OrderReplay, run: OrderRun, deadline: float) -> OrderRun:
    """`run` less the reruns that it can do without, dearest first, as long as it fits."""
    budget = replay.problem.budget_bytes
    if run.peak_bytes > budget:
        return run
    work = THIN_WORK
    steps = list(enumerate(run.order))  # each run has a number of its own, to find it again
    first = {i: at for at, i in reversed(steps)}
    reruns = [(at, i) for at, i in steps if first[i] != at]
    reruns.sort(key=lambda step: (-replay.cost[step[1]], step[0]))
    gone: set[int] = set()
    for at, _ in reruns:
        if at in gone:
            continue
        work -= len(steps)
        if work < 0 or time.perf_counter() > deadline:
            break
        shorter = needed(replay, [step for step in steps if step[0] != at])
        trial = replay.run([i for _, i in shorter])
        if trial.peak_bytes <= budget and trial.key() < run.key():
            gone.update({place for place, _ in steps}.difference(place for place, _ in shorter))
            steps, run = shorter, trial
    return run


def needed(replay: OrderReplay, steps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """`steps` without the reruns of which nothing is read."""
    runs: dict[int, int] = {}
    for _, i in steps:
        runs[i] = runs.get(i, 0) + 1
    wanted: set[int] = set()
    kept = []
    for step in reversed(steps):
        i = step[1]
        read = [v for v in replay.outputs[i] if v in wanted]
        if runs[i] > 1 and not read:
            runs[i] -= 1
            continue
        runs[i] -= 1
        wanted.difference_update(v for v in read if not replay.pinned[v])
        wanted.update(replay.inputs[i])
        kept.append(step)
    kept.reverse()
    return kept


class _Pairs:
    """Cuts or holds by value, each sorted by stage."""

    def __init__(self, values: int) -> None:
        self.of: list[list[int]] = [[] for _ in range(values)]

    def add(self, pairs: Iterable[Pair]) -> None:
        for v, t in pairs:
            insort(self.of[v], t)

    def remove(self, pairs: Iterable[Pair]) -> None:
        for v, t in pairs:
            self.of[v].remove(t)

    def between(self, v: int, first: int, last: int) -> bool:
        """Whether v has some t with first <= t < last."""
        of = self.of[v]
        return bisect_left(of, first) < bisect_left(of, last)


class _Search:
    def __init__(self, problem: Problem, deadline: float) -> None:
        graph = problem.graph
        self.problem, self.graph, self.deadline = problem, graph, deadline
        self.replay = OrderReplay(problem)
        self.producer = [v.producer for v in graph.values]
        self.stays = [v.pinned or not graph.nodes[v.producer].rerunnable for v in graph.values]
        self.readers = graph.readers
        self.least_cost = max(problem.total_cost, 1e-12) * 1e-9
        self.last_reader = [r[-1] if r else -1 for r in graph.readers]
        self.cuts = _Pairs(len(graph.values))
        self.holds = _Pairs(len(graph.values))
        self.work = WORK
        self.run = self._played()

    # --- replay ---

    def order(self) -> list[int]:
        """Nodes in order, with just-in-time reruns of what is read and not held."""
        touched = [-1] * len(self.graph.values)  # the last stage at which a value was made or read
        order: list[int] = []
        for t, node in enumerate(self.graph.nodes):
            wanted: set[int] = set()
            stack = [v for v in node.inputs if not self._held(v, t, touched)]
            while stack:
                i = self.producer[stack.pop()]
                if i not in wanted:
                    wanted.add(i)
                    stack.extend(u for u in self.graph.nodes[i].inputs if not self._held(u, t, touched))
            ran = [*sorted(wanted), t]
            order.extend(ran)
            for i in ran:
                for v in self.graph.nodes[i].inputs:
                    touched[v] = t
                for v in self.graph.nodes[i].outputs:
                    touched[v] = t
        return order

    def _held(self, v: int, t: int, touched: list[int]) -> bool:
        """Whether v is live when stage t begins: made or read since it was last cut, and carried to a reader."""
        if self.stays[v] or touched[v] == t:
            return True
        if not self.cuts.of[v] and self.last_reader[v] >= t:
            return True
        readers = self.readers[v]
        at = bisect_left(readers, t)
        if at < len(readers) and not self.cuts.between(v, touched[v], readers[at]):
            return True
        held_on = self.holds.of[v]
        return bool(held_on) and held_on[-1] >= t and not self.cuts.between(v, touched[v], t)

    def _played(self) -> OrderRun:
        run = self.replay.run(self.order())
        self.work -= len(run.order)
        return run

    def _spent(self) -> bool:
        return self.work <= 0 or time.perf_counter() > self.deadline

    # --- cutting ---

    def lower(self) -> OrderRun:
        """Cut until the order fits, nothing helps any more, or the work is spent."""
        budget = self.problem.budget_bytes
        barred: set[Move] = set()
        while self.run.peak_bytes > budget and not self._spent():
            excess = self.run.peak_bytes - budget
            batch = _Moment(self, self.run).batch(excess, max(1, excess // 2), barred)
            if not batch:
                break
            if self._accept(batch):
                continue
            barred.update(batch)
            for move in batch[:NEAR] if len(batch) > 1 else ():
                if not self._spent() and self._accept([move]):
                    barred.difference_update(batch)
                    break
        return self.run

    def _accept(self, batch: list[Move]) -> bool:
        """Take `batch` if it lowers the overflow."""
        cuts, holds = [m.cut for m in batch], [h for m in batch for h in m.holds]
        self.cuts.add(cuts)
        self.holds.add(holds)
        run = self._played()
        if run.overflow(self.problem.budget_bytes) < self.run.overflow(self.problem.budget_bytes):
            self.run = run
            return True
        self.cuts.remove(cuts)
        self.holds.remove(holds)
        return False

    def _size(self, v: int) -> int:
        return self.graph.values[v].size_bytes


class _Moment:
    """The moment at which a run peaks: what is alive there, and what cutting it would take."""

    def __init__(self, search: _Search, run: OrderRun) -> None:
        self.search, self.graph = search, search.graph
        at = int(run.bytes_at.argmax())
        order = run.order
        stage_of = stages_of(order)
        self.stage = stage_of[at]
        self.spans: dict[int, list[tuple[int, int]]] = {}  # value -> (first, last) stage of each copy, in order
        alive: list[tuple[int, int]] = []
        for v, made, end in sorted(zip(run.value.tolist(), run.made.tolist(), run.end.tolist(), strict=True)):
            self.spans.setdefault(v, []).append((stage_of[made], stage_of[end]))
            if made <= at <= end:
                alive.append((v, end))
        self.uses: dict[int, list[int]] = {}
        for v, end in alive:
            if not search.stays[v] and stage_of[end] > self.stage and search._size(v):
                self.uses[v] = []
        for place in range(at + 1, len(order)):
            for v in self.graph.nodes[order[place]].inputs:
                if v in self.uses:
                    self.uses[v].append(stage_of[place])
        self.again: dict[int, int] = {}  # node -> the first stage after this one at which it is rerun
        for place in range(len(order) - 1, at, -1):
            if order[place] != stage_of[place]:
                self.again[order[place]] = stage_of[place]

    def batch(self, excess: int, enough: int, barred: set[Move]) -> list[Move]:
        """Moves by rising score until `enough` bytes are gone."""
        heap = []
        for v in self.uses:
            for holding in (True, False):
                option = self._option(v, holding, excess)
                if option is not None and option[2] not in barred:
                    heap.append((option[0], v, holding))
        heapq.heapify(heap)
        taken: list[Move] = []
        gone = 0
        while heap and gone < enough:
            _, v, holding = heapq.heappop(heap)
            option = self._option(v, holding, excess - gone)  # an earlier move may have changed what this one takes
            if option is None or option[2] in barred:
                continue
            score, bytes_gone, move = option
            if heap and score > heap[0][0]:
                heapq.heappush(heap, (score, v, holding))
                continue
            taken.append(move)
            gone += bytes_gone
            self._take(move)
        return taken

    def _option(self, v: int, holding: bool, excess: int) -> tuple[float, int, Move] | None:
        """(added cost per byte removed, bytes removed, move); None when cutting v here removes nothing."""
        back = self._next_use(v)
        if back is None:
            return None
        found = self._closure(v, back, holding)
        if found is None:
            return None
        cost, held, holds = found
        gone = self.search._size(v) - held
        if gone <= 0 or (holding and not holds):
            return None
        score = (cost + self.search.least_cost) / min(gone, max(1, excess))
        return score, gone, Move((v, self.stage), holds)

    def _next_use(self, v: int) -> int | None:
        return next((stage for stage in self.uses[v] if stage > self.stage), None)

    def _closure(self, v: int, back: int, holding: bool) -> tuple[float, int, tuple[Pair, ...]] | None:
        """What making v again at stage `back` takes: cost, bytes that must then be alive here and were not, holds."""
        cost, held = 0.0, 0
        holds: list[Pair] = []
        seen = {self.search.producer[v]}
        stack = [self.search.producer[v]]
        while stack:
            i = stack.pop()
            if i not in self.again:  # else it is rerun anyway: earlier now, but no more often
                cost += self.search.problem.cost[i]
            for u in self.graph.nodes[i].inputs:
                if self._alive(u, back):
                    continue
                p = self.search.producer[u]
                if self.search.stays[u]:
                    if not self._alive(u, self.stage):
                        held += self.search._size(u)
                elif holding and self._alive(u, self.stage):
                    holds.append((u, back))
                elif p not in seen:
                    if len(seen) > DEEP:
                        return None
                    seen.add(p)
                    stack.append(p)
        return cost, held, tuple(holds)

    def _alive(self, v: int, stage: int) -> bool:
        spans = self.spans.get(v, [])
        at = bisect_right(spans, (stage, 1 << 60)) - 1
        return at >= 0 and spans[at][0] <= stage <= spans[at][1]

    def _take(self, move: Move) -> None:
        """Account for a cut of v: no longer alive from here to its next use, where its producer is rerun."""
        v = move.cut[0]
        back = self._next_use(v)
        assert back is not None
        spans = self.spans[v]
        at = bisect_right(spans, (self.stage, 1 << 60)) - 1
        first, last = spans[at]
        spans[at : at + 1] = [(first, self.stage), (back, last)]
        i = self.search.producer[v]
        self.again[i] = min(back, self.again.get(i, back))
        self.uses[v] = []
        for u, until in move.holds:
            spans = self.spans[u]
            at = bisect_right(spans, (self.stage, 1 << 60)) - 1
            spans[at] = (spans[at][0], max(spans[at][1], until))
