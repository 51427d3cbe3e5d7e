"""Model + inputs -> `Trace`: the joint graph of one training step, traced under fake tensors.

The model is never run and never touched: a structural copy with fake parameters is traced, so weights may be real, fake
or on meta, and a failed trace leaves nothing behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from gcsolve._torch import is_compiled, is_compiled_in_place
from gcsolve.capture import batchnorm
from gcsolve.capture.autocast import is_weight
from gcsolve.capture.console import heard
from gcsolve.capture.context import Context
from gcsolve.capture.custom_functions import KeptFunctions
from gcsolve.capture.diagnostics import call_text, subject_text, worded
from gcsolve.capture.fake_mode import TrueFakes, forget_fakes
from gcsolve.capture.flat_module import Call, Flat, Seen
from gcsolve.capture.generators import (
    StandIns,
    draws_of_others_wait,
    draws_on_the_host,
    host_states,
    set_host_states,
)
from gcsolve.capture.hooks import HooksRefused, NewHook, refuse_hooks
from gcsolve.capture.joint import (
    ArgumentGenerator,
    ArgumentInput,
    AttributeGenerator,
    AttributeInput,
    BufferInput,
    Joint,
    summed_otherwise,
)
from gcsolve.capture.joint_trace import capture_joint, fake_module, fake_tensor
from gcsolve.capture.module_state import Setting, attributes_of, changed_attribute, plain_attribute, set_attribute
from gcsolve.capture.patches import During, patched
from gcsolve.capture.target_kernels import TargetKernels
from gcsolve.errors import ArgumentError, GcsolveError, TraceError
from gcsolve.util.source import is_user_file, shown_path
from gcsolve.util.tree import Static, Template, flatten, leaf_paths, sources_of, unflatten


@dataclass(frozen=True)
class Trace:
    """One traced step.

    `output_template` rebuilds the model's own output around the flat outputs, `effects_template` what forward changed
    beside it (`Seen.effects`; None: nothing). `replaced`: attributes whose tensor forward replaces without reading it.
    `filled`: (name, what is there) of those that hold no tensor yet. `settings`: plain attributes that the first call
    sets, and hooks that it registers. `takes_gradient[k]`: the plan expects a gradient for flat output k;
    `differentiable[k]`: the untouched model would accept one. `output_paths[k]` names it.
    `context`: autocast and default dtype around the call; `backward_context`: around its backward.
    `target`: the kind of device ("cuda") whose kernels were traced in place of the CPU's, "" when none were;
    `target_only`: those ops that the CPU cannot run.
    """

    joint: Joint
    output_template: Template
    effects_template: Template | None
    replaced: tuple[str, ...]
    filled: tuple[tuple[str, Any], ...]
    settings: tuple[Setting | NewHook, ...]
    takes_gradient: tuple[bool, ...]
    differentiable: tuple[bool, ...]
    output_paths: tuple[str, ...]
    input_paths: tuple[str, ...]
    context: Context
    backward_context: Context
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


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Callable[[Any], Any] | None = None,
    all_outputs: bool = False,
    kernels: TargetKernels | None = None,
    autocast_backward: bool = False,
) -> Trace:
    """Trace `model(*args, **kwargs)` (then `loss`) and its backward to one graph; nothing is run or allocated.

    Args:
        loss: maps the model's output to a scalar; traced with the model, and then the step's only output.
        all_outputs: expect a gradient for every differentiable output. Default: when some of them are scalars (a loss
            among logits), for the scalars only.
        kernels: those of the device to trace for, when the model's tensors are not there.
        autocast_backward: backward is called under the autocast that is around the call, not outside it.

    Raises:
        TraceError: the model branches on a tensor's value (names the user's line), draws from Python's or numpy's
            random generator, has no output that needs a gradient, or cannot be exported.
        ArgumentError: an input or output holds something that cannot be flattened.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model={type(model).__name__} is not an nn.Module")
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise TraceError(f"parameter {name} has no shape yet (a lazy module); call the model once before planning")
    if kernels is not None:
        _refuse_untraceable(model)
    _refuse_compiled(model)
    refuse_hooks(model)
    # A step is one of training, wherever it is planned.
    with patched(During.TRACE), torch.inference_mode(False), torch.enable_grad():
        return _traced(model, args, kwargs, loss, all_outputs, kernels, autocast_backward)


