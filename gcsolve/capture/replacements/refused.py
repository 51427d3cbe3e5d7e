"""Functions of torch that are not traced: an error says what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from gcsolve.errors import TraceError
from gcsolve.util.source import running_line


def ctc_loss(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise _of_lengths("ctc_loss", "Return the log-probabilities, and take the loss of the planned module's output")


def packed_sequence(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise _of_lengths("a packed sequence", "Pad and mask instead")


def _of_lengths(name: str, instead: str) -> TraceError:
    return TraceError(
        f"forward uses {name} at {running_line()}, which is not traced: shapes follow from the values of the lengths. "
        f"{instead}, or plan the submodules around it: model.part = gcsolve.solve(model.part, ...).module"
    )


def polar(*args: Any, **kwargs: Any) -> Any:
    """`torch.linalg.polar`, outside autocast.

    Raises:
        TraceError: under autocast on the CPU.
    """
    if torch.is_autocast_enabled("cpu"):
        raise TraceError(
            f"forward uses torch.linalg.polar at {running_line()} under autocast, which casts inside its kernel, where a trace "
            "does not see it. Call it under torch.autocast(..., enabled=False)"
        )
    return torch.linalg.polar(*args, **kwargs)  # type: ignore[attr-defined]
