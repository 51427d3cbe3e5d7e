"""The signature of a training call: what tells two calls apart for which different steps have to be planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gcsolve._torch import global_module_hooks
from gcsolve.capture.autocast import is_weight
from gcsolve.capture.context import Context
from gcsolve.capture.hooks import hooks_token
from gcsolve.capture.module_state import (
    OWN_STATE,
    PLAIN,
    attribute_name,
    identity,
    plain_attribute,
    set_attribute,
    token,
)
from gcsolve.capture.trace import Trace
from gcsolve.util.tree import Template, static_key

_PLAIN = frozenset(PLAIN)


def signature(
    model: nn.Module, tensors: list[torch.Tensor], template: Template, attributes: AttributeCache | None = None
) -> Any:
    """Equal for two calls exactly when one traced step serves both.

    It covers structure, non-tensor arguments, shapes, strides, dtypes, devices, who needs gradients, training flags, hooks,
    autocast, default dtype and the modules' own settings.

    Args:
        attributes: what is known from the calls before, to be quicker.
    """
    modules = list({id(m): m for _, m in walk(model)}.values())
    context = Context.here()
    return (
        static_key(template, "example_input"),
        tuple(map(_tensor_key, tensors)),
        tuple(map(is_weight, tensors)) if context.regions and context.casts_once else (),
        global_module_hooks(),
        hooks_token(model) if any(m._forward_hooks or m._forward_pre_hooks for m in modules) else (),
        context,
        _module_keys(modules, attributes or AttributeCache()),
    )


def settled_signature(model: nn.Module, trace: Trace, tensors: list[torch.Tensor], template: Template) -> Any:
    """The signature of the model as its first call leaves it (`Trace.settings`); the model itself stays as it is."""
    for setting in trace.settings:
        setting.apply(model)
    try:
        return signature(model, tensors, template)
    finally:
        for setting in trace.settings:
            setting.apply(model, back=True)


def first_call_signature(model: nn.Module, trace: Trace, tensors: list[torch.Tensor], template: Template) -> Any:
    """The signature of the model as it was before its first call filled attributes (`Trace.filled`); the model itself stays
    as it is."""
    present = {name: plain_attribute(model, name) for name, _ in trace.filled}
    filled = {name: before for name, before in trace.filled if isinstance(present[name], torch.Tensor)}
    for name, before in filled.items():
        set_attribute(model, name, before)
    try:
        return signature(model, tensors, template)
    finally:
        for name in filled:
            set_attribute(model, name, present[name])


def walk(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(path, module) as `model.named_modules(remove_duplicate=False)` gives them, several times faster."""
    modules: list[tuple[str, nn.Module]] = []
    stack = [("", model)]
    while stack:
        path, module = stack.pop()
        modules.append((path, module))
        stack += [(attribute_name(path, n), m) for n, m in reversed(module._modules.items()) if m is not None]
    return modules


# --- attributes of modules ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Attributes:
    """The attributes of a module at one call.

    `names` and `ids` of all values; `plain`: (name, token) of the plain ones, which a call compares by content; `others`:
    names of the rest.
    """

    names: tuple[str, ...]
    ids: list[int]
    plain: tuple[Any, ...]
    others: tuple[str, ...]
    plain_values: tuple[Any, ...]  # held on to, so that no other value can have their ids


class AttributeCache:
    """The plain attributes of each module as they last were: a call sees by identity which have changed.

    Nothing else is held on to: not the tensors that a forward leaves on a module.
    """

    def __init__(self) -> None:
        self.by_module: list[_Attributes] = []

    def attributes(self, place: int, module: nn.Module) -> _Attributes:
        """Those of the module at `place` among the model's."""
        present = vars(module)
        names, ids = tuple(present), list(map(id, present.values()))
        known = self.by_module[place] if place < len(self.by_module) else None
        if known is None or known.ids != ids or known.names != names:
            own = sorted((name, value) for name, value in present.items() if name not in OWN_STATE)
            plain = [(name, value) for name, value in own if _is_plain(value)]
            known = _Attributes(
                names=names,
                ids=ids,
                plain=tuple((name, token(value, identity, set())) for name, value in plain),
                others=tuple(name for name, value in own if not _is_plain(value)),
                plain_values=tuple(value for _, value in plain),
            )
            self.by_module[place : place + 1] = [known]
        return known


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(type(v) in _PLAIN for v in value))


def _module_keys(modules: Sequence[nn.Module], cache: AttributeCache) -> tuple[Any, ...]:
    """For each module, what forward may read of it and a plan has baked in: its class, training flag and hooks, what its
    parameters and buffers are like, and its attributes (a dropout's p, an activation function, a config) with what the
    containers and objects among them hold. This runs in every call."""
    seen: set[int] = set()
    keys = []
    for place, module in enumerate(modules):
        attributes, present = cache.attributes(place, module), vars(module)
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        parameters = [p for p in module._parameters.values() if p is not None]
        buffers = [b for b in module._buffers.values() if b is not None]
        keys.append(
            (
                type(module),
                module.training,
                tuple(map(tuple, hooks)) if any(hooks) else (),
                tuple([(p.shape, p.dtype, p.device, p.requires_grad) for p in parameters]),
                tuple([(b.shape, b.dtype, b.device) for b in buffers]),
                attributes.plain,
                tuple([(name, _attribute_key(present[name], seen)) for name in attributes.others]),
            )
        )
    return tuple(keys)


def _attribute_key(value: Any, seen: set[int]) -> Any:
    return _tensor_key(value) if isinstance(value, torch.Tensor) else token(value, identity, seen)


def _tensor_key(t: torch.Tensor) -> Any:
    return (t.shape, t.stride(), t.dtype, t.device, t.requires_grad)
