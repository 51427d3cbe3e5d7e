"""What one run of an op costs: the contract, and the two models that run nothing.

| model | unit | cost of an op |
|---|---|---|
| `flops` | flops | its FLOPs; without a formula, bytes moved / `BYTES_PER_FLOP` |
| `roofline` | s | max(FLOPs / peak for the dtype, bytes moved / bandwidth) + launch + random numbers drawn; a view: nothing |
| `measured` | s | its run on this machine, see `measured.py`; roofline for what cannot be run alone |
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from gcsolve.cost.devices import DeviceSpec

if TYPE_CHECKING:
    from torch import fx

# An elementwise float32 op does about one FLOP for the 8 to 12 bytes it moves; 4 leans to the side of counting it.
BYTES_PER_FLOP = 4


@dataclass(frozen=True, slots=True)
class OpInfo:
    """What a cost model may know of one op.

    `target`: the op's name. `flops`: 0 when `has_formula` is False. `bytes_moved`: read + written; 0 for a view.
    `dtype`: of its arithmetic, as in "float32" or "tf32". `device`: type of the device it was traced on. `seconds`: what
    `register_cost` was told of it, else None. `draws`: random numbers drawn. `signature`: equal for two ops that run alike.
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
    """What the cost of one op rests on; the value says it to a person."""

    MODEL = "the model's own rule"
    BYTES = "bytes moved: the op has no FLOP formula"
    FALLBACK = "the roofline: the op could not be measured"


@runtime_checkable
class CostModel(Protocol):
    """What one run of an op costs: `cost(op)`, a finite number ≥ 0 in `unit`, the same for the same op.

    An object of the user's needs `name`, `unit` and `cost`; subclassing gives it the other two methods.
    """

    name: ClassVar[str]
    unit: ClassVar[str]

    def cost(self, op: OpInfo) -> float: ...

    def prepare(self, nodes: Sequence[fx.Node], progress: bool | None = False) -> CostModel:
        """The model, ready for the ops of one graph. A model that measures does it here.

        Args:
            nodes: the graph's fx nodes, with fake tensors in `meta["val"]`.
            progress: show a bar; None: only on a terminal.
        """
        del nodes, progress
        return self

    def basis(self, op: OpInfo) -> Basis:
        """What `cost(op)` rests on."""
        without_formula = not op.has_formula and (op.seconds is None or self.unit == "flops")
        return Basis.BYTES if without_formula else Basis.MODEL


@dataclass(frozen=True)
class Flops(CostModel):
    """Count arithmetic alone, as the literature's overhead figures do."""

    name: ClassVar[str] = "flops"
    unit: ClassVar[str] = "flops"

    def cost(self, op: OpInfo) -> float:
        return float(op.flops) if op.has_formula else op.bytes_moved / BYTES_PER_FLOP


@dataclass(frozen=True)
class Roofline(CostModel):
    """Seconds on `device` if every op ran at the device's own limits."""

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
