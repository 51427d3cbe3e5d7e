"""Workspace: the bytes that an op allocates and frees while it runs, which do not follow from the shapes in the graph.

On the machine where the model will run, each distinct op signature (target, shapes, strides, dtypes, other arguments) is
run once with synthetic tensors and its allocator events are recorded; nothing is assumed about which ops need workspace
(a float tensor times a bool mask does, on CPU). Elsewhere, and for ops too large to run for this alone, it is estimated:

| op | estimate |
|---|---|
| convolution, CPU | copies of input, weight and output in the kernel's own layout |
| convolution, CUDA | input + output + weight, at most 256 MiB (cuDNN chooses the algorithm at run time) |
| attention backward, CUDA | float32 gradient of the query, one float32 a row, expanded gradients of grouped heads |
| sort, topk, index_put, embedding backward | sorted copies of keys and indices |
| elementwise, CPU, operands of several dtypes | the operands cast to the result's dtype |
| anything else | 0 |

The workspace of a matmul on CUDA is never freed: it is in `library_bytes`, which live through every step.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gcsolve import _torch
from gcsolve.cost.base import Roofline
from gcsolve.cost.devices import DeviceSpec
from gcsolve.cost.flops import MATMULS, op_info
from gcsolve.cost.local import free_memory_bytes, is_here
from gcsolve.ops.facts import fake_arguments, signature
from gcsolve.ops.peak_meter import peak_of_events
from gcsolve.ops.run import (
    SIZED_BY_KERNELS,
    fits,
    fresh_output_bytes,
    leaves,
    may_run,
    run_alone,
    well_conditioned,
    zeros,
)
from gcsolve.util.memo import Memo

aten = torch.ops.aten

MAX_SECONDS = 2.0  # an op that the roofline says takes longer is not run for its workspace alone


@dataclass(frozen=True, slots=True)
class Workspace:
    """`size_bytes`: the op's peak above its inputs and predicted outputs. `measured`: measured here, not estimated."""

    size_bytes: int
    measured: bool


def workspace_bytes(node: fx.Node, device: DeviceSpec, *, measure: bool) -> int:
    """The bytes of `workspace(...)`."""
    return workspace(node, device, measure=measure).size_bytes


def workspace(node: fx.Node, device: DeviceSpec, *, measure: bool) -> Workspace:
    """The workspace of a `call_function` node whose tensor arguments carry fake tensors in `meta["val"]`.

    Args:
        node: the op.
        device: where it will run.
        measure: run the op once if this machine has that device and the op is small enough (one of `SIZED_BY_KERNELS` is
            run even if False). The global random state, autograd and autocast are left as they are, and later calls of this
            process reuse the answer.
    """
    target = node.target
    if target is operator.getitem or (isinstance(target, _torch.OpOverload) and _torch.view_like(target)):
        return Workspace(0, measured=True)
    if device.kind == "cpu" and _is_plain_matmul(node):
        return Workspace(0, measured=True)
    if (measure or target in SIZED_BY_KERNELS) and is_here(device) and may_run(node):
        key = _key(signature(node), device)
        measured = _measured.get(key)
        if measured is not None:
            return measured
        if fits(node, free_memory_bytes(device)) and Roofline(device).cost(op_info(node)) <= MAX_SECONDS:
            measured = _run(node, device)
            if measured is not None:
                return _measured.keep(key, measured)
    return Workspace(_estimate(node, device), measured=False)


_measured = Memo[Workspace](size=50_000)  # by `_key`


def _key(signature: str, device: DeviceSpec) -> tuple[str, int, str]:
    """What a measured workspace depends on."""
    return device.kind, torch.get_num_threads(), signature


def remember(signature: str, device: DeviceSpec, size_bytes: int) -> None:
    """Record a workspace that an earlier process measured on this machine, as if this process had measured it."""
    _measured.keep(_key(signature, device), Workspace(size_bytes, True))


def _is_plain_matmul(node: fx.Node) -> bool:
    """Whether the op is a float32 or float64 matmul whose operands BLAS reads without copies.

    Such an op allocates its output alone, which a test checks; the largest ones would take seconds to run.
    """
    if getattr(node.target, "overloadpacket", None) not in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm):
        return False
    tensors = [t for t in leaves(fake_arguments(node)) if isinstance(t, torch.Tensor)]
    return all(t.dtype in (torch.float32, torch.float64) for t in tensors) and all(
        _is_blas_layout(t) for t in tensors if t.dim() > 1
    )


def _is_blas_layout(t: torch.Tensor) -> bool:
    """Whether the rows or the columns of the matrix are contiguous and do not overlap."""
    (rows, cols), (row_step, col_step) = t.shape[-2:], t.stride()[-2:]
    by_rows = col_step == 1 and row_step >= max(1, cols)
    return by_rows or (row_step == 1 and col_step >= max(1, rows))


# --- measuring -------------------------------------------------------------------------------------------------------


