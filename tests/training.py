"""The plainest training loop there is, bitwise comparisons of two of them, and what the tests of exactness share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import gcsolve
from gcsolve.schedule import order_from_kept, schedule_from_order
from gcsolve.solver.base import judged
from gcsolve.util.tree import flatten

LEAST_S, PLAN_S = 4.0, 10.0
"""Seconds for the least budget and for a plan: equality is that of every plan, proven to be the best one or not."""

since_213 = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="torch before 2.13 traces this otherwise"
)


def x(*shape: int) -> torch.Tensor:
    """The same normal numbers every time, whatever the global generator."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


class Of(nn.Module):
    """A model made of a function and the modules it uses: `Of(lambda m, x: m.a(x).tanh(), a=nn.Linear(8, 8))`."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def two_layers() -> dict[str, nn.Module]:
    """The parts of most models made with `Of`."""
    return {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}


def with_buffer(function: Callable[..., Any]) -> nn.Module:
    """`Of` two layers, with a buffer `average` of eight zeros."""
    model = Of(function, **two_layers())
    model.register_buffer("average", torch.zeros(8))
    return model


class Config:
    """An object that is no module and has one attribute."""

    kind: str | None = None

    def __init__(self) -> None:
        self.kind = None


@dataclass(frozen=True)
class KeepNothing:
    """A solver of one's own: rerun whatever can be rerun, random ops included."""

    name: ClassVar[str] = "keep_nothing"

    def solve(self, problem: gcsolve.Problem, *, time_limit_s: float = 60.0, gap: float = 0.005) -> gcsolve.Solution:
        order = order_from_kept(problem.graph, ())
        return judged(self.name, problem, schedule_from_order(problem.graph, order), solve_s=0.0, gap=gap)


def call(model: nn.Module, example: Any) -> Any:
    """`model` on an example input of any accepted form."""
    if isinstance(example, torch.Tensor):
        return model(example)
    if isinstance(example, (tuple, list)):
        return model(*example)
    return model(**example)


def total(output: Any) -> torch.Tensor:
    """A loss that reads every differentiable output, each with its own weight."""
    tensors = [t for t in flatten(output, "output")[0] if t.requires_grad]
    scalars = [t for t in tensors if t.dim() == 0] or tensors
    return sum(((k + 1.0) * t.float().square()).mean() for k, t in enumerate(scalars))  # type: ignore[return-value]


def train(
    model: nn.Module, example: Any, loss: Callable[[Any], torch.Tensor] = total, steps: int = 3
) -> dict[str, Any]:
    """Everything a run leaves: losses, gradients of each step, parameters, buffers, generator state.

    Args:
        example: an example input, or a function that makes a fresh one.
    """
    example = example() if callable(example) else example
    torch.manual_seed(7)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    left: dict[str, Any] = {}
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(call(model, example))
        value.backward()
        left[f"loss {step}"] = value.detach().clone()
        for name, p in model.named_parameters():
            left[f"gradient {step} {name}"] = None if p.grad is None else p.grad.clone()
        for k, t in enumerate(t for t in flatten(example, "x")[0] if t.is_leaf):
            left[f"input gradient {step} {k}"] = None if t.grad is None else t.grad.clone()
            t.grad = None
        optimizer.step()
    for name, t in model.state_dict().items():
        left[f"state {name}"] = t.clone()
    left["generator"] = torch.get_rng_state()
    return left


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Bitwise, key by key."""
    assert a.keys() == b.keys()
    for key, x in a.items():
        y = b[key]
        if x is None or y is None:
            assert x is y, key
        else:
            assert x.dtype == y.dtype, key
            assert torch.equal(x, y), f"{key} differs by {(x - y).abs().max() if x.is_floating_point() else 'value'}"


def planned_pair(model: nn.Module, example: Any, **options: Any) -> tuple[nn.Module, nn.Module]:
    """The untouched model, and a planned copy of it."""
    return model, gcsolve.solve(copy.deepcopy(model), example, **{"budget": "1MB", **options}).module


def assert_equal(pair: list[list[torch.Tensor | None]]) -> None:
    """Two lists of tensors, bitwise and dtype by dtype; None equals None alone."""
    for a, b in zip(*pair, strict=True):
        assert a is b is None or (a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b))


def gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad for p in module.parameters()]


def assert_built_trains_the_same(
    build: Callable[[], nn.Module], example: Any, *, loss: Callable[[Any], torch.Tensor] = total, **options: Any
) -> None:
    """`assert_trains_the_same` for a model that cannot be copied: `build()` makes the same one every time."""
    expected = train(build(), example, loss)
    given = example() if callable(example) else example
    first = gcsolve.solve(build(), given, budget=1.0, **options)
    for budget in _loose_middle_tight(first):
        given = example() if callable(example) else example
        plan = gcsolve.solve(build(), given, budget=f"{budget}B", time_limit_s=PLAN_S, **options)
        assert_same(expected, train(plan.module, example, loss))


def assert_trains_the_same(
    model: nn.Module, example: Any, *, loss: Callable[[Any], torch.Tensor] = total, **options: Any
) -> list[gcsolve.Plan]:
    """At the loosest, a middle and the tightest budget: the planned copy trains bitwise like the untouched one."""
    expected = train(copy.deepcopy(model), example, loss)
    first = gcsolve.solve(model, example() if callable(example) else example, budget=1.0, **options)
    plans = [first.at(budget=f"{budget}B", time_limit_s=PLAN_S) for budget in _loose_middle_tight(first)]
    for plan in plans:
        assert plan.peak_bytes <= plan.budget_bytes
        assert_same(expected, train(copy.deepcopy(plan.module), example, loss))
    return plans


def _loose_middle_tight(plan: gcsolve.Plan) -> tuple[int, int, int]:
    """Three budgets in bytes: the store-all peak, the least with one rerun a value, and half way between."""
    loose, tight = plan.baseline_peak_bytes, plan.minimum_budget(time_limit_s=LEAST_S).one_rerun_bytes
    return loose, (loose + tight) // 2, tight
