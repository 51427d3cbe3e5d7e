"""torch's modes around a planned module: functional calls, transforms, compile, gradients switched off and on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import gcsolve
from gcsolve.errors import CallError
from tests import models
from tests.training import LEAST_S, Of, assert_equal, assert_same, gradients, planned_pair, total, train, two_layers, x


def test_functional_call() -> None:
    torch.manual_seed(0)
    left: list[list[torch.Tensor | None]] = []
    for module in planned_pair(models.MLP(3, 16), x(8, 16)):
        other = {name: (p.detach() * 2).requires_grad_() for name, p in module.named_parameters()}
        output = torch.func.functional_call(module, other, (x(8, 16),))
        output.sum().backward()
        fixed = torch.func.functional_call(module, {name: p.detach() for name, p in other.items()}, (x(8, 16),))
        assert not fixed.requires_grad
        left.append([output, fixed, *(p.grad for p in other.values()), *gradients(module)])
    assert_equal(left)


def test_transforms_are_refused_by_name() -> None:
    planned = gcsolve.solve(models.MLP(3, 16), x(8, 16), budget="1MB").module
    weights = {name: p.detach() for name, p in planned.named_parameters()}
    with pytest.raises(CallError, match=r"torch\.func's transforms"):
        torch.func.grad(lambda w: torch.func.functional_call(planned, w, (x(8, 16),)).sum())(weights)
    with pytest.raises(CallError, match=r"torch\.func's transforms"):
        torch.func.vmap(planned)(x(2, 8, 16))
    with forward_ad.dual_level(), pytest.raises(CallError, match="forward-mode"):
        planned(forward_ad.make_dual(x(8, 16), x(8, 16)))


@pytest.mark.filterwarnings("ignore")  # torch's own, about a tensor that it looks at
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_planned_module_runs_as_planned(backend: str) -> None:
    """torch.compile takes what is around it; asked for one whole graph, it says that a plan is in the way."""
    torch.manual_seed(0)
    left: list[list[torch.Tensor | None]] = []
    for module in planned_pair(models.Dropout(), x(4, 8, 16), budget=0.8):
        torch.manual_seed(1)
        whole = Of(lambda m, x: m.head(m.part(x.sin())).tanh(), part=module, head=nn.Linear(16, 16))
        nn.init.eye_(whole.head.weight)
        nn.init.zeros_(whole.head.bias)
        run = torch.compile(whole, backend=backend) if left else whole
        for _ in range(2):
            total(run(x(4, 8, 16))).backward()
        left.append(gradients(module))
    assert_equal(left)
    torch.compiler.reset()
    with pytest.raises(Exception, match="a gcsolve plan runs as it was planned"):
        torch.compile(whole, backend=backend, fullgraph=True)(x(4, 8, 16))


def test_requires_grad_changed_after_planning() -> None:
    torch.manual_seed(0)
    left: list[list[torch.Tensor | None]] = []
    for module in planned_pair(models.MLP(3, 16), x(8, 16)):
        total(module(x(8, 16))).backward()
        module.layers[0].requires_grad_(False)
        total(module(x(8, 16))).backward()
        left.append(gradients(module))
        module.requires_grad_(False)
        output = module(x(8, 16))
        assert not output.requires_grad
        left[-1] += [output]
        module.layers[2].requires_grad_(True)
        total(module(x(8, 16))).backward()
        left[-1] += gradients(module)
    assert_equal(left)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_planned_and_verified_where_gradients_are_off(around: Any) -> None:
    torch.manual_seed(0)
    model, example = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Linear(8, 8)), x(16, 8)
    with around():
        plan = gcsolve.solve(model, example, budget=1.0)
        assert (
            plan.at(budget=f"{plan.minimum_budget(time_limit_s=LEAST_S).one_rerun_bytes}B")
            .verify(steps=2, repeats=1)
            .ok
        )
    assert_same(train(copy.deepcopy(model), example), train(plan.module, example))


def test_inference_mode_inside_is_no_grad() -> None:
    def step(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            kept = torch.tanh(m.a(x))
        return torch.tanh(m.b(x) * kept.clone())

    torch.manual_seed(0)
    model, example = Of(step, **two_layers()), x(4, 8)
    expected = train(copy.deepcopy(model), example)
    assert_same(expected, train(gcsolve.solve(model, example, budget="1MB").module, example))
    assert model.a.weight.grad is None


def test_torchs_flop_counter_counts_a_planned_step() -> None:
    model = models.MLP()
    inputs = x(64, 32)
    flops = []
    for module in (model, gcsolve.solve(model, inputs, solver="store_all", budget=1.0).module):
        with FlopCounterMode(display=False) as counter:
            module(inputs).sum().backward()
        flops.append(counter.get_total_flops())
    assert flops[0] == flops[1] > 0
