"""Several planned calls in one backward: the gradients of a weight are summed in eager's order and precision.

Eager adds the gradients of a weight one by one, as the backward comes to its uses. A planned call has a sum of its own. So
a call hands what it has on to the call before it, whose backward is still to come in the same pass of autograd, where

- that call uses the weight more than once (tied weights): its own sum then begins with what it was handed;
- both are in one autocast block, and it casts the weight. Eager casts a weight once in a block, and all gradients meet at
  that cast in the lower precision, before their sum is cast back. Nothing is lost on the way: a gradient that was cast to
  float32 holds the very numbers of the lower precision.
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

Handed = dict[int, torch.Tensor]
"""Position of a weight among a call's inputs -> the sum of the gradients of later calls."""


def first_sums(joint: Joint, backward: Collection[fx.Node]) -> dict[fx.Node, int]:
    """node that adds the first two gradients of an input, in the precision in which autograd sums them -> position of the
    input; for the inputs that are used more than once."""
    graph = joint.graph_module.graph
    made: Any = graph.output_node().args[0]
    primals = graph.find_nodes(op="placeholder")[: len(joint.inputs)]
    cast = dict(joint.cast_weights)
    graded = _ancestors([made[position] for position in joint.tangents]) - set(backward)
    found: dict[fx.Node, int] = {}
    for position, at in joint.gradients:
        node, read = made[position], primals[at]
        if at in cast:
            node = node.all_input_nodes[0]
            read = next(user for user in read.users if user in graded)
        uses = sum(user in graded for user in read.users)
        sums = [node] if uses > 1 and is_sum_of_gradients(node) else []
        while (
            sums and len(sums) < uses - 1 and is_sum_of_gradients(first := sums[-1].args[0]) and len(first.users) == 1
        ):
            sums.append(first)  # nothing else reads it: what is added to it reaches no other gradient
        if sums:
            found[sums[-1]] = at
    return found


def _ancestors(nodes: Collection[fx.Node]) -> set[fx.Node]:
    found, stack = set(nodes), list(nodes)
    while stack:
        new = [node for node in stack.pop().all_input_nodes if node not in found]
        found.update(new)
        stack += new
    return found


def begun(gradient: torch.Tensor, handed: Handed, at: int) -> torch.Tensor:
    """The first gradient of a sum, added to what was handed for it."""
    so_far = handed.pop(at, None)
    return gradient if so_far is None else so_far + gradient


@dataclass(eq=False)
class _Block:
    """`cast`: autograd's node of a cast that autocast keeps as long as the block lasts."""

    cast: Any


class _Here(threading.local):
    """Of this thread: the last block by what is cast to what, and autograd's nodes of the calls that take what is handed."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[torch.device, torch.dtype], _Block] = {}
        self.calls: list[weakref.ref[Any]] = []


_here = _Here()


@contextlib.contextmanager
def block_goes_on() -> Iterator[None]:
    """Planning makes autocast forget its casts; the autocast block around it is the same afterwards."""
    lasting = [(key, block) for key, block in _here.blocks.items() if _cast_of_block(*key) is block.cast]
    yield
    for key, block in lasting:
        block.cast = _cast_of_block(*key)


def _block(device: torch.device, dtype: torch.dtype) -> _Block:
    cast = _cast_of_block(device, dtype)
    block = _here.blocks.get((device, dtype))
    if block is None or block.cast is not cast:
        block = _here.blocks[device, dtype] = _Block(cast)
    return block


def _cast_of_block(device: torch.device, dtype: torch.dtype) -> Any:
    """Autograd's node of one cast, always the same, that autocast keeps until the outermost block ends."""
    weight = _probe(device)
    with torch.enable_grad(), torch.autocast(device.type, dtype):
        return torch.mm(weight, weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


@functools.cache
def _probe(device: torch.device) -> torch.Tensor:
    return torch.ones(1, 1, device=device, requires_grad=True)


class Handing:
    """What one planned call hands on and is handed; autograd's node of the call holds it as `handing`.

    Args:
        node: that node.
        weights: what the call has gradients of, by position among its inputs.
        cast: those that autocast casts for all their uses -> the dtype that it casts them to.
        sums: those whose sum begins with what the call is handed.
    """

    def __init__(
        self,
        node: Any,
        weights: Mapping[int, torch.Tensor],
        cast: Mapping[int, torch.dtype],
        sums: Collection[int],
    ) -> None:
        self.earlier = _here.calls = [call for call in _here.calls if call() is not None]
        self.cast = cast
        self.handed: dict[int, Handed] = {}
        self.last_backward = -1
        self.keys: dict[int, Any] = {}
        if not (cast or sums or self.earlier):
            return
        blocks = {place: _block(*place) for place in {(weights[at].device, dtype) for at, dtype in cast.items()}}
        for at, weight in weights.items():
            if weight.is_leaf:  # autograd's graph holds on to it, so that its id stays its own
                self.keys[at] = id(weight), blocks[weight.device, cast[at]] if at in cast else None
        self.takes = {self.keys[at]: at for at in {*cast, *sums} if at in self.keys}
        if self.takes:
            _here.calls = [*self.earlier, weakref.ref(node)]

    def take(self) -> Handed:
        """What this call was handed in the pass of autograd that is under way."""
        self.last_backward = current_backward()
        return self.handed.pop(self.last_backward, {})

    def hand_on(self, gradients: Mapping[int, torch.Tensor | None], handed: Handed) -> dict[int, torch.Tensor | None]:
        """What autograd is to be given of those gradients; `handed` is what none of them has begun with."""
        given = dict(gradients)
        for at, so_far in handed.items():
            own = gradients[at]
            given[at] = (so_far if own is None else so_far + own.to(so_far.dtype)).to(torch.float32)
        for at, key in self.keys.items() if self.earlier else ():
            gradient = given[at]
            to_come = None if gradient is None else self._to_come(key)
            if gradient is not None and to_come is not None:
                into = to_come.handed.setdefault(self.last_backward, {})
                low = gradient.to(self.cast.get(at, gradient.dtype))
                there = into.get(to_come.takes[key])
                into[to_come.takes[key]] = low if there is None else there + low
                given[at] = None
        return given

    def _to_come(self, key: Any) -> Handing | None:
        """The last call before this one that takes it and whose backward comes later in this pass."""
        for call in reversed(self.earlier):
            node = call()
            taker: Handing | None = None if node is None else node.handing
            if (
                taker
                and key in taker.takes
                and taker.last_backward != self.last_backward
                and runs_in_this_backward(node)
            ):
                return taker
        return None
