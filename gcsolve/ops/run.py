"""Running one op of a traced graph alone, on the machine at hand, with made-up tensors in place of its arguments.

`workspace.py` does it for the bytes an op takes, `measured.py` for its seconds. Only ops that compute and nothing else
are run (a collective would wait for its peers), and none whose operands would take much of the free memory.
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
from gcsolve.ops.facts import fake_arguments, named_arguments

aten = torch.ops.aten

MAX_MEMORY_SHARE = 0.25  # of the free memory: an op whose operands and results take more is not run

_PURE_NAMESPACES = frozenset({"aten", "prims", "torchvision", "gcsolve"})

# Ops that read something a made-up tensor cannot stand for (a packed or library-made buffer): a kernel trusts it blindly
# and may end the process.
# oneDNN's recurrent layers keep numbers alone, so any buffer of the right size will do.
_OPAQUE = re.compile(r"(?<!mkldnn_)rnn|lstm|gru|miopen|sparse|quantiz|fbgemm|packed")

# oneDNN's LSTM layers keep a buffer for their backward and take about as much to work in, most of such a layer's memory,
# and no rule tells how much: one is run once though the model's weights are on meta, when it is small enough.
SIZED_BY_KERNELS = frozenset({aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default})

Fill = Callable[[torch.Tensor, str, int], torch.Tensor]  # (fake, device, values an index into something may take)


def may_run(node: fx.Node) -> bool:
    """Whether running the op alone has no effect but its result."""
    target = node.target
    if not isinstance(target, _torch.OpOverload) or target.namespace not in _PURE_NAMESPACES:
        return False
    return not _OPAQUE.search(str(target)) and not _lacks_its_buffer(node)


def _lacks_its_buffer(node: fx.Node) -> bool:
    """Whether a recurrent layer's backward would read a buffer of a size that is not known."""
    if node.target is not aten.mkldnn_rnn_layer_backward.default:
        return False
    return named_arguments(node)["workspace"].numel() == 0


def fits(node: fx.Node, free_bytes: int) -> bool:
    """Whether the op's operands and results are a small enough part of `free_bytes`; False while a size is unknown."""
    tensors = [t for t in leaves(fake_arguments(node)) if isinstance(t, torch.Tensor)]
    sizes = [s for t in tensors for s in (*t.shape, *t.stride())]
    if not all(isinstance(s, int) for s in sizes):
        return False
    needed_bytes = operand_bytes(node) + 2 * sum(fresh_output_bytes(node).values())
    return needed_bytes <= MAX_MEMORY_SHARE * free_bytes


def operand_bytes(node: fx.Node) -> int:
    """Bytes from the first to the last element of every tensor argument."""
    return sum(_extent_bytes(t) for t in leaves(fake_arguments(node)) if isinstance(t, torch.Tensor))


def fresh_output_bytes(node: fx.Node) -> dict[int, int]:
    """Storage → bytes of the outputs that are not views of inputs."""
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
    """`use(run)` of the first filling that the op accepts; None when it will not run on any.

    `run()` calls the op once. Autocast and any tracing mode are off, and the random state is as before after. The grad mode is
    on as in a step (a few kernels keep a buffer only then), and nothing requires a gradient.

    Args:
        kind: the kind of device to run on, "cpu" or "cuda".
        copies: so many sets of operands are used in turn, and of each the last result is kept: with enough of them,
            operands and results have left the caches when their turn comes. One: nothing is kept.
    """
    draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    kept = _random_state_kept(kind) if draws else contextlib.nullcontext()
    with _torch.no_modes(), torch.enable_grad(), _torch.disable_autocast(), kept:
        for fill in fills:
            try:
                first = made_up(node, kind, fill)
                return use(_in_turn(node.target, [first, *(_copied(first) for _ in range(copies - 1))]))
            except (RuntimeError, ValueError, NotImplementedError, IndexError, TypeError):
                continue  # values that this op refuses (a singular matrix), or a kernel that is not built here
    return None


def _in_turn(target: Any, operands: list[Any]) -> Callable[[], Any]:
    if len(operands) == 1:
        args, kwargs = operands[0]
        return lambda: target(*args, **kwargs)
    results: list[Any] = [None] * len(operands)
    turns = itertools.cycle(range(len(operands)))

    def run() -> Any:
        at = next(turns)
        args, kwargs = operands[at]
        results[at] = target(*args, **kwargs)
        return results[at]

    return run


