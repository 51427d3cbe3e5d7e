"""Kept sets made to fit, and made better, by exact replays: the incumbents of `retention` and `minimum`.

`repair` lowers what overflows by dropping kept values that are alive there or keeping rerun ones (a checkpoint shortens
a burst), the move with most overflow removed per cost first. `improve` keeps more while that saves cost and fits.
Both are deterministic; they stop early only at the deadline.
"""

from __future__ import annotations

import time

import numpy as np

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
        for move in _moves(replay, run):
            trial = replay.run(run.kept ^ {move})
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
    """Keep rerun values, dearest rerun first, as long as the run fits and gets cheaper (or equal with less peak)."""
    run = replay.run(run.kept)
    cost = replay.cost
    rerun = [v for v in range(len(replay.size)) if _is_rerun(replay, run, v)]
    rerun.sort(key=lambda v: (-cost[replay.producer[v]] / max(1, replay.size[v]), v))
    for v in rerun:
        if time.perf_counter() > deadline:
            break
        if not _is_rerun(replay, run, v):
            continue
        trial = replay.run(run.kept | {v})
        if trial.peak_bytes <= budget_bytes and trial.key() < run.key():
            run = trial
    return run


def _is_rerun(replay: KeptReplay, run: KeptRun, v: int) -> bool:
    i = int(replay.producer[v])
    return i < replay.first_backward and run.rerun_at[i] < NEVER and v not in run.kept and not replay.pinned[v]


def _moves(replay: KeptReplay, run: KeptRun) -> list[int]:
    """Values to drop or keep: the largest of those kept and of those rerun, `MOVES` in all."""
    kept, rerun = [], []
    for v in range(len(replay.size)):
        i = int(replay.producer[v])
        if not replay.can_rerun[i] or replay.pinned[v] or not replay.size[v]:
            continue
        if v in run.kept:
            kept.append(v)
        elif run.rerun_at[i] < NEVER:
            rerun.append(v)
    kept.sort(key=lambda v: (-int(replay.size[v]), v))
    rerun.sort(key=lambda v: (int(replay.size[v]), v))
    return kept[: MOVES // 2] + rerun[: MOVES // 2]


def lower_peak(replay: KeptReplay, run: KeptRun, floor_bytes: int, deadline: float) -> KeptRun:
    """The least peak that repairs reach from `run`, asking for a little less each time."""
    while run.peak_bytes > floor_bytes and time.perf_counter() < deadline:
        aim = max(floor_bytes, run.peak_bytes - max(1, (run.peak_bytes - floor_bytes) // 20))
        found = repair(replay, run, aim, deadline)
        if found is None:
            found = repair(replay, run, run.peak_bytes - 1, deadline)
        if found is None:
            break
        run = found
    return run
