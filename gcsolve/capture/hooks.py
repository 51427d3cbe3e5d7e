"""Hooks of a model's submodules.

What a forward hook computes from its module's tensors is part of forward, and is traced with it. What it changes elsewhere
(a counter, a list of outputs) would happen once, while planning, and never again: what it can reach is compared around a run
on fakes, put back, and refused by name.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType, NoneType
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from gcsolve._torch import global_module_hooks
from gcsolve.capture.module_state import CODE, OWN_STATE, PLAIN, changed_attribute, identity, token
from gcsolve.errors import TraceError
from gcsolve.util.source import code_name, is_user_file


def refuse_hooks(model: nn.Module) -> None:
    """Hooks that a planned step would not run: those of every module there is, and backward hooks of submodules."""
    if global_module_hooks():
        raise TraceError(
            "hooks for all modules are registered (torch.nn.modules.module.register_module_*_hook), which would not run in "
            "a planned step; remove them, or put hooks on the model itself or on its parameters"
        )
    if any(isinstance(hook, SpectralNorm) for hook in model._forward_pre_hooks.values()):
        raise TraceError(
            "torch.nn.utils.spectral_norm is on the model itself: its hook makes the weight before a planned step begins, not "
            "yet when it is planned. Use torch.nn.utils.parametrizations.spectral_norm, or plan torch.nn.Sequential(model)"
        )
    for name, module in model.named_modules():
        kinds = {"backward hook": module._backward_hooks, "backward pre-hook": module._backward_pre_hooks}
        for kind, hook in () if module is model else _own_hooks(kinds):
            raise TraceError(
                f"submodule {name} ({type(module).__name__}) has the {kind} {code_name(hook)}, which a planned step would not "
                "call. Remove it, put it on the model itself or on a parameter, make what it computes part of forward, or "
                "plan the submodules beside it: model.part = gcsolve.solve(model.part, ...).module"
            )


def forward_hooks(model: nn.Module) -> list[tuple[str, str, Any]]:
    """(submodule, kind, hook) of those that are traced as part of forward; the model's own run around every planned one."""
    return [
        (name, kind, hook)
        for name, module in model.named_modules()
        if module is not model and (module._forward_hooks or module._forward_pre_hooks)
        for kind, hook in _own_hooks(
            {"forward hook": module._forward_hooks, "forward pre-hook": module._forward_pre_hooks}
        )
    ]


def _own_hooks(kinds: dict[str, Any]) -> list[tuple[str, Any]]:
    """The user's: torch's own make a weight from others in forward."""
    found = [(kind, hook) for kind, hooks in kinds.items() for hook in hooks.values()]
    return [
        (kind, hook) for kind, hook in found if not getattr(type(hook), "__module__", "").startswith("torch.nn.utils")
    ]


def hooks_token(model: nn.Module) -> Any:
    """Equal for two moments between which no submodule's forward hook, and nothing that it can reach, has changed."""
    own = {id(module) for module in model.modules()}
    return tuple((name, kind, _token(hook, own)) for name, kind, hook in forward_hooks(model))


