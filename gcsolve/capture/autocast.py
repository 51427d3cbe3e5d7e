"""Where autocast acts otherwise in eager than in a trace.

In eager, autocast casts a weight once for all ops of a region that use it, and the gradients of the weight are summed in the
lower precision. A trace casts it anew for every op, and would sum them in the weight's own precision. So, in the exported
graph, a weight that autocast casts more than once is cast by one op, whose result all those ops read. An input that needs a
gradient and is no op's result is treated as a weight.

If backward is called under autocast, it acts within backward formulas too; whether it will be is part of a plan.
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
    """Share the casts of weights in an exported module that runs under autocast, or has regions that do.

    Args:
        leaves: index -> the inputs that autocast treats as weights, since they need a gradient and are no op's result.

    Returns:
        id of each weight that autocast casts, and keeps cast as long as its block lasts -> dtype that it is cast to.
    """
    cast_dtypes: dict[int, torch.dtype] = {}
    inputs = module.graph.find_nodes(op="placeholder")
    weights = {inputs[index]: leaf for index, leaf in leaves.items()} | {
        node: parameter
        for node in module.graph.find_nodes(op="get_attr")
        if isinstance(parameter := _attribute(module, str(node.target)), nn.Parameter)
    }
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind) and torch.is_autocast_cache_enabled():
            cast_dtypes |= _share(module.graph, weights, kind, torch.get_autocast_dtype(kind))
    for node in list(module.graph.nodes):
        if is_autocast_region(node.target):
            kind, dtype, enabled, cached, inner, *arguments = node.args
            region = _attribute(module, str(inner.target))
            placeholders = region.graph.find_nodes(op="placeholder")
            pairs = zip(placeholders, arguments, strict=True)
            weights_inside = {placeholder: weights[argument] for placeholder, argument in pairs if argument in weights}
            if enabled and cached:
                lower = dtype or torch.get_autocast_dtype(kind)
                cast_dtypes |= _share(region.graph, weights_inside, str(kind), lower)
            region.recompile()
    module.recompile()
    return cast_dtypes


def is_weight(tensor: torch.Tensor) -> bool:
    """Whether autocast keeps its cast of the tensor until the end of its block, as that of a weight."""
    return tensor.requires_grad and tensor.is_leaf and tensor._base is None


def _attribute(module: nn.Module, name: str) -> Any:
    path, _, last = name.rpartition(".")
    return getattr(module.get_submodule(path), last)


def _share(
    graph: fx.Graph, weights: Mapping[fx.Node, torch.Tensor], kind: str, dtype: torch.dtype
) -> dict[int, torch.dtype]:
    """The same for one graph under one autocast, which casts to `dtype` on devices of that kind.

    Args:
        weights: node -> the weight or input that it reads; a tied weight has several nodes.
    """
    node_of: dict[int, fx.Node] = {}
    for node, weight in weights.items():
        if id(weight) in node_of:
            node.replace_all_uses_with(node_of[id(weight)])
        elif weight.requires_grad and weight.dtype == torch.float32:
            node_of[id(weight)] = node
    casts: Counter[fx.Node] = Counter()
    users: dict[fx.Node, list[fx.Node]] = {}
    for user in graph.nodes:
        read = [node for node in user.all_input_nodes if node in node_of.values()]
        if read and user.op == "call_function":
            for node, count in _casts(user, read, kind, dtype).items():
                casts[node] += count
                users.setdefault(node, []).append(user)
    for node, count in casts.items():
        if count > 1:
            first, *_ = users[node]
            with graph.inserting_before(first):
                cast = graph.call_function(torch.ops.aten.to.dtype, (node, dtype))
            cast.meta = {key: first.meta[key] for key in ("nn_module_stack", "stack_trace") if key in first.meta}
            for user in users[node]:
                user.replace_input_with(node, cast)
    return {id(weights[node]): dtype for node in casts}


def _casts(user: fx.Node, read: Iterable[fx.Node], kind: str, dtype: torch.dtype) -> dict[fx.Node, int]:
    """How often autocast casts each weight in the call of that op: as often as in a run on fakes under autocast, unless the op
    casts it so often without autocast too.

    A recorded `autograd.Function` is given the weight itself, as in eager: its own backward reads what it saves.
    """
    if is_autocast_region(user.target) or user.target is torch.ops.gcsolve.function.default:
        return {}
    args, kwargs = fx.map_arg((user.args, user.kwargs), lambda n: n.meta.get("val"))
    fakes = {node: node.meta["val"] for node in read}
    mode = next(iter(fakes.values())).fake_mode
    under, without = Casts(dtype), Casts(dtype)
    for casts, enabled in ((under, True), (without, False)):
        autocast = torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False)
        mixed_dtypes = contextlib.suppress(RuntimeError)  # without autocast, the op may refuse its operands
        with mixed_dtypes, no_modes(), torch.no_grad(), mode, casts, autocast:
            user.target(*args, **kwargs)  # type: ignore[operator]
    return {node: under.of[id(t)] for node, t in fakes.items() if under.of[id(t)] > without.of[id(t)]}


def first_cast_in_backward(graph: fx.Graph, regions: Iterable[tuple[str, torch.dtype]]) -> fx.Node | None:
    """The first backward op of a joint graph that casts its operands under autocast; None: none does.

    Args:
        regions: (kind of device, dtype) of the autocast that is on.
    """
    return next((node for node in graph.nodes if is_of_backward(node) and _casts_operands(node, regions)), None)


def _casts_operands(node: fx.Node, regions: Iterable[tuple[str, torch.dtype]]) -> bool:
    """Whether the op runs otherwise under such autocast: not as this op alone, or not on these very operands."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    operands = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    if node.target in CAST_INSIDE:
        return True
    if node.op != "call_function" or not operands or not isinstance(operands[0], FakeTensor):
        return False
    with contextlib.ExitStack() as stack:
        ops = OpsSeen()
        for context in (no_modes(), torch.no_grad(), operands[0].fake_mode, ops):
            stack.enter_context(context)
        for kind, dtype in regions:
            stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
        node.target(*args, **kwargs)  # type: ignore[operator]
    return ops.calls != [(node.target, tuple(map(id, operands)))] and node.target is not operator.getitem