def _traced(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Any,
    all_outputs: bool,
    kernels: TargetKernels | None,
    autocast_backward: bool,
) -> Trace:
    tensors, template = flatten((args, kwargs), "example_input")
    context = Context.here()
    stand_ins = StandIns(
        {
            **{ArgumentGenerator(index): generator for index, generator in enumerate(sources_of(template))},
            **{
                AttributeGenerator(name): generator for name, generator in attributes_of(model, torch.Generator).items()
            },
        }
    )
    flat_inputs = list(tensors)
    attributes: dict[str, int] = {}
    known = {id(t) for t in (*model.parameters(), *model.buffers())}
    for name, tensor in attributes_of(model, torch.Tensor).items():
        if id(tensor) not in known:
            attributes[name] = _position(flat_inputs, tensor)
    call = Call(
        template,
        [stand_ins.of[id(generator)] for generator in sources_of(template)],
        tuple(attributes.items()),
        loss,
        all_outputs,
        kernels,
        context.casts_once,
    )
    real = all(t.device.type != "meta" for t in (*model.parameters(), *model.buffers(), *tensors))
    mode = TrueFakes(run=real, elsewhere=kernels is not None)
    copied = _copied(mode, model, stand_ins.of)
    cumulative = batchnorm.mark(copied)
    flat = Flat(copied, call)
    with heard(is_user_file, shown_path) as prints:
        try:
            settings, filled = _rehearse(flat, mode, flat_inputs)
            prints.hush()
            assert flat.last.seen is not None
            exported = not (flat.last.seen.uses_autograd or flat.last.seen.sets_default_dtype)
            flat.last.expected = flat.last.seen.calls if exported else None
            fakes = [fake_tensor(mode, t) for t in flat_inputs]

            def capture() -> Joint:
                return capture_joint(
                    flat,
                    fakes,
                    mode,
                    stand_ins,
                    leaves=[at for at, t in enumerate(flat_inputs) if is_weight(t)],
                    exported=exported,
                    on_cpu=kernels is None,
                    autocast_backward=autocast_backward,
                )

            joint = capture()
            flat.parted = summed_otherwise(joint)
            if flat.parted:
                joint = replace(capture(), parted=flat.parted)
        except GcsolveError:
            raise
        except Exception as error:
            value_line = flat.last.seen.value_line if flat.last.seen else ""
            subject = subject_text(model, loss, in_loss=flat.last.in_loss)
            raise worded(error, subject, call_text(model, tensors, template), value_line) from error
        finally:
            forget_fakes()
    seen = flat.last.seen
    _refuse_sparse(joint)
    if not any(seen.takes_gradient):
        raise TraceError(_no_gradient(model, flat_inputs, seen.output))
    if seen.sets_default_dtype:
        _name_default_dtypes(joint)
    name_of = {at: name for name, at in attributes.items() if at >= len(tensors)}
    inputs = tuple(
        AttributeInput(name_of[source.index])
        if isinstance(source, ArgumentInput) and source.index in name_of
        else source
        for source in joint.inputs
    )
    graph = joint.graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")
    counters = {s.name: node for node, s in zip(placeholders, inputs, strict=False) if isinstance(s, BufferInput)}
    batchnorm.compute_factors(graph, cumulative, counters)
    read = {
        source.name
        for node, source in zip(placeholders, inputs, strict=False)
        if isinstance(source, AttributeInput) and node.users
    }
    paths = {k: path for template in (seen.effects, seen.output) for k, path in leaf_paths(template).items()}
    names = leaf_paths(template)
    return Trace(
        replace(joint, inputs=inputs),
        seen.output,
        seen.effects if seen.stored or seen.arguments_changed else None,
        tuple(name for name in seen.stored if name not in read and name in attributes),
        filled,
        settings,
        seen.takes_gradient,
        seen.differentiable,
        tuple(paths[k] for k in range(len(seen.takes_gradient))),
        tuple(names[k].removeprefix("example_input") for k in range(len(tensors))),
        context,
        context if autocast_backward else context.outside_autocast(),
        kernels.device.kind if kernels else "",
        tuple(kernels.used) if kernels else (),
    )


