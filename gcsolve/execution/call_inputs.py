"""Where a planned call finds the inputs of its step: in the model as it is now, among the arguments, in the step itself."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

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
from gcsolve.capture.module_state import attribute_name, attributes_of
from gcsolve.capture.trace import Trace
from gcsolve.errors import CallError
from gcsolve.execution.signature import walk


def call_inputs(
    model: nn.Module, trace: Trace, tensors: Sequence[torch.Tensor], generators: Sequence[torch.Generator] = ()
) -> list[Any]:
    """The inputs of the step (tensors, and random generators) for one call; None for one that nothing reads.

    They are looked up in every call: parameters may have been replaced since planning.

    Args:
        tensors, generators: those among the call's arguments.

    Raises:
        CallError: one of them is on meta, or on the CPU where the step has another device's kernels.
    """
    sources = _Sources(model, tensors, generators, trace.joint.constants)
    inputs: list[Any] = []
    for source in trace.joint.inputs:
        if isinstance(source, AttributeInput) and source.name in trace.replaced:
            inputs.append(None)
            continue
        value = sources.find(source)
        if isinstance(value, torch.Tensor) and value.device.type == "meta":
            raise CallError(f"{source} is on meta: this plan can be read, not run; give the model real weights first")
        if trace.target_only and isinstance(value, torch.Tensor) and value.device.type == "cpu":
            raise CallError(
                f"{source} is on the CPU, and this plan has kernels of the device it is for that the CPU lacks "
                f"({', '.join(trace.target_only)}): it can be read here, not run. On that device, move model and "
                "inputs there and call again; to train on this CPU, plan with device='cpu'"
            )
        inputs.append(value)
    return inputs


class _Sources:
    """What one call can look inputs up in; of the model, only what is asked for is listed."""

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
    def modules(self) -> list[tuple[str, nn.Module]]:
        return walk(self.model)

    @functools.cached_property
    def parameters(self) -> dict[str, Any]:
        return {attribute_name(path, name): p for path, m in self.modules for name, p in m._parameters.items()}

    @functools.cached_property
    def buffers(self) -> dict[str, Any]:
        return {attribute_name(path, name): b for path, m in self.modules for name, b in m._buffers.items()}

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
