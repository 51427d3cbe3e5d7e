"""The module a plan hands out: the user's own module in all but its training forward.

It is an instance of a subclass of the model's class that shares the model's `__dict__`: parameters, buffers, submodules,
hooks, `training` and every attribute are the very same objects, in both directions.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from gcsolve._torch import global_module_hooks, transform
from gcsolve.capture.autocast import is_weight
from gcsolve.capture.context import Context
from gcsolve.capture.hooks import NewHook, hooks_token
from gcsolve.capture.joint import (
    ArgumentGenerator,
    ArgumentInput,
    AttributeGenerator,
    AttributeInput,
    BufferInput,
    ConstantInput,
    GraphInput,
    ParameterInput,
)
from gcsolve.capture.module_state import (
    OWN_STATE,
    PLAIN,
    Setting,
    attribute_name,
    attributes_of,
    identity,
    plain_attribute,
    set_attribute,
    token,
)
from gcsolve.capture.trace import Trace
from gcsolve.errors import ArgumentError, CallError
from gcsolve.execution.gradient_handoff import autocast_block_kept
from gcsolve.execution.step import Step
from gcsolve.util.tree import Template, flatten, merged, sources_of, static_key, unflatten

_PLAIN = frozenset(PLAIN)

Planner = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Step]


class Steps:
    """The emitted steps of one planned module, one a call signature, and how to make another."""

    def __init__(self, replan: Planner, loss: Callable[[Any], Any] | None) -> None:
        self.replan = replan
        self.loss = loss
        self.cache: dict[Any, Step] = {}
        self.settings: list[Setting | NewHook] = []
        self.remembered = Remembered()
        self.training = True

    def add(self, key: Any, step: Step) -> None:
        self.cache[key] = step
        self.settings += [setting for setting in step.trace.settings if setting not in self.settings]

    def known(self, model: nn.Module, tensors: list[torch.Tensor], template: Template) -> Step | None:
        """The step planned for such a call, if there is one; where the first call has filled attributes that forward does
        not read (`Trace.filled`), that is the first call's."""
        key = signature(model, tensors, template, self.remembered)
        found = self.cache.get(key)  # looked up once: hashing a key takes a while
        for step in () if found else list(self.cache.values()):
            if step.trace.filled and self.cache.get(_early_signature(model, step, tensors, template)) is step:
                found = self.cache[key] = step
                break
        return found

    def set_up(self, model: nn.Module) -> None:
        """Set what the model's first call sets (a flag, an entry of a config) where it is not set yet."""
        for setting in self.settings:
            setting.apply(model)


@dataclass(frozen=True)
class _Own:
    """The attributes of a module: their names, the ids of their values, the plain ones, and the names of the rest."""

    names: tuple[str, ...]
    ids: list[int]
    values: tuple[Any, ...]  # of the plain ones: as long as they are held on to, no other value has their ids
    plain: tuple[Any, ...]
    rest: tuple[str, ...]


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(type(v) in _PLAIN for v in value))


class Remembered:
    """Of each module its plain attributes as they last were: a call looks for what has changed, by identity.

    Nothing else is held on to: not the tensors that a forward leaves on a module.
    """

    def __init__(self) -> None:
        self.of: list[_Own] = []

    def attributes(self, place: int, module: nn.Module) -> _Own:
        """Those of the module at `place` among the model's."""
        held = vars(module)
        names, ids = tuple(held), list(map(id, held.values()))
        known = self.of[place] if place < len(self.of) else None
        if known is None or known.ids != ids or known.names != names:
            own = sorted((name, value) for name, value in held.items() if name not in OWN_STATE)
            plain = [(name, value) for name, value in own if _is_plain(value)]
            rest = tuple(name for name, value in own if not _is_plain(value))
            tokens = tuple((name, token(value, identity, set())) for name, value in plain)
            known = _Own(names, ids, tuple(value for _, value in plain), tokens, rest)
            self.of[place : place + 1] = [known]
        return known


