"""Models and steps that are not planned: errors that name what stands in the way, where, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx, nn

from gcsolve._torch import is_compiled, is_compiled_in_place
from gcsolve.capture.flat_module import ForwardRun
from gcsolve.errors import TraceError
from gcsolve.util.tree import Static, leaf_paths


def refuse_lazy(model: nn.Module) -> None:
    """Parameters without a shape.

    Raises:
        TraceError: there is one.
    """
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise TraceError(f"parameter {name} has no shape yet (a lazy module); call the model once before planning")


def refuse_compiled(model: nn.Module) -> None:
    """Modules that are no longer Python. What torch.export says of them names neither the module nor what to do.

    Raises:
        TraceError: there is one.
    """
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


def refuse_recurrent_dropout(model: nn.Module) -> None:
    """Recurrent layers with dropout between them, which torch leaves out where their own kernel is not traced (torch 2.14).

    Raises:
        TraceError: there is one.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1 and module.training:
            raise TraceError(
                f"{name or 'the model'} ({type(module).__name__}) has dropout={module.dropout} between its layers, which "
                "torch leaves out when it traces for a device that is not here: the plan would train another model. Stack "
                "one-layer modules with nn.Dropout between them, or set dropout=0"
            )


def refuse_sparse(graph: fx.Graph) -> None:
    """Sparse tensors.

    Raises:
        TraceError: an op of the graph has one as its result.
    """
    for node in graph.nodes:
        result = node.meta.get("val")
        if isinstance(result, torch.Tensor) and result.layout is not torch.strided:
            raise TraceError(
                f"{node.target} makes a sparse tensor ({result.layout}), which is not planned; a gradient of an embedding is "
                "dense with sparse=False"
            )


def refuse_without_gradient(model: nn.Module, inputs: Sequence[torch.Tensor], run: ForwardRun) -> None:
    """A step without a backward.

    Raises:
        TraceError: no output of that run needs a gradient.
    """
    if any(run.takes_gradient):
        return
    kind = type(model).__name__
    if not leaf_paths(run.output):
        value = f" but {run.output.value!r}" if isinstance(run.output, Static) else ""
        raise TraceError(
            f"{kind} returns no tensor{value}: there is no backward to plan. Let forward return what the loss is taken of"
        )
    if not any(t.requires_grad for t in (*model.parameters(), *inputs)):
        raise TraceError(
            f"no output of {kind} needs a gradient: every parameter and input has requires_grad=False; there is no backward to "
            "plan. Call requires_grad_() on what is trained"
        )
    raise TraceError(
        f"no output of {kind} needs a gradient, though parameters or inputs do: forward detaches it, computes it under "
        "torch.no_grad(), or returns whole numbers; there is no backward to plan"
    )