class HooksRefused:
    """A forward hook of a submodule that changes something in this block, other than its module, is an error afterwards.

    Raises:
        TraceError: naming the hook and what it changes, which is put back.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> None:
        own = {id(module) for module in self.model.modules()}  # what is set on these is followed
        self.before = [
            (name, kind, hook, [(place, _Content(place.value, set(own))) for place in _reach(hook)])
            for name, kind, hook in forward_hooks(self.model)
        ]

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        refused = ""
        for name, kind, hook, places in self.before:
            for place, content in places:
                if place.now() is place.value and not content.changed():
                    continue
                content.put_back()
                place.put_back()
                refused = refused or f"the {kind} {code_name(hook)} of submodule {name} changes {place.name}"
        if refused and error is None:
            raise TraceError(
                f"{refused}, and a planned step would not: it has what a hook computes from its module's tensors, not what it "
                "changes elsewhere. Put it on the model itself, where it is called in every step, or let it store tensors on "
                "its module (module.seen = output)"
            )


# --- hooks that forward registers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class NewHook:
    """A forward hook that the first call registers on submodule `name`, as `Setting` is a plain value that it sets.

    `kind`: "hook" or "pre_hook"; `key`: that of its handle; `flags`: which of torch's tables of special hooks it is in.
    """

    name: str
    kind: str
    key: int
    hook: Any
    flags: tuple[str, ...]

    def apply(self, model: nn.Module, *, back: bool = False) -> None:
        """Register it where no hook does the same; `back`: remove it."""
        module = model.get_submodule(self.name)
        hooks = vars(module)[f"_forward_{self.kind}s"]
        tables = [hooks, *(vars(module)[flag] for flag in self.flags)]
        if back:
            for table in tables:
                table.pop(self.key, None)
        elif _token(self.hook, set()) not in [_token(hook, set()) for hook in hooks.values()]:
            hooks[self.key] = self.hook
            for table in tables[1:]:
                table[self.key] = True

    def __str__(self) -> str:
        return f"the hooks of submodule {self.name} (it registers {code_name(self.hook)})"


class Hooks:
    """The hooks of a model's modules at one moment, and what forward has registered since."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.before = self._now()

    def registered(self) -> tuple[NewHook, ...]:
        """The forward hooks that are new, in order.

        Raises:
            TraceError: hooks were removed, are of another kind, or hold on to tensors or modules of the model that is
                traced, which is not the user's.
        """
        found = []
        now = self._now()
        for (name, table, key), hook in (now.items() - self.before.items()) | (self.before.items() - now.items()):
            kind = table.removeprefix("_forward_").removesuffix("s")
            flags = (
                tuple(f for f in _FLAGS[table] if key in vars(self.model.get_submodule(name))[f])
                if table in _FLAGS
                else ()
            )
            made = NewHook(name, kind, key, hook, flags)
            if (name, table, key) not in now or table not in _FLAGS or _holds_state(hook):
                raise changed_attribute(made)
            found.append(made)
        return tuple(sorted(found, key=lambda made: made.key))

    def _now(self) -> dict[tuple[str, str, int], Any]:
        return {
            (name, table, key): hook
            for name, module in self.model.named_modules()
            for table in (*_FLAGS, "_backward_hooks", "_backward_pre_hooks")
            for key, hook in vars(module)[table].items()
        }


_FLAGS = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
}


def _holds_state(hook: Any) -> bool:
    """Whether a module or a tensor is among what a hook can reach."""
    stack, seen = [place.value for place in _reach(hook)], set()
    while stack:
        value = stack.pop()
        if isinstance(value, (nn.Module, torch.Tensor)):
            return True
        held = None if id(value) in seen else _contents(value)
        seen.add(id(value))
        if not isinstance(held, (NoneType, numpy.ndarray)):
            stack += held.values() if isinstance(held, dict) else held
    return False


# --- what a hook can reach -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """A variable that a hook may change: `name` for users, `value` at that moment; `now()`, `set(value)`."""

    name: str
    value: Any
    now: Callable[[], Any]
    set: Callable[[Any], None]

    def put_back(self) -> None:
        if self.now() is not self.value:
            self.set(self.value)


def _token(hook: Any, own: set[int]) -> Any:
    """Equal for two moments at which it does the same."""
    return (code_name(hook), tuple((place.name, _summary(place.value, set(own))) for place in _reach(hook)))


def _summary(value: Any, seen: set[int]) -> Any:
    if isinstance(value, (torch.Tensor, *PLAIN)):
        return token(value, identity, set())
    if isinstance(value, CODE):
        return id(value)
    held = None if id(value) in seen else _contents(value)
    seen.add(id(value))
    if isinstance(held, numpy.ndarray):
        return token(held, identity, set())
    items = list(held.items()) if isinstance(held, dict) else list(enumerate(held or ()))
    return (type(value), tuple((str(key), _summary(item, seen)) for key, item in items))


