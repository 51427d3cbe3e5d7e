"""The schema of a saved plan's JSON, key by key, by which damaged and foreign files are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gcsolve.solver.base import Certificate, Status


def wrong(schema: Any, record: Any, where: str = "") -> str:
    """The first key of `record` that does not match `schema`, as a clause of an error text; "" if all keys match.

    Args:
        schema: a type: exactly that type; a dict: an object with at least these keys; a list of one schema: a list, of any
            length, of values that match it; a tuple of schemas: a list of as many values, each matching its schema; a
            function: a value for which it returns True, its docstring saying what that value must be.
        record: the parsed JSON, or a part of it.
        where: the key of that part, as in "settings.gap".
    """
    if isinstance(schema, dict):
        if not isinstance(record, dict):
            return _is(where, record, "an object")
        missing = [key for key in schema if key not in record]
        if missing:
            return f"key {_joined(where, missing[0])} is missing"
        return _first(wrong(inner, record[key], _joined(where, key)) for key, inner in schema.items())
    if isinstance(schema, (list, tuple)):
        if not isinstance(record, list):
            return _is(where, record, "a list")
        if isinstance(schema, tuple) and len(record) != len(schema):
            return _is(where, record, f"a list of {len(schema)}")
        inner = schema * len(record) if isinstance(schema, list) else schema
        return _first(wrong(s, f, f"{where}[{i}]") for i, (s, f) in enumerate(zip(inner, record, strict=True)))
    if isinstance(schema, type):
        return "" if type(record) is schema else _is(where, record, f"of type {schema.__name__}")
    return "" if schema(record) else _is(where, record, schema.__doc__)


def _first(texts: Iterable[str]) -> str:
    """The first text that is not empty; "" without one."""
    return next((text for text in texts if text), "")


def _joined(where: str, key: str) -> str:
    """The key of a child."""
    return f"{where}.{key}" if where else key


def _is(where: str, record: Any, expected: str | None) -> str:
    """The clause for a value that does not match."""
    text = repr(record)
    text = text if len(text) <= 40 else f"{text[:40]}…"
    return f"key {where} is {text}, not {expected}" if where else f"it is {text}, not {expected}"


# --- checks of single values; an error quotes the docstring ----------------------------------------------------------


def _number(value: Any) -> bool:
    """a finite number ≥ 0"""
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _size(value: Any) -> bool:
    """a whole number ≥ 0"""
    return type(value) is int and value >= 0


def _status(value: Any) -> bool:
    """the name of a status"""
    return value in Status.__members__ if isinstance(value, str) else False


def _certificate(value: Any) -> bool:
    """the words of a certificate"""
    return value in [certificate.value for certificate in Certificate]


def _scope(value: Any) -> bool:
    """a scope"""
    return value in ("step", "activations")


def _backward_from(value: Any) -> bool:
    """scalars or all"""
    return value in ("scalars", "all")


def _dtype(value: Any) -> bool:
    """a dtype of torch"""
    return isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)


def _device(value: Any) -> bool:
    """a device of torch"""
    try:
        return isinstance(value, str) and bool(torch.device(value))
    except RuntimeError:
        return False


def _optimizer(value: Any) -> bool:
    """an optimizer: null, a number, a class of torch.optim with its settings, or the name of another class"""
    if isinstance(value, list):
        name, settings = value if len(value) == 2 else (None, None)
        is_class = isinstance(name, str) and isinstance(getattr(torch.optim, name, None), type)
        return is_class and isinstance(settings, (dict, type(None)))
    return value is None or _number(value) or not wrong({"class": str}, value)


def _template(value: Any) -> bool:
    """the structure of an argument"""
    if not isinstance(value, dict) or not value:
        return False
    kind, content = next(iter(value.items()))
    return kind in _CONTENT and _CONTENT[kind](content)


def _or_null(inner: Any) -> Callable[[Any], bool]:
    """A check for null or a value that matches `inner`."""

    def check(value: Any) -> bool:
        return value is None or not wrong(inner, value)

    check.__doc__ = f"null or {getattr(inner, '__doc__', '') if not isinstance(inner, type) else inner.__name__}"
    return check


# Of each kind of argument in a template, the check of its content.
_CONTENT: dict[str, Callable[[Any], bool]] = {
    "tensor": _size,
    "value": lambda _: True,
    "dtype": _dtype,
    "list": lambda children: isinstance(children, list) and all(map(_template, children)),
    "tuple": lambda children: isinstance(children, list) and all(map(_template, children)),
    "dict": lambda children: isinstance(children, dict) and all(map(_template, children.values())),
    "opaque": lambda name: isinstance(name, str),
}

SCHEMA: dict[str, Any] = {
    "format": int,
    "gcsolve": str,
    "torch": str,
    "model": {"class": str, "training": bool, "tensors": [(str, str, [_size], bool)]},
    "context": (str, [(str, str)]),
    "input": {"tensors": [(_dtype, [_size], [_size], _device, bool)], "template": {"tuple": (_template, _template)}},
    "settings": {
        "loss": _or_null(str),
        "optimizer": _optimizer,
        "scope": _scope,
        "device": str,
        "cost": str,
        "backward_from": _backward_from,
        "gradient_accumulation": bool,
        "autocast_backward": bool,
        "solver": str,
        "time_limit_s": _number,
        "gap": _number,
    },
    "graph": {
        "external": [(str, _size)],
        "cost_unit": str,
        "ops": [(str, _size, _number, _size, bool, [_size], [(_size, bool, str, str)])],
        "estimated_workspace": [str],
        "estimated_cost": [str],
        "costed_by_bytes": [str],
    },
    "budget_bytes": _size,
    "baseline_peak_bytes": _size,
    "peak_bytes": _size,
    "solution": {
        "solver": str,
        "status": _status,
        "schedule": [int],
        "overhead": _number,
        "lower_bound": _number,
        "certificate": _certificate,
        "any_bound": _number,
        "gap": _number,
        "peak_bytes": _size,
        "solve_s": _number,
        "least_bytes": _or_null(_size),
        "least_node": _or_null(_size),
        "max_runs": _or_null(_size),
    },
}
