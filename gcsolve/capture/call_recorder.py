"""The calls of torch functions that forward makes: recorded in one run, and compared with those of the next."""

from __future__ import annotations

from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name

from gcsolve._torch import is_step_of_vmap, transform, tree_map_only
from gcsolve.capture.module_state import PLAIN, held_tensors, shown, token
from gcsolve.capture.substitutions import When, substitutes
from gcsolve.errors import TraceError
from gcsolve.util.source import running_line

Call = tuple[Any, Any]
"""(torch function, token of its arguments)."""


class CallRecorder(TorchFunctionMode):
    """A mode that records the calls of torch functions and makes them, each as its substitute if it has one.

    If two runs with equal arguments and attributes make different calls, something decides that a plan cannot see: a
    counter elsewhere, a generator of another library, the clock. So the second run is refused.

    `calls`: those made so far. `uses_autograd`: one of them takes gradients. `sets_default_dtype`: one of them ran under
    another default dtype than the first line of forward. `value_line`: the user's line that first got a number, or a tensor
    with a size, that depends on the values of tensors; "": none did.

    Args:
        expected: the calls that must be made again; None: any are allowed.
        model: the model that runs; error texts name what hangs on it.
    """

    def __init__(self, expected: list[Call] | None, model: nn.Module) -> None:
        super().__init__()
        self.expected, self.model = expected, model
        self.calls: list[Call] = []
        self.uses_autograd = False
        self.sets_default_dtype = False
        self.value_line = ""
        self._default_dtype = torch.get_default_dtype()
        self._substitutes = substitutes(When.CALLED)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        under = transform()
        if under in ("Grad", "Jvp"):
            raise TraceError(
                f"forward uses a transform of torch.func (grad, jvp) at {running_line()}, which is not traced. Use "
                "torch.autograd.grad, or plan the submodules beside it: model.part = gcsolve.solve(model.part, ...).module"
            )
        kwargs = kwargs or {}
        if is_step_of_vmap(func):
            return func(
                *args, **kwargs
            )  # not compared: the first vmap of a process makes one call more than later ones
        real: list[torch.Tensor] = []

        def described(t: torch.Tensor) -> Any:
            if not under and t.requires_grad and type(t) in (torch.Tensor, nn.Parameter):
                real.append(t)
            return (tuple(t.shape), t.dtype)

        arguments = tree_map_only(FunctionType, _function_token, (args, kwargs))
        call = (func, token(arguments, described, set()))
        self.sets_default_dtype |= torch.get_default_dtype() != self._default_dtype
        self.uses_autograd |= func in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
        result = self._substitutes.get(func, func)(*args, **kwargs)
        if not self.value_line and _depends_on_values(result):
            self.value_line = running_line()
        if isinstance(result, PLAIN) and result is not None:
            return result  # a shape or a dtype; if another one makes forward go another way, later calls differ
        if real and isinstance(result, torch.Tensor) and result.requires_grad:
            name = held_tensors(self.model).get(id(real[0]), ("a tensor from outside the model", None))[0]
            raise TraceError(
                f"forward uses {name} ({shown(real[0])}) at {running_line()}: neither a parameter of the model nor an "
                "argument, so a planned step could not give it its gradient. Register it (nn.ParameterList, nn.ModuleList), "
                "or pass it as an argument"
            )
        self._record(call)
        return result

    def _record(self, call: Call) -> None:
        index = len(self.calls)
        self.calls.append(call)
        if self.expected is not None and (index >= len(self.expected) or self.expected[index] != call):
            function, _ = call
            name = resolve_name(function) or getattr(function, "__name__", str(function))
            raise TraceError(
                f"forward, run twice on the same input, does not do the same: at {running_line()}, {name} is called "
                "with other values the second time, or is another function. A counter, a cache or a random generator outside "
                "torch decides; make it an argument of the model or a buffer (a cache that the first call fills: call the "
                "model once before planning)"
            )


def _function_token(function: FunctionType) -> Any:
    """Equal for two functions that do the same: the same code, defaults and variables. Forward may make a function anew in
    each run (a lambda that is a distance, say)."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    return (id(function.__code__), function.__defaults__, function.__kwdefaults__, cells)


def _depends_on_values(result: Any) -> bool:
    """Whether a result is a number, or a tensor with a size, that depends on the values of tensors."""
    numbers = result.shape if isinstance(result, torch.Tensor) else (result,)
    return any(isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)) for n in numbers)
