"""Model + inputs -> `Trace`: the joint graph of one training step, traced under fake tensors.

The model is never run and never touched: a structural copy with fake parameters is traced, so weights may be real, fake
or on meta, and a failed trace leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import io
import logging
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from gcsolve._torch import as_in_eager
from gcsolve.errors import ArgumentError, GcsolveError, TraceError
from gcsolve.fakes import TrueFakes, forget_fakes
from gcsolve.functions import ByHand
from gcsolve.joint import Joint, capture_joint, fake_module, fake_tensor
from gcsolve.kernels import TargetKernels
from gcsolve.known import KnownValues
from gcsolve.structure import Template, flatten, leaf_paths, skeleton, unflatten

PREFIX = "model."  # of every parameter and buffer name in the joint graph: the model is a child of `_Flat`


@dataclass(frozen=True)
class Trace:
    """One traced step.

    `output_template` rebuilds the model's own output around the flat outputs. `takes_gradient[k]`: the plan expects a
    gradient for flat output k; `differentiable[k]`: the untouched model would accept one. `output_paths[k]` names it.
    `target`: the kind of device ("cuda") whose kernels were traced in place of the CPU's, "" when none were;
    `target_only`: those ops that the CPU cannot run.
    """

    joint: Joint
    output_template: Template
    takes_gradient: tuple[bool, ...]
    differentiable: tuple[bool, ...]
    output_paths: tuple[str, ...]
    input_paths: tuple[str, ...]
    target: str = ""
    target_only: tuple[str, ...] = ()


def parse_example(example_input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the model call: a tensor, a tuple or list of arguments, or a Mapping.

    Raises:
        ArgumentError: it is none of these, or a mapping with keys that are not names.
    """
    if isinstance(example_input, torch.Tensor):
        return (example_input,), {}
    if isinstance(example_input, Mapping):
        if not all(isinstance(key, str) for key in example_input):
            raise ArgumentError(f"example_input is a mapping with keys {list(example_input)}; keys are argument names")
        return (), dict(example_input)
    if isinstance(example_input, (tuple, list)):
        return tuple(example_input), {}
    raise ArgumentError(
        f"example_input={type(example_input).__name__}; pass a tensor, a tuple or list of positional arguments, "
        "or a mapping of keyword arguments"
    )


class _Record:
    """What the traced call saw; no container, since export undoes changes to a module's containers."""

    last: tuple[Template, tuple[bool, ...], tuple[bool, ...]]


