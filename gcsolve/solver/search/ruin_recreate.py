"""Plans made cheaper by ruin and repair: take back a part of the reruns around some place, and make the order fit anew.

Values are then held where they were made again; what is thereby over budget is let go of elsewhere
(`search/order_repair.py`), and what is no longer needed is taken back (`thinned`). The cheapest order so far is kept and
ruined next. Places, widths and parts are drawn at random, from a seed of its own: the same rounds give the same plan.
(Schrimpf et al., "Record breaking optimization results using the ruin and recreate principle", 2000.)
"""

from __future__ import annotations

import random
import time

from gcsolve.solver.greedy import needed, thinned
from gcsolve.solver.search.order_repair import mended
from gcsolve.solver.search.order_replay import OrderReplay, OrderRun

WIDTHS = (40, 20, 10, 5)
"""The reruns taken back lie within this part of the order, to either side."""
PARTS = (0.3, 0.6, 1.0)
"""Each of them is, with this probability."""


def rebuilt(
    replay: OrderReplay, run: OrderRun, *, deadline: float, enough: float = 0.0, patience: float = 1.0, seed: int = 0
) -> OrderRun:
    """A run at most as dear as `run`, which fits; it stops where `enough` rerun cost is reached, or after `patience` times
    as many rounds in vain as the order is long."""
    draw = random.Random(seed)
    budget = replay.problem.budget_bytes
    vain = 0
    while run.rerun_cost > enough and vain < patience * len(run.order) and time.perf_counter() < deadline:
        vain += 1
        trial = mended(replay, _ruined(replay, run, draw), deadline)
        if trial.peak_bytes <= budget:
            trial = thinned(replay, trial, deadline)
            if trial.key() < run.key():
                run, vain = trial, 0
    return run


def _ruined(replay: OrderReplay, run: OrderRun, draw: random.Random) -> OrderRun:
    """`run` less some of its reruns, and less what is then needed no more."""
    steps = list(enumerate(run.order))
    first = {i: at for at, i in reversed(steps)}
    reruns = [at for at, i in steps if first[i] != at]
    centre = draw.choice(reruns)
    width = len(steps) // draw.choice(WIDTHS) + 2
    part = draw.choice(PARTS)
    gone = {at for at in reruns if at == centre or (abs(at - centre) <= width and draw.random() < part)}
    return replay.run([i for _, i in needed(replay, [step for step in steps if step[0] not in gone])])
