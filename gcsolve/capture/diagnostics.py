"""Errors of torch while a model is traced, reworded: what is the matter, where in the user's code, and what to do."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import nn

from gcsolve.errors import TraceError
from gcsolve.util.source import code_name, is_user_file, user_line
from gcsolve.util.tree import Template, unflatten

LOSS = "the loss"


def subject_text(model: nn.Module, loss: Any, *, in_loss: bool) -> str:
    """The model or the loss, whichever is running, by the name that a user knows."""
    return f"{LOSS} {code_name(loss)}" if in_loss else type(model).__name__


def call_text(model: nn.Module, tensors: list[torch.Tensor], template: Template) -> str:
    """The call as a user would write it, with shapes for tensors: MLP(float32[8, 32], flip=True)."""
    shown = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors]
    args, kwargs = unflatten(template, [_Shown(text) for text in shown])
    parts = [*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())]
    return f"{type(model).__name__}({', '.join(parts)})"


class _Shown(str):
    """Text that prints without quotes."""

    __repr__ = str.__str__


# What is not traced: (a part of the error's text or type, name for users, what to do).
_CANNOT = (
    (
        "TorchScript interpreter",
        "TorchScript",
        "Call the Python function itself (PYTORCH_JIT=0 switches scripting off)",
    ),
    ("dynamo-optimized", "a function or module compiled with torch.compile", "Use it uncompiled"),
    ("Dynamo", "torch.cond, or a function compiled with torch.compile", "Use torch.where, or the function uncompiled"),
    ("SyntaxError", "Tensor.random_ with bounds", "Use torch.randint"),
    (
        "_C.Generator'>",
        "a torch.Generator as an argument of an op, which this torch cannot write down",
        "Update torch (2.13 can), draw from the default generator",
    ),
    ("being vmapped", "torch.vmap", "Write it with batched ops"),
    ("DynamicOutputShape", "an op whose result is as large as its values say", "Compute what it gives outside"),
    ("randint_like is not implemented", "randint_like of a tensor that needs a gradient", "Give it x.detach()"),
)


# Functions of torch that look at the values of their arguments: name -> (what they look for, what to do).
_LOOK = {
    "_detect_is_causal_mask": (
        "whether a mask is causal",
        "Say so in the call: is_causal= of an encoder, tgt_is_causal= of a decoder, both as src_ and tgt_ of nn.Transformer",
    ),
}


def worded(error: Exception, subject: str, call: str, value_line: str) -> TraceError:
    """The error for the user.

    Args:
        subject: what was running, as `subject_text` gives it.
        call: as `call_text` gives it.
        value_line: as in `CallRecorder`.
    """
    line = user_line(error)
    at = f" at {line}" if line else ""
    name = type(error).__name__
    outside = (
        "if it is in the loss, leave labels out of the call and compute the loss after it, "
        if "labels=" in call
        else ""
    )
    if "entirely functional graph" in str(error):
        return TraceError(
            f"{subject} changes a tensor in place that a planned step cannot follow: one in a list, a dict or a "
            "global. Make it a buffer, an attribute of a module or an argument"
        )
    if "UnbackedSymbol" in name or "expected to contain only concrete integers" in str(error):
        at = f" at {value_line}" if value_line else at
        return TraceError(
            f"{subject} makes a number or a shape of a tensor's values (item, tolist, nonzero, a boolean mask as "
            f"index){at}: another step would need another plan. Keep it a tensor (x * s instead of x * s.item(), torch.where "
            f"instead of a mask), {outside}or plan the submodules around it: model.part = gcsolve.solve(model.part, ...).module"
        )
    if "DataDependent" in name or "data-dependent" in str(error):
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.name in _LOOK and not is_user_file(frame.filename):
                what, instead = _LOOK[frame.name]
                return TraceError(
                    f"{subject} has torch look {what}{at}, which depends on values: the two ways would need two plans. "
                    f"{instead}, or plan the submodules around it: model.part = gcsolve.solve(model.part, ...).module"
                )
        return TraceError(
            f"{subject} branches on a tensor's value{at}, or calls an op there that does so itself (as torch.cov "
            f"does): the two ways would need two plans. Replace the branch by torch.where, {outside}or plan the submodules "
            "around it: model.part = gcsolve.solve(model.part, ...).module"
        )
    for part, what, instead in _CANNOT:
        if part in str(error) or part in name:
            return TraceError(
                f"{subject} uses {what}{at}, which is not traced. {instead}, or plan the submodules around it: "
                "model.part = gcsolve.solve(model.part, ...).module"
            )
    first = (str(error).strip().splitlines() or [""])[0].rstrip(".").replace("FakeTensor", "Tensor")
    if subject.startswith(LOSS):
        return TraceError(
            f"{name}: {first} (in {subject}{at}, of the output of {call}). The loss is called with the model's whole output, "
            "as loss(model(...)): does that work on the model itself? If it does, leave loss= out and take the loss of the "
            "planned module's output"
        )
    return TraceError(
        f"{name}: {first} (in {call}{at}, while it was traced). Check the example input: does the same call work on the model "
        "itself? If so, plan a part of it instead: model.part = gcsolve.solve(model.part, ...).module"
    )
