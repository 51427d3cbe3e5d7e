"""Bilinear maps, in whose kernel autocast casts, though the op is on none of its lists.

A plan runs without autocast, since its casts are ops of the graph. So the kernel is traced as an op of our own, which runs
it under the autocast that was around it. Of all ops in torch's own samples of its ops, only this one and linalg.polar (which
is refused) have such a kernel on the CPU (torch 2.14).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_library = torch.library.Library("gcsolve", "FRAGMENT")
_library.define(
    "trilinear(Tensor i1, Tensor i2, Tensor i3, int[] expand1, int[] expand2, int[] expand3, int[] sumdim, "
    "ScalarType autocast) -> Tensor"
)


def _run(*operands: Any) -> Tensor:
    *arguments, dtype = operands
    with torch.autocast("cpu", dtype, cache_enabled=False):
        return aten._trilinear.default(*arguments)


_library.impl("trilinear", _run, "CompositeExplicitAutograd")
_library.impl("trilinear", lambda *operands: aten._trilinear.default(*operands[:-1]), "Meta")


def _trilinear(*operands: Any) -> Tensor:
    if not torch.is_autocast_enabled("cpu"):
        return aten._trilinear.default(*operands)
    return torch.ops.gcsolve.trilinear.default(*operands, torch.get_autocast_dtype("cpu"))


class _Trilinear(torch.autograd.Function):
    """The kernel under the autocast that is around forward; its gradients under the one around backward."""

    @staticmethod
    def forward(ctx: Any, i1: Tensor, i2: Tensor, i3: Tensor, *dims: Any) -> Tensor:
        ctx.save_for_backward(i1, i2, i3)
        ctx.dims = dims
        return _trilinear(i1, i2, i3, *dims)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (gradient,), operands = gradients, list(ctx.saved_tensors)
        *expand, sumdim = ctx.dims
        of_operands: list[Tensor | None] = [None, None, None]
        for i in range(3):
            if ctx.needs_input_grad[i]:
                swapped = [*operands[:i], gradient, *operands[i + 1 :]]
                dims = [*expand[:i], sumdim, *expand[i + 1 :], expand[i]]
                of_operands[i] = _trilinear(*swapped, *dims)
        return (*of_operands, None, None, None, None)


def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.bilinear` as torch composes it."""
    flat = [t.reshape(-1, t.shape[-1]) for t in (input1, input2)]
    dims: Any = ([1, 3], [0], [1, 2], [2, 3])
    run: Callable[..., Any] = aten._trilinear.default if input1.device.type != "cpu" else _Trilinear.apply
    output = run(flat[0], weight, flat[1], *dims).reshape(*input1.shape[:-1], weight.shape[0])
    return output if bias is None else output + bias


CAST_INSIDE = frozenset({aten._trilinear.default, torch.ops.gcsolve.trilinear.default})
"""The ops in which autocast casts, though they are on none of its lists."""
