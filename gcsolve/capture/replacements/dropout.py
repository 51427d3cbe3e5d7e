"""Dropout as eager computes it on the CPU.

Eager divides a mask of ones by 1-p, in the dtype of the input, and multiplies the input with it. The fused op that a trace
has for it multiplies by 1/(1-p), which in float32 is another number for some p. At p=1 eager draws nothing.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch


def native_dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
    """(Output, mask); NotImplemented where the fused op computes the same."""
    if x.device.type != "cpu" or train is False:
        return NotImplemented
    if p == 1:
        return x * torch.zeros((), dtype=x.dtype), torch.zeros_like(x, dtype=torch.bool)
    if x.dtype != torch.float32 or _same_scale(p):
        return NotImplemented
    mask = torch.ops.aten.bernoulli.p(torch.empty_like(x, dtype=torch.bool), 1.0 - p)
    return x * mask.to(x.dtype).div(1.0 - p), mask


def native_dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> Any:
    """The input's gradient; NotImplemented where the fused op computes the same. In half precision it does not: it does not
    round the scale."""
    half = grad.dtype in (torch.bfloat16, torch.float16)
    single = grad.dtype == torch.float32 and scale > 0 and not _same_scale(1.0 - 1.0 / scale)
    if grad.device.type != "cpu" or not scale or not (half or single):
        return NotImplemented
    return grad * mask.to(grad.dtype).div(1.0 / scale)


def _same_scale(p: float) -> bool:
    """Whether 1/(1-p) rounded to float32 is 1 divided by 1-p in float32."""
    return numpy.float32(1.0 / (1.0 - p)) == numpy.float32(1.0) / numpy.float32(1.0 - p)
