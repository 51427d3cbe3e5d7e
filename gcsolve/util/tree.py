"""Any nested input or output as a flat list of tensors plus a template that rebuilds the original types.

torch's pytrees know only registered containers; models also return dataclasses, ModelOutput, caches and other plain
objects. Here a template is a tuple of small frozen records; rebuilding makes new containers of the very same types.
What a model changes in its arguments (a cache, a dict of results) is written back into the caller's own containers.
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
class Source:
    """The `index`-th random generator (torch.Generator): looked up anew in every call, as tensors are."""

    index: int
    path: str
    generator: torch.Generator


@dataclass(frozen=True)
class Argument:
    """The very container that the caller passed, `keys` below (args, kwargs)."""

    keys: Keys


@dataclass(frozen=True)
class Container:
    """A container of `kind` made like `like`: `keys` name the children (positions, mapping keys or attributes)."""

    kind: str
    like: Any
    keys: tuple[Any, ...]
    children: tuple[Template, ...]


Keys = tuple[tuple[str, Any], ...]  # (kind of the container, key in it), from the outside in
Template = Leaf | Static | Source | Argument | Container


def flatten(tree: Any, root: str) -> tuple[list[torch.Tensor], Template]:
    """Tensors of `tree` in order (one entry a distinct tensor object), and its template.

    Args:
        root: name of the whole in error texts, for example "example_input".

    Raises:
        ArgumentError: an object that holds tensors contains itself.
    """
    pass_ = Flattening()
    template = pass_.template(tree, root)
    return pass_.tensors, template


class Flattening:
    """One pass over one or more trees: `tensors` has one entry a distinct tensor object."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._seen: dict[int, int] = {}
        self._sources: dict[int, int] = {}

    def template(self, tree: Any, root: str, arguments: Mapping[int, Keys] | None = None) -> Template:
        """The template of one more tree.

        Args:
            arguments: id -> place of the caller's containers (`containers`), which stand for themselves where they are met.
        """
        return self._template(tree, root, arguments or {}, ())

    def _template(self, tree: Any, path: str, arguments: Mapping[int, Keys], above: tuple[int, ...]) -> Template:
        if isinstance(tree, torch.Tensor):
            if id(tree) not in self._seen:
                self._seen[id(tree)] = len(self.tensors)
                self.tensors.append(tree)
            return Leaf(self._seen[id(tree)], path)
        if isinstance(tree, torch.Generator):
            return Source(self._sources.setdefault(id(tree), len(self._sources)), path, tree)
        if isinstance(tree, _ATOMS):
            return Static(tree)
        if id(tree) in above:
            raise ArgumentError(f"{path} contains itself; gcsolve needs inputs and outputs without cycles")
        if id(tree) in arguments:
            return Argument(arguments[id(tree)])
        kind, items = _children(tree)
        if not items:
            return Static(tree)
        above = (*above, id(tree))
        children = tuple(self._template(child, _join(path, kind, key), arguments, above) for key, child in items)
        if all(isinstance(child, Static) for child in children):
            return Static(tree)
        return Container(kind, tree, tuple(key for key, _ in items), children)


def containers(tree: Any) -> dict[int, Keys]:
    """id -> place of every container in `tree` that can be changed in place."""
    found: dict[int, Keys] = {}

    def walk(tree: Any, keys: Keys) -> None:
        if isinstance(tree, (torch.Tensor, torch.Generator, *_ATOMS)) or id(tree) in found:
            return
        kind, items = _children(tree)
        if keys and not isinstance(tree, tuple) and (items or _is_open(tree)):
            found[id(tree)] = keys
        for key, child in items:
            walk(child, (*keys, (kind, key)))

    walk(tree, ())
    return found


def _is_open(tree: Any) -> bool:
    """Whether things can be put into it: a list, a dict, a plain object."""
    return hasattr(tree, "clear") or (hasattr(tree, "__dict__") and not callable(tree))


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
    return "object", [*(vars(tree).items() if hasattr(tree, "__dict__") else ()), *slots_of(tree)]


def slots_of(value: Any) -> list[tuple[str, Any]]:
    """(name, content) of an object's `__slots__`; none of one that is compared by value (a path)."""
    if type(value).__hash__ is not object.__hash__:
        return []
    listed = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for names in listed for name in ((names,) if isinstance(names, str) else names)]
    return [(n, getattr(value, n)) for n in names if n not in ("__dict__", "__weakref__") and hasattr(value, n)]


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


