"""The retention MILP of one problem: its variables, its always-present rows, and memory rows on demand.

Everything here is a relaxation of the true memory of a kept set, so that each optimum is a true lower bound; what is
left out is named where it is. The formulation stands at the head of `retention.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gcsolve.solver.milp.highs import BYTE_UNITS, ROW_SLACK, UNITS, MipResult, add_row, run_model, weighted_sum
from gcsolve.solver.search.kept_replay import NEVER, KeptReplay, KeptRun

if TYPE_CHECKING:  # importing gcsolve loads no solver back end: functions that need it import it
    from ortools.math_opt.python import mathopt

    Linear = dict[mathopt.Variable, float]

ROWS_A_ROUND = 6


@dataclass(frozen=True)
class Choice:
    """A forward value that can be kept: its bytes, its backward readers' ends, and the forward nodes whose rerun
    reads it. `fixed`: 0 or 1 when the decision is obvious, else None."""

    value: int
    size_bytes: int
    producer: int
    first_native: int
    last_native: int
    rerun_readers: tuple[int, ...]
    once: bool
    fixed: int | None


class Choices:
    """What there is to decide on a problem, with the obvious decisions made.

    Left out: nodes whose rerun nothing in the backward can ask for, and values that only they read. `once`: values that
    no rerun serves (made by a node that runs once, or pinned); they are there for as long as something reads them.
    Fixed at 1 and counted as 0 bytes: values too small to matter, `tiny_bytes` all together.
    Fixed at 0: a value read by one forward node only, at least as big as all that this node makes, and its only input
    that can be rerun: keeping the outputs instead costs no byte more at any moment and saves that node's rerun.
    (With another rerun input the switch could delay that input's rerun, and so hold *its* inputs longer.)
    """

    def __init__(self, replay: KeptReplay, tiny_bytes: int) -> None:
        graph = replay.problem.graph
        first = graph.backward_start
        self.replay = replay
        can = [graph.nodes[i].rerunnable for i in range(first)]
        relevant = [False] * first
        for i in range(first - 1, -1, -1):
            relevant[i] = can[i] and any(
                not graph.values[v].pinned and any(j >= first or relevant[j] for j in graph.readers[v])
                for v in graph.nodes[i].outputs
            )
        self.ops = [i for i in range(first) if relevant[i]]
        rows = []
        for v, value in enumerate(graph.values):
            if value.producer >= first:
                continue
            native = [j for j in graph.readers[v] if j >= first]
            rerun_readers = tuple(j for j in graph.readers[v] if j < first and relevant[j])
            if native or rerun_readers:
                rows.append((v, native, rerun_readers))
        small, spent = set(), 0
        decided = [v for v, _, _ in rows if can[graph.values[v].producer] and not graph.values[v].pinned]
        for v in sorted(decided, key=lambda v: (graph.values[v].size_bytes, v)):
            spent += graph.values[v].size_bytes
            if spent > tiny_bytes:
                break
            small.add(v)
        self.tiny_bytes = sum(graph.values[v].size_bytes for v in small)
        self.choices: dict[int, Choice] = {}
        for v, native, rerun_readers in rows:
            value = graph.values[v]
            once = value.pinned or not can[value.producer]
            fixed = None
            if v in small:
                fixed = 1
            elif not once and not native and self._beaten(v, rerun_readers):
                fixed = 0
            self.choices[v] = Choice(
                v,
                0 if v in small else value.size_bytes,
                value.producer,
                native[0] if native else NEVER,
                native[-1] if native else -1,
                rerun_readers,
                once,
                fixed,
            )
        self.base, self.base_between = _native_bytes(replay, self.choices)
        self.outputs = {
            i: [self.choices[v] for v in graph.nodes[i].outputs if v in self.choices and not self.choices[v].once]
            for i in self.ops
        }
        self.firsts = sorted({c.first_native for c in self.choices.values() if c.first_native < NEVER and c.fixed != 1})

    def _beaten(self, v: int, rerun_readers: tuple[int, ...]) -> bool:
        graph = self.replay.problem.graph
        if len(rerun_readers) != 1:
            return False
        reader = graph.nodes[rerun_readers[0]]
        if any(u != v and self._can_be_rerun(u) for u in reader.inputs):
            return False
        return sum(graph.values[o].size_bytes for o in reader.outputs) <= graph.values[v].size_bytes

    def _can_be_rerun(self, v: int) -> bool:
        value = self.replay.problem.graph.values[v]
        return self.replay.can_rerun[value.producer] and not value.pinned

    def moment(self, t: int) -> int:
        """Reruns done when backward node t runs are those done at this earlier node (-1: none)."""
        at = bisect_right(self.firsts, t)
        return self.firsts[at - 1] if at else -1


class Program:
    """The MILP; `add_instant` adds the memory row of one moment.

    `tied`: value -> the value it is decided with. A tied program is smaller and finds plans sooner; it proves nothing.
    """

    def __init__(self, choices: Choices, budget_bytes: int, tied: Mapping[int, int] | None = None) -> None:
        from ortools.math_opt.python import mathopt

        self.choices = choices
        self.replay = choices.replay
        problem = self.replay.problem
        self.graph = problem.graph
        self.budget_bytes = budget_bytes
        self.unit_bytes = max(1.0, (budget_bytes - self.graph.external_bytes) / BYTE_UNITS)
        self.model = mathopt.Model(name="retention")
        self.margin_bytes = 0
        self.rows: list[tuple[mathopt.LinearConstraint, int]] = []  # each with its own constant bytes
        self.instants: set[tuple[int, int]] = set()
        total = problem.total_cost or 1.0
        add = self.model.add_variable
        self.S: dict[int, mathopt.Variable] = {}
        for c in choices.choices.values():
            rep = tied.get(c.value) if tied else None
            if rep in self.S and choices.choices[rep].fixed == c.fixed:
                self.S[c.value] = self.S[rep]
            else:
                low, high = (0.0, 1.0) if c.fixed is None else (float(c.fixed), float(c.fixed))
                self.S[c.value] = add(lb=low, ub=high, is_integer=True)
        self.alias = self._aliases()
        self.R = {i: add(lb=0.0, ub=1.0) for i in choices.ops if i not in self.alias}
        for i in reversed(choices.ops):
            if i in self.alias:
                self.R[i] = self.R[self.alias[i]]
        self.N: dict[int, dict[int, mathopt.Variable]] = {}
        cost: Linear = {}
        for i in choices.ops:
            cost[self.R[i]] = cost.get(self.R[i], 0.0) + problem.cost[i] * UNITS / total
        self.model.minimize(weighted_sum(cost))
        for c in choices.choices.values():
            self._keep_rows(c)

    def _aliases(self) -> dict[int, int]:
        """i -> j: node i is rerun exactly when j is, and just before it."""
        alias = {}
        for i, outputs in self.choices.outputs.items():
            real = [c for c in outputs if c.fixed != 1]
            if len(real) == 1 and real[0].fixed == 0 and len(real[0].rerun_readers) == 1:
                alias[i] = real[0].rerun_readers[0]
        return alias

    def _keep_rows(self, c: Choice) -> None:
        if c.fixed == 1:
            return
        held = self.S[c.value]
        made = None if c.once else self.R.get(c.producer)
        if made is None:
            if c.first_native < NEVER:
                held.lower_bound = 1.0
        else:
            low = 1.0 if c.first_native < NEVER else -math.inf
            add_row(self.model, {held: 1.0, made: 1.0}, low, 1.0)
        readers = list(dict.fromkeys(self.R[j] for j in c.rerun_readers))
        if c.first_native == NEVER:
            add_row(self.model, {held: 1.0} | dict.fromkeys(readers, -1.0), -math.inf, 0.0)
        for r in readers:
            if r is not made:
                add_row(self.model, {r: 1.0, held: -1.0} | ({made: -1.0} if made is not None else {}), -math.inf, 0.0)

    def reruns_by(self, moment: int) -> dict[int, mathopt.Variable]:
        """N: for each node that can have been rerun once backward node `moment` has run, the variable that says so."""
        if moment in self.N:
            return self.N[moment]
        done: dict[int, mathopt.Variable] = {}
        self.N[moment] = done
        if moment < 0:
            return done
        for i in reversed(self.choices.ops):
            if i in self.alias:
                if self.alias[i] in done:
                    done[i] = done[self.alias[i]]
                continue
            outputs = [c for c in self.choices.outputs[i] if c.fixed != 1]
            if any(c.first_native <= moment for c in outputs):
                done[i] = self.R[i]
                continue
            causes = list(dict.fromkeys((c.value, done[j]) for c in outputs for j in c.rerun_readers if j in done))
            if causes:
                done[i] = self._rerun_variable(i, causes)
        return done

    def _rerun_variable(self, i: int, causes: list[tuple[int, mathopt.Variable]]) -> mathopt.Variable:
        """N of node i, given the (output, N of a node that reads it) pairs that may ask for it."""
        fixed = [self.choices.choices[v].fixed for v, _ in causes]
        if len(causes) == 1 and fixed[0] == 0:
            return causes[0][1]
        var = self.model.add_variable(lb=0.0, ub=1.0)
        add_row(self.model, {var: 1.0, self.R[i]: -1.0}, -math.inf, 0.0)
        add_row(self.model, {var: 1.0} | dict.fromkeys((n for _, n in causes), -1.0), -math.inf, 0.0)
        for (v, n), zero in zip(causes, fixed, strict=True):
            add_row(self.model, {n: 1.0, var: -1.0} | ({self.S[v]: -1.0} if zero is None else {}), -math.inf, 0.0)
        return var

    def add_instant(self, node: int, before: int) -> bool:
        """The memory row of the moment when `node` runs: natively (`before` = -1), or rerun just before backward
        node `before`. Returns False when the row is there already."""
        if (node, before) in self.instants:
            return False
        self.instants.add((node, before))
        if before < 0 and node < self.graph.backward_start:
            self._forward_row(node)
        else:
            self._backward_row(node, before)
        return True

    def _forward_row(self, t: int) -> None:
        terms: Linear = {}
        for c in self.choices.choices.values():
            if c.producer < t and c.size_bytes and self._last_forward(c.value) < t:
                _plus(terms, self.S[c.value], float(c.size_bytes))
        self._memory_row(terms, int(self.choices.base[t]))

    def _last_forward(self, v: int) -> int:
        return max((j for j in self.graph.readers[v] if j < self.graph.backward_start), default=-1)

    def _backward_row(self, node: int, before: int) -> None:
        choices, t = self.choices, node if before < 0 else before
        now = choices.moment(t)
        earlier = choices.moment(t - 1) if before >= 0 else now
        terms: Linear = {}
        const = int(self.choices.base[t] if before < 0 else self.choices.base_between[t])

        by_now, by_earlier = self.reruns_by(now), self.reruns_by(earlier)

        def done(i: int) -> mathopt.Variable | None:
            return (by_now if i <= node or before < 0 else by_earlier).get(i)

        def pending(i: int) -> Linear:
            r, n = self.R.get(i), done(i) if i in self.R else None
            if r is None or r is n:
                return {}
            return {r: 1.0} if n is None else {r: 1.0, n: -1.0}

        bursting: Linear = {}
        touched: set[int] = set()
        if before >= 0:
            new, old = by_now.get(node), by_earlier.get(node)
            if new is not None and new is not old:
                bursting = {new: 1.0} if old is None else {new: 1.0, old: -1.0}
                # a pinned output is not touched: its new copy is in `extra`, whether or not the first is still there
                fresh = [v for v in self.graph.nodes[node].outputs if not self.graph.values[v].pinned]
                touched = {*self.graph.nodes[node].inputs, *fresh}
            extra = int(self.replay.workspace[node] + self.replay.made_pinned[node]) + sum(
                self.graph.values[v].size_bytes
                for v in self.graph.nodes[node].outputs
                if v not in choices.choices and not self.graph.values[v].pinned
            )
            for var, k in bursting.items():
                _plus(terms, var, k * extra)

        for c in choices.choices.values():
            if not c.size_bytes:
                continue
            made = None if c.once else self.R.get(c.producer)
            made_now = done(c.producer) if made is not None else None
            if c.last_native >= t:
                if made is None or made is made_now:
                    const += c.size_bytes
                else:
                    _plus(terms, self.S[c.value], float(c.size_bytes))
                    if made_now is not None:
                        _plus(terms, made_now, float(c.size_bytes))
                continue
            own = {} if made is None else pending(c.producer)
            lower = []
            for j in c.rerun_readers:
                need = _minus(pending(j), own)
                if any(k > 0 for k in need.values()) and need not in lower:
                    lower.append(need)
            if c.value in touched and bursting:
                lower.append(bursting)
            if not lower:
                continue
            if len(lower) == 1 and not any(k < 0 for k in lower[0].values()):
                for var, k in lower[0].items():
                    _plus(terms, var, k * c.size_bytes)
                continue
            alive = self.model.add_variable(lb=0.0, ub=1.0)
            for need in lower:
                add_row(self.model, _minus(need, {alive: 1.0}), -math.inf, 0.0)
            _plus(terms, alive, float(c.size_bytes))
        self._memory_row(terms, const)

    def _memory_row(self, terms: Linear, const: int) -> None:
        scaled = {var: k / self.unit_bytes for var, k in terms.items()}
        right = (self.budget_bytes - self.margin_bytes - const) / self.unit_bytes + ROW_SLACK
        self.rows.append((add_row(self.model, scaled, -math.inf, right), const))

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget of every row."""
        self.budget_bytes = budget_bytes
        for row, const in self.rows:
            row.upper_bound = (budget_bytes - self.margin_bytes - const) / self.unit_bytes + ROW_SLACK

    def tighten(self, bytes_more: int) -> None:
        """Give plans room for what the rows leave out. From here on the optimum is no bound any more."""
        self.margin_bytes += bytes_more
        self.set_budget(self.budget_bytes)

    def solve(self, *, time_limit_s: float, abs_gap: float, nodes: int | None = None) -> MipResult:
        """Bound and kept set; `abs_gap` in overhead; `nodes`: stop after so many branch-and-bound nodes."""
        return run_model(self.model, self.S, time_limit_s=time_limit_s, abs_gap=abs_gap, nodes=nodes)


def add_overflowing(program: Program, run: KeptRun, budget_bytes: int) -> int:
    """Add the rows of the moments at which `run` is over `budget_bytes`; how many were new."""
    moments = run.moments(program.graph.backward_start)
    apart = max(1, len(run.order) // 40)
    added, taken = 0, []
    for at in np.argsort(-run.bytes_at, kind="stable"):
        if run.bytes_at[at] <= budget_bytes or added >= ROWS_A_ROUND:
            break
        if all(abs(int(at) - other) >= apart for other in taken):
            taken.append(int(at))
            added += program.add_instant(*moments[int(at)])
    return added


def _native_bytes(replay: KeptReplay, choices: dict[int, Choice]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that every kept set has: while each node runs natively, and between a backward node and the one before.

    Of a forward value that can be kept, only the part up to its last forward reader counts here; tiny ones nowhere.
    """
    graph = replay.problem.graph
    n = len(graph.nodes)
    delta = np.zeros(n + 1, dtype=np.int64)
    between = np.zeros(n + 1, dtype=np.int64)
    for v, value in enumerate(graph.values):
        c = choices.get(v)
        if c is not None and not c.size_bytes:
            continue
        readers = graph.readers[v]
        if c is not None:
            readers = tuple(j for j in readers if j < graph.backward_start)
        end = max(value.producer, readers[-1] if readers else -1)
        delta[value.producer] += value.size_bytes
        delta[end + 1] -= value.size_bytes
        if end > value.producer:
            between[value.producer + 1] += value.size_bytes
            between[end + 1] -= value.size_bytes
    fixed = graph.external_bytes
    return np.cumsum(delta)[:n] + replay.workspace + fixed, np.cumsum(between)[:n] + fixed


def _plus(terms: Linear, var: mathopt.Variable, k: float) -> None:
    terms[var] = terms.get(var, 0.0) + k


def _minus(a: Linear, b: Linear) -> Linear:
    out = dict(a)
    for var, k in b.items():
        _plus(out, var, -k)
    return {var: k for var, k in out.items() if k}
