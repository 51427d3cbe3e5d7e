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
from gcsolve.solvers._kept import NEVER, KeptReplay, KeptRun

MOVES = 48
STEPS = 80


def overflow(run: KeptRun, budget_bytes: int) -> float:
    """How far over budget a run is: its largest excess, plus the mean excess over all moments."""
    excess = np.maximum(run.bytes_at - budget_bytes, 0)
    return float(excess.max() + excess.mean()) if len(excess) else 0.0


def repair(replay: KeptReplay, run: KeptRun, budget_bytes: int, deadline: float) -> KeptRun | None:
    """A run that fits, reached from `run` by single moves; None when no move helps any more."""
    least = max(replay.problem.total_cost, 1.0) * 1e-6
    now = overflow(run, budget_bytes)
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
    for i in rerun:
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
    """Kept sets one node away: those that keep one node less, largest first, and one node more, smallest first."""
    kept, rerun = [], []
    for i in range(replay.first_backward):
        if run.rerun_at[i] < NEVER:
            rerun.append(i)
        elif replay.can_rerun[i] and any(v in run.kept and replay.size[v] for v in replay.outputs[i]):
            kept.append(i)
    kept.sort(key=lambda i: (-_bytes(replay, i), i))
    rerun.sort(key=lambda i: (_bytes(replay, i), i))
    return [run.kept.difference(replay.outputs[i]) for i in kept[: MOVES // 2]] + [
        run.kept.union(replay.outputs[i]) for i in rerun[: MOVES // 2]
    ]


def whole_nodes(graph: Graph, kept: frozenset[int]) -> frozenset[int]:
    """`kept` with every output of each node of which some output is kept."""
    nodes = sorted({graph.values[v].producer for v in kept})
    return frozenset(v for i in nodes for v in graph.nodes[i].outputs)
