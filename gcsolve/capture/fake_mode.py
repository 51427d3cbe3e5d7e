"""Fake tensors that lie in memory as the real ones will.

torch computes an op's fake result from rules that are not the kernel's own code, and a few of them are wrong: the strides of
a normalization or of a loss's gradient over operands that do not lie densely in order, or a dtype that the kernel takes
and the rule refuses. What is traced after a wrong stride is not what eager runs (a copy more or less, another kernel). So
where rules are known to fail, the op is run once on this machine, small operands provided, and the kernel has the word.

The rules also take operands that the kernel refuses for their dtypes (a float64 input for float32 weights): an op over
several dtypes, or over integers alone, is tried on the kernel, of one element each where that is enough to know.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import re
from collections.abc import Callable, Iterator, Sequence
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

MAX_SECONDS = 0.5  # an op estimated slower than this is not run

aten = torch.ops.aten

# Their rules hold for any strides; most ops over transposed operands are these.
_TRUSTED = frozenset(
    {
        *(aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.clone, aten._to_copy, aten.copy, aten.cat, aten.index),
        *(aten.sum, aten.mean, aten.amax, aten.amin, aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like),
        *(aten._softmax, aten._softmax_backward_data, aten._log_softmax, aten._log_softmax_backward_data),
        *(
            aten.embedding,
            aten.slice_backward,
            aten.select_backward,
            aten.new_zeros,
            aten.new_empty,
            aten.constant_pad_nd,
        ),
    }
)

# Of a view as their first operand these copy the whole storage that it looks into, and return the like view of the copy.
_COPIES_STORAGE = frozenset(
    {aten.copy, aten.select_scatter, aten.slice_scatter, aten.as_strided_scatter, aten.diagonal_scatter}
)

# The one number that these return lies in a storage with room for all terms of the loss (torch resizes it, and keeps that).
_KEEPS_TERMS = frozenset({aten.mse_loss, aten.smooth_l1_loss, aten.binary_cross_entropy, aten.soft_margin_loss})

_MATMULS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.addmv.default})
_UNCHECKED = _TRUSTED - {aten._softmax, aten._log_softmax}  # their rules look at dtypes, or their kernels take any
_OF_DTYPES = re.compile(r"dtype|data ?type|scalar type|not implemented for '")


class TrueFakes(FakeTensorMode):
    """The mode for a trace with static shapes.

    Args:
        run: ops may be run here where rules may fail; else torch's rules are taken as they are (but for an LSTM layer's).
        elsewhere: the step will run on another kind of device than this trace, whose kernels may take other dtypes.
    """

    def __init__(self, run: bool, elsewhere: bool = False) -> None:
        super().__init__(shape_env=ShapeEnv(tracked_fakes=[]), allow_non_fake_inputs=True, export=True)
        self.run = run
        self.elsewhere = elsewhere or not run
        self.checks_dtypes = False
        self.caches = self.cache_enabled

    @contextlib.contextmanager
    def dtypes_checked(self) -> Iterator[None]:
        """In this block, what kernels refuse for its dtypes is refused. For what the model itself calls: a backward's own
        operands have the dtypes that rules give them, not always the kernel's (a layer norm's statistics)."""
        self.checks_dtypes = True
        try:
            yield
        finally:
            self.checks_dtypes = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # What torch keeps of fake results has lost which of several share a storage, and how much of one a view leaves out:
        # a second call would differ.
        packet = getattr(func, "overloadpacket", None)
        of_storage = packet in _COPIES_STORAGE
        self.cache_enabled = self.caches and not (of_storage or packet in _KEEPS_TERMS or _makes_several(func))
        try:
            result: Any = super().__torch_dispatch__(func, types, args, kwargs)
        except RuntimeError as error:
            if not self.run or type(error) is not RuntimeError or not isinstance(func, OpOverload):
                raise
            like = _kernels_result(func, args, kwargs, None)
            if like is None:
                raise
            return self._fake(like)
        if self.checks_dtypes and isinstance(func, OpOverload):
            refused = _refusal(func, args, kwargs, result, self.elsewhere)
            if refused is not None:
                raise type(refused)(*refused.args)
        if of_storage:
            return self._with_storage(args[0], result)
        if packet in _KEEPS_TERMS and not result.dim():
            return self._one_of(torch.broadcast_shapes(*(t.shape for t in _tensors((args, kwargs)))), result)
        asked = self.run or func in SIZED_BY_KERNELS
        if asked and isinstance(func, OpOverload) and _doubtful(func, args, kwargs, result):
            like = _kernels_result(func, args, kwargs, result)
            if like is not None and not _lies_alike(like, result):
                return self._fake(like)
        return result

    def _with_storage(self, view: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """`result` in a storage as large as the one `view` looks into, if it lies there as `view` does."""
        whole = view.untyped_storage().nbytes()
        if result.stride() != view.stride() or result.untyped_storage().nbytes() >= whole:
            return result
        with self, torch.no_grad():
            base = torch.empty(whole // result.element_size(), dtype=result.dtype, device=result.device)
            return base.as_strided(result.shape, result.stride(), view.storage_offset())

    def _one_of(self, shape: Sequence[int], result: torch.Tensor) -> torch.Tensor:
        """`result`, a number, in a storage for a tensor of that shape."""
        with self, torch.no_grad():
            return torch.empty(shape, dtype=result.dtype, device=result.device).as_strided((), ())

    def _fake(self, like: Any) -> Any:
        with self, torch.no_grad():
            return pytree.tree_map_only(
                _Like, lambda t: torch.empty_strided(t.shape, t.stride, dtype=t.dtype, device=t.device), like
            )


class _Like:
    """A tensor's place in memory, without the memory; `storage` is equal for two results of one call that share theirs."""

    def __init__(self, t: torch.Tensor) -> None:
        self.shape, self.stride, self.dtype, self.device = tuple(t.shape), t.stride(), t.dtype, t.device
        self.storage = storage_key(t)


