"""The module a plan hands out: the user's own module in all but its training forward.

It is an instance of a subclass of the model's class that shares the model's `__dict__`: parameters, buffers, submodules,
hooks, `training` and every attribute are the very same objects, in both directions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from gcsolve.errors import ArgumentError, CallError
from gcsolve.runtime import Step
from gcsolve.structure import Template, flatten, static_key, unflatten
from gcsolve.trace import PREFIX

Planner = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Step]


class Steps:
    """The emitted steps of one planned module, one a call signature, and how to make another."""

    def __init__(self, replan: Planner, loss: Callable[[Any], Any] | None) -> None:
        self.replan = replan
        self.loss = loss
        self.cache: dict[Any, Step] = {}
        self.training = True

    def add(self, key: Any, step: Step) -> None:
        self.cache[key] = step


def signature(model: nn.Module, tensors: list[torch.Tensor], template: Template) -> Any:
    """Equal for two calls exactly when one traced step serves both: structure, non-tensor arguments, shapes, strides,
    dtypes, devices, who needs gradients, training flags, hooks, autocast, default dtype and the modules' own settings."""
    kinds = {t.device.type for t in tensors if t.device.type != "meta"} | {"cpu", "cuda"}
    return (
        static_key(template),
        tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors),
        tuple(
            (m.training, *map(len, (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks)))
            for m in model.modules()
        ),
        tuple((p.shape, p.dtype, p.device, p.requires_grad) for p in model.parameters()),
        tuple((b.shape, b.dtype, b.device) for b in model.buffers()),
        tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in sorted(kinds)),
        torch.get_default_dtype(),
        _settings(model),
    )


def _settings(model: nn.Module) -> tuple[Any, ...]:
    """Each submodule's class and its plain attributes (a dropout's p, a norm's eps, an activation function), and those of
    the objects it refers to (a config): what forward may read and a plan has baked in."""
    seen: set[int] = set()
    found: list[Any] = []
    for module in model.modules():
        found.append(type(module))
        for name, value in vars(module).items():
            if name in _OWN_STATE:
                continue
            if _is_plain(value):
                found.append((name, value))
            elif (
                hasattr(value, "__dict__")
                and id(value) not in seen
                and not isinstance(value, (nn.Module, torch.Tensor))
            ):
                seen.add(id(value))
                found.append((name, type(value), tuple((k, v) for k, v in vars(value).items() if _is_plain(v))))
    return tuple(found)


_OWN_STATE = frozenset(vars(nn.Module()))  # hooks, parameters, training: looked at above


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str, type(None), torch.dtype, FunctionType, BuiltinFunctionType))


def planned_module(model: nn.Module, steps: Steps) -> nn.Module:
    """A module that runs `steps` when it trains and the model's own forward otherwise.

    Raises:
        ArgumentError: the instance carries its own `forward` (a wrapper put there), which would bypass the plan.
    """
    if "forward" in vars(model):
        raise ArgumentError(
            f"{type(model).__name__} has a forward of its own on the instance (a wrapper put it there); "
            "plan the model before it is wrapped"
        )
    kind = type(model)
    planned = type(f"Planned{kind.__name__}", (_Planned, kind), {"_gcsolve": steps, "_gcsolve_model": model})
    made = object.__new__(planned)
    object.__setattr__(made, "__dict__", model.__dict__)
    return made


def is_planned(module: nn.Module) -> bool:
    return isinstance(module, _Planned)


class _Planned:
    """What the planned subclass adds to the model's class."""

    _gcsolve: Steps
    _gcsolve_model: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        model, steps = self._gcsolve_model, self._gcsolve
        if not torch.is_grad_enabled() or (steps.training and not model.training):
            result = model.forward(*args, **kwargs)
            return result if steps.loss is None else steps.loss(result)
        return run(model, steps, args, kwargs)

    @property
    def code(self) -> str:
        """The generated forward and backward of every signature planned so far, as Python text."""
        return "\n\n".join(
            f"# forward\n{s.emitted.forward.code}\n# backward\n{s.emitted.backward.code}"
            for s in self._gcsolve.cache.values()
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return planned_module(copy.deepcopy(self._gcsolve_model, memo), self._gcsolve)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CallError(
            "a planned module cannot be pickled; save its state_dict(), or pickle the original model and plan it again"
        )


def run(model: nn.Module, steps: Steps, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One training forward through the step planned for this signature; a new signature is planned first."""
    tensors, template = flatten((args, kwargs), "call")
    key = signature(model, tensors, template)
    step = steps.cache.get(key)
    if step is None:
        step = steps.replan(model, args, kwargs)
        steps.add(key, step)
    return unflatten(step.trace.output_template, step(collect(model, step, tensors)))


def collect(model: nn.Module, step: Step, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of the step's inputs, looked up now: parameters may have been replaced since planning.

    Raises:
        CallError: one of them is on meta, or on the CPU where the step has another device's kernels.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    found: list[torch.Tensor] = []
    for kind, name in step.trace.joint.inputs:
        if kind == "input":
            tensor = tensors[name]
        elif kind == "constant":
            tensor = step.trace.joint.constants[name]
        else:
            tensor = (parameters if kind == "param" else buffers)[name.removeprefix(PREFIX)]
        if tensor.device.type == "meta":
            raise CallError(
                f"{kind} {name} is on meta: this plan can be read, not run; give the model real weights first"
            )
        if step.trace.target_only and tensor.device.type == "cpu":
            raise CallError(
                f"{kind} {name} is on the CPU, and this plan has kernels of the device it is for that the CPU lacks "
                f"({', '.join(step.trace.target_only)}): it can be read here, not run. On that device, move model and "
                "inputs there and call again; to train on this CPU, plan with device='cpu'"
            )
        found.append(tensor)
    return found
