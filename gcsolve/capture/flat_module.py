"""The model as a function of flat tensors, which is what is traced; tensors that forward changes are among its outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gcsolve._torch import weights_cast
from gcsolve.capture.call_recorder import Call, CallRecorder
from gcsolve.capture.constants import KnownValues
from gcsolve.capture.custom_functions import BypassesRefused
from gcsolve.capture.hooks import Hooks, NewHook
from gcsolve.capture.module_state import Attributes, Setting, attributes_of, set_attribute
from gcsolve.capture.patches import During, patched
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
class ForwardRun:
    """What one run of forward did.

    `output`: template of the model's own output around the flat outputs. `effects`: template of (attributes, arguments)
    around them: the tensors that forward stored, by the name of the attribute; and (args, kwargs) as forward left them,
    None if it changed nothing in them (`arguments_changed`).
    `takes_gradient`, `differentiable`: as in `Trace`.
    `calls`, `uses_autograd`, `sets_default_dtype`, `value_line`: as in `CallRecorder`.
    `stored`: names of the attributes that hold other tensors than before. `settings`: plain values set on the model's
    modules, and hooks registered on them; these are left there.
    """

    output: Template
    effects: Template
    takes_gradient: tuple[bool, ...]
    differentiable: tuple[bool, ...]
    calls: list[Call]
    uses_autograd: bool
    arguments_changed: bool
    stored: tuple[str, ...]
    settings: tuple[Setting | NewHook, ...]
    sets_default_dtype: bool
    value_line: str


class RunState:
    """What runs of a `FlatModule` pass on. An object of its own, since an export undoes changes to a module's containers.

    `latest`: the run that ended last. `expected`: the calls that the next run must make; None: any.
    `in_loss`: the loss is running.
    """

    def __init__(self) -> None:
        self.latest: ForwardRun | None = None
        self.expected: list[Call] | None = None
        self.in_loss = False


@dataclass(frozen=True)
class TracedCall:
    """What a `FlatModule` computes from its flat inputs: the model's output, or the loss of it.

    `template`: of (args, kwargs), around the first flat inputs. `generators`: stand for the random generators among them.
    `attributes`: (name, index of its flat input) of each tensor that is a plain attribute of a module.
    `loss`, `all_outputs`, `kernels`: as in `trace`. `casts_once`: as `torch.is_autocast_cache_enabled()` around the call.
    """

    template: Template
    generators: Sequence[torch.Generator]
    attributes: tuple[tuple[str, int], ...]
    loss: Callable[[Any], Any] | None
    all_outputs: bool
    kernels: TargetKernels | None
    casts_once: bool


class FlatModule(nn.Module):
    """`model` as a function of a flat list of tensors to a flat tuple of tensors.

    `runs.latest` tells what its last run did. `parted`: the flat outputs that are traced as if none shared their memory.
    """

    def __init__(self, model: nn.Module, call: TracedCall) -> None:
        super().__init__()
        self.model = model
        self.call = call
        self.runs = RunState()
        self.parted: frozenset[int] = frozenset()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        arguments = unflatten(with_own_statics(self.call.template), tensors, self.call.generators)
        containers_before = _containers_token(arguments)
        replaced = attributes_of(self.model, torch.Tensor)
        for name, index in self.call.attributes:
            set_attribute(self.model, name, tensors[index])
        attributes, hooks = Attributes(self.model), Hooks(self.model)
        output, recorder = self._called(arguments)
        written, registered = attributes.written(), hooks.registered()
        for name, value in replaced.items():
            set_attribute(self.model, name, value)
        changed = arguments if _containers_token(arguments) != containers_before else None
        flattening = Flattening()
        output_template = flattening.template(output, "output", containers(arguments))
        of_model = len(flattening.tensors)
        effects = (flattening.template(written.tensors, "attribute"), flattening.template(changed, "argument"))
        outputs = flattening.tensors
        takes_gradient = self._takes_gradient(outputs, of_model)
        self.runs.latest = ForwardRun(
            output=skeleton(output_template),
            effects=skeleton(Container("sequence", effects, (0, 1), effects)),
            takes_gradient=takes_gradient,
            differentiable=tuple(t.requires_grad for t in outputs),
            calls=recorder.calls,
            uses_autograd=recorder.uses_autograd,
            arguments_changed=changed is not None,
            stored=tuple(written.tensors),
            settings=(*written.settings, *registered),
            sets_default_dtype=recorder.sets_default_dtype,
            value_line=recorder.value_line,
        )
        return tuple(self._returned(index, t, takes_gradient[index]) for index, t in enumerate(outputs))

    def _called(self, arguments: Any) -> tuple[Any, CallRecorder]:
        """The output of forward, or the loss of it, and the calls that were made."""
        call = self.call
        with contextlib.ExitStack() as stack:
            stack.enter_context(weights_cast(once=call.casts_once))
            known = stack.enter_context(KnownValues())
            stack.enter_context(patched(During.FORWARD, known=known, kernels=call.kernels))
            stack.enter_context(BypassesRefused())
            if call.kernels is not None:
                stack.enter_context(call.kernels)
            recorder = stack.enter_context(CallRecorder(self.runs.expected, self.model))
            args, kwargs = arguments
            output = self.model.forward(*args, **kwargs)
            if call.loss is not None:
                self.runs.in_loss = True
                output = _loss(call.loss, output)
                self.runs.in_loss = False
        return output, recorder

    def _takes_gradient(self, outputs: Sequence[torch.Tensor], of_model: int) -> tuple[bool, ...]:
        """For each flat output, whether the plan expects a gradient; the first `of_model` are the model's own."""
        differentiable = tuple(t.requires_grad for t in outputs)
        if self.call.all_outputs:
            return differentiable
        scalars = tuple(t.requires_grad and t.dim() == 0 for t in outputs)
        return (scalars if any(scalars[:of_model]) else differentiable)[:of_model] + scalars[of_model:]

    def _returned(self, index: int, output: torch.Tensor, takes_gradient: bool) -> torch.Tensor:
        if output.requires_grad and not takes_gradient:
            return output.detach()
        return torch.ops.aten._unsafe_view(output, output.shape) if index in self.parted else output


def _loss(loss: Callable[[Any], Any], output: Any) -> torch.Tensor:
    """The loss of the model's output.

    Raises:
        ArgumentError: it is not a scalar tensor, or does not depend on the output in a way that has a gradient.
    """
    value = loss(output)
    if not isinstance(value, torch.Tensor) or value.dim() != 0:
        kind = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise ArgumentError(
            f"loss must return a scalar tensor; {code_name(loss)} returned {kind}. Reduce it (mean, sum), and leave item() for "
            "afterwards"
        )
    if not value.requires_grad and any(t.requires_grad for t in flatten(output, "output")[0]):
        raise ArgumentError(
            f"loss must return a tensor that backward can start from; what {code_name(loss)} returned needs no gradient, "
            "though the model's output does (detach, no_grad, argmax, or it does not depend on that output)"
        )
    return value


def _containers_token(arguments: Any) -> Any:
    """Equal before and after a call that changed no more of its arguments than the content of tensors."""
    tensors, template = flatten(arguments, "example_input")
    return static_key(template, "example_input"), tuple(map(id, tensors))
