"""Equal segments of the forward order; only what crosses a boundary is kept (Griewank's and Chen's √n idea).

The forward's L ops are cut into k runs of (nearly) equal length. Values read outside their own segment are kept, the
rest of each segment is rerun when the backward first reads into it. The last segment is kept whole: the backward
starts there, so rerunning it would save nothing; k = 1 is therefore `store_all`.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), section 4:

| paper | here |
|---|---|
| n layers, √n segments | L forward nodes, `UniformSqrt` |
| k checkpoints | `Uniform.k` segments; None: the cheapest k that fits |

Cost: one replay per k tried, at most `TRIES` of them.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import ClassVar

from gcsolve.graph import Graph
from gcsolve.problem import Problem
from gcsolve.solver.base import Solution
from gcsolve.solver.search.kept_replay import KeptReplay, best_kept, judged_kept
from gcsolve.solver.search.segments import crossing_values

TRIES = 96


def uniform_kept(graph: Graph, k: int) -> frozenset[int]:
    """What k equal segments keep."""
    ops = graph.backward_start
    return crossing_values(graph, [i * k // ops for i in range(ops)], last=k - 1)


@dataclass(frozen=True)
class Uniform:
    """`k` segments, or with None the k whose plan fits the budget at the least overhead."""

    name: ClassVar[str] = "uniform"
    k: int | None = None

    def solve(self, problem: Problem, *, time_limit_s: float = 60.0, gap: float = 0.005) -> Solution:
        started = time.perf_counter()
        replay = KeptReplay(problem)
        ops = max(1, problem.graph.backward_start)
        ks = [min(self.k, ops)] if self.k is not None else _candidates(ops)
        best = best_kept((replay.run(uniform_kept(problem.graph, k)) for k in ks), problem.budget_bytes)
        return judged_kept(self.name, problem, best.kept, started=started, gap=gap)


@dataclass(frozen=True)
class UniformSqrt:
    """√L segments, whatever the budget."""

    name: ClassVar[str] = "uniform_sqrt"

    def solve(self, problem: Problem, *, time_limit_s: float = 60.0, gap: float = 0.005) -> Solution:
        started = time.perf_counter()
        k = max(1, round(math.sqrt(problem.graph.backward_start)))
        return judged_kept(self.name, problem, uniform_kept(problem.graph, k), started=started, gap=gap)


def _candidates(ops: int) -> list[int]:
    """1, 2, 3, ... while there is room, then ever wider steps up to one segment an op."""
    if ops <= TRIES:
        return list(range(1, ops + 1))
    dense = list(range(1, TRIES // 2 + 1))
    ratio = (ops / dense[-1]) ** (1 / (TRIES - len(dense)))
    wide = {round(dense[-1] * ratio**s) for s in range(1, TRIES - len(dense) + 1)}
    return dense + sorted(wide - set(dense))