def _no_gradient(model: nn.Module, inputs: list[torch.Tensor], output: Template) -> str:
    """Why there is no backward to plan, and what to change."""
    kind = type(model).__name__
    if not leaf_paths(output):
        made = f" but {output.value!r}" if isinstance(output, Static) else ""
        return f"{kind} returns no tensor{made}: there is no backward to plan. Let forward return what the loss is taken of"
    if not any(t.requires_grad for t in (*model.parameters(), *inputs)):
        return (
            f"no output of {kind} needs a gradient: every parameter and input has requires_grad=False; there is no backward to "
            "plan. Call requires_grad_() on what is trained"
        )
    return (
        f"no output of {kind} needs a gradient, though parameters or inputs do: forward detaches it, computes it under "
        "torch.no_grad(), or returns whole numbers; there is no backward to plan"
    )


def _refuse_sparse(joint: Joint) -> None:
    for node in joint.graph_module.graph.nodes:
        for made in (node.meta.get("val"),) if isinstance(node.meta.get("val"), torch.Tensor) else ():
            if made.layout is not torch.strided:
                raise TraceError(
                    f"{node.target} makes a sparse tensor ({made.layout}), which is not planned; a gradient of an embedding is "
                    "dense with sparse=False"
                )


def _name_default_dtypes(joint: Joint) -> None:
    """Name the dtype where forward has set the default; refuse an op that takes it from there and has no argument for it."""
    for node in joint.graph_module.graph.nodes:
        made: Any = node.meta.get("val")
        if node.op != "call_function" or not isinstance(made, torch.Tensor) or not made.is_floating_point():
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
        with node.meta["val"].fake_mode:
            dtype = node.target(*args, **kwargs).dtype
        if dtype != made.dtype and any(argument.name == "dtype" for argument in node.target._schema.arguments):
            node.kwargs = {**node.kwargs, "dtype": made.dtype}
        elif dtype != made.dtype:
            raise TraceError(
                f"forward sets the default dtype, and {node.target} takes it from there ({made.dtype} in forward, {dtype} in a "
                "planned step); name the dtype in that call, or set the default around the call of the model"
            )


def _rehearse(
    flat: Flat, mode: Any, tensors: list[torch.Tensor]
) -> tuple[tuple[Setting | NewHook, ...], tuple[tuple[str, Any], ...]]:
    """Run forward on fakes, to see what it does: the plain values that the first call sets, set in `flat` now, and the
    attributes that it fills with tensors (`Trace.filled`).

    Raises:
        TraceError: it sets other plain values in the second call: a counter, or a choice of its own.
    """
    first, stored = _run_on_fakes(flat, mode, tensors)
    settings, last = first.settings, first
    if settings:
        last, stored = _run_on_fakes(flat, mode, tensors)
        if last.settings:
            raise changed_attribute(last.settings[0])
    there = {name: plain_attribute(flat.model, name) for name in stored}
    filled = {name: old for name, old in there.items() if not isinstance(old, torch.Tensor)}
    if filled:
        for name in filled:
            set_attribute(flat.model, name, stored[name])
        again = None
        with contextlib.suppress(Exception):  # raised again when that call comes
            again, _ = _run_on_fakes(flat, mode, tensors)
        for name, old in filled.items():
            set_attribute(flat.model, name, old)
        flat.last.seen = last
        if again is None or (again.calls, again.stored, again.settings) != (last.calls, last.stored, ()):
            filled = {}  # forward reads them: the second call is another
    return settings, tuple(filled.items())


