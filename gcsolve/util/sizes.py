"""Budgets and sizes between bytes and text: "20GiB" or a fraction of the store-all peak to bytes, bytes to "1.23 MB"."""

from __future__ import annotations

import re
from typing import Any

from gcsolve.errors import ArgumentError
from gcsolve.util.checks import number

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*(|k|m|g|t|ki|mi|gi|ti)b?\s*", re.IGNORECASE)


def budget_bytes(budget_gb: Any, budget: Any, store_all_bytes: int) -> int:
    """The budget in bytes. Exactly one of `budget_gb` and `budget` is not None.

    Args:
        budget_gb: gigabytes, 1 GB = 1e9 bytes.
        budget: a size ("20GiB", "800 MB"), or a fraction of the store-all peak in (0, 1].
        store_all_bytes: the store-all peak, which a fraction refers to.

    Raises:
        ArgumentError: both are given, or the value is not a positive finite size or fraction.
    """
    if budget_gb is not None and budget is not None:
        raise ArgumentError(
            'give one of budget_gb=<GB> and budget=<"20GiB" or a fraction of the store-all peak>, or neither for the '
            "device's memory; both were given"
        )
    if budget_gb is not None:
        advice = '; it is in GB: a size is written budget="20GiB", a share of the store-all peak budget=0.5'
        return int(number("budget_gb", budget_gb, above=0, advice=advice) * 10**9)
    if isinstance(budget, str):
        match = _SIZE.fullmatch(budget)
        if not match or match[0].strip().replace(".", "").isdigit():
            raise ArgumentError(
                f'budget={budget!r} is not a size; write for example "20GiB", "800MB", budget=0.5 or budget_gb=20'
            )
        return int(number("budget", float(match[1]), above=0) * _UNITS[match[2].lower()])
    fraction = number("budget", budget, above=0)
    if fraction > 1:
        raise ArgumentError(
            f"budget={budget!r} is above 1: as a number, budget is a fraction of the store-all peak; "
            f'for {budget!r} GB write budget_gb={budget!r}, for bytes write budget="{budget}B"'
        )
    return int(fraction * store_all_bytes)


def check_budget(budget_gb: Any, budget: Any) -> None:
    """Raise `ArgumentError` for a budget that cannot be one, before any work is done; both arguments None is allowed."""
    if budget_gb is not None or budget is not None:
        budget_bytes(budget_gb, budget, 1)


def size_text(size: float) -> str:
    """A number of bytes as text: 1234567 -> "1.23 MB" (decimal units)."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{int(size)} B"