def unflatten(template: Template, tensors: Sequence[Any], sources: Sequence[Any] = (), arguments: Any = None) -> Any:
    """The original structure around `tensors`.

    Args:
        sources: what stands for the generators; empty: they themselves.
        arguments: (args, kwargs) of the call, for a template that refers to them.
    """
    if isinstance(template, Leaf):
        return tensors[template.index]
    if isinstance(template, Static):
        return template.value
    if isinstance(template, Source):
        return sources[template.index] if sources else template.generator
    if isinstance(template, Argument):
        found = arguments
        for kind, key in template.keys:
            found = getattr(found, key) if kind in ("object", "dataclass") else found[key]
        return found
    children = [unflatten(child, tensors, sources, arguments) for child in template.children]
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


def static_key(template: Template, path: str = "") -> Any:
    """A hashable key: equal exactly when two inputs have the same structure and the same non-tensor values.

    Raises:
        ArgumentError: a value can be neither compared nor hashed (a numpy array); `path` is how the text calls the whole.
    """
    if isinstance(template, Leaf):
        return ("leaf", template.index)
    if isinstance(template, Source):
        return ("source", template.index, template.generator.device)
    if isinstance(template, Argument):
        return ("argument", template.keys)
    if isinstance(template, Static):
        return ("static", _value_key(template.value, path))
    kind = type(template.like) if not isinstance(template.like, type) else template.like
    children = zip(template.keys, template.children, strict=True)
    return (
        kind,
        tuple(map(str, template.keys)),
        tuple(static_key(child, _join(path, template.kind, key)) for key, child in children),
    )


def _value_key(value: Any, path: str) -> Any:
    kind, items = ("atom", []) if isinstance(value, _ATOMS) else _children(value)
    if items or kind in ("mapping", "sequence", "namedtuple", "dataclass"):  # an empty one too: it cannot be hashed
        return (type(value), tuple((str(key), _value_key(child, _join(path, kind, key))) for key, child in items))
    if isinstance(value, float):
        return (float, value.hex())
    if isinstance(value, (set, frozenset)):
        return (type(value), frozenset(_value_key(item, path) for item in value))
    try:
        hash(value)
    except TypeError as error:
        raise ArgumentError(
            f"{path or 'an argument'} is of type {type(value).__name__}, neither a tensor, a container nor hashable: gcsolve "
            "could not tell whether it changed between two calls. Pass it as a tensor (torch.as_tensor(...) for an array)"
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


def sources_of(template: Template) -> list[torch.Generator]:
    """The random generators of a template, by index."""
    if isinstance(template, Source):
        return [template.generator]
    if not isinstance(template, Container):
        return []
    found = [generator for child in template.children for generator in sources_of(child)]
    return list({id(generator): generator for generator in found}.values())


def merged(old: Any, new: Any) -> Any:
    """`old` with the content of `new`: containers of one type are changed in place and stay who they are."""
    if type(old) is not type(new) or old is new or isinstance(new, (torch.Tensor, torch.Generator, *_ATOMS)):
        return new
    kind, items = _children(new)
    held = dict(_children(old)[1])
    values = [(key, merged(held[key], child) if key in held else child) for key, child in items]
    if isinstance(old, tuple):
        return (
            old if all(held[key] is child for key, child in values if key in held) and len(held) == len(values) else new
        )
    if kind == "sequence":
        if hasattr(old, "clear") and hasattr(old, "extend"):
            old.clear()
            old.extend(child for _, child in values)
            return old
        return new
    if kind == "mapping":
        for key in held.keys() - dict(values).keys():
            del old[key]
        return _set_items(old, [key for key, _ in values], [child for _, child in values])
    for key in held.keys() - dict(values).keys():
        object.__delattr__(old, key)
    for key, child in values:
        if held.get(key) is not child or key not in held:
            object.__setattr__(old, key, child)
    return old


def with_own_statics(template: Template) -> Template:
    """The template with copies of what holds no tensor, so that what forward does to them while it is traced stays there."""
    if isinstance(template, Container):
        return dataclasses.replace(template, children=tuple(with_own_statics(child) for child in template.children))
    if not isinstance(template, Static) or isinstance(template.value, _ATOMS):
        return template
    if not (_children(template.value)[1] or _is_open(template.value)):
        return template
    try:
        return Static(copy.deepcopy(template.value))
    except Exception:  # what cannot be copied is handed on, as eager hands it on
        return template