def _run_on_fakes(flat: Flat, mode: Any, tensors: list[torch.Tensor]) -> tuple[Seen, dict[str, torch.Tensor]]:
    """What forward does, and what it leaves in attributes by name."""
    before = host_states()
    outputs = _run(flat, mode, tensors)
    seen = flat.last.seen
    assert seen is not None
    if host_states() != before:
        _refuse_draws(flat, mode, tensors, before)
        flat.last.seen = seen
    return seen, unflatten(seen.effects, outputs)[0] if seen.stored else {}


def _run(flat: Flat, mode: Any, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(HooksRefused(flat.model))
        stack.enter_context(mode)
        stack.enter_context(mode.dtypes_checked())
        stack.enter_context(stack.enter_context(KeptFunctions()).recording())
        outputs = flat(*(fake_tensor(mode, t) for t in tensors))
    forget_fakes()
    return outputs


def _refuse_draws(flat: Flat, mode: Any, tensors: list[torch.Tensor], before: dict[str, Any]) -> None:
    """A global generator of Python's or numpy's was drawn from while forward ran. By forward, when that is seen, or happens
    in every run with other threads waiting; else by another thread, which is nothing to us.

    Raises:
        TraceError: by forward; the generators are put back.
    """
    moved = set(before)
    try:
        for _ in range(3):
            with draws_of_others_wait(), patched(During.ALONE):
                held = host_states()
                _run(flat, mode, tensors)
                now = host_states()
            moved &= {name for name in now if now[name] != held[name]}
            if not moved:
                return
        raise draws_on_the_host(sorted(moved))
    except TraceError:
        set_host_states(before)
        raise


def _position(tensors: list[torch.Tensor], wanted: torch.Tensor) -> int:
    """Index of that very tensor in the list, where it is put when it is missing."""
    for at, tensor in enumerate(tensors):
        if tensor is wanted:
            return at
    tensors.append(wanted)
    return len(tensors) - 1


def _refuse_compiled(model: nn.Module) -> None:
    """Modules that are no longer Python; what torch.export says of them names neither the module nor what to do."""
    for name, module in model.named_modules():
        path = f"model.{name}" if name else "model"
        if isinstance(module, torch.jit.ScriptModule):
            raise TraceError(
                f"{path} is TorchScript (torch.jit.script or torch.jit.trace), which is not traced; plan with the Python "
                "module that it was made of"
            )
        if is_compiled(module):
            raise TraceError(
                f"{path} is compiled with torch.compile, which is not traced; plan with the module that was compiled, "
                f"{path}._orig_mod"
            )
        if is_compiled_in_place(module):
            raise TraceError(
                f"{path} was compiled in place ({path}.compile()), and what is compiled is not traced; plan the model as it is "
                "without that call"
            )


def _refuse_untraceable(model: nn.Module) -> None:
    """What torch writes otherwise than it runs, for a device that is not here (torch 2.14: recurrent layers lose their
    dropout)."""
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1 and module.training:
            raise TraceError(
                f"{name or 'the model'} ({type(module).__name__}) has dropout={module.dropout} between its layers, which "
                "torch leaves out when it traces for a device that is not here: the plan would train another model. Stack "
                "one-layer modules with nn.Dropout between them, or set dropout=0"
            )


def _copied(mode: Any, model: nn.Module, generators: dict[int, torch.Generator]) -> nn.Module:
    try:
        return fake_module(mode, model, generators)
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__} could not be copied for tracing ({type(error).__name__}: {error}); an attribute that "
            "copy.deepcopy cannot copy is the usual reason"
        ) from error
