"""Attributes of shared objects (modules, classes, operators) that have another value for one thread alone.

Python keeps one value of an attribute for all threads. So, while any thread wants a value of its own, a *dispatcher* stands
in the attribute's place: it gives that thread its own value, and every other thread what was there before. Dispatchers are
counted: the first thread that enters puts one in place, and the last one that leaves takes it away, in whatever order they
come and go.

| the attribute is | its dispatcher is |
|---|---|
| in a class | a descriptor, which binds the value of the thread that reads it |
| a function | a function that calls the thread's own |
| a mapping | a mapping that reads the thread's own |
| a list of filters (`warnings.filters`) | a filter at its head, which matches in a thread that has a value of its own |
| a stream | an object whose attributes are those of the thread's own |
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING: Any = _Missing()
"""In place of the original value of an attribute that a class does not have itself."""


class _OwnValues(threading.local):
    """The values that the running thread has for one attribute, innermost last."""

    stack: tuple[Any, ...] = ()


class Slot:
    """One attribute of one shared object, while a dispatcher stands in its place.

    `original`: its value before. `others`: its value for threads that have none of their own.
    """

    def __init__(self, owner: Any, name: str, others: Callable[[Any], Any] | None) -> None:
        self.owner, self.name, self.users = owner, name, 0
        self.original = _raw(owner, name)
        self.others = self.original if others is None else others(self.original)
        self.own = _OwnValues()
        self.dispatcher = self._dispatcher()

    def value(self) -> Any:
        """The attribute's value for the running thread."""
        stack = self.own.stack
        return stack[-1] if stack else self.others

    def _dispatcher(self) -> Any:
        if isinstance(self.owner, type):
            return _Attribute(self)
        if isinstance(self.original, MutableMapping):
            return _Mapping(self)
        if hasattr(self.original, "write"):
            return _Stream(self)
        if callable(self.original):
            return _function(self)
        raise TypeError(f"{self.owner}.{self.name} is {self.original!r}, for which there is no dispatcher")

    def in_place(self) -> bool:
        """Whether the dispatcher is still what the owner has: other code may have replaced it in turn."""
        return _raw(self.owner, self.name) is self.dispatcher

    def put_in_place(self) -> None:
        setattr(self.owner, self.name, self.dispatcher)

    def take_away(self) -> None:
        if not self.in_place():
            return  # the code that replaced it may call it, and then gets the original
        if self.original is MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)


class _FilterSlot(Slot):
    """A list of filters as `warnings` has them: (action, message, category, module, line). The one that is put at its head
    matches every message, in the threads that have an action of their own; it is the same for all of them."""

    def _dispatcher(self) -> Any:
        return ("ignore", self, Warning, None, 0)

    def match(self, _text: str) -> bool:
        """As of a compiled regular expression, which is what `warnings` expects to have."""
        return bool(self.own.stack)

    def in_place(self) -> bool:
        return any(item is self.dispatcher for item in getattr(self.owner, self.name))

    def put_in_place(self) -> None:
        self.original.insert(0, self.dispatcher)

    def take_away(self) -> None:
        for filters in (
            self.original,
            getattr(self.owner, self.name),
        ):  # `catch_warnings` may have put another list there
            with contextlib.suppress(ValueError):
                filters.remove(self.dispatcher)


_slots: dict[tuple[int, str], Slot] = {}
_lock = threading.RLock()


@contextlib.contextmanager
def own_value(
    owner: Any, name: str, make: Callable[[Any], Any], others: Callable[[Any], Any] | None = None
) -> Iterator[None]:
    """In this block and this thread, `owner.name` is `make(original)`.

    Args:
        others: `others(original)` is the value for all other threads meanwhile; None: the original.
    """
    with _lock:
        slot = _slots.get((id(owner), name))
        if slot is None or not slot.in_place():
            kind = _FilterSlot if isinstance(_raw(owner, name), list) else Slot
            slot = _slots[id(owner), name] = kind(owner, name, others)
            slot.put_in_place()
        slot.users += 1
    before = slot.own.stack
    try:
        slot.own.stack = (*before, make(slot.original))
        yield
    finally:
        slot.own.stack = before
        with _lock:
            slot.users -= 1
            if not slot.users:
                slot.take_away()
                if _slots.get((id(owner), name)) is slot:
                    del _slots[id(owner), name]


_changes: dict[Any, tuple[int, contextlib.ExitStack]] = {}


@contextlib.contextmanager
def shared_change(key: Any, change: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """In this block, what `change()` does is in force, for all threads; it ends with the last block of that key."""
    with _lock:
        users, undo = _changes.get(key, (0, contextlib.ExitStack()))
        if not users:
            undo.enter_context(change())
        _changes[key] = users + 1, undo
    try:
        yield
    finally:
        with _lock:
            users, undo = _changes.pop(key)
            if users > 1:
                _changes[key] = users - 1, undo
            else:
                undo.close()


def _raw(owner: Any, name: str) -> Any:
    """The attribute as its owner has it: not bound, and in a class not one that it inherits."""
    return vars(owner).get(name, MISSING) if isinstance(owner, type) else getattr(owner, name)


# --- dispatchers -----------------------------------------------------------------------------------------------------


class _Attribute:
    """An attribute of a class. Where the class itself has none, its `__getattr__` is asked, as before."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        value = self._slot.value()
        if value is MISSING:
            raise AttributeError(self._slot.name)
        bind = getattr(type(value), "__get__", None)
        return value if bind is None else bind(value, instance, owner)


def _function(slot: Slot) -> Callable[..., Any]:
    @functools.wraps(slot.original)
    def dispatcher(*args: Any, **kwargs: Any) -> Any:
        return slot.value()(*args, **kwargs)

    return dispatcher


class _Mapping(MutableMapping[Any, Any]):
    """What a thread writes that has a mapping of its own goes into the original too, and stays there."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot

    def __getitem__(self, key: Any) -> Any:
        return self._slot.value()[key]

    def __contains__(self, key: object) -> bool:
        return key in self._slot.value()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._slot.value())

    def __len__(self) -> int:
        return len(self._slot.value())

    def __setitem__(self, key: Any, value: Any) -> None:
        self._slot.value()[key] = value
        self._slot.original[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._slot.value()[key]
        self._slot.original.pop(key, None)

    def copy(self) -> dict[Any, Any]:
        return dict(self._slot.value())


class _Stream:
    def __init__(self, slot: Slot) -> None:
        object.__setattr__(self, "_slot", slot)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slot.value(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._slot.value(), name, value)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._slot.value())
