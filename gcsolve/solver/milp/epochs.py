"""The MILP of `retention` with epochs: what is held at chosen moments, and what is rerun between them, any number of times.

The moments b(1) < b(2) < ... are first runs of nodes, forward or backward. Epoch e lies between the runs of b(e) and
b(e+1). A node is rerun at most once an epoch, so up to K times in all.

    H[e,d] = 1   a copy of d is live while b(e) runs                     (binary; d made before b(e))
    R[e,i]       node i, first run before b(e), is rerun in epoch e      (binary)

    minimise Σ cost[i] R[e,i]
    use      H[e,d] + R[e,p(d)] ≥ 1          for d read by a node that first runs in epoch e; p(d) makes d
    rerun    H[e,d] + R[e,p(d)] ≥ R[e,i]     for d read by i
    carry    H[e,d] + R[e,p(d)] ≥ H[e+1,d]
    memory   own bytes of b(e) + Σ bytes[d] H[e,d] ≤ budget, with H = 1 for what b(e) reads and what is pinned there

Every schedule in the op order gives a feasible (H, R), R telling whether there is any rerun in the epoch: so the optimum
is a bound for any schedule (`ANY_SCHEDULE`), however few the moments. More of them make it tighter.

**Bursts.** What is live *between* first runs, while reruns follow each other before node t, no such row sees. Where t - 1
and t are moments, `burst` rows fix that for schedules that rerun, between two first runs, each node at most once and in
order (`ASCENDING`). At the rerun of i before t:

    alive[d] ≥ H[t,d]                        made by i or earlier: it is there, if it is to be there at t
    alive[d] ≥ R[j]                          for readers j ≥ i of d, made by i or earlier
    alive[d] ≥ H[t,d] - R[p(d)], R[j] - R[p(d)]   made after i: there only if not to be made again
    R[i] (own bytes of i) + Σ bytes[d] alive[d] ≤ budget

**What need not be looked at.** Of the optima of this program there is one in which

- no node is rerun in an epoch without need, where its inputs are no larger than what it makes: `lazy` nodes. To hold the
  inputs until the next epoch, and rerun it there, takes no byte more at any moment. So R[e,i] ≤ Σ R[e,j] over the
  readers j of its output, unless a node that first runs in epoch e or is b(e+1) reads that;
- no value is held past its only reader, where that makes no more bytes than the value has and none of its other inputs can
  be made again: `passing` values. To hold what the reader makes instead saves its rerun, or has it one epoch earlier.

Rows and bounds that say so cut off nothing but equals, and the search is many times shorter. Burst rows see more than the
moments do: with them no value is passing, and no rerun is postponed into the burst that has a row for it (`hurried`).

| Jain et al., "Checkmate" (MLSys 2020) | here |
|---|---|
| S[t,i], R[t,i], a stage for every node | H[e,d], R[e,i], an epoch where memory overflows |
| U, FREE | memory rows; alive in burst rows |
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gcsolve.problem import Problem
from gcsolve.solver.milp.highs import BYTE_UNITS, ROW_SLACK, UNITS, add_row, run_model, weighted_sum
from gcsolve.solver.search.order_replay import OrderRun

if TYPE_CHECKING:
    from ortools.math_opt.python import mathopt

    Linear = dict[mathopt.Variable, float]


@dataclass(frozen=True)
class EpochAnswer:
    """`bound`: in overhead. `order`: a schedule's order, as yet without regard to rows left out; None: none was found."""

    bound: float
    order: tuple[int, ...] | None
    infeasible: bool
    finished: bool = False


class OutOfTime(Exception):
    """The deadline struck while the program was being built."""


