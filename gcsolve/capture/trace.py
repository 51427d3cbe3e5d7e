"""Model + inputs -> `Trace`: the joint graph of one training step, traced with fake tensors.

The model is neither run nor changed: a structural copy with fake parameters is traced. So its weights may be real, fake or
on meta, and a failed trace leaves nothing behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from gcsolve.capture import batchnorm
from gcsolve.capture.autocast import is_weight
from gcsolve.capture.console import watched_prints
from gcsolve.capture.context import Context
from gcsolve.capture.diagnostics import call_text, subject_text, worded
from gcsolve.capture.fake_mode import TrueFakes, forget_fakes
from gcsolve.capture.flat_module import FlatModule, ForwardRun, TracedCall
from gcsolve.capture.generators import StandIns
from gcsolve.capture.hooks import NewHook, refuse_hooks
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
from gcsolve.capture.module_state import Setting, attributes_of
from gcsolve.capture.patches import During, patched
from gcsolve.capture.refusals import (
    refuse_compiled,
    refuse_lazy,
    refuse_recurrent_dropout,
    refuse_sparse,
    refuse_without_gradient,
)
from gcsolve.capture.rehearsal import Rehearsal, rehearse
from gcsolve.capture.target_kernels import TargetKernels
from gcsolve.errors import ArgumentError, GcsolveError, TraceError
from gcsolve.util.source import is_user_file, shown_path
from gcsolve.util.tree import Template, flatten, leaf_paths, sources_of


@dataclass(frozen=True)
class Trace:
    """One traced step.

    `output_template`: rebuilds the model's own output around the flat outputs. `effects_template`: what forward changed
    beside it (`ForwardRun.effects`); None: nothing.
    `replaced`: attributes whose tensor forward replaces without reading it. `filled`: (name, value before) of those that
    hold no tensor before the first call. `settings`: plain attributes that the first call sets, and hooks that it registers.
    `takes_gradient[k]`: the plan expects a gradient for flat output k. `differentiable[k]`: the untouched model would accept
    one. `output_paths[k]`, `input_paths[k]`: the expressions by which a user reaches flat output k, and tensor k of the call.
    `context`: autocast and default dtype around the call. `backward_context`: those around its backward.
    `target`: the kind of device ("cuda") whose kernels were traced in place of the CPU's; "": none were. `target_only`: the
    ops among these that the CPU cannot run.
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
    refuse_lazy(model)
    if kernels is not None:
        refuse_recurrent_dropout(model)
    refuse_compiled(model)
    refuse_hooks(model)
    # A step is one of training, whatever the grad mode is where it is planned.
    with patched(During.TRACE), torch.inference_mode(False), torch.enable_grad():
        call = _FlatCall.of(model, args, kwargs)
        context = Context.here()
        mode = TrueFakes(run=_is_real(model, call), elsewhere=kernels is not None)
        copy = _copied(mode, model, call.stand_ins.of)
        cumulative = batchnorm.mark(copy)
        traced_call = TracedCall(
            template=call.template,
            generators=[call.stand_ins.of[id(generator)] for generator in sources_of(call.template)],
            attributes=tuple(call.attributes.items()),
            loss=loss,
            all_outputs=all_outputs,
            kernels=kernels,
            casts_once=context.casts_once,
        )
        flat = FlatModule(copy, traced_call)
        with watched_prints(is_user_file, shown_path) as prints, _errors_worded(flat, model, call):
            rehearsal = rehearse(flat, mode, call.inputs)
            prints.mute()
            joint = _captured(flat, mode, call, rehearsal.last, autocast_backward)
        run = flat.runs.latest
        assert run is not None
        refuse_sparse(joint.graph_module.graph)
        refuse_without_gradient(model, call.inputs, run)
        if run.sets_default_dtype:
            _name_default_dtypes(joint.graph_module.graph)
        joint = _with_attribute_inputs(joint, call)
        _compute_momentum(joint, cumulative)
        backward_context = context if autocast_backward else context.outside_autocast()
        return _trace_of(joint, call, run, rehearsal, context, backward_context, kernels)


# --- the steps of a trace --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _FlatCall:
    """A call as flat tensors.

    `inputs`: the first `n_arguments` are the tensors in (args, kwargs), of which `template` is the template; the others are
    tensors that are plain attributes of modules. `attributes`: name -> index in `inputs`, also of attributes that are among
    the arguments. `stand_ins`: in place of the call's and the model's random generators.
    """

    inputs: tuple[torch.Tensor, ...]
    n_arguments: int
    template: Template
    attributes: Mapping[str, int]
    stand_ins: StandIns

    @classmethod
    def of(cls, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _FlatCall:
        arguments, template = flatten((args, kwargs), "example_input")
        inputs, attributes = list(arguments), dict[str, int]()
        index_of = {id(t): index for index, t in enumerate(inputs)}
        registered = {id(t) for t in (*model.parameters(), *model.buffers())}
        for name, tensor in attributes_of(model, torch.Tensor).items():
            if id(tensor) not in registered:
                if id(tensor) not in index_of:
                    index_of[id(tensor)] = len(inputs)
                    inputs.append(tensor)
                attributes[name] = index_of[id(tensor)]
        of_call = {ArgumentGenerator(index): generator for index, generator in enumerate(sources_of(template))}
        of_model = {AttributeGenerator(name): g for name, g in attributes_of(model, torch.Generator).items()}
        return cls(tuple(inputs), len(arguments), template, attributes, StandIns({**of_call, **of_model}))


def _is_real(model: nn.Module, call: _FlatCall) -> bool:
    """Whether no tensor of the model or the call is on meta."""
    arguments = call.inputs[: call.n_arguments]
    return all(t.device.type != "meta" for t in (*model.parameters(), *model.buffers(), *arguments))


def _copied(mode: TrueFakes, model: nn.Module, generators: Mapping[int, torch.Generator]) -> nn.Module:
    try:
        return fake_module(mode, model, generators)
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__} could not be copied for tracing ({type(error).__name__}: {error}); an attribute that "
            "copy.deepcopy cannot copy is the usual reason"
        ) from error


