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
from tests.training import Of, assert_same, since_213, x


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
    "output and view, and more of it": lambda m, x: (h := m.b(m.a(x).tanh()), h.view(-1), h.sin(), h.t().cos().exp()),
    "views of something inside": lambda m, x: ((h := m.b(m.a(x)).tanh())[:, :5], h.t()[3:], h[1], h.exp(), h.sin()),
    "views in another order": lambda m, x: (lambda a, b, c: (c, a, b))((h := m.a(x))[:, :5], h[:, 3:], h[1:3, 2:7]),
    "expanded, and more of it": lambda m, x: (y := m.a(x), y[:, None].expand(4, 3, 8), y.sin(), y.cos()),
    "complex view, and more of it": lambda m, x: (z := _complex(m, x), torch.view_as_real(z), z.abs(), z.real.sin()),
    "an input, and more of it": lambda m, x: (m.a(x), x, x.sin(), x.view(-1), x[1:3].cos()),
    "a parameter, and more of it": lambda m, x: (m.a(m.a(x)), m.a.weight, m.a.weight.t()[:4]),
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


def test_a_view_whose_gradient_is_summed_inside_is_not_changed_in_place() -> None:
    """Autograd would leave the change out of the other's gradient, and the result would be wrong without a word."""
    model = Of(lambda m, x: (h := m.a(x), h.view(-1), h.sin()), a=nn.Linear(8, 8))
    module = gcsolve.solve(model, x(4, 8), budget=1.0).module
    for k in range(2):
        outputs = module(x(4, 8))
        assert outputs[0].data_ptr() == outputs[1].data_ptr()
        with pytest.raises(RuntimeError, match=r"is a view and is being modified inplace.*out-of-place"):
            outputs[k].mul_(2)
        with torch.no_grad():
            outputs[k].mul_(2)
        with pytest.raises(RuntimeError, match=r"another view of its base has been modified inplace"):
            outputs[1 - k].square()


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_are_the_untouched_models(name: str) -> None:
    torch.manual_seed(0)
    model = Of(OUTPUTS[name], a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    inputs = x(4, 8).requires_grad_()
    expected = _left(copy.deepcopy(model), inputs)
    plan = gcsolve.solve(model, inputs, budget=1.0, backward_from="all")
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
        pytest.param(lambda h, w, x: (h.t(), h[:, :8]), marks=since_213),  # torch 2.11 lays a transposed gradient anew
        lambda h, w, x: (h.view(-1), h.sin(), h.cos()),
        lambda h, w, x: w,
        lambda h, w, x: w[:4],
        lambda h, w, x: x,
        lambda h, w, x: x[:, 2:5],
        lambda h, w, x: (x, x.sin(), w, w.t(), w.cos()),
    ],
    ids=[
        "value",
        "same",
        "row",
        "two views",
        "view and more",
        "parameter",
        "part of it",
        "input",
        "part of the input",
        "input and more",
    ],
)
def test_gradients_of_outputs_that_are_something_else_are_in_the_peak(more: Any) -> None:
    """Also what autograd makes of a view's gradient, as large as what is viewed."""
    plan = gcsolve.solve(Aliases(more), torch.randn(32, 16, requires_grad=True), budget=1.0, progress=False)
    report = plan.verify(steps=2, repeats=0)
    assert not report.differences
    assert report.measured_peak_bytes == plan.peak_bytes


class Tied(nn.Module):
    """One weight, used `times` times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.weight, self.times = nn.Parameter(torch.randn(32, 32) / 6), times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = (x @ self.weight).tanh()
        return x


@pytest.mark.parametrize("elsewhere", ["weight decay in the loss", "a second call"])
@pytest.mark.parametrize("times", [1, 2])
def test_gradients_from_elsewhere_in_the_same_backward(elsewhere: str, times: int) -> None:
    """The README's limit: where autograd adds to a tied weight's gradient outside any planned call, another order."""
    torch.manual_seed(0)
    model = Tied(times)
    inputs = x(64, 32)

    def gradient(module: Any) -> torch.Tensor:
        module.weight.grad = None
        loss = module(inputs).square().mean()
        more = module(2 * inputs).sin().mean() if elsewhere == "a second call" else 0.1 * module.weight.square().sum()
        (loss + more).backward()
        return module.weight.grad

    expected = gradient(copy.deepcopy(model))
    found = gradient(gcsolve.solve(model, inputs, budget="1MB").module)
    assert torch.equal(found, expected) == (times == 1 or elsewhere == "a second call")
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("which", ["weight", "input", "both"])
def test_the_gradient_of_an_output_that_is_used_for_nothing_else_is_in_the_peak(which: str) -> None:
    """Autograd keeps a copy of what comes, as that weight's or input's gradient."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        alone = {"weight": (m.b.weight,), "input": (x,), "both": (m.b.weight, x, m.b.weight)}[which]
        return m.a(x.detach()).sin(), *alone

    model = Of(forward, a=nn.Linear(32, 32), b=nn.Linear(32, 32))
    plan = gcsolve.solve(model, x(64, 32).requires_grad_(), budget=1.0)
    report = plan.verify(steps=2, repeats=0)
    assert not report.differences
    assert report.measured_peak_bytes == plan.peak_bytes
