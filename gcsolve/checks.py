"""What a number that the user gave must be: one place, one wording, for every argument. A bool is no number."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from gcsolve.errors import ArgumentError, GcsolveError


def number(
    name: str, value: Any, *, above: float | None = None, of: str = "", error: type[GcsolveError] = ArgumentError
) -> float:
    """`value` as a float: a finite number ≥ 0, or above `above` where that is given.

    Args:
        name: the argument, for the text; `of`: what it belongs to, as in " of node 3 (mul)".
        error: raised when it is none.
    """
    if not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value):
        found = float(value)
        if found >= 0 if above is None else found > above:
            return found
    raise error(f"{name}={value!r}{of} must be a finite number {'≥ 0' if above is None else f'above {above:g}'}")


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


def check_limits(time_limit_s: Any, gap: Any = 0.0) -> None:
    """Refuse a time limit or a gap that is no finite number ≥ 0."""
    number("time_limit_s", time_limit_s)
    number("gap", gap)
