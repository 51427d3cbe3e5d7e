"""name -> solver. A solver is registered by one line here; a test checks that every solver file has one."""

from __future__ import annotations

from gcsolve.errors import ArgumentError
from gcsolve.solver.auto import Auto
from gcsolve.solver.base import Solver
from gcsolve.solver.blocks import Blocks
from gcsolve.solver.brute_force import BruteForce
from gcsolve.solver.checkmate import Checkmate
from gcsolve.solver.chen import Chen
from gcsolve.solver.greedy import Greedy
from gcsolve.solver.knapsack import Knapsack
from gcsolve.solver.moccasin import Moccasin
from gcsolve.solver.retention import Retention
from gcsolve.solver.revolve import Revolve
from gcsolve.solver.rotor import Rotor
from gcsolve.solver.store_all import StoreAll
from gcsolve.solver.uniform import Uniform, UniformSqrt

_SOLVERS: tuple[Solver, ...] = (
    Auto(),
    Retention(),
    StoreAll(),
    Uniform(),
    UniformSqrt(),
    Blocks(),
    Chen(),
    Greedy(),
    Revolve(),
    Rotor(),
    Knapsack(),
    Checkmate(),
    Moccasin(),
    BruteForce(),
)
SOLVERS: dict[str, Solver] = {s.name: s for s in _SOLVERS}


def solvers() -> tuple[str, ...]:
    """Names that `solver=` accepts."""
    return tuple(SOLVERS)


def get_solver(solver: str | Solver) -> Solver:
    """The solver of that name, upper case or lower, or the solver itself.

    Raises:
        ArgumentError: no solver has that name (the text lists the known), or it is no object with `name` and `solve`.
    """
    if isinstance(solver, str):
        if solver.lower() in SOLVERS:
            return SOLVERS[solver.lower()]
        raise ArgumentError(f"solver={solver!r} is not known; known solvers: {', '.join(solvers())}")
    if isinstance(solver, type):
        raise ArgumentError(f"solver={solver.__name__} is a class; pass an instance, {solver.__name__}()")
    if isinstance(solver, Solver) and isinstance(solver.name, str) and solver.name and callable(solver.solve):
        return solver
    raise ArgumentError(
        f"solver={solver!r} is neither a name nor an object with a name and solve(problem, *, time_limit_s, gap); "
        f"names: {', '.join(solvers())}"
    )


def is_built_in(solver: Solver) -> bool:
    """Whether its class is registered here, whatever its settings."""
    return any(type(solver) is type(known) for known in _SOLVERS)
