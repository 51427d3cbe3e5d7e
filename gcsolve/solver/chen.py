"""Chen's greedy: close a segment when its bytes pass a threshold, and try thresholds.

Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost" (2016), Algorithm 3: walk the forward
order, add up the bytes of the values made; when the sum passes b, keep the value at hand and start a new segment. The
paper then searches b around √(x·y) (x: the segment sum's bytes, y: kept bytes); here thresholds form a geometric
ladder from one value to the whole forward, and the cheapest plan that fits wins.

| paper | here |
|---|---|
| b, budget of a segment | threshold |
| C, candidates to split at | every forward node |

Differs: as in `uniform`, everything that crosses a boundary is kept (the paper's chain has one such value), and the
last segment is kept whole. Cost: one replay a threshold, `TRIES` of them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

from gcsolve.graph import Graph
from gcsolve.problem import Problem
from gcsolve.solver.base import Solution
from gcsolve.solver.search.kept_replay import KeptReplay, best_kept, judged_kept
from gcsolve.solver.search.segments import crossing_values

TRIES = 64


@dataclass(frozen=True)
class Chen:
    """`threshold_bytes` a segment, or with None the best of a ladder of thresholds."""

    name: ClassVar[str] = "chen"
    threshold_bytes: int | None = None

    def solve(self, problem: Problem, *, time_limit_s: float = 60.0, gap: float = 0.005) -> Solution:
        started = time.perf_counter()
        ladder = [self.threshold_bytes] if self.threshold_bytes is not None else _ladder(problem.graph)
        replay = KeptReplay(problem)
        plans = dict.fromkeys(chen_kept(problem.graph, b) for b in ladder)  # distinct, in ladder order
        best = best_kept((replay.run(kept) for kept in plans), problem.budget_bytes)
        return judged_kept(self.name, problem, best.kept, started=started, gap=gap)


def chen_kept(graph: Graph, threshold_bytes: int) -> frozenset[int]:
    """What the greedy with that threshold keeps."""
    segment_of: list[int] = []
    segment, filled = 0, 0
    for node in graph.nodes[: graph.backward_start]:
        segment_of.append(segment)
        filled += sum(graph.values[v].size_bytes for v in node.outputs)
        if filled > threshold_bytes:
            segment, filled = segment + 1, 0
    return crossing_values(graph, segment_of, last=segment_of[-1] if segment_of else None)


def _ladder(graph: Graph) -> list[int]:
    """`TRIES` thresholds in equal ratios, from the smallest value to all forward bytes."""
    sizes = [v.size_bytes for v in graph.values if v.producer < graph.backward_start and v.size_bytes > 0]
    if not sizes:
        return [0]
    low, high = min(sizes), sum(sizes)
    return [round(low * (high / low) ** (s / (TRIES - 1))) for s in range(TRIES)]
