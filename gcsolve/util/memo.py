"""Results that are kept in memory for the process: safe for threads, and limited in number."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Memo(Generic[Value]):
    """A dictionary of results, of which the `size` that were used last are kept.

    Examples:
        >>> squares = Memo[int](size=2)
        >>> [squares.recall(n, lambda: n * n) for n in (1, 2, 3)]
        [1, 4, 9]
        >>> len(squares)
        2
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._kept: OrderedDict[Hashable, Value] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Hashable]:
        with self._lock:
            return iter(tuple(self._kept))

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def get(self, key: Hashable) -> Value | None:
        """The result for that key; None where there is none."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key]

    def keep(self, key: Hashable, result: Value) -> Value:
        """Keep a result, unless there is one for that key already; the one that is kept."""
        with self._lock:
            kept = self._kept.setdefault(key, result)
            self._kept.move_to_end(key)
            if len(self._kept) > self.size:
                self._kept.popitem(last=False)
            return kept

    def recall(self, key: Hashable, compute: Callable[[], Value]) -> Value:
        """The result for that key, from `compute()` where there is none. Threads that ask at the same time may each compute
        it, and get the same one."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        return self.keep(key, compute())

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
