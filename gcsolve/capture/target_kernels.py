"""Tracing on the CPU what will run on a GPU that is not here.

Fake tensors stay on the CPU; only the ops are those of the target, where a GPU runs other kernels, which save other things
for backward. `substitutions.py` lists them (`When.CALLED_FOR_DEVICE`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gcsolve.capture.substitutions import When, substitutes
from gcsolve.cost.devices import DeviceSpec


class TargetKernels(TorchFunctionMode):
    """While active, calls are traced as the kernels of `device`; the keys of `used` name those that the CPU does not have."""

    def __init__(self, device: DeviceSpec) -> None:
        super().__init__()
        self.device = device
        self.used: dict[str, None] = {}
        self._substitutes = {
            target: partial(replacement, self) for target, replacement in substitutes(When.CALLED_FOR_DEVICE).items()
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.substitute(func)(*args, **(kwargs or {}))

    def substitute(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What is traced for a torch function: the device's kernel, or the function itself."""
        substitute = self._substitutes.get(function)
        return function if substitute is None else substitute


def target_kernels(device: DeviceSpec, tensors: Iterable[torch.Tensor]) -> TargetKernels | None:
    """The kernels of `device` for a model whose tensors are not there; None where the trace shows them anyway."""
    traced_there = device.kind == "cpu" or any(t.device.type not in ("cpu", "meta") for t in tensors)
    return None if traced_there else TargetKernels(device)
