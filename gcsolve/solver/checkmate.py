"""Checkmate: the full rematerialization MILP, any node rerun in any stage.

Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization" (MLSys 2020). Stage t ends with
the first run of node t; before it, nodes 0 .. t-1 may be rerun, in order, each once.

    R[t,i] = 1   node i runs in stage t           R[t,t] = 1; in [0, 1], integral once S is
    S[t,v] = 1   value v is held into stage t     binary
    A[t,v,j]     v is alive in stage t when its reader j is due: something from j on needs it

    minimise Σ cost[i] R[t,i]
    inputs   R[t,j] ≤ S[t,v] + R[t,p(v)]          for v read by j; p(v) makes v
    carry    S[t+1,v] ≤ S[t,v] + R[t,p(v)]
    one copy S[t,v] + R[t,p(v)] ≤ 1
    needed   A[t,v,j] ≥ R[t,j],  A[t,v,j] ≥ A[t,v,next reader],  A[t,v,last reader] ≥ S[t+1,v]
    memory   U[t,0] = Σ bytes[v] S[t,v];  U[t,k+1] = U[t,k] + what k made and is needed - what k read and no longer is
             U[t,k] + (outputs and workspace of k) R[t,k] ≤ budget

| paper | here |
|---|---|
| R, S | `R`, `S`; only S must be integer: given S, the least R is integral and best |
| FREE[t,i,k] | A[t,v,i] - A[t,v,next reader]: the paper's products, made linear without binaries |
| U[t,k] | `U` |
| stage t | stage t; with `sweeps` > 1 each stage is preceded by more stages of reruns only |

Differs also in that values, not nodes, are held (a node may make several), in workspace, in pinned values (their first
copy stays until its last reader; a second one is dropped at once), and in nodes that run once.

The greedy's plan is the first incumbent; the MILP looks for one that is better by the asked gap, or proves that there
is none. The MILP's class is `ASCENDING`: on one random DAG in a hundred with no byte to spare, reruns in another order
than the ops' get through where these do not.

Cost: n² binaries, n (values + edges) other variables; refused above `most_nodes` nodes.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gcsolve.problem import Problem
from gcsolve.schedule import schedule_from_order
from gcsolve.solver.base import Certificate, Solution, Status, judged, unanswered
from gcsolve.solver.greedy import greedy_order
from gcsolve.solver.milp.highs import BYTE_UNITS, ROW_SLACK, UNITS, add_row, run_model, weighted_sum
from gcsolve.solver.search.order_replay import OrderReplay, OrderRun, best_order

if TYPE_CHECKING:
    from ortools.math_opt.python import mathopt

SNAP = 1e-7
"""A bound this close (in overhead) to the plan is the plan's cost: HiGHS's own tolerances are no finer."""
SLOW = 15_000
SLOW_SHARE = 0.6
"""HiGHS looks at the clock seldom at the root of a model with more variables than `SLOW`: it is asked to stop sooner."""
TRIES = 4
"""Solves, each with a little more room, until the replay fits in exact bytes."""


@dataclass(frozen=True)
class Checkmate:
    """`sweeps`: how often, before each first run, the earlier nodes are passed through."""

    name: ClassVar[str] = "checkmate"
    sweeps: int = 1
    most_nodes: int = 200

    def solve(self, problem: Problem, *, time_limit_s: float = 60.0, gap: float = 0.005) -> Solution:
        started = time.perf_counter()
        if len(problem.graph.nodes) > self.most_nodes:
            return unanswered(self.name, Status.UNSUITED, solve_s=time.perf_counter() - started)
        deadline = started + 0.95 * time_limit_s
        replay = OrderReplay(problem)
        best = best_order(
            [replay.run(range(len(problem.graph.nodes))), greedy_order(problem, deadline=deadline)],
            problem.budget_bytes,
        )
        bound = 0.0
        if best.peak_bytes > problem.budget_bytes or best.rerun_cost > 0:
            bound, best, infeasible = self._search(problem, replay, best, gap, deadline)
            if infeasible:
                return unanswered(
                    self.name,
                    Status.INFEASIBLE,
                    solve_s=time.perf_counter() - started,
                    certificate=Certificate.ASCENDING,
                )
        if best.peak_bytes > problem.budget_bytes:
            return unanswered(
                self.name,
                Status.TIME_LIMIT,
                solve_s=time.perf_counter() - started,
                lower_bound=bound,
                certificate=Certificate.ASCENDING,
            )
        return judged(
            self.name,
            problem,
            schedule_from_order(problem.graph, best.order),
            solve_s=time.perf_counter() - started,
            gap=gap,
            lower_bound=bound,
            certificate=Certificate.ASCENDING,
        )

    def _search(
        self, problem: Problem, replay: OrderReplay, best: OrderRun, gap: float, deadline: float
    ) -> tuple[float, OrderRun, bool]:
        """(bound, best order found, proven infeasible)."""
        total = problem.total_cost or 1.0
        fits = best.peak_bytes <= problem.budget_bytes
        known = best.rerun_cost / total
        # only plans that are better than the known one by the gap are looked for: where there are none, it is proven
        aim = max(0.0, known - gap * (1.0 + known)) if fits else None
        try:
            model = _Model(problem, self.sweeps, aim, deadline)
        except TimeoutError:
            return 0.0, best, False
        bound, proven = 0.0, False
        for attempt in range(TRIES):
            left = deadline - time.perf_counter()
            if left <= 0.02:
                break
            share = SLOW_SHARE if model.model.get_num_variables() > SLOW else 1.0
            answer = run_model(
                model.model, model.S, time_limit_s=share * left, abs_gap=max(1e-9, gap / 2), restart=True
            )
            if not attempt:
                bound = answer.bound if aim is None or not answer.infeasible else aim
                bound = bound if aim is None else min(bound, aim)
                proven = answer.infeasible and aim is None
            if answer.kept is None:
                break
            run = replay.run(model.order(answer.kept))
            best = best_order([best, run], problem.budget_bytes)
            if run.peak_bytes <= problem.budget_bytes:
                break
            model.tighten(run.peak_bytes - problem.budget_bytes)
        reached = best.rerun_cost / total
        return (reached if abs(reached - bound) <= SNAP else bound), best, proven


class _Model:
    """The MILP. `S` is keyed by stage * values + value."""

    def __init__(self, problem: Problem, sweeps: int, most_overhead: float | None, deadline: float) -> None:
        from ortools.math_opt.python import mathopt

        self.problem, self.graph = problem, problem.graph
        graph = self.graph
        self.values = len(graph.values)
        self.model = mathopt.Model(name="checkmate")
        # (nodes that may be rerun: those below, the node that runs for the first time or None)
        self.stages = [(t, t if s == sweeps - 1 else None) for t in range(len(graph.nodes)) for s in range(sweeps)]
        self.stages = [(t, native) for t, native in self.stages if t or native is not None]
        self.stage_of = {native: at for at, (_, native) in enumerate(self.stages) if native is not None}
        self.unit_bytes = max(1.0, (problem.budget_bytes - graph.external_bytes) / BYTE_UNITS)
        self.total = problem.total_cost or 1.0
        self.S: dict[int, mathopt.Variable] = {}
        self.R: dict[tuple[int, int], mathopt.Variable] = {}
        self.rows: list[mathopt.LinearConstraint] = []
        self.size = [v.size_bytes / self.unit_bytes for v in graph.values]
        self.pinned_until = [
            max([*(self.stage_of[j] for j in graph.readers[v]), self.stage_of[value.producer]]) if value.pinned else -1
            for v, value in enumerate(graph.values)
        ]
        for build in (self._variables, self._stage):
            for at in range(len(self.stages)):
                if time.perf_counter() > deadline:
                    raise TimeoutError
                build(at)
        cost = {var: problem.cost[i] * UNITS / self.total for (_, i), var in self.R.items() if problem.cost[i]}
        if most_overhead is not None:
            limit = most_overhead * UNITS + 1e-6
            add_row(self.model, cost, -math.inf, limit)
        self.model.minimize(weighted_sum(cost))

    def _variables(self, at: int) -> None:
        done, _ = self.stages[at]
        for v, value in enumerate(self.graph.values):
            begun = self.stage_of[value.producer]
            if begun < at and (self.graph.readers[v] or at <= self.pinned_until[v]):
                low = 1.0 if at <= self.pinned_until[v] else 0.0
                self.S[at * self.values + v] = self.model.add_variable(lb=low, ub=1.0, is_integer=True)
        for i in range(done):
            if self.graph.nodes[i].rerunnable:
                self.R[at, i] = self.model.add_variable(lb=0.0, ub=1.0)

    def _held(self, at: int, v: int) -> mathopt.Variable | None:
        return self.S.get(at * self.values + v)

    def _made(self, at: int, v: int) -> mathopt.Variable | None:
        """The rerun that makes v in this stage, if it may serve readers."""
        value = self.graph.values[v]
        return None if value.pinned else self.R.get((at, value.producer))

    def _stage(self, at: int) -> None:
        graph, model = self.graph, self.model
        done, native = self.stages[at]
        slots: list[tuple[int, mathopt.Variable | None]] = [
            (i, self.R[at, i]) for i in range(done) if (at, i) in self.R
        ]
        if native is not None:
            slots.append((native, None))
        runs = dict(slots)
        for j, run in slots:
            for v in graph.nodes[j].inputs:
                sources = {x: 1.0 for x in (self._held(at, v), self._made(at, v)) if x is not None}
                if run is None:
                    add_row(model, sources, 1.0, math.inf)
                else:
                    add_row(model, sources | {run: -1.0}, 0.0, math.inf)
        for v, value in enumerate(graph.values):
            held, made, later = self._held(at, v), self._made(at, v), self._held(at + 1, v)
            if later is not None and value.producer != native:
                sources = {x: -1.0 for x in (held, made) if x is not None}
                add_row(model, {later: 1.0} | sources, -math.inf, 0.0)
            if held is not None and made is not None:
                add_row(model, {held: 1.0, made: 1.0}, -math.inf, 1.0)
        # what is alive once slot k has come, for each value: the variable that says so, or None for "not"
        used = model.add_variable(lb=0.0)
        start = {held: self.size[v] for v in range(self.values) if (held := self._held(at, v)) is not None}
        add_row(model, {used: 1.0} | {x: -k for x, k in start.items()}, 0.0, 0.0)
        needed = {v: self._needed(at, v, runs) for v in range(self.values)}
        budget = (self.problem.budget_bytes - graph.external_bytes) / self.unit_bytes + ROW_SLACK
        for k, run in slots:
            node = graph.nodes[k]
            makes = node.workspace_bytes / self.unit_bytes + sum(self.size[v] for v in node.outputs)
            if run is None:
                self.rows.append(add_row(model, {used: 1.0}, -math.inf, budget - makes))
                continue
            self.rows.append(add_row(model, {used: 1.0, run: makes}, -math.inf, budget))
            change: dict[mathopt.Variable, float] = {}
            for v in node.outputs:
                if not graph.values[v].pinned:
                    _add(change, needed[v].get(k), self.size[v])
                    _add(change, self._held(at, v), -self.size[v])
            for v in node.inputs:
                before, after = needed[v].get(-k - 1), needed[v].get(k)
                if before is not after:
                    _add(change, after, self.size[v])
                    _add(change, before, -self.size[v])
            if change:
                following = model.add_variable(lb=0.0)
                add_row(model, {following: 1.0, used: -1.0} | {x: -c for x, c in change.items()}, 0.0, 0.0)
                used = following

    def _needed(self, at: int, v: int, runs: dict[int, mathopt.Variable | None]) -> dict[int, mathopt.Variable | None]:
        """For value v in this stage: at key k the variable "still needed after slot k", for its producer and its
        readers; at key -k-1 the one for "needed when slot k comes". None: not needed."""
        value = self.graph.values[v]
        found: dict[int, mathopt.Variable | None] = {}
        now = self._held(at + 1, v)
        if at <= self.pinned_until[v]:  # stays whatever happens
            now = self._held(at, v)
            for j in self.graph.readers[v]:
                found[j] = found[-j - 1] = now
            return found
        for j in reversed([j for j in self.graph.readers[v] if j in runs]):
            found[j] = now
            run = runs[j]
            if run is None:  # the first run of j: it certainly reads
                certain = self.model.add_variable(lb=1.0, ub=1.0)
                now = certain
            elif now is None:
                now = run
            else:
                alive = self.model.add_variable(lb=0.0, ub=1.0)
                add_row(self.model, {alive: 1.0, run: -1.0}, 0.0, math.inf)
                add_row(self.model, {alive: 1.0, now: -1.0}, 0.0, math.inf)
                now = alive
            found[-j - 1] = now
        found[value.producer] = now
        return found

    def tighten(self, bytes_more: int) -> None:
        """Take room away. From here on the optimum is no bound any more."""
        for row in self.rows:
            row.upper_bound -= bytes_more / self.unit_bytes

    def order(self, held: frozenset[int]) -> list[int]:
        """The order of the least R for that S."""
        graph = self.graph
        order: list[int] = []
        for at, (_, native) in enumerate(self.stages):
            wanted: set[int] = set()
            stack = [] if native is None else list(graph.nodes[native].inputs)
            stack += [v for v in range(self.values) if (at + 1) * self.values + v in held]
            while stack:
                v = stack.pop()
                i = graph.values[v].producer
                if i == native or at * self.values + v in held or i in wanted:
                    continue
                wanted.add(i)
                stack.extend(graph.nodes[i].inputs)
            order.extend(sorted(wanted))
            if native is not None:
                order.append(native)
        return order


def _add(terms: dict[mathopt.Variable, float], var: mathopt.Variable | None, k: float) -> None:
    if var is not None:
        terms[var] = terms.get(var, 0.0) + k
