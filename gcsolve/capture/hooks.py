"""Hooks of a model's submodules.

What a forward hook computes from its module's tensors is part of forward, and is traced with it. What it changes elsewhere
(a counter, a list of outputs) would be changed while planning, and by no planned step. So everything that a hook can reach
is compared before and after a run on fakes; a change is undone, and refused by name.
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
    """Refuse hooks that a planned step would not run.

    Raises:
        TraceError: a hook is registered for all modules, or a submodule has a backward hook, or the model itself has a hook
            that makes its weight (spectral_norm).
    """
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
        for kind, hook in () if module is model else _users_hooks(kinds):
            raise TraceError(
                f"submodule {name} ({type(module).__name__}) has the {kind} {code_name(hook)}, which a planned step would not "
                "call. Remove it, put it on the model itself or on a parameter, make what it computes part of forward, or "
                "plan the submodules beside it: model.part = gcsolve.solve(model.part, ...).module"
            )


def forward_hooks(model: nn.Module) -> list[tuple[str, str, Any]]:
    """(submodule, kind, hook) of the user's forward hooks of submodules, which are traced as part of forward. Those of the
    model itself are not: they run around every planned step."""
    return [
        (name, kind, hook)
        for name, module in model.named_modules()
        if module is not model and (module._forward_hooks or module._forward_pre_hooks)
        for kind, hook in _users_hooks(
            {"forward hook": module._forward_hooks, "forward pre-hook": module._forward_pre_hooks}
        )
    ]


def _users_hooks(kinds: dict[str, Any]) -> list[tuple[str, Any]]:
    """(kind, hook), without the hooks of torch.nn.utils, which make a weight from others in forward.

    Args:
        kinds: kind -> torch's table of hooks of that kind.
    """
    hooks = [(kind, hook) for kind, table in kinds.items() for hook in table.values()]
    return [(kind, hook) for kind, hook in hooks if not type(hook).__module__.startswith("torch.nn.utils")]


def hooks_token(model: nn.Module) -> Any:
    """Equal at two moments if no forward hook of a submodule, and nothing that such a hook can reach, changed in between."""
    modules = {id(module) for module in model.modules()}
    return tuple((name, kind, _token(hook, modules)) for name, kind, hook in forward_hooks(model))


class HooksRefused:
    """A block in which no forward hook of a submodule may change anything but the model's modules.

    Raises:
        TraceError: at the end, naming the hook and what it changed, which has its earlier value again.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> None:
        modules = {id(module) for module in self.model.modules()}  # what is set on these is compared elsewhere
        self.before = [
            (name, kind, hook, [(v, _Content(v.value, set(modules))) for v in _reachable(hook)])
            for name, kind, hook in forward_hooks(self.model)
        ]

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        refused = ""
        for name, kind, hook, variables in self.before:
            for variable, content in variables:
                if variable.now() is variable.value and not content.changed():
                    continue
                content.restore()
                variable.restore()
                refused = refused or f"the {kind} {code_name(hook)} of submodule {name} changes {variable.name}"
        if refused and error is None:
            raise TraceError(
                f"{refused}, and a planned step would not: it has what a hook computes from its module's tensors, not what it "
                "changes elsewhere. Put it on the model itself, where it is called in every step, or let it store tensors on "
                "its module (module.seen = output)"
            )


