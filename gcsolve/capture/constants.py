"""Tensors whose values are known while a step is traced, because they follow from constants alone.

Models make position ids or masks of ones out of nothing, and branch on their values: Hugging Face's attention, for example,
skips a mask if positions run 0, 1, 2, ... without a gap. A trace must take the branch that eager takes. Fake tensors have no
values, so beside each small fake that follows from constants, the real tensor is computed too, and answers when the model
asks for a value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from gcsolve._torch import FakeTensor, no_modes, storage_key, tree_map_only
from gcsolve.capture.custom_functions import first_argument, writes_in_place

MAX_ELEMENTS = 1 << 20
"""Of a tensor whose value is computed."""

_FACTORIES = frozenset(["arange", "zeros", "ones", "full", "tensor", "eye", "linspace"])

# Deterministic functions without side effects that return one tensor. Names are those in torch or torch.Tensor, or those of
# operators, without underscores at their ends.
_FUNCTIONS = frozenset(
    [
        *("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "new_tensor"),
        *(
            "add",
            "sub",
            "mul",
            "div",
            "floordiv",
            "floor_divide",
            "mod",
            "remainder",
            "neg",
            "abs",
            "rsub",
            "radd",
            "rmul",
        ),
        *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "invert", "xor", "isin", "equal", "where", "masked_fill"),
        *("logical_and", "logical_or", "logical_not", "logical_xor"),
        *("bitwise_and", "bitwise_or", "bitwise_not"),
        *("all", "any", "sum", "cumsum", "diff", "max", "min", "amax", "amin", "clamp", "clip", "tril", "triu"),
        *("cat", "stack", "getitem", "unsqueeze", "squeeze", "view", "reshape", "expand", "expand_as", "transpose"),
        *("permute", "flatten", "unflatten", "t", "repeat", "select", "narrow", "index_select", "roll", "flip"),
        *(
            "contiguous",
            "clone",
            "to",
            "long",
            "int",
            "bool",
            "float",
            "double",
            "half",
            "type",
            "type_as",
            "detach",
            "cpu",
        ),
    ]
)

# Functions that change a tensor in place and have no form in `_FUNCTIONS`.
_WRITES = frozenset(["setitem", "fill", "zero", "iadd", "isub", "imul", "iand", "ior", "ixor"])

# Functions whose result is a number or a list of numbers. (`bool` and `int` are not among them: these names cast a tensor.)
_READS = frozenset(["__bool__", "item", "__int__", "__float__", "__index__", "tolist"])


class KnownValues(TorchFunctionMode):
    """While active, tensors that follow from constants answer `bool()`, `item()` and the like with their real values.

    `values`: fake tensor -> real tensor. Real tensors share memory as the fakes do, since the same functions made them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        full_name = getattr(func, "__name__", "")
        if full_name in _READS and args and self.knows(args[0]):
            with no_modes():
                return getattr(self.values[args[0]], full_name)(*args[1:], **kwargs)
        result = func(*args, **kwargs)
        if writes_in_place(full_name):
            self._write(func, first_argument(args, kwargs), args, kwargs)
        elif "out" in kwargs:
            self.values.clear()
        elif isinstance(result, FakeTensor) and result.numel() <= MAX_ELEMENTS and not result.requires_grad:
            self._compute(func, full_name.strip("_"), args, kwargs, result)
        return result

    def knows(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor in self.values

    def _write(self, func: Any, changed: Any, args: Any, kwargs: Any) -> None:
        """Change the real tensor as the fake was changed. If something unknown was written, forget the values of all tensors
        that share memory with it."""
        name = func.__name__.strip("_")
        if self.knows(changed) and (name in _FUNCTIONS or name in _WRITES):
            real_args, real_kwargs, tensors = self._real(args, kwargs)
            if all(map(self.knows, tensors)):
                with no_modes():
                    func(*real_args, **real_kwargs)
                return
        if isinstance(changed, torch.Tensor):
            for fake in [k for k in self.values if storage_key(k) == storage_key(changed)]:
                del self.values[fake]

    def _real(self, args: Any, kwargs: Any) -> tuple[Any, Any, list[torch.Tensor]]:
        """The arguments with real tensors in place of fakes where they are known, and all tensors among them."""
        tensors: list[torch.Tensor] = []

        def real(t: torch.Tensor) -> torch.Tensor:
            tensors.append(t)
            return self.values[t] if t in self.values else t  # noqa: SIM401 -- get() is typed as optional

        return (*tree_map_only(torch.Tensor, real, (args, kwargs)), tensors)

    def _compute(self, func: Any, name: str, args: Any, kwargs: Any, result: torch.Tensor) -> None:
        """Compute the real tensor of `result`, if it follows from constants."""
        real_args, real_kwargs, tensors = self._real(args, kwargs)
        from_nothing = name in _FACTORIES and not tensors
        from_known = name in _FUNCTIONS and tensors and all(map(self.knows, tensors))
        if not from_nothing and not from_known:
            return
        with no_modes():  # and without no_grad, which the trace would record; nothing here requires a gradient
            try:
                value = func(*real_args, **real_kwargs)
            except Exception:  # an argument of another kind, a symbolic size say: the value stays unknown
                return
        if isinstance(value, torch.Tensor) and value.shape == result.shape and value.dtype == result.dtype:
            self.values[result] = value
