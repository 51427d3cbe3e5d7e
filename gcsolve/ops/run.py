"""Runs one op of a traced graph alone on this machine, with synthetic tensors as its arguments.

`cost/workspace.py` measures the op's bytes so, `cost/measured.py` its seconds. Only ops without side effects are run (a
collective would wait for its peers), and none whose operands and results would take much of the free memory.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from gcsolve import _torch
from gcsolve.ops.facts import fake_arguments, is_random, named_arguments
from gcsolve.ops.own_draws import drawing_from

aten = torch.ops.aten

MAX_MEMORY_SHARE = 0.25  # of the free memory; an op whose operands and results take more is not run

_PURE_NAMESPACES = frozenset({"aten", "prims", "torchvision", "gcsolve"})

# Ops that read a buffer in a library's own format. Their kernels do not check it, so a synthetic one may end the process.
# The buffer of oneDNN's recurrent layers holds numbers alone, so any of the right size will do.
_OPAQUE = re.compile(r"(?<!mkldnn_)rnn|lstm|gru|miopen|sparse|quantiz|fbgemm|packed")

# oneDNN's LSTM layers keep a buffer for backward and need a workspace of about its size; both are most of the layer's memory,
# and no formula for them is known. Such an op is run once if it is small enough, even if the model's weights are on meta.
SIZED_BY_KERNELS = frozenset({aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default})

Fill = Callable[[torch.Tensor, str, int], torch.Tensor]
"""(fake tensor, device, bound) -> a real tensor of its shape, stride and dtype; if it holds indices, they are below `bound`."""


def may_run(node: fx.Node) -> bool:
    """Whether the op can be run alone: it has no effect but its results, and it takes synthetic operands."""
    target = node.target
    if not isinstance(target, _torch.OpOverload) or target.namespace not in _PURE_NAMESPACES:
        return False
    return not _OPAQUE.search(str(target)) and not _has_unsized_buffer(node)


def _has_unsized_buffer(node: fx.Node) -> bool:
    """Whether the op is a recurrent layer's backward whose buffer has no known size (0 elements in the trace)."""
    if node.target is not aten.mkldnn_rnn_layer_backward.default:
        return False
    return named_arguments(node)["workspace"].numel() == 0


def fits(node: fx.Node, free_bytes: int) -> bool:
    """Whether the op's operands and results take a small enough share of `free_bytes`; False if a size is symbolic."""
    tensors = [t for t in leaves(fake_arguments(node)) if isinstance(t, torch.Tensor)]
    sizes = [s for t in tensors for s in (*t.shape, *t.stride())]
    if not all(isinstance(s, int) for s in sizes):
        return False
    needed_bytes = operand_bytes(node) + 2 * sum(fresh_output_bytes(node).values())
    return needed_bytes <= MAX_MEMORY_SHARE * free_bytes


def operand_bytes(node: fx.Node) -> int:
    """Bytes of all tensor arguments, each from its first to its last element."""
    return sum(_extent_bytes(t) for t in leaves(fake_arguments(node)) if isinstance(t, torch.Tensor))


def fresh_output_bytes(node: fx.Node) -> dict[int, int]:
    """Storage key → bytes of each storage that the op allocates for its outputs (views of inputs have none)."""
    inputs = {_torch.storage_key(t) for t in leaves(fake_arguments(node)) if isinstance(t, torch.Tensor)}
    outputs = [t for t in leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)]
    keyed = {_torch.storage_key(t): t.untyped_storage().nbytes() for t in outputs}
    return {key: size for key, size in keyed.items() if key not in inputs}


