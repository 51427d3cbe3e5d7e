"""BatchNorm with momentum=None: its factor is 1 / (batches so far), a number read from a buffer in every step.

A trace has no number there. So the traced copy gets a made-up momentum of its own for each such layer, and the graph then
computes the factor from the layer's counter wherever that momentum stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from gcsolve._torch import OpOverload

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_FIRST = 0.7310585786300049  # no momentum that anyone sets
_STEP = 2.0**-30


def mark(model: nn.Module) -> dict[float, str]:
    """Give every cumulative BatchNorm of a copy to trace a momentum of its own: momentum -> name of its counter."""
    found: dict[float, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, _KINDS) and module.momentum is None and module.num_batches_tracked is not None:
            module.momentum = _FIRST + len(found) * _STEP
            found[module.momentum] = f"{path}.num_batches_tracked" if path else "num_batches_tracked"
    return found


def compute_factors(graph: fx.Graph, marked: Mapping[float, str], counters: Mapping[str, fx.Node]) -> None:
    """Put 1 / (batches so far) where a marked momentum stands.

    Args:
        counters: name -> the placeholder that is the counter's value before the step.
    """
    so_far = {name: node for name, node in counters.items() if name in marked.values()}
    for node in list(graph.nodes):
        for name, now in so_far.items():  # a layer that runs several times counts every time
            if node.target is torch.ops.aten.add.Tensor and node.args[0] is now:
                so_far[name] = node
        marks = [arg for arg in node.args if isinstance(arg, float) and arg in marked]
        if node.op == "call_function" and marks:
            with graph.inserting_before(node):
                batches = _call(graph, torch.ops.aten._to_copy.default, so_far[marked[marks[0]]], dtype=torch.float64)
                factor = _call(graph, torch.ops.aten.reciprocal.default, batches)
            node.args = tuple(factor if arg == marks[0] else arg for arg in node.args)


def _call(graph: fx.Graph, op: OpOverload, source: fx.Node, **kwargs: Any) -> fx.Node:
    made = graph.call_function(op, (source,), kwargs)
    value = source.meta["val"]
    with value.fake_mode:
        made.meta["val"] = op(value, **kwargs)
    return made
