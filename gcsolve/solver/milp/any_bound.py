"""A bound that no schedule in the given op order beats, however often it reruns: one moment at a time.

Stop the clock while backward node t runs. What is alive then fits the budget together with t's inputs, outputs and
workspace and with what the backward itself has live; what the rest of the backward reads and is not alive must be
rerun at least once after t. Over h[d] (d is alive at t) and r[i] (i is rerun after t):

    minimise Σ cost[i] r[i]
    h[d] + r[p(d)] ≥ 1          for d read by the backward after t
    h[d] + r[p(d)] ≥ r[i]       for d read by forward node i
    own bytes of t + Σ bytes[d] h[d] ≤ budget

a knapsack with closure, small and quick. Every schedule gives a feasible (h, r) of at most its own rerun cost, so the
optimum is a lower bound for all of them. The largest over the moments where storing everything peaks is returned.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from gcsolve.solver.milp.highs import BYTE_UNITS, ROW_SLACK, UNITS, MipResult, run_model, weighted_sum
from gcsolve.solver.milp.one_rerun import Choices

MOMENTS = 12
"""Moments whose LP relaxation is solved."""
CLOSE = 0.9
"""The MILP is solved at the moments whose relaxation reaches this share of the largest bound so far."""
EXACT = 3
"""... and at no more of them than this."""
NODES = 100_000
"""Branch-and-bound nodes of such a MILP, over its variables: with many values alike it would count for ever."""


@dataclass(frozen=True)
class AnyBound:
    """The bound and what was learnt on the way to it.

    `bound`: no schedule in this op order has a smaller overhead. `kept`: for each MILP with a solution, the values that
    it has alive. `moments`: the nodes whose moments bound most, tightest relaxation first. `infeasible`: at one moment the
    budget is too small for every schedule; that moment is then the only one in `moments`.
    """

    bound: float
    kept: tuple[frozenset[int], ...]
    moments: tuple[int, ...]
    infeasible: bool


def any_schedule_bound(choices: Choices, budget_bytes: int, *, deadline: float, abs_gap: float) -> AnyBound:
    """The largest single-moment bound over the worst, spread-out moments of the store-all step."""
    relaxed: list[tuple[float, int]] = []
    for t in worst_moments(choices, budget_bytes):
        left = deadline - time.perf_counter()
        if left <= 0:
            break
        answer = moment_bound(choices, t, budget_bytes, time_limit_s=left, abs_gap=abs_gap, relax=True)
        if answer.infeasible:
            return AnyBound(0.0, (), (t,), True)
        relaxed.append((answer.bound, t))
    relaxed.sort(key=lambda f: (-f[0], f[1]))
    best = relaxed[0][0] if relaxed else 0.0
    kept: list[frozenset[int]] = []
    for bound, t in relaxed[:EXACT]:
        left = deadline - time.perf_counter()
        if left <= 0 or bound < CLOSE * best:
            break
        answer = moment_bound(choices, t, budget_bytes, time_limit_s=left / 2, abs_gap=abs_gap)
        if answer.infeasible:
            return AnyBound(0.0, (), (t,), True)
        best = max(best, answer.bound)
        if answer.kept is not None:
            kept.append(answer.kept)
    return AnyBound(best, tuple(kept), tuple(t for _, t in relaxed[:EXACT]), False)


def worst_moments(choices: Choices, budget_bytes: int) -> list[int]:
    """Native moments from the end of the forward on at which storing everything is over budget, spread out."""
    replay = choices.replay
    run = replay.run(range(len(replay.size)))
    start = max(0, replay.first_backward - 1)
    apart = max(1, (len(run.order) - start) // 24)
    moments: list[int] = []
    for at in start + np.argsort(-run.bytes_at[start:], kind="stable"):
        if run.bytes_at[at] <= budget_bytes or len(moments) >= MOMENTS:
            break
        if all(abs(int(at) - other) >= apart for other in moments):
            moments.append(int(at))
    return moments


def moment_bound(
    choices: Choices, t: int, budget_bytes: int, *, time_limit_s: float, abs_gap: float, relax: bool = False
) -> MipResult:
    """The bound of the moment when node t runs, and what its optimum holds; `relax`: h may be fractional."""
    from ortools.math_opt.python import mathopt

    replay = choices.replay
    problem = replay.problem
    graph = problem.graph
    total = problem.total_cost or 1.0
    unit_bytes = max(1.0, (budget_bytes - graph.external_bytes) / BYTE_UNITS)
    model = mathopt.Model(name="moment")
    used_by_t = set(graph.nodes[t].inputs) | set(graph.nodes[t].outputs)
    needed = [False] * graph.backward_start  # nodes whose rerun after t something may ask for
    for i in reversed(choices.ops):
        needed[i] = any(c.last_native > t or any(needed[j] for j in c.rerun_readers) for c in choices.outputs[i])
    r = {i: model.add_variable(lb=0.0, ub=1.0) for i in choices.ops if needed[i]}
    const = int(choices.base[t])
    terms, h = {}, {}
    for c in choices.choices.values():
        readers = [j for j in c.rerun_readers if needed[j]]
        here = c.value in used_by_t
        if here and t >= graph.backward_start:
            const += c.size_bytes
        if not (c.last_native > t or readers):
            continue
        low, high = (1.0, 1.0) if here or c.fixed == 1 else (0.0, 0.0 if c.fixed == 0 else 1.0)
        alive = model.add_variable(lb=low, ub=high, is_integer=not relax)
        h[c.value] = alive
        if not here and c.size_bytes:
            terms[alive] = c.size_bytes / unit_bytes
        rerun = None if c.once else r.get(c.producer)
        if c.last_native > t:
            model.add_linear_constraint(alive + rerun >= 1.0 if rerun is not None else alive >= 1.0)
        for j in readers:
            model.add_linear_constraint(alive + rerun >= r[j] if rerun is not None else alive >= r[j])
    model.add_linear_constraint(weighted_sum(terms) <= (budget_bytes - const) / unit_bytes + ROW_SLACK)
    model.minimize(weighted_sum({var: problem.cost[i] * UNITS / total for i, var in r.items()}))
    nodes = max(1, NODES // max(1, model.get_num_variables()))
    return run_model(model, h, time_limit_s=time_limit_s, abs_gap=abs_gap, nodes=nodes)
