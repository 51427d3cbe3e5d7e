"""What a model does to autograd by hand: its own `torch.autograd.Function`s, hooks set in forward, `.data`.

`torch.export` looks through a Function: it records the ops of its forward, and the derivative of those ops, not the
backward that the author wrote, would be what is trained. So while the model is exported, a call of one is recorded as a
single op; when forward and backward are then traced together, that op calls the Function itself. A hook would be lost in
the same way, and is refused.
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

_TENSOR = object()  # the place of a tensor among other leaves


@dataclass(frozen=True)
class _Call:
    """One call of a Function: the leaves of its arguments, tensors left open, and how they nest."""

    apply: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: Any

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        return self.apply(*_nested(self.leaves, self.spec, tensors))


def _split(tree: Any) -> tuple[list[torch.Tensor], tuple[Any, ...], Any]:
    """(tensors, leaves with tensors left open, how they nest)."""
    leaves, spec = pytree.tree_flatten(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return tensors, tuple(_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves), spec


def _nested(leaves: Sequence[Any], spec: Any, tensors: Sequence[torch.Tensor]) -> Any:
    rest = iter(tensors)
    return pytree.tree_unflatten([next(rest) if leaf is _TENSOR else leaf for leaf in leaves], spec)


class KeptFunctions:
    """The Function calls of one trace, for the thread that traces; `recording()` around the export, the whole around both
    stages.
    """

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.result: tuple[tuple[Any, ...], Any] = ((), None)
        self.open = False  # a call is recorded; not those inside a Function

    def __enter__(self) -> KeptFunctions:
        self._outer = getattr(_of_thread, "kept", None)
        _of_thread.kept = self
        return self

    def __exit__(self, *_: object) -> None:
        _of_thread.kept = self._outer

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        with patched(During.RECORDING, functions=self):
            self.open = True
            try:
                yield
            finally:
                self.open = False

    def recording_apply(self, original: Any) -> Any:
        """`Function.apply` as a class method that records calls while `open`."""

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            own = original.__get__(None, cls)
            if not self.open or kwargs:
                return own(*args, **kwargs)
            return _unchecked(*args) if cls is CheckpointFunction else self.record(own, args)

        return classmethod(apply)

    def record(self, apply: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call it through the op; what comes back nests as the Function's own result."""
        tensors, leaves, spec = _split(args)
        if not tensors:
            return apply(*args)
        self.calls.append(_Call(apply, leaves, spec))
        made = torch.ops.gcsolve.function.default(tensors, len(self.calls) - 1)
        return _nested(*self.result, made)

    def run(self, tensors: list[torch.Tensor], call: int) -> list[torch.Tensor]:
        was_open, self.open = self.open, False
        try:
            made, *self.result = _split(self.calls[call](tensors))  # type: ignore[assignment]
        finally:
            self.open = was_open
        return made


def _unchecked(function: Callable[..., Any], _preserve_rng_state: bool, *args: Any) -> Any:
    """What torch's reentrant checkpoint computes, without its recomputation (a plan has its own); as there, no gradient
    flows when none of the arguments needs one, and an argument's gradients are summed before they leave."""
    differentiable = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
        return function(*(a.view_as(a) if isinstance(a, torch.Tensor) and a.requires_grad else a for a in args))


_of_thread = threading.local()

_library = torch.library.Library("gcsolve", "DEF")
_library.define("function(Tensor[] tensors, int call) -> Tensor[]")


def _function(tensors: list[torch.Tensor], call: int) -> list[torch.Tensor]:
    return _of_thread.kept.run(tensors, call)


# At the Autograd key, so that the Function is applied where autograd sees it; the other for inference tensors.
_library.impl("function", _function, "Autograd")
_library.impl("function", _function, "CompositeExplicitAutograd")


# --- hooks and .data -------------------------------------------------------------------------------------------------

_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")


class ByHand(TorchFunctionMode):
    """While active, hooks on tensors are refused, and `.data` is read as a detached tensor, which nobody may change.

    Raises:
        TraceError: naming what is done, and the user's line.
    """

    def __init__(self) -> None:
        super().__init__()
        self.data = WeakTensorKeyDictionary()  # the .data of what needs a gradient, and views of it

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _get_data:
            made = args[0].detach()
            if args[0].requires_grad:
                self.data[made] = True
            return made
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
            self.data[result] = True
        return result

    def _is_data(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor in self.data


_data: Any = torch.Tensor.data
_get_data, _set_data = _data.__get__, _data.__set__


def writes_in_place(name: str) -> bool:
    """Whether a torch function of that name changes its first argument in place."""
    if name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__", "__ixor__"):
        return True
    return name.endswith("_") and not name.endswith("__")


def first_argument(args: Any, kwargs: Any) -> Any:
    """The argument that a torch function which writes in place changes, wherever it stands in the call; None: it has none."""
    if args:
        return args[0]
    return next((kwargs[name] for name in ("input", "self", "tensor") if name in (kwargs or {})), None)
