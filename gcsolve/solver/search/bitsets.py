"""Sets of values as the bits of one int: what searches over many sets of values hash and join quickly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def bits(values: Iterable[int]) -> int:
    """The set of `values`, each >= 0."""
    return sum(1 << v for v in set(values))


def members(bits: int) -> Iterator[int]:
    """The values of a set, least first."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
