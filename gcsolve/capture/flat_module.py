"""The model as a function of flat tensors, for tracing; with what forward changes beside its outputs as further outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gcsolve._torch import weights_cast
from gcsolve.capture.constants import KnownValues
from gcsolve.capture.custom_functions import ByHand
from gcsolve.capture.hooks import Hooks, NewHook
from gcsolve.capture.module_state import Attributes, Setting, Written, attributes_of, set_attribute
from gcsolve.capture.patches import During, patched
from gcsolve.capture.rehearsal import Rehearsed
from gcsolve.capture.target_kernels import TargetKernels
from gcsolve.errors import ArgumentError
from gcsolve.util.source import code_name
from gcsolve.util.tree import (
    Container,
    Flattening,
    Template,
    containers,
    flatten,
    skeleton,
    static_key,
    unflatten,
    with_own_statics,
)


@dataclass(frozen=True)
class Seen:
    """What one run of forward showed.

    Templates around the flat outputs: `output` is the model's own; `effects` holds (attributes, arguments): tensors by the
    name of the attribute they were stored in, and (args, kwargs) as forward left them (None where it changed nothing).
    `takes_gradient`, `differentiable`: as in `Trace`. `calls`: torch functions called. `uses_autograd`: forward does
    something with autograd itself, which must be traced where it happens. `stored`: names of the attributes that hold
    other tensors now. `settings`: plain values set on the model's modules, and hooks registered on them; they
    are left there.
    `sets_default_dtype`: some of forward ran under another default dtype than the call. `value_line`: the user's line that
    first made a number or a shape of a tensor's values.
    """

    output: Template
    effects: Template
    takes_gradient: tuple[bool, ...]
    differentiable: tuple[bool, ...]
    calls: list[Any]
    uses_autograd: bool
    arguments_changed: bool
    stored: tuple[str, ...]
    settings: tuple[Setting | NewHook, ...]
    sets_default_dtype: bool
    value_line: str


class Last:
    """What the last run showed, and the calls that the next must make (None: any). An object of its own, since export undoes
    changes to a module's containers. `in_loss`: the loss is running."""

    seen: Seen | None = None
    expected: list[Any] | None = None
    in_loss = False


@dataclass(frozen=True)
class Call:
    """What is traced: the call's structure, the loss, and which flat inputs are attributes (by name), after the arguments'.

    `sources`: what stands for the call's random generators. `kernels`: those of another device, to trace for.
    `casts_once`: as `torch.is_autocast_cache_enabled()` around the call.
    """

    template: Template
    sources: Sequence[torch.Generator]
    attributes: tuple[tuple[str, int], ...]
    loss: Callable[[Any], Any] | None
    all_outputs: bool
    kernels: TargetKernels | None
    casts_once: bool


class Flat(nn.Module):
    """`model` as a function of a flat list of tensors to a flat tuple of tensors; each run leaves `last.seen`."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model = model
        self.call = call
        self.last = Last()
        self.parted: frozenset[int] = frozenset()  # flat outputs that are traced as if no other shared their memory

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        call = self.call
        template = with_own_statics(call.template)
        arguments = unflatten(template, tensors, call.sources)
        held = _state(arguments)
        replaced = attributes_of(self.model, torch.Tensor)
        for name, at in call.attributes:
            set_attribute(self.model, name, tensors[at])
        attributes, hooks = Attributes(self.model), Hooks(self.model)
        with contextlib.ExitStack() as stack:
            stack.enter_context(weights_cast(once=call.casts_once))
            known = stack.enter_context(KnownValues())
            stack.enter_context(patched(During.FORWARD, known=known, kernels=call.kernels))
            stack.enter_context(ByHand())
            if call.kernels is not None:
                stack.enter_context(call.kernels)
            rehearsed = stack.enter_context(Rehearsed(self.last.expected, self.model))
            args, kwargs = arguments
            result = self.model.forward(*args, **kwargs)
            if call.loss is not None:
                self.last.in_loss = True
                result = _loss(call.loss, result)
                self.last.in_loss = False
        written, registered = attributes.written(), hooks.registered()
        for name, value in replaced.items():
            set_attribute(self.model, name, value)
        changed = arguments if _state(arguments) != held else None
        settings = (*written.settings, *registered)
        return self._seen(result, written, settings, changed, containers(arguments), rehearsed)

    def _seen(
        self,
        result: Any,
        written: Written,
        settings: tuple[Setting | NewHook, ...],
        changed: Any,
        places: Any,
        rehearsed: Rehearsed,
    ) -> tuple[torch.Tensor, ...]:
        """Keep what the run showed; the flat outputs, detached where no gradient is planned for."""
        flat = Flattening()
        output = flat.template(result, "output", places)
        n, outputs = len(flat.tensors), flat.tensors
        effects = (flat.template(written.tensors, "attribute"), flat.template(changed, "argument"))
        differentiable = tuple(t.requires_grad for t in outputs)
        scalars = tuple(d and t.dim() == 0 for d, t in zip(differentiable, outputs, strict=True))
        if self.call.all_outputs:
            takes = differentiable
        else:
            takes = (scalars if any(scalars[:n]) else differentiable)[:n] + scalars[n:]
        self.last.seen = Seen(
            skeleton(output),
            skeleton(Container("sequence", effects, (0, 1), effects)),
            takes,
            differentiable,
            rehearsed.calls,
            rehearsed.uses_autograd,
            changed is not None,
            tuple(written.tensors),
            settings,
            rehearsed.sets_default_dtype,
            rehearsed.value_line,
        )
        return tuple(
            t.detach() if d and not k else torch.ops.aten._unsafe_view(t, t.shape) if at in self.parted else t
            for at, (t, d, k) in enumerate(zip(outputs, differentiable, takes, strict=True))
        )


def _loss(loss: Callable[[Any], Any], output: Any) -> torch.Tensor:
    """The loss of the model's output, which it must depend on."""
    value = loss(output)
    if not isinstance(value, torch.Tensor) or value.dim() != 0:
        made = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise ArgumentError(
            f"loss must return a scalar tensor; {code_name(loss)} returned {made}. Reduce it (mean, sum), and leave item() for "
            "afterwards"
        )
    if not value.requires_grad and any(t.requires_grad for t in flatten(output, "output")[0]):
        raise ArgumentError(
            f"loss must return a tensor that backward can start from; what {code_name(loss)} returned needs no gradient, "
            "though the model's output does (detach, no_grad, argmax, or it does not depend on that output)"
        )
    return value


def _state(arguments: Any) -> Any:
    """Equal before and after a call that only changed the content of tensors."""
    tensors, template = flatten(arguments, "example_input")
    return static_key(template, "example_input"), tuple(map(id, tensors))
