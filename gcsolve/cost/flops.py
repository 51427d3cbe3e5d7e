"""FLOPs and bytes moved of one op, from the shapes in an fx graph; nothing runs.

FLOPs come from the formulas of `torch.utils.flop_counter` (a multiply-add counts 2) and from those below, for ops that it
lacks and for attention, where some releases of torch refuse grouped key/value heads. Without a formula the answer is None.
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
from gcsolve.errors import ArgumentError
from gcsolve.ops.facts import fake_arguments, is_random, named_arguments, signature
from gcsolve.util.checks import number

Shape = Sequence[int]


def node_flops(node: fx.Node) -> int | None:
    """FLOPs of a `call_function` node whose tensor arguments carry fake tensors in `meta["val"]`.

    Returns:
        an int ≥ 0, or None if no formula is known for the op.

    Raises:
        ArgumentError: a function given to `register_cost` raised, or did not return a finite number ≥ 0.
    """
    registered_flops = registered(node, "flops")
    if registered_flops is not None:
        return int(registered_flops)
    packet = getattr(node.target, "overloadpacket", node.target)
    args, kwargs = fake_arguments(node)
    if packet in _OWN_FORMULAS:
        return int(_OWN_FORMULAS[packet](*args, **kwargs))
    if packet in flop_registry and node.meta.get("val") is not None:  # its formulas need the result's shape
        return int(flop_registry[packet](*args, **kwargs, out_val=node.meta["val"]))
    return None


def node_bytes_moved(node: fx.Node) -> int:
    """Bytes that the node reads and writes: each distinct input once, plus its outputs; 0 for a view.

    A broadcast dimension counts once. Ops that pick rows (embedding, gather, index) read as many bytes as they return.
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
        return 0  # a view whose schema does not say so (_unsafe_view, reshape)
    out_bytes = sum(_bytes(t) for t in fresh) + sum(_bytes(t) for t in written)
    in_bytes = sum(_bytes(t) for t in inputs.values())
    if getattr(target, "overloadpacket", None) in _PICKS_ROWS and fresh:
        picked = max(inputs.values(), key=_bytes, default=None)
        if picked is not None:
            in_bytes += min(_bytes(picked), out_bytes) - _bytes(picked)
    if getattr(target, "overloadpacket", None) is aten._safe_softmax:
        # It also writes a mask of the input, reads the mask, and copies the output, except for fully masked rows.
        return 2 * in_bytes + 3 * out_bytes + 2 * sum(t.numel() for t in outputs)
    return in_bytes + out_bytes


def op_info(node: fx.Node) -> OpInfo:
    """The facts about the node that a cost model may use.

    Examples:
        >>> op_info(node).flops  # doctest: +SKIP
        2147483648
    """
    flops = node_flops(node)
    outputs = list(_tensors(node.meta.get("val")))
    inputs = list(_tensors(fake_arguments(node)))
    # The dtype of the arithmetic is taken to be that of the first floating-point input, else of the first such output.
    floating = [t for t in [*inputs, *outputs] if t.dtype.is_floating_point or t.dtype.is_complex]
    representative = (floating or outputs or inputs or [None])[0]
    return OpInfo(
        target=str(node.target),
        flops=flops or 0,
        has_formula=flops is not None,
        bytes_moved=node_bytes_moved(node),
        dtype="none" if representative is None else _arithmetic(node, representative.dtype),
        device="none" if representative is None else representative.device.type,
        seconds=registered(node, "s"),
        draws=max((t.numel() for t in outputs), default=0) if is_random(node) else 0,
        signature=signature(node),
    )


def _arithmetic(node: fx.Node, dtype: torch.dtype) -> str:
    """The name of `dtype`, or "tf32" if torch's settings let a GPU compute this op in it."""
    packet = getattr(node.target, "overloadpacket", None)
    if dtype == torch.float32 and (
        (packet in _CONVOLUTIONS and _torch.float32_in("cudnn", "conv") == "tf32")
        or (packet in MATMULS and _torch.float32_in("cuda", "matmul") == "tf32")
    ):
        return "tf32"
    return str(dtype).removeprefix("torch.")