def _copied(tree: Any) -> Any:
    """The same tensors elsewhere in memory; one that is there twice stays one."""
    made: dict[int, torch.Tensor] = {}

    def copy(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in made:
            flat = t.as_strided((_extent_bytes(t) // t.element_size(),), (1,)).clone()
            made[id(t)] = flat.as_strided(t.shape, t.stride())
        return made[id(t)]

    return _torch.pytree.tree_map_only(torch.Tensor, copy, tree)


@contextlib.contextmanager
def _random_state_kept(kind: str) -> Iterator[None]:
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if kind == "cuda" else []):
        yield


def leaves(tree: Any) -> list[Any]:
    return _torch.pytree.tree_leaves(tree)


# --- made-up tensors -------------------------------------------------------------------------------------------------


def made_up(node: fx.Node, kind: str, fill: Fill) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The node's arguments with real tensors of the same sizes, strides and dtypes in place of the fake ones."""
    made: dict[int, torch.Tensor] = {}
    bounds, demanding = _index_bounds(node), _demanding(node)

    def real(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device(kind)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in made:
            where = "cpu" if leaf.device.type == "cpu" and leaf.dim() == 0 else kind
            made[id(leaf)] = fill(leaf, where, bounds.get(id(leaf), 1))
            if id(leaf) in demanding:
                made[id(leaf)].fill_(demanding[id(leaf)])
        return made[id(leaf)]

    return _torch.pytree.tree_map(real, fake_arguments(node))


def zeros(like: torch.Tensor, device: str, _bound: int) -> torch.Tensor:
    """Valid for every index, label and mask."""
    flat = torch.zeros(_extent_bytes(like) // like.element_size(), dtype=like.dtype, device=device)
    return flat.as_strided(like.shape, like.stride())


def well_conditioned(like: torch.Tensor, device: str, bound: int) -> torch.Tensor:
    """Positive definite matrices, for the linear algebra that refuses zeros."""
    t = zeros(like, device, bound)
    if t.dim() >= 2 and t.shape[-1] == t.shape[-2] and t.dtype.is_floating_point:
        t.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    return t


def lively(like: torch.Tensor, device: str, bound: int) -> torch.Tensor:
    """Values that take their usual time: numbers in 0.5 .. 1.5 (no root, logarithm or quotient of them is special or
    tiny), coin tosses for masks, indices spread over all that they may name."""
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
    """Bytes from the first to the last element."""
    if t.numel() == 0:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * t.element_size()


def _index_bounds(node: fx.Node) -> dict[int, int]:
    """id of an argument that holds indices → how many values an index may take."""
    packet = getattr(node.target, "overloadpacket", None)
    rule = _INDEXING.get(packet)
    if rule is None:
        return {}
    named = named_arguments(node)
    return {id(t): n for t, n in rule(named) if isinstance(t, torch.Tensor) and not t.dtype.is_floating_point}


def _demanding(node: fx.Node) -> dict[int, float]:
    """id of an argument → the value, throughout, for which the op takes the most memory."""
    rule = _DEMANDING.get(getattr(node.target, "overloadpacket", None))
    if rule is None:
        return {}
    return {id(t): value for t, value in rule(named_arguments(node)) if isinstance(t, torch.Tensor)}


def _one_group(named: dict[str, Any]) -> list[tuple[Any, float]]:
    """All that is divided among the groups goes to the first: on a CPU, its part is cast or copied."""
    left, right = named["self"], named["mat2"]
    divided = left.shape[0] if right.dim() == 3 else right.shape[-1] if left.dim() == 3 else left.shape[-1]
    return [(named["offs"], divided)]


_DEMANDING: dict[Any, Callable[[dict[str, Any]], list[tuple[Any, float]]]] = {
    aten._grouped_mm: _one_group,
    aten._embedding_bag_backward: lambda named: [(named["bag_size"], 1)],  # empty bags are left out
    # The polynomial is of the highest degree, and keeps the most powers, from a norm of 2 on.
    aten.linalg_matrix_exp: lambda named: [(named["self"], 32 / max(1, named["self"].shape[-1]))],
}

Bounds = list[tuple[Any, int]]


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
