"""What a model does to autograd by hand: `torch.autograd.Function`s of its own, hooks on tensors, `.data`.

`torch.export` looks through a Function: it records the ops of its forward, so that the derivative of these ops would be
trained, and not the backward that its author wrote. So, while the model is exported, a call of a Function is recorded as a
single op; when forward and backward are then traced together, this op calls the Function itself. A hook would be lost in the
same way, and is refused.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.weak import WeakTensorKeyDictionary

from gcsolve._torch import pytree, storage_key
from gcsolve.capture.patches import During, patched
from gcsolve.errors import TraceError
from gcsolve.util.source import running_line

# --- calls of Functions ----------------------------------------------------------------------------------------------

_TENSOR = object()
"""In place of each tensor among the leaves of a tree."""


@dataclass(frozen=True)
class _Tree:
    """A tree without its tensors: its leaves, with `_TENSOR` for each tensor, and the pytree spec of their nesting."""

    leaves: tuple[Any, ...]
    spec: Any

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The tree with these tensors, in order."""
        rest = iter(tensors)
        return pytree.tree_unflatten([next(rest) if leaf is _TENSOR else leaf for leaf in self.leaves], self.spec)


def _split(tree: Any) -> tuple[list[torch.Tensor], _Tree]:
    """The tensors of a tree, and the tree without them."""
    leaves, spec = pytree.tree_flatten(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return tensors, _Tree(tuple(_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves), spec)


@dataclass(frozen=True)
class _FunctionCall:
    apply: Callable[..., Any]
    arguments: _Tree


class FunctionCalls:
    """The calls of Functions in one trace, by the thread that traces.

    As a context manager it goes around both stages, the export and the joint trace: in it, the op `gcsolve::function` finds
    the calls. `recording()` goes around the export alone.
    """

    def __init__(self) -> None:
        self._calls: list[_FunctionCall] = []
        self._result: _Tree | None = None  # of the call that ran last
        self._records = False  # off inside a Function: what it calls belongs to it

    def __enter__(self) -> FunctionCalls:
        self._outer = getattr(_thread, "calls", None)
        _thread.calls = self
        return self

    def __exit__(self, *_: object) -> None:
        _thread.calls = self._outer

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """In this block, a call of a Function is recorded, and made through the op."""
        with patched(During.RECORDING, functions=self):
            self._records = True
            try:
                yield
            finally:
                self._records = False

    def recording_apply(self, original: Any) -> Any:
        """What replaces `Function.apply`, a class method, in `recording()`."""

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            own = original.__get__(None, cls)
            if not self._records or kwargs:
                return own(*args, **kwargs)
            return _checkpoint_body(*args) if cls is CheckpointFunction else self._recorded(own, args)

        return classmethod(apply)

    def _recorded(self, apply: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        tensors, arguments = _split(args)
        if not tensors:
            return apply(*args)
        self._calls.append(_FunctionCall(apply, arguments))
        results = torch.ops.gcsolve.function.default(tensors, len(self._calls) - 1)
        assert self._result is not None
        return self._result.filled(results)

    def run(self, tensors: list[torch.Tensor], index: int) -> list[torch.Tensor]:
        """Make the call of that index with these tensors; the tensors of its result."""
        call = self._calls[index]
        before, self._records = self._records, False
        try:
            results, self._result = _split(call.apply(*call.arguments.filled(tensors)))
        finally:
            self._records = before
        return results


def _checkpoint_body(function: Callable[..., Any], _preserve_rng_state: bool, *args: Any) -> Any:
    """What torch's reentrant checkpoint computes, without its recomputation, which a plan decides itself.

    As in the checkpoint, no gradient flows if none of the arguments needs one, and the gradients of an argument are summed
    before they leave it.
    """
    differentiable = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
        return function(*(a.view_as(a) if isinstance(a, torch.Tensor) and a.requires_grad else a for a in args))


_thread = threading.local()

_library = torch.library.Library("gcsolve", "DEF")
_library.define("function(Tensor[] tensors, int call) -> Tensor[]")


def _function(tensors: list[torch.Tensor], call: int) -> list[torch.Tensor]:
    return _thread.calls.run(tensors, call)


# At the key Autograd, where autograd sees the call of the Function; at the other one for inference tensors.
_library.impl("function", _function, "Autograd")
_library.impl("function", _function, "CompositeExplicitAutograd")


# --- hooks and .data -------------------------------------------------------------------------------------------------

_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")


class BypassesRefused(TorchFunctionMode):
    """While active, hooks on tensors are refused. `.data` is read as a detached tensor; a change through it is refused.

    Raises:
        TraceError: naming what is done, and the user's line.
    """

    def __init__(self) -> None:
        super().__init__()
        self._data = WeakTensorKeyDictionary()  # the keys: `.data` of tensors that need a gradient, and views of it

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _get_data:
            data = args[0].detach()
            if args[0].requires_grad:
                self._data[data] = True
            return data
        name, first = getattr(func, "__name__", ""), first_argument(args, kwargs)
        if func == _set_data or (writes_in_place(name) and self._is_data(first)):
            raise TraceError(
                f"forward changes a tensor through .data at {running_line()}, behind autograd's back, which a traced step "
                "cannot repeat; change it under torch.no_grad(), or work on a clone"
            )
        if name in _HOOKS:
            raise TraceError(
                f"forward calls {name} on a tensor at {running_line()}; the hook would be lost when the step is traced. Do "
                "what it does in the backward of a torch.autograd.Function, or set it on a parameter outside forward"
            )
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and self._is_data(first) and storage_key(result) == storage_key(first):
            self._data[result] = True
        return result

    def _is_data(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor in self._data


_property: Any = torch.Tensor.data
_get_data, _set_data = _property.__get__, _property.__set__


def writes_in_place(name: str) -> bool:
    """Whether a torch function of that name changes its first argument in place."""
    if name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__", "__ixor__"):
        return True
    return name.endswith("_") and not name.endswith("__")


def first_argument(args: Any, kwargs: Any) -> Any:
    """The argument that a torch function changes if it writes in place: the first one, by position or by name; None: the call
    has none."""
    if args:
        return args[0]
    return next((kwargs[name] for name in ("input", "self", "tensor") if name in (kwargs or {})), None)