class _Flat(nn.Module):
    """The model as a function of a flat list of tensors to a flat tuple of tensors."""

    def __init__(
        self,
        model: nn.Module,
        template: Template,
        loss: Callable[[Any], Any] | None,
        all_outputs: bool,
        kernels: TargetKernels | None,
    ) -> None:
        super().__init__()
        self.model = model
        self.settings = (template, loss, all_outputs, kernels)
        self.record = _Record()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        template, loss, all_outputs, kernels = self.settings
        args, kwargs = unflatten(template, tensors)
        with as_in_eager(), KnownValues(), ByHand(), kernels or contextlib.nullcontext():
            result = self.model.forward(*args, **kwargs)
            if loss is not None:
                result = loss(result)
        if loss is not None and (not isinstance(result, torch.Tensor) or result.dim() != 0):
            shape = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
            raise ArgumentError(f"loss must return a scalar tensor; it returned {shape}")
        outputs, out_template = flatten(result, "output")
        differentiable = tuple(t.requires_grad for t in outputs)
        scalars = tuple(d and t.dim() == 0 for d, t in zip(differentiable, outputs, strict=True))
        takes = scalars if any(scalars) and not all_outputs else differentiable
        self.record.last = (skeleton(out_template), takes, differentiable)
        return tuple(t.detach() if d and not k else t for t, d, k in zip(outputs, differentiable, takes, strict=True))


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Callable[[Any], Any] | None = None,
    all_outputs: bool = False,
    kernels: TargetKernels | None = None,
) -> Trace:
    """Trace `model(*args, **kwargs)` (then `loss`) and its backward to one graph; nothing is run or allocated.

    Args:
        loss: maps the model's output to a scalar; traced with the model, and then the step's only output.
        all_outputs: expect a gradient for every differentiable output. Default: when some of them are scalars (a loss
            among logits), for the scalars only.
        kernels: those of the device to trace for, when the model's tensors are not there.

    Raises:
        TraceError: the model branches on a tensor's value (names the user's line), draws from Python's or numpy's
            random generator, has no output that needs a gradient, or cannot be exported.
        ArgumentError: an input or output holds something that cannot be flattened.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model={type(model).__name__} is not an nn.Module")
    _refuse_untraceable(model)
    _refuse_hooks(model)
    tensors, template = flatten((args, kwargs), "example_input")
    mode = TrueFakes(run=all(t.device.type != "meta" for t in (*model.parameters(), *model.buffers(), *tensors)))
    fakes = [fake_tensor(mode, t) for t in tensors]
    flat = _Flat(_copied(mode, model), template, loss, all_outputs, kernels)
    with _HostRandomnessRefused(), _torch_quiet():
        try:
            joint = capture_joint(flat, fakes, mode, on_cpu=kernels is None)
        except GcsolveError:
            raise
        except Exception as error:
            raise _worded(error, model, _call_text(model, tensors, template)) from error
        finally:
            forget_fakes()
    out_template, takes, differentiable = flat.record.last
    if not any(takes):
        raise TraceError(
            f"no output of {type(model).__name__} needs a gradient: every parameter and input has requires_grad=False, "
            "or the output is detached; there is no backward to plan"
        )
    paths = leaf_paths(out_template)
    names = leaf_paths(template)
    return Trace(
        joint,
        out_template,
        takes,
        differentiable,
        tuple(paths[k] for k in range(len(takes))),
        tuple(names[k].removeprefix("example_input") for k in range(len(tensors))),
        kernels.device.kind if kernels else "",
        tuple(kernels.used) if kernels else (),
    )


def _refuse_untraceable(model: nn.Module) -> None:
    """What torch traces to something else than it runs (found with torch 2.14: recurrent layers lose their dropout)."""
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1 and module.training:
            raise TraceError(
                f"{name or 'the model'} ({type(module).__name__}) has dropout={module.dropout} between its layers, which "
                "torch leaves out when it traces: the plan would train another model. Stack one-layer modules with "
                "nn.Dropout between them, or set dropout=0"
            )


def _refuse_hooks(model: nn.Module) -> None:
    """Hooks of submodules would run once, while tracing; those of the model itself run around every planned forward."""
    for name, module in model.named_modules():
        if module is model:
            continue
        forward = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        ours = [h for h in forward if not getattr(type(h), "__module__", "").startswith("torch.nn.utils")]
        if ours or module._backward_hooks or module._backward_pre_hooks:
            raise TraceError(
                f"submodule {name} ({type(module).__name__}) has hooks, which would not run in a planned step; remove them, "
                "put them on the model itself or on its parameters, or plan the submodules beside it"
            )


def _copied(mode: Any, model: nn.Module) -> nn.Module:
    try:
        return fake_module(mode, model)
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__} could not be copied for tracing ({type(error).__name__}: {error}); an attribute that "
            "copy.deepcopy cannot copy is the usual reason"
        ) from error


@contextlib.contextmanager
def _torch_quiet() -> Iterator[None]:
    """When a trace fails, torch logs and prints the half-made graph; the error says it in one line instead."""
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith("torch")]
    asleep = [logger for logger in loggers if not logger.disabled]
    for logger in asleep:
        logger.disabled = True
    text = io.StringIO()
    try:
        with contextlib.redirect_stderr(text):
            yield
    finally:
        for logger in asleep:
            logger.disabled = False
    sys.stderr.write(text.getvalue())  # what the model itself had to say


class _HostRandomnessRefused:
    """Python's and numpy's draws inside forward would be baked into the graph: notice them by their generators' states."""

    def __enter__(self) -> None:
        self.before = random.getstate(), _numpy_state()

    def __exit__(self, kind: Any, value: Any, tb: Any) -> None:
        python, (state, comparable) = self.before
        drawn = [("random", random.getstate() != python), ("numpy.random", _numpy_state()[1] != comparable)]
        moved = [name for name, has_moved in drawn if has_moved]
        random.setstate(python)
        numpy.random.set_state(state)
        if moved and kind is None:
            raise TraceError(
                f"forward draws from {' and '.join(moved)} (layer drop, masking on the host): the draw would be the same in "
                "every step. Use torch's generator in forward, or switch that feature off"
            )


def _numpy_state() -> tuple[Any, Any]:
    """numpy's global generator state, and the same in a form that can be compared."""
    state: Any = numpy.random.get_state()
    return state, (state[0], state[1].tobytes(), *state[2:])


def user_line(error: BaseException) -> str:
    """ "file:line" of the deepest frame that belongs neither to torch nor to gcsolve nor to the standard library."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        for frame in reversed(traceback.extract_tb(current.__traceback__)):
            if is_user_file(frame.filename):
                return f"{shown_path(frame.filename)}:{frame.lineno}"
        current = current.__cause__ or current.__context__
    return ""


_TORCH = str(Path(str(torch.__file__)).parent)
_OWN = str(Path(__file__).parent)
_STDLIB = str(Path(str(random.__file__)).parent)


def shown_path(filename: str) -> str:
    """A source file as people know it: below site-packages, below the working directory, or in full."""
    _, found, installed = filename.rpartition("site-packages/")
    if found:
        return installed
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename


def is_user_file(filename: str) -> bool:
    """Whether a source line there is the user's (or a model zoo's), not torch's, gcsolve's or Python's."""
    if filename.startswith((_TORCH, _OWN, "<")):
        return False
    return not filename.startswith(_STDLIB) or "site-packages" in filename


def _call_text(model: nn.Module, tensors: list[torch.Tensor], template: Template) -> str:
    """The call as the user would write it, shapes for tensors: MLP(float32[8, 32], flip=True)."""
    shown = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors]
    args, kwargs = unflatten(template, [_Shown(text) for text in shown])
    parts = [*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())]
    return f"{type(model).__name__}({', '.join(parts)})"


class _Shown(str):
    """Text that prints without quotes."""

    __repr__ = str.__str__


def _worded(error: Exception, model: nn.Module, call: str) -> TraceError:
    line = user_line(error)
    at = f" at {line}" if line else ""
    name = type(error).__name__
    if "DataDependent" in name or "data-dependent" in str(error):
        return TraceError(
            f"{type(model).__name__} branches on a tensor's value{at}: the two ways would need two plans. Replace the branch "
            "by torch.where, or plan the submodules around it: model.part = gcsolve.solve(model.part, ...).module"
        )
    first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return TraceError(
        f"{call} failed while it was traced{at}: {name}: {first}. If the same call works on the model itself, plan a part of "
        "it instead: "
        "model.part = gcsolve.solve(model.part, ...).module"
    )
