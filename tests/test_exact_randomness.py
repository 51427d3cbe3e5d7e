"""Randomness is replayed: draws of every kind, from every generator, end where the untouched model's do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gcsolve
from tests.training import (
    LEAST_S,
    KeepNothing,
    Of,
    assert_same,
    assert_trains_the_same,
    since_213,
    total,
    train,
    two_layers,
)
from tests.training import x as _x


def _samples(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(m.a(x))
    best = torch.multinomial(y.detach().softmax(1), 2)
    y = y + y.gather(1, best).repeat(1, 4) + torch.randint(0, 3, y.shape) + torch.empty_like(y).exponential_() * 0.1
    y = F.rrelu(F.alpha_dropout(y, 0.2, training=True), training=True)[torch.randperm(len(y))]
    return m.b(F.dropout1d(y.view(2, 8, 8), 0.3).view(16, 8) * F.gumbel_softmax(y)).tanh()


def _distribution(m: Any, x: torch.Tensor) -> torch.Tensor:
    drawn = torch.distributions.Normal(m.a(x), F.softplus(m.b(x))).rsample()
    choice = torch.distributions.Categorical(logits=drawn).sample()
    return torch.tanh(drawn) * choice[:, None]


RANDOM: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "all kinds of samples": lambda: (Of(_samples, **two_layers()), _x(16, 8)),
    "torch.distributions": lambda: (Of(_distribution, **two_layers()), _x(16, 8)),
    "p=0 and p=1": lambda: (
        Of(lambda m, x: F.dropout(m.a(x).tanh(), 0.0) + F.dropout(m.b(x), 1.0), **two_layers()),
        _x(8, 8),
    ),
    "in place": lambda: (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3, inplace=True), nn.Linear(8, 8)), _x(8, 8)),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_ops(name: str) -> None:
    torch.manual_seed(0)
    model, example = RANDOM[name]()
    assert_trains_the_same(model, example)


@pytest.mark.parametrize("p", [0.15, 0.45, 0.025, 0.5])
def test_dropout_scales_as_eager_does(p: float) -> None:
    """In float32, 1/(1-p) rounded is not always 1 divided by 1-p rounded."""
    torch.manual_seed(0)
    model, example = nn.Sequential(nn.Linear(8, 64), nn.Dropout(p), nn.Linear(64, 8), nn.Tanh()), _x(64, 8)
    expected = train(copy.deepcopy(model), example)
    for solver in ("store_all", KeepNothing()):
        plan = gcsolve.solve(copy.deepcopy(model), example, budget="1GB", solver=solver)
        assert_same(expected, train(plan.module, example))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dropout_in_half_precision(dtype: torch.dtype) -> None:
    """Eager rounds 1/(1-p) to the dtype; 0.1 and 0.3 do not divide evenly."""

    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.b(F.dropout(torch.tanh(self.a(x)), 0.1)), 0.3)

    torch.manual_seed(0)
    model = Drops().to(dtype)
    assert_trains_the_same(model, _x(16, 32).to(dtype))
    under = Drops()
    plain = copy.deepcopy(under)
    plan = gcsolve.solve(under, _x(16, 32), budget="1MB")
    for m in (plain, plan.module):
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype):
            output = m(_x(16, 32))
        output.float().square().mean().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), under.parameters(), strict=True))


@pytest.mark.parametrize(
    "draw",
    [
        lambda h: F.dropout(h, 0.3),
        lambda h: F.dropout(h.detach(), 0.3),
        torch.rand_like,
        lambda h: torch.bernoulli(h.sigmoid()),
        lambda h: torch.multinomial(h.softmax(-1), 2),
        lambda h: F.scaled_dot_product_attention(h[None], h[None], h[None], dropout_p=0.1),
    ],
    ids=["dropout", "detached", "rand_like", "bernoulli", "multinomial", "attention"],
)
def test_a_draw_that_nothing_reads_moves_the_generator(draw: Any) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.a(x)
        draw(h)
        return F.dropout(h, 0.5)

    torch.manual_seed(0)
    model = Of(forward, a=nn.Linear(8, 8))
    expected = train(copy.deepcopy(model), _x(4, 8))
    assert_same(expected, train(gcsolve.solve(model, _x(4, 8), budget="1MB").module, _x(4, 8)))


@pytest.mark.parametrize("p", [0.3, 0.45])
def test_the_gradient_is_zero_where_the_forward_was(p: float) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(p))
    plan = gcsolve.solve(model, _x(64, 16).requires_grad_(), budget="1GB", solver=KeepNothing())
    seen: list[torch.Tensor] = []
    plan.module[0].weight.data.copy_(torch.eye(16))
    plan.module[0].bias.data.zero_()
    example = _x(64, 16).requires_grad_()
    output = plan.module(example)
    output.register_hook(seen.append)
    output.sum().backward()
    assert 0.1 < (output == 0).float().mean() < 0.9
    assert torch.equal(output == 0, example.grad == 0)


def test_the_solver_prices_the_mask_against_the_generator_state() -> None:
    """A kept dropout costs one byte an element (its mask) or one generator state, never its whole output."""
    torch.manual_seed(0)
    layers = [module for _ in range(4) for module in (nn.Linear(64, 64), nn.Dropout(0.3), nn.Tanh())]
    model, example = nn.Sequential(*layers), _x(512, 64)
    first = gcsolve.solve(model, example, budget=1.0)
    (mask, *_), (state, *_) = (
        [v for v, value in enumerate(first.problem.graph.values) if fits(value.name)]
        for fits in (lambda name: name == "native_dropout.1", lambda name: name.endswith("rng_state"))
    )
    values = first.problem.graph.values
    assert (values[mask].size_bytes, values[state].size_bytes) == (512 * 64, 79 * 64)
    plan = first.at(budget=f"{first.minimum_budget(time_limit_s=LEAST_S).one_rerun_bytes}B")
    runs = plan.schedule.runs(plan.problem.graph)
    dropouts = [i for i, node in enumerate(plan.problem.graph.nodes) if node.op == "aten.native_dropout.default"]
    assert any(runs[i] > 1 for i in dropouts)
    assert_same(train(copy.deepcopy(model), example), train(plan.module, example))


class _Draws(nn.Module):
    """Draws from the default generator, from one that it owns and from one that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.own = torch.Generator().manual_seed(4)

    def forward(self, x: torch.Tensor, generator: torch.Generator, also: Any = None) -> torch.Tensor:
        y = self.a(x).tanh() * torch.bernoulli(torch.full(x.shape, 0.5), generator=self.own)
        y = F.dropout(y + torch.rand(x.shape, generator=generator), 0.3)
        if also is not None:
            y = y + torch.randn(x.shape, generator=also["generator"])
        return self.b(y * torch.rand(x.shape, generator=self.own)).tanh()