def signature(
    model: nn.Module, tensors: list[torch.Tensor], template: Template, remembered: Remembered | None = None
) -> Any:
    """Equal for two calls exactly when one traced step serves both: structure, non-tensor arguments, shapes, strides,
    dtypes, devices, who needs gradients, training flags, hooks, autocast, default dtype and the modules' own settings."""
    modules = list({id(m): m for _, m in walk(model)}.values())
    context = Context.here()
    return (
        static_key(template, "example_input"),
        tuple(map(_description, tensors)),
        tuple(map(is_weight, tensors)) if context.regions and context.casts_once else (),
        global_module_hooks(),
        hooks_token(model) if any(m._forward_hooks or m._forward_pre_hooks for m in modules) else (),
        context,
        _states(modules, remembered or Remembered()),
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


def _early_signature(model: nn.Module, step: Step, tensors: list[torch.Tensor], template: Template) -> Any:
    """The signature of the model as it was before `Trace.filled` was; the model itself stays as it is."""
    held = {name: plain_attribute(model, name) for name, _ in step.trace.filled}
    filled = {name: old for name, old in step.trace.filled if isinstance(held[name], torch.Tensor)}
    for name, old in filled.items():
        set_attribute(model, name, old)
    try:
        return signature(model, tensors, template)
    finally:
        for name in filled:
            set_attribute(model, name, held[name])


def walk(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(path, module) as `model.named_modules(remove_duplicate=False)` gives them, several times faster."""
    found: list[tuple[str, nn.Module]] = []
    stack = [("", model)]
    while stack:
        path, module = stack.pop()
        found.append((path, module))
        stack += [(attribute_name(path, n), m) for n, m in reversed(module._modules.items()) if m is not None]
    return found


def _states(modules: Sequence[nn.Module], remembered: Remembered) -> tuple[Any, ...]:
    """Of each submodule its class, training flag, hooks, what its parameters and buffers are like, and its plain attributes
    (a dropout's p, a norm's eps, an activation function), with what the containers and objects among them hold (a config):
    what forward may read and a plan has baked in. This runs in every call."""
    seen: set[int] = set()
    states = []
    for place, m in enumerate(modules):
        own, held = remembered.attributes(place, m), vars(m)
        hooks = (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
        states.append(
            (
                type(m),
                m.training,
                tuple(map(tuple, hooks)) if any(hooks) else (),
                tuple([(p.shape, p.dtype, p.device, p.requires_grad) for p in m._parameters.values() if p is not None]),
                tuple([(b.shape, b.dtype, b.device) for b in m._buffers.values() if b is not None]),
                own.plain,
                tuple([(name, _setting(held[name], seen)) for name in own.rest]),
            )
        )
    return tuple(states)


def _setting(value: Any, seen: set[int]) -> Any:
    return _description(value) if isinstance(value, torch.Tensor) else token(value, identity, seen)


def _description(t: torch.Tensor) -> Any:
    return (t.shape, t.stride(), t.dtype, t.device, t.requires_grad)


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
    names = {"_gcsolve": steps, "_gcsolve_model": model, "forward": _as_planned(kind.forward)}
    planned = type(f"Planned{kind.__name__}", (_Planned, kind), names)
    made = object.__new__(planned)
    object.__setattr__(made, "__dict__", model.__dict__)
    return made


def _as_planned(original: Callable[..., Any]) -> Callable[..., Any]:
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
            if any(t.requires_grad for t in chain(tensors, model.parameters(), _attributes(model))):
                return run(model, steps, args, kwargs, tensors, template)
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
            f"# forward\n{s.emitted.forward.code}\n# backward\n{s.emitted.backward.code}"
            for s in {id(s): s for s in self._gcsolve.cache.values()}.values()
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return planned_module(copy.deepcopy(self._gcsolve_model, memo), self._gcsolve)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CallError(
            "a planned module cannot be pickled; save its state_dict(), or pickle the original model and plan it again"
        )


def _attributes(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from attributes_of(model, torch.Tensor).values()


def _refuse_transforms(tensors: list[torch.Tensor]) -> None:
    if transform() or any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise CallError(
            "a planned module works under ordinary autograd (backward, torch.autograd.grad) only, not under torch.func's "
            "transforms (grad, vmap, jvp) or forward-mode differentiation; call the original model there"
        )


def run(
    model: nn.Module,
    steps: Steps,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[torch.Tensor],
    template: Template,
) -> Any:
    """One training forward through the step planned for this signature; a new signature is planned first."""
    steps.set_up(model)
    step = steps.known(model, tensors, template)
    if step is None:
        with autocast_block_kept():
            step = steps.replan(model, args, kwargs)
        steps.add(settled_signature(model, step.trace, tensors, template), step)
        steps.set_up(model)
    for name in (*step.trace.replaced, *(name for name, _ in step.trace.filled)):
        if isinstance(plain_attribute(model, name), torch.Tensor):
            set_attribute(model, name, None)  # the tensor of the last step makes room first
    outputs = step(collect(model, step, tensors, sources_of(template)))
    if step.trace.effects_template is not None:
        stored, changed = unflatten(step.trace.effects_template, outputs)
        for name, tensor in stored.items():
            set_attribute(model, name, tensor)
        if changed is not None:
            merged((args, kwargs), changed)
    return unflatten(step.trace.output_template, outputs, arguments=(args, kwargs))


def collect(
    model: nn.Module, step: Step, tensors: Sequence[torch.Tensor], sources: Sequence[torch.Generator] = ()
) -> list[Any]:
    """What the step's inputs are now (tensors, and random generators): parameters may have been replaced since planning.

    Raises:
        CallError: one of them is on meta, or on the CPU where the step has another device's kernels.
    """
    sources_of_call = _Sources(model, tensors, sources, step.trace.joint.constants)
    inputs: list[Any] = []
    for source in step.trace.joint.inputs:
        if isinstance(source, AttributeInput) and source.name in step.trace.replaced:
            inputs.append(None)  # nothing reads it
            continue
        value = sources_of_call.find(source)
        if isinstance(value, torch.Tensor) and value.device.type == "meta":
            raise CallError(f"{source} is on meta: this plan can be read, not run; give the model real weights first")
        if step.trace.target_only and isinstance(value, torch.Tensor) and value.device.type == "cpu":
            raise CallError(
                f"{source} is on the CPU, and this plan has kernels of the device it is for that the CPU lacks "
                f"({', '.join(step.trace.target_only)}): it can be read here, not run. On that device, move model and "
                "inputs there and call again; to train on this CPU, plan with device='cpu'"
            )
        inputs.append(value)
    return inputs


class _Sources:
    """Where the inputs of a step are found in one call: the model as it is now, the arguments, and the step's constants."""

    def __init__(
        self,
        model: nn.Module,
        tensors: Sequence[torch.Tensor],
        generators: Sequence[torch.Generator],
        constants: Mapping[str, torch.Tensor],
    ) -> None:
        self.model = model
        self.tensors = tensors
        self.generators = generators
        self.constants = constants

    @functools.cached_property
    def parameters(self) -> dict[str, Any]:
        return {attribute_name(path, name): p for path, m in walk(self.model) for name, p in m._parameters.items()}

    @functools.cached_property
    def buffers(self) -> dict[str, Any]:
        return {attribute_name(path, name): b for path, m in walk(self.model) for name, b in m._buffers.items()}

    @functools.cached_property
    def tensor_attributes(self) -> dict[str, torch.Tensor]:
        return attributes_of(self.model, torch.Tensor)

    @functools.cached_property
    def generator_attributes(self) -> dict[str, torch.Generator]:
        return attributes_of(self.model, torch.Generator)

    def find(self, source: GraphInput) -> Any:
        match source:
            case ParameterInput():
                return self.parameters[source.name]
            case BufferInput():
                return self.buffers[source.name]
            case ConstantInput():
                return self.constants[source.name]
            case ArgumentInput():
                return self.tensors[source.index]
            case AttributeInput():
                return self.tensor_attributes[source.name]
            case ArgumentGenerator():
                return self.generators[source.index]
            case AttributeGenerator():
                return self.generator_attributes[source.name]
