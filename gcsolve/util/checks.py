"""What a number that the user gave must be: one place, one wording, for every argument. A bool is no number."""

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
    """`value` as a float: a finite number ≥ 0, or above `above` where that is given.

    Args:
        name: the argument, for the text; `of`: what it belongs to, as in " of node 3 (mul)".
        advice: ends the text, as in "; write ...".
        error: raised when it is none.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if is_number and math.isfinite(value):
        found = float(value)
        if found >= 0 if above is None else found > above:
            return found
    wanted = f"a finite number {'≥ 0' if above is None else f'above {above:g}'}"
    kind = "" if is_number else f", not of type {type(value).__name__}"
    raise error(f"{name}={value!r}{of} must be {wanted}{kind}{advice}")


def whole(
    name: str,
    value: Any,
    *,
    least: int = 0,
    floats: bool = True,
    of: str = "",
    error: type[GcsolveError] = ArgumentError,
) -> int:
    """`value` as an int: a whole number ≥ `least`, numpy's too, and with `floats` also 16.0 or 1e9; nothing is cut off."""
    if type(value) is int and value >= least:
        return value
    accepted: Any = Real if floats else Integral
    if not isinstance(value, bool) and isinstance(value, accepted) and math.isfinite(value):
        found = int(value)
        if found == value and found >= least:
            return found
    raise error(f"{name}={value!r}{of} must be a whole number ≥ {least}")


def flag(name: str, value: Any) -> bool:
    """`value`, which must be True or False."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{name}={value!r} is neither True nor False")
    return value


def check_limits(time_limit_s: Any, gap: Any = 0.0) -> None:
    """Refuse a time limit or a gap that is no finite number ≥ 0."""
    number("time_limit_s", time_limit_s)
    number("gap", gap)
