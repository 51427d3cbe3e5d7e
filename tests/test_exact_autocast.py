"""Autocast around the call, inside forward, and backward outside the block: gradients are eager's bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gcsolve
from tests import models
from tests.training import KeepNothing, Of, assert_same, train
from tests.training import x as _x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_around_the_call_backward_outside(dtype: torch.dtype) -> None:
    def under(model: nn.Module) -> Any:
        class Under(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = model

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                with torch.autocast("cpu", dtype):
                    y = self.inner(x)
                return y.float()

        return Under()

    torch.manual_seed(0)
    model, x = models.MLP(3, 16), _x(8, 16)
    plain, planned = copy.deepcopy(model), copy.deepcopy(model)
    with torch.autocast("cpu", dtype):
        plan = gcsolve.solve(planned, x, budget=1.0)
    assert_same(train(under(plain), x), train(under(plan.module), x))
    assert len(plan.module._gcsolve.cache) == 1  # planned under autocast: no second plan was needed


@pytest.mark.parametrize("around", [True, False])
def test_autocast_casts_a_shared_weight_once(around: bool) -> None:
    """So its gradients are summed in the lower precision; not that of a cast that the model writes itself."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=not around):
            for _ in range(3):
                x = torch.tanh(m.a(x))
            x = x @ m.a.weight.to(torch.bfloat16) + m.rnn(x.float())[0]
            with torch.autocast("cpu", enabled=False):
                x = m.a(x.float())
        return x

    torch.manual_seed(0)
    model = Of(
        forward if not around else lambda m, x: sum(m.a(torch.tanh(m.a(x))) for _ in range(3)), a=nn.Linear(8, 8)
    )
    model.rnn = nn.GRU(8, 8)
    left = []
    for module in (copy.deepcopy(model), None):
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            module = module or gcsolve.solve(model, _x(16, 8), budget="1GB", solver=KeepNothing()).module
            output = module(_x(16, 8))
        output.float().square().mean().backward()
        left.append({name: p.grad for name, p in module.named_parameters()})
    assert_same(*left)


class _Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return (x.float() @ w) ** 3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, w = ctx.saved_tensors
        inner = gradient.float() * 3 * (x.float() @ w) ** 2
        return (inner @ w.t()).to(x.dtype), x.float().t() @ inner


@pytest.mark.parametrize("around", [True, False])
@pytest.mark.parametrize("kind", ["attention", "own backward"])
def test_backward_outside_the_autocast_block_is_not_under_autocast(kind: str, around: bool) -> None:
    """Backward formulas made of ops that autocast would cast: torch's, of attention with dropout, and an author's own."""

    def ops(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.a(x)
        if kind == "own backward":
            return _Cubed.apply(y, m.a.weight)
        heads = y.view(2, 4, 4, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, m.b(heads), heads, dropout_p=0.1)

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=not around):
            return ops(m, x)

    torch.manual_seed(0)
    model = Of(ops if around else forward, a=nn.Linear(16, 16), b=nn.Linear(4, 4))
    x = _x(8, 16).requires_grad_()

    def gradients(module: nn.Module | None, inside: bool = False) -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=around or inside):
            module = module or gcsolve.solve(model, x, budget="1MB", solver=KeepNothing()).module
            torch.manual_seed(1)
            loss = module(x).float().square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        left = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        left["x"], x.grad = x.grad, None
        return left

    expected = gradients(copy.deepcopy(model))
    other = gradients(copy.deepcopy(model), inside=True)
    assert any(not torch.equal(expected[name], other[name]) for name in expected)  # else nothing is shown below
    assert_same(expected, gradients(None))


def test_planned_without_autocast_then_called_under_it_plans_again() -> None:
    torch.manual_seed(0)
    model, x = models.MLP(3, 16), _x(8, 16)
    plain, plan = copy.deepcopy(model), gcsolve.solve(model, x, budget=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = plain(x), plan.module(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(found, expected)
