"""`Plan`: the answer of `gcsolve.solve`, a `PlanRecord` with methods to verify, draw, save and plan again."""

from __future__ import annotations

import copy
import dataclasses
import os
from dataclasses import dataclass, replace
from typing import Any

from gcsolve.errors import CallError
from gcsolve.evaluation.verify import VerifyReport, verify
from gcsolve.plan_record import MinimumBudget, PlanRecord, SolverOptions
from gcsolve.serialization.write import write_plan
from gcsolve.session import Session, check_request
from gcsolve.solver.base import Solution, Solver
from gcsolve.util.checks import check_limits


@dataclass(frozen=True, repr=False)
class Plan(PlanRecord):
    """A schedule for one training step of a model, and the module that runs it.

    Attributes:
        module: trains within the budget with the results of the original, whose parameters, buffers and attributes it shares.
        model_name: the class of the planned model.
        budget_bytes: the budget, counted as `scope` says.
        baseline_peak_bytes: the predicted peak when nothing is recomputed.
        solution: the solver's answer, with bound and gap.
        solver_options: solver, time limit and gap that were asked for.
        trace_s: seconds spent on trace and costs; `solution.solve_s` has those of the solver.
        session: the traced call, from which other plans are made without tracing again.
    """

    session: Session

    @classmethod
    def of(cls, session: Session, solution: Solution, allowed_bytes: int, options: SolverOptions) -> Plan:
        """The plan of `solution`, which `session` found for `allowed_bytes` and `options`."""
        record = session.record(solution, allowed_bytes, options)
        data = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
        return cls(**data, session=session)

    @classmethod
    def solved(
        cls, session: Session, allowed_bytes: int, options: SolverOptions, progress: bool | None = False
    ) -> Plan:
        """Solve the session's step for a budget of `allowed_bytes`, and emit the plan.

        Raises:
            InfeasibleBudget: the solver has no plan within the budget.
        """
        return cls.of(session, session.solution(allowed_bytes, options, progress), allowed_bytes, options)

    def verify(self, steps: int = 3, **options: Any) -> VerifyReport:
        """Run the plan and the untouched model side by side for `steps` optimizer steps and compare everything bitwise.

        Args:
            steps: optimizer steps (≥ 1), with the plan's optimizer, or plain SGD if it has none.
            options: `repeats`: timed forward-backward runs of each model, in turn (default 3; 0: no timing).

        Raises:
            ArgumentError: the weights are on meta, or neither model nor inputs are on the plan's kind of device.
        """
        return verify(self, self.session, steps=steps, **options)

    def at(
        self,
        budget_gb: float | None = None,
        *,
        budget: str | float | None = None,
        solver: str | Solver | None = None,
        time_limit_s: float | None = None,
        gap: float | None = None,
        progress: bool | None = None,
    ) -> Plan:
        """The same model and input planned for another budget or by another solver, without tracing again.

        Args:
            budget_gb, budget: as for `gcsolve.solve`; if neither is given, this plan's budget.
            solver, time_limit_s, gap: as for `gcsolve.solve`; each that is not given is this plan's.
            progress: as for `gcsolve.solve`.

        Raises:
            InfeasibleBudget, ArgumentError: as `gcsolve.solve`.
        """
        changes = {"solver": solver, "time_limit_s": time_limit_s, "gap": gap}
        options = replace(self.solver_options, **{name: value for name, value in changes.items() if value is not None})
        check_request(budget_gb, budget, options)
        unchanged = budget_gb is None and budget is None
        allowed_bytes = self.budget_bytes if unchanged else self.session.budget_bytes(budget_gb, budget)
        return Plan.solved(self.session, allowed_bytes, options, progress)

    def minimum_budget(self, time_limit_s: float = 60.0) -> MinimumBudget:
        """`gcsolve.minimum_budget` for this model and input, without tracing again."""
        check_limits(time_limit_s)
        return self.session.minimum(time_limit_s)

    def plot_memory(self, ax: Any = None) -> Any:
        """Memory over the step by category, with store-all, budget and peak; returns matplotlib's Axes (extra `viz`)."""
        from gcsolve.report import figures

        return figures.memory(self, ax)

    def plot_schedule(self, ax: Any = None) -> Any:
        """When the forward values of each module are alive, and when they are recomputed; returns matplotlib's Axes."""
        from gcsolve.report import figures

        return figures.schedule(self, ax)

    def plot_layers(self, ax: Any = None) -> Any:
        """Bytes kept and bytes recomputed of each module; returns matplotlib's Axes."""
        from gcsolve.report import figures

        return figures.layers(self, ax)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write a self-contained HTML page: timeline, what is alive at every moment and why, a search, and the decisions."""
        from gcsolve.report.page import save_html

        save_html(self, path)

    def _repr_html_(self) -> str:
        from gcsolve.report.page import notebook_html

        return notebook_html(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file, for `gcsolve.load_plan(path, model)`.

        Raises:
            OSError: the file cannot be written.
        """
        write_plan(self, self.session, path)

    def __reduce__(self) -> Any:
        raise CallError(
            "a Plan is not pickled, for it holds code that was made for this process; plan.save(path) writes it, "
            "gcsolve.load_plan(path, model) reads it"
        )

    def __copy__(self) -> Plan:
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        """The same plan for a copy of the model."""
        return replace(self, module=copy.deepcopy(self.module, memo))