def run_alone(
    node: fx.Node,
    kind: str,
    fills: tuple[Fill, ...],
    use: Callable[[Callable[[], Any]], Any],
    copies: int = 1,
) -> Any:
    """The answer of `use(run)`, where `run()` calls the op once; None if the op raises for each of `fills`.

    Autocast and all tracing modes are off. A random op draws from a generator of its own, or else the state of the default
    one is restored afterwards. The grad mode is on as in a step (a few kernels keep a buffer only then), and no operand
    requires a gradient.

    Args:
        node: the op.
        kind: the kind of device to run on, "cpu" or "cuda".
        fills: how to fill the operands; the first with which the op runs is used.
        use: called with `run`; measures it.
        copies: the number of sets of operands, which `run()` takes in turn. With 2 or more, the last result of each set is
            kept, so that with enough sets, operands and results are no longer in the caches when their turn comes.
    """
    op: Any = node.target
    random_state = contextlib.nullcontext()
    if is_random(node):
        own = drawing_from(op, torch.Generator(kind))
        op, random_state = (op, _restored_random_state(kind)) if own is None else (own, random_state)
    with _torch.no_modes(), torch.enable_grad(), _torch.disable_autocast(), random_state:
        for fill in fills:
            try:
                first = synthetic_arguments(node, kind, fill)
                return use(_in_turn(op, [first, *(_copied(first) for _ in range(copies - 1))]))
            except (RuntimeError, ValueError, NotImplementedError, IndexError, TypeError):
                continue  # the op refuses these values (a singular matrix), or this build of torch has no kernel for it
    return None


def _in_turn(target: Any, operands: list[Any]) -> Callable[[], Any]:
    """A function that calls `target` with the next (args, kwargs) of `operands`, round and round."""
    if len(operands) == 1:
        args, kwargs = operands[0]
        return lambda: target(*args, **kwargs)
    results: list[Any] = [None] * len(operands)
    turns = itertools.cycle(range(len(operands)))

    def run() -> Any:
        i = next(turns)
        args, kwargs = operands[i]
        results[i] = target(*args, **kwargs)
        return results[i]

    return run


