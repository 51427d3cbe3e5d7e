"""Several calls in one autocast block: gradients are summed at the weight's one cast, as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gcsolve
from tests.training import Of, assert_same, x


def _block() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def _norm(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def _three(module: nn.Module) -> list[torch.Tensor]:
    with _block():
        return [_norm(module(x(32, 64) * (k + 1))) for k in range(3)]


def _each_alone(module: nn.Module) -> None:
    for loss in _three(module):
        loss.backward()


def _twice(module: nn.Module) -> None:
    loss = sum(_three(module))
    loss.backward(retain_graph=True)  # type: ignore[union-attr]
    loss.backward()  # type: ignore[union-attr]


def _chain(module: nn.Module) -> None:
    """Calls two and three need an input's gradient: another signature, planned within the block."""
    with _block():
        output = module(module(module(x(32, 64)).float()).float())
    _norm(output).backward()


def _as_gradients(module: nn.Module) -> None:
    weights = list(module.parameters())
    for weight, gradient in zip(weights, torch.autograd.grad(sum(_three(module)), weights), strict=True):  # type: ignore[arg-type]
        weight.grad = gradient


def _failing_between(module: nn.Module) -> None:
    """A pass of autograd that breaks off after the second call's backward leaves nothing behind for the next."""
    first, second, _ = _three(module)
    first.register_hook(_fail)
    with pytest.raises(RuntimeError, match="broken off"):
        (first + second).backward()
    module.zero_grad()
    _each_alone(module)


def _fail(gradient: torch.Tensor) -> None:
    raise RuntimeError("broken off")


PASSES: dict[str, Callable[[nn.Module], Any]] = {
    "sum": lambda m: sum(_three(m)).backward(),  # type: ignore[union-attr]
    "each alone": _each_alone,
    "not the second": lambda m: (torch.stack(_three(m)[::2])).sum().backward(),
    "twice": _twice,
    "chain": _chain,
    "as gradients": _as_gradients,
    "broken off": _failing_between,
}


def _gradients(module: nn.Module, run: Callable[[nn.Module], Any]) -> dict[str, Any]:
    module.zero_grad()
    run(module)
    return {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize("name", PASSES)
def test_gradients_of_several_calls_in_one_block(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64))
    with _block():
        plan = gcsolve.solve(copy.deepcopy(model), x(32, 64), budget="1MB")
    assert_same(_gradients(model, PASSES[name]), _gradients(plan.module, PASSES[name]))


def test_blocks_make_a_difference() -> None:
    """A block around each call: the gradients are summed in the weight's own precision, by both."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)

    def apart(module: nn.Module) -> None:
        losses: list[torch.Tensor] = []
        for k in range(3):
            with _block():
                losses.append(_norm(module(x(32, 64) * (k + 1))))
        sum(losses).backward()  # type: ignore[union-attr]

    with _block():
        plan = gcsolve.solve(copy.deepcopy(model), x(32, 64), budget="1MB")
    expected = _gradients(model, apart)
    assert_same(expected, _gradients(plan.module, apart))
    model.zero_grad()
    assert not torch.equal(expected["weight"], _gradients(model, PASSES["sum"])["weight"])


class Encoded(nn.Module):
    """A head on an encoder; `own`: with an autocast block of its own."""

    def __init__(self, encoder: nn.Module, *, own: bool = False) -> None:
        super().__init__()
        self.encoder, self.head, self.own = encoder, nn.Linear(64, 8), own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.own or torch.is_autocast_enabled("cpu")):
            return self.head(self.encoder(x).tanh())


@pytest.mark.parametrize("own", [False, True], ids=["the caller's block", "a block of its own within it"])
def test_planned_modules_that_share_an_encoder(own: bool) -> None:
    torch.manual_seed(0)
    both = nn.ModuleList([Encoded(encoder := nn.Linear(64, 64), own=own), Encoded(encoder, own=own)])
    planned = copy.deepcopy(both)
    with _block():
        modules = [gcsolve.solve(m, x(32, 64), budget="1MB").module for m in planned]

    def run(parts: Any) -> None:
        with _block():
            losses = [_norm(m(x(32, 64) * (k + 1))) for k, m in enumerate(parts)]
        (losses[0] + 3 * losses[1]).backward()

    run(both)
    run(modules)
    assert_same(
        {name: p.grad for name, p in both.named_parameters()}, {name: p.grad for name, p in planned.named_parameters()}
    )


def test_adversarial_training() -> None:
    """Three steps of two planned modules, the discriminator called twice in a block."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64))
    discriminator = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def trained(make: nn.Module, judge: nn.Module) -> dict[str, Any]:
        torch.manual_seed(1)
        left: dict[str, Any] = {}
        optimizers = [torch.optim.Adam(m.parameters(), 1e-2) for m in (make, judge)]
        for step in range(3):
            with _block():
                fake = make(torch.randn(32, 16)).float()
                real, false = judge(x(32, 64)), judge(fake.detach())
            optimizers[1].zero_grad()
            (nn.functional.softplus(-real.float()).mean() + nn.functional.softplus(false.float()).mean()).backward()
            optimizers[1].step()
            with _block():
                fooled = judge(fake)
            optimizers[0].zero_grad()
            nn.functional.softplus(-fooled.float()).mean().backward()
            optimizers[0].step()
            left |= {f"{step} {n}": p.detach().clone() for m in (make, judge) for n, p in m.named_parameters()}
        return left

    planned = copy.deepcopy((generator, discriminator))
    with _block():
        make = gcsolve.solve(planned[0], torch.randn(32, 16), budget="1MB").module
        judge = gcsolve.solve(planned[1], x(32, 64), budget="1MB").module
    assert_same(trained(generator, discriminator), trained(make, judge))


@pytest.mark.parametrize("uses", ["twice in the model", "outside as well"])
def test_what_is_summed_otherwise_differs_by_a_rounding(uses: str) -> None:
    """The README's limits: a weight that the model uses twice, and one that an untouched module in the block uses too."""
    torch.manual_seed(0)
    model = Of(lambda m, x: m.a(m.a(x).tanh()) if uses == "twice in the model" else m.a(x), a=nn.Linear(64, 64))
    with _block():
        plan = gcsolve.solve(copy.deepcopy(model), x(32, 64), budget="1MB")

    def run(module: nn.Module) -> None:
        other: Any = module if uses == "twice in the model" else module.a
        with _block():
            losses = [_norm(module(x(32, 64))), _norm(other(2 * x(32, 64))), _norm(other(3 * x(32, 64)))]
        sum(losses).backward()  # type: ignore[union-attr]

    expected, found = _gradients(model, run)["a.weight"], _gradients(plan.module, run)["a.weight"]
    assert not torch.equal(found, expected)
    assert (found - expected).abs().max() <= 2 * 2.0**-8 * expected.abs().max()
