"""The plain attributes of a model's modules: what hangs there, and what a forward has set since.

Tensors that forward stores on modules become outputs of the plan; what it sets otherwise would happen once, while planning,
and never again, and is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TypeVar

import numpy
import torch
from torch import nn

from gcsolve.errors import TraceError
from gcsolve.util.tree import slots_of

T = TypeVar("T")

# Parameters, buffers, submodules, hooks, training; and what `compile()` leaves.
OWN_STATE = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, slice, type)
CODE = (FunctionType, BuiltinFunctionType, MethodType)


def attribute_name(path: str, name: str) -> str:
    """Name of an attribute as `named_buffers` would give it."""
    return f"{path}.{name}" if path else name


def attributes_of(model: nn.Module, kind: type[T]) -> dict[str, T]:
    """name -> value of every plain attribute of a module that is of `kind`; parameters and buffers are none."""
    return {
        attribute_name(path, name): value
        for path, module in model.named_modules(remove_duplicate=False)
        for name, value in vars(module).items()
        if name not in OWN_STATE and isinstance(value, kind)
    }


def held_tensors(model: nn.Module) -> dict[int, tuple[str, torch.Tensor]]:
    """id -> (where it is, tensor) of those inside plain attributes: containers, objects, modules that are not registered."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    seen = {id(module) for module in model.modules()}
    for path, module in model.named_modules():
        stack = [(attribute_name(path, name), value) for name, value in _own(module).items()]
        while stack:
            name, value = stack.pop()
            if id(value) in seen or isinstance(value, (*PLAIN, *CODE, numpy.ndarray)):
                continue
            seen.add(id(value))
            if isinstance(value, torch.Tensor):
                found[id(value)] = name, value
            elif isinstance(value, Mapping):
                stack += [(f"{name}[{key!r}]", item) for key, item in value.items()]
            elif isinstance(value, (list, tuple, set, frozenset)) or hasattr(value, "appendleft"):
                stack += [(f"{name}[{at}]", item) for at, item in enumerate(value)]
            else:
                stack += [(f"{name}.{part}", item) for part, item in _parts(value)]
    return found


def _parts(value: Any) -> list[tuple[str, Any]]:
    """(name, content) of an object's attributes."""
    if isinstance(value, nn.Module):
        return [*{**_own(value), **value._parameters, **value._buffers, **value._modules}.items()]
    return [*(vars(value).items() if hasattr(value, "__dict__") else ()), *slots_of(value)]


def set_attribute(model: nn.Module, name: str, value: Any) -> None:
    """Set the attribute or buffer that `attribute_name` names, past what nn.Module does when one is set; `MISSING`: remove
    it."""
    held, last = _holder(model, name)
    if value is MISSING:
        held.pop(last, None)
    else:
        held[last] = value


def plain_attribute(model: nn.Module, name: str) -> Any:
    """What `attribute_name` names, an attribute or a buffer; `MISSING` where nothing is."""
    held, last = _holder(model, name)
    return held.get(last, MISSING)


