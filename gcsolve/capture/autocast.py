"""Where autocast acts otherwise in eager than in a trace.

It casts a weight once, however many ops of the region use it, and its gradients are summed in the lower precision. A trace
casts it anew for every op, and would sum in the weight's own precision. So, in the exported graph, a weight that autocast
would cast more than once is cast by an op of its own, which all those ops read.

The same holds of an input that needs a gradient, when no op has made it.

And it acts within backward formulas when backward is called under it, which a plan has to know beforehand.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn

from gcsolve._torch import Casts, FakeTensor, OpsSeen, is_autocast_region, is_of_backward, no_modes, pytree
from gcsolve.capture.replacements.bilinear import CAST_INSIDE


def share_casts(module: fx.GraphModule, leaves: Mapping[int, torch.Tensor]) -> dict[int, torch.dtype]:
    """Rewrite an exported module that runs under autocast, or has regions that do.

    Args:
        leaves: those of its inputs that autocast treats as weights, since they need a gradient and no op made them.

    Returns:
        id of each weight that autocast casts, and keeps cast as long as its block lasts -> dtype that it is cast to.
    """
    kept_casts: dict[int, torch.dtype] = {}
    inputs = module.graph.find_nodes(op="placeholder")
    weights = {inputs[at]: leaf for at, leaf in leaves.items()} | {
        node: kept
        for node in module.graph.find_nodes(op="get_attr")
        if isinstance(kept := _attribute(module, str(node.target)), nn.Parameter)
    }
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind) and torch.is_autocast_cache_enabled():
            kept_casts |= _share(module.graph, weights, kind, torch.get_autocast_dtype(kind))
    for node in list(module.graph.nodes):
        if is_autocast_region(node.target):
            kind, dtype, enabled, cached, inner, *given = node.args
            region = _attribute(module, str(inner.target))
            read = region.graph.find_nodes(op="placeholder")
            inside = {there: weights[arg] for there, arg in zip(read, given, strict=True) if arg in weights}
            if enabled and cached:
                kept_casts |= _share(region.graph, inside, str(kind), dtype or torch.get_autocast_dtype(kind))
            region.recompile()
    module.recompile()
    return kept_casts


def is_weight(tensor: torch.Tensor) -> bool:
    """Whether autocast keeps its cast of the tensor for the block, as it does with a model's weights."""
    return tensor.requires_grad and tensor.is_leaf and tensor._base is None


def _attribute(module: nn.Module, name: str) -> Any:
    path, _, last = name.rpartition(".")
    return getattr(module.get_submodule(path), last)


def _share(
    graph: fx.Graph, weights: Mapping[fx.Node, torch.Tensor], kind: str, dtype: torch.dtype
) -> dict[int, torch.dtype]:
    same: dict[int, fx.Node] = {}  # a tied weight is read under several names
    for node, weight in weights.items():
        if id(weight) in same:
            node.replace_all_uses_with(same[id(weight)])
        elif weight.requires_grad and weight.dtype == torch.float32:
            same[id(weight)] = node
    casts: Counter[fx.Node] = Counter()
    users: dict[fx.Node, list[fx.Node]] = {}
    for user in graph.nodes:
        read = [node for node in user.all_input_nodes if node in same.values()]
        found = _casts(user, read, kind, dtype) if read and user.op == "call_function" else {}
        for node, count in found.items():
            casts[node] += count
            users.setdefault(node, []).append(user)
    for node, count in casts.items():
        if count > 1:
            with graph.inserting_before(users[node][0]):
                once = graph.call_function(torch.ops.aten.to.dtype, (node, dtype))
            once.meta = {
                key: users[node][0].meta[key]
                for key in ("nn_module_stack", "stack_trace")
                if key in users[node][0].meta
            }
            for user in users[node]:
                user.replace_input_with(node, once)
    return {id(weights[node]): dtype for node in casts}


def _casts(user: fx.Node, read: Iterable[fx.Node], kind: str, dtype: torch.dtype) -> dict[fx.Node, int]:
    """How often autocast casts each of the weights for that op, as runs on fakes show; not what the op casts anyway.

    A kept Function is given the weight itself, as in eager: what it saves of it, its own backward reads.
    """
    if is_autocast_region(user.target) or user.target is torch.ops.gcsolve.function.default:
        return {}
    args, kwargs = fx.map_arg((user.args, user.kwargs), lambda n: n.meta.get("val"))
    fakes = {node: node.meta["val"] for node in read}
    mode = next(iter(fakes.values())).fake_mode
    under, anyway = Casts(dtype), Casts(dtype)
    for seen, enabled in ((under, True), (anyway, False)):
        autocast = torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False)
        refused = contextlib.suppress(RuntimeError)  # without autocast, operands of two dtypes
        with refused, no_modes(), torch.no_grad(), mode, seen, autocast:
            user.target(*args, **kwargs)  # type: ignore[operator]
    return {node: under.of[id(t)] for node, t in fakes.items() if under.of[id(t)] > anyway.of[id(t)]}


def first_cast_in_backward(graph: fx.Graph, regions: Iterable[tuple[str, torch.dtype]]) -> fx.Node | None:
    """The first backward op of a joint graph that would not run as it is under such autocast; None: all would."""
    return next((node for node in graph.nodes if is_of_backward(node) and _is_cast(node, regions)), None)


def _is_cast(node: fx.Node, regions: Iterable[tuple[str, torch.dtype]]) -> bool:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    operands = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    if node.target in CAST_INSIDE:
        return True
    if node.op != "call_function" or not operands or not isinstance(operands[0], FakeTensor):
        return False
    with contextlib.ExitStack() as stack:
        seen = OpsSeen()
        for entered in (no_modes(), torch.no_grad(), operands[0].fake_mode, seen):
            stack.enter_context(entered)
        for kind, dtype in regions:
            stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
        node.target(*args, **kwargs)  # type: ignore[operator]
    return seen.found != [(node.target, tuple(map(id, operands)))] and node.target is not operator.getitem
