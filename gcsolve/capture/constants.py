"""Values a model makes out of nothing (position ids, masks of ones) are known while it is traced.

Eager takes a branch on such a value, and so must the trace, or it would trace another model: Hugging Face's masks, for
example, are skipped when positions run 0, 1, 2, ... without a gap. Fake tensors carry no values, so beside each fake that
comes from constants alone, and is small, its real value is computed too and asked wherever the model looks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from gcsolve._torch import FakeTensor, no_modes, storage_key, tree_map_only
from gcsolve.capture.custom_functions import first_argument, writes_in_place

MAX_ELEMENTS = 1 << 20

_FACTORIES = frozenset(["arange", "zeros", "ones", "full", "tensor", "eye", "linspace"])

# Deterministic, no side effect, one tensor out; names as in torch, torch.Tensor or the operator without underscores.
_ARITHMETIC = frozenset(
    {
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
        *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "invert", "xor", "isin", "equal", "where"),
        *(
            "logical_and",
            "logical_or",
            "logical_not",
            "logical_xor",
            "bitwise_and",
            "bitwise_or",
            "bitwise_not",
            "masked_fill",
        ),
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
    }
)

# What is only known in its in-place form.
_WRITTEN = frozenset(["setitem", "fill", "zero", "iadd", "isub", "imul", "iand", "ior", "ixor"])

_ASKED = frozenset(["__bool__", "item", "__int__", "__float__", "__index__", "tolist"])  # not what casts: bool(), int()


class KnownValues(TorchFunctionMode):
    """While active, tensors made from constants answer `bool()`, `item()` and the like with their real value."""

    def __init__(self) -> None:
        super().__init__()
        self.values = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = getattr(func, "__name__", "")
        name = written.strip("_")
        if written in _ASKED and args and self.knows(args[0]):
            with no_modes():
                return getattr(self.values[args[0]], written)(*args[1:], **kwargs)
        result = func(*args, **kwargs)
        if writes_in_place(written):
            self._write(func, first_argument(args, kwargs), args, kwargs)
        elif "out" in kwargs:
            self.values.clear()
        elif isinstance(result, FakeTensor) and result.numel() <= MAX_ELEMENTS and not result.requires_grad:
            self._compute(func, name, args, kwargs, result)
        return result

    def knows(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor in self.values

    def _write(self, func: Any, changed: Any, args: Any, kwargs: Any) -> None:
        """Change the real value as the fake was changed; a write of anything unknown makes all that share it unknown.

        The real values alias each other as the fakes do, since the same ops made them, so the views follow.
        """
        name = func.__name__.strip("_")
        if self.knows(changed) and (name in _ARITHMETIC or name in _WRITTEN):
            real_args, real_kwargs, found = self._real(args, kwargs)
            if all(map(self.knows, found)):
                with no_modes():
                    func(*real_args, **real_kwargs)
                return
        if isinstance(changed, torch.Tensor):
            for fake in [k for k in self.values if storage_key(k) == storage_key(changed)]:
                del self.values[fake]

    def _real(self, args: Any, kwargs: Any) -> tuple[Any, Any, list[torch.Tensor]]:
        """The arguments with known values in place of fakes, and all tensors found among them."""
        found: list[torch.Tensor] = []

        def real(t: torch.Tensor) -> torch.Tensor:
            found.append(t)
            return self.values[t] if t in self.values else t  # noqa: SIM401 -- get() is typed as optional

        return (*tree_map_only(torch.Tensor, real, (args, kwargs)), found)

    def _compute(self, func: Any, name: str, args: Any, kwargs: Any, result: torch.Tensor) -> None:
        """Keep the real value beside `result` when it follows from constants."""
        real_args, real_kwargs, found = self._real(args, kwargs)
        if not ((name in _FACTORIES and not found) or (name in _ARITHMETIC and found and all(map(self.knows, found)))):
            return
        with no_modes():  # without no_grad, which the trace would record: nothing here needs a gradient
            try:
                value = func(*real_args, **real_kwargs)
            except Exception:  # an operand of another kind (a symbolic size): then it is not known
                return
        if isinstance(value, torch.Tensor) and value.shape == result.shape and value.dtype == result.dtype:
            self.values[result] = value