class EpochProgram:
    """`moments`: nodes, ascending; `bursts`: (t, i) pairs with t - 1 and t among the moments.

    `tiny_bytes`: values that sum up to so much count as nothing in memory rows.

    Raises:
        OutOfTime: on large graphs, building it takes seconds.
    """

    def __init__(
        self,
        problem: Problem,
        moments: Iterable[int],
        bursts: Iterable[tuple[int, int]] = (),
        tiny_bytes: int = 0,
        deadline: float = math.inf,
    ) -> None:
        from ortools.math_opt.python import mathopt

        graph = problem.graph
        self.problem, self.graph = problem, graph
        self.moments = sorted(moments)
        self.model = mathopt.Model(name="epochs")
        self.unit_bytes = max(1.0, (problem.budget_bytes - graph.external_bytes) / BYTE_UNITS)
        self.size = _sizes(problem, tiny_bytes)
        self.producer = [v.producer for v in graph.values]
        self.bursts = sorted(bursts)
        self.passing = {} if self.bursts else _passing(problem, self.size)
        self.lazy = _lazy(problem, self.size, self.passing)
        self.hurried = {(self.moments.index(t) - 2, i) for t, i in self.bursts}
        self.last = [r[-1] if r else -1 for r in graph.readers]
        self.H: list[dict[int, mathopt.Variable]] = []
        self.R: list[dict[int, mathopt.Variable]] = []
        for e in range(len(self.moments)):
            _check(deadline)
            self._add_epoch(e)
        for e in range(len(self.moments)):
            self._postpone(e)
        for t, i in self.bursts:
            _check(deadline)
            self._add_burst(t, i)
        total = problem.total_cost or 1.0
        cost: Linear = {r: problem.cost[i] * UNITS / total for again in self.R for i, r in again.items()}
        self.model.minimize(weighted_sum(cost))

    def _pinned(self, v: int, b: int) -> bool:
        """Whether the first copy of v is held from outside while b runs, whatever the schedule."""
        return self.graph.values[v].pinned and self.producer[v] < b <= self.last[v]

    def _reruns(self, b: int) -> list[bool]:
        """Nodes before b whose rerun after b something can ask for."""
        needed = [False] * b
        for i in range(b - 1, -1, -1):
            needed[i] = self.graph.nodes[i].rerunnable and any(
                self._useful(v, b, needed) for v in self.graph.nodes[i].outputs if not self._pinned(v, b)
            )
        return needed

    def _useful(self, v: int, b: int, needed: list[bool]) -> bool:
        return self.last[v] >= b or any(j < b and needed[j] for j in self.graph.readers[v])

    def _add_epoch(self, e: int) -> None:
        b = self.moments[e]
        needed = self._reruns(b)
        node = self.graph.nodes[b]
        const = self._own_bytes(b)
        held: dict[int, mathopt.Variable] = {}
        terms: Linear = {}
        for v in range(len(self.size)):
            if self.producer[v] < b and self._useful(v, b, needed):
                must = v in node.inputs or self._pinned(v, b)
                never = self.passing.get(v, b) < b
                held[v] = self.model.add_variable(lb=float(must), ub=float(not never), is_integer=True)
                if must:
                    const += self.size[v]
                elif self.size[v]:
                    terms[held[v]] = float(self.size[v])
        again = {i: self.model.add_variable(lb=0.0, ub=1.0, is_integer=True) for i in range(b) if needed[i]}
        self.H.append(held)
        self.R.append(again)
        self._memory_row(terms, const)
        read = {v for t in range(b + 1, self._end(e)) for v in self.graph.nodes[t].inputs if self.producer[v] < b}
        for v in sorted(read):
            add_row(self.model, self._available(e, v), 1.0, math.inf)
        for i, r in again.items():
            for v in self.graph.nodes[i].inputs:
                terms = self._available(e, v)
                terms[r] = terms.get(r, 0.0) - 1.0
                add_row(self.model, terms, 0.0, math.inf)
        if e:
            for v, h in held.items():
                if self.producer[v] < self.moments[e - 1]:
                    add_row(self.model, self._available(e - 1, v) | {h: -1.0}, 0.0, math.inf)

    def _available(self, e: int, v: int) -> Linear:
        """Held when epoch e begins, or rerun in it."""
        terms: Linear = {}
        if v in self.H[e]:
            terms[self.H[e][v]] = 1.0
        r = self.R[e].get(self.producer[v])
        if r is not None and not self._pinned(v, self.moments[e]):
            terms[r] = 1.0
        return terms

    def _own_bytes(self, i: int) -> int:
        node = self.graph.nodes[i]
        return self.graph.external_bytes + node.workspace_bytes + sum(self.size[v] for v in node.outputs)

    def _add_burst(self, t: int, i: int) -> None:
        """The memory row of the rerun of i in the burst before t."""
        e = self.moments.index(t) - 1
        start = self.moments[e]
        if start != t - 1:
            raise ValueError(f"{t - 1} is not a moment")
        again, at_end = self.R[e], self.H[e + 1]
        if i not in again:
            return
        const = self.graph.external_bytes
        own = self.graph.nodes[i].workspace_bytes
        terms: Linear = {}
        for v, size in enumerate(self.size):
            if self.producer[v] > start or not size:
                continue
            pinned = self._pinned(v, start)
            made = None if pinned else again.get(self.producer[v])
            later: Linear = {}
            if made is not None and self.producer[v] > i:
                later = {made: -1.0}
            wanted = [again[j] for j in self.graph.readers[v] if j >= i and j in again]
            if v in at_end:
                wanted.append(at_end[v])
            if v in self.graph.nodes[i].outputs:
                if pinned:
                    own += size
                elif again[i] not in wanted:
                    wanted.append(again[i])
            if pinned:
                const += size
            elif len(wanted) == 1 and not later:
                terms[wanted[0]] = terms.get(wanted[0], 0.0) + size
            elif wanted:
                alive = self.model.add_variable(lb=0.0, ub=1.0)
                for want in wanted:
                    add_row(self.model, later | {want: 1.0, alive: -1.0}, -math.inf, 0.0)
                terms[alive] = float(size)
        terms[again[i]] = terms.get(again[i], 0.0) + own
        self._memory_row(terms, const)

    def _postpone(self, e: int) -> None:
        for i, r in self.R[e].items():
            callers = self._callers(e, i)
            if callers is not None:
                add_row(self.model, {r: 1.0} | {self.R[e][j]: -1.0 for j in callers}, -math.inf, 0.0)

    def _callers(self, e: int, i: int) -> list[int] | None:
        """The nodes of which one must be rerun in epoch e for i to be; None: i may be in any case."""
        if i not in self.lazy or (e, i) in self.hurried:
            return None
        readers = self.graph.readers[self.lazy[i]]
        if any(self.moments[e] < j <= self._end(e) for j in readers):
            return None
        return [j for j in readers if j in self.R[e]]

    def _end(self, e: int) -> int:
        """The node at whose run epoch e ends."""
        return self.moments[e + 1] if e + 1 < len(self.moments) else len(self.graph.nodes)

    def _memory_row(self, terms: Linear, const: int) -> None:
        scaled = {var: k / self.unit_bytes for var, k in terms.items()}
        add_row(self.model, scaled, -math.inf, (self.problem.budget_bytes - const) / self.unit_bytes + ROW_SLACK)

    def solve(
        self, *, time_limit_s: float, abs_gap: float, begin: OrderRun | None = None, tree_nodes: int | None = None
    ) -> EpochAnswer:
        """Bound and held sets; `abs_gap` in overhead; `begin`: a plan to begin with; `tree_nodes`: most nodes of the search
        tree."""
        chosen = {("held", e, v): var for e, at in enumerate(self.H) for v, var in at.items()}
        chosen |= {("again", e, i): var for e, at in enumerate(self.R) for i, var in at.items()}
        hint = self._as_values(begin) if begin else None
        answer = run_model(self.model, chosen, time_limit_s=time_limit_s, abs_gap=abs_gap, nodes=tree_nodes, hint=hint)
        if answer.kept is None:
            return EpochAnswer(answer.bound, None, answer.infeasible)
        held, again = [set[int]() for _ in self.moments], [set[int]() for _ in self.moments]
        for kind, e, x in answer.kept:
            (held if kind == "held" else again)[e].add(x)
        return EpochAnswer(answer.bound, tuple(self._order(held, again)), False, answer.finished)

    def _as_values(self, run: OrderRun) -> Linear:
        """H and R of a plan, as the program has them: postponed and passed on."""
        place = first_places(run.order)
        live: list[set[int]] = []
        for e, b in enumerate(self.moments):
            held = set(run.value[(run.made <= place[b]) & (run.end >= place[b])].tolist())
            live.append({v for v in self.H[e] if v in held or not self.size[v]})
        for e in range(len(self.moments) - 1):
            again = self._needed(e, live)
            for i in sorted(again, reverse=True):
                callers = self._callers(e, i)
                if callers is not None and again.isdisjoint(callers):
                    again.discard(i)
                    live[e + 1].discard(self.lazy[i])
                    live[e + 1].update(self.graph.nodes[i].inputs)
        for e, b in enumerate(self.moments):
            for v, reader in self.passing.items():
                if v in live[e] and reader < b:
                    live[e].discard(v)
                    live[e].update(self.graph.nodes[reader].outputs)
        values: Linear = {}
        for e in range(len(self.moments)):
            again = self._needed(e, live)
            values.update({h: float(v in live[e]) for v, h in self.H[e].items()})
            values.update({r: float(i in again) for i, r in self.R[e].items()})
        return values

    def _needed(self, e: int, live: Sequence[set[int]]) -> set[int]:
        """The nodes rerun in epoch e, given what is live when epochs begin."""
        wanted = [v for t in range(self.moments[e] + 1, self._end(e)) for v in self.graph.nodes[t].inputs]
        if e + 1 < len(live):
            wanted += live[e + 1]
        again: set[int] = set()
        while wanted:
            v = wanted.pop()
            i = self.producer[v]
            if i < self.moments[e] and v not in live[e] and i not in again:
                again.add(i)
                wanted += self.graph.nodes[i].inputs
        return again

    def _order(self, held: Sequence[set[int]], again: Sequence[set[int]]) -> list[int]:
        """The order in which `held` is held at the moments, everything else rerun just in time.

        What is held and made again in the epoch that begins is let go of first.
        """
        epoch = {b: e for e, b in enumerate(self.moments)}
        values, nodes = self.graph.values, self.graph.nodes
        stays = [v.pinned or not nodes[v.producer].rerunnable for v in values]
        there: set[int] = set()
        order: list[int] = []
        for t, node in enumerate(nodes):
            e = epoch.get(t)
            wanted: set[int] = set()
            stack = [v for v in (*node.inputs, *(held[e] if e is not None else ())) if v not in there]
            while stack:
                i = self.producer[stack.pop()]
                if i not in wanted:
                    wanted.add(i)
                    stack.extend(u for u in nodes[i].inputs if u not in there)
            for i in (*sorted(wanted), t):
                order.append(i)
                there.update(nodes[i].outputs)
            if e is not None:
                there = {
                    v
                    for v in there
                    if stays[v] or self.producer[v] == t or (v in held[e] and self.producer[v] not in again[e])
                }
        return order


