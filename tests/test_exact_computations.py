"""Kinds of computation, dtypes and shapes of outputs as people write them: bitwise the untouched model's results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gcsolve
from gcsolve.errors import TraceError
from tests import models
from tests.training import (
    KeepNothing,
    Of,
    assert_equal,
    assert_same,
    assert_trains_the_same,
    gradients,
    planned_pair,
    train,
    x,
)


def _experts(m: Any, x: torch.Tensor) -> torch.Tensor:
    weights, chosen = m.gate(x).softmax(-1).topk(2, -1)
    return sum(e(x) * (weights * (chosen == k)).sum(-1, keepdim=True) for k, e in enumerate(m.experts))  # type: ignore[return-value]


def _choices(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(m.a(x))
    ordered, places = y.sort(1)
    best = y.max(1, keepdim=True).values + y.median(1, keepdim=True).values + y.kthvalue(3, 1, keepdim=True).values
    pooled = F.max_pool1d(y[None], 3, 1, 1)[0] + y.cummax(1).values
    return ordered * y.gather(1, places.flip(1)) + best + pooled + torch.where(y.argmax(1, keepdim=True) > 3, y, -y)


def _spectrum(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.fft.rfft(torch.tanh(m.a(x)).transpose(1, 2))
    y = torch.fft.irfft(torch.einsum("bik,iok->bok", y, m.weight), n=8).transpose(1, 2)
    z = torch.fft.fft2(torch.view_as_complex(torch.stack([y, y.sin()], -1)).to(torch.complex128))
    return torch.tanh(m.a((z.abs() + z.real).float()))


def _outputs(m: Any, x: torch.Tensor) -> dict[str, Any]:
    y = torch.tanh(m.a(x) * m.w)
    views = {
        "transposed": m.a.weight.t(),
        "slice": m.w[2:5],
        "detached": m.w.detach(),
        "detached slice": m.a.weight[1:].detach(),
        "tail": x[1:],
        "spread": y.sum(0, keepdim=True).expand(4, 8),
    }
    return {
        "input": x,
        "parameter": m.w,
        **views,
        "rows": y.unbind(0),
        "halves": y.chunk(2, 1),
        "parts": y.split([3, 5], 1),
    }


def _in_place(m: Any, x: torch.Tensor) -> Any:
    y = m.a(x)
    y[:, 2:4].mul_(2)
    y[:, 0] = y[:, 1] * 3
    y.view(2, 2, 8)[0].add_(1)
    z = F.relu(m.norm(m.conv(y.reshape(1, 4, 8))), inplace=True) * 1
    z.masked_fill_(z > 1, 0.5)
    z += 1
    z[..., ::2] *= 3
    out = torch.zeros(4, 8)
    out[torch.tensor([0, 2])] = z[0, :2]
    return out.scatter_add_(1, torch.zeros(4, 1, dtype=torch.long), z[0, :, :1]).tanh(), z.unbind(1)


def _force(m: Any, x: torch.Tensor) -> torch.Tensor:
    """The gradient of an energy, as in models of molecules."""
    x = x.detach().requires_grad_()
    (force,) = torch.autograd.grad(m.b(torch.tanh(m.a(x))).sum(), x, create_graph=True)
    return force


def _narrow_inside(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.inner(x).float()


def _recurrent(m: Any, x: torch.Tensor) -> torch.Tensor:
    state, out = torch.zeros(x.shape[1], 12), []
    for step in x:
        state = m.cell(step, state)
        out.append(state)
    return torch.stack(out)


COMPUTATIONS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "mixture of experts": lambda: (
        Of(_experts, gate=nn.Linear(16, 4), experts=nn.ModuleList(models.MLP(2, 16) for _ in range(4))),
        x(32, 16),
    ),
    "discrete choices": lambda: (Of(_choices, a=nn.Linear(16, 16)), x(8, 16)),
    "fft, complex64 and complex128": lambda: (
        Of(_spectrum, a=nn.Linear(4, 4), weight=nn.Parameter(torch.randn(4, 4, 5, dtype=torch.complex64))),
        x(3, 8, 4),
    ),
    "every kind of output": lambda: (Of(_outputs, a=nn.Linear(8, 8), w=nn.Parameter(torch.randn(8))), x(4, 8)),
    "every kind of output, input with gradient": lambda: (
        Of(_outputs, a=nn.Linear(8, 8), w=nn.Parameter(torch.randn(8))),
        x(4, 8).requires_grad_(),
    ),
    "in place": lambda: (
        Of(_in_place, a=nn.Linear(8, 8), conv=nn.Conv1d(4, 4, 3, padding=1), norm=nn.BatchNorm1d(4)),
        x(4, 8),
    ),
    "gradient in forward": lambda: (Of(_force, a=nn.Linear(8, 8), b=nn.Linear(8, 1)), x(8, 8)),
    "autocast inside": lambda: (Of(_narrow_inside, inner=models.MLP(2, 16)), x(8, 16)),
    "frozen embedding of integers": lambda: (
        nn.Sequential(nn.Embedding(10, 16).requires_grad_(False), models.MLP(2, 16)),
        torch.arange(10),
    ),
    "eval mode, input with gradient": lambda: (models.BatchNorm().eval(), x(4, 4, 8, 8).requires_grad_()),
}


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_computations(name: str) -> None:
    torch.manual_seed(0)
    assert_trains_the_same(*COMPUTATIONS[name]())


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_a_recurrent_loop_of_24_steps(cell: Any) -> None:
    torch.manual_seed(0)
    if cell is nn.LSTMCell:
        made: nn.Module = Of(lambda m, x, h: m.inner(x, (h, h))[0], inner=cell(8, 12))
    else:
        made = cell(8, 12)
    model, example = Of(_recurrent, cell=made), x(24, 4, 8)
    expected = train(copy.deepcopy(model), example)
    plan = gcsolve.solve(model, example, budget=0.9, solver="greedy")
    assert plan.overhead > 0
    assert_same(expected, train(plan.module, example))


def _chain(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = m.a(x)
    for _ in range(1200):
        x = torch.sin(x)
    return x


@pytest.mark.heavy
def test_a_chain_longer_than_pythons_stack() -> None:
    torch.manual_seed(0)
    model, example = Of(_chain, a=nn.Linear(8, 8)), x(64, 8)
    expected = train(copy.deepcopy(model), example)
    plan = gcsolve.solve(model, example, budget=0.5)
    assert plan.overhead > 0
    assert_same(expected, train(plan.module, example))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("first", [True, False])
def test_recurrent_layers(kind: Any, first: bool) -> None:
    """A width that no vector unit divides, an input with and without gradient, and dropout between the layers."""
    torch.manual_seed(0)
    layers = kind(8, 12, num_layers=2, bidirectional=True, batch_first=first, dropout=0.3)
    model, example = (
        Of(lambda m, x: m.layers(x if first else torch.tanh(m.a(x)))[0], a=nn.Linear(8, 8), layers=layers),
        x(3, 3, 8),
    )
    expected = train(copy.deepcopy(model), example)
    plan = gcsolve.solve(model, example, budget="1MB", solver=KeepNothing())
    assert_same(expected, train(plan.module, example))


def test_the_default_dtype_around_the_call_only() -> None:
    torch.manual_seed(0)
    model = Of(lambda m, x: torch.tanh(m.a(x)) * torch.ones(8) / 3 + torch.rand(4, 8), a=nn.Linear(8, 8))
    left: list[list[torch.Tensor | None]] = []
    example = x(4, 8)
    for module in planned_pair(model, example):
        torch.manual_seed(1)
        outputs = []
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            try:
                outputs.append(module(example))
            finally:
                torch.set_default_dtype(torch.float32)
            outputs[-1].sum().backward()
        left.append([*outputs, *gradients(module)])
    assert_equal(left)


class _SetsDefault(nn.Module):
    def __init__(self, explicit: bool) -> None:
        super().__init__()
        self.a, self.explicit = nn.Linear(8, 8), explicit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.set_default_dtype(torch.float64)
        try:
            places = torch.arange(8, dtype=torch.float64 if self.explicit else None)
            return torch.tanh(self.a(x)).double() * torch.ones(8) + places / 3 + torch.rand(8)
        finally:
            torch.set_default_dtype(torch.float32)


def test_the_default_dtype_inside_forward_only() -> None:
    torch.manual_seed(0)
    assert_trains_the_same(_SetsDefault(explicit=True), x(4, 8))
    with pytest.raises(TraceError, match=r"sets the default dtype, and aten\.div.* \(torch\.float64 in forward"):
        gcsolve.solve(_SetsDefault(explicit=False), x(4, 8), budget=1.0)


def test_frozen_layers_keep_nothing_and_the_peak_falls() -> None:
    """Nothing of the frozen half is kept for backward, and the measured peak falls as the predicted one does."""
    torch.manual_seed(0)
    whole, part = models.MLP(8, 64), models.MLP(8, 64)
    part.layers[:4].requires_grad_(False)
    plans = [gcsolve.solve(model, x(256, 64), budget=1.0) for model in (whole, part)]
    assert not [d for d in plans[1].decisions if d.module in {f"layers.{k}" for k in range(4)}]
    reports = [plan.verify(steps=1, repeats=0) for plan in plans]
    assert all(r.ok and abs(r.prediction_error) < 0.005 for r in reports)
    fallen = 4 * (256 * 64 * 4) + 4 * (64 * 64 + 64) * 4  # what four layers keep and their gradients
    assert reports[0].measured_peak_bytes - reports[1].measured_peak_bytes >= 0.9 * fallen
