"""Backward as people call it: from any output, with any gradient, twice, in any order, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gcsolve
from gcsolve.errors import CallError
from tests import models
from tests.training import Of, assert_equal, gradients, planned_pair, total
from tests.training import x as _x


def test_gradient_at_an_unplanned_output_is_refused_and_planned_for_on_request() -> None:
    torch.manual_seed(0)
    model = models.LossAndLogits()
    example = (_x(8, 16), torch.arange(8) % 5)
    loss, logits = gcsolve.solve(model, example, budget=1.0).module(*example)
    with pytest.raises(CallError, match="output\\[1\\]"):
        (loss + logits.sum()).backward()
    model.zero_grad()
    plain = copy.deepcopy(model)
    for m in (plain, gcsolve.solve(model, example, budget=1.0, backward_from="all").module):
        loss, logits = m(*example)
        (loss + logits.sum()).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_an_output_that_the_loss_ignores() -> None:
    """Its own parameters get no gradient, not zeros: an optimizer would decay them, or move them on by momentum."""
    torch.manual_seed(0)
    heads = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "c": nn.Linear(8, 8)}
    plain = Of(lambda m, x: (torch.tanh(m.a(m.c(x))), torch.tanh(m.b(m.c(x)))), **heads)
    x, planned = _x(4, 8), copy.deepcopy(plain)
    plan = gcsolve.solve(planned, x, budget=1.0)
    optimizers = [torch.optim.AdamW(m.parameters(), weight_decay=0.1) for m in (plain, planned)]
    for used in (0, 1, 0):
        for model, optimizer in zip((plain, plan.module), optimizers, strict=True):
            optimizer.zero_grad()
            model(x)[used].square().sum().backward()
            optimizer.step()
        for p, q in zip(plain.parameters(), planned.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or torch.equal(p.grad, q.grad)
            assert torch.equal(p, q)

    rounded = gcsolve.solve(Of(lambda m, x: torch.round(m.a(x)), a=heads["a"]), x, budget=1.0).module
    rounded.zero_grad()
    rounded(x).sum().backward()
    assert heads["a"].weight.grad is not None  # zeros, as in eager
    assert not heads["a"].weight.grad.any()


def test_create_graph_is_refused_and_changes_nothing() -> None:
    model, x = models.MLP(2, 8), _x(4, 8)
    plan = gcsolve.solve(model, x, budget=1.0)
    output = plan.module(x).sum()
    with pytest.raises(CallError, match="create_graph"):
        torch.autograd.grad(output, list(model.parameters()), create_graph=True)
    assert all(p.grad is None for p in model.parameters())


def test_retain_graph_twice_and_forward_without_backward() -> None:
    torch.manual_seed(0)
    model, x = models.Dropout(), _x(4, 8, 16)
    plain = copy.deepcopy(model)
    plan = gcsolve.solve(model, x, budget=0.8)
    torch.manual_seed(1)
    a = total(plan.module(x))
    torch.manual_seed(1)
    b = total(plain(x))
    for value in (a, b):
        value.backward(retain_graph=True)
        value.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_two_forwards_then_two_backwards_in_either_order() -> None:
    for order in ((0, 1), (1, 0)):
        torch.manual_seed(0)
        model, x = models.Dropout(), _x(4, 8, 16)
        plain = copy.deepcopy(model)
        plan = gcsolve.solve(model, x, budget=0.8)
        for m in (plan.module, plain):
            torch.manual_seed(1)
            values = [total(m(x)), total(m(x * 2))]
            for k in order:
                values[k].backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_output_gradients_of_any_layout() -> None:
    torch.manual_seed(0)
    model, x = models.MLP(2, 8), _x(8, 8)
    plain = copy.deepcopy(model)
    plan = gcsolve.solve(model, x, budget=1.0)
    for gradient in (_x(8, 8).t(), torch.ones(1, 1).expand(8, 8), torch.zeros(8, 8)):
        for m, g in ((plan.module, gradient), (plain, gradient.contiguous())):  # laid out as the output is
            m.zero_grad()
            m(x).backward(g)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_sum_backward_sends_one_number_spread_out() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.BatchNorm1d(8))
    plain, x = copy.deepcopy(model), _x(64, 8)
    plan = gcsolve.solve(model, x, budget=1.0)
    for m in (plain, plan.module):
        m(x).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize(
    "part",
    [lambda y: y.view(8, 8, 16)[:, 0], lambda y: y[:, 1:], lambda y: y.view(64, 8, 2)[..., 0]],
)
def test_the_gradient_of_a_part_takes_the_bytes_of_that_part(part: Any) -> None:
    torch.manual_seed(0)
    model, x = Of(lambda m, x: part(m.a(x)), a=nn.Linear(16, 16)), _x(64, 16)
    plan = gcsolve.solve(model, x, budget=1.0)
    assert plan.breakdown["tangents"] == plan.module(x).numel() * 4
    report = plan.verify(steps=3, repeats=0)
    assert report.ok
    assert abs(report.prediction_error) < 0.01


def test_a_weight_changed_between_forward_and_backward_is_refused_as_eager_does() -> None:
    model, x = models.MLP(2, 8), _x(8, 8)
    plan = gcsolve.solve(model, x, budget=1.0)
    output = plan.module(x).sum()
    with torch.no_grad():
        model.layers[1].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


def test_gradients_of_chosen_inputs_and_weights() -> None:
    torch.manual_seed(0)
    left: list[list[torch.Tensor | None]] = []
    for module in planned_pair(models.Dropout(), _x(4, 8, 16).requires_grad_()):
        torch.manual_seed(1)
        example, weights = _x(4, 8, 16).requires_grad_(), list(module.parameters())
        grads = torch.autograd.grad(total(module(example)), [example, weights[2], weights[0]])
        total(module(example)).backward(inputs=[weights[0]])
        assert example.grad is None
        left.append([*grads, *gradients(module)])
        with pytest.raises(ZeroDivisionError):
            _raise_in_backward(module(example))
        total(module(example)).backward()
        left[-1] += gradients(module)
    assert_equal(left)


def _raise_in_backward(output: torch.Tensor) -> None:
    output.register_hook(lambda g: g / 0 if g is None else 1 / 0)  # type: ignore[arg-type, return-value]
    output.sum().backward()


def test_any_criterion_outside() -> None:
    torch.manual_seed(0)
    model = Of(lambda m, x: (m.a(x), m.b(x).tanh(), m.a(x).detach()), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    criteria = (
        lambda o: F.cross_entropy(o[0], torch.arange(4)) + F.huber_loss(o[1], o[2]),
        lambda o: o[1].norm(),
        lambda o: torch.logsumexp(o[0], 1).prod() * o[1][0, 0],
    )
    for criterion in criteria:
        left: list[list[torch.Tensor | None]] = []
        for module in planned_pair(model, _x(4, 8)):
            module.zero_grad()
            criterion(module(_x(4, 8))).backward()
            left.append([torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()])
        assert_equal(left)
