"""Facts about one op of a traced graph: its arguments by name, its signature, and whether it draws random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from gcsolve import _torch


def is_random(node: fx.Node) -> bool:
    """Whether the op draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and not _has_no_dropout(node)


def generator_of(node: fx.Node) -> Any:
    """The generator argument of a random op, a node of the graph; None: it draws from the default generator."""
    return _argument(node, "generator")


def _has_no_dropout(node: fx.Node) -> bool:
    """Whether the op's dropout probability is 0: attention without dropout draws nothing."""
    p = _argument(node, "dropout_p")
    return isinstance(p, (int, float)) and p == 0


def _argument(node: fx.Node, name: str) -> Any:
    """The value of the op's argument `name`, its default if the call does not pass it; None if the op has no such argument."""
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
    """Argument name in the op's schema → its value, with fake tensors in place of nodes; defaults included."""
    args, kwargs = fake_arguments(node)
    schema = getattr(node.target, "_schema", None)
    declared = schema.arguments if schema is not None else ()
    defaults = {a.name: a.default_value for a in declared}
    return {**defaults, **{a.name: value for a, value in zip(declared, args, strict=False)}, **kwargs}


def signature(node: fx.Node) -> str:
    """The op and its arguments as text, equal for two nodes whose runs cost the same.

    A tensor argument appears with its dtype, shape, stride and device type, and with which arguments are the same tensor;
    its content does not appear.
    """
    numbers: dict[int, int] = {}  # id of a tensor -> its number in the text

    def text(leaf: Any) -> str:
        if not isinstance(leaf, torch.Tensor):
            return repr(leaf)
        number = numbers.setdefault(id(leaf), len(numbers))  # a tensor that is passed twice is read once
        dtype = str(leaf.dtype).removeprefix("torch.")
        return f"%{number}:{dtype}{list(leaf.shape)}/{list(leaf.stride())}@{leaf.device.type}"

    args, kwargs = _torch.pytree.tree_map(lambda leaf: _Text(text(leaf)), fake_arguments(node))
    return f"{node.target}{args}{kwargs or ''}"


class _Text(str):
    """Text whose repr has no quotes."""

    __repr__ = str.__str__
