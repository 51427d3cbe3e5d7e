"""The interface of cost models, which say what one run of an op costs, and the two models that run nothing.

| model | unit | cost of one run of an op |
|---|---|---|
| `flops` | flops | its FLOPs; without a formula, bytes moved / `BYTES_PER_FLOP` |
| `roofline` | s | max(FLOPs / peak for the dtype, bytes moved / bandwidth) + launch + random numbers drawn; 0 for a view |
| `measured` | s | measured on this machine, see `measured.py`; roofline for an op that cannot be run alone |
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from gcsolve.cost.devices import DeviceSpec

if TYPE_CHECKING:
    from torch import fx

# An elementwise float32 op does about one FLOP for each 8 to 12 bytes that it moves; 4 rather overestimates its cost.
BYTES_PER_FLOP = 4


@dataclass(frozen=True, slots=True)
class OpInfo:
    """The facts about one op that a cost model may use.

    Attributes:
        target: the op's name, as in "aten.mm.default".
        flops: FLOPs of one run; 0 if `has_formula` is False.
        has_formula: whether a formula for the op's FLOPs is known.
        bytes_moved: bytes read + bytes written; 0 for a view.
        dtype: the dtype of its arithmetic, as in "float32" or "tf32".
        device: the type of the device it was traced on.
        seconds: the seconds that a function given to `register_cost` returned for it; None without one.
        draws: the number of random numbers that it draws.
        signature: text that is equal for two ops whose runs cost the same.
    """

    target: str
    flops: int
    has_formula: bool
    bytes_moved: int
    dtype: str
    device: str
    seconds: float | None = None
    draws: int = 0
    signature: str = field(default="", compare=False)


class Basis(enum.Enum):
    """Where the cost of one op comes from; the values are texts for people."""

    MODEL = "the model's own rule"
    BYTES = "bytes moved: the op has no FLOP formula"
    FALLBACK = "the roofline: the op could not be measured"


@runtime_checkable
class CostModel(Protocol):
    """A cost model: `cost(op)` is a finite number ≥ 0 in `unit`, the same for equal ops.

    An object of the user's needs `name`, `unit` and `cost`; a subclass inherits the other two methods.
    """

    name: ClassVar[str]
    unit: ClassVar[str]

    def cost(self, op: OpInfo) -> float: ...

    def prepare(self, nodes: Sequence[fx.Node], progress: bool | None = False) -> CostModel:
        """The model for the ops of one graph. A model that measures ops does so here.

        Args:
            nodes: the graph's fx nodes, with fake tensors in `meta["val"]`.
            progress: show a progress bar; None: only in a terminal or a watched notebook.
        """
        del nodes, progress
        return self

    def basis(self, op: OpInfo) -> Basis:
        """Where `cost(op)` comes from."""
        without_formula = not op.has_formula and (op.seconds is None or self.unit == "flops")
        return Basis.BYTES if without_formula else Basis.MODEL


@dataclass(frozen=True)
class Flops(CostModel):
    """FLOPs alone, as in the overhead figures of the literature."""

    name: ClassVar[str] = "flops"
    unit: ClassVar[str] = "flops"

    def cost(self, op: OpInfo) -> float:
        return float(op.flops) if op.has_formula else op.bytes_moved / BYTES_PER_FLOP


@dataclass(frozen=True)
class Roofline(CostModel):
    """Seconds on `device` if every op ran at the device's peak rates."""

    device: DeviceSpec
    name: ClassVar[str] = "roofline"
    unit: ClassVar[str] = "s"

    def cost(self, op: OpInfo) -> float:
        if op.seconds is not None:
            return op.seconds
        if not op.flops and not op.bytes_moved:
            return 0.0
        compute_s = op.flops / self.device.peak_for(op.dtype)
        memory_s = op.bytes_moved / self.device.bandwidth_bytes_per_s
        return max(compute_s, memory_s) + self.device.launch_s + op.draws * self.device.draw_s
