"""What a planned module hands out: views of every kind, inputs and parameters themselves; gradients through them all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gcsolve
from gcsolve.errors import TraceError
from tests.training import Of, assert_same, x


def _complex(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.complex(m.a(x), x)


OUTPUTS: dict[str, Callable[..., Any]] = {
    "only its input": lambda m, x: x,
    "a parameter that nothing else uses": lambda m, x: (m.a(x), m.b.weight),
    "real view of a complex output": lambda m, x: (z := _complex(m, x), torch.view_as_real(z)),
    "complex view of a real output": lambda m, x: (y := m.a(x), torch.view_as_complex(y.view(4, 4, 2))),
    "complex view of an input": lambda m, x: (m.a(x), torch.view_as_complex(x.view(4, 4, 2))),
    "conjugate": lambda m, x: _complex(m, x).conj(),
    "imaginary part of a conjugate": lambda m, x: _complex(m, x).conj().imag,
    "expanded output": lambda m, x: (y := m.a(x), y[:, None].expand(4, 3, 8)),
    "expanded input": lambda m, x: (m.a(x), x[None].expand(50, 4, 8)),
    "bits of an output": lambda m, x: (y := m.a(x), y.detach().view(torch.int32)),
}


def _left(module: nn.Module, inputs: torch.Tensor) -> dict[str, Any]:
    """Outputs, and gradients through all of them."""
    inputs.grad = None
    made = module(inputs)
    outputs = made if isinstance(made, tuple) else (made,)
    graded = [o for o in outputs if o.requires_grad]
    weights = [torch.empty_like(o).copy_(torch.linspace(0.5, 1.5, o.numel()).view(o.shape)) for o in graded]
    torch.autograd.backward(graded, weights)
    left: dict[str, Any] = {f"output {k}": o.detach().resolve_conj().resolve_neg() for k, o in enumerate(outputs)}
    left |= {f"needs {k}": torch.tensor(o.requires_grad) for k, o in enumerate(outputs)}
    return left | {"x": inputs.grad} | {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_are_the_untouched_models(name: str) -> None:
    torch.manual_seed(0)
    model = Of(OUTPUTS[name], a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    inputs = x(4, 8).requires_grad_()
    expected = _left(copy.deepcopy(model), inputs)
    plan = gcsolve.solve(model, inputs, budget=1.0, grad_outputs="all")
    assert_same(expected, _left(plan.module, inputs))
    assert inputs.requires_grad
    assert all(p.requires_grad for p in model.parameters())


def test_a_lazily_conjugated_view_of_another_output_is_refused() -> None:
    model = Of(lambda m, x: (z := _complex(m, x), z.conj()), a=nn.Linear(8, 8))
    with pytest.raises(TraceError, match=r"conjugate of something else that it returns.*resolve_conj"):
        gcsolve.solve(model, x(4, 8), budget=1.0)


@pytest.mark.parametrize("solve", [torch.linalg.solve, lambda a, b: torch.linalg.inv(a) @ b, torch.linalg.cholesky])
def test_linear_algebra_whose_success_is_checked(solve: Callable[..., torch.Tensor]) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        square = m.a(x).t() @ m.a(x) + 8 * torch.eye(8)
        return solve(square, m.b(x).t()) if solve is not torch.linalg.cholesky else solve(square)

    torch.manual_seed(0)
    model = Of(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    inputs = x(4, 8).requires_grad_()
    expected = _left(copy.deepcopy(model), inputs)
    assert_same(expected, _left(gcsolve.solve(model, inputs, budget=1.0).module, inputs))


class Aliases(nn.Module):
    """Two layers, whose result goes out beside what `more` makes of it, the first weight, and the input."""

    def __init__(self, more: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second, self.more = nn.Linear(16, 16), nn.Linear(16, 16), more

    def forward(self, x: torch.Tensor) -> Any:
        h = self.second(self.first(x).tanh())
        return h, self.more(h, self.first.weight, x)


@pytest.mark.parametrize(
    "more",
    [
        lambda h, w, x: h.sin(),
        lambda h, w, x: h,
        lambda h, w, x: h[0],
        lambda h, w, x: (h.t(), h[:, :8]),
        lambda h, w, x: w,
        lambda h, w, x: w[:4],
        lambda h, w, x: x,
        lambda h, w, x: x[:, 2:5],
    ],
    ids=["value", "same", "row", "two views", "parameter", "part of it", "input", "part of the input"],
)
def test_gradients_of_outputs_that_are_something_else_are_in_the_peak(more: Any) -> None:
    """Also what autograd makes of a view's gradient, as large as what is viewed."""
    plan = gcsolve.solve(Aliases(more), torch.randn(32, 16, requires_grad=True), budget=1.0, progress=False)
    report = plan.verify(steps=2, repeats=0)
    assert not report.differences
    assert report.measured_peak_bytes == plan.peak_bytes
