"""How a mixed-integer program is built and run: HiGHS through OR-Tools' MathOpt, on one thread.

HiGHS 1.x prints a debugging line from C now and then (`HighsMipSolverData::...`), whatever its options say. `StrayFilter`
keeps it off the user's standard output.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import math
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # importing gcsolve loads no solver back end: functions that need it import it
    from ortools.math_opt.python import mathopt

    Linear = dict[mathopt.Variable, float]

STRAY = b"HighsMipSolverData::"
DRAIN_S = 1.0
"""The most that the end of a filter waits for output that is under way."""

UNITS = 1000.0  # one step's cost in the program's units: keeps coefficients near 1
BYTE_UNITS = 100.0  # the budget above external bytes, likewise
ROW_SLACK = 1e-7  # memory rows are widened by this (of BYTE_UNITS): never cuts off a plan that fits exactly


@dataclass(frozen=True)
class MipResult:
    """`bound`: in overhead. `kept`: what the solution holds; None when none was found. `infeasible`: proven.
    `finished`: the asked gap was reached."""

    bound: float
    kept: frozenset[Any] | None
    infeasible: bool
    finished: bool = False


def weighted_sum(terms: Linear) -> mathopt.LinearBase:
    from ortools.math_opt.python import mathopt

    return mathopt.fast_sum([k * v for v, k in terms.items()])


def add_row(model: mathopt.Model, terms: Linear, low: float, high: float) -> mathopt.LinearConstraint:
    """low ≤ Σ terms ≤ high; several times faster than building the expression."""
    row = model.add_linear_constraint(lb=low, ub=high)
    for var, k in terms.items():
        row.set_coefficient(var, k)
    return row


def run_model(
    model: mathopt.Model,
    chosen: Mapping[Any, mathopt.Variable],
    *,
    time_limit_s: float,
    abs_gap: float,
    nodes: int | None = None,
    hint: Mapping[mathopt.Variable, float] | None = None,
    restart: bool = False,
) -> MipResult:
    """Minimise `model`.

    Args:
        chosen: what each variable decides on; the answer's `kept` are the keys whose variables are 1.
        time_limit_s: seconds; infinite for no limit.
        abs_gap: of the objective / `UNITS`, at which it may stop.
        nodes: the most nodes of the search tree; None: any number.
        hint: a solution to begin with.
        restart: it may begin anew from a smaller program, which takes twice the time or more where little is gained.

    Returns:
        the result; its bound in objective / `UNITS`.
    """
    from ortools.math_opt.python import mathopt

    params = mathopt.SolveParameters(
        time_limit=None if math.isinf(time_limit_s) else datetime.timedelta(seconds=max(0.05, time_limit_s)),
        random_seed=0,
        node_limit=nodes,
        absolute_gap_tolerance=abs_gap * UNITS,
        relative_gap_tolerance=0.0,
    )
    params.highs.int_options["threads"] = 1
    params.highs.bool_options["mip_allow_restart"] = restart
    begin = [mathopt.SolutionHint(variable_values=dict(hint))] if hint else []
    with STRAY_FILTER:
        result = mathopt.solve(
            model,
            mathopt.SolverType.HIGHS,
            params=params,
            model_params=mathopt.ModelSolveParameters(solution_hints=begin),
        )
    infeasible = result.termination.reason in (
        mathopt.TerminationReason.INFEASIBLE,
        mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED,
    )
    bound = result.termination.objective_bounds.dual_bound
    bound = max(0.0, bound / UNITS) if math.isfinite(bound) else 0.0
    if not result.has_primal_feasible_solution():
        return MipResult(bound, None, infeasible)
    values = result.variable_values()
    finished = result.termination.reason == mathopt.TerminationReason.OPTIMAL
    return MipResult(bound, frozenset(v for v, var in chosen.items() if values[var] > 0.5), False, finished)


class StrayFilter:
    """Context manager: lines that HiGHS prints on file descriptor 1 are dropped in the block, and no others.

    File descriptors belong to the process, so all blocks that are open at once, in whatever threads, share one filter: the
    first puts a pipe in the descriptor's place, the last puts the descriptor back. Meanwhile a thread passes on what comes
    through the pipe as it comes, from whoever writes it. Where the descriptor or the C library cannot be had, nothing is
    filtered.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open_blocks = 0
        self._real = -1
        self._pump: threading.Thread | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._open_blocks += 1
            if self._open_blocks == 1:
                self._install()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._open_blocks -= 1
            if self._open_blocks == 0 and self._pump is not None:
                self._remove()

    def _install(self) -> None:
        self._pump = None
        try:
            self._real = os.dup(1)
        except OSError:
            return
        source, sink = os.pipe()
        os.dup2(sink, 1)
        os.close(sink)
        # It has a descriptor of its own, for a child process that was started meanwhile may still write after the block.
        self._pump = threading.Thread(target=_pass_on, args=(source, os.dup(self._real)), daemon=True)
        self._pump.start()

    def _remove(self) -> None:
        assert self._pump is not None
        with contextlib.suppress(OSError, TypeError, AttributeError):
            ctypes.CDLL(None).fflush(None)  # HiGHS prints through the C library's buffer
        os.dup2(self._real, 1)
        os.close(self._real)
        self._pump.join(DRAIN_S)  # it ends with the pipe; a child process that holds that open is not waited for


STRAY_FILTER = StrayFilter()


def _pass_on(source: int, sink: int) -> None:
    """Write what comes from `source` to `sink` without HiGHS's lines, until it ends."""
    for part in _without_stray_lines(source):
        while part:
            try:
                part = part[os.write(sink, part) :]
            except OSError:  # nobody reads any more; those who write are not to notice
                break
    os.close(source)
    os.close(sink)


def _without_stray_lines(source: int) -> Iterator[bytes]:
    """What can be read from `source`, as it comes; only what may become a stray line waits for the rest of its line."""
    rest = b""
    while part := os.read(source, 1 << 16):
        *lines, rest = (rest + part).split(b"\n")
        yield b"".join(line + b"\n" for line in lines if not line.startswith(STRAY))
        if rest and not rest.startswith(STRAY[: len(rest)]):
            yield rest
            rest = b""
    if not rest.startswith(STRAY):
        yield rest
