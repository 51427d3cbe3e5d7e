"""A fake tensor mode whose results have the strides, storages and dtypes of the kernels' results.

torch computes the fake result of an op by a rule that is not the kernel's own code, and a few rules are wrong: in strides (a
normalization, or a loss's gradient, of operands that do not lie densely in order), or in dtypes that they refuse and the
kernel takes. After a wrong stride, other ops are traced than eager runs: a copy more or less, another kernel. So where
rules are known to fail, the op is run once on this machine, if its operands are small enough, and the result of the kernel
decides.

Rules also take operands whose dtypes the kernel refuses (a float64 input with float32 weights). So an op of several dtypes,
or of integers alone, is tried on its kernel, with operands of one element where these are enough.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import fx

from gcsolve._torch import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    ShapeEnv,
    disable_autocast,
    no_modes,
    pytree,
    storage_key,
    view_like,
)
from gcsolve.cost.base import Roofline
from gcsolve.cost.devices import DeviceSpec, get_device
from gcsolve.cost.flops import op_info
from gcsolve.cost.local import free_memory_bytes
from gcsolve.ops.facts import signature
from gcsolve.ops.run import SIZED_BY_KERNELS, fits, may_run, run_alone, well_conditioned, zeros
from gcsolve.util.memo import Memo

MAX_SECONDS = 0.5
"""Of an op's estimated time: a slower one is not run."""

aten = torch.ops.aten

# Ops whose rules are right for any strides. Most ops of transposed operands are among them.
_RIGHT_RULES = frozenset(
    [
        *(aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.clone, aten._to_copy, aten.copy, aten.cat, aten.index),
        *(aten.sum, aten.mean, aten.amax, aten.amin, aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like),
        *(aten._softmax, aten._softmax_backward_data, aten._log_softmax, aten._log_softmax_backward_data),
        *(aten.embedding, aten.slice_backward, aten.select_backward),
        *(aten.new_zeros, aten.new_empty, aten.constant_pad_nd),
    ]
)

# Ops that copy the whole storage of their first operand, a view, and return the same view of the copy.
_COPIES_STORAGE = frozenset(
    [aten.copy, aten.select_scatter, aten.slice_scatter, aten.as_strided_scatter, aten.diagonal_scatter]
)

# Losses whose result, one number, lies in a storage with room for all terms: torch resizes the tensor, and keeps the storage.
_KEEPS_TERMS = frozenset([aten.mse_loss, aten.smooth_l1_loss, aten.binary_cross_entropy, aten.soft_margin_loss])

_MATMULS = frozenset([aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.addmv.default])

# Ops whose rules compare dtypes as the kernels do, or whose kernels take any dtypes.
_RIGHT_DTYPES = _RIGHT_RULES - {aten._softmax, aten._log_softmax}

_ABOUT_DTYPES = re.compile(r"dtype|data ?type|scalar type|not implemented for '")
"""Matches an error text of a kernel that refuses dtypes."""


