"""Several planned calls in one backward: the gradients of a weight are summed in eager's order and precision.

Eager adds the gradients of a weight one by one, as the backward comes to its uses: those of the last call first. A planned
call has a sum of its own. So a call passes its sum on to an earlier call, whose backward is still to come in the same pass
of autograd, where

- the earlier call uses the weight more than once (tied weights): its sum then continues the one that it received;
- both calls are in one autocast block, which casts the weight. Eager casts a weight once in a block, and all gradients meet
  at that cast in the lower precision, before their sum is cast back. Nothing is lost on the way: a gradient that was cast
  to float32 holds the very numbers of the lower precision.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gcsolve._torch import current_backward, is_sum_of_gradients, runs_in_this_backward
from gcsolve.capture.joint import Joint

LaterSums = dict[int, torch.Tensor]
"""Index of a weight among a call's inputs -> the sum of the gradients that later calls have of it."""


# --- in the emitted backward ----------------------------------------------------------------------------------------------


def first_sums(joint: Joint, backward: Collection[fx.Node]) -> dict[fx.Node, int]:
    """The nodes at which the sums of the gradients of inputs begin, for inputs that are used more than once.

    Args:
        backward: the nodes of the backward.

    Returns:
        node that adds the first two gradients of an input, in the precision in which autograd sums them -> index of the
        input.
    """
    results: Any = joint.results
    primals = joint.primal_nodes
    cast = dict(joint.cast_weights)
    differentiated = _ancestors([results[position] for position in joint.tangents]) - set(backward)
    sums: dict[fx.Node, int] = {}
    for position, index in joint.gradients:
        total, used = results[position], primals[index]
        if index in cast:
            total = total.all_input_nodes[0]
            used = next(user for user in used.users if user in differentiated)
        n_uses = sum(user in differentiated for user in used.users)
        if n_uses > 1 and is_sum_of_gradients(total):
            sums[_first_of(total, n_uses - 1)] = index
    return sums


def _first_of(total: fx.Node, n_sums: int) -> fx.Node:
    """The first of at most `n_sums` sums, each of the one before it and a gradient, that end in `total`. A sum that anything
    else reads is not continued: what is added to it would reach another gradient too."""
    for _ in range(n_sums - 1):
        before: Any = total.args[0]
        if not is_sum_of_gradients(before) or len(before.users) != 1:
            break
        total = before
    return total


def _ancestors(nodes: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes and all that they depend on."""
    ancestors, stack = set(nodes), list(nodes)
    while stack:
        new = [node for node in stack.pop().all_input_nodes if node not in ancestors]
        ancestors.update(new)
        stack += new
    return ancestors


def continue_sum(gradient: torch.Tensor, later_sums: LaterSums, index: int) -> torch.Tensor:
    """The first gradient of a sum, added to the sum of later calls where there is one."""
    later = later_sums.pop(index, None)
    return gradient if later is None else later + gradient


# --- autocast blocks ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Block:
    """An autocast block, known by autograd's node of a cast that autocast keeps as long as the block lasts."""

    cast: Any


class _ThreadState(threading.local):
    """Of one thread: the last autocast block for each device and dtype that is cast to, and autograd's nodes of the planned
    calls that can receive sums."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[torch.device, torch.dtype], _Block] = {}
        self.calls: list[weakref.ref[Any]] = []


_thread = _ThreadState()


@contextlib.contextmanager
def autocast_block_kept() -> Iterator[None]:
    """Planning makes autocast forget its casts; after this block, the autocast block around it is known as the same."""
    lasting = [(key, block) for key, block in _thread.blocks.items() if _cast_of_block(*key) is block.cast]
    yield
    for key, block in lasting:
        block.cast = _cast_of_block(*key)


def _current_block(device: torch.device, dtype: torch.dtype) -> _Block:
    cast = _cast_of_block(device, dtype)
    block = _thread.blocks.get((device, dtype))
    if block is None or block.cast is not cast:
        block = _thread.blocks[device, dtype] = _Block(cast)
    return block


def _cast_of_block(device: torch.device, dtype: torch.dtype) -> Any:
    """Autograd's node of the cast of a probe: autocast keeps that cast until the outermost block ends."""
    weight = _probe(device)
    with torch.enable_grad(), torch.autocast(device.type, dtype):
        return torch.mm(weight, weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


@functools.cache
def _probe(device: torch.device) -> torch.Tensor:
    return torch.ones(1, 1, device=device, requires_grad=True)


# --- from call to call ----------------------------------------------------------------------------------------------------


class GradientHandoff:
    """The sums that one planned call receives and passes on; autograd's node of the call holds it as `handoff`.

    Args:
        node: that node.
        weights: the inputs that the call has gradients of, by their index.
        cast: index of each that autocast casts once for all its uses -> the dtype that it casts to.
        continued: indices of those whose sum continues the sum of later calls.
    """

    def __init__(
        self,
        node: Any,
        weights: Mapping[int, torch.Tensor],
        cast: Mapping[int, torch.dtype],
        continued: Collection[int],
    ) -> None:
        self.earlier = _thread.calls = [call for call in _thread.calls if call() is not None]
        self.cast = cast
        self.received: dict[int, LaterSums] = {}  # by the pass of autograd
        self.last_backward = -1
        self.keys: dict[int, Any] = {}  # the same for two calls where they sum the gradients of one weight together
        if not (cast or continued or self.earlier):
            return
        places = {(weights[index].device, dtype) for index, dtype in cast.items()}
        blocks = {place: _current_block(*place) for place in places}
        for index, weight in weights.items():
            if weight.is_leaf:  # autograd's graph holds on to it, so that its id stays its own
                self.keys[index] = id(weight), blocks[weight.device, cast[index]] if index in cast else None
        self.receivable = {self.keys[index]: index for index in {*cast, *continued} if index in self.keys}
        if self.receivable:
            _thread.calls = [*self.earlier, weakref.ref(node)]

    def receive(self) -> LaterSums:
        """The sums that later calls have passed on to this one in the pass of autograd that is under way."""
        self.last_backward = current_backward()
        return self.received.pop(self.last_backward, {})

    def pass_on(
        self, gradients: Mapping[int, torch.Tensor | None], later_sums: LaterSums
    ) -> dict[int, torch.Tensor | None]:
        """The gradients that autograd is to be given; the others are passed on to earlier calls.

        Args:
            gradients: the call's own, by the index of the input.
            later_sums: those that were received, and that none of `gradients` continues.
        """
        given = dict(gradients)
        for index, later in later_sums.items():
            own = gradients[index]
            given[index] = (later if own is None else later + own.to(later.dtype)).to(torch.float32)
        for index, key in self.keys.items() if self.earlier else ():
            gradient = given[index]
            receiver = None if gradient is None else self._receiver(key)
            if gradient is not None and receiver is not None:
                sums = receiver.received.setdefault(self.last_backward, {})
                place = receiver.receivable[key]
                low = gradient.to(self.cast.get(index, gradient.dtype))
                sums[place] = sums[place] + low if place in sums else low
                given[index] = None
        return given

    def _receiver(self, key: Any) -> GradientHandoff | None:
        """The last call before this one that can receive that sum and whose backward comes later in this pass."""
        for call in reversed(self.earlier):
            node = call()
            handoff: GradientHandoff | None = None if node is None else node.handoff
            if (
                handoff
                and key in handoff.receivable
                and handoff.last_backward != self.last_backward
                and runs_in_this_backward(node)
            ):
                return handoff
        return None