def _copied(tree: Any) -> Any:
    """The tree with a copy of each distinct tensor; a tensor that occurs twice has one copy."""
    copies: dict[int, torch.Tensor] = {}

    def copy(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in copies:
            flat = t.as_strided((_extent_bytes(t) // t.element_size(),), (1,)).clone()
            copies[id(t)] = flat.as_strided(t.shape, t.stride())
        return copies[id(t)]

    return _torch.pytree.tree_map_only(torch.Tensor, copy, tree)


@contextlib.contextmanager
def _restored_random_state(kind: str) -> Iterator[None]:
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if kind == "cuda" else []):
        yield


def leaves(tree: Any) -> list[Any]:
    """The leaves of a tree of lists, tuples and dicts."""
    return _torch.pytree.tree_leaves(tree)


# --- synthetic tensors -----------------------------------------------------------------------------------------------


def synthetic_arguments(node: fx.Node, kind: str, fill: Fill) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The node's (args, kwargs) with real tensors of the same shapes, strides and dtypes in place of the fake ones."""
    tensors: dict[int, torch.Tensor] = {}
    bounds, costliest = _index_bounds(node), _costliest_values(node)

    def real(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device(kind)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in tensors:
            device = "cpu" if leaf.device.type == "cpu" and leaf.dim() == 0 else kind
            tensors[id(leaf)] = fill(leaf, device, bounds.get(id(leaf), 1))
            if id(leaf) in costliest:
                tensors[id(leaf)].fill_(costliest[id(leaf)])
        return tensors[id(leaf)]

    return _torch.pytree.tree_map(real, fake_arguments(node))


def zeros(like: torch.Tensor, device: str, _bound: int) -> torch.Tensor:
    """A `Fill` with zeros, which are valid for every index, label and mask."""
    flat = torch.zeros(_extent_bytes(like) // like.element_size(), dtype=like.dtype, device=device)
    return flat.as_strided(like.shape, like.stride())


def well_conditioned(like: torch.Tensor, device: str, bound: int) -> torch.Tensor:
    """A `Fill` with identity matrices, for linear algebra that refuses zeros; other tensors are zeros."""
    t = zeros(like, device, bound)
    if t.dim() >= 2 and t.shape[-1] == t.shape[-2] and t.dtype.is_floating_point:
        t.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    return t


def lively(like: torch.Tensor, device: str, bound: int) -> torch.Tensor:
    """A `Fill` with values that take an op's usual time.

    Numbers are in 0.5 .. 1.5 (no root, logarithm or quotient of them is a special case or denormal), a mask's are random,
    and indices are spread over all values below `bound`.
    """
    t = zeros(like, device, bound)
    flat = t.as_strided((_extent_bytes(like) // like.element_size(),), (1,))
    seeded = torch.Generator(device=flat.device).manual_seed(0)
    if like.dtype.is_complex:
        torch.view_as_real(flat).uniform_(0.5, 1.5, generator=seeded)
    elif like.dtype.is_floating_point and like.dtype.itemsize == 1:  # no generator writes float8
        flat.copy_(torch.empty(flat.shape, device=device).uniform_(0.5, 1.5, generator=seeded))
    elif like.dtype.is_floating_point:
        flat.uniform_(0.5, 1.5, generator=seeded)
    elif like.dtype == torch.bool:
        flat.random_(0, 2, generator=seeded)
    elif bound > 1:
        flat.random_(0, bound, generator=seeded)
    return t


def _extent_bytes(t: torch.Tensor) -> int:
    """Bytes from the first to the last element of the tensor."""
    if t.numel() == 0:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * t.element_size()


def _index_bounds(node: fx.Node) -> dict[int, int]:
    """id of each argument that holds indices → the number of values that an index may take."""
    packet = getattr(node.target, "overloadpacket", None)
    rule = _INDEXING.get(packet)
    if rule is None:
        return {}
    named = named_arguments(node)
    return {id(t): n for t, n in rule(named) if isinstance(t, torch.Tensor) and not t.dtype.is_floating_point}


def _costliest_values(node: fx.Node) -> dict[int, float]:
    """id of an argument → the value that makes the op take the most memory if all elements of the argument have it."""
    rule = _COSTLIEST_VALUES.get(getattr(node.target, "overloadpacket", None))
    if rule is None:
        return {}
    return {id(t): value for t, value in rule(named_arguments(node)) if isinstance(t, torch.Tensor)}


def _one_group(named: dict[str, Any]) -> list[tuple[Any, float]]:
    """Everything belongs to the first group: on a CPU, each group's part is cast or copied."""
    left, right = named["self"], named["mat2"]
    size = left.shape[0] if right.dim() == 3 else right.shape[-1] if left.dim() == 3 else left.shape[-1]
    return [(named["offs"], size)]


_COSTLIEST_VALUES: dict[Any, Callable[[dict[str, Any]], list[tuple[Any, float]]]] = {
    aten._grouped_mm: _one_group,
    aten._embedding_bag_backward: lambda named: [(named["bag_size"], 1)],  # empty bags are left out
    # The polynomial is of the highest degree, and keeps the most powers, from a norm of 2 on.
    aten.linalg_matrix_exp: lambda named: [(named["self"], 32 / max(1, named["self"].shape[-1]))],
}

Bounds = list[tuple[Any, int]]  # (argument that holds indices, number of values that an index may take)


def _along_dim(named: dict[str, Any]) -> Bounds:
    return [(named["index"], named["self"].shape[named["dim"]] if named["self"].dim() else 1)]


def _advanced(named: dict[str, Any]) -> Bounds:
    return list(zip(named["indices"], named["self"].shape, strict=False))


def _classes(named: dict[str, Any]) -> Bounds:
    scores = named["self"]
    return [(named["target"], scores.shape[1 if scores.dim() > 1 else 0])]


def _plane(axes: int) -> Callable[[dict[str, Any]], Bounds]:
    return lambda named: [(named["indices"], math.prod(named["self"].shape[-axes:]))]


def _bags(named: dict[str, Any]) -> Bounds:
    return [(named["indices"], named["weight"].shape[0] if "weight" in named else named["num_weights"])]


_INDEXING: dict[Any, Callable[[dict[str, Any]], Bounds]] = {
    aten._embedding_bag: _bags,
    aten._embedding_bag_backward: _bags,
    aten.embedding: lambda named: [(named["indices"], named["weight"].shape[0])],
    aten.embedding_dense_backward: lambda named: [(named["indices"], named["num_weights"])],
    aten.index: _advanced,
    aten.index_put: _advanced,
    aten.index_put_: _advanced,
    aten._unsafe_index: _advanced,
    aten._unsafe_index_put: _advanced,
    aten.nll_loss_forward: _classes,
    aten.nll_loss_backward: _classes,
    aten.nll_loss2d_forward: _classes,
    aten.nll_loss2d_backward: _classes,
    aten.max_pool2d_with_indices_backward: _plane(2),
    aten.max_pool3d_with_indices_backward: _plane(3),
    **dict.fromkeys(
        (aten.gather, aten.scatter, aten.scatter_add, aten.scatter_reduce, aten.index_select, aten.index_add),
        _along_dim,
    ),
    **dict.fromkeys((aten.index_copy, aten.index_fill), _along_dim),
}