class TrueFakes(FakeTensorMode):
    """The fake mode of a trace. All shapes are static.

    Args:
        run: ops may be run on this machine where rules may fail. Otherwise rules are trusted, but for those of LSTM layers.
        elsewhere: the step will run on another kind of device, whose kernels may take other dtypes than those here.
    """

    def __init__(self, run: bool, elsewhere: bool = False) -> None:
        super().__init__(shape_env=ShapeEnv(tracked_fakes=[]), allow_non_fake_inputs=True, export=True)
        self.run = run
        self.elsewhere = elsewhere or not run
        self._checks_dtypes = False
        self._caches = self.cache_enabled

    @contextlib.contextmanager
    def dtypes_checked(self) -> Iterator[None]:
        """In this block, dtypes are refused that kernels refuse.

        It is for forward. The operands of backward have the dtypes that rules give them, which are not always the kernel's
        (the statistics of a layer norm).
        """
        self._checks_dtypes = True
        try:
            yield
        finally:
            self._checks_dtypes = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", None)
        copies_storage = packet in _COPIES_STORAGE
        # torch's cache of fake results does not keep which of several results share a storage, nor the part of a storage that
        # a view leaves out: the second call would have another result.
        self.cache_enabled = self._caches and not (copies_storage or packet in _KEEPS_TERMS or _returns_several(func))
        try:
            result: Any = super().__torch_dispatch__(func, types, args, kwargs)
        except RuntimeError as error:
            if not self.run or type(error) is not RuntimeError or not isinstance(func, OpOverload):
                raise
            layouts = _from_kernel(func, args, kwargs, None)
            if layouts is None:
                raise
            return self._fake(layouts)
        if self._checks_dtypes and isinstance(func, OpOverload):
            refusal = _refusal(func, args, kwargs, result, self.elsewhere)
            if refusal is not None:
                raise type(refusal)(*refusal.args)
        if copies_storage:
            return self._in_storage_of(args[0], result)
        if packet in _KEEPS_TERMS and not result.dim():
            return self._in_storage_for(torch.broadcast_shapes(*(t.shape for t in _tensors((args, kwargs)))), result)
        may_ask = self.run or func in SIZED_BY_KERNELS
        if may_ask and isinstance(func, OpOverload) and _is_doubtful(func, args, kwargs, result):
            layouts = _from_kernel(func, args, kwargs, result)
            if layouts is not None and not _all_match(layouts, result):
                return self._fake(layouts)
        return result

    def _in_storage_of(self, view: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """`result` in a storage as large as that of `view`, if it has the strides of `view` and a smaller storage."""
        storage_bytes = view.untyped_storage().nbytes()
        if result.stride() != view.stride() or result.untyped_storage().nbytes() >= storage_bytes:
            return result
        with self, torch.no_grad():
            base = torch.empty(storage_bytes // result.element_size(), dtype=result.dtype, device=result.device)
            return base.as_strided(result.shape, result.stride(), view.storage_offset())

    def _in_storage_for(self, shape: Sequence[int], result: torch.Tensor) -> torch.Tensor:
        """`result`, a number, in a storage for a tensor of that shape."""
        with self, torch.no_grad():
            return torch.empty(shape, dtype=result.dtype, device=result.device).as_strided((), ())

    def _fake(self, layouts: Any) -> Any:
        """Fake tensors of these layouts."""
        with self, torch.no_grad():
            return pytree.tree_map_only(
                _Layout, lambda t: torch.empty_strided(t.shape, t.stride, dtype=t.dtype, device=t.device), layouts
            )


class _Layout:
    """Shape, strides, dtype and device of a tensor; `storage` is equal for two results of one call that share theirs."""

    def __init__(self, t: torch.Tensor) -> None:
        self.shape, self.stride, self.dtype, self.device = tuple(t.shape), t.stride(), t.dtype, t.device
        self.storage = storage_key(t)

    def matches(self, t: torch.Tensor) -> bool:
        """True if the strides match; shape mismatches count only for empty tensors, strides of size-1 dimensions never."""
        if tuple(t.shape) != self.shape:
            return t.numel() > 0
        strides = zip(self.shape, self.stride, t.stride(), strict=True)
        return all(a == b or n == 1 for n, a, b in strides) or not t.numel()


def _returns_several(func: Any) -> bool:
    """Whether an op returns several tensors, or a list of them."""
    return isinstance(func, OpOverload) and [str(r.type) for r in func._schema.returns] != ["Tensor"]


def _is_doubtful(func: OpOverload, args: Any, kwargs: Any, result: Any) -> bool:
    """Whether the rule for such a call may be wrong in strides or storages."""
    if func.namespace == "prim" or func.overloadpacket in _RIGHT_RULES or func._schema.is_mutable or view_like(func):
        return False
    operands = _tensors((args, kwargs))
    if any(t.dim() > 1 and not t.is_contiguous() for t in operands):
        return True
    if not _returns_several(func) or torch.Tag.dynamic_output_shape in func.tags:
        return False
    results, read = _tensors(result), {storage_key(t) for t in operands}
    fresh = not any(storage_key(t) in read for t in results)
    return any(t.numel() == 0 for t in results) or (_share_storage(results) and fresh)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def _share_storage(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether two of them do."""
    return len({storage_key(t) for t in tensors}) < len(tensors)


def _all_match(layouts: Any, result: Any) -> bool:
    """Whether results lie in memory as those of the kernel."""
    expected, leaves = pytree.tree_leaves(layouts), pytree.tree_leaves(result)
    pairs = [(a, b) for a, b in zip(expected, leaves, strict=False) if isinstance(a, _Layout)]
    if len(expected) != len(leaves):
        return False
    if _share_storage([b for _, b in pairs]) and len({a.storage for a, _ in pairs}) == len(pairs):
        return False
    return all(a.matches(b) for a, b in pairs)


# --- what kernels refuse ---------------------------------------------------------------------------------------------


def _refusal(func: OpOverload, args: Any, kwargs: Any, result: Any, elsewhere: bool) -> Exception | None:
    """The error that the kernel raises for operands of such dtypes; None if it takes them, or cannot be run here."""
    dtypes = {t.dtype for t in _tensors((args, kwargs))}
    if len(dtypes) < 2 and any(d.is_floating_point or d.is_complex for d in dtypes):
        return None
    is_matmul = func in _MATMULS
    if not is_matmul and (elsewhere or func.overloadpacket in _RIGHT_DTYPES):
        return None
    if not dtypes or func.namespace != "aten" or func._schema.is_mutable or view_like(func):
        return None
    if is_matmul or torch.Tag.pointwise in func.tags:
        return _refusal_of_one(func, args, kwargs)
    refusal = _from_kernel(func, args, kwargs, result, _dtype_error)
    return refusal if isinstance(refusal, Exception) else None


_refusals = Memo[Exception | None](size=20_000)  # of `_refusal_of_one`, by op, dtypes and other arguments


def _refusal_of_one(func: OpOverload, args: Any, kwargs: Any) -> Exception | None:
    """The same, for an op that takes operands of any sizes: it is run on one element of each."""
    leaves = pytree.tree_leaves((args, kwargs))
    described = ((t.dtype, t.dim(), t.device.type) if isinstance(t, torch.Tensor) else repr(t) for t in leaves)

    def run() -> Exception | None:
        with no_modes(), torch.no_grad(), disable_autocast():
            ones, keywords = pytree.tree_map_only(
                torch.Tensor, lambda t: torch.zeros((1,) * t.dim(), dtype=t.dtype, device=t.device), (args, kwargs)
            )
            return _dtype_error(lambda: func(*ones, **keywords))

    return _refusals.recall((func, tuple(described)), run)


def _dtype_error(run: Callable[[], Any]) -> Exception | None:
    """The error that `run()` raises, if it is about dtypes."""
    try:
        run()
    except (RuntimeError, ValueError, NotImplementedError, IndexError, TypeError) as error:
        return type(error)(*error.args) if _ABOUT_DTYPES.search(str(error)) else None
    return None


# --- what kernels return ---------------------------------------------------------------------------------------------


def _layouts(run: Callable[[], Any]) -> Any:
    """The results of `run()`, with a `_Layout` for each tensor."""
    return pytree.tree_map_only(torch.Tensor, _Layout, run())


_answers = Memo[Any](size=20_000)  # of `_from_kernel`, by `use` and the op's signature


def _from_kernel(
    func: OpOverload, args: Any, kwargs: Any, result: Any, use: Callable[[Callable[[], Any]], Any] = _layouts
) -> Any:
    """`use(run)`, where `run()` runs the op on operands like the arguments; None if it cannot be run here.

    Args:
        result: the fake result, from which the op's cost is estimated; None: the rule has none.
    """
    node = _as_node(func, args, kwargs, result)
    try:
        return _answers.recall((use, signature(node)), lambda: _run(node, _device(args, kwargs), use))
    finally:
        for n in node.graph.nodes:
            n.meta.clear()  # a graph is a cycle, and a trace goes wrong where fake tensors outlive their use


def _run(node: fx.Node, device: DeviceSpec | None, use: Callable[[Callable[[], Any]], Any]) -> Any:
    assert isinstance(node.target, OpOverload)
    if device is None or node.target._schema.is_mutable or not may_run(node):
        return None
    if not fits(node, free_memory_bytes(device)):
        return None
    has_cost = node.meta["val"] is not None
    if has_cost and Roofline(device).cost(op_info(node)) > MAX_SECONDS:
        return None
    return run_alone(node, device.kind, (zeros, well_conditioned), use)


def _device(args: Any, kwargs: Any) -> DeviceSpec | None:
    """The device of all operands but numbers; None if they are on several."""
    kinds = {t.device.type for t in _tensors((args, kwargs)) if t.dim()}
    return get_device(kinds.pop()) if len(kinds) == 1 else None


def _as_node(func: OpOverload, args: Any, kwargs: Any, result: Any) -> fx.Node:
    """The call as a node of a graph, which is what functions about one op take."""
    graph = fx.Graph()
    placeholders: dict[int, fx.Node] = {}

    def placeholder(t: torch.Tensor) -> fx.Node:
        if id(t) not in placeholders:
            placeholders[id(t)] = graph.placeholder(f"t{len(placeholders)}")
            placeholders[id(t)].meta["val"] = t
        return placeholders[id(t)]

    args, kwargs = pytree.tree_map_only(torch.Tensor, placeholder, (args, kwargs))
    node = graph.call_function(func, tuple(args), kwargs)
    node.meta["val"] = result
    return node


# --- fakes that outlive a trace --------------------------------------------------------------------------------------

_LRU_CACHE: Any = type(functools.lru_cache(lambda: None))
_CONTAINERS = (dict, tuple, list)


def forget_fakes() -> None:
    """Empty every `functools` cache with a fake tensor among its results. Models often cache position tables so, and the
    untouched model would get the fakes."""
    for cache in itertools.chain(gc.get_objects(), _frozen_functions()):
        if type(cache) is _LRU_CACHE and cache.cache_info().currsize and _has_fake(cache):
            cache.cache_clear()


def _frozen_functions() -> Iterator[Any]:
    """What is in modules, and in classes there, if the garbage collector may not know it: it does not list what `gc.freeze()`
    has frozen."""
    if not gc.get_freeze_count():
        return
    for module in tuple(sys.modules.values()):
        for value in tuple(vars(module).values()) if isinstance(module, ModuleType) else ():
            yield value
            if issubclass(type(value), type):  # isinstance() would ask the value, which may warn
                yield from tuple(vars(value).values())


def _has_fake(cache: Any) -> bool:
    """Whether a fake tensor is among the results of a cache, or in containers there. (A bounded cache links its results.)"""
    stack, seen = [cache], set[int]()
    while stack:
        for referent in gc.get_referents(stack.pop()):
            if isinstance(referent, FakeTensor):
                return True
            is_container = isinstance(referent, _CONTAINERS) or type(referent).__name__ == "_lru_list_elem"
            if id(referent) not in seen and is_container:
                seen.add(id(referent))
                stack.append(referent)
    return False
