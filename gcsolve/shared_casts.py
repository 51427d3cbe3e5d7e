"""Several calls in one autocast block: gradients of the weights that it casts are summed as eager sums them.

Eager casts a weight once for the block, and the gradients of all calls meet at that cast: they are summed in the lower
precision, the last call's first, and their sum is cast back. A planned call casts by itself. So it hands its gradient of
such a weight on to the call before it, where that call's backward is still to come in the same pass of autograd. Nothing
is lost on the way: a gradient that was cast to float32 holds the very numbers of the lower precision.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gcsolve._torch import current_backward, runs_in_this_backward


@dataclass
class _Block:
    """`cast`: autograd's node of a cast that autocast keeps as long as the block lasts. `calls`: nodes of planned calls."""

    cast: Any = None
    calls: list[weakref.ref[Any]] = field(default_factory=list)


class _Here(threading.local):
    """The last block of this thread, by what is cast to what."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[torch.device, torch.dtype], _Block] = {}


_here = _Here()


@contextlib.contextmanager
def block_goes_on() -> Iterator[None]:
    """Planning makes autocast forget its casts; the autocast block around it is the same afterwards."""
    lasting = [(key, block) for key, block in _here.blocks.items() if _cast_of_block(*key) is block.cast]
    yield
    for key, block in lasting:
        block.cast = _cast_of_block(*key)


class SharedCasts:
    """One planned call's share in its autocast block; autograd's node of the call holds it as `shared_casts`.

    Args:
        node: that node.
        weights: (position among the call's inputs, weight, dtype) of each weight that autocast casts for all its uses.
    """

    def __init__(self, node: Any, weights: Sequence[tuple[int, torch.Tensor, torch.dtype]]) -> None:
        self.weights = {at: (id(weight), dtype) for at, weight, dtype in weights}
        self.keys = frozenset(key for key, _ in self.weights.values())
        self.handed: dict[tuple[int, int], torch.Tensor] = {}
        self.last_backward = -1
        self.earlier: list[weakref.ref[Any]] = []
        for _, weight, dtype in weights[:1]:
            cast = _cast_of_block(weight.device, dtype)
            block = _here.blocks.setdefault((weight.device, dtype), _Block())
            if block.cast is not cast:
                block.cast, block.calls = cast, []
            self.earlier = [call for call in block.calls if call() is not None]
            block.calls = [*self.earlier, weakref.ref(node)]

    def summed(self, gradients: Mapping[int, torch.Tensor | None]) -> dict[int, torch.Tensor | None]:
        """What autograd is to be given for those weights, by position, when this call's own gradients are those."""
        this = current_backward()
        given = {at: self._summed(key, dtype, gradients[at], this) for at, (key, dtype) in self.weights.items()}
        self.last_backward = this
        return given

    def _summed(self, key: int, dtype: torch.dtype, gradient: torch.Tensor | None, this: int) -> torch.Tensor | None:
        so_far = self.handed.pop((this, key), None)
        to_come = self._to_come(key, this)
        if so_far is None and (gradient is None or to_come is None):
            return gradient
        if gradient is not None:
            low = gradient.to(dtype)
            so_far = low if so_far is None else so_far + low
        assert so_far is not None
        if to_come is None:
            return so_far.to(torch.float32)
        to_come.handed[this, key] = so_far
        return None

    def _to_come(self, key: int, this: int) -> SharedCasts | None:
        """The last call before this one that uses the weight and whose backward comes later in this pass."""
        for call in reversed(self.earlier):
            node = call()
            shared = None if node is None else node.shared_casts
            if shared and key in shared.keys and shared.last_backward != this and runs_in_this_backward(node):
                return shared
        return None


def _cast_of_block(device: torch.device, dtype: torch.dtype) -> Any:
    """Autograd's node of one cast, always the same, that autocast keeps until the outermost block ends."""
    weight = _probe(device)
    with torch.enable_grad(), torch.autocast(device.type, dtype):
        return torch.mm(weight, weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


@functools.cache
def _probe(device: torch.device) -> torch.Tensor:
    return torch.ones(1, 1, device=device, requires_grad=True)
