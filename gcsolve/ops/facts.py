"""Which ops of a traced graph draw random numbers, and from which generator."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and not _switched_off(node)


def generator_of(node: fx.Node) -> Any:
    """The generator (a node of the graph) that a random op is given; None: it draws from the default one."""
    return _argument(node, "generator")


def _switched_off(node: fx.Node) -> bool:
    """A random op with probability 0 (attention without dropout) draws nothing."""
    p = _argument(node, "dropout_p")
    return isinstance(p, (int, float)) and p == 0


def _argument(node: fx.Node, name: str) -> Any:
    """What an op is called with for an argument, its default included; None for one that it does not have."""
    schema = getattr(node.target, "_schema", None)
    for i, argument in enumerate(schema.arguments if schema else ()):
        if argument.name == name:
            return node.args[i] if i < len(node.args) else node.kwargs.get(name, argument.default_value)
    return None
