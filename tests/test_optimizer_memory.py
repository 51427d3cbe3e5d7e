"""Optimizer memory against the real classes, and its place in the plan: state, masters, temporaries, old gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import gcsolve
from gcsolve.cost.optimizer_memory import optimizer_memory
from gcsolve.errors import ArgumentError
from gcsolve.ops.peak_meter import PeakMeter
from tests.models import MLP

SHAPES = ((500, 16), (2000, 16), (100, 16), (3000, 16), (3000, 16), (77,))


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]


REAL: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam": lambda p: optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p),
    "AdamW foreach": lambda p: optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: optim.AdamW(p, fused=True),
    "Adagrad": lambda p: optim.Adagrad(p),
    "RMSprop foreach": lambda p: optim.RMSprop(p, foreach=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", REAL)
def test_bytes_are_those_that_the_real_optimizer_takes(name: str, dtype: torch.dtype) -> None:
    mine = parameters(dtype)
    made = REAL[name](mine)
    for p in mine:
        p.grad = torch.ones_like(p)
    made.step()
    with PeakMeter() as meter:
        made.step()
    state = sum(t.nbytes for s in made.state.values() for t in s.values() if isinstance(t, torch.Tensor))
    found = optimizer_memory(REAL[name](parameters(dtype)), parameters(dtype))
    assert found.state_bytes == state
    assert abs(found.step_bytes - meter.peak_bytes) <= 64  # a few scalars come and go


def test_on_cuda_all_parameters_are_stepped_at_once_and_counters_stay_on_the_cpu() -> None:
    elements = sum(p.numel() for p in parameters())
    found = optimizer_memory(optim.AdamW, parameters(), "cuda")
    assert found.state_bytes == 8 * elements
    assert found.step_bytes == 4 * elements
    loop = optimizer_memory(optim.AdamW(parameters(), foreach=False), parameters(), "cuda")
    assert loop.step_bytes == 3 * 4 * 3000 * 16  # two of the one being stepped, one left from the one before
    fused = optimizer_memory(optim.AdamW(parameters(), fused=True), parameters(), "cuda")
    assert (fused.state_bytes, fused.step_bytes) == (8 * elements + 4 * len(SHAPES), 0)


def test_state_is_rounded_as_the_allocator_rounds() -> None:
    one = [nn.Parameter(torch.zeros(5))]
    assert (
        optimizer_memory(
            optim.SGD(one, lr=0.1, momentum=0.9), one, round_bytes=lambda n: -(-n // 512) * 512
        ).state_bytes
        == 512
    )


def test_only_the_groups_of_an_instance_count() -> None:
    mine = parameters()
    assert optimizer_memory(optim.AdamW(mine[:1]), mine).state_bytes == 8 * 8000 + 4
    assert optimizer_memory(optim.AdamW(parameters()), mine) == optimizer_memory(optim.AdamW(mine), mine)  # a copy's


def test_float32_groups_of_a_16_bit_model_are_its_master_weights() -> None:
    half, masters = parameters(torch.bfloat16), parameters()
    elements = sum(p.numel() for p in half)
    found = optimizer_memory(optim.SGD(masters, lr=0.1, momentum=0.9), half)
    assert (found.master_bytes, found.state_bytes) == (4 * elements, 4 * elements)
    assert found.step_bytes == 4 * elements  # their gradients come and go within the step
    plan = gcsolve.solve(
        MLP().bfloat16(), torch.randn(64, 32).bfloat16(), budget=1.0, optimizer=optim.SGD(MLP().parameters(), 0.1)
    )
    assert plan.breakdown["master weights"] == sum(-(-4 * p.numel() // 64) * 64 for p in MLP().parameters())


def test_bytes_per_parameter_for_an_optimizer_that_is_not_here() -> None:
    assert optimizer_memory(2.25, parameters()).state_bytes == int(2.25 * sum(p.numel() for p in parameters()))
    with pytest.raises(ArgumentError, match=r"LBFGS could not be tried.*bytes per parameter, a number"):
        optimizer_memory(optim.LBFGS, parameters())


def test_a_class_that_takes_matrices_only_says_so() -> None:
    with pytest.raises(
        ArgumentError, match=r"optimizer=Muon does not take this model's parameters \(.*2D.*instance made of"
    ):
        optimizer_memory(optim.Muon, parameters())
    assert optimizer_memory(optim.Muon, parameters()[:2]).state_bytes > 0


class Codes(torch.Tensor):
    """A state in 8 bits as torchao holds it: a tensor that wraps its codes and a scale for every 256 of them."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Codes:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


