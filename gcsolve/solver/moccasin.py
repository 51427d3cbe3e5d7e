"""Moccasin: retention intervals in constraint programming, at most C of them a value.

Bartan, Li, Teague, Lott, Dilkina, "Moccasin: Efficient Tensor Rematerialization for Neural Networks" (ICML 2023), on
CP-SAT. Time is a grid: stage t ends with the first run of node t, and node i < t may be rerun in it, in order, at time
t (t+1) / 2 + i; the first run of t is at t (t+1) / 2 + t. Run c of node i starts at s[i,c], which is fixed for c = 0 and
otherwise one of the times of i; it is optional, a[i,c]. Copy c of value v lives from s[p(v),c] to e[v,c].

    minimise Σ cost[i] a[i,c]  (c ≥ 1)
    order      a[i,c+1] ⇒ a[i,c];  e[v,c] < s[p(v),c+1]
    inputs     each run (j, d) reads each input v from one copy c:  s[p(v),c] < s[j,d] ≤ e[v,c]
    memory     cumulative: bytes[v] over [s, e] of every copy, workspace at every run  ≤ budget

| paper | here |
|---|---|
| C_v, intervals of v | `intervals` |
| start and end events, staged domains | s, e on the grid |
| precedence by reservoir constraints | one literal a read and copy |
| two phases: first feasible, then optimal | the greedy's plan, where it is of the class, as a hint |

Pinned values have one copy that anyone reads; their later copies last one moment. Costs are rounded down to integers
for the bound. Cost: intervals² × edges literals; refused above `most_nodes` nodes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gcsolve.problem import Problem
from gcsolve.solver.base import Certificate, Solution, Status, unanswered
from gcsolve.solver.greedy import greedy_order
from gcsolve.solver.search.order_replay import OrderReplay, OrderRun, best_order, judged_order
from gcsolve.solver.uniform import Uniform

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

COST_UNITS = 10**10
"""Costs that are no integers are counted in this part of the step's cost."""


@dataclass(frozen=True)
class Moccasin:
    """`intervals`: computations a node at most."""

    name: ClassVar[str] = "moccasin"
    intervals: int = 2
    most_nodes: int = 2000
    seed: int = 0

    def solve(self, problem: Problem, *, time_limit_s: float = 60.0, gap: float = 0.005) -> Solution:
        started = time.perf_counter()
        if len(problem.graph.nodes) > self.most_nodes:
            return unanswered(self.name, Status.UNSUITED, solve_s=time.perf_counter() - started)
        deadline = started + 0.95 * time_limit_s
        replay = OrderReplay(problem)
        known = [r for r in self._known(problem, replay, deadline) if r.peak_bytes <= problem.budget_bytes]
        bound, infeasible = 0.0, False
        if not any(r.rerun_cost == 0 for r in known):
            hint = best_order(known, problem.budget_bytes) if known else None
            found, bound, infeasible = self._search(problem, hint, gap, deadline)
            known += [replay.run(found)] if found is not None else []
        if not known:
            return unanswered(
                self.name,
                Status.INFEASIBLE if infeasible else Status.TIME_LIMIT,
                solve_s=time.perf_counter() - started,
                lower_bound=bound,
                certificate=Certificate.ASCENDING,
                max_runs=self.intervals,
            )
        best = best_order(known, problem.budget_bytes)
        return judged_order(
            self.name,
            problem,
            best.order,
            started=started,
            gap=gap,
            lower_bound=bound,
            certificate=Certificate.ASCENDING,
            max_runs=self.intervals,
        )

    def _known(self, problem: Problem, replay: OrderReplay, deadline: float) -> list[OrderRun]:
        """Cheap plans of the class."""
        runs = [replay.run(range(len(problem.graph.nodes)))]
        if runs[0].peak_bytes > problem.budget_bytes:
            runs.append(greedy_order(problem, deadline=deadline))
            segmented = Uniform().solve(problem)
            if segmented.schedule is not None:
                runs.append(replay.run(segmented.schedule.order()))
        return [r for r in runs if self._of_class(r.order)]

    def _of_class(self, order: Sequence[int]) -> bool:
        """Whether reruns are in the ops' order between first runs, and few enough."""
        runs: dict[int, int] = {}
        last = -1
        for i in order:
            runs[i] = runs.get(i, 0) + 1
            if runs[i] > self.intervals or i <= last:
                return False
            last = -1 if runs[i] == 1 else i
        return True

    def _search(
        self, problem: Problem, hint: OrderRun | None, gap: float, deadline: float
    ) -> tuple[list[int] | None, float, bool]:
        """(order or None, bound in overhead, proven infeasible)."""
        from ortools.sat.python import cp_model

        room = problem.budget_bytes - problem.graph.external_bytes
        if room < 0:
            return None, 0.0, True
        try:
            model = _Model(problem, self.intervals, room, deadline)
        except TimeoutError:
            return None, 0.0, False
        if hint is not None:
            model.hint(hint)
        left = deadline - time.perf_counter()
        if left <= 0:
            return None, 0.0, False
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = left
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = self.seed
        solver.parameters.absolute_gap_limit = max(0.0, gap / 2) * problem.total_cost * model.units
        status = solver.solve(model.model)
        if status == cp_model.INFEASIBLE:
            return None, 0.0, True
        total = (problem.total_cost or 1.0) * model.units
        reached = solver.best_objective_bound
        bound = max(0.0, reached / total) if math.isfinite(reached) else 0.0
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, bound, False
        return model.order(solver), bound, False


def _time(stage: int, node: int) -> int:
    return stage * (stage + 1) // 2 + node


