"""AOTAutograd's descriptors of the inputs and outputs of a joint graph, as our own frozen record, the `Joint`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from gcsolve._torch import FakeTensor, OpOverload, OutputType, aot_descriptors, forward_metadata, view_like
from gcsolve.capture.joint import (
    MODEL_PREFIX,
    ArgumentInput,
    BufferInput,
    ConstantInput,
    GraphInput,
    GraphOutput,
    InputItself,
    Joint,
    OutputPlan,
    ParameterInput,
    ViewOfInput,
    ViewOfOutput,
)
from gcsolve.errors import TraceError


@dataclass(frozen=True)
class _Primals:
    """The forward's inputs: for each, AOTAutograd's descriptor, what it stands for, and its tensor while tracing."""

    descriptions: tuple[Any, ...]
    inputs: tuple[GraphInput, ...]
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class _Forward:
    """Where the results of the forward stand among those of the graph.

    Attributes:
        outputs: index of a flat output of the model -> position.
        bases: positions of tensors that the graph returns because outputs are views of them.
        mutations: (position of its new content, index) for each input that forward changes.
        n_results: how many results the forward has.
    """

    outputs: Mapping[int, int]
    bases: tuple[int, ...]
    mutations: tuple[tuple[int, int], ...]
    n_results: int


def as_joint(captured: Any, module: nn.Module, args: Sequence[torch.Tensor], casts: Mapping[int, torch.dtype]) -> Joint:
    """The `Joint` of what AOTAutograd captured.

    Args:
        module, args: what was traced.
        casts: as `share_casts` returns them.
    """
    metadata = forward_metadata(captured)
    graph: fx.Graph = captured.graph_module.graph
    results: Any = graph.output_node().args[0]
    descriptions: Sequence[Any] = graph.output_node().meta["desc"]
    placeholders = [node.meta["desc"] for node in graph.find_nodes(op="placeholder")]
    tangents = [d.output for d in placeholders if isinstance(d, aot_descriptors.TangentAOTInput)]
    primals = _primals([d for d in placeholders if not isinstance(d, aot_descriptors.TangentAOTInput)], module, args)
    forward = _forward(descriptions, primals, metadata)
    gradients = [
        (position, primals.descriptions.index(description.grad_of))
        for position, description in enumerate(descriptions)
        if isinstance(description, aot_descriptors.GradAOTOutput) and results[position] is not None
    ]
    return Joint(
        graph_module=captured.graph_module,
        inputs=primals.inputs,
        cast_weights=_cast_weights(primals, gradients, results, casts),
        tangents=tuple(descriptions.index(output) for output in tangents),
        outputs=tuple(_output_plan(info, index, forward, results) for index, info in enumerate(metadata.output_info)),
        mutations=forward.mutations,
        gradients=tuple(gradients),
        n_forward_outputs=forward.n_results,
        constants={
            source.name: tensor
            for source, tensor in zip(primals.inputs, primals.tensors, strict=True)
            if isinstance(source, ConstantInput)
        },
    )


def _primals(descriptions: Sequence[Any], module: nn.Module, args: Sequence[torch.Tensor]) -> _Primals:
    """What the forward's inputs stand for.

    Raises:
        TraceError: one is of a kind that a planned call cannot look up.
    """
    inputs: list[GraphInput] = []
    tensors: list[torch.Tensor] = []
    for description in descriptions:
        if isinstance(description, aot_descriptors.PlainAOTInput):
            inputs.append(ArgumentInput(description.idx))
            tensors.append(args[description.idx])
        elif isinstance(description, (aot_descriptors.ParamAOTInput, aot_descriptors.BufferAOTInput)):
            tensor = _attribute(module, description.target)
            name = description.target.removeprefix(MODEL_PREFIX)
            tensors.append(tensor)
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor):
                inputs.append(ConstantInput(description.target))
            elif isinstance(description, aot_descriptors.ParamAOTInput):
                inputs.append(ParameterInput(name))
            else:
                inputs.append(BufferInput(name))
        else:
            raise TraceError(
                f"the traced step has an input of kind {type(description).__name__}, which gcsolve cannot serve exactly; "
                "if two inputs share memory and one is changed in place, pass a clone of one of them"
            )
    return _Primals(descriptions=tuple(descriptions), inputs=tuple(inputs), tensors=tuple(tensors))


def _forward(descriptions: Sequence[Any], primals: _Primals, metadata: Any) -> _Forward:
    """What the forward returns, and where.

    Raises:
        TraceError: a result is of a kind that a planned step cannot hand out, or forward changes an input in place that
            needs a gradient.
    """
    outputs: dict[int, int] = {}
    bases: list[int] = []
    mutations: list[tuple[int, int]] = []
    n_results = 0
    for position, description in enumerate(descriptions):
        # None is the place of an input that needs no gradient.
        if description is None or isinstance(description, aot_descriptors.GradAOTOutput):
            continue
        n_results += 1
        if isinstance(description, aot_descriptors.PlainAOTOutput):
            outputs[description.idx] = position
        elif isinstance(description, aot_descriptors.InputMutationAOTOutput):
            changed = primals.descriptions.index(description.mutated_input)
            info = metadata.input_info[changed]
            if info.requires_grad and not info.mutations_hidden_from_autograd:
                raise TraceError(
                    f"forward changes {primals.inputs[changed]} in place, and it needs a gradient; gcsolve cannot hand "
                    "autograd both contents. Work on a clone of it in forward"
                )
            mutations.append((position, changed))
        elif isinstance(description, aot_descriptors.IntermediateBaseAOTOutput):
            bases.append(position)
        else:
            raise TraceError(
                f"the traced step has an output of kind {type(description).__name__}, which gcsolve cannot serve exactly"
            )
    return _Forward(outputs=outputs, bases=tuple(bases), mutations=tuple(mutations), n_results=n_results)


def _cast_weights(
    primals: _Primals,
    gradients: Sequence[tuple[int, int]],
    results: Sequence[fx.Node],
    casts: Mapping[int, torch.dtype],
) -> tuple[tuple[int, torch.dtype], ...]:
    """`Joint.cast_weights`: of the weights that autocast casts, those whose gradient is cast back."""
    cast_weights: list[tuple[int, torch.dtype]] = []
    for position, index in gradients:
        dtype = casts.get(id(primals.tensors[index]))
        if dtype is not None and _is_cast_from(results[position], dtype):
            cast_weights.append((index, dtype))
    return tuple(cast_weights)


def _output_plan(info: Any, index: int, forward: _Forward, results: Sequence[fx.Node]) -> OutputPlan:
    """How the flat output of that index is obtained.

    Args:
        info: AOTAutograd's account of it; its `base_idx` is the index of an input, or of a base, or of another output.
    """
    position, requires_grad = forward.outputs[index], bool(info.requires_grad)
    match info.output_type:
        case OutputType.non_alias | OutputType.unsafe_view_alias | OutputType.custom_function_view:
            return GraphOutput(position, requires_grad)
        case OutputType.is_input:
            return InputItself(position, requires_grad, input=int(info.base_idx))
    _refuse_lazy(results[position])
    match info.output_type:
        case OutputType.alias_of_input:
            return ViewOfInput(position, requires_grad, input=int(info.base_idx))
        case OutputType.alias_of_intermediate | OutputType.alias_of_intermediate_save_as_output:
            return ViewOfOutput(position, requires_grad, base=forward.bases[int(info.base_idx)])
        case OutputType.alias_of_intermediate_base_is_user_output:
            return ViewOfOutput(position, requires_grad, base=forward.outputs[int(info.base_idx)])
    raise TraceError(f"the model returns an output of kind {info.output_type.name}, which gcsolve cannot serve exactly")


def _refuse_lazy(node: fx.Node) -> None:
    """Refuse a view that conjugates or negates what it views only when it is read, which no strides tell.

    Raises:
        TraceError: it is one.
    """
    while isinstance(node.target, OpOverload) and view_like(node.target):
        if node.target in (torch.ops.aten._conj.default, torch.ops.aten._neg_view.default):
            raise TraceError(
                "the model returns the conjugate of something else that it returns or was given, as a view of it (conj, or the "
                "imag of a conjugate), which a planned step cannot hand out. Return it with .resolve_conj() or .clone()"
            )
        node = node.all_input_nodes[0]


def _attribute(module: nn.Module, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), module)


def _is_cast_from(node: fx.Node, dtype: torch.dtype) -> bool:
    return node.target is torch.ops.aten._to_copy.default and node.all_input_nodes[0].meta["val"].dtype == dtype