def _holder(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    return (module._buffers if last in module._buffers else vars(module)), last


def token(value: Any, tensor: Callable[[torch.Tensor], Any], seen: set[int]) -> Any:
    """Equal for two values that a forward cannot tell apart: plain values by content, containers and plain objects by
    what they hold, tensors by `tensor(value)`, everything else by its type."""
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if isinstance(value, float):
        return (float, value.hex())
    if isinstance(value, PLAIN):
        return (type(value), value)
    if isinstance(value, CODE):
        return (
            type(value),
            id(value) if not isinstance(value, MethodType) else (id(value.__func__), id(value.__self__)),
        )
    if isinstance(value, (nn.Module, torch.Generator)):
        return (type(value), id(value))
    if isinstance(value, numpy.ndarray):
        return (value.shape, value.dtype.str, value.tobytes() if value.dtype != object else id(value))
    if id(value) in seen:
        return type(value)
    seen.add(id(value))
    if isinstance(value, partial):
        return (type(value), token((value.func, value.args, value.keywords), tensor, seen))
    if isinstance(value, Mapping):
        return (type(value), tuple((str(k), token(v, tensor, seen)) for k, v in value.items()))
    if isinstance(value, (set, frozenset)):
        return (type(value), frozenset(map(str, value)))
    if isinstance(value, (list, tuple)) or hasattr(value, "appendleft"):
        return (type(value), tuple(token(v, tensor, seen) for v in value))
    held = _parts(value)
    return (type(value), tuple((k, token(v, tensor, seen)) for k, v in held)) if held else type(value)


@dataclass(frozen=True)
class Setting:
    """A plain value that the first call sets: attribute `name` of the model, or `part` of the object that is there.

    `old`: what it replaces (`MISSING`: nothing was there); `module`: class of the module, for error texts.
    """

    name: str
    part: str
    old: Any
    new: Any
    module: str

    def holder(self, model: nn.Module) -> dict[str, Any]:
        path, _, last = self.name.rpartition(".")
        held = vars(model.get_submodule(path))
        return vars(held[last]) if self.part else held

    def apply(self, model: nn.Module, *, back: bool = False) -> None:
        """Do what the first call would do to a model that is as it was; `back`: undo it."""
        held, key = self.holder(model), self.part or self.name.rpartition(".")[2]
        here, there = (self.new, self.old) if back else (self.old, self.new)
        now = held.get(key, MISSING)
        if type(now) is type(here) and now == here:
            if there is MISSING:
                del held[key]
            else:
                held[key] = there

    def __str__(self) -> str:
        name = f"{self.name}.{self.part}" if self.part else self.name
        old = "nothing" if self.old is MISSING else _short(self.old)
        return f"the attribute {name} of {self.module} (from {old} to {_short(self.new)})"


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING = _Missing()


@dataclass(frozen=True)
class Written:
    """What forward has set on the model's modules: tensors by attribute name, and plain values."""

    tensors: dict[str, torch.Tensor]
    settings: tuple[Setting, ...]


def changed_attribute(what: Any) -> TraceError:
    return TraceError(
        f"forward changes {what}, and a planned step would not. Change it outside forward (in the training loop, or in a hook "
        "on the whole model), or make it a buffer; what is set up in the first call only: call the model once before planning"
    )


class Attributes:
    """The attributes of a model's modules at one moment, and what has become of them since."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.own = {path: _own(module) for path, module in self.modules.items()}
        self.tokens = {path: _tokens(held) for path, held in self.own.items()}
        self.parts = {id(v): dict(vars(v)) for held in self.own.values() for v in held.values() if _is_object(v)}
        self.buffers = {path: dict(module._buffers) for path, module in self.modules.items()}
        self.parameters = {path: dict(module._parameters) for path, module in self.modules.items()}
        self.parts_of = {path: dict(module._modules) for path, module in self.modules.items()}

    def written(self) -> Written:
        """What was set since; attributes and buffers that hold another tensor are put back, plain values stay as they are
        now.

        Raises:
            TraceError: something else than a tensor or a plain value was set, or a parameter or a submodule was replaced.
        """
        tensors: dict[str, torch.Tensor] = {}
        settings: list[Setting] = []
        for path, module in self.modules.items():
            self._stored(path, module, tensors, settings)
            for name, old in self.buffers[path].items():
                new = module._buffers.get(name)
                if new is not old:
                    tensors[attribute_name(path, name)] = _replacement(attribute_name(path, name), old, new)
                    module._buffers[name] = old
            for name, parameter in module._parameters.items():
                if self.parameters[path].get(name) is not parameter:
                    raise TraceError(
                        f"forward replaces the parameter {attribute_name(path, name)}; a planned step would not. Replace it "
                        "between steps, or pass it with torch.func.functional_call"
                    )
            for name in self.parts_of[path].keys() | module._modules.keys():
                old, new = self.parts_of[path].get(name), module._modules.get(name)
                if not _same_module(old, new):
                    part = f"the submodule {attribute_name(path, name)} of {type(module).__name__}"
                    raise changed_attribute(f"{part} (from {type(old).__name__} to {type(new).__name__})")
        return Written(tensors, tuple(settings))

    def _stored(self, path: str, module: nn.Module, tensors: dict[str, torch.Tensor], settings: list[Setting]) -> None:
        now, before = _own(module), self.own[path]
        tokens, kind = _tokens(now), type(module).__name__
        for name in sorted(tokens.keys() | before.keys()):
            if tokens.get(name) == self.tokens[path].get(name):
                continue
            full, old, new = attribute_name(path, name), before.get(name, MISSING), now.get(name, MISSING)
            if isinstance(new, torch.Tensor):
                tensors[full] = new
                vars(module).pop(name)
                if name in before:
                    vars(module)[name] = old
            elif old is new and id(new) in self.parts:
                parts = self.parts.pop(id(new))  # once, however many modules refer to it
                for part, value in vars(new).items():
                    was = parts.get(part, MISSING)
                    if token(value, identity, set()) != token(was, identity, set()):
                        settings.append(_setting(full, part, was, value, kind))
            elif old is not new:
                settings.append(_setting(full, "", old, new, kind))
            elif not _is_object(new):
                raise changed_attribute(f"the attribute {full} of {kind} (a {type(new).__name__}, in place)")


def _same_module(a: nn.Module | None, b: nn.Module | None) -> bool:
    """Export puts others in their place while it traces, which share what they hold."""
    return a is b or (a is not None and b is not None and vars(a) is vars(b))


def _setting(name: str, part: str, old: Any, new: Any, module: str) -> Setting:
    made = Setting(name, part, old, new, module)
    if not (isinstance(new, PLAIN) and (old is MISSING or isinstance(old, PLAIN))):
        raise changed_attribute(made)
    return made


def _is_object(value: Any) -> bool:
    """Whether a value is a plain object, a config say: neither code nor module nor container."""
    plain = isinstance(value, (nn.Module, torch.Tensor, torch.Generator, Mapping, list, tuple, set, *PLAIN, *CODE))
    return hasattr(value, "__dict__") and not plain


def _replacement(name: str, old: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor:
    if new is None or new.requires_grad:
        raise TraceError(
            f"forward replaces the buffer {name} ({_short(old)}) by {_short(new)}, which a planned step cannot do: set it to a "
            "tensor, and detach that"
        )
    return new


def _own(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in OWN_STATE}


def _tokens(held: Mapping[str, Any]) -> dict[str, Any]:
    return {name: token(value, identity, set()) for name, value in held.items()}


def identity(t: torch.Tensor) -> Any:
    """Parameters change place while a module is exported, and layers keep lists of them (nn.LSTM)."""
    return (tuple(t.shape), t.dtype) if isinstance(t, nn.Parameter) else id(t)


def shown(t: torch.Tensor) -> str:
    """As in "float32[8, 32], requires_grad"."""
    grad = ", requires_grad" if t.requires_grad else ""
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}{grad}"


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return shown(value)
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
