"""Kept sets made to fit, and made better, by exact replays: the incumbents of `retention` and `minimum`.

`repair` lowers what overflows by dropping what is kept or keeping what is rerun (a checkpoint shortens a burst), the
move with most overflow removed per cost first. `improve` keeps more while that saves cost and fits. A move is about
all outputs of a node: a kept output of a node that is rerun would be dropped and made again.
Both are deterministic; they stop early only at the deadline.
"""

from __future__ import annotations

import time

import numpy as np

from gcsolve.graph import Graph
from gcsolve.solver.search.kept_replay import NEVER, KeptReplay, KeptRun
from gcsolve.solver.uniform import uniform_kept

MOVES = 32
STEPS = 40
TRIALS = 300
HOPELESS = 0.2
"""A run further over than this share of the budget (above external bytes) is not repaired."""


def overflow(run: KeptRun, budget_bytes: int) -> float:
    """How far over budget a run is: its largest excess, plus the mean excess over all moments."""
    excess = np.maximum(run.bytes_at - budget_bytes, 0)
    return float(excess.max() + excess.mean()) if len(excess) else 0.0


def repair(replay: KeptReplay, run: KeptRun, budget_bytes: int, deadline: float) -> KeptRun | None:
    """A run that fits, reached from `run` by single moves; None when no move helps any more."""
    least = max(replay.problem.total_cost, 1.0) * 1e-6
    now = overflow(run, budget_bytes)
    if now > HOPELESS * (budget_bytes - replay.problem.graph.external_bytes):
        return None
    for _ in range(STEPS):
        if run.peak_bytes <= budget_bytes:
            return run
        if time.perf_counter() > deadline:
            return None
        best, best_score, best_over = None, 0.0, now
        for kept in _moves(replay, run):
            trial = replay.run(kept)
            over = overflow(trial, budget_bytes)
            if over < now:
                score = (now - over) / max(trial.rerun_cost - run.rerun_cost, least)
                if score > best_score:
                    best, best_score, best_over = trial, score, over
        if best is None:
            return None
        run, now = best, best_over
    return run if run.peak_bytes <= budget_bytes else None


def improve(replay: KeptReplay, run: KeptRun, budget_bytes: int, deadline: float) -> KeptRun:
    """Keep what is rerun, most cost saved per byte first, as long as the run fits and gets cheaper."""
    rerun = [i for i in range(replay.first_backward) if run.rerun_at[i] < NEVER]
    rerun.sort(key=lambda i: (-replay.cost[i] / max(1, _bytes(replay, i)), i))
    for i in rerun[:TRIALS]:
        if time.perf_counter() > deadline:
            break
        if run.rerun_at[i] < NEVER:
            trial = replay.run(run.kept | set(replay.outputs[i]))
            if trial.peak_bytes <= budget_bytes and trial.key() < run.key():
                run = trial
    return run


def _bytes(replay: KeptReplay, i: int) -> int:
    return int(sum(replay.size[v] for v in replay.outputs[i]))


def _moves(replay: KeptReplay, run: KeptRun) -> list[frozenset[int]]:
    """Kept sets one node away that may lower the peak: drop what is kept and alive there, largest and cheapest first;
    keep what is rerun and alive there or in the same burst, smallest first."""
    at = int(run.bytes_at.argmax())
    here = {int(i) for i in replay.producer[run.alive(at)]}
    burst = run.burst(at, replay.first_backward)
    drop, keep = [], []
    for i in range(replay.first_backward):
        if not replay.can_rerun[i]:
            continue
        if run.rerun_at[i] < NEVER:
            if i in here or run.rerun_at[i] == burst:
                keep.append(i)
        elif i in here and any(v in run.kept and replay.size[v] for v in replay.outputs[i]):
            drop.append(i)
    drop.sort(key=lambda i: (-_bytes(replay, i) / (replay.cost[i] + replay.cost_scale), i))
    keep.sort(key=lambda i: (_bytes(replay, i), i))
    return [run.kept.difference(replay.outputs[i]) for i in drop[: MOVES // 2]] + [
        run.kept.union(replay.outputs[i]) for i in keep[: MOVES // 2]
    ]


def whole_nodes(graph: Graph, kept: frozenset[int]) -> frozenset[int]:
    """`kept` with every output of each node of which some output is kept."""
    nodes = sorted({graph.values[v].producer for v in kept})
    return frozenset(v for i in nodes for v in graph.nodes[i].outputs)


def starts(graph: Graph) -> list[frozenset[int]]:
    """Kept sets to begin with: everything, nothing, and one checkpoint per segment for a ladder of segment counts."""
    ops = graph.backward_start
    counts = sorted({max(1, round(ops ** (s / 12))) for s in range(13)}) if ops else []
    return [
        frozenset(range(len(graph.values))),
        frozenset(),
        *(whole_nodes(graph, uniform_kept(graph, k)) for k in counts),
    ]
