"""Cumulative BatchNorm (momentum=None), whose momentum is 1 / (number of batches so far), read from a buffer in every step.

A trace cannot have a number that is read from a buffer. So the copy that is traced has an invented momentum of its own for
each such layer, and in the graph this number is replaced by an op that computes the momentum from the layer's counter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from gcsolve._torch import OpOverload

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_FIRST_MOMENTUM = 0.7310585786300049  # which nobody sets
_STEP = 2.0**-30


def mark(model: nn.Module) -> dict[float, str]:
    """Give every cumulative BatchNorm of the copy a momentum of its own.

    Returns:
        each such momentum -> name of the buffer that counts the layer's batches.
    """
    counters: dict[float, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, _KINDS) and module.momentum is None and module.num_batches_tracked is not None:
            module.momentum = _FIRST_MOMENTUM + len(counters) * _STEP
            counters[module.momentum] = f"{path}.num_batches_tracked" if path else "num_batches_tracked"
    return counters


def compute_momentum(graph: fx.Graph, counter_of: Mapping[float, str], buffers: Mapping[str, fx.Node]) -> None:
    """Replace each momentum that `mark` has set by 1 / (number of batches so far).

    Args:
        counter_of: as `mark` returns it.
        buffers: name of a buffer -> the placeholder that is its value before the step.
    """
    batches_so_far = {name: node for name, node in buffers.items() if name in counter_of.values()}
    for node in list(graph.nodes):
        for name, count in batches_so_far.items():
            if node.target is torch.ops.aten.add.Tensor and node.args[0] is count:
                batches_so_far[name] = node  # each time that the layer runs in the step, it counts one more
        invented = [arg for arg in node.args if isinstance(arg, float) and arg in counter_of]
        if node.op == "call_function" and invented:
            count = batches_so_far[counter_of[invented[0]]]
            with graph.inserting_before(node):
                batches = _call(graph, torch.ops.aten._to_copy.default, count, dtype=torch.float64)
                momentum = _call(graph, torch.ops.aten.reciprocal.default, batches)
            node.args = tuple(momentum if arg == invented[0] else arg for arg in node.args)


def _call(graph: fx.Graph, op: OpOverload, source: fx.Node, **kwargs: Any) -> fx.Node:
    node = graph.call_function(op, (source,), kwargs)
    value = source.meta["val"]
    with value.fake_mode:
        node.meta["val"] = op(value, **kwargs)
    return node