class EightBit(optim.Optimizer):
    """Momentum in 8 bits, of fewer than 4096 elements in 32, as bitsandbytes and torchao do."""

    def __init__(self, parameters: Any, wrapped: bool = False) -> None:
        super().__init__(parameters, {"wrapped": wrapped})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if self.state[p]:
                    continue
                if p.numel() < 4096:
                    self.state[p]["momentum"] = torch.zeros(p.shape)
                    continue
                codes, scale = torch.zeros(p.shape, dtype=torch.uint8), torch.zeros(p.numel() // 256)
                parts = {"momentum": Codes(codes, scale)} if group["wrapped"] else {"momentum": codes, "scale": scale}
                self.state[p].update(parts)


@pytest.mark.parametrize("wrapped", [False, True], ids=["two tensors", "one that wraps them"])
def test_states_in_8_bits_are_those_of_parameters_from_4096_elements_on(wrapped: bool) -> None:
    mine = [nn.Parameter(torch.zeros(n)) for n in (100, 4000, 4096, 1 << 20)]
    found = optimizer_memory(EightBit(mine, wrapped), mine)
    assert found.state_bytes == 4 * 4100 + 4096 + 4 * 16 + (1 << 20) + 4 * (1 << 12)


class Wide(nn.Module):
    """Weights far larger than activations: the optimizer's step is where the peak sits."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 2048), nn.Linear(2048, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x))).square().mean()


@pytest.mark.parametrize("accumulate", [False, True], ids=["fresh", "accumulated"])
@pytest.mark.parametrize("rows", [8, 512], ids=["few rows", "many rows"])
@pytest.mark.parametrize(
    ("make", "temporaries"),
    [
        (None, False),
        (lambda p: optim.SGD(p, lr=0.1, momentum=0.9), False),
        (optim.AdamW, True),
        (lambda p: optim.AdamW(p, foreach=True), True),
        (lambda p: optim.AdamW(p, fused=True), False),
    ],
    ids=["none", "momentum", "loop", "foreach", "fused"],
)
def test_the_whole_steps_peak_is_the_measured_one_and_the_breakdown_sums_to_it(
    make: Any, temporaries: bool, rows: int, accumulate: bool
) -> None:
    model = Wide()
    optimizer = make if make is None or isinstance(make, type) else make(model.parameters())
    plan = gcsolve.solve(
        model,
        torch.randn(rows, 64),
        budget=1.0,
        solver="store_all",
        optimizer=optimizer,
        gradient_accumulation=accumulate,
    )
    assert sum(plan.breakdown.values()) == plan.peak_bytes
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert plan.breakdown["accumulated gradients"] == (weights if accumulate else 0)
    report = plan.verify(steps=1, repeats=0)
    assert plan.peak_bytes == pytest.approx(report.measured_peak_bytes, rel=2e-3)
    assert plan.peak_bytes >= report.measured_peak_bytes
    in_optimizer = rows == 8 and temporaries and not accumulate
    assert ("optimizer.step()" in plan.peak_at) == in_optimizer
    assert ("inside optimizer.step()" in plan.summary()) == in_optimizer


def test_a_budget_below_the_optimizers_step_says_so() -> None:
    with pytest.raises(gcsolve.InfeasibleBudget, match=r"optimizer\.step\(\)"):
        gcsolve.solve(Wide(), torch.randn(8, 64), budget=0.9, optimizer=optim.AdamW)


def test_gradient_accumulation_must_be_a_bool() -> None:
    with pytest.raises(ArgumentError, match="gradient_accumulation=4"):
        gcsolve.solve(MLP(), torch.randn(8, 32), budget=1.0, gradient_accumulation=4)  # type: ignore[arg-type]
