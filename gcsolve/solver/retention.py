"""Keep or rerun, proven by MILPs whose memory rows are added only where a plan overflows: one epoch, then more.

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
is a true lower bound for the class (`Certificate.ONE_RERUN`). `milp/any_bound.py` adds the bound that no schedule beats.

**Incumbents.** A kept set that overflows is repaired by exact replays (`search/kept_repair.py`); so the search can stop
at the asked gap long before its own optimum fits.

**More epochs.** Where one rerun a value does not fit, the graph has no backward, or the bound for any schedule still
leaves more than the gap, `milp/epoch_search.py` goes on with any number of reruns, also inside the forward. Where the
greedy has no plan for it to begin with, `search/beam.py` looks for one; `search/ruin_recreate.py` makes plans cheaper
before the MILP and after it.

After Jain et al., "Checkmate" (MLSys 2020) and Bartan et al., "Moccasin" (ICML 2023); differs in that memory is held
in rows of a few moments, not of all n².
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from gcsolve.problem import Problem
from gcsolve.schedule import order_from_kept, schedule_from_order
from gcsolve.simulate import simulate
from gcsolve.solver.base import ROUNDING, Certificate, Solution, Status, judged, unanswered
from gcsolve.solver.blocks import twins
from gcsolve.solver.first_plan import FirstPlans
from gcsolve.solver.floor import peak_floor
from gcsolve.solver.milp.any_bound import any_schedule_bound
from gcsolve.solver.milp.epoch_search import EpochSearch
from gcsolve.solver.milp.one_rerun import Choices, Program, add_overflowing
from gcsolve.solver.minimum import least_budget, least_kept_budget
from gcsolve.solver.search.kept_repair import improve, repair, starts
from gcsolve.solver.search.kept_replay import KeptReplay, KeptRun
from gcsolve.solver.search.order_replay import OrderReplay, best_order
from gcsolve.solver.search.ruin_recreate import rebuilt

ONE_EPOCH_SHARE = 0.5
"""Of the time, for one rerun a value."""
BEGIN_SHARE = 0.5
"""Of the time that is then left, for a plan to begin with."""
FINER_SHARE = 0.1
"""Of the time, for more reruns where one a value fits and is proven to be within the gap of its class."""
RUIN_SHARE = 0.3
"""Of the time that is left for them, for more reruns by ruin and repair, before the MILP."""
FIRST_PATIENCE = 0.25
"""With that, where the plan is near what is proven: the MILP then often needs less time than a patient search."""
FAR = 0.1
"""A plan is not near that could still save this much, in overhead."""
LOOSE_GAP = 0.02
BOUND_SHARE = 0.25
TIED_ROUNDS = 12
TIED_GROUPS = (1, 2, 4)
TIED_MOST = 0.9
"""A tied program has no more than this share of the decisions; else it takes as long as the untied one."""
POLISH_VARIABLES = 900
POLISH_NODES = 60_000  # over the program's variables
POLISH_ROUNDS = 4
POLISHED = 0.0005
"""Polishing stops at this part of the asked gap."""
TINY_SHARE = 1e-3
"""Values that sum up to this share of the budget are kept without asking; never more than a tenth of the gap."""


@dataclass(frozen=True)
class Retention:
    """`epochs`: where one rerun a value is not enough, or the bound leaves room, go on with any number of reruns.
    `begin`: an order to begin that with; None: the greedy's.
    `find_least`: when nothing fits, spend what is left of the time on finding the least budget that would.
    """

    name: ClassVar[str] = "retention"
    epochs: bool = True
    begin: tuple[int, ...] | None = None
    find_least: bool = True

    def solve(self, problem: Problem, *, time_limit_s: float = 60.0, gap: float = 0.005) -> Solution:
        started = time.perf_counter()
        finish = started + 0.9 * time_limit_s
        graph = problem.graph
        replay = KeptReplay(problem)
        everything = replay.run(range(len(graph.values)))
        if everything.peak_bytes <= problem.budget_bytes:
            return _Bounds().judged(self.name, problem, everything.order.tolist(), started, gap)
        if peak_floor(problem)[0] > problem.budget_bytes:
            return self._no_plan(problem, Certificate.ANY_SCHEDULE, _Bounds(), started, time_limit_s)
        order, bounds, impossible = (
            None,
            _Bounds(),
            Certificate.ONE_RERUN,
        )  # without a backward that class keeps everything
        if graph.backward_start < len(graph.nodes):
            share = ONE_EPOCH_SHARE if self.epochs else 1.0
            search = _Search(replay, problem.budget_bytes, gap, started + share * (finish - started))
            impossible = search.run()
            bounds = _Bounds(
                any=search.any_bound, one_rerun=math.inf if impossible == Certificate.ONE_RERUN else search.bound
            )
            if search.best is not None:
                order = order_from_kept(graph, search.best.kept)
        if self.epochs and impossible != Certificate.ANY_SCHEDULE:
            order, bounds, impossible = self._more_epochs(problem, order, bounds, gap, finish, time_limit_s)
        if order is None:
            return self._no_plan(problem, impossible, bounds, started, time_limit_s)
        return bounds.judged(self.name, problem, order, started, gap)

    def _more_epochs(
        self,
        problem: Problem,
        order: Sequence[int] | None,
        bounds: _Bounds,
        gap: float,
        finish: float,
        time_limit_s: float,
    ) -> tuple[Sequence[int] | None, _Bounds, Certificate | None]:
        """The same with any number of reruns: (order, bounds, the class in which nothing fits)."""
        replay = OrderReplay(problem)
        total = problem.total_cost or 1.0
        now = time.perf_counter()
        proven, whole = False, finish
        if order is None and self.begin is not None:
            run = replay.run(self.begin)
        elif order is None:
            run = FirstPlans(problem).find(deadline=now + BEGIN_SHARE * (finish - now))
        else:
            run = replay.run(order)
            if self.begin is not None:
                run = best_order([run, replay.run(self.begin)], problem.budget_bytes)
            overhead = run.rerun_cost / total
            if bounds.gap(Certificate.ANY_SCHEDULE, overhead) <= gap + ROUNDING:
                return run.order, bounds, None
            proven = -ROUNDING <= bounds.gap(Certificate.ONE_RERUN, overhead) <= gap + ROUNDING
            if proven:
                finish = min(finish, now + FINER_SHARE * time_limit_s)
        if run is not None and run.peak_bytes > problem.budget_bytes:
            run = None
        if run is not None:
            now = time.perf_counter()
            until = now + RUIN_SHARE * (finish - now)
            enough = total * _enough(bounds.any, gap)
            patience = FIRST_PATIENCE if run.rerun_cost / total - bounds.any < FAR else 1.0
            run = rebuilt(replay, run, deadline=until, enough=enough, patience=patience)
        if proven and run is not None and bounds.gap(Certificate.ONE_RERUN, run.rerun_cost / total) < -ROUNDING:
            proven, finish = False, whole  # of a plan that beats that class, nothing is proven
        search = EpochSearch(problem, run, gap=gap, deadline=finish, any_bound=bounds.any)
        search.run()
        if proven and search.best and bounds.gap(Certificate.ONE_RERUN, search.best.rerun_cost / total) < -ROUNDING:
            proven, finish = False, whole
            search.deadline = finish
            search.run()
        if search.best is not None and not search.met() and not proven:
            enough = total * _enough(max(search.any_bound, search.bound), gap)
            search.best = rebuilt(replay, search.best, deadline=finish, enough=enough, seed=1)
        found = _Bounds(search.any_bound, search.bound, bounds.one_rerun)
        if search.best is not None:
            return search.best.order, found, None
        return (
            None,
            found,
            (Certificate.ASCENDING if search.bursts else Certificate.ANY_SCHEDULE) if search.infeasible else None,
        )

    def _no_plan(
        self, problem: Problem, impossible: Certificate | None, bounds: _Bounds, started: float, time_limit_s: float
    ) -> Solution:
        """No plan was found, or it is proven that the class `impossible` has none: say what budget would do."""
        left = max(1.0, started + time_limit_s - time.perf_counter())
        least = None
        if self.find_least and self.epochs:
            least = least_budget(problem, left, above_bytes=problem.budget_bytes)
        elif self.find_least:
            least = least_kept_budget(problem, left)
        return unanswered(
            self.name,
            Status.TIME_LIMIT if impossible is None else Status.INFEASIBLE,
            solve_s=time.perf_counter() - started,
            lower_bound=bounds.any,
            certificate=impossible or Certificate.ANY_SCHEDULE,
            any_bound=bounds.any,
            least_bytes=least.bytes if least else None,
            least_node=least.node if least else None,
        )


@dataclass(frozen=True)
class _Bounds:
    """Proven lower bounds on the overhead, by the class of schedules that they hold for."""

    any: float = 0.0
    ascending: float = 0.0
    one_rerun: float = 0.0

    def gap(self, certificate: Certificate, overhead: float) -> float:
        bound = {
            Certificate.ANY_SCHEDULE: self.any,
            Certificate.ASCENDING: self.ascending,
            Certificate.ONE_RERUN: self.one_rerun,
        }[certificate]
        return (overhead - bound) / (1.0 + overhead)

    def judged(self, solver: str, problem: Problem, order: Sequence[int], started: float, gap: float) -> Solution:
        """`order` with the bound that says most: that of the largest class that closes the gap, else the tightest; but
        of no class that it beats."""
        schedule = schedule_from_order(problem.graph, order)
        overhead = simulate(problem, schedule).overhead
        classes = (
            (Certificate.ANY_SCHEDULE, self.any),
            (Certificate.ASCENDING, self.ascending),
            (Certificate.ONE_RERUN, self.one_rerun),
        )
        binding = [c for c in classes if c[1] <= overhead + ROUNDING]
        closed = [c for c in binding if overhead - c[1] <= (gap + ROUNDING) * (1.0 + overhead)]
        certificate, bound = closed[0] if closed else max(binding, key=lambda c: c[1])
        return judged(
            solver,
            problem,
            schedule,
            solve_s=time.perf_counter() - started,
            gap=gap,
            lower_bound=bound,
            certificate=certificate,
            any_bound=self.any,
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

    def run(self) -> Certificate | None:
        """Search; the class of which it is proven that nothing in it fits, else None."""
        for kept in starts(self.replay.problem.graph):
            self.offer(self.replay.run(kept))
        until = time.perf_counter() + BOUND_SHARE * self.left()
        proof = any_schedule_bound(self.choices, self.budget_bytes, deadline=until, abs_gap=self.gap / 50)
        if proof.infeasible:
            return Certificate.ANY_SCHEDULE
        self.bound = self.any_bound = proof.bound
        for kept in proof.kept:
            self._try(kept)
        if self.met(POLISHED) or self.left() <= 0:
            return None
        program = Program(self.choices, self.budget_bytes)
        for moment in proof.moments:
            program.add_instant(moment, -1)
        sizes: set[int] = set()  # of the tied programs tried: with more groups they grow, or are the same again
        for groups in TIED_GROUPS:
            tied = Program(self.choices, self.budget_bytes, twins(self.replay.problem.graph, groups))
            size = len(set(tied.S.values()))
            if size <= TIED_MOST * len(tied.S) and size not in sizes:
                sizes.add(size)
                self._tied_rounds(tied, proof.moments)
            if self.met() or self.left() <= 0:
                break
        if not self.met() and self._rounds(program):
            return Certificate.ONE_RERUN
        self._polish(program)
        return None

    def _try(self, kept: frozenset[int]) -> KeptRun:
        run = self.replay.run(kept)
        fixed = repair(self.replay, run, self.budget_bytes, self.deadline)
        if fixed is not None:
            self.offer(improve(self.replay, fixed, self.budget_bytes, self.deadline))
        return run

    def _tied_rounds(self, tied: Program, moments: tuple[int, ...]) -> None:
        """Incumbents that treat repeated blocks alike: a small program, so soon solved, that proves nothing."""
        for moment in moments:
            tied.add_instant(moment, -1)
        for _ in range(TIED_ROUNDS):
            answer = tied.solve(time_limit_s=self.left() / 10, abs_gap=self.gap / 4)
            if answer.kept is None:
                return
            run = self._try(answer.kept)
            hopeless = answer.bound - self.bound > self.gap * (1.0 + answer.bound)  # not even their best would do
            if self.met() or hopeless or self.left() <= 0 or not add_overflowing(tied, run, self.budget_bytes):
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
                abs_gap = finest  # no row is missing: from here on it is the optimum that is wanted
            elif run.peak_bytes <= self.budget_bytes:
                return False
            elif not added:
                program.tighten(run.peak_bytes - self.budget_bytes)
        return False


def _enough(bound: float, gap: float) -> float:
    """The largest overhead that is within `gap` of the bound."""
    return (bound + gap) / (1.0 - gap) if gap < 1.0 else math.inf
