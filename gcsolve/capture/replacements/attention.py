"""Attention as the kernel of a GPU that is not here, on fake tensors of the CPU.

By torch's own rules, a CUDA device runs the first of these kernels that takes the call and that `torch.backends.cuda` has
enabled:

| kernel | takes | saves beside q, k, v, out |
|---|---|---|
| flash | 16 bits, no mask, head width ≤ 256, compute capability 8.0 on | log-sum-exp in float32, seed |
| memory-efficient | also float32 and masks; as many key as query heads | log-sum-exp padded to 32 rows, seed, the mask |
| math | everything | the probabilities, the dropout mask |

On Apple's GPUs training runs the products written out. Where the newest torch would take cuDNN's kernel instead of flash,
the sizes are the same to within the seed.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional as F

from gcsolve.cost.devices import DeviceSpec

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_WITHOUT_FLASH = frozenset({"v100"})


class Kernels(Protocol):
    """The kernels of a device. `used`: names of those that the CPU does not have, as keys."""

    device: DeviceSpec
    used: dict[str, None]


def attention(
    kernels: Kernels,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention` as the op that the device runs."""
    if torch.is_autocast_enabled(query.device.type):
        low = torch.get_autocast_dtype(query.device.type)
        query, key, value = (t.to(low) for t in (query, key, value))
    if _flash_takes(kernels.device, query, key, value, attn_mask, is_causal, enable_gqa):
        kernels.used["aten._scaled_dot_product_flash_attention"] = None
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if _efficient_takes(kernels.device, query, key, value):
        kernels.used["aten._scaled_dot_product_efficient_attention"] = None
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        call = aten._scaled_dot_product_efficient_attention
        return call(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
    call = aten._scaled_dot_product_attention_math
    return call(query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]


def _flash_takes(
    device: DeviceSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
) -> bool:
    heads_fit = enable_gqa or query.shape[1:2] == key.shape[1:2]
    return (
        _fused_takes(device, query, key, value)
        and torch.backends.cuda.flash_sdp_enabled()
        and device.name not in _WITHOUT_FLASH
        and query.dtype in _HALF
        and attn_mask is None
        and query.shape[-1] == value.shape[-1] <= 256
        and heads_fit
        and not (is_causal and query.shape[-2] != key.shape[-2])
    )


def _efficient_takes(device: DeviceSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    multiple = 8 if query.dtype in _HALF else 4
    return (
        _fused_takes(device, query, key, value)
        and torch.backends.cuda.mem_efficient_sdp_enabled()
        and query.dtype in (*_HALF, torch.float32)
        and query.shape[1] == key.shape[1]
        and query.shape[-1] % multiple == value.shape[-1] % multiple == 0
    )


def _fused_takes(device: DeviceSpec, *tensors: torch.Tensor) -> bool:
    return device.kind == "cuda" and all(t.dim() == 4 and t.stride(-1) == 1 for t in tensors)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    width = query.shape[-1]
    if width % 8:  # torch pads heads to a multiple of 8 and cuts the result
        query, key, value = (F.pad(t, (0, 8 - width % 8)) for t in (query, key, value))
    scale = width**-0.5 if scale is None else scale
    call = aten._scaled_dot_product_flash_attention
    return call(query, key, value, dropout_p, is_causal, scale=scale)[0][..., :width]


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The mask as the memory-efficient kernel reads it: added numbers, one row a query, rows padded to a multiple of 16."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf"))
    keys = key.shape[-2]
    if keys % 16:
        mask = F.pad(mask, (0, 16 - keys % 16))[..., :keys]
    return mask.expand(query.shape[0], query.shape[1], query.shape[-2], keys)
