"""Knapsack: fewest reruns for a share of the saved bytes, as torch.compile's activation memory budget chooses.

`torch._functorch.partitioners.choose_saved_values_set` with `config.activation_memory_budget` = b: of the bytes that a
plan without reruns saves for the backward, save at most the share b, so that the ops rerun for the rest cost least:

    maximise Σ cost[p(d)] x[d]    over Σ bytes[d] x[d] ≤ b Σ bytes[d],  x binary,  d read by the backward

What is not saved is made again when the backward reads it. Here b is the budget's share of the store-all peak, both
above external bytes, so that the methods can be compared at one budget.

| torch | here |
|---|---|
| `memory_budget` | b = (budget - external) / (store-all peak - external) |
| banned nodes, their sizes and runtimes | values that the backward reads, bytes, cost of the producer |
| `dp_knapsack` | `fill`: sizes rounded up to 1/`SLOTS` of the capacity |

For comparison: it counts saved bytes, not the peak, so its plans can be over budget, and cost without what a rerun
itself needs. Differs from torch in that fusible ops are not rerun for free. Cost: values × SLOTS, vectorised.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gcsolve.problem import Problem
from gcsolve.solver.base import Solution
from gcsolve.solver.search.kept_replay import KeptReplay, judged_kept

SLOTS = 2000


@dataclass(frozen=True)
class Knapsack:
    """`share` of the saved bytes to save, or with None the budget's share of the store-all peak."""

    name: ClassVar[str] = "knapsack"
    share: float | None = None

    def solve(self, problem: Problem, *, time_limit_s: float = 60.0, gap: float = 0.005) -> Solution:
        started = time.perf_counter()
        graph = problem.graph
        share = self.share
        if share is None:
            external = graph.external_bytes
            top = KeptReplay(problem).run(range(len(graph.values))).peak_bytes
            share = (problem.budget_bytes - external) / (top - external) if top > external else 1.0
        saved = [
            v
            for v, value in enumerate(graph.values)
            if value.producer < graph.backward_start
            and not value.pinned
            and graph.nodes[value.producer].rerunnable
            and any(j >= graph.backward_start for j in graph.readers[v])
        ]
        if share >= 1.0:
            return judged_kept(self.name, problem, range(len(graph.values)), started=started, gap=gap)
        sizes = [graph.values[v].size_bytes for v in saved]
        gains = [problem.cost[graph.values[v].producer] for v in saved]
        chosen = fill(sizes, gains, int(max(0.0, share) * sum(sizes)))
        return judged_kept(self.name, problem, [saved[k] for k in chosen], started=started, gap=gap)


def fill(sizes: list[int], gains: list[float], capacity: int) -> list[int]:
    """Indices of the items with the largest total gain whose sizes fit the capacity."""
    slot = max(1, -(-capacity // SLOTS))
    count = capacity // slot
    best = np.zeros(count + 1)
    taken = np.zeros((len(sizes), count + 1), dtype=bool)
    for k, (size, gain) in enumerate(zip(sizes, gains, strict=True)):
        need = -(-size // slot)
        if need > count:
            continue
        trial = best[: count + 1 - need] + gain
        taken[k, need:] = trial >= best[need:]
        best[need:] = np.maximum(best[need:], trial)
    chosen, left = [], count
    for k in range(len(sizes) - 1, -1, -1):
        if taken[k, left]:
            chosen.append(k)
            left -= -(-sizes[k] // slot)
    return chosen[::-1]
