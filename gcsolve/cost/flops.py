"""FLOPs and bytes moved of one op, from the shapes in an fx graph; nothing runs.

FLOPs come from `torch.utils.flop_counter`'s registry (a multiply-add counts 2), completed below with the ops it has no
formula for. Attention formulas are ours: some releases refuse grouped key/value heads. No formula: None, no guess.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from gcsolve import _torch
from gcsolve.cost.base import OpInfo

Shape = Sequence[int]


def node_flops(node: fx.Node) -> int | None:
    """FLOPs of a `call_function` node whose tensor arguments carry fake tensors in `meta["val"]`.

    Returns:
        an int ≥ 0, or None when no formula is known for the op.
    """
    packet = getattr(node.target, "overloadpacket", node.target)
    args, kwargs = fake_arguments(node)
    if packet in _OWN_FORMULAS:
        return int(_OWN_FORMULAS[packet](*args, **kwargs))
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=node.meta.get("val")))
    return None


def node_bytes_moved(node: fx.Node) -> int:
    """Bytes that the node reads and writes: its inputs once each plus its outputs; 0 for a view.

    A broadcast dimension is read once. Ops that pick rows (embedding, gather, index) read what they return.
    """
    target = node.target
    if target is operator.getitem or (isinstance(target, _torch.OpOverload) and _torch.view_like(target)):
        return 0
    args, kwargs = fake_arguments(node)
    inputs = {id(t): t for t in _tensors((args, kwargs))}
    outputs = list(_tensors(node.meta.get("val")))
    storages = {_torch.storage_key(t) for t in inputs.values()}
    written = _written(node)
    fresh = [t for t in outputs if _torch.storage_key(t) not in storages]
    if outputs and not fresh and not written:
        return 0  # a view that its schema does not own up to (_unsafe_view, reshape)
    out_bytes = sum(_bytes(t) for t in fresh) + sum(_bytes(t) for t in written)
    in_bytes = sum(_bytes(t) for t in inputs.values())
    if getattr(target, "overloadpacket", None) in _PICKS_ROWS and fresh:
        picked = max(inputs.values(), key=_bytes, default=None)
        if picked is not None:
            in_bytes += min(_bytes(picked), out_bytes) - _bytes(picked)
    return in_bytes + out_bytes


def op_info(node: fx.Node) -> OpInfo:
    """Everything a cost model may ask about the node.

    Example:
        >>> op_info(node).flops  # doctest: +SKIP
        2147483648
    """
    flops = node_flops(node)
    outputs = list(_tensors(node.meta.get("val")))
    inputs = list(_tensors(fake_arguments(node)))
    # The slowest arithmetic is that of the widest floating input (a bf16 matmul has a bf16 output and inputs).
    floating = [t for t in [*inputs, *outputs] if t.dtype.is_floating_point or t.dtype.is_complex]
    kind = (floating or outputs or inputs or [None])[0]
    return OpInfo(
        target=str(node.target),
        flops=flops or 0,
        has_formula=flops is not None,
        bytes_moved=node_bytes_moved(node),
        dtype="none" if kind is None else str(kind.dtype).removeprefix("torch."),
        device="none" if kind is None else kind.device.type,
    )


def fake_arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The node's args and kwargs with every fx node replaced by its `meta["val"]`."""
    return (
        fx.map_arg(node.args, lambda n: n.meta.get("val")),  # type: ignore[return-value]
        fx.map_arg(node.kwargs, lambda n: n.meta.get("val")),
    )


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in _torch.pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _bytes(tensor: torch.Tensor) -> int:
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count * tensor.element_size()


def _written(node: fx.Node) -> list[torch.Tensor]:
    """The arguments that the op changes in place."""
    if not isinstance(node.target, _torch.OpOverload):
        return []
    args, kwargs = fake_arguments(node)
    found: list[torch.Tensor] = []
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            found.extend(_tensors(given))
    return found


aten = torch.ops.aten

_PICKS_ROWS = frozenset(
    {aten.embedding, aten.gather, aten.index, aten.index_select, aten.slice_scatter, aten.select_scatter}
)


# --- formulas; tensor arguments are fake tensors ---------------------------------------------------------------------


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    """QK^T and PV, with as many heads as the query has; a causal mask is not credited."""
    *batch, rows, width = query.shape
    count = 2 * rows * key.shape[-2] * (width + value.shape[-1])
    for size in batch:
        count *= size
    return count


def _attention_backward(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    """Scores again, dV, dP, dQ, dK: five matmuls where forward has two."""
    *batch, rows, width = query.shape
    count = 2 * rows * key.shape[-2] * (3 * width + 2 * value.shape[-1])
    for size in batch:
        count *= size
    return count


def _mv(matrix: torch.Tensor, _vector: torch.Tensor) -> int:
    return 2 * matrix.numel()


def _addmv(_self: torch.Tensor, matrix: torch.Tensor, _vector: torch.Tensor, **_: Any) -> int:
    return 2 * matrix.numel()


def _linear(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> int:
    return 2 * x.numel() * weight.shape[0]


def _dot(a: torch.Tensor, _b: torch.Tensor) -> int:
    return 2 * a.numel()


_OWN_FORMULAS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention: _attention,
    aten._scaled_dot_product_efficient_attention: _attention,
    aten._scaled_dot_product_cudnn_attention: _attention,
    aten._scaled_dot_product_fused_attention_overrideable: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward: _attention_backward,
    aten.mv: _mv,
    aten.addmv: _addmv,
    aten.linear: _linear,
    aten.dot: _dot,
    aten.vdot: _dot,
}
