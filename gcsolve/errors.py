"""One exception tree: every error that gcsolve raises on purpose is a `GcsolveError`."""

from __future__ import annotations


class GcsolveError(Exception):
    """Root of every error gcsolve raises on purpose."""


class ArgumentError(GcsolveError, ValueError):
    """An argument has a value that cannot be used; the text names the argument, the value and what is accepted."""


class UnsuitedSolver(ArgumentError):
    """The named solver does not take a graph of this kind or size."""


class TraceError(GcsolveError):
    """The model could not be traced to a joint forward and backward graph."""


class InvalidGraph(GcsolveError, ValueError):
    """A `Graph` or `Problem` breaks one of its own rules."""


class InvalidSchedule(GcsolveError):
    """A schedule reads a value that is not live, frees one that is not, or leaves an op out."""


class SolverError(GcsolveError):
    """A solver of one's own raised, or its answer is not what it says; the text names it and what is wrong."""


class MissingBackend(GcsolveError, ImportError):
    """An optional library is needed and not installed; the text gives the command that installs it."""


class PlanMismatch(GcsolveError):
    """A saved plan is for another model, mode, torch release or graph than it is loaded for."""


class CallError(GcsolveError):
    """A planned module was called in a way that it cannot serve exactly."""


class InfeasibleBudget(GcsolveError):
    """No plan of the searched class fits the budget.

    Attributes: `budget_bytes` asked for; `least_bytes`, the least budget for which a plan was found (None: none was looked
    for); `floor_bytes`, what every schedule is proven to need. `op`, `module`, `source`: the op that sets the floor where
    the budget is below it, else `least_bytes`; its module path and the user's source line. All of them have defaults, for an
    exception is unpickled from its message alone and then given the rest.
    """

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int = 0,
        least_bytes: int | None = None,
        floor_bytes: int = 0,
        op: str = "",
        module: str = "",
        source: str = "",
    ) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.least_bytes = least_bytes
        self.floor_bytes = floor_bytes
        self.op = op
        self.module = module
        self.source = source