_results = Memo[Any](size=20_000)  # of `_kernels_result`, by what is taken of them and signature


def _makes_several(func: Any) -> bool:
    """Whether an op returns several tensors, or a list of them."""
    return isinstance(func, OpOverload) and [str(r.type) for r in func._schema.returns] != ["Tensor"]


def _doubtful(func: OpOverload, args: Any, kwargs: Any, result: Any) -> bool:
    if func.namespace == "prim" or func.overloadpacket in _TRUSTED or func._schema.is_mutable or view_like(func):
        return False
    tensors = _tensors((args, kwargs))
    if any(t.dim() > 1 and not t.is_contiguous() for t in tensors):
        return True
    if not _makes_several(func) or torch.Tag.dynamic_output_shape in func.tags:
        return False
    made, read = _tensors(result), {storage_key(t) for t in tensors}
    return any(t.numel() == 0 for t in made) or (_share(made) and not any(storage_key(t) in read for t in made))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def _share(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether two of them share a storage."""
    return len({storage_key(t) for t in tensors}) < len(tensors)


def _refusal(func: OpOverload, args: Any, kwargs: Any, result: Any, elsewhere: bool) -> Exception | None:
    """What the kernel raises for the dtypes of such arguments; None when it takes them, or cannot be asked."""
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    dtypes = {t.dtype for t in tensors}
    if len(dtypes) < 2 and any(d.is_floating_point or d.is_complex for d in dtypes):
        return None
    matmul = func in _MATMULS
    if not matmul and (elsewhere or func.overloadpacket in _UNCHECKED):
        return None
    if not dtypes or func.namespace != "aten" or func._schema.is_mutable or view_like(func):
        return None
    if matmul or torch.Tag.pointwise in func.tags:
        return _refusal_of_one(func, args, kwargs)
    found = _kernels_result(func, args, kwargs, result, _refused)
    return found if isinstance(found, Exception) else None


_refusals = Memo[Exception | None](size=20_000)  # of `_refusal_of_one`, by op and kinds of operands


def _refusal_of_one(func: OpOverload, args: Any, kwargs: Any) -> Exception | None:
    """The same by one element for each operand, for ops that take any number of them."""
    flat = pytree.tree_leaves((args, kwargs))
    described = ((t.dtype, t.dim(), t.device.type) if isinstance(t, torch.Tensor) else repr(t) for t in flat)

    def run() -> Exception | None:
        with no_modes(), torch.no_grad(), disable_autocast():
            ones, keywords = pytree.tree_map_only(
                torch.Tensor, lambda t: torch.zeros((1,) * t.dim(), dtype=t.dtype, device=t.device), (args, kwargs)
            )
            return _refused(lambda: func(*ones, **keywords))

    return _refusals.recall((func, tuple(described)), run)


def _refused(run: Callable[[], Any]) -> Exception | None:
    try:
        run()
    except (RuntimeError, ValueError, NotImplementedError, IndexError, TypeError) as error:
        return type(error)(*error.args) if _OF_DTYPES.search(str(error)) else None
    return None


def _likes(run: Callable[[], Any]) -> Any:
    return pytree.tree_map_only(torch.Tensor, _Like, run())


def _kernels_result(
    func: OpOverload, args: Any, kwargs: Any, result: Any, use: Callable[[Callable[[], Any]], Any] = _likes
) -> Any:
    """What `use` tells of the kernel's run on such arguments: the result, as `_Like`s; None when it cannot be run here."""
    node = _as_node(func, args, kwargs, result)
    try:
        return _results.recall((use, signature(node)), lambda: _run(node, _device(args, kwargs), use))
    finally:
        for made in node.graph.nodes:
            made.meta.clear()  # a graph is a cycle, and tracing goes wrong where these tensors outlive their use


def _run(node: fx.Node, device: DeviceSpec | None, use: Callable[[Callable[[], Any]], Any]) -> Any:
    assert isinstance(node.target, OpOverload)
    if (
        device is None
        or node.target._schema.is_mutable
        or not may_run(node)
        or not fits(node, free_memory_bytes(device))
    ):
        return None
    known = node.meta["val"] is not None  # else no rule has said what comes out, so nor can a cost be told
    if known and Roofline(device).cost(op_info(node)) > MAX_SECONDS:
        return None
    return run_alone(node, device.kind, (zeros, well_conditioned), use)


def _device(args: Any, kwargs: Any) -> DeviceSpec | None:
    kinds = {t.device.type for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.dim()}
    return get_device(kinds.pop()) if len(kinds) == 1 else None


def _as_node(func: OpOverload, args: Any, kwargs: Any, result: Any) -> fx.Node:
    """The call as a node of a graph, which is what the functions that run one op take."""
    graph = fx.Graph()
    made: dict[int, fx.Node] = {}

    def placeholder(t: torch.Tensor) -> fx.Node:
        if id(t) not in made:
            made[id(t)] = graph.placeholder(f"t{len(made)}")
            made[id(t)].meta["val"] = t
        return made[id(t)]

    args, kwargs = pytree.tree_map_only(torch.Tensor, placeholder, (args, kwargs))
    node = graph.call_function(func, tuple(args), kwargs)
    node.meta["val"] = result
    return node


def _lies_alike(like: Any, result: Any) -> bool:
    expected, found = pytree.tree_leaves(like), pytree.tree_leaves(result)
    pairs = [(a, b) for a, b in zip(expected, found, strict=False) if isinstance(a, _Like)]
    if len(expected) != len(found) or (
        _share([b for _, b in pairs]) and len({a.storage for a, _ in pairs}) == len(pairs)
    ):
        return False
    return all(_lies_like(a, b) for a, b in pairs)


def _lies_like(like: _Like, t: torch.Tensor) -> bool:
    """Or no matter: other sizes are not ours to correct, but an empty tensor's; a dimension of one has no stride."""
    if tuple(t.shape) != like.shape:
        return t.numel() > 0
    return all(a == b or n == 1 for n, a, b in zip(like.shape, like.stride, t.stride(), strict=True)) or not t.numel()


# --- nothing stays behind --------------------------------------------------------------------------------------------

_CACHES: Any = type(functools.lru_cache(lambda: None))
_HELD_BY = (dict, tuple, list)


def forget_fakes() -> None:
    """Empty every `functools` cache that a trace has left a fake tensor in (position tables are often cached so): the
    untouched model would be handed it."""
    for found in gc.get_objects():
        if type(found) is _CACHES and found.cache_info().currsize and _holds_fake(found):
            found.cache_clear()


def _holds_fake(cache: Any) -> bool:
    """Whether one of its results is, or is a container of, a fake tensor. (A bounded cache keeps them in links.)"""
    stack, seen = [cache], set[int]()
    while stack:
        for held in gc.get_referents(stack.pop()):
            if isinstance(held, FakeTensor):
                return True
            if id(held) not in seen and (isinstance(held, _HELD_BY) or type(held).__name__ == "_lru_list_elem"):
                seen.add(id(held))
                stack.append(held)
    return False
