"""Nested inputs and outputs as a flat list of tensors and a template that rebuilds the original types.

torch's pytrees know only registered containers; models also return dataclasses, ModelOutput, caches and other plain
objects. A template here is a tree of frozen records: leaves (`Leaf`, `Static`, `GeneratorLeaf`, `Argument`) and `Container`s.
Rebuilding makes new containers of the same types. What a model changes in its arguments (a cache, a dict of results) is
written back into the caller's own containers by `merged`.
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
    """The tensor at `index` of the flat list; `path`: the expression by which a user would reach it ("x['ids'][0]")."""

    index: int
    path: str


@dataclass(frozen=True)
class Static:
    """A value without tensors, which the rebuilt structure holds as it is."""

    value: Any


@dataclass(frozen=True)
class GeneratorLeaf:
    """The random generator (torch.Generator) number `index`, which every call passes anew, like its tensors."""

    index: int
    path: str
    generator: torch.Generator


@dataclass(frozen=True)
class Argument:
    """A container that the caller passed: the same object, reached from (args, kwargs) by `keys`."""

    keys: Keys


@dataclass(frozen=True)
class Container:
    """A container to rebuild.

    `kind`: "mapping", "sequence", "namedtuple", "dataclass" or "object". `like`: the original container, or (`skeleton`) an
    empty copy of it or its type. `keys`: the children's positions, mapping keys or attribute names.
    """

    kind: str
    like: Any
    keys: tuple[Any, ...]
    children: tuple[Template, ...]


Keys = tuple[tuple[str, Any], ...]  # (kind of container, key in it) of each level, the outermost first
Template = Leaf | Static | GeneratorLeaf | Argument | Container


def flatten(tree: Any, root: str) -> tuple[list[torch.Tensor], Template]:
    """The distinct tensor objects of `tree`, in order of first occurrence, and its template.

    Args:
        root: what error texts call the whole tree, for example "example_input".

    Raises:
        ArgumentError: a container contains itself.
    """
    flattening = Flattening()
    template = flattening.template(tree, root)
    return flattening.tensors, template


class Flattening:
    """Flattens one or more trees into one list, `tensors`, with one entry for each distinct tensor object."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._tensor_index: dict[int, int] = {}
        self._generator_index: dict[int, int] = {}

    def template(self, tree: Any, root: str, arguments: Mapping[int, Keys] | None = None) -> Template:
        """Add the tensors of `tree` to the list; returns the tree's template.

        Args:
            root: what error texts call this tree.
            arguments: id -> keys of the caller's containers, as `containers` returns them: where the tree holds one of
                these objects, the template has an `Argument`.
        """
        return self._template(tree, root, arguments or {}, ())

    def _template(self, tree: Any, path: str, arguments: Mapping[int, Keys], ancestors: tuple[int, ...]) -> Template:
        """`ancestors`: ids of the containers around `tree`."""
        if isinstance(tree, torch.Tensor):
            if id(tree) not in self._tensor_index:
                self._tensor_index[id(tree)] = len(self.tensors)
                self.tensors.append(tree)
            return Leaf(self._tensor_index[id(tree)], path)
        if isinstance(tree, torch.Generator):
            return GeneratorLeaf(self._generator_index.setdefault(id(tree), len(self._generator_index)), path, tree)
        if isinstance(tree, _ATOMS):
            return Static(tree)
        if id(tree) in ancestors:
            raise ArgumentError(f"{path} contains itself; gcsolve needs inputs and outputs without cycles")
        if id(tree) in arguments:
            return Argument(arguments[id(tree)])
        kind, items = _children(tree)
        if not items:
            return Static(tree)
        ancestors = (*ancestors, id(tree))
        children = tuple(self._template(child, _join(path, kind, key), arguments, ancestors) for key, child in items)
        if all(isinstance(child, Static) for child in children):
            return Static(tree)
        return Container(kind, tree, tuple(key for key, _ in items), children)


def containers(tree: Any) -> dict[int, Keys]:
    """id -> keys (from `tree` to it) of every container inside `tree` that can be changed in place."""
    keys_of: dict[int, Keys] = {}

    def walk(tree: Any, keys: Keys) -> None:
        if isinstance(tree, (torch.Tensor, torch.Generator, *_ATOMS)) or id(tree) in keys_of:
            return
        kind, items = _children(tree)
        if keys and not isinstance(tree, tuple) and (items or _is_open(tree)):
            keys_of[id(tree)] = keys
        for key, child in items:
            walk(child, (*keys, (kind, key)))

    walk(tree, ())
    return keys_of


def _is_open(tree: Any) -> bool:
    """Whether items or attributes can be added to the container: a list, a dict, a plain object."""
    return hasattr(tree, "clear") or (hasattr(tree, "__dict__") and not callable(tree))


def _join(path: str, kind: str, key: Any) -> str:
    """The path of a container's child."""
    return f"{path}.{key}" if kind in ("object", "dataclass") else f"{path}[{key!r}]"


