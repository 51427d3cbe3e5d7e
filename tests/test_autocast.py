"""Backward inside the autocast block, several calls in one block, kernels that autocast reaches inside."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gcsolve
from gcsolve.errors import ArgumentError, CallError, TraceError
from tests.test_exact import KeepNothing
from tests.training import Of, assert_same, x


def _attention(dropout: float) -> nn.Module:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(m.a(x), m.b(x), x, dropout_p=dropout)

    return Of(forward, a=nn.Linear(16, 16), b=nn.Linear(16, 16))


INSIDE: dict[str, tuple[Any, torch.Tensor]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16)), x(8, 16)),
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)), x(2, 4, 8, 8)),
    "bilinear": (
        lambda: Of(lambda m, x: m.a(m.b(x, x.tanh())), a=nn.Linear(16, 16), b=nn.Bilinear(16, 16, 16)),
        x(8, 16),
    ),
    "attention": (lambda: _attention(0.0), x(2, 2, 8, 16)),
    "attention with dropout": (lambda: _attention(0.1), x(2, 2, 8, 16)),
}


def _block() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def _trained(module: nn.Module, inputs: torch.Tensor, *, inside: bool) -> dict[str, Any]:
    """Three steps; loss and backward inside the autocast block, or outside."""
    left: dict[str, Any] = {}
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    torch.manual_seed(1)
    for step in range(3):
        optimizer.zero_grad()
        with _block():
            output = module(inputs)
            loss = F.mse_loss(output, torch.zeros_like(output))
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        left |= {f"{step} {name}": p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        left[f"loss {step}"] = loss.detach().clone()
        optimizer.step()
    return left


@pytest.mark.parametrize("name", INSIDE)
def test_backward_inside_the_block(name: str) -> None:
    """Where eager's casts make a difference there, a plan is for the one or the other, and refuses the other."""
    build, inputs = INSIDE[name]
    torch.manual_seed(0)
    model = build()
    expected = _trained(copy.deepcopy(model), inputs, inside=True)
    outside = _trained(copy.deepcopy(model), inputs, inside=False)
    with _block():
        plan = gcsolve.solve(copy.deepcopy(model), inputs, budget="1MB", solver=KeepNothing())
        other = gcsolve.solve(model, inputs, budget="1MB", solver=KeepNothing(), autocast_backward=True)
    if name in ("attention with dropout", "bilinear"):
        assert any(not torch.equal(expected[key], outside[key]) for key in expected)
        with pytest.raises(
            CallError, match=r"inside an autocast block.*aten\.(bmm|_trilinear).*autocast_backward=True"
        ):
            _trained(copy.deepcopy(plan.module), inputs, inside=True)
        assert_same(outside, _trained(plan.module, inputs, inside=False))
    else:
        assert_same(expected, outside)
        assert_same(expected, _trained(plan.module, inputs, inside=True))
    assert_same(expected, _trained(copy.deepcopy(other.module), inputs, inside=True))
    with pytest.raises(CallError, match=r"called outside the autocast block.*plan without autocast_backward"):
        _trained(other.module, inputs, inside=False)


def test_a_plan_for_backward_inside_the_block_is_verified_and_saved_as_such(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = _attention(0.1), x(4, 4, 64, 16)
    with _block():
        plan = gcsolve.solve(model, inputs, budget=1.0, autocast_backward=True)
    report = plan.verify(steps=2, repeats=0)
    assert report.differences == ()
    assert abs(report.prediction_error) <= 0.02
    plan.save(tmp_path / "plan.json")
    expected = _trained(copy.deepcopy(model), inputs, inside=True)
    with _block():
        loaded = gcsolve.load_plan(tmp_path / "plan.json", model)
    assert_same(expected, _trained(loaded.module, inputs, inside=True))
    with pytest.raises(ArgumentError, match="autocast_backward=1 is neither True nor False"):
        gcsolve.solve(model, inputs, budget=1.0, autocast_backward=1)  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(torch.linalg, "polar"), reason="this torch has none")
def test_a_kernel_that_casts_inside_and_is_not_planned_is_refused() -> None:
    model = Of(lambda m, x: torch.linalg.polar(m.a(x).float())[0], a=nn.Linear(8, 8))
    with _block(), pytest.raises(TraceError, match=r"torch\.linalg\.polar at .*test_autocast\.py.*enabled=False"):
        gcsolve.solve(model, x(8, 8), budget=1.0)


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("leaf", [True, False])
def test_an_input_that_several_ops_cast(leaf: bool, calls: int) -> None:
    """Eager casts a leaf once in a block and sums its gradients in bfloat16; what another op made is cast by each op."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*(layer(x)[None] for layer in (m.a, m.b, m.c)))

    torch.manual_seed(0)
    model = Of(forward, **{name: nn.Linear(16, 16) for name in "abc"})

    def gradient(module: nn.Module) -> torch.Tensor:
        inputs = x(8, 16).requires_grad_()
        with _block():
            outputs = [module(inputs if leaf else inputs * (1 + k)) for k in range(calls)]
        sum((k + 1) * o.float().square().sum() for k, o in enumerate(outputs)).backward()  # type: ignore[union-attr]
        assert inputs.grad is not None
        return inputs.grad

    with _block():
        plan = gcsolve.solve(copy.deepcopy(model), x(8, 16).requires_grad_(), budget="1MB")
    assert torch.equal(gradient(model), gradient(plan.module))
