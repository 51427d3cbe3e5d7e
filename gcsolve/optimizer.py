"""Bytes of optimizer state, found by running the real class on tiny tensors."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from numbers import Real
from typing import Any

import torch

from gcsolve.errors import ArgumentError

_SMALL, _LARGE = 1024, 4096


def optimizer_bytes(optimizer: Any, parameters: Iterable[torch.Tensor]) -> int:
    """State bytes that `optimizer` will hold for the trainable ones among `parameters`.

    Args:
        optimizer: None (no state), a number (bytes per trainable parameter element), a `torch.optim.Optimizer` class, or
            an instance (its class and settings count, not its present state).
        parameters: real, fake or meta.

    Returns:
        bytes, found from two tiny sizes of each dtype: state that grows with the parameter, and state that does not.

    Raises:
        ArgumentError: it is none of these, or the class cannot be made with only a learning rate (pass an instance).
    """
    trainable = [p for p in parameters if p.requires_grad]
    if optimizer is None:
        return 0
    if isinstance(optimizer, bool) or not (isinstance(optimizer, (Real, torch.optim.Optimizer, type))):
        raise ArgumentError(
            f"optimizer={optimizer!r} is not an optimizer class (torch.optim.AdamW), an instance or bytes per parameter"
        )
    if isinstance(optimizer, Real):
        if not 0 <= float(optimizer) < float("inf"):
            raise ArgumentError(f"optimizer={optimizer!r}: bytes per parameter are a finite number ≥ 0")
        return int(float(optimizer) * sum(p.numel() for p in trainable))
    total = 0.0
    for dtype in sorted({p.dtype for p in trainable}, key=str):
        small, large = _state_bytes(optimizer, dtype, _SMALL), _state_bytes(optimizer, dtype, _LARGE)
        per_element = (large - small) / (_LARGE - _SMALL)
        fixed = small - per_element * _SMALL
        ours = [p for p in trainable if p.dtype == dtype]
        total += per_element * sum(p.numel() for p in ours) + fixed * len(ours)
    return round(total)


def make_optimizer(optimizer: Any, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """A fresh optimizer like `optimizer` (None or a number: plain SGD) over `parameters`."""
    parameters = list(parameters)
    if isinstance(optimizer, torch.optim.Optimizer):
        accepted = inspect.signature(type(optimizer).__init__).parameters
        settings = {k: v for k, v in optimizer.defaults.items() if k in accepted}
        return type(optimizer)(parameters, **settings)  # type: ignore[call-arg]
    if not isinstance(optimizer, type):
        return torch.optim.SGD(parameters, lr=0.01)
    if not issubclass(optimizer, torch.optim.Optimizer):
        raise ArgumentError(f"optimizer={optimizer!r} is not a torch.optim.Optimizer class")
    try:
        return optimizer(parameters)  # type: ignore[call-arg]
    except TypeError:
        pass
    try:
        return optimizer(parameters, lr=1e-3)  # type: ignore[call-arg]
    except TypeError as error:
        raise ArgumentError(f"optimizer={optimizer.__name__} needs settings ({error}); pass an instance") from error


def _state_bytes(optimizer: Any, dtype: torch.dtype, n: int) -> int:
    """State held for one parameter of `n` elements after one step."""
    parameter = torch.nn.Parameter(torch.zeros(n // 32, 32, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    made = make_optimizer(optimizer, [parameter])
    made.step()
    found = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in made.state[parameter].values()
        if isinstance(t, torch.Tensor)
    }
    return sum(found.values())