class _Model:
    def __init__(self, problem: Problem, intervals: int, room: int, deadline: float) -> None:
        from ortools.sat.python import cp_model

        self.graph = problem.graph
        graph = self.graph
        self.model = model = cp_model.CpModel()
        n = len(graph.nodes)
        self.units = 1 if _whole(problem.cost) else COST_UNITS / (problem.total_cost or 1.0)
        last_time = _time(n - 1, n - 1) if n else 0
        self.start: list[list[cp_model.IntVar]] = []  # of each run of each node
        self.active: list[list[cp_model.IntVar]] = []
        spans: list[cp_model.IntervalVar] = []
        demands: list[int] = []
        self.end: dict[tuple[int, int], cp_model.IntVar] = {}  # (value, copy)
        cost: list[cp_model.LinearExpr] = []
        for i, node in enumerate(graph.nodes):
            if time.perf_counter() > deadline:
                raise TimeoutError
            copies = intervals if node.rerunnable and i < n - 1 else 1
            times = cp_model.Domain.FromValues([_time(t, i) for t in range(i + 1, n)])
            starts = [model.new_constant(_time(i, i))]
            actives = [model.new_constant(1)]
            for _ in range(1, copies):
                starts.append(model.new_int_var_from_domain(times, f"s{i}"))
                actives.append(model.new_bool_var(f"a{i}"))
            for c in range(1, copies):
                model.add(starts[c - 1] < starts[c]).only_enforce_if(actives[c])
                if c > 1:
                    model.add_implication(actives[c], actives[c - 1])
                if (price := math.floor(problem.cost[i] * self.units)) > 0:
                    cost.append(price * actives[c])
            self.start.append(starts)
            self.active.append(actives)
            moment = node.workspace_bytes
            seconds = moment + sum(graph.values[v].size_bytes for v in node.outputs if graph.values[v].pinned)
            for c in range(copies):
                if extra := seconds if c else moment:
                    spans.append(model.new_optional_fixed_size_interval_var(starts[c], 1, actives[c], f"w{i}"))
                    demands.append(extra)
            for v in node.outputs:
                for c in range(1 if graph.values[v].pinned else copies):
                    end = self.end[v, c] = model.new_int_var(_time(i, i), last_time, f"e{v}")
                    length = model.new_int_var(1, last_time + 1, f"l{v}")
                    spans.append(model.new_optional_interval_var(starts[c], length, end + 1, actives[c], f"i{v}"))
                    demands.append(graph.values[v].size_bytes)
                    if c:
                        model.add(self.end[v, c - 1] < starts[c]).only_enforce_if(actives[c])
                if graph.values[v].pinned:
                    for j in graph.readers[v]:
                        model.add(self.end[v, 0] >= _time(j, j))
        self.reads: list[tuple[int, int, int, int, cp_model.IntVar]] = []  # (node, run, value, copy, literal)
        for j, node in enumerate(graph.nodes):
            if time.perf_counter() > deadline:
                raise TimeoutError
            for d in range(len(self.start[j])):
                for v in node.inputs:
                    self._read(j, d, v)
        model.add_cumulative(spans, demands, room)
        model.minimize(sum(cost))

    def _read(self, j: int, d: int, v: int) -> None:
        """Run d of node j reads some copy of v."""
        model, at, does = self.model, self.start[j][d], self.active[j][d]
        i = self.graph.values[v].producer
        choices = []
        for c in range(1 if self.graph.values[v].pinned else len(self.start[i])):
            chosen = model.new_bool_var(f"r{j}.{v}.{c}")
            choices.append(chosen)
            self.reads.append((j, d, v, c, chosen))
            model.add(self.end[v, c] >= at).only_enforce_if(chosen)
            if c:
                model.add(self.start[i][c] < at).only_enforce_if(chosen)
                model.add_implication(chosen, self.active[i][c])
        model.add(sum(choices) == does)

    def hint(self, run: OrderRun) -> None:
        """Start from that order."""
        model, order = self.model, run.order
        stage, when = 0, []
        for i in order:
            when.append(_time(stage, i))
            stage += i == stage
        runs: dict[int, list[int]] = {}
        for at, i in enumerate(order):
            runs.setdefault(i, []).append(at)
        for i, places in runs.items():
            for c in range(1, len(self.start[i])):
                ran = c < len(places)
                model.add_hint(self.active[i][c], ran)
                if ran:
                    model.add_hint(self.start[i][c], when[places[c]])
        copy: dict[int, int] = {}
        ends: dict[tuple[int, int], int] = {}
        read: dict[tuple[int, int, int], int] = {}
        count: dict[int, int] = {}
        for at, i in enumerate(order):
            d = count[i] = count.get(i, -1) + 1
            for v in self.graph.nodes[i].inputs:
                read[i, d, v] = copy[v]
                ends[v, copy[v]] = when[at]
            for v in self.graph.nodes[i].outputs:
                if v not in copy or not self.graph.values[v].pinned:
                    copy[v] = d
                    ends[v, d] = when[at]
        for key, end in self.end.items():
            if key in ends:
                model.add_hint(end, ends[key])
        for j, d, v, c, chosen in self.reads:
            model.add_hint(chosen, read.get((j, d, v)) == c)

    def order(self, solver: cp_model.CpSolver) -> list[int]:
        runs = [
            (int(solver.value(at)), i)
            for i, starts in enumerate(self.start)
            for at, does in zip(starts, self.active[i], strict=True)
            if solver.value(does)
        ]
        return [i for _, i in sorted(runs)]


def _whole(costs: Sequence[float]) -> bool:
    return all(c == math.floor(c) for c in costs) and sum(costs) < 2**50