@since_213
@pytest.mark.parametrize("same", [True, False])
def test_several_generators(same: bool) -> None:
    torch.manual_seed(0)
    model = _Draws()

    def example() -> Any:
        given = torch.Generator().manual_seed(5)
        return (_x(16, 8), given, {"generator": given if same else torch.Generator().manual_seed(6)})

    before = model.own.get_state()
    assert_trains_the_same(model, example)
    assert torch.equal(model.own.get_state(), before)  # planning draws nothing
    plan = gcsolve.solve(model, example(), budget="1MB")
    states = []
    for module in (copy.deepcopy(model), plan.module):
        args = example()
        for _ in range(2):
            total(module(*args)).backward()
        states.append([module.own.get_state(), args[1].get_state(), args[2]["generator"].get_state()])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    assert len(plan.module._gcsolve.cache) == 1  # another generator is no reason to plan again


@since_213
def test_draws_from_a_generator_that_is_given_are_replayed_too() -> None:
    """From its state at the first draw; the generator itself draws once. `poisson` takes it as a positional argument."""
    torch.manual_seed(0)

    def step(m: Any, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        for _ in range(2):
            x = torch.tanh(m.a(x)) * torch.bernoulli(torch.full_like(x, 0.7), generator=generator)
            x = torch.tanh(m.b(x) * torch.poisson(torch.full_like(x, 3.0), generator=generator))
        return x

    model = Of(step, **two_layers())
    left: list[dict[str, Any]] = []
    module = model
    for module in (copy.deepcopy(model), gcsolve.solve(model, _given(), budget="1GB", solver=KeepNothing()).module):
        example = _given()
        left.append(train(module, example) | {"given": example[1].get_state()})
    assert_same(*left)
    assert "generator_at" in module.code


def _given() -> tuple[torch.Tensor, torch.Generator]:
    return _x(16, 8), torch.Generator().manual_seed(5)
