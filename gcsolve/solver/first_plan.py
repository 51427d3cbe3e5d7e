"""A first plan within a budget, found by work that is counted and not timed: the same on every machine, however busy.

`retention` begins with it where one rerun a value is not enough, and `minimum.py` looks with it for the least budget that
has a plan. So what the one finds at a budget, the other finds again.

**At one budget**: the greedy, evictions with other scores, and the greedy's order repaired, which are quick; then the beam,
and on graphs of few nodes the MILP with epochs, which are thorough.

**At several.** Each of these may find a plan at a budget and none at a somewhat larger one. So budgets have *levels*, which
depend on the graph alone: the floor of every schedule, and from there on steps of a little more than 0.1 % of the bytes or
1/400 of what is above the external ones, whichever is more. Where nothing is found at a budget itself, the next level below
it is tried. The least budget is always given as a level: for that budget, and for up to 0.1 % more, its plan is found again.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from functools import cached_property

from gcsolve.problem import Problem
from gcsolve.solver.floor import peak_floor
from gcsolve.solver.greedy import greedy_order, thinned
from gcsolve.solver.milp.epoch_search import EpochSearch
from gcsolve.solver.search.beam import beam_order
from gcsolve.solver.search.evict import evicting_order
from gcsolve.solver.search.order_repair import mended
from gcsolve.solver.search.order_replay import OrderReplay, OrderRun

ROOM_STEPS = 400
"""A level is this part of the bytes above the external ones higher than the one below it, ..."""
BUDGET_STEPS = 990
"""... or this part of all its bytes, whichever is more."""
FURTHER_LEVELS = 8
"""Levels tried below the next one, as long as there is time."""
COST_POWERS = (0.25, 0.0)
"""Evictions weigh the cost of a rerun, raised to this power, against bytes and distance; the greedy has tried 1."""
REPAIR_WORK = 400_000
"""Nodes replayed in a repair."""
MILP_GRAPH_NODES = 40
"""Graphs of no more nodes are given to the MILP with epochs."""
MILP_TREE_NODES = 2000
"""Nodes of its search tree."""


class FirstPlans:
    """Plans for one graph at any budget. A plan that was found, or not, is remembered by its budget.

    `infeasible`: budgets, each proven too small for every schedule.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.floor_bytes, _ = peak_floor(problem)
        self.infeasible: set[int] = set()
        self._greedy: dict[int, OrderRun] = {}
        self._quick: dict[int, OrderRun | None] = {}
        self._thorough: dict[int, OrderRun | None] = {}

    @cached_property
    def store_all(self) -> OrderRun:
        """The plan that reruns nothing."""
        return OrderReplay(self.problem).run(range(len(self.problem.graph.nodes)))

    @cached_property
    def levels(self) -> list[int]:
        """From the floor up to the first that is enough to rerun nothing."""
        external = self.problem.graph.external_bytes
        levels = [self.floor_bytes]
        while levels[-1] < self.store_all.peak_bytes:
            last = levels[-1]
            levels.append(last + max(1, (last - external) // ROOM_STEPS, last // BUDGET_STEPS))
        return levels

    def find(self, *, deadline: float = math.inf) -> OrderRun | None:
        """A plan within the budget of the problem; None: none was found.

        Args:
            deadline: when to stop looking for a cheaper plan, once there is one, and for plans at lower levels than the next.
        """
        budget = self.problem.budget_bytes
        greedy = self.greedy(budget)
        if greedy.peak_bytes <= budget:
            return greedy
        quick = self.quick(budget)
        plan = self._beam(budget, math.inf if quick is None else deadline) or quick or self.thorough(budget)
        below = self.levels[: bisect_left(self.levels, budget)][::-1]
        for place, level in enumerate(below[: 1 + FURTHER_LEVELS]):
            if plan is not None or (place and time.perf_counter() > deadline):
                break
            plan = self.at(level)
        return None if plan is None else thinned(OrderReplay(self.problem), plan, math.inf)

    def at(self, budget_bytes: int) -> OrderRun | None:
        """A plan within that budget, by all methods."""
        return self.quick(budget_bytes) or self.thorough(budget_bytes)

    def greedy(self, budget_bytes: int) -> OrderRun:
        """The greedy's plan, which may be over the budget."""
        if budget_bytes not in self._greedy:
            problem = self.problem.with_budget(budget_bytes)
            self._greedy[budget_bytes] = greedy_order(problem, deadline=math.inf)
        return self._greedy[budget_bytes]

    def quick(self, budget_bytes: int) -> OrderRun | None:
        """A plan by evictions, the greedy and repair."""
        if budget_bytes not in self._quick:
            self._quick[budget_bytes] = self._by_replays(budget_bytes)
        return self._quick[budget_bytes]

    def thorough(self, budget_bytes: int) -> OrderRun | None:
        """A plan by the beam, and on small graphs by the MILP."""
        if budget_bytes not in self._thorough:
            self._thorough[budget_bytes] = self._beam(budget_bytes, math.inf) or self._milp(budget_bytes)
        return self._thorough[budget_bytes]

    def _by_replays(self, budget_bytes: int) -> OrderRun | None:
        problem = self.problem.with_budget(budget_bytes)
        replay = OrderReplay(problem)
        for power in COST_POWERS:
            order = evicting_order(problem, deadline=math.inf, cost_power=power)
            if order is not None and (run := replay.run(order)).peak_bytes <= budget_bytes:
                return thinned(replay, run, math.inf)
        greedy = self.greedy(budget_bytes)
        if greedy.peak_bytes <= budget_bytes:
            return greedy
        run = mended(replay, greedy, math.inf, work=REPAIR_WORK)
        return thinned(replay, run, math.inf) if run.peak_bytes <= budget_bytes else None

    def _beam(self, budget_bytes: int, deadline: float) -> OrderRun | None:
        problem = self.problem.with_budget(budget_bytes)
        order = beam_order(problem, deadline=deadline)
        if order is None:
            return None
        replay = OrderReplay(problem)
        return thinned(replay, replay.run(order), math.inf)

    def _milp(self, budget_bytes: int) -> OrderRun | None:
        if len(self.problem.graph.nodes) > MILP_GRAPH_NODES:
            return None
        search = EpochSearch(
            self.problem.with_budget(budget_bytes),
            None,
            gap=1.0,
            deadline=math.inf,
            first_plan=True,
            tree_nodes=MILP_TREE_NODES,
        )
        search.run()
        if search.infeasible and not search.bursts:
            self.infeasible.add(budget_bytes)
        return search.best
