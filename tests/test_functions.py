"""functions: a backward that the model's author wrote is the one that is trained."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from gcsolve.capture.trace import trace
from gcsolve.errors import TraceError
from tests.training import Of, assert_trains_the_same


class Rounded(Function):
    """Straight-through: the derivative of round() is 0, this one is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * torch.cos(x)


class Mixed(Function):
    """A list of tensors, a number and a tensor in; a tensor, a number, a scalar and None out."""

    @staticmethod
    def forward(ctx: Any, xs: list[Tensor], factor: float, weight: Tensor) -> Any:
        ctx.save_for_backward(xs[0], weight)
        return xs[0] * factor, 3, weight.sum(), None

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any, of_sum: Tensor, __: Any) -> Any:
        x, weight = ctx.saved_tensors
        return None, None, 5 * of_sum * torch.ones_like(weight) + (gradient * x).sum()


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2).tanh_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3 * ctx.saved_tensors[0]


class SetUpApart(Function):
    @staticmethod
    def forward(x: Tensor) -> Any:
        return x.exp(), x.argmax(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
        return 7 * gradient * ctx.saved_tensors[0]


class Reversed(Function):
    """A view of its input out, and another Function called inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.size = Rounded.apply(x).abs().amax().clamp(1, 2)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.neg() / ctx.size


class OwnBackwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(Rounded.apply(3 * self.first(x)))
        z, three, total, _ = Mixed.apply([y, y], 2.5, self.second.weight)
        y = InPlace.apply(self.second(y + z * total * three) + 1)
        powers, best = SetUpApart.apply(y)
        return self.first(Reversed.apply(powers + best[:, None])).tanh()


def test_backwards_written_by_hand_are_kept() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 8, requires_grad=True)
    plans = assert_trains_the_same(OwnBackwards(), x, scope="activations")
    assert plans[-1].overhead > 0  # the tightest plan recomputes
    assert "cos" in plans[0].module.code


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def test_torchs_own_checkpoints_are_planned_over() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 8, requires_grad=True)
    for reentrant in (True, False):
        plan, *_ = assert_trains_the_same(Checkpointed(reentrant), x, scope="activations")
        assert plan.overhead == 0.0  # the loosest plan keeps what checkpoint would have computed again


def test_functions_elsewhere_and_after_a_trace_are_left_alone() -> None:
    original = vars(Function)["apply"]
    found: list[Tensor] = []

    class Meets(nn.Module):
        """Another thread applies a Function while this model is traced."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            other = threading.Thread(target=lambda: found.append(Rounded.apply(torch.full((2,), 1.4))))
            other.start()
            other.join()
            return Rounded.apply(self.linear(x)).sin()

    assert_trains_the_same(Meets(), torch.randn(4, 8))
    assert vars(Function)["apply"] is original
    assert all(torch.equal(t, torch.ones(2)) for t in found)


class ByHand(nn.Module):
    """One of the things that a model may do to autograd behind its back."""

    average: Tensor

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.linear = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.what == "hook":
            y.register_hook(lambda gradient: 2 * gradient)
        elif self.what == "write":
            y.data[:, 2:].clamp_(-0.1, 0.1)
        elif self.what == "write by name":
            torch.clamp_(min=-0.1, max=0.1, input=y.data)
        elif self.what == "assign":
            self.average.data = 0.9 * self.average
        elif self.what == "read":
            y = y + (y.round() - y).data
            self.average.data.mul_(0.9).add_(y.data.mean(0), alpha=0.1)
        return y.tanh() * self.average


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("hook", "register_hook"),
        ("write", r"through \.data"),
        ("write by name", r"through \.data"),
        ("assign", r"through \.data"),
    ],
)
def test_what_would_be_lost_is_refused(what: str, text: str) -> None:
    with pytest.raises(TraceError, match=text):
        trace(ByHand(what), (torch.randn(4, 8),), {})


def test_data_is_read_as_a_detached_tensor() -> None:
    torch.manual_seed(0)
    assert_trains_the_same(ByHand("read"), torch.randn(4, 8))


def test_a_tensor_changed_in_place_may_be_named() -> None:
    def forward(model: Of, x: Tensor) -> Tensor:
        mask = torch.ones(8)
        torch.zero_(input=mask)
        y = model.linear(x)
        y = y if mask.any() else torch.relu_(input=y)
        frame = nn.init.kaiming_uniform_(tensor=torch.empty(8, 8))
        return y @ frame

    torch.manual_seed(0)
    assert_trains_the_same(Of(forward, linear=nn.Linear(8, 8)), torch.randn(4, 8))


class Shared(nn.Module):
    """Checkpointed layers that all read one more tensor, twice each, as decoders read what encoders made."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        read = self.first(x)
        for layer in self.layers:
            x = checkpoint(lambda x, read, layer=layer: layer(x) * read + read.sin(), x, read, use_reentrant=True)
        return x


def test_a_reentrant_checkpoint_sums_an_arguments_gradients_before_they_leave() -> None:
    torch.manual_seed(0)
    assert_trains_the_same(Shared(), torch.randn(64, 8, requires_grad=True))
