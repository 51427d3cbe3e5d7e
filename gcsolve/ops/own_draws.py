"""Random ops that draw from a generator of one's own, so that running one leaves torch's default generator alone.

The default generator belongs to all threads: saving its state, drawing, and setting it back would undo what another thread
draws in between.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from gcsolve._torch import OpOverload

aten = torch.ops.aten


def drawing_from(op: OpOverload, generator: torch.Generator) -> Callable[..., Any] | None:
    """The op as a function that draws from `generator` and takes the same memory and time; None where there is none.

    Args:
        op: a random op. It is called with its own arguments, without a generator.
    """
    if op is aten.native_dropout.default:
        return functools.partial(_native_dropout, generator) if generator.device.type == "cpu" else None
    names = [a.name for a in op._schema.arguments if a.name != "generator"]
    for overload in (op, *(getattr(op.overloadpacket, name) for name in op.overloadpacket.overloads())):
        arguments = [a.name for a in overload._schema.arguments]
        if "generator" in arguments and [name for name in arguments if name != "generator"] == names:
            return functools.partial(_with_generator, overload, generator)
    return None


def _with_generator(op: OpOverload, own: torch.Generator, /, *args: Any, **kwargs: Any) -> Any:
    at = [a.name for a in op._schema.arguments].index("generator")
    if at < len(args):
        return op(*args[:at], own, *args[at + 1 :], **kwargs)
    return op(*args, **{**kwargs, "generator": own})


def _native_dropout(
    generator: torch.Generator, x: torch.Tensor, p: float, train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As torch's kernel for the CPU composes it; it has no argument for a generator."""
    if train is False or x.numel() == 0:
        return aten.native_dropout.default(x, p, train)  # draws nothing
    mask = torch.empty_like(x, dtype=torch.bool)
    mask.bernoulli_(1.0 - p, generator=generator)
    return x.mul(mask).mul_(0.0 if p == 1 else 1.0 / (1.0 - p)), mask
