"""Several planned calls in one backward: gradients of a weight are summed in eager's order and precision."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gcsolve
from tests.training import LEAST_S, PLAN_S, Of, assert_same, x


def _block(autocast: bool = True) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=autocast)


def _norm(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def _three(module: nn.Module, autocast: bool) -> list[torch.Tensor]:
    with _block(autocast):
        return [_norm(module(x(32, 64) * (k + 1))) for k in range(3)]


def _sum(module: nn.Module, autocast: bool) -> None:
    torch.stack(_three(module, autocast)).sum().backward()


def _each_alone(module: nn.Module, autocast: bool) -> None:
    for loss in _three(module, autocast):
        loss.backward()


def _not_the_second(module: nn.Module, autocast: bool) -> None:
    torch.stack(_three(module, autocast)[::2]).sum().backward()


def _twice(module: nn.Module, autocast: bool) -> None:
    loss = torch.stack(_three(module, autocast)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def _chain(module: nn.Module, autocast: bool) -> None:
    """Calls two and three need an input's gradient: another signature, planned within the block."""
    with _block(autocast):
        output = module(module(module(x(32, 64)).float()).float())
    _norm(output).backward()


def _as_gradients(module: nn.Module, autocast: bool) -> None:
    weights = list(module.parameters())
    found = torch.autograd.grad(torch.stack(_three(module, autocast)).sum(), weights)
    for weight, gradient in zip(weights, found, strict=True):
        weight.grad = gradient


def _broken_off(module: nn.Module, autocast: bool) -> None:
    """A pass of autograd that ends within leaves nothing behind for the next."""
    first, second, _ = _three(module, autocast)
    first.register_hook(_fail)
    with pytest.raises(RuntimeError, match="broken off"):
        (first + second).backward()
    module.zero_grad()
    _sum(module, autocast)


def _fail(gradient: torch.Tensor) -> None:
    raise RuntimeError("broken off")


PASSES: list[Callable[[nn.Module, bool], None]] = [
    _sum, _each_alone, _not_the_second, _twice, _chain, _as_gradients, _broken_off,
]  # fmt: skip


def _gradients(module: nn.Module, run: Callable[[nn.Module, bool], Any], autocast: bool = True) -> dict[str, Any]:
    module.zero_grad()
    run(module, autocast)
    return {name: p.grad for name, p in module.named_parameters()}


class Repeated(nn.Module):
    """Tied weights: a layer used three times, one used twice, one once."""

    def __init__(self) -> None:
        super().__init__()
        self.thrice, self.twice, self.once = (nn.Linear(64, 64) for _ in range(3))
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.twice(self.thrice(x).tanh())
        return self.norm(self.twice(self.thrice(self.once(self.thrice(h).relu()))) + h)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "each weight once": lambda: nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64)),
    "tied weights": Repeated,
    "recurrent": lambda: Of(lambda m, x: m.a(x.view(-1, 8, 64))[0].flatten(0, 1), a=nn.GRU(64, 64)),
}


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("run", PASSES)
def test_gradients_of_several_calls(run: Any, kind: str, autocast: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]()
    with _block(autocast):
        plan = gcsolve.solve(copy.deepcopy(model), x(32, 64), budget="4MB")
    assert_same(_gradients(model, run, autocast), _gradients(plan.module, run, autocast))


def test_blocks_make_a_difference() -> None:
    """A block around each call: the gradients are summed in the weight's own precision, by both."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)

    def apart(module: nn.Module, _autocast: bool) -> None:
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
    assert not torch.equal(expected["weight"], _gradients(model, _sum)["weight"])


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


def test_preference_training_of_a_tied_language_model() -> None:
    """Two calls of a GPT-2, whose embedding is its head too, in one loss, at a tight budget and in another length."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=97, n_positions=32)
    model = transformers.GPT2LMHeadModel(config)
    tokens = [torch.randint(97, (2, n), generator=torch.Generator().manual_seed(n)) for n in (16, 16, 24)]

    def run(module: nn.Module, _autocast: bool) -> None:
        torch.manual_seed(1)
        chosen, rejected, other = (module(input_ids=t, labels=t).loss for t in tokens)
        (other - nn.functional.logsigmoid(chosen - rejected)).backward()

    example = {"input_ids": tokens[2], "labels": tokens[2]}
    least = gcsolve.minimum_budget(model, example, time_limit_s=LEAST_S).one_rerun_bytes
    plan = gcsolve.solve(copy.deepcopy(model), example, budget=f"{int(1.02 * least)}B", time_limit_s=PLAN_S)
    assert_same(_gradients(model, run), _gradients(plan.module, run))


def test_an_untouched_module_in_the_block_that_casts_the_same_weight() -> None:
    """The README's limit: another rounding."""
    torch.manual_seed(0)
    model = Of(lambda m, x: m.a(x), a=nn.Linear(64, 64))
    with _block():
        plan = gcsolve.solve(copy.deepcopy(model), x(32, 64), budget="1MB")

    def run(module: Any, autocast: bool) -> None:
        with _block(autocast):
            losses = [_norm(module(x(32, 64))), _norm(module.a(2 * x(32, 64))), _norm(module.a(3 * x(32, 64)))]
        torch.stack(losses).sum().backward()

    expected, found = _gradients(model, run)["a.weight"], _gradients(plan.module, run)["a.weight"]
    assert not torch.equal(found, expected)
    assert (found - expected).abs().max() <= 2 * 2.0**-8 * expected.abs().max()
