"""What one run of an op costs: the contract, and the two models that run nothing.

| model | unit | cost of an op |
|---|---|---|
| `flops` | flops | its FLOPs; without a formula, bytes moved / `BYTES_PER_FLOP` |
| `roofline` | s | max(FLOPs / peak for the dtype, bytes moved / bandwidth) + launch + random numbers drawn; a view: nothing |
| `measured` | s | its run on this machine, see `measured.py`; roofline for what cannot be run alone |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

from gcsolve.cost.devices import DeviceSpec
from gcsolve.errors import ArgumentError

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


@runtime_checkable
class CostModel(Protocol):
    """`cost(op)`: a finite number ≥ 0 in `unit`, the same for the same op."""

    name: ClassVar[str]
    unit: ClassVar[str]

    def cost(self, op: OpInfo) -> float: ...


@dataclass(frozen=True)
class Flops:
    """Count arithmetic alone, as the literature's overhead figures do."""

    name: ClassVar[str] = "flops"
    unit: ClassVar[str] = "flops"

    def cost(self, op: OpInfo) -> float:
        return float(op.flops) if op.has_formula else op.bytes_moved / BYTES_PER_FLOP


@dataclass(frozen=True)
class Roofline:
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


def _measured(device: DeviceSpec) -> CostModel:
    from gcsolve.cost.measured import Measured

    return Measured.on(device)


_MODELS: dict[str, Callable[[DeviceSpec], CostModel]] = {
    "flops": lambda _device: Flops(),
    "roofline": Roofline,
    "measured": _measured,
}


def costs() -> tuple[str, ...]:
    """Names that `cost=` accepts."""
    return ("auto", *_MODELS)


def get_cost(cost: str | CostModel, device: DeviceSpec) -> CostModel:
    """The cost model of that name for `device` ("auto": roofline), or the model itself.

    Raises:
        ArgumentError: no model has that name (the text lists the known), or "measured" for a device that is not here.
    """
    if isinstance(cost, str):
        name = "roofline" if cost == "auto" else cost
        if name in _MODELS:
            return _MODELS[name](device)
        raise ArgumentError(f"cost={cost!r} is not known; known cost models: {', '.join(costs())}")
    if isinstance(cost, CostModel):
        return cost
    raise ArgumentError(f"cost={cost!r} is neither a name nor an object with cost(op); names: {', '.join(costs())}")
