"""The state of a model's modules beside parameters and buffers: their plain attributes, and what forward sets of them.

A tensor that forward stores on a module is an output of every planned step. A plain value that the first call sets is set
once, by the planned module. Anything else that forward sets would be set while planning and never again, and is refused.
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

OWN_STATE = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
"""Names of nn.Module's own attributes: parameters, buffers, submodules, hooks, training; and the one that `compile()` sets."""

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, slice, type)
"""Types of values that are compared by content."""

CODE = (FunctionType, BuiltinFunctionType, MethodType)


def attribute_name(path: str, name: str) -> str:
    """Name of an attribute of the module at `path`, in the form of `named_buffers()`."""
    return f"{path}.{name}" if path else name


def attributes_of(model: nn.Module, kind: type[T]) -> dict[str, T]:
    """name -> value of every plain attribute of a module that is an instance of `kind`. Parameters and buffers are not plain
    attributes."""
    return {
        attribute_name(path, name): value
        for path, module in model.named_modules(remove_duplicate=False)
        for name, value in vars(module).items()
        if name not in OWN_STATE and isinstance(value, kind)
    }


def held_tensors(model: nn.Module) -> dict[int, tuple[str, torch.Tensor]]:
    """id -> (name, tensor) of the tensors inside plain attributes: in containers, objects and modules that are not registered.

    The name is the expression by which a user reaches the tensor from the model.
    """
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    seen = {id(module) for module in model.modules()}
    for path, module in model.named_modules():
        stack = [(attribute_name(path, name), value) for name, value in _plain_attributes(module).items()]
        while stack:
            name, value = stack.pop()
            if id(value) in seen or isinstance(value, (*PLAIN, *CODE, numpy.ndarray)):
                continue
            seen.add(id(value))
            if isinstance(value, torch.Tensor):
                tensors[id(value)] = name, value
            elif isinstance(value, Mapping):
                stack += [(f"{name}[{key!r}]", item) for key, item in value.items()]
            elif isinstance(value, (list, tuple, set, frozenset)) or _is_deque(value):
                stack += [(f"{name}[{index}]", item) for index, item in enumerate(value)]
            else:
                stack += [(f"{name}.{part}", item) for part, item in _parts(value)]
    return tensors


def _is_deque(value: Any) -> bool:
    return hasattr(value, "appendleft")


def _parts(value: Any) -> list[tuple[str, Any]]:
    """(name, value) of an object's attributes, those in slots too."""
    if isinstance(value, nn.Module):
        return [*{**_plain_attributes(value), **value._parameters, **value._buffers, **value._modules}.items()]
    return [*(vars(value).items() if hasattr(value, "__dict__") else ()), *slots_of(value)]


def set_attribute(model: nn.Module, name: str, value: Any) -> None:
    """Set a plain attribute or a buffer without nn.Module's checks.

    Args:
        name: as `attribute_name` gives it.
        value: `MISSING` removes the attribute.
    """
    attributes, last = _attributes_with(model, name)
    if value is MISSING:
        attributes.pop(last, None)
    else:
        attributes[last] = value


def plain_attribute(model: nn.Module, name: str) -> Any:
    """Value of the plain attribute or the buffer of that name; `MISSING`: there is none."""
    attributes, last = _attributes_with(model, name)
    return attributes.get(last, MISSING)


