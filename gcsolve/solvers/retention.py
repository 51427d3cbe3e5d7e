"""The default: keep or rerun once, proven by a MILP whose memory rows are added only where a plan overflows.

Forward F, then backward B, in their given order. A forward value is either *kept* to its last use or *rerun* once,
just before the backward (or another rerun) first needs it, and then held to its last use.

    S[d] = 1   value d is kept at the end of the forward            (binary)
    R[i]       forward node i is rerun in the backward              (in [0, 1]; integral once S is)
    N[i](t)    node i has been rerun by the time backward node t runs; P[i](t) = R[i] - N[i](t) is "still to come"

    minimise Σ cost[i] R[i]
    use      S[d] + R[p(d)] = 1             for d read by the backward; p(d) makes d
    rerun    S[d] + R[p(d)] ≥ R[i]          for d read by forward node i
    once     S[d] + R[p(d)] ≤ 1
    needed   S[d] ≤ Σ R[i]                  for d that only reruns read: keeping what nothing reads is pointless
    by t     N[i] = R[i] if t or an earlier node reads an output of i; otherwise N[i] ≤ R[i], N[i] ≤ Σ N[j] over the
             readers j of its outputs d, and N[i] ≥ N[j] - S[d]
    memory   at chosen moments t:  own bytes of t + Σ bytes[d] alive[d](t) ≤ budget, where alive[d] is
             S[d] + N[p(d)]                           when the backward reads d at t or later
             ≥ P[j](t) - P[p(d)](t) for readers j     otherwise: a rerun still needs d, and d is not to be made again
    A moment is a node of F or B running, or a rerun inside the burst before a backward node.

| design, Checkmate | here |
|---|---|
| S, R with one epoch | `Program.S`, `Program.R` |
| FREE, U | `alive`, the memory rows (only where needed) |

**Lazy rows.** Start with the end of the forward; solve; replay the kept set in exact bytes; add the moments that
overflow, worst first and spread out; repeat. Every row is a relaxation of the true memory, so each round's dual bound
is a true lower bound for the class (certificate `ONE_RERUN`). `anybound.py` adds the bound that no schedule beats.

**Incumbents.** A kept set that overflows is repaired by exact replays (`_repair.py`); so the search can stop at the
asked gap long before its own optimum fits.

After Jain et al., "Checkmate" (MLSys 2020) and Bartan et al., "Moccasin" (ICML 2023); differs in that memory is held
in rows of a few moments, not of all n².
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

from gcsolve.problem import Problem
from gcsolve.schedule import order_from_kept, schedule_from_order
from gcsolve.solvers._kept import KeptReplay, KeptRun
from gcsolve.solvers._program import Choices, Program, add_overflowing
from gcsolve.solvers._repair import improve, repair, starts
from gcsolve.solvers.anybound import any_schedule_bound
from gcsolve.solvers.base import ANY_SCHEDULE, ONE_RERUN, Solution, Status, judged
from gcsolve.solvers.blocks import twins
from gcsolve.solvers.minimum import minimum_peak, peak_floor

LOOSE_GAP = 0.02
BOUND_SHARE = 0.25
TIED_ROUNDS = 12
TIED_GROUPS = (1, 2, 4)
POLISH_VARIABLES = 900
POLISH_NODES = 60_000  # over the program's variables
POLISH_ROUNDS = 4
POLISHED = 0.02
"""Polishing stops at this part of the asked gap."""
TINY_SHARE = 1e-3
"""Values that sum up to this share of the budget are kept without asking; never more than a tenth of the gap."""


@dataclass(frozen=True)
class Retention:
    """`find_least`: when nothing fits, spend what is left of the time on finding the least budget that would."""

    name: ClassVar[str] = "retention"
    find_least: bool = True

    def solve(self, problem: Problem, *, time_limit_s: float = 60.0, gap: float = 0.005) -> Solution:
        started = time.perf_counter()
        graph = problem.graph
        replay = KeptReplay(problem)
        everything = replay.run(range(len(graph.values)))
        if everything.peak_bytes <= problem.budget_bytes:
            return _answer(self.name, problem, everything, 0.0, 0.0, started, gap)
        floor_bytes, _ = peak_floor(problem)
        if floor_bytes > problem.budget_bytes:
            return self._infeasible(problem, started, time_limit_s, 0.0)
        search = _Search(replay, problem.budget_bytes, gap, started + 0.9 * time_limit_s)
        proven_infeasible = search.run()
        if search.best is None:
            if proven_infeasible:
                return self._infeasible(problem, started, time_limit_s, search.any_bound)
            return _no_plan(self.name, search, started)
        return _answer(self.name, problem, search.best, search.bound, search.any_bound, started, gap)

    def _infeasible(self, problem: Problem, started: float, time_limit_s: float, any_bound: float) -> Solution:
        """Nothing fits: say what would."""
        left = max(1.0, started + time_limit_s - time.perf_counter())
        least = minimum_peak(problem, time_limit_s=left) if self.find_least else None
        return Solution(
            solver=self.name,
            status=Status.INFEASIBLE,
            schedule=None,
            overhead=0.0,
            lower_bound=0.0,
            certificate=ONE_RERUN,
            any_bound=any_bound,
            gap=0.0,
            peak_bytes=0,
            solve_s=time.perf_counter() - started,
            least_bytes=least.bytes if least else None,
            least_node=least.node if least else None,
        )


class _Search:
    """Bound from below, incumbent from above, until they meet at `gap` or the deadline strikes."""

    def __init__(self, replay: KeptReplay, budget_bytes: int, gap: float, deadline: float) -> None:
        self.replay = replay
        self.budget_bytes = budget_bytes
        self.gap = max(gap, 1e-9)
        self.deadline = deadline
        self.total = replay.problem.total_cost or 1.0
        dynamic = budget_bytes - replay.problem.graph.external_bytes
        self.choices = Choices(replay, int(dynamic * min(TINY_SHARE, self.gap / 10)))
        self.best: KeptRun | None = None
        self.bound = 0.0
        self.any_bound = 0.0

    def left(self) -> float:
        return self.deadline - time.perf_counter()

    def offer(self, run: KeptRun) -> None:
        """Take `run` as incumbent if it fits and is better."""
        if run.peak_bytes <= self.budget_bytes and (self.best is None or run.key() < self.best.key()):
            self.best = run

    def met(self, part: float = 1.0) -> bool:
        if self.best is None:
            return False
        overhead = self.best.rerun_cost / self.total
        return overhead - self.bound <= part * self.gap * (1.0 + overhead) + 1e-12

    def run(self) -> bool:
        """Search; True when it is proven that nothing fits."""
        for kept in starts(self.replay.problem.graph):
            self.offer(self.replay.run(kept))
        until = time.perf_counter() + BOUND_SHARE * self.left()
        proof = any_schedule_bound(self.choices, self.budget_bytes, deadline=until, abs_gap=self.gap / 50)
        if proof.infeasible:
            return True
        self.bound = self.any_bound = proof.bound
        for kept in proof.kept:
            self._try(kept)
        if self.met(POLISHED):
            return False
        program = Program(self.choices, self.budget_bytes)
        for moment in proof.moments:
            program.add_instant(moment, -1)
        for groups in TIED_GROUPS:
            self._tied_rounds(groups, proof.moments)
            if self.met():
                break
        if not self.met() and self._rounds(program):
            return True
        self._polish(program)
        return False

    def _try(self, kept: frozenset[int]) -> KeptRun:
        run = self.replay.run(kept)
        fixed = repair(self.replay, run, self.budget_bytes, self.deadline)
        if fixed is not None:
            self.offer(improve(self.replay, fixed, self.budget_bytes, self.deadline))
        return run

    def _tied_rounds(self, groups: int, moments: tuple[int, ...]) -> None:
        """Incumbents that treat repeated blocks alike: a small program, so soon solved, that proves nothing."""
        tied = Program(self.choices, self.budget_bytes, twins(self.replay.problem.graph, groups))
        if len(set(tied.S.values())) == len(tied.S):
            return
        for moment in moments:
            tied.add_instant(moment, -1)
        for _ in range(TIED_ROUNDS):
            answer = tied.solve(time_limit_s=self.left() / 10, abs_gap=self.gap / 4)
            if answer.kept is None:
                return
            run = self._try(answer.kept)
            hopeless = answer.bound - self.bound > self.gap * (1.0 + answer.bound)  # not even their best would do
            if self.met() or hopeless or not add_overflowing(tied, run, self.budget_bytes):
                return

    def _polish(self, program: Program) -> None:
        """Within the gap: a few short looks at the MILP, which often are enough for the optimum."""
        for _ in range(POLISH_ROUNDS):
            size = program.model.get_num_variables()
            if self.met(POLISHED) or self.left() <= 0 or size > POLISH_VARIABLES:
                return
            nodes = max(1, POLISH_NODES // size)
            answer = program.solve(time_limit_s=self.left() / 2, abs_gap=self.gap / 100, nodes=nodes)
            if not program.margin_bytes:
                self.bound = max(self.bound, answer.bound)
            if answer.kept is None:
                return
            run = self._try(answer.kept)
            if not add_overflowing(program, run, self.budget_bytes):
                if run.peak_bytes <= self.budget_bytes:
                    return
                program.tighten(run.peak_bytes - self.budget_bytes)

    def _rounds(self, program: Program) -> bool:
        """Solve, replay, add rows. Early rounds stop at a loose gap: their plans only show which rows are missing."""
        finest = self.gap / 4
        abs_gap = max(finest, LOOSE_GAP)
        while self.left() > 0:
            answer = program.solve(time_limit_s=self.left(), abs_gap=abs_gap)
            if not program.margin_bytes:
                if answer.infeasible:
                    return True
                self.bound = max(self.bound, answer.bound)
            if answer.kept is None:
                return False
            run = self._try(answer.kept)
            if self.met():
                return False
            added = add_overflowing(program, run, self.budget_bytes)
            if not added and abs_gap > finest:
                abs_gap = max(finest, abs_gap / 4)
            elif run.peak_bytes <= self.budget_bytes:
                return False
            elif not added:
                program.tighten(run.peak_bytes - self.budget_bytes)
        return False


def _answer(
    solver: str, problem: Problem, run: KeptRun, bound: float, any_bound: float, started: float, gap: float
) -> Solution:
    schedule = schedule_from_order(problem.graph, order_from_kept(problem.graph, run.kept))
    return judged(
        solver,
        problem,
        schedule,
        solve_s=time.perf_counter() - started,
        gap=gap,
        lower_bound=bound,
        certificate=ANY_SCHEDULE if any_bound >= bound else ONE_RERUN,
        any_bound=any_bound,
    )


def _no_plan(solver: str, search: _Search, started: float) -> Solution:
    return Solution(
        solver=solver,
        status=Status.TIME_LIMIT,
        schedule=None,
        overhead=0.0,
        lower_bound=search.bound,
        certificate=ONE_RERUN,
        any_bound=search.any_bound,
        gap=1.0,
        peak_bytes=0,
        solve_s=time.perf_counter() - started,
    )