@contextlib.contextmanager
def _errors_worded(flat: FlatModule, model: nn.Module, call: _FlatCall) -> Iterator[None]:
    """In this block, an error that is not gcsolve's own becomes a TraceError; after it, no cache holds fake tensors."""
    try:
        yield
    except GcsolveError:
        raise
    except Exception as error:
        value_line = flat.runs.latest.value_line if flat.runs.latest else ""
        subject = subject_text(model, flat.call.loss, in_loss=flat.runs.in_loss)
        tensors = list(call.inputs[: call.n_arguments])
        raise worded(error, subject, call_text(model, tensors, call.template), value_line) from error
    finally:
        forget_fakes()


def _captured(flat: FlatModule, mode: TrueFakes, call: _FlatCall, run: ForwardRun, autocast_backward: bool) -> Joint:
    """The joint graph of `flat`, which then makes the same calls as in `run`."""
    exported = not (run.uses_autograd or run.sets_default_dtype)
    flat.runs.expected = run.calls if exported else None
    fakes = [fake_tensor(mode, t) for t in call.inputs]

    def capture() -> Joint:
        return capture_joint(
            flat,
            fakes,
            mode,
            call.stand_ins,
            leaves=[index for index, t in enumerate(call.inputs) if is_weight(t)],
            exported=exported,
            on_cpu=flat.call.kernels is None,
            autocast_backward=autocast_backward,
        )

    joint = capture()
    flat.parted = summed_otherwise(joint)
    return replace(capture(), parted=flat.parted) if flat.parted else joint


def _name_default_dtypes(graph: fx.Graph) -> None:
    """Where forward has set the default dtype, name it as an argument of the ops that take it.

    Raises:
        TraceError: an op takes it and has no argument for it.
    """
    for node in graph.nodes:
        traced: Any = node.meta.get("val")
        if node.op != "call_function" or not isinstance(traced, torch.Tensor) or not traced.is_floating_point():
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
        with traced.fake_mode:  # type: ignore[attr-defined]
            dtype = node.target(*args, **kwargs).dtype
        if dtype != traced.dtype and any(argument.name == "dtype" for argument in node.target._schema.arguments):
            node.kwargs = {**node.kwargs, "dtype": traced.dtype}
        elif dtype != traced.dtype:
            raise TraceError(
                f"forward sets the default dtype, and {node.target} takes it from there ({traced.dtype} in forward, {dtype} in "
                "a planned step); name the dtype in that call, or set the default around the call of the model"
            )


def _with_attribute_inputs(joint: Joint, call: _FlatCall) -> Joint:
    """The joint graph whose inputs say which of the flat inputs are attributes, and not arguments of the call."""
    name_of = {index: name for name, index in call.attributes.items() if index >= call.n_arguments}
    inputs = tuple(
        AttributeInput(name_of[source.index])
        if isinstance(source, ArgumentInput) and source.index in name_of
        else source
        for source in joint.inputs
    )
    return replace(joint, inputs=inputs)


def _compute_momentum(joint: Joint, cumulative: Mapping[float, str]) -> None:
    """Let the graph compute the momentum of each cumulative BatchNorm."""
    graph = joint.graph_module.graph
    inputs = zip(graph.find_nodes(op="placeholder"), joint.inputs, strict=False)
    buffers = {source.name: node for node, source in inputs if isinstance(source, BufferInput)}
    batchnorm.compute_momentum(graph, cumulative, buffers)


def _trace_of(
    joint: Joint,
    call: _FlatCall,
    run: ForwardRun,
    rehearsal: Rehearsal,
    context: Context,
    backward_context: Context,
    kernels: TargetKernels | None,
) -> Trace:
    """The record of a traced step.

    Args:
        run: the run of forward that was traced.
    """
    inputs = zip(joint.graph_module.graph.find_nodes(op="placeholder"), joint.inputs, strict=False)
    read = {source.name for node, source in inputs if isinstance(source, AttributeInput) and node.users}
    output_paths = {k: path for template in (run.effects, run.output) for k, path in leaf_paths(template).items()}
    input_paths = leaf_paths(call.template)
    return Trace(
        joint=joint,
        output_template=run.output,
        effects_template=run.effects if run.stored or run.arguments_changed else None,
        replaced=tuple(name for name in run.stored if name not in read and name in call.attributes),
        filled=rehearsal.filled,
        settings=rehearsal.settings,
        takes_gradient=run.takes_gradient,
        differentiable=run.differentiable,
        output_paths=tuple(output_paths[k] for k in range(len(run.takes_gradient))),
        input_paths=tuple(input_paths[k].removeprefix("example_input") for k in range(call.n_arguments)),
        context=context,
        backward_context=backward_context,
        target=kernels.device.kind if kernels else "",
        target_only=tuple(kernels.used) if kernels else (),
    )
