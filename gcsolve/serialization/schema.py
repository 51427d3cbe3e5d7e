"""What a saved plan's JSON must hold, key by key: the one place that tells a plan from a damaged or foreign file."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from gcsolve.solver.base import Certificate, Status


def wrong(schema: Any, found: Any, where: str = "") -> str:
    """The first key of `found` that is not as `schema` says, in words; "" when all are.

    Args:
        schema: a type (exactly that), a dict (these keys), a list of one (any number of such), a tuple (a list of these,
            in order), or a function that says whether a value is right, with what it wants as its first line of text.
        where: the key so far, as in "settings.gap".
    """
    if isinstance(schema, dict):
        if not isinstance(found, dict):
            return _is(where, found, "an object")
        missing = [key for key in schema if key not in found]
        if missing:
            return f"key {_joined(where, missing[0])} is missing"
        return _first(wrong(inner, found[key], _joined(where, key)) for key, inner in schema.items())
    if isinstance(schema, (list, tuple)):
        if not isinstance(found, list):
            return _is(where, found, "a list")
        if isinstance(schema, tuple) and len(found) != len(schema):
            return _is(where, found, f"a list of {len(schema)}")
        inner = schema * len(found) if isinstance(schema, list) else schema
        return _first(wrong(s, f, f"{where}[{i}]") for i, (s, f) in enumerate(zip(inner, found, strict=True)))
    if isinstance(schema, type):
        return "" if type(found) is schema else _is(where, found, f"of type {schema.__name__}")
    return "" if schema(found) else _is(where, found, schema.__doc__)


def _first(texts: Any) -> str:
    return next((text for text in texts if text), "")


def _joined(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _is(where: str, found: Any, wanted: str | None) -> str:
    text = repr(found)
    text = text if len(text) <= 40 else f"{text[:40]}…"
    return f"key {where} is {text}, not {wanted}" if where else f"it is {text}, not {wanted}"


# --- what single values must be; the doc string is what the error says -------------------------------------------------


def _number(found: Any) -> bool:
    """a finite number ≥ 0"""
    return type(found) in (int, float) and math.isfinite(found) and found >= 0


def _size(found: Any) -> bool:
    """a whole number ≥ 0"""
    return type(found) is int and found >= 0


def _status(found: Any) -> bool:
    """the name of a status"""
    return found in Status.__members__ if isinstance(found, str) else False


def _certificate(found: Any) -> bool:
    """the words of a certificate"""
    return found in [certificate.value for certificate in Certificate]


def _scope(found: Any) -> bool:
    """a scope"""
    return found in ("step", "activations")


def _backward_from(found: Any) -> bool:
    """scalars or all"""
    return found in ("scalars", "all")


def _dtype(found: Any) -> bool:
    """a dtype of torch"""
    return isinstance(found, str) and isinstance(getattr(torch, found, None), torch.dtype)


def _device(found: Any) -> bool:
    """a device of torch"""
    try:
        return isinstance(found, str) and bool(torch.device(found))
    except RuntimeError:
        return False


def _optimizer(found: Any) -> bool:
    """an optimizer: null, a number, a class of torch.optim with its settings, or the name of another class"""
    if isinstance(found, list):
        name, settings = found if len(found) == 2 else (None, None)
        known = isinstance(name, str) and isinstance(getattr(torch.optim, name, None), type)
        return known and isinstance(settings, (dict, type(None)))
    return found is None or _number(found) or not wrong({"class": str}, found)


def _template(found: Any) -> bool:
    """the structure of an argument"""
    if not isinstance(found, dict) or not found:
        return False
    kind, content = next(iter(found.items()))
    return kind in _CONTENT and _CONTENT[kind](content)


def _or_null(inner: Any) -> Callable[[Any], bool]:
    def check(found: Any) -> bool:
        return found is None or not wrong(inner, found)

    check.__doc__ = f"null or {getattr(inner, '__doc__', '') if not isinstance(inner, type) else inner.__name__}"
    return check


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