# --- hooks that forward registers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class NewHook:
    """A forward hook that the first call registers on submodule `name` (as a `Setting` is a plain value that it sets).

    `kind`: "hook" or "pre_hook". `key`: id of its handle. `flags`: torch's tables of special hooks that have it.
    """

    name: str
    kind: str
    key: int
    hook: Any
    flags: tuple[str, ...]

    def apply(self, model: nn.Module, *, back: bool = False) -> None:
        """Register it, unless a hook that does the same is there; `back`: remove it."""
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
    """The hooks of a model's modules as they are now; `registered()` compares them with those at a later moment."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.before = self._now()

    def registered(self) -> tuple[NewHook, ...]:
        """The forward hooks that were registered since, in order.

        Raises:
            TraceError: a hook was removed; or a new one is not a forward hook, or can reach a tensor or a module: it would be
                one of the copy that is traced, not of the user's model.
        """
        new: list[NewHook] = []
        now = self._now()
        for (name, table, key), hook in (now.items() - self.before.items()) | (self.before.items() - now.items()):
            kind = table.removeprefix("_forward_").removesuffix("s")
            flags = (
                tuple(f for f in _FLAGS[table] if key in vars(self.model.get_submodule(name))[f])
                if table in _FLAGS
                else ()
            )
            new_hook = NewHook(name, kind, key, hook, flags)
            if (name, table, key) not in now or table not in _FLAGS or _reaches_state(hook):
                raise changed_attribute(new_hook)
            new.append(new_hook)
        return tuple(sorted(new, key=lambda hook: hook.key))

    def _now(self) -> dict[tuple[str, str, int], Any]:
        """(submodule, torch's table, id of the handle) -> hook."""
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


def _reaches_state(hook: Any) -> bool:
    """Whether a hook can reach a module or a tensor."""
    stack, seen = [variable.value for variable in _reachable(hook)], set()
    while stack:
        value = stack.pop()
        if isinstance(value, (nn.Module, torch.Tensor)):
            return True
        contents = None if id(value) in seen else _contents(value)
        seen.add(id(value))
        stack += _items(contents)
    return False


# --- what a hook can reach -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Variable:
    """A variable that a hook may change. `name`: as users know it. `value`: at the moment when this was made.

    `now()`: its value. `set(value)`: give it another one.
    """

    name: str
    value: Any
    now: Callable[[], Any]
    set: Callable[[Any], None]

    def restore(self) -> None:
        if self.now() is not self.value:
            self.set(self.value)


def _token(hook: Any, seen: set[int]) -> Any:
    """Equal at two moments at which the hook does the same.

    Args:
        seen: ids of objects that are not looked into.
    """
    return (
        code_name(hook),
        tuple((variable.name, _summary(variable.value, set(seen))) for variable in _reachable(hook)),
    )


def _summary(value: Any, seen: set[int]) -> Any:
    """Equal at two moments at which the value has the same content."""
    if isinstance(value, (torch.Tensor, *PLAIN)):
        return token(value, identity, set())
    if isinstance(value, CODE):
        return id(value)
    contents = None if id(value) in seen else _contents(value)
    seen.add(id(value))
    if isinstance(contents, numpy.ndarray):
        return token(contents, identity, set())
    items = list(contents.items()) if isinstance(contents, dict) else list(enumerate(contents or ()))
    return (type(value), tuple((str(key), _summary(item, seen)) for key, item in items))


def _reachable(hook: Any) -> list[_Variable]:
    """The variables that a hook can reach: those of its closure, globals that its code names, its default and bound arguments,
    and the object that it is a method of; and the same of the user's functions among them."""
    variables: list[_Variable] = []
    seen: set[int] = set()
    stack: list[Any] = [hook]
    while stack:
        code = stack.pop()
        if id(code) in seen:
            continue
        seen.add(id(code))
        if isinstance(code, partial):
            stack += [code.func]
            variables += [_constant("a bound argument", value) for value in (*code.args, *code.keywords.values())]
        elif isinstance(code, MethodType):
            stack.append(code.__func__)
            variables.append(_constant(f"its {type(code.__self__).__name__}", code.__self__))
        elif isinstance(code, FunctionType):
            for variable in _variables(code):
                if isinstance(variable.value, (FunctionType, MethodType, partial)):
                    stack.append(variable.value)
                else:
                    variables.append(variable)
        elif not isinstance(code, CODE):
            stack.append(type(code).__call__)
            variables.append(_constant(f"its {type(code).__name__}", code))
    return variables


def _constant(name: str, value: Any) -> _Variable:
    """A value that the hook cannot replace by another; it may change what is in it."""
    return _Variable(name, value, lambda: value, lambda _: None)


def _variables(function: FunctionType) -> Iterator[_Variable]:
    """Those of a function of the user's."""
    if not is_user_file(function.__code__.co_filename):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield _Variable(name, _cell_value(cell), partial(_cell_value, cell), partial(setattr, cell, "cell_contents"))
    module = function.__globals__
    for name in function.__code__.co_names:
        if name in module and not isinstance(module[name], (type, type(torch))):
            yield _Variable(name, module[name], partial(module.get, name), partial(module.__setitem__, name))
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield _constant("a default argument", value)


def _cell_value(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


class _Content:
    """The content of a value at this moment, with the content of all that is in it.

    Args:
        seen: ids of objects that are not looked into.
    """

    def __init__(self, value: Any, seen: set[int]) -> None:
        self.value = value
        self.contents = None if id(value) in seen else _contents(value)
        seen.add(id(value))
        self.inner = [_Content(item, seen) for item in _items(self.contents)]

    def changed(self) -> bool:
        now = None if self.contents is None else _contents(self.value)
        return not _same(now, self.contents) or any(content.changed() for content in self.inner)

    def restore(self) -> None:
        value, contents = self.value, self.contents
        if contents is not None and self.changed():
            if isinstance(value, numpy.ndarray):
                value[...] = contents
            elif isinstance(value, (set, MutableMapping)):
                value.clear()
                value.update(contents)
            elif isinstance(value, (list, deque)):
                value.clear()
                value.extend(contents)
            elif isinstance(contents, dict):
                for name in _contents(value).keys() - contents.keys():
                    del vars(value)[name]
                vars(value).update(contents)
        for content in self.inner:
            content.restore()


def _contents(value: Any) -> Any:
    """A copy of a value's items (a list, or a dict if they have keys) or attributes (a dict), or of a numpy array. None for a
    value that has none, or that is not looked into."""
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


def _items(contents: Any) -> list[Any]:
    """The values in what `_contents` returns."""
    if isinstance(contents, (NoneType, numpy.ndarray)):
        return []
    return list(contents.values() if isinstance(contents, dict) else contents)


def _is_users(value: Any) -> bool:
    """Whether a value is an object with attributes, of a class of the user's own."""
    file = getattr(sys.modules.get(type(value).__module__), "__file__", None)
    return hasattr(value, "__dict__") and file is not None and is_user_file(file)


def _same(a: Any, b: Any) -> bool:
    """Whether two results of `_contents` have the same items."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same_item(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same_item, a, b))
    return numpy.array_equal(a, b) if isinstance(a, numpy.ndarray) else a is b


def _same_item(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, PLAIN) and type(a) is type(b) and a == b)