def _reach(hook: Any) -> list[_Place]:
    """Variables of its closure and globals that its code names, through the user's functions that it calls; the object that
    it is a method of."""
    found: list[_Place] = []
    seen: set[int] = set()
    stack: list[Any] = [hook]
    while stack:
        code = stack.pop()
        if id(code) in seen:
            continue
        seen.add(id(code))
        if isinstance(code, partial):
            stack += [code.func]
            found += [_fixed("a bound argument", value) for value in (*code.args, *code.keywords.values())]
        elif isinstance(code, MethodType):
            stack.append(code.__func__)
            found.append(_fixed(f"its {type(code.__self__).__name__}", code.__self__))
        elif isinstance(code, FunctionType):
            for place in _variables(code):
                if isinstance(place.value, (FunctionType, MethodType, partial)):
                    stack.append(place.value)
                else:
                    found.append(place)
        elif not isinstance(code, CODE):
            stack.append(type(code).__call__)
            found.append(_fixed(f"its {type(code).__name__}", code))
    return found


def _fixed(name: str, value: Any) -> _Place:
    return _Place(name, value, lambda: value, lambda _: None)


def _variables(function: FunctionType) -> Iterator[_Place]:
    if not is_user_file(function.__code__.co_filename):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield _Place(name, _cell(cell), partial(_cell, cell), partial(setattr, cell, "cell_contents"))
    held = function.__globals__
    for name in function.__code__.co_names:
        if name in held and not isinstance(held[name], (type, type(torch))):
            yield _Place(name, held[name], partial(held.get, name), partial(held.__setitem__, name))
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield _fixed("a default argument", value)


def _cell(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


class _Content:
    """What a value holds at this moment, all the way down.

    Args:
        seen: ids of what is left out.
    """

    def __init__(self, value: Any, seen: set[int]) -> None:
        self.value = value
        self.held = None if id(value) in seen else _contents(value)
        seen.add(id(value))
        inside = self.held.values() if isinstance(self.held, dict) else self.held
        self.inner = [
            _Content(item, seen) for item in ([] if isinstance(inside, (NoneType, numpy.ndarray)) else inside)
        ]

    def changed(self) -> bool:
        now = None if self.held is None else _contents(self.value)
        return not _same(now, self.held) or any(content.changed() for content in self.inner)

    def put_back(self) -> None:
        value, held = self.value, self.held
        if held is not None and self.changed():
            if isinstance(value, numpy.ndarray):
                value[...] = held
            elif isinstance(value, (set, MutableMapping)):
                value.clear()
                value.update(held)
            elif isinstance(value, (list, deque)):
                value.clear()
                value.extend(held)
            elif isinstance(held, dict):
                for name in _contents(value).keys() - held.keys():
                    del vars(value)[name]
                vars(value).update(held)
        for content in self.inner:
            content.put_back()


def _contents(value: Any) -> Any:
    """Its items or attributes, copied; None for what has none, or none that we may look into."""
    if isinstance(value, (torch.Tensor, torch.Generator, *PLAIN, *CODE)):
        return None
    if isinstance(value, numpy.ndarray):
        return value.copy()
    if isinstance(value, MutableMapping):
        return dict(value)
    if isinstance(value, (list, deque, set, tuple)):
        return list(value)
    if isinstance(value, nn.Module):
        return {n: v for n, v in vars(value).items() if n not in OWN_STATE} | {"_modules": value._modules}
    return dict(vars(value)) if _is_users(value) else None


def _is_users(value: Any) -> bool:
    """Whether a value is a plain object of the user's own class."""
    where = getattr(sys.modules.get(type(value).__module__), "__file__", None)
    return hasattr(value, "__dict__") and where is not None and is_user_file(where)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same_item(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same_item, a, b))
    return numpy.array_equal(a, b) if isinstance(a, numpy.ndarray) else a is b


def _same_item(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, PLAIN) and type(a) is type(b) and a == b)