def _run(node: fx.Node, device: DeviceSpec) -> Workspace | None:
    """The workspace, measured by running the op once on synthetic tensors; None if it raises for all of them."""
    expected = sum(fresh_output_bytes(node).values())
    peak = run_alone(node, device.kind, (zeros, well_conditioned), lambda run: _peak_of(run, device))
    return None if peak is None else Workspace(max(0, peak - expected), True)


def _peak_of(run: Callable[[], Any], device: DeviceSpec) -> int:
    """The most bytes that one `run()` allocates and has alive at one moment, outputs included."""
    if device.kind == "cuda":
        run()  # here libraries create the handles and plans that they keep
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = run()
        torch.cuda.synchronize()
        del result
        return torch.cuda.max_memory_allocated() - before
    _torch.start_memory_profile()
    try:
        result = run()
    finally:
        events = _torch.stop_memory_profile()
    del result
    return peak_of_events(events)[0]


# --- buffers that libraries keep -------------------------------------------------------------------------------------

_MIB = 1 << 20

# torch's defaults (hipBLAS's and hipBLASLt's together on the MI300X); other devices: 8320 KiB.
_BLAS_BUFFER_BYTES = {
    **dict.fromkeys(("h100-pcie", "h100-sxm", "h200", "b200", "rtx5090"), 32 * _MIB),
    "mi300x": (128 + 76) * _MIB,
}


def library_bytes(nodes: Iterable[fx.Node], device: DeviceSpec) -> int:
    """Bytes that libraries allocate from torch's allocator in the first step and never free.

    On CUDA that is cuBLAS's workspace, one for each thread that calls it: one thread runs forward, another backward.
    """
    if device.kind != "cuda" or not any(getattr(n.target, "overloadpacket", None) in MATMULS for n in nodes):
        return 0
    return 2 * _BLAS_BUFFER_BYTES.get(device.name, 8320 << 10)


# --- estimating ------------------------------------------------------------------------------------------------------


def _estimate(node: fx.Node, device: DeviceSpec) -> int:
    """Workspace bytes by the table at the head of this file."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet in _ESTIMATES:
        return _ESTIMATES[packet](node, device)
    return _casts(node, device)


def _size(t: Any) -> int:
    return t.numel() * t.element_size() if isinstance(t, torch.Tensor) else 0


def _convolution(node: fx.Node, device: DeviceSpec) -> int:
    args, kwargs = fake_arguments(node)
    tensors = [*leaves((args, kwargs)), *leaves(node.meta.get("val"))]
    total = sum(_size(t) for t in tensors)
    return total if device.kind == "cpu" else min(total, 256 * _MIB)


def _attention_backward(node: fx.Node, device: DeviceSpec) -> int:
    if device.kind != "cuda":
        return 0
    args, _ = fake_arguments(node)
    query, key, value = args[1], args[2], args[3]
    rows = math.ceil(query.shape[-2] / 128) * 128
    batch_heads = query.numel() // (query.shape[-2] * query.shape[-1])
    width = math.ceil(query.shape[-1] / 32) * 32
    accumulator = 4 * batch_heads * rows * (width + 1)
    expanded = 0
    if query.dim() == 4 and key.shape[1] != query.shape[1]:
        expanded = (_size(key) + _size(value)) * (query.shape[1] // max(1, key.shape[1]))
    return accumulator + expanded


def _sorts(node: fx.Node, _device: DeviceSpec) -> int:
    args, _ = fake_arguments(node)
    keys = max((_size(t) for t in leaves(args[:2]) if isinstance(t, torch.Tensor)), default=0)
    return 2 * keys


def _sorts_indices(node: fx.Node, _device: DeviceSpec) -> int:
    indices = [t for t in leaves(fake_arguments(node)) if isinstance(t, torch.Tensor) and t.dtype == torch.int64]
    return 4 * sum(_size(t) for t in indices)


def _casts(node: fx.Node, device: DeviceSpec) -> int:
    """The operands cast to the result's dtype, which CPU kernels make before they compute; CUDA kernels need no such copies."""
    target = node.target
    if device.kind != "cpu" or not isinstance(target, _torch.OpOverload) or torch.Tag.pointwise not in target.tags:
        return 0
    out = node.meta.get("val")
    if not isinstance(out, torch.Tensor) or target.overloadpacket in (aten._to_copy, aten.clone, aten.where):
        return 0
    args, kwargs = fake_arguments(node)
    operands = [t for t in leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    return sum(t.numel() * out.element_size() for t in operands if t.dtype != out.dtype and t.dim())


_ESTIMATES: dict[Any, Callable[[fx.Node, DeviceSpec], int]] = {
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution,
    aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward: _attention_backward,
    aten.sort: _sorts,
    aten.topk: _sorts,
    aten.index_put: _sorts_indices,
    aten.index_put_: _sorts_indices,
    aten.embedding_dense_backward: _sorts_indices,
    aten._embedding_bag_backward: _sorts_indices,
}
