"""Checks of numbers and flags that the user passes: one wording of their errors for every argument. A bool is not a number."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from gcsolve.errors import ArgumentError, GcsolveError


def number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    of: str = "",
    advice: str = "",
    error: type[GcsolveError] = ArgumentError,
) -> float:
    """`value` as a float, if it is a finite number ≥ 0, or > `above` where that is given.

    Args:
        name: the argument, as the error text names it.
        value: what the user passed.
        above: the exclusive lower limit; None: 0, inclusive.
        of: follows the value in the error text and says what it belongs to, as in " of node 3 (mul)".
        advice: ends the error text and says what to do, as in "; write ...".
        error: the type that is raised.

    Raises:
        error: `value` is not such a number.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if is_number and math.isfinite(value):
        as_float = float(value)
        if as_float >= 0 if above is None else as_float > above:
            return as_float
    requirement = f"a finite number {'≥ 0' if above is None else f'above {above:g}'}"
    kind = "" if is_number else f", not of type {type(value).__name__}"
    raise error(f"{name}={value!r}{of} must be {requirement}{kind}{advice}")


def whole(
    name: str,
    value: Any,
    *,
    least: int = 0,
    floats: bool = True,
    of: str = "",
    error: type[GcsolveError] = ArgumentError,
) -> int:
    """`value` as an int, if it is a whole number ≥ `least`. Nothing is rounded.

    Args:
        name, of, error: as for `number`.
        value: what the user passed; numpy's integers are whole numbers too.
        least: the inclusive lower limit.
        floats: whether a float with a whole value (16.0, 1e9) is accepted.

    Raises:
        error: `value` is not such a number.
    """
    if type(value) is int and value >= least:
        return value
    accepted: Any = Real if floats else Integral
    if not isinstance(value, bool) and isinstance(value, accepted) and math.isfinite(value):
        as_int = int(value)
        if as_int == value and as_int >= least:
            return as_int
    raise error(f"{name}={value!r}{of} must be a whole number ≥ {least}")


def flag(name: str, value: Any) -> bool:
    """`value`, if it is True or False; else an `ArgumentError`."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{name}={value!r} is neither True nor False")
    return value


def check_limits(time_limit_s: Any, gap: Any = 0.0) -> None:
    """Raise `ArgumentError` for a time limit in seconds, or a relative gap, that is not a finite number ≥ 0."""
    number("time_limit_s", time_limit_s)
    number("gap", gap)