# --- costs of the user's own -----------------------------------------------------------------------------------------

_UNITS = ("flops", "s")
_registered: dict[tuple[Any, str], Callable[..., float]] = {}


def register_cost(op: Any, fn: Callable[..., float], *, unit: str = "flops") -> None:
    """Set what one run of `op` costs, in place of gcsolve's own estimate, for the rest of this process.

    Args:
        op: an op of `torch.ops` (`torch.ops.mylib.attention`, with or without overload).
        fn: called with the op's arguments, where tensors are fake (shapes and dtypes, no data); returns the cost.
        unit: the unit of the cost. "flops": the cost models combine it with the device's peak rates. "s": seconds, used as
            they are (`cost="flops"` then counts the op by its bytes).

    Raises:
        ArgumentError: an argument is not as above. Later, while planning: `fn` raises, or returns something else than a
            finite number ≥ 0.

    Examples:
        >>> import torch, gcsolve
        >>> gcsolve.register_cost(torch.ops.aten.sin, lambda x: 20 * x.numel())
    """
    if not isinstance(op, (_torch.OpOverload, _torch.OpOverloadPacket)):
        raise ArgumentError(
            f"op={op!r} is not an op of torch.ops, as torch.ops.aten.sin or torch.ops.mylib.attention is"
        )
    if not callable(fn):
        raise ArgumentError(f"fn={fn!r} is not callable; pass a function of the op's arguments that returns its cost")
    if unit not in _UNITS:
        raise ArgumentError(f"unit={unit!r} is not known; known units: {', '.join(_UNITS)}")
    _registered[op, unit] = fn


def registered(node: fx.Node, unit: str) -> float | None:
    """The node's cost in `unit` by a function given to `register_cost`; None without one."""
    target = node.target
    fn = _registered.get((target, unit)) or _registered.get((getattr(target, "overloadpacket", None), unit))
    if fn is None:
        return None
    args, kwargs = fake_arguments(node)
    fn_name = getattr(fn, "__qualname__", repr(fn))
    try:
        cost = fn(*args, **kwargs)
    except Exception as error:
        raise ArgumentError(
            f"{fn_name}, registered as the cost of {target}, raised {type(error).__name__}: {error}. It is called with the "
            f"op's own arguments: {getattr(target, '_schema', target)}"
        ) from error
    return number(f"the cost registered for {target} ({fn_name})", cost, of=f" {unit}")


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors among the leaves of a tree."""
    return (leaf for leaf in _torch.pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes of the tensor's elements, those of a broadcast dimension (stride 0) once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count * tensor.element_size()


def _written(node: fx.Node) -> list[torch.Tensor]:
    """The tensor arguments that the op changes in place."""
    if not isinstance(node.target, _torch.OpOverload):
        return []
    named = named_arguments(node)
    written = [a.name for a in node.target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [t for name in written for t in _tensors(named[name])]


aten = torch.ops.aten

MATMULS = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.linear, aten.mv, aten.addmv})
_CONVOLUTIONS = frozenset({aten.convolution, aten.convolution_backward})
_PICKS_ROWS = frozenset(
    {aten.embedding, aten.gather, aten.index, aten.index_select, aten.slice_scatter, aten.select_scatter}
)


# --- formulas; tensor arguments are fake tensors ---------------------------------------------------------------------


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of QKᵀ and PV with the query's number of heads; a causal mask does not lower them."""
    *batch, rows, width = query.shape
    count = 2 * rows * key.shape[-2] * (width + value.shape[-1])
    for size in batch:
        count *= size
    return count


def _attention_backward(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    """FLOPs of five matmuls, where forward has two: the scores again, dV, dP, dQ and dK."""
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
