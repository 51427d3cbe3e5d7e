"""Any nested input or output as a flat list of tensors plus a template that rebuilds the original types.

torch's pytrees know only registered containers; models also return dataclasses, ModelOutput, caches and other plain
objects. Here a template is a tuple of small frozen records; rebuilding makes new containers of the very same types.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gcsolve.errors import ArgumentError

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type, range, slice)


@dataclass(frozen=True)
class Leaf:
    """The `index`-th tensor of the flat list; `path` is how a user would reach it."""

    index: int
    path: str


@dataclass(frozen=True)
class Static:
    """Anything that holds no tensor: handed through as it is."""

    value: Any


@dataclass(frozen=True)
class Container:
    """A container of `kind` made like `like`: `keys` name the children (positions, mapping keys or attributes)."""

    kind: str
    like: Any
    keys: tuple[Any, ...]
    children: tuple[Template, ...]


Template = Leaf | Static | Container


def flatten(tree: Any, root: str) -> tuple[list[torch.Tensor], Template]:
    """Tensors of `tree` in order (one entry a distinct tensor object), and its template.

    Args:
        root: name of the whole in error texts, for example "example_input".

    Raises:
        ArgumentError: an object that holds tensors contains itself.
    """
    tensors: list[torch.Tensor] = []
    seen: dict[int, int] = {}
    return tensors, _flatten(tree, root, tensors, seen, ())


def _flatten(
    tree: Any, path: str, tensors: list[torch.Tensor], seen: dict[int, int], above: tuple[int, ...]
) -> Template:
    if isinstance(tree, torch.Tensor):
        if id(tree) not in seen:
            seen[id(tree)] = len(tensors)
            tensors.append(tree)
        return Leaf(seen[id(tree)], path)
    if isinstance(tree, _ATOMS):
        return Static(tree)
    if id(tree) in above:
        raise ArgumentError(f"{path} contains itself; gcsolve needs inputs and outputs without cycles")
    kind, items = _children(tree)
    if not items:
        return Static(tree)
    above = (*above, id(tree))
    children = tuple(_flatten(child, _join(path, kind, key), tensors, seen, above) for key, child in items)
    if all(isinstance(child, Static) for child in children):
        return Static(tree)
    return Container(kind, tree, tuple(key for key, _ in items), children)


def _join(path: str, kind: str, key: Any) -> str:
    return f"{path}.{key}" if kind in ("object", "dataclass") else f"{path}[{key!r}]"


def _children(tree: Any) -> tuple[str, list[tuple[Any, Any]]]:
    if isinstance(tree, Mapping):
        return "mapping", list(tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return "namedtuple", list(enumerate(tree))
    if isinstance(tree, Sequence) and not isinstance(tree, (str, bytes, range)):
        return "sequence", list(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return "dataclass", [(f.name, getattr(tree, f.name)) for f in dataclasses.fields(tree) if hasattr(tree, f.name)]
    if isinstance(tree, torch.nn.Module) or callable(tree):
        return "object", []
    return "object", list(vars(tree).items()) if hasattr(tree, "__dict__") else []


def skeleton(template: Template) -> Template:
    """The template without references to the objects it was taken from: containers become empty copies of their type."""
    if not isinstance(template, Container):
        return template
    children = tuple(skeleton(child) for child in template.children)
    if template.kind in ("sequence", "namedtuple"):
        return dataclasses.replace(template, like=type(template.like), children=children)
    like = copy.copy(template.like)
    if template.kind == "mapping":
        if isinstance(like, dict) or hasattr(like, "clear"):
            _set_items(like, template.keys, [None] * len(children))
    else:
        for key in template.keys:
            object.__setattr__(like, key, None)
    return dataclasses.replace(template, like=like, children=children)


def unflatten(template: Template, tensors: Sequence[Any]) -> Any:
    """The original structure around `tensors`."""
    if isinstance(template, Leaf):
        return tensors[template.index]
    if isinstance(template, Static):
        return template.value
    children = [unflatten(child, tensors) for child in template.children]
    like = template.like
    if template.kind == "sequence":
        kind = like if isinstance(like, type) else type(like)
        return kind(children) if kind is not torch.Size else tuple(children)
    if template.kind == "namedtuple":
        return (like if isinstance(like, type) else type(like))(*children)
    made = copy.copy(like)
    if template.kind == "mapping":
        return _set_items(made, template.keys, children)
    for key, child in zip(template.keys, children, strict=True):
        object.__setattr__(made, key, child)
    return made


def _set_items(mapping: Any, keys: Sequence[Any], children: Sequence[Any]) -> Any:
    """`mapping` with its values replaced; a type that only its constructor can fill is made anew."""
    try:
        for key, child in zip(keys, children, strict=True):
            mapping[key] = child
    except (TypeError, AttributeError):
        return type(mapping)(zip(keys, children, strict=True))
    return mapping


def static_key(template: Template) -> Any:
    """A hashable key: equal exactly when two inputs have the same structure and the same non-tensor values."""
    if isinstance(template, Leaf):
        return ("leaf", template.index)
    if isinstance(template, Static):
        return ("static", _value_key(template.value))
    kind = type(template.like) if not isinstance(template.like, type) else template.like
    return (kind, tuple(map(str, template.keys)), tuple(static_key(child) for child in template.children))


def _value_key(value: Any) -> Any:
    kind, items = ("atom", []) if isinstance(value, _ATOMS) else _children(value)
    if items or kind in ("mapping", "sequence", "namedtuple", "dataclass"):  # an empty one too: it cannot be hashed
        return (type(value), tuple((str(key), _value_key(child)) for key, child in items))
    if isinstance(value, float):
        return (float, value.hex())
    if isinstance(value, (set, frozenset)):
        return (type(value), frozenset(_value_key(item) for item in value))
    try:
        hash(value)
    except TypeError as error:
        raise ArgumentError(
            f"an argument of type {type(value).__name__} is neither a tensor, a container nor hashable: gcsolve could not "
            "tell whether it changed between two calls. Pass it as a tensor"
        ) from error
    return (type(value), value)


def leaf_paths(template: Template) -> dict[int, str]:
    """index -> path of each tensor, first occurrence."""
    found: dict[int, str] = {}

    def walk(t: Template) -> None:
        if isinstance(t, Leaf):
            found.setdefault(t.index, t.path)
        elif isinstance(t, Container):
            for child in t.children:
                walk(child)

    walk(template)
    return found
