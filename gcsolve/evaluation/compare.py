"""`gcsolve.compare`: solvers against each other at several budgets, on one trace, predicted and if asked measured."""

from __future__ import annotations

import dataclasses
import html
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from gcsolve.errors import ArgumentError, InfeasibleBudget, SolverError
from gcsolve.evaluation.verify import refuse_elsewhere, verify
from gcsolve.plan_record import PlanRecord, SolverOptions
from gcsolve.report.frontier import Curve, Frontier, draw_frontier
from gcsolve.report.tables import html_table, text_table
from gcsolve.session import Session, Settings, StepOptions, infeasible, refuse_below_floor
from gcsolve.solver.base import Solution, Solver, Status
from gcsolve.solver.front import solve_problem
from gcsolve.solver.minimum import peak_floor
from gcsolve.solver.registry import get_solver
from gcsolve.util.checks import check_limits, flag, whole
from gcsolve.util.progress import bar
from gcsolve.util.sizes import budget_bytes, check_budget, size_text
from gcsolve.util.tree import flatten

BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5)
SOLVERS = ("uniform_sqrt", "uniform", "blocks", "chen", "greedy", "rotor", "auto")
FAILED = "FAILED"


@dataclass(frozen=True)
class ComparisonRow:
    """One solver at one budget. Bytes, seconds, and shares (0.1 = 10 %) of the store-all step.

    `peak_bytes` and `overhead` are those of the method's plan, also of one that is over the budget (the least it reaches);
    None when it has none. `reason`: why no plan fits; "" when one does. `status`: a `Status` by name, or FAILED where the
    solver raised or its answer did not hold (`reason` is that error then). `measured_peak_bytes`, `time_ratio` (step time /
    the untouched model's), `exact` (outputs, gradients, parameters, buffers and generator state bitwise equal) and
    `differences` (what was not): None and () unless measured. `measure_error`: what was raised when it was to be.
    """

    solver: str
    budget_bytes: int
    status: str
    reason: str
    peak_bytes: int | None
    overhead: float | None
    overhead_flops: float | None
    lower_bound: float
    any_bound: float
    gap: float | None
    certificate: str
    solve_s: float
    measured_peak_bytes: int | None = None
    time_ratio: float | None = None
    exact: bool | None = None
    differences: tuple[str, ...] = ()
    measure_error: str = ""

    @property
    def fits(self) -> bool:
        """Whether the method has a plan inside the budget."""
        return not self.reason


