"""Sets of values as the bits of one int: what searches over many sets of values hash and join quickly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def bits(values: Iterable[int]) -> int:
    """The set of `values`, each >= 0."""
    return sum(1 << v for v in set(values))


def members(bits: int) -> Iterator[int]:
    """The values of a set, least first."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


class Weights:
    """Sums of weights over sets, a byte of bits at a time."""

    def __init__(self, weights: Sequence[int]) -> None:
        self.width = (len(weights) + 7) // 8
        self.tables = [_sums(weights[first : first + 8]) for first in range(0, len(weights), 8)]

    def of(self, bits: int) -> int:
        """The weight of a set."""
        return sum(
            [table[byte] for table, byte in zip(self.tables, bits.to_bytes(self.width, "little"), strict=True) if byte]
        )


def _sums(weights: Sequence[int]) -> list[int]:
    """By subset of up to eight weights."""
    sums = [0]
    for weight in weights:
        sums += [s + weight for s in sums]
    return sums
