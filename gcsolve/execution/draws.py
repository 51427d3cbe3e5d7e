"""Random draws of an emitted graph: a draw whose generator state is remembered, and a rerun that draws the same numbers.

The default generators are shared by all threads. So nobody may draw between the moment a state is read or set and the draw
that it belongs to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

_DRAWING = threading.RLock()


def rng_state(device: torch.device) -> torch.Tensor:
    """State of the default generator of `device`, as the next random op will find it."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def draw(op: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """`op(*args, **kwargs)`, but not while another thread replays a draw."""
    with _DRAWING:
        return op(*args, **kwargs)


def draw_and_remember(device: torch.device, op: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """(the generator's state before, `op(*args, **kwargs)`)."""
    with _DRAWING:
        state = rng_state(device)
        return state, op(*args, **kwargs)


def replay(state: torch.Tensor, device: torch.device, op: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """`op(*args, **kwargs)` with the generator in `state`; afterwards the generator is as it was before.

    Its state waits outside torch's allocator meanwhile, so that a replay takes no more memory than the first run did.
    """
    with _DRAWING:
        present = bytearray(rng_state(device).numpy())
        set_rng_state(state, device)
        try:
            return op(*args, **kwargs)
        finally:
            set_rng_state(torch.frombuffer(present, dtype=torch.uint8), device)


def state_of(generator: torch.Generator) -> torch.Tensor:
    """State of a generator that the caller or the model owns, as the next draw from it will find it."""
    return generator.get_state()


def generator_at(state: torch.Tensor, device: torch.device) -> torch.Generator:
    """A new generator in that state, for a rerun: the generator that was drawn from first is left alone."""
    generator = torch.Generator(device)
    generator.set_state(state)
    return generator
