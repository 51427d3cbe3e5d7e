"""The user's factory, a function that returns a model: found by name, checked and called; errors name the call and the line."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

from gcsolve.errors import ArgumentError, GcsolveError

RETURNS = "(model, example_input) or (model, example_input, loss)"

FactoryResult = tuple[Any, Any, Callable[[Any], Any] | None]  # (model, example_input, loss)


def named_factory(target: str) -> Callable[..., Any]:
    """The function that `target`, of the form "module:function", names; the current folder is on the module search path.

    Raises:
        ArgumentError: `target` has another form, there is no such module or function, or importing the module raises
            (that exception is the error's cause).
    """
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise ArgumentError(f"{target!r} is not of the form module:factory, as in my_models:small")
    if module_name.endswith(".py") or "/" in module_name or os.sep in module_name:
        module = ".".join(part for part in PurePath(module_name).with_suffix("").parts if part not in (".", os.sep))
        raise ArgumentError(f"{target!r} names a file; write the module, seen from the current folder: {module}:{name}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # an installed script does not look in the current folder by itself
    try:
        module = importlib.import_module(module_name)
    except GcsolveError:
        raise
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            raise ArgumentError(f"there is no module {missing!r} here (looked for {target!r})") from error
        raise ArgumentError(f"{target}: importing {module_name} {_raised(error)}") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise ArgumentError(f"{module_name} has no function {name!r}")
    return factory


def call_factory(factory: Callable[..., Any], keywords: Mapping[str, int] | None = None) -> FactoryResult:
    """`factory(**keywords)` as (model, example_input, loss); the loss is None if the factory returns only the first two.

    Raises:
        ArgumentError: the factory does not accept these arguments, raises (that exception is the error's cause), or returns
            something else.
        GcsolveError: raised by gcsolve inside the factory, and passed on unchanged.
    """
    keywords = keywords or {}
    call = f"{factory_name(factory)}({', '.join(f'{k}={v}' for k, v in keywords.items())})"
    _check_signature(factory, call, keywords)
    try:
        result = factory(**keywords)
    except GcsolveError:
        raise
    except Exception as error:
        raise ArgumentError(f"the factory {call} {_raised(error)}") from error
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise ArgumentError(f"the factory {call} returned {type(result).__name__}; it must return {RETURNS}")
    return result[0], result[1], result[2] if len(result) == 3 else None


def factory_name(factory: Callable[..., Any]) -> str:
    """The factory's name as the command line writes it: "my_models:small"."""
    while isinstance(factory, functools.partial):
        factory = factory.func
    kind: Any = factory if hasattr(factory, "__qualname__") else type(factory)
    return f"{kind.__module__}:{kind.__qualname__}"


def parameters_of(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """The factory's parameters by name; None for a callable without a signature (some that are written in C)."""
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return None


def _check_signature(factory: Callable[..., Any], call: str, keywords: Mapping[str, int]) -> None:
    """Raise `ArgumentError` if `factory(**keywords)` does not match the factory's signature; `call` is its text."""
    parameters = parameters_of(factory)
    if parameters is None:
        return
    try:
        inspect.signature(factory).bind(**keywords)
    except TypeError as error:
        raise ArgumentError(
            f"the factory takes ({', '.join(map(str, parameters.values()))}), and it is called as {call}: {error}. Give "
            "what is missing a default"
        ) from error


def _raised(error: Exception) -> str:
    """The exception as the end of a sentence: "raised ValueError at models.py:3: bad width"."""
    from gcsolve.util.source import user_line

    line = user_line(error)
    return f"raised {type(error).__name__}{f' at {line}' if line else ''}: {error}"
