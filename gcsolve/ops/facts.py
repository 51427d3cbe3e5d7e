"""Facts about one op of a traced graph: its arguments by name, its signature, whether it draws random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from gcsolve import _torch


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


# --- arguments and signature ---


def fake_arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The node's args and kwargs with every fx node replaced by its `meta["val"]`."""
    return (
        fx.map_arg(node.args, lambda n: n.meta.get("val")),  # type: ignore[return-value]
        fx.map_arg(node.kwargs, lambda n: n.meta.get("val")),
    )


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Schema name → argument (fake tensors in place of nodes) of an op's call, defaults included."""
    args, kwargs = fake_arguments(node)
    schema = getattr(node.target, "_schema", None)
    declared = schema.arguments if schema is not None else ()
    defaults = {a.name: a.default_value for a in declared}
    return {**defaults, **{a.name: given for a, given in zip(declared, args, strict=False)}, **kwargs}


def signature(node: fx.Node) -> str:
    """The op and all that its run can depend on but the numbers in its tensors: equal for two nodes that run alike."""
    seen: dict[int, int] = {}

    def text(leaf: Any) -> str:
        if not isinstance(leaf, torch.Tensor):
            return repr(leaf)
        at = seen.setdefault(id(leaf), len(seen))  # the same tensor twice is read once
        dtype = str(leaf.dtype).removeprefix("torch.")
        return f"%{at}:{dtype}{list(leaf.shape)}/{list(leaf.stride())}@{leaf.device.type}"

    args, kwargs = _torch.pytree.tree_map(lambda leaf: _Text(text(leaf)), fake_arguments(node))
    return f"{node.target}{args}{kwargs or ''}"


class _Text(str):
    """Text that prints without quotes."""

    __repr__ = str.__str__