def _check(deadline: float) -> None:
    if time.perf_counter() > deadline:
        raise OutOfTime


def first_places(order: Sequence[int]) -> dict[int, int]:
    """Where each node runs for the first time."""
    return {i: at for at, i in reversed(list(enumerate(order)))}


def _sizes(problem: Problem, tiny_bytes: int) -> list[int]:
    """Bytes of each value in memory rows: 0 for the smallest that sum up to `tiny_bytes`."""
    size = [v.size_bytes for v in problem.graph.values]
    spent = 0
    for v in sorted(range(len(size)), key=lambda v: (size[v], v)):
        spent += size[v]
        if spent > tiny_bytes:
            break
        size[v] = 0
    return size


def _passing(problem: Problem, size: Sequence[int]) -> dict[int, int]:
    """v -> its only reader, where that makes no more bytes than v has and no other input of it can be made again."""
    graph = problem.graph
    found: dict[int, int] = {}
    for v, value in enumerate(graph.values):
        if len(graph.readers[v]) != 1 or value.pinned or not size[v]:
            continue
        reader = graph.nodes[graph.readers[v][0]]
        again = [u for u in reader.inputs if u != v and graph.nodes[graph.values[u].producer].rerunnable]
        if reader.rerunnable and reader.outputs and not again and sum(size[o] for o in reader.outputs) <= size[v]:
            found[v] = graph.readers[v][0]
    return found


def _lazy(problem: Problem, size: Sequence[int], passing: dict[int, int]) -> dict[int, int]:
    """node -> its only output of any size, where that is no smaller than the inputs together.

    Not a node to which a passing value is passed on early: from a node that is not lazy itself.
    """
    graph = problem.graph
    found: dict[int, int] = {}
    for i, node in enumerate(graph.nodes):
        outputs = [v for v in node.outputs if size[v]]
        if len(outputs) != 1 or not node.rerunnable or graph.values[outputs[0]].pinned:
            continue
        passed_on = any(passing.get(u) == i and graph.values[u].producer not in found for u in node.inputs)
        if not passed_on and sum(size[u] for u in node.inputs) <= size[outputs[0]]:
            found[i] = outputs[0]
    return found
