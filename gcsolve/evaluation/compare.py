"""`gcsolve.compare`: plans of one model by several solvers at several budgets, from one trace; predicted and, if wanted,
measured."""

from __future__ import annotations

import dataclasses
import html
import itertools
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
from gcsolve.solver.floor import peak_floor
from gcsolve.solver.front import solve_problem
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
    """One solver at one budget. Overheads and bounds are shares (0.1 = 10 %) of the store-all step's cost.

    Attributes:
        solver, budget_bytes: which row it is.
        status: the name of a `Status`, or "FAILED" if the solver raised or its answer was not valid.
        reason: why no plan fits, or the error of a solver that failed; "" if a plan fits.
        peak_bytes, overhead, overhead_flops: of the solver's plan, or of its plan of the least peak if none fits; None
            without a plan.
        lower_bound, any_bound, gap, certificate: as of a `Solution`; gap is None without a plan.
        solve_s: seconds that the solver took.
        measured_peak_bytes, time_ratio: the measured peak, and step time / the untouched model's step time.
        exact: whether outputs, gradients, parameters, buffers and generator state were bitwise equal.
        differences: what was not bitwise equal.
        measure_error: the error that was raised while the plan was measured.

    What is only known by measuring is None, () or "" if the plan was not measured.
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
        """Whether the solver has a plan within the budget."""
        return not self.reason


@dataclass(frozen=True)
class Comparison:
    """The answer of `gcsolve.compare`: one row for each solver and budget, in the order in which they were run.

    Attributes:
        model: the class of the model.
        device, cost, scope: what the plans are for.
        baseline_peak_bytes: the predicted store-all peak.
        floor_bytes: no schedule at all has a lower peak (proven).
        eager_peak_bytes: the measured peak of the untouched model; None if nothing was measured.
        solvers, budgets_bytes: what was compared.
        rows: the results.
        complete: False if it was interrupted, so that rows are missing.
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
        """The row of that solver and budget; None if the comparison was interrupted before it."""
        return next((r for r in self.rows if (r.solver, r.budget_bytes) == (solver, budget_bytes)), None)

    def summary(self) -> str:
        """Overhead and peak of each solver at each budget as a text table; then the measurements; then the errors."""
        parts = [self._title(), text_table(*self._matrix())]
        if self.measured:
            parts += ["", self._measured_title(), text_table(*self._measurements(), right=range(1, 6))]
        return "\n".join([*parts, *(["", *self._errors()] if self._errors() else [])])

    def _errors(self) -> list[str]:
        """A line for each distinct error, with the solver and the budget at which it came first."""
        lines: dict[str, str] = {}
        for r in self.rows:
            for text in (r.reason if r.status == FAILED else "", r.measure_error):
                if text:
                    lines.setdefault(text, f"{r.solver} at {size_text(r.budget_bytes)} failed: {text}")
        return list(lines.values())

    def _title(self) -> str:
        missing = len(self.solvers) * len(self.budgets_bytes) - len(self.rows)
        interruption = "" if self.complete else f"; INTERRUPTED, {missing} rows missing"
        return (
            f"{self.model}: store-all peak {size_text(self.baseline_peak_bytes)}, no schedule below "
            f"{size_text(self.floor_bytes)}; overhead ({self.cost} costs for {self.device}) and peak at each budget"
            f"{interruption}"
        )

    def _matrix(self) -> tuple[list[str], list[list[str]]]:
        """(heads of the columns, lines) of the table of overheads: a line for each solver, a column for each budget."""
        columns = ["solver"]
        columns += [f"{size_text(b)} ({b / self.baseline_peak_bytes:.0%})" for b in self.budgets_bytes]
        return columns, [[s, *(_cell(self.row(s, b)) for b in self.budgets_bytes)] for s in self.solvers]

    def _measured_title(self) -> str:
        assert self.eager_peak_bytes is not None
        return f"measured; untouched model {size_text(self.eager_peak_bytes)}"

    def _measurements(self) -> tuple[list[str], list[list[str]]]:
        """(heads of the columns, lines) of the table of measurements: a line for each plan that was measured."""
        columns = ["solver", "budget", "predicted", "measured", "overhead", "step time", "exact"]
        return columns, [
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
        """Everything as JSON text; also written to `path` if that is given."""
        text = json.dumps(dataclasses.asdict(self), indent=1)
        if path is not None:
            Path(path).write_text(text + "\n")
        return text

    def plot(self, ax: Any = None) -> Any:
        """Overhead against peak memory, one curve for each solver, with the proven bound shaded; returns matplotlib's Axes.

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
    """Plan `model` by each solver at each budget from one trace, and return all results side by side.

    Args:
        model, example_input: as for `solve`.
        budgets: fractions of the store-all peak, or sizes ("20GiB"); default: 0.9, 0.8, 0.7, 0.6, 0.5.
        budgets_gb: the budgets in GB (1e9 bytes), in place of `budgets`.
        solvers: names in `gcsolve.solvers()` or solver objects.
        measure: also run every plan that fits beside the untouched model, for its peak, step time and bitwise equality.
        steps, repeats: optimizer steps to compare and timed runs, as for `plan.verify`.
        time_limit_s, gap: as for `solve`, for each row.
        progress: as for `solve`.
        step: loss, optimizer, scope, cost, device, backward_from, gradient_accumulation, autocast_backward, as for `solve`.

    Returns:
        a `Comparison`. A solver that cannot meet a budget has a row with the reason; so has a solver of yours that raises
        or whose answer is not valid, and a plan that raises while it is measured. If it is interrupted (Ctrl-C), the
        comparison has the rows so far, and `complete` is False.

    Raises:
        TraceError: as `solve`.
        ArgumentError: as `solve`; or both kinds of budgets are given; or measure=True, and the weights are on meta or the
            plan is for another kind of device than theirs.

    Examples:
        >>> import torch, gcsolve
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
        >>> comparison = gcsolve.compare(model, torch.randn(256, 64), budgets=[0.9], solvers=["store_all", "auto"])
        >>> [row.fits for row in comparison.rows]
        [False, True]
    """
    budget_pairs = _budgets(budgets, budgets_gb)
    flag("measure", measure)
    labelled_solvers = _labels(solvers)
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
    sizes = tuple(dict.fromkeys(budget_bytes(gb, b, store_all_bytes) for gb, b in budget_pairs))
    options = {name: SolverOptions(solver, time_limit_s, gap) for name, solver in labelled_solvers.items()}
    rows: list[ComparisonRow] = []
    eager_peak_bytes: int | None = None
    complete = False
    try:
        with bar(progress, len(sizes) * len(options)) as begin:
            for size, name in itertools.product(sizes, options):
                begin(f"{name} at {size_text(size)}")
                row, solution = _predicted(session, name, options[name], size)
                if measure and row.fits:
                    assert solution is not None
                    plan = session.record(solution, size, options[name])
                    row, eager_peak_bytes = _measured(row, session, plan, steps, repeats, eager_peak_bytes)
                rows.append(row)
        complete = True
    except KeyboardInterrupt:
        pass  # the rows so far are returned; `complete` says that some are missing
    return Comparison(
        model=type(model).__name__,
        device=settings.device.name,
        cost=settings.cost.name,
        scope=settings.scope,
        baseline_peak_bytes=store_all_bytes,
        floor_bytes=peak_floor(session.problem)[0],
        eager_peak_bytes=eager_peak_bytes,
        solvers=tuple(labelled_solvers),
        budgets_bytes=sizes,
        rows=tuple(rows),
        complete=complete,
    )


def _budgets(budgets: Any, budgets_gb: Any) -> list[tuple[Any, Any]]:
    """A pair (budget_gb, budget) for each budget, one of the two None; else an `ArgumentError`."""
    if budgets is not None and budgets_gb is not None:
        raise ArgumentError("give one of budgets=[0.8, ...] and budgets_gb=[20, ...]; both were given")
    if budgets_gb is not None:
        pairs = [(gb, None) for gb in _several("budgets_gb", budgets_gb, "budget")]
    else:
        pairs = [(None, b) for b in _several("budgets", BUDGETS if budgets is None else budgets, "budget")]
    for gb, b in pairs:
        check_budget(gb, b)
    return pairs


def _several(name: str, value: Any, item: str) -> list[Any]:
    """The items of the argument `name`, an iterable (no text or mapping) with at least one; else an `ArgumentError`."""
    items = list(value) if isinstance(value, Iterable) and not isinstance(value, (str, Mapping)) else []
    if not items:
        raise ArgumentError(f"{name}={value!r} must be a list of at least one {item}")
    return items


def _labels(solvers: Any) -> dict[str, str | Solver]:
    """Label -> solver. The label is the solver's name, or its repr (with its settings) if several have that name."""
    distinct = {
        id(get_solver(s)): s for s in _several("solvers", solvers, "solver")
    }  # a solver that is given twice is run once
    names = [get_solver(s).name for s in distinct.values()]
    labels = [n if names.count(n) == 1 else repr(get_solver(s)) for n, s in zip(names, distinct.values(), strict=True)]
    return dict(zip(labels, distinct.values(), strict=True))


def _predicted(session: Session, name: str, options: SolverOptions, size: int) -> tuple[ComparisonRow, Solution | None]:
    """The row of the solver labelled `name` at a budget of `size` bytes, unmeasured, and its solution if it has a plan."""
    costs = session.call.costed
    problem = costs.problem.with_budget(size)
    try:
        refuse_below_floor(problem)
    except InfeasibleBudget as error:
        return _no_plan(name, size, Status.INFEASIBLE.name, str(error)), None
    try:
        solution = solve_problem(problem, options.solver, time_limit_s=options.time_limit_s, gap=options.gap)
    except SolverError as error:
        return _no_plan(name, size, FAILED, str(error)), None
    over = solution.schedule is None or solution.status is Status.OVER_BUDGET
    reason = str(infeasible(problem, solution)) if over else ""
    if solution.schedule is None:
        row = _no_plan(name, size, solution.status.name, reason)
        return dataclasses.replace(
            row, peak_bytes=solution.least_bytes, any_bound=solution.any_bound, solve_s=solution.solve_s
        ), None
    row = ComparisonRow(
        solver=name,
        budget_bytes=size,
        status=solution.status.name,
        reason=reason,
        peak_bytes=solution.peak_bytes,
        overhead=solution.overhead,
        overhead_flops=costs.overhead_flops(solution.schedule),
        lower_bound=solution.lower_bound,
        any_bound=solution.any_bound,
        gap=solution.gap,
        certificate=solution.bound_class,
        solve_s=solution.solve_s,
    )
    return row, solution


def _measured(
    row: ComparisonRow, session: Session, plan: PlanRecord, steps: int, repeats: int, eager_peak_bytes: int | None
) -> tuple[ComparisonRow, int | None]:
    """The row with the measurements of `plan`, and the measured peak of the untouched model (an earlier one if it fails)."""
    try:
        report = verify(plan, session, steps=steps, repeats=repeats)
    except Exception as error:  # running out of memory, for example, must not cost the other rows
        return dataclasses.replace(row, measure_error=f"{type(error).__name__}: {error}"), eager_peak_bytes
    measured = dataclasses.replace(
        row,
        measured_peak_bytes=report.measured_peak_bytes,
        time_ratio=report.time_ratio if repeats else None,
        exact=not report.differences,
        differences=report.differences,
    )
    return measured, report.eager_peak_bytes


def _no_plan(name: str, size: int, status: str, reason: str) -> ComparisonRow:
    """A row without a plan or bounds."""
    return ComparisonRow(
        solver=name,
        budget_bytes=size,
        status=status,
        reason=reason,
        peak_bytes=None,
        overhead=None,
        overhead_flops=None,
        lower_bound=0.0,
        any_bound=0.0,
        gap=None,
        certificate="",
        solve_s=0.0,
    )


_WITHOUT_PLAN = {Status.UNSUITED.name: "no plan (graph not taken)", FAILED: "failed (see below)"}


def _cell(row: ComparisonRow | None) -> str:
    """A row as a cell of the table of overheads."""
    if row is None:
        return "not run"
    if row.fits:
        return f"{row.overhead:.2%} ({size_text(row.peak_bytes or 0)})"
    if row.status in _WITHOUT_PLAN:
        return _WITHOUT_PLAN[row.status]
    return "no plan" if row.peak_bytes is None else f"no plan (least {size_text(row.peak_bytes)})"
