"""Brute force: shortest path over what is live. Exact, for graphs of a dozen nodes; the judge of the other methods.

A state is (how many nodes have run, which values are live). Moves: drop a live value (free of cost; a pinned one only
after its last reader); rerun a node that has run; run the next node. A move that would exceed the budget does not
exist. Dijkstra's algorithm from (0, {}) to the first state in which all have run gives the least cost over every
schedule in this op order, reruns without limit; with peaks in the place of costs it gives the least peak.

Settings narrow the class: `most_runs` computations a node at most (Moccasin's C), and `ascending`: between two first
runs each node is rerun once at most, in the op order (Checkmate's stages).

Cost: up to n 2^|values| states, hence `most_values`; with `most_runs`, C^n times as many.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from gcsolve.problem import Problem
from gcsolve.schedule import Action, Compute, Free, Schedule
from gcsolve.simulate import simulate
from gcsolve.solver.base import Certificate, Solution, Status, judged, unanswered

State = tuple[int, int, int, tuple[int, ...]]
"""(nodes that have run, live values as bits, last rerun since the last first run, runs a node where they are limited)"""


@dataclass(frozen=True)
class BruteForce:
    name: ClassVar[str] = "brute_force"
    most_runs: int | None = None
    ascending: bool = False
    most_values: int = 14

    def solve(self, problem: Problem, *, time_limit_s: float = 60.0, gap: float = 0.005) -> Solution:
        started = time.perf_counter()
        if max(len(problem.graph.values), len(problem.graph.nodes)) > self.most_values:
            return unanswered(self.name, Status.UNSUITED, solve_s=time.perf_counter() - started)
        deadline = started + 0.95 * time_limit_s
        certificate = Certificate.ASCENDING if self.ascending else Certificate.ANY_SCHEDULE
        try:
            schedule = self._cheapest(problem, deadline)
            if schedule is None:
                least = _Search(problem, self, deadline).lowest()  # of the class
                replay = simulate(problem, least)
                node = least.actions[replay.peak_action]
                return unanswered(
                    self.name,
                    Status.INFEASIBLE,
                    solve_s=time.perf_counter() - started,
                    certificate=certificate,
                    max_runs=self.most_runs,
                    least_bytes=replay.peak_bytes,
                    least_node=node.node if isinstance(node, Compute) else None,
                )
        except TimeoutError:
            return unanswered(self.name, Status.TIME_LIMIT, solve_s=time.perf_counter() - started)
        optimum = simulate(problem, schedule).overhead
        return judged(
            self.name,
            problem,
            schedule,
            solve_s=time.perf_counter() - started,
            gap=gap,
            lower_bound=optimum,
            certificate=certificate,
            any_bound=0.0 if self.ascending or self.most_runs else optimum,
            max_runs=self.most_runs,
        )

    def _cheapest(self, problem: Problem, deadline: float) -> Schedule | None:
        """The schedule of least cost; a limit on runs is tried only where it matters."""
        free = _Search(problem, replace(self, most_runs=None), deadline).cheapest()
        if free is None or self.most_runs is None or max(free.runs(problem.graph), default=1) <= self.most_runs:
            return free
        return _Search(problem, self, deadline).cheapest()


class _Search:
    def __init__(self, problem: Problem, settings: BruteForce, deadline: float) -> None:
        graph = problem.graph
        self.problem, self.graph, self.deadline = problem, graph, deadline
        self.limit, self.ascending = settings.most_runs, settings.ascending
        self.n = len(graph.nodes)
        self.size = [v.size_bytes for v in graph.values]
        self.needs = [sum(1 << v for v in node.inputs) for node in graph.nodes]
        self.makes = [sum(1 << v for v in node.outputs) for node in graph.nodes]
        self.pinned = sum(1 << v for v, value in enumerate(graph.values) if value.pinned)
        self.last_reader = [max(r, default=-1) for r in graph.readers]

    def cheapest(self) -> Schedule | None:
        """The schedule of least cost within the budget."""
        return self._path(lambda so_far, cost, _: so_far + cost, self.problem.budget_bytes)

    def lowest(self) -> Schedule:
        """The schedule of least peak."""
        found = self._path(lambda so_far, _, peak: max(so_far, peak), None)
        assert found is not None  # running everything once, dropping nothing, is a schedule
        return found

    def _path(self, longer: Callable[[float, float, int], float], budget: int | None) -> Schedule | None:
        start: State = (0, 0, -1, (0,) * self.n if self.limit else ())
        queue: list[tuple[float, int, State]] = [(0.0, 0, start)]
        best: dict[State, float] = {start: 0.0}
        came: dict[State, tuple[State, Action]] = {}
        settled: set[State] = set()
        count = 0
        while queue:
            so_far, _, state = heapq.heappop(queue)
            if state in settled:
                continue
            settled.add(state)
            if state[0] == self.n:
                return self._traced(state, came)
            if len(settled) % 1024 == 0 and time.perf_counter() > self.deadline:
                raise TimeoutError
            for action, cost, peak, following in self._moves(state):
                if budget is not None and peak > budget:
                    continue
                total = longer(so_far, cost, peak)
                if following not in settled and total < best.get(following, float("inf")):
                    best[following] = total
                    came[following] = (state, action)
                    count += 1
                    heapq.heappush(queue, (total, count, following))
        return None

    def _moves(self, state: State) -> Iterator[tuple[Action, float, int, State]]:
        done, live, last, runs = state
        used = self.graph.external_bytes
        for v, size in enumerate(self.size):
            if live >> v & 1:
                used += size
                if not self.pinned >> v & 1 or self.last_reader[v] < done:
                    yield Free(v), 0.0, 0, (done, live & ~(1 << v), last, runs)
        for i in range(done + 1):
            if self.needs[i] & ~live or (i < done and not self.graph.nodes[i].rerunnable):
                continue
            if i < done and self.ascending and i <= last:
                continue
            if self.limit and runs[i] >= self.limit:
                continue
            again = self.makes[i] & live
            if again & ~self.pinned:
                continue
            peak = used + self.graph.nodes[i].workspace_bytes + sum(self.size[v] for v in self.graph.nodes[i].outputs)
            after = (*runs[:i], runs[i] + 1, *runs[i + 1 :]) if self.limit else ()
            latest = (i if i < done else -1) if self.ascending else -1
            yield (
                Compute(i),
                self.problem.cost[i],
                peak,
                (max(done, i + 1), live | self.makes[i], latest, after),
            )

    def _traced(self, state: State, came: dict[State, tuple[State, Action]]) -> Schedule:
        live = [v for v in range(len(self.size)) if state[1] >> v & 1]
        actions: list[Action] = [Free(v) for v in reversed(live)]
        while state in came:
            state, action = came[state]
            actions.append(action)
        return Schedule(tuple(reversed(actions)))
