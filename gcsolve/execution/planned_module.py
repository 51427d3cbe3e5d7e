"""The module a plan hands out: the user's own module in all but its training forward.

It is an instance of a subclass of the model's class that shares the model's `__dict__`: parameters, buffers, submodules,
hooks, `training` and every attribute are the very same objects, in both directions.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from gcsolve._torch import transform
from gcsolve.capture.hooks import NewHook
from gcsolve.capture.module_state import Setting, attributes_of, plain_attribute, set_attribute
from gcsolve.errors import ArgumentError, CallError
from gcsolve.execution.call_inputs import call_inputs
from gcsolve.execution.gradient_handoff import autocast_block_kept
from gcsolve.execution.signature import AttributeCache, first_call_signature, settled_signature, signature
from gcsolve.execution.step import Step
from gcsolve.util.tree import Template, flatten, merged, sources_of, unflatten

Planner = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Step]


class Steps:
    """The steps of one planned module, one for each signature of its calls, and how another one is planned.

    `settings`: what the model's first call sets, as far as it is known; `training`: the model was planned in training mode.
    """

    def __init__(self, replan: Planner, loss: Callable[[Any], Any] | None) -> None:
        self.replan = replan
        self.loss = loss
        self.cache: dict[Any, Step] = {}
        self.settings: list[Setting | NewHook] = []
        self.attributes = AttributeCache()
        self.training = True

    def add(self, key: Any, step: Step) -> None:
        self.cache[key] = step
        self.settings += [setting for setting in step.trace.settings if setting not in self.settings]

    def find(self, model: nn.Module, tensors: list[torch.Tensor], template: Template) -> Step | None:
        """The step that was planned for such a call, if one was. Where the first call has filled attributes that forward
        does not read (`Trace.filled`), that call's step serves the later ones too."""
        key = signature(model, tensors, template, self.attributes)
        step = self.cache.get(key)  # looked up once: hashing a key takes a while
        if step is not None:
            return step
        for first in list(self.cache.values()):
            if not first.trace.filled:
                continue
            if self.cache.get(first_call_signature(model, first.trace, tensors, template)) is first:
                self.cache[key] = first
                return first
        return None

    def set_up(self, model: nn.Module) -> None:
        """Set what the model's first call sets (a flag, an entry of a config) where it is not set yet."""
        for setting in self.settings:
            setting.apply(model)


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
    members = {"_gcsolve": steps, "_gcsolve_model": model, "forward": _planned_forward(kind.forward)}
    planned = object.__new__(type(f"Planned{kind.__name__}", (_Planned, kind), members))
    object.__setattr__(planned, "__dict__", model.__dict__)
    return planned


def _planned_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """`_Planned.forward` under the name and signature of the model's own; `torch.compile` leaves it as it is."""

    @functools.wraps(original)
    def forward(self: _Planned, *args: Any, **kwargs: Any) -> Any:
        return _Planned.forward(self, *args, **kwargs)

    return torch.compiler.disable(
        forward,
        reason="a gcsolve plan runs as it was planned; compile the modules around it, or the model without a plan",
    )


def is_planned(module: nn.Module) -> bool:
    return isinstance(module, _Planned)


class _Planned:
    """What the planned subclass adds to the model's class."""

    _gcsolve: Steps
    _gcsolve_model: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        model, steps = self._gcsolve_model, self._gcsolve
        if torch.is_grad_enabled() and (model.training or not steps.training):
            tensors, template = flatten((args, kwargs), "call")
            _refuse_transforms(tensors)
            if any(t.requires_grad for t in chain(tensors, model.parameters(), _tensor_attributes(model))):
                return _train(model, steps, args, kwargs, tensors, template)
        result = model.forward(*args, **kwargs)
        return result if steps.loss is None else steps.loss(result)

    @property
    def _compiled_call_impl(self) -> None:
        """What `compile()` sets, here or on the model that this shares its attributes with: calls would go past the plan."""
        return

    @_compiled_call_impl.setter
    def _compiled_call_impl(self, compiled: Any) -> None:
        return

    @property
    def code(self) -> str:
        """The generated forward and backward of every signature planned so far, as Python text."""
        return "\n\n".join(
            f"# forward\n{step.emitted.forward.code}\n# backward\n{step.emitted.backward.code}"
            for step in {id(step): step for step in self._gcsolve.cache.values()}.values()
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return planned_module(copy.deepcopy(self._gcsolve_model, memo), self._gcsolve)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CallError(
            "a planned module cannot be pickled; save its state_dict(), or pickle the original model and plan it again"
        )


def _tensor_attributes(model: nn.Module) -> Iterator[torch.Tensor]:
    """Listed only when somebody looks: most calls need no look beyond the parameters."""
    yield from attributes_of(model, torch.Tensor).values()


def _refuse_transforms(tensors: list[torch.Tensor]) -> None:
    if transform() or any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise CallError(
            "a planned module works under ordinary autograd (backward, torch.autograd.grad) only, not under torch.func's "
            "transforms (grad, vmap, jvp) or forward-mode differentiation; call the original model there"
        )


def _train(
    model: nn.Module,
    steps: Steps,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[torch.Tensor],
    template: Template,
) -> Any:
    """One training forward through the step planned for this signature; a new signature is planned first."""
    steps.set_up(model)
    step = steps.find(model, tensors, template)
    if step is None:
        with autocast_block_kept():
            step = steps.replan(model, args, kwargs)
        steps.add(settled_signature(model, step.trace, tensors, template), step)
        steps.set_up(model)
    for name in (*step.trace.replaced, *(name for name, _ in step.trace.filled)):
        if isinstance(plain_attribute(model, name), torch.Tensor):
            set_attribute(model, name, None)  # the tensor of the last step makes room first
    outputs = step(call_inputs(model, step.trace, tensors, sources_of(template)))
    if step.trace.effects_template is not None:
        stored, arguments_after = unflatten(step.trace.effects_template, outputs)
        for name, tensor in stored.items():
            set_attribute(model, name, tensor)
        if arguments_after is not None:
            merged((args, kwargs), arguments_after)
    return unflatten(step.trace.output_template, outputs, arguments=(args, kwargs))
