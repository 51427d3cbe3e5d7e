"""A forward run under observation: the same torch functions every time, and nothing that a trace cannot follow."""

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


class Rehearsed(TorchFunctionMode):
    """Records the calls of torch functions that a forward makes, and refuses a second run that makes others.

    What changes from one run to the next without an argument or an attribute that changed depends on something that a
    plan cannot see: a counter elsewhere, a generator of another library, the clock.

    Args:
        calls: those of the first run; None: this is the first.
        model: what is run, to name what hangs on it.
    """

    def __init__(self, calls: list[Any] | None, model: nn.Module) -> None:
        super().__init__()
        self.expected, self.model = calls, model
        self.calls: list[Any] = []
        self.uses_autograd = False
        self.default_dtype = torch.get_default_dtype()
        self.sets_default_dtype = False
        self.value_line = ""
        self.substitutes = substitutes(When.CALLED)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        under = transform()
        if under in ("Grad", "Jvp"):
            raise TraceError(
                f"forward uses a transform of torch.func (grad, jvp) at {running_line()}, which is not traced. Use "
                "torch.autograd.grad, or plan the submodules beside it: model.part = gcsolve.solve(model.part, ...).module"
            )
        kwargs = kwargs or {}
        if is_step_of_vmap(func):
            return func(*args, **kwargs)  # the first vmap of a process makes one more
        real: list[torch.Tensor] = []

        def described(t: torch.Tensor) -> Any:
            if not under and t.requires_grad and type(t) in (torch.Tensor, nn.Parameter):
                real.append(t)
            return (tuple(t.shape), t.dtype)

        arguments = tree_map_only(FunctionType, _written, (args, kwargs))
        made = (func, token(arguments, described, set()))
        self.sets_default_dtype |= torch.get_default_dtype() != self.default_dtype
        self.uses_autograd |= func in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
        result = self.substitutes.get(func, func)(*args, **kwargs)
        if not self.value_line and _follows_from_values(result):
            self.value_line = running_line()
        if isinstance(result, PLAIN) and result is not None:
            return result  # a question (a shape, a dtype); what its answer decides will show
        if real and isinstance(result, torch.Tensor) and result.requires_grad:
            name = held_tensors(self.model).get(id(real[0]), ("a tensor from outside the model", None))[0]
            raise TraceError(
                f"forward uses {name} ({shown(real[0])}) at {running_line()}: neither a parameter of the model nor an "
                "argument, so a planned step could not give it its gradient. Register it (nn.ParameterList, nn.ModuleList), "
                "or pass it as an argument"
            )
        at = len(self.calls)
        self.calls.append(made)
        if self.expected is not None and (at >= len(self.expected) or self.expected[at] != made):
            name = resolve_name(func) or getattr(func, "__name__", str(func))
            raise TraceError(
                f"forward, run twice on the same input, does not do the same: at {running_line()}, {name} is called "
                "with other values the second time, or is another function. A counter, a cache or a random generator outside "
                "torch decides; make it an argument of the model or a buffer (a cache that the first call fills: call the "
                "model once before planning)"
            )
        return result


def _written(function: FunctionType) -> Any:
    """What tells a function from another: where it is written and what it holds on to. Forward may make it anew in each run
    (a lambda that is a distance)."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    return (id(function.__code__), function.__defaults__, function.__kwdefaults__, cells)


def _follows_from_values(result: Any) -> bool:
    """Whether a result is, or has in its shape, a number that only the values of tensors tell."""
    found = result.shape if isinstance(result, torch.Tensor) else (result,)
    return any(isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)) for n in found)
