"""The joint forward and backward graph of a step: what each of its inputs stands for, and how each output is obtained.

Inputs and outputs are two closed families of frozen dataclasses; their users tell the members apart by type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import torch
from torch import fx

MODEL_PREFIX = "model."
"""What torch puts before the model's own names while tracing: the model is the attribute `model` of the traced module."""


# --- inputs: where a planned call looks for the value of a placeholder of the forward ----------------------------------


@dataclass(frozen=True)
class ParameterInput:
    """The model's parameter of that fully qualified name."""

    name: str

    def __str__(self) -> str:
        return f"parameter {self.name}"


@dataclass(frozen=True)
class BufferInput:
    """The model's buffer of that fully qualified name."""

    name: str

    def __str__(self) -> str:
        return f"buffer {self.name}"


@dataclass(frozen=True)
class ConstantInput:
    """A tensor that forward made of plain numbers, or reads from outside the model; `Joint.constants` holds it."""

    name: str

    def __str__(self) -> str:
        return f"constant {self.name}"


@dataclass(frozen=True)
class ArgumentInput:
    """A tensor among the arguments of the call, by its place among all of them."""

    index: int

    def __str__(self) -> str:
        return f"input {self.index}"


@dataclass(frozen=True)
class AttributeInput:
    """A tensor that is a plain attribute of a module, neither parameter nor buffer, by its path."""

    name: str

    def __str__(self) -> str:
        return f"attribute {self.name}"


@dataclass(frozen=True)
class ArgumentGenerator:
    """A `torch.Generator` among the arguments of the call, by its place among the generators there."""

    index: int


@dataclass(frozen=True)
class AttributeGenerator:
    """A `torch.Generator` that is a plain attribute of a module, by its path."""

    name: str


GeneratorInput = ArgumentGenerator | AttributeGenerator
GraphInput = ParameterInput | BufferInput | ConstantInput | ArgumentInput | AttributeInput | GeneratorInput


# --- outputs: how a flat output of the model is obtained from the inputs and from what the forward graph returns --------


@dataclass(frozen=True)
class GraphOutput:
    """The tensor that the forward graph returns at `position`.

    Here and below, `requires_grad`: the traced output takes a gradient.
    """

    position: int
    requires_grad: bool


@dataclass(frozen=True)
class InputItself:
    """The very tensor that is input `input` (an index into `Joint.inputs`). The graph returns it too, at `position`."""

    position: int
    requires_grad: bool
    input: int


@dataclass(frozen=True)
class ViewOfInput:
    """A view of input `input`, laid out as the tensor that the graph returns at `position`."""

    position: int
    requires_grad: bool
    input: int


@dataclass(frozen=True)
class ViewOfOutput:
    """A view of the tensor that the graph returns at `base`, laid out as the one that it returns at `position`."""

    position: int
    requires_grad: bool
    base: int


OutputPlan = GraphOutput | InputItself | ViewOfInput | ViewOfOutput


# --- the graph -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Joint:
    """The joint graph and what its inputs and outputs stand for.

    Attributes:
        graph_module: its placeholders are the forward's inputs (primals), then the output gradients (tangents); it returns
            the forward's results, then the gradients.
        inputs: what each primal stands for.
        cast_weights: (index into `inputs`, dtype) of each weight that autocast casts once, for all its uses in one block.
        tangents: for each tangent, the position of the forward result whose gradient it is.
        outputs: how each flat output of the model is obtained.
        mutations: (position of a result, index into `inputs`) for each input that forward changes in place: the result is
            its new content.
        gradients: (position of a result, index into `inputs`) for each input that has a gradient.
        n_forward_outputs: this many results belong to the forward; the others are gradients.
        constants: the tensors of the `ConstantInput`s, by name.
        parted: flat outputs that share memory with another output, and are traced as if they did not: autograd sums the
            gradients of each by itself.
    """

    graph_module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    cast_weights: tuple[tuple[int, torch.dtype], ...]
    tangents: tuple[int, ...]
    outputs: tuple[OutputPlan, ...]
    mutations: tuple[tuple[int, int], ...]
    gradients: tuple[tuple[int, int], ...]
    n_forward_outputs: int
    constants: dict[str, torch.Tensor]
    parted: frozenset[int] = frozenset()

    @property
    def primal_nodes(self) -> list[fx.Node]:
        """The placeholders of `inputs`."""
        return self.graph_module.graph.find_nodes(op="placeholder")[: len(self.inputs)]

    @property
    def tangent_nodes(self) -> list[fx.Node]:
        """The placeholders of `tangents`."""
        return self.graph_module.graph.find_nodes(op="placeholder")[len(self.inputs) :]

    @property
    def results(self) -> Sequence[fx.Node | None]:
        """What the graph returns; None stands where an input has no gradient."""
        returned: Any = self.graph_module.graph.output_node().args[0]
        return returned


def summed_otherwise(joint: Joint) -> frozenset[int]:
    """The flat outputs that share memory, where at least three gradients meet in what they are views of.

    Eager sums those gradients in the order of the model's ops. Autograd would sum the outputs' gradients among themselves
    before the planned backward begins, or after it ends: in another order.
    """
    tangent_of = dict(zip(joint.tangents, joint.tangent_nodes, strict=True))
    gradient_of = {index: joint.results[position] for position, index in joint.gradients}
    views_of_input: dict[int, set[int]] = {}
    views_of_result: dict[int, set[int]] = {}
    for at, plan in enumerate(joint.outputs):
        if not plan.requires_grad:
            continue
        match plan:
            case InputItself() | ViewOfInput():
                views_of_input.setdefault(plan.input, set()).add(at)
            case ViewOfOutput():
                views_of_result.setdefault(plan.base, set()).add(at)
            case GraphOutput():
                views_of_result.setdefault(plan.position, set()).add(at)
            case _:
                assert_never(plan)
    apart: set[int] = set()
    for index, outputs in views_of_input.items():
        gradient = gradient_of.get(index)
        of_other_uses = 0 if gradient is None else 2 if _is_sum(gradient) else 1
        if len(outputs) + of_other_uses > 2:
            apart |= outputs
    for position, outputs in views_of_result.items():
        of_other_uses = position in tangent_of and any(map(_is_sum, tangent_of[position].users))
        if len(outputs) + of_other_uses > 2 and any(isinstance(joint.outputs[at], ViewOfOutput) for at in outputs):
            apart |= outputs
    return frozenset(apart)


def _is_sum(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.add.Tensor
