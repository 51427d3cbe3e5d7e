"""Revolve: the binomial optimum for chains of equal steps, on the segments of the forward.

Griewank and Walther, "Algorithm 799: revolve" (ACM TOMS 26(1), 2000). Reversing l steps with s checkpoints, the first
of which holds the state before them, takes F(l, s) forward steps:

    F(l, s) = min over p of  p + F(l - p, s - 1) + F(p, s)        F(1, s) = 0,  F(l, 0) = inf for l > 1

advance p steps and store, reverse the l - p behind it, then the first p. In closed form F(l, s) = r l - beta(s + 1, r - 1)
with beta(s, r) = C(s + r, s) and r the least with beta(s, r) >= l; every p with beta(s, r-2) <= p <= beta(s, r-1) and
beta(s-1, r-1) <= l-p <= beta(s-1, r) is optimal.

| paper | here |
|---|---|
| l steps | segments of the forward between its cut points (`search/chain.py`) |
| snapshots, s | boundaries held at once, the step's own input among them |
| advance; youturn | `Step("forward")`; `Step("tape")` and `Step("backward")` |
| cost of a step: 1 | one run of a segment |

The unit chain of (l, s): the state before the first step is the step's input (external), forward nodes 1 .. l-1 make
one unit each from the one before, backward nodes l-1 .. 0 read one state each and need one unit of workspace, and the
budget is s + 1 units: s - 1 checkpoints besides the input, and two states while a step runs. There the plan runs
forward nodes F(l, s) times, and no schedule runs them fewer times.

On other graphs segments are counted as if they were equal; the largest s whose replay fits is taken. A graph whose
forward has no cut, or without a backward, is one segment: the plan is `store_all`'s, over budget where that is.

Cost: one order and replay for each s tried, about log2 of the number of segments.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import ClassVar

from gcsolve.problem import Problem
from gcsolve.solver.base import Solution
from gcsolve.solver.search.chain import Chain, Step, chain_of, order_of
from gcsolve.solver.search.order_replay import OrderReplay, OrderRun, best_order, judged_order

LONGEST = 20_000
"""No plan with more runs of segments than this, or than 40 a segment."""


def forward_steps(steps: int, slots: int) -> int:
    """F(steps, slots), for slots >= 1."""
    r = _sweeps(steps, slots)
    return r * steps - math.comb(slots + r, r - 1) if r else 0


def split(steps: int, slots: int) -> int:
    """An optimal p for reversing `steps` >= 2 steps with `slots` >= 1 checkpoints."""
    if slots == 1:
        return steps - 1
    r = _sweeps(steps, slots)
    least = math.comb(slots + r - 2, slots) if r >= 2 else 1
    return min(steps - 1, max(1, least, steps - math.comb(slots - 1 + r, slots - 1)))


def _sweeps(steps: int, slots: int) -> int:
    r = 0
    while math.comb(slots + r, slots) < steps:
        r += 1
    return r


def revolve_steps(segments: int, slots: int) -> list[Step]:
    """The plan for that many segments with `slots` checkpoints."""
    steps: list[Step] = []
    todo = [(0, segments, slots)]  # [first, last) with so many checkpoints; the last entry is next
    while todo:
        first, last, left = todo.pop()
        if last - first <= 1:
            steps += [Step("tape", first, onward=False), Step("backward", first)] if last > first else []
            continue
        p = split(last - first, left)
        steps += [Step("forward", k) for k in range(first, first + p)]
        todo += [(first, first + p, left), (first + p, last, left - 1)]
    return steps


@dataclass(frozen=True)
class Revolve:
    """`slots` checkpoints, or with None as many as fit."""

    name: ClassVar[str] = "revolve"
    slots: int | None = None

    def solve(self, problem: Problem, *, time_limit_s: float = 60.0, gap: float = 0.005) -> Solution:
        started = time.perf_counter()
        chain, replay = chain_of(problem.graph), OrderReplay(problem)
        count = len(chain.segments)
        if self.slots is not None:
            runs = [_played(chain, replay, self.slots)]
        else:
            runs = [_played(chain, replay, count)]
            low, high = _fewest(count), count  # plans with `high` slots have been tried
            while runs[0].peak_bytes > problem.budget_bytes and low < high:
                if time.perf_counter() - started > 0.8 * time_limit_s:
                    break
                slots = (low + high) // 2
                runs.append(_played(chain, replay, slots))
                if runs[-1].peak_bytes <= problem.budget_bytes:
                    low = slots + 1
                else:
                    high = slots
        best = best_order(runs, problem.budget_bytes)
        return judged_order(self.name, problem, best.order, started=started, gap=gap)


def _played(chain: Chain, replay: OrderReplay, slots: int) -> OrderRun:
    return replay.run(order_of(chain, revolve_steps(len(chain.segments), slots)))


def _fewest(segments: int) -> int:
    """The least number of checkpoints whose plan is not too long."""
    most = max(LONGEST, 40 * segments)
    return next(s for s in range(1, segments + 1) if forward_steps(segments, s) <= most)
