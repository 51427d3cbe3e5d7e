"""cost/base.py and registry.py: the cost models, by name and as objects."""

from __future__ import annotations

import pytest
import torch

from gcsolve.cost.base import BYTES_PER_FLOP, Flops, OpInfo, Roofline
from gcsolve.cost.devices import DeviceSpec
from gcsolve.cost.flops import op_info
from gcsolve.cost.registry import UserCost, get_cost
from gcsolve.errors import ArgumentError
from tests.tracing import CPU, H100, the, traced

aten = torch.ops.aten


def info(flops: int = 0, has_formula: bool = False, bytes_moved: int = 0, dtype: str = "float32") -> OpInfo:
    return OpInfo("op", flops, has_formula, bytes_moved, dtype, "cpu")


def test_flops_model():
    assert Flops().cost(info(100, True, 8)) == 100
    assert Flops().cost(info(bytes_moved=40)) == 40 / BYTES_PER_FLOP
    assert Flops().unit == "flops"


def test_roofline_takes_the_slower_side_and_the_launch():
    spec = DeviceSpec("d", 1, 10.0, {"float32": 100.0, "bfloat16": 400.0}, launch_s=0.5)
    model = Roofline(spec)
    assert model.cost(info(1000, True, 10)) == 10.5
    assert model.cost(info(1000, True, 1000)) == 100.5
    assert model.cost(info(1000, True, 10, "bfloat16")) == 3.0
    assert model.cost(info(1000, True, 10, "int8")) == 10.5  # no figure: float32's
    assert model.cost(info()) == 0.0  # a view


def test_random_numbers_take_time_of_their_own():
    """A CPU draws one after the other; a GPU hides it behind the memory."""
    (node,) = traced(lambda x: torch.native_dropout(x, 0.1, True), torch.randn(4, 100))[:1]
    drawing = op_info(node)
    assert drawing.draws == 400
    assert Roofline(CPU).cost(drawing) == pytest.approx(
        drawing.bytes_moved / CPU.bandwidth_bytes_per_s + CPU.launch_s + 400 * CPU.draw_s
    )
    assert H100.draw_s == 0
    (plain,) = traced(lambda x: x * 2, torch.randn(4, 100))
    assert op_info(plain).draws == 0
    attention = traced(lambda q: aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[0], torch.randn(1, 2, 8, 4))
    assert op_info(the(attention, aten._scaled_dot_product_flash_attention_for_cpu.default)).draws == 0


def test_get_cost_by_name_and_by_object():
    assert get_cost("auto", H100) == Roofline(H100)
    assert get_cost("flops", H100) == Flops()

    class Mine:
        name, unit = "mine", "s"

        def cost(self, op: OpInfo) -> float:
            return 1.0

    mine = Mine()
    assert get_cost(mine, H100) == UserCost(mine)
    with pytest.raises(ArgumentError, match=r"'speed'.*auto, flops, roofline, measured"):
        get_cost("speed", H100)
    with pytest.raises(ArgumentError, match="neither a name nor"):
        get_cost(3, H100)  # type: ignore[arg-type]
