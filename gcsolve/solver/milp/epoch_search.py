"""Plans with any number of reruns and the bounds they meet: `epochs.py`, with moments only where memory overflows.

Solve; replay the answer in exact bytes; make a moment of each first run at which it overflows, worst first and spread
out; solve again. As long as there are no burst rows, each bound holds for any schedule. Where only bursts overflow any
more, they get their rows, and bounds from then on hold for `ASCENDING` schedules. Every answer is mended to fit
(`search/order_repair.py`) and thinned: the incumbent with which the next round begins.
"""

from __future__ import annotations

import time

import numpy as np

from gcsolve.problem import Problem
from gcsolve.solver.greedy import needed, thinned
from gcsolve.solver.milp.epochs import EpochProgram, OutOfTime
from gcsolve.solver.search.order_repair import mended
from gcsolve.solver.search.order_replay import OrderReplay, OrderRun, stages_of

LOOSE_GAP = 0.02
ROWS_A_ROUND = 8
ROUND_SHARE = 0.4
"""A round may take this share of the time that is left."""
TINY_SHARE = 1e-3
"""As in `retention.py`: values that sum up to this share of the budget are not counted in rows."""


class EpochSearch:
    """`best`: the incumbent; `any_bound`, `bound`: in overhead, for any schedule and for `ASCENDING` ones.

    `any_bound`: what is known already. `first_plan`: stop at the first plan that fits. `tree_nodes`: most nodes of each
    program's search tree.
    """

    def __init__(
        self,
        problem: Problem,
        best: OrderRun | None,
        *,
        gap: float,
        deadline: float,
        any_bound: float = 0.0,
        first_plan: bool = False,
        tree_nodes: int | None = None,
    ) -> None:
        self.problem = problem
        self.replay = OrderReplay(problem)
        self.best = best
        self.gap = max(gap, 1e-9)
        self.deadline = deadline
        self.first_plan = first_plan
        self.tree_nodes = tree_nodes
        self.total = problem.total_cost or 1.0
        self.any_bound, self.bound = any_bound, 0.0
        self.infeasible = False
        self.moments: set[int] = set()
        self.bursts: set[tuple[int, int]] = set()
        self.apart = max(1, len(problem.graph.nodes) // 40)
        dynamic = problem.budget_bytes - problem.graph.external_bytes
        self.tiny_bytes = int(dynamic * min(TINY_SHARE, self.gap / 10))

    def left(self) -> float:
        return self.deadline - time.perf_counter()

    def met(self) -> bool:
        if self.best is None or self.first_plan:
            return self.best is not None
        return self.room() <= self.gap * (1.0 + self.best.rerun_cost / self.total) + 1e-12

    def room(self) -> float:
        """What a better plan than the incumbent could still save, in overhead."""
        return self.best.rerun_cost / self.total - max(self.any_bound, self.bound) if self.best else 1.0

    def enough(self) -> float:
        """A gap at which the incumbent is good enough, in overhead; less than that by what rounding takes."""
        return 0.99 * self.gap * (1.0 + self.best.rerun_cost / self.total) if self.best else self.gap / 4

    def run(self) -> None:
        """Search until the gap is met, it is proven that nothing fits (`infeasible`), or the deadline strikes; once more
        goes on from there, when the deadline has been put off."""
        if not self.moments and not self._add_overflowing(self.replay.run(range(len(self.problem.graph.nodes)))):
            return
        abs_gap = LOOSE_GAP
        while not self.met() and self.left() > 0:
            try:
                program = EpochProgram(self.problem, self.moments, self.bursts, self.tiny_bytes, self.deadline)
            except OutOfTime:
                return
            abs_gap = min(abs_gap, max(self.enough(), self.room() / 2))
            limit = ROUND_SHARE * self.left()
            answer = program.solve(time_limit_s=limit, abs_gap=abs_gap, begin=self.best, tree_nodes=self.tree_nodes)
            if answer.infeasible:
                self.infeasible = self.best is None
                return
            if self.bursts:
                self.bound = max(self.bound, answer.bound)
            else:
                self.any_bound = max(self.any_bound, answer.bound)
            if answer.order is None:
                return
            run = self.replay.run([i for _, i in needed(self.replay, list(enumerate(answer.order)))])
            self._offer(run)
            if not self._add_overflowing(run):
                if abs_gap <= self.gap / 4 or not answer.finished:
                    return
                abs_gap = max(self.gap / 4, abs_gap / 4)

    def _offer(self, run: OrderRun) -> None:
        budget = self.problem.budget_bytes
        run = mended(self.replay, run, self.deadline)
        if run.peak_bytes > budget:
            return
        run = thinned(self.replay, run, self.deadline)
        if self.best is None or run.key() < self.best.key():
            self.best = run

    def _add_overflowing(self, run: OrderRun) -> int:
        """New moments where first runs overflow; bursts only when there are no such; how many were added."""
        budget = self.problem.budget_bytes
        stages = stages_of(run.order)
        over = [int(at) for at in np.argsort(-run.bytes_at, kind="stable") if run.bytes_at[at] > budget]
        native = [stages[at] for at in over if run.order[at] == stages[at] and stages[at] not in self.moments]
        added: list[int] = []
        for t in native:
            if len(added) < ROWS_A_ROUND and all(abs(t - other) >= self.apart for other in added):
                added.append(t)
        if added:
            self.moments.update(added)
            return len(added)
        count = 0
        for at in over:
            burst = (stages[at], run.order[at])
            if run.order[at] != stages[at] and burst not in self.bursts and count < ROWS_A_ROUND:
                self.bursts.add(burst)
                self.moments.update((stages[at] - 1, stages[at]))
                count += 1
        return count