@dataclass(frozen=True)
class Comparison:
    """What `gcsolve.compare` answers: one row a solver and budget, in the order they were run.

    `baseline_peak_bytes`: predicted store-all peak; `floor_bytes`: no schedule at all is below; `eager_peak_bytes`: of the
    untouched model, None unless measured. `complete`: False when it was interrupted, and rows are missing.
    """

    model: str
    device: str
    cost: str
    scope: str
    baseline_peak_bytes: int
    floor_bytes: int
    eager_peak_bytes: int | None
    solvers: tuple[str, ...]
    budgets_bytes: tuple[int, ...]
    rows: tuple[ComparisonRow, ...]
    complete: bool

    @property
    def measured(self) -> bool:
        return self.eager_peak_bytes is not None

    def row(self, solver: str, budget_bytes: int) -> ComparisonRow | None:
        """The row of that solver and budget; None when it was not reached."""
        return next((r for r in self.rows if (r.solver, r.budget_bytes) == (solver, budget_bytes)), None)

    def summary(self) -> str:
        """Overhead and peak of each solver at each budget as a table of text; what was measured; and what went wrong."""
        parts = [self._title(), text_table(*self._matrix())]
        if self.measured:
            parts += ["", self._measured_title(), text_table(*self._measurements(), right=range(1, 6))]
        return "\n".join([*parts, *(["", *self._errors()] if self._errors() else [])])

    def _errors(self) -> list[str]:
        """A line an error, each once, with the budget at which it came first."""
        found: dict[str, str] = {}
        for r in self.rows:
            for text in (r.reason if r.status == FAILED else "", r.measure_error):
                if text:
                    found.setdefault(text, f"{r.solver} at {size_text(r.budget_bytes)} failed: {text}")
        return list(found.values())

    def _title(self) -> str:
        missing = len(self.solvers) * len(self.budgets_bytes) - len(self.rows)
        cut = "" if self.complete else f"; INTERRUPTED, {missing} rows missing"
        return (
            f"{self.model}: store-all peak {size_text(self.baseline_peak_bytes)}, no schedule below "
            f"{size_text(self.floor_bytes)}; overhead ({self.cost} costs for {self.device}) and peak at each budget{cut}"
        )

    def _matrix(self) -> tuple[list[str], list[list[str]]]:
        heads = ["solver"]
        heads += [f"{size_text(b)} ({b / self.baseline_peak_bytes:.0%})" for b in self.budgets_bytes]
        return heads, [[s, *(_cell(self.row(s, b)) for b in self.budgets_bytes)] for s in self.solvers]

    def _measured_title(self) -> str:
        assert self.eager_peak_bytes is not None
        return f"measured; untouched model {size_text(self.eager_peak_bytes)}"

    def _measurements(self) -> tuple[list[str], list[list[str]]]:
        heads = ["solver", "budget", "predicted", "measured", "overhead", "step time", "exact"]
        return heads, [
            [
                r.solver,
                size_text(r.budget_bytes),
                size_text(r.peak_bytes or 0),
                size_text(r.measured_peak_bytes),
                f"{r.overhead:.2%}",
                f"x {r.time_ratio:.3f}" if r.time_ratio else "",
                "yes" if r.exact else "NO: " + "; ".join(r.differences[:3]),
            ]
            for r in self.rows
            if r.measured_peak_bytes is not None
        ]

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Everything as JSON text; also written to `path` when one is given."""
        text = json.dumps(dataclasses.asdict(self), indent=1)
        if path is not None:
            Path(path).write_text(text + "\n")
        return text

    def plot(self, ax: Any = None) -> Any:
        """Overhead against peak memory, one curve a solver, the proven bound shaded; returns matplotlib's Axes.

        Raises:
            MissingBackend: matplotlib is not installed.
        """
        return draw_frontier(self._frontier(), ax)

    def _frontier(self) -> Frontier:
        """Measured peaks where they are known, else predicted ones; at each budget, the best bound of all solvers."""
        points: dict[str, list[tuple[int, float]]] = {name: [] for name in self.solvers}
        bounds: dict[int, float] = {}
        for row in self.rows:
            bounds[row.budget_bytes] = max(bounds.get(row.budget_bytes, 0.0), row.any_bound)
            if row.overhead is not None and row.peak_bytes is not None:
                points[row.solver].append((row.measured_peak_bytes or row.peak_bytes, row.overhead))
        return Frontier(
            model=self.model,
            device=self.device,
            cost=self.cost,
            baseline_peak_bytes=self.baseline_peak_bytes,
            floor_bytes=self.floor_bytes,
            curves=tuple(Curve(solver, tuple(plans)) for solver, plans in points.items()),
            bounds=bounds,
            measured=self.measured,
        )

    def _repr_html_(self) -> str:
        parts = [f"<p>{self._title()}</p>", html_table(*self._matrix())]
        if self.measured:
            parts += [f"<p>{self._measured_title()}</p>", html_table(*self._measurements(), right=range(1, 6))]
        return "".join([*parts, *(f"<p>{html.escape(line)}</p>" for line in self._errors())])

    def __repr__(self) -> str:
        return f"<Comparison of {self.model}: {len(self.rows)} rows{'' if self.complete else ', interrupted'}>"


def compare(
    model: nn.Module,
    example_input: Any,
    *,
    budgets: Iterable[str | float] | None = None,
    budgets_gb: Iterable[float] | None = None,
    solvers: Iterable[str | Solver] = SOLVERS,
    measure: bool = False,
    steps: int = 1,
    repeats: int = 3,
    time_limit_s: float = 60.0,
    gap: float = 0.005,
    progress: bool | None = None,
    **step: Unpack[StepOptions],
) -> Comparison:
    """Plan `model` by each solver at each budget, tracing once, and put the answers side by side.

    Args:
        budgets: fractions of the store-all peak, or sizes ("20GiB"); default 0.9, 0.8, 0.7, 0.6, 0.5.
        budgets_gb: instead, GB (1e9 bytes).
        solvers: names in `gcsolve.solvers()` or solver objects.
        measure: also run every plan that fits, beside the untouched model: peak, step time, bitwise equality.
        steps, repeats: optimizer steps compared and timed runs, as for `plan.verify`.
        time_limit_s, gap: as for `solve`, for each row.
        progress: as for `solve`.
        step: loss, optimizer, scope, cost, device, backward_from, gradient_accumulation, autocast_backward, as for `solve`.

    Returns:
        a `Comparison`. A budget that a solver cannot meet is a row with its reason, and so is a solver of yours that
        raises or answers with what does not hold, or a plan that fails while it is measured. When interrupted (Ctrl-C),
        what has been found so far, with `complete` False.

    Raises:
        TraceError, ArgumentError: as `solve`; both kinds of budgets given; or measure=True with weights on meta or planned
            for another kind of device.

    Examples:
        >>> import torch, gcsolve
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
        >>> found = gcsolve.compare(model, torch.randn(256, 64), budgets=[0.9], solvers=["store_all", "auto"])
        >>> [row.fits for row in found.rows]
        [False, True]
    """
    asked = _budgets(budgets, budgets_gb)
    flag("measure", measure)
    named = _labels(solvers)
    steps, repeats = whole("steps", steps, least=1, floats=False), whole("repeats", repeats, floats=False)
    check_limits(time_limit_s, gap)
    settings = Settings.checked(model, **step)
    if measure and any(t.device.type == "meta" for t in (*model.parameters(), *model.buffers())):
        raise ArgumentError("measure=True runs the model, and its weights are on meta; give it real weights first")
    session = Session.of(model, example_input, settings, progress)
    store_all_bytes = session.call.store_all_bytes
    if measure:
        inputs, _ = flatten((session.args, session.kwargs), "example_input")
        refuse_elsewhere("measure=True", settings.device, model, inputs)
    sizes = tuple(dict.fromkeys(budget_bytes(gb, b, store_all_bytes) for gb, b in asked))
    todo = [(name, solver, size) for size in sizes for name, solver in named.items()]
    rows: list[ComparisonRow] = []
    eager: int | None = None
    complete = False
    try:
        with bar(progress, len(todo)) as begin:
            for name, solver, size in todo:
                begin(f"{name} at {size_text(size)}")
                options = SolverOptions(solver, time_limit_s, gap)
                row, solution = _predicted(session, name, options, size)
                if measure and row.fits:
                    assert solution is not None
                    row, eager = _measured(row, session, session.record(solution, size, options), steps, repeats, eager)
                rows.append(row)
        complete = True
    except KeyboardInterrupt:
        pass  # the rows so far are what was asked for; `complete` says that some are missing
    return Comparison(
        model=type(model).__name__,
        device=settings.device.name,
        cost=settings.cost.name,
        scope=settings.scope,
        baseline_peak_bytes=store_all_bytes,
        floor_bytes=peak_floor(session.problem)[0],
        eager_peak_bytes=eager,
        solvers=tuple(named),
        budgets_bytes=sizes,
        rows=tuple(rows),
        complete=complete,
    )


def _budgets(budgets: Any, budgets_gb: Any) -> list[tuple[Any, Any]]:
    """(budget_gb, budget) pairs, each checked."""
    if budgets is not None and budgets_gb is not None:
        raise ArgumentError("give one of budgets=[0.8, ...] and budgets_gb=[20, ...]; both were given")
    if budgets_gb is not None:
        pairs = [(gb, None) for gb in _several("budgets_gb", budgets_gb, "budget")]
    else:
        pairs = [(None, b) for b in _several("budgets", BUDGETS if budgets is None else budgets, "budget")]
    for gb, b in pairs:
        check_budget(gb, b)
    return pairs


def _several(name: str, given: Any, thing: str) -> list[Any]:
    """A list of what the caller gave in a row: a list, a tuple, an array; no text, and not nothing."""
    found = list(given) if isinstance(given, Iterable) and not isinstance(given, (str, Mapping)) else []
    if not found:
        raise ArgumentError(f"{name}={given!r} must be a list of at least one {thing}")
    return found


def _labels(solvers: Any) -> dict[str, str | Solver]:
    """label -> solver: its name, or its repr (which shows its settings) where two share one."""
    distinct = {id(get_solver(s)): s for s in _several("solvers", solvers, "solver")}  # one asked for twice is run once
    names = [get_solver(s).name for s in distinct.values()]
    labels = [n if names.count(n) == 1 else repr(get_solver(s)) for n, s in zip(names, distinct.values(), strict=True)]
    return dict(zip(labels, distinct.values(), strict=True))


def _predicted(session: Session, name: str, options: SolverOptions, size: int) -> tuple[ComparisonRow, Solution | None]:
    costs = session.call.costed
    problem = costs.problem.with_budget(size)
    try:
        refuse_below_floor(problem)
    except InfeasibleBudget as error:
        return _no_plan(name, size, Status.INFEASIBLE.name, str(error)), None
    try:
        found = solve_problem(problem, options.solver, time_limit_s=options.time_limit_s, gap=options.gap)
    except SolverError as error:
        return _no_plan(name, size, FAILED, str(error)), None
    over = found.schedule is None or found.status is Status.OVER_BUDGET
    reason = str(infeasible(problem, found)) if over else ""
    if found.schedule is None:
        bare = _no_plan(name, size, found.status.name, reason)
        return dataclasses.replace(
            bare, peak_bytes=found.least_bytes, any_bound=found.any_bound, solve_s=found.solve_s
        ), None
    row = ComparisonRow(
        solver=name,
        budget_bytes=size,
        status=found.status.name,
        reason=reason,
        peak_bytes=found.peak_bytes,
        overhead=found.overhead,
        overhead_flops=costs.overhead_flops(found.schedule),
        lower_bound=found.lower_bound,
        any_bound=found.any_bound,
        gap=found.gap,
        certificate=found.bound_class,
        solve_s=found.solve_s,
    )
    return row, found


def _measured(
    row: ComparisonRow, session: Session, plan: PlanRecord, steps: int, repeats: int, eager: int | None
) -> tuple[ComparisonRow, int | None]:
    """The row with what running `plan` shows, and the untouched model's peak (`eager`: as known so far)."""
    try:
        report = verify(plan, session, steps=steps, repeats=repeats)
    except Exception as error:  # out of memory, say: the other rows are worth as much as before
        return dataclasses.replace(row, measure_error=f"{type(error).__name__}: {error}"), eager
    measured = dataclasses.replace(
        row,
        measured_peak_bytes=report.measured_peak_bytes,
        time_ratio=report.time_ratio if repeats else None,
        exact=not report.differences,
        differences=report.differences,
    )
    return measured, report.eager_peak_bytes


def _no_plan(name: str, size: int, status: str, reason: str) -> ComparisonRow:
    return ComparisonRow(name, size, status, reason, None, None, None, 0.0, 0.0, None, "", 0.0)


_WITHOUT_PLAN = {Status.UNSUITED.name: "no plan (graph not taken)", FAILED: "failed (see below)"}


def _cell(row: ComparisonRow | None) -> str:
    if row is None:
        return "not run"
    if row.fits:
        return f"{row.overhead:.2%} ({size_text(row.peak_bytes or 0)})"
    if row.status in _WITHOUT_PLAN:
        return _WITHOUT_PLAN[row.status]
    return "no plan" if row.peak_bytes is None else f"no plan (least {size_text(row.peak_bytes)})"