def _children(tree: Any) -> tuple[str, list[tuple[Any, Any]]]:
    """The kind of container that `tree` is, and its (key, child) pairs; modules and callables have no children."""
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
    """(name, value) of an object's filled `__slots__`; none if its type has its own hash and is compared by value (a path)."""
    if type(value).__hash__ is not object.__hash__:
        return []
    declared = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for slots in declared for name in ((slots,) if isinstance(slots, str) else slots)]
    return [(n, getattr(value, n)) for n in names if n not in ("__dict__", "__weakref__") and hasattr(value, n)]


def skeleton(template: Template) -> Template:
    """The template without references to the flattened objects: each container's `like` becomes an empty copy, or its type."""
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
    """The structure of `template`, rebuilt with `tensors` at its leaves.

    Args:
        tensors: one for each index of the flat list.
        sources: replacements of the generators, by index; empty: the template's own generators.
        arguments: (args, kwargs) of the call, if the template has an `Argument`.
    """
    if isinstance(template, Leaf):
        return tensors[template.index]
    if isinstance(template, Static):
        return template.value
    if isinstance(template, GeneratorLeaf):
        return sources[template.index] if sources else template.generator
    if isinstance(template, Argument):
        node = arguments
        for kind, key in template.keys:
            node = getattr(node, key) if kind in ("object", "dataclass") else node[key]
        return node
    children = [unflatten(child, tensors, sources, arguments) for child in template.children]
    like = template.like
    if template.kind == "sequence":
        kind = like if isinstance(like, type) else type(like)
        return kind(children) if kind is not torch.Size else tuple(children)
    if template.kind == "namedtuple":
        return (like if isinstance(like, type) else type(like))(*children)
    rebuilt = copy.copy(like)
    if template.kind == "mapping":
        return _set_items(rebuilt, template.keys, children)
    for key, child in zip(template.keys, children, strict=True):
        object.__setattr__(rebuilt, key, child)
    return rebuilt


def _set_items(mapping: Any, keys: Sequence[Any], children: Sequence[Any]) -> Any:
    """`mapping` with these items set; a new mapping of its type if it refuses assignment."""
    try:
        for key, child in zip(keys, children, strict=True):
            mapping[key] = child
    except (TypeError, AttributeError):
        return type(mapping)(zip(keys, children, strict=True))
    return mapping


def static_key(template: Template, path: str = "") -> Any:
    """A hashable key, equal for two inputs if and only if their structures and their values without tensors are equal.

    Args:
        path: what error texts call the whole tree.

    Raises:
        ArgumentError: a value can be neither compared nor hashed (a numpy array).
    """
    if isinstance(template, Leaf):
        return ("leaf", template.index)
    if isinstance(template, GeneratorLeaf):
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
    """`static_key` of one value without tensors; floats are compared bit by bit."""
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
    """index -> path of the first occurrence of each tensor."""
    paths: dict[int, str] = {}

    def walk(node: Template) -> None:
        if isinstance(node, Leaf):
            paths.setdefault(node.index, node.path)
        elif isinstance(node, Container):
            for child in node.children:
                walk(child)

    walk(template)
    return paths


def sources_of(template: Template) -> list[torch.Generator]:
    """The distinct random generators of a template, in order of their indices."""
    if isinstance(template, GeneratorLeaf):
        return [template.generator]
    if not isinstance(template, Container):
        return []
    generators = [generator for child in template.children for generator in sources_of(child)]
    return list({id(generator): generator for generator in generators}.values())


def merged(old: Any, new: Any) -> Any:
    """`old` with the content of `new`: containers of the same type are changed in place and keep their identity.

    Where the types differ, or a container cannot be changed, the answer is `new`.
    """
    if type(old) is not type(new) or old is new or isinstance(new, (torch.Tensor, torch.Generator, *_ATOMS)):
        return new
    kind, items = _children(new)
    old_children = dict(_children(old)[1])
    values = [(key, merged(old_children[key], child) if key in old_children else child) for key, child in items]
    if isinstance(old, tuple):
        return (
            old
            if all(old_children[key] is child for key, child in values if key in old_children)
            and len(old_children) == len(values)
            else new
        )
    if kind == "sequence":
        if hasattr(old, "clear") and hasattr(old, "extend"):
            old.clear()
            old.extend(child for _, child in values)
            return old
        return new
    if kind == "mapping":
        for key in old_children.keys() - dict(values).keys():
            del old[key]
        return _set_items(old, [key for key, _ in values], [child for _, child in values])
    for key in old_children.keys() - dict(values).keys():
        object.__delattr__(old, key)
    for key, child in values:
        if old_children.get(key) is not child or key not in old_children:
            object.__setattr__(old, key, child)
    return old


def with_own_statics(template: Template) -> Template:
    """The template with copies of its mutable values without tensors, so that tracing forward does not change the caller's."""
    if isinstance(template, Container):
        return dataclasses.replace(template, children=tuple(with_own_statics(child) for child in template.children))
    if not isinstance(template, Static) or isinstance(template.value, _ATOMS):
        return template
    if not (_children(template.value)[1] or _is_open(template.value)):
        return template
    try:
        return Static(copy.deepcopy(template.value))
    except Exception:  # eager mode passes the object itself; so does the trace if it cannot be copied
        return template
