"""What tests of costs share: traced ops, and two devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from gcsolve.cost.devices import get_device

CPU = get_device("cpu")
H100 = get_device("h100-sxm")


def traced(fn: Callable[..., Any], *inputs: torch.Tensor) -> list[fx.Node]:
    graph = make_fx(fn, tracing_mode="fake")(*inputs).graph
    return [n for n in graph.nodes if n.op == "call_function"]


def the(nodes: list[fx.Node], target: Any) -> fx.Node:
    found = [n for n in nodes if n.target is target]
    assert found, f"{target} is not among {[str(n.target) for n in nodes]}"
    return found[0]
