"""The cost models by name. A new cost model is registered by one line in `_MODELS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gcsolve.cost.base import CostModel, Flops, OpInfo, Roofline
from gcsolve.cost.devices import DeviceSpec
from gcsolve.errors import ArgumentError


def _measured(device: DeviceSpec) -> CostModel:
    from gcsolve.cost.measured import Measured  # torch; the other models need none

    return Measured.on(device)


_MODELS: dict[str, Callable[[DeviceSpec], CostModel]] = {
    "flops": lambda _device: Flops(),
    "roofline": Roofline,
    "measured": _measured,
}


@dataclass(frozen=True)
class UserCost(CostModel):
    """The user's cost object `model`, which is not a subclass of `CostModel`, with the methods that it lacks."""

    model: Any

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.model.name

    @property
    def unit(self) -> str:  # type: ignore[override]
        return self.model.unit

    def cost(self, op: OpInfo) -> float:
        return self.model.cost(op)


def costs() -> tuple[str, ...]:
    """The names that `cost=` accepts."""
    return ("auto", *_MODELS)


def get_cost(cost: Any, device: DeviceSpec) -> CostModel:
    """The cost model named `cost` for `device` ("auto": roofline), or `cost` itself if it is a cost model.

    Raises:
        ArgumentError: no model has that name (the text lists the names), `cost` is not a cost model, or it is "measured" and
            this machine does not have that device.
    """
    if isinstance(cost, str):
        name = "roofline" if cost == "auto" else cost
        if name in _MODELS:
            return _MODELS[name](device)
        raise ArgumentError(f"cost={cost!r} is not known; known cost models: {', '.join(costs())}")
    if isinstance(cost, CostModel):
        return cost
    if callable(getattr(cost, "cost", None)) and hasattr(cost, "name") and hasattr(cost, "unit"):
        return UserCost(cost)
    raise ArgumentError(f"cost={cost!r} is neither a name nor an object with cost(op); names: {', '.join(costs())}")