def _attributes_with(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The dictionary in which an attribute of that name stands, or would stand, and its key there."""
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    return (module._buffers if last in module._buffers else vars(module)), last


def token(value: Any, tensor: Callable[[torch.Tensor], Any], seen: set[int]) -> Any:
    """Equal for two values that a forward cannot tell apart.

    Plain values are compared by content, containers and plain objects by what is in them, tensors by `tensor(value)`, modules,
    generators and functions by identity, everything else by type.

    Args:
        seen: ids of the containers and objects around the value, which are compared by type alone.
    """
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
    if isinstance(value, (list, tuple)) or _is_deque(value):
        return (type(value), tuple(token(v, tensor, seen) for v in value))
    parts = _parts(value)
    return (type(value), tuple((k, token(v, tensor, seen)) for k, v in parts)) if parts else type(value)


@dataclass(frozen=True)
class Setting:
    """A plain value that the first call sets: the attribute `name` of the model, or the attribute `part` of the object there.

    `old`: the value before; `MISSING`: there was none. `module`: class of the module, for error texts.
    """

    name: str
    part: str
    old: Any
    new: Any
    module: str

    def holder(self, model: nn.Module) -> dict[str, Any]:
        """The dictionary in which the value stands."""
        path, _, last = self.name.rpartition(".")
        attributes = vars(model.get_submodule(path))
        return vars(attributes[last]) if self.part else attributes

    def apply(self, model: nn.Module, *, back: bool = False) -> None:
        """Set the new value where the old one stands; `back`: the old value where the new one stands."""
        attributes, key = self.holder(model), self.part or self.name.rpartition(".")[2]
        before, after = (self.new, self.old) if back else (self.old, self.new)
        now = attributes.get(key, MISSING)
        if type(now) is type(before) and now == before:
            if after is MISSING:
                del attributes[key]
            else:
                attributes[key] = after

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
    """What forward has set on the model's modules: `tensors`, by attribute name, and `settings`, plain values."""

    tensors: dict[str, torch.Tensor]
    settings: tuple[Setting, ...]


def changed_attribute(what: Any) -> TraceError:
    return TraceError(
        f"forward changes {what}, and a planned step would not. Change it outside forward (in the training loop, or in a hook "
        "on the whole model), or make it a buffer; what is set up in the first call only: call the model once before planning"
    )


class Attributes:
    """The attributes of a model's modules as they are now; `written()` compares them with those at a later moment."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.plain = {path: _plain_attributes(module) for path, module in self.modules.items()}
        self.tokens = {path: _tokens(attributes) for path, attributes in self.plain.items()}
        self.objects = {id(v): dict(vars(v)) for a in self.plain.values() for v in a.values() if _is_object(v)}
        self.buffers = {path: dict(module._buffers) for path, module in self.modules.items()}
        self.parameters = {path: dict(module._parameters) for path, module in self.modules.items()}
        self.submodules = {path: dict(module._modules) for path, module in self.modules.items()}

    def written(self) -> Written:
        """What was set since. Attributes and buffers that hold another tensor get the earlier one back; plain values stay.

        Raises:
            TraceError: something else than a tensor or a plain value was set, or a parameter or a submodule was replaced.
        """
        tensors: dict[str, torch.Tensor] = {}
        settings: list[Setting] = []
        for path, module in self.modules.items():
            self._compare_plain(path, module, tensors, settings)
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
            for name in self.submodules[path].keys() | module._modules.keys():
                old, new = self.submodules[path].get(name), module._modules.get(name)
                if not _same_module(old, new):
                    part = f"the submodule {attribute_name(path, name)} of {type(module).__name__}"
                    raise changed_attribute(f"{part} (from {type(old).__name__} to {type(new).__name__})")
        return Written(tensors, tuple(settings))

    def _compare_plain(
        self, path: str, module: nn.Module, tensors: dict[str, torch.Tensor], settings: list[Setting]
    ) -> None:
        """Add what was set among the plain attributes of one module to `tensors` and `settings`."""
        now, before, kind = _plain_attributes(module), self.plain[path], type(module).__name__
        tokens = _tokens(now)
        for name in sorted(tokens.keys() | before.keys()):
            if tokens.get(name) == self.tokens[path].get(name):
                continue
            full_name, old, new = attribute_name(path, name), before.get(name, MISSING), now.get(name, MISSING)
            if isinstance(new, torch.Tensor):
                tensors[full_name] = new
                vars(module).pop(name)
                if name in before:
                    vars(module)[name] = old
            elif old is new and id(new) in self.objects:
                parts = self.objects.pop(id(new))  # compared once, however many modules refer to the object
                for part, value in vars(new).items():
                    earlier = parts.get(part, MISSING)
                    if token(value, identity, set()) != token(earlier, identity, set()):
                        settings.append(_setting(full_name, part, earlier, value, kind))
            elif old is not new:
                settings.append(_setting(full_name, "", old, new, kind))
            elif not _is_object(new):
                raise changed_attribute(f"the attribute {full_name} of {kind} (a {type(new).__name__}, in place)")


def _same_module(a: nn.Module | None, b: nn.Module | None) -> bool:
    """Whether two modules are the same, or share their attributes: while it traces, an export replaces modules by such."""
    return a is b or (a is not None and b is not None and vars(a) is vars(b))


def _setting(name: str, part: str, old: Any, new: Any, module: str) -> Setting:
    setting = Setting(name, part, old, new, module)
    if not (isinstance(new, PLAIN) and (old is MISSING or isinstance(old, PLAIN))):
        raise changed_attribute(setting)
    return setting


def _is_object(value: Any) -> bool:
    """Whether a value is an object with attributes (a config, say), and neither code nor a module nor a container."""
    other = isinstance(value, (nn.Module, torch.Tensor, torch.Generator, Mapping, list, tuple, set, *PLAIN, *CODE))
    return hasattr(value, "__dict__") and not other


def _replacement(name: str, old: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor:
    """The tensor that forward has put in place of a buffer."""
    if new is None or new.requires_grad:
        raise TraceError(
            f"forward replaces the buffer {name} ({_short(old)}) by {_short(new)}, which a planned step cannot do: set it to a "
            "tensor, and detach that"
        )
    return new


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in OWN_STATE}


def _tokens(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: token(value, identity, set()) for name, value in attributes.items()}


def identity(t: torch.Tensor) -> Any:
    """Equal for two tensors that are the same object. Parameters are compared by shape and dtype: an export replaces them, and
    layers keep lists of them (nn.LSTM)."""
    return (tuple(t.shape), t.dtype) if isinstance(t, nn.Parameter) else id(t)


def shown(t: torch.Tensor) -> str:
    """A tensor as error texts show it: "float32[8, 32], requires_grad"."""
    grad = ", requires_grad" if t.requires_grad else ""
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}{grad}"


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return shown(value)
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
