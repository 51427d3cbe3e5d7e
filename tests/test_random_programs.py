"""Models made at random of ops, views, changes in place, draws and weights used again; trained beside eager.

Each seed is a program of its own: its outputs (values, views, the input, a weight), one or two calls in one backward, with
and without autocast; planned at its least budget, or with everything rerun. Loss, gradients, buffers and the generator's
state must be eager's bit for bit after two steps.

Every ISO week of the year has forty seeds of its own; `GCSOLVE_WEEK=7 pytest tests/test_random_programs.py` runs week 7's.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gcsolve
from tests.training import LEAST_S, PLAN_S, KeepNothing, assert_same, x

ROWS, WIDTH = 8, 16

WEEK = int(os.environ["GCSOLVE_WEEK"])  # `conftest.py` sets it to this week's number, unless it is set
SEEDS = range(1000 * WEEK, 1000 * WEEK + 40)

Op = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]  # (program, a value, another) -> value


def _changed(change: Callable[[torch.Tensor, torch.Tensor], Any]) -> Op:
    def op(m: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        made = a * 1.5
        change(made, b)
        return made

    return op


def _attention(m: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(a[None, None], b[None, None], a[None, None])[0, 0]


OPS: Sequence[Op] = (
    lambda m, a, b: m.linears[0](a),
    lambda m, a, b: m.linears[1](a),
    lambda m, a, b: a @ m.weight,
    lambda m, a, b: F.linear(a, m.weight),
    lambda m, a, b: m.layer_norm(a),
    lambda m, a, b: m.batch_norm(a),
    lambda m, a, b: F.dropout(a, 0.3),
    lambda m, a, b: torch.rand_like(a) * b,
    lambda m, a, b: a + b,
    lambda m, a, b: a * b.tanh(),
    lambda m, a, b: a / (1 + b.abs()),
    lambda m, a, b: a.detach() * b,
    lambda m, a, b: F.gelu(a),
    lambda m, a, b: a.clamp(-1, 1),
    lambda m, a, b: a.exp().log1p(),
    lambda m, a, b: a.cumsum(0).tanh(),
    lambda m, a, b: torch.where(a > 0, a, b),
    lambda m, a, b: a.masked_fill(b > 0.5, 0.1),
    lambda m, a, b: (a @ b.t()).softmax(-1) @ b,
    _attention,
    lambda m, a, b: torch.einsum("rw,rw->r", a, b)[:, None] * a,
    lambda m, a, b: torch.cat([a.chunk(4, 1)[k] for k in (2, 0, 3, 1)], 1),
    lambda m, a, b: a.unbind(0)[2] + b,
    lambda m, a, b: a[torch.arange(ROWS - 1, -1, -1)],
    lambda m, a, b: a.roll(3, 1).flip(0),
    lambda m, a, b: a.t().contiguous().t(),
    lambda m, a, b: a.unsqueeze(1).expand(ROWS, 2, WIDTH).mean(1),
    lambda m, a, b: a.reshape(ROWS, 4, 4).transpose(1, 2).reshape(ROWS, WIDTH),
    lambda m, a, b: a.topk(WIDTH, 1)[0],
    _changed(lambda made, b: made.relu_()),
    _changed(lambda made, b: made.add_(b)),
    _changed(lambda made, b: made[:, :4].copy_(b[:, 4:8])),
    _changed(lambda made, b: made.view(-1)[::3].mul_(0.5)),
)

OUTPUTS: Sequence[Callable[..., torch.Tensor]] = (
    lambda m, x, a: a,
    lambda m, x, a: a.view(-1) if a.is_contiguous() else a.t(),
    lambda m, x, a: a[1:, 3:9],
    lambda m, x, a: a.sin(),
    lambda m, x, a: x,
    lambda m, x, a: m.weight,
)


class Program(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.layer_norm, self.batch_norm = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.embedding = nn.Embedding(11, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.steps = tuple((draw.choice(OPS), draw.random(), draw.random()) for _ in range(draw.randint(4, 18)))
        self.outputs = tuple((draw.choice(OUTPUTS), draw.randint(1, 4)) for _ in range(draw.randint(1, 4)))

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = [x, self.embedding(tokens)]
        for op, a, b in self.steps:
            made.append(op(self, made[int(a * len(made))], made[int(b * len(made))]))
        return tuple(output(self, x, made[-back]) for output, back in self.outputs)


def _trained(module: nn.Module, calls: int, autocast: bool) -> dict[str, Any]:
    tokens = torch.arange(ROWS) % 5
    left: dict[str, Any] = {}
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    torch.manual_seed(1)
    for step in range(2):
        optimizer.zero_grad()
        inputs = [x(ROWS, WIDTH).requires_grad_() for _ in range(calls)]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs = [output for given in inputs for output in module(given, tokens)]
        losses = [
            (o.float() * torch.linspace(0.5, 1.5, o.numel()).view(o.shape) * (1 + 0.1 * k)).tanh().sum()
            for k, o in enumerate(outputs)
        ]
        torch.stack(losses).sum().backward()
        left |= {f"{step} output {k}": o.detach().clone() for k, o in enumerate(outputs)}
        left |= {f"{step} input {k}": t.grad for k, t in enumerate(inputs)}
        left |= {f"{step} {n}": None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}
        left |= {f"{step} buffer {n}": b.clone() for n, b in module.named_buffers()}
        optimizer.step()
    return left | {"generator": torch.get_rng_state()}


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"week {WEEK}, seed {seed}")
def test_random_program(seed: int) -> None:
    torch.manual_seed(seed)
    model, draw = Program(seed), random.Random(-seed)
    autocast, calls, least = draw.random() < 0.3, draw.randint(1, 2), draw.random() < 0.5
    example = x(ROWS, WIDTH).requires_grad_(), torch.arange(ROWS) % 5
    expected = _trained(copy.deepcopy(model), calls, autocast)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        if least:
            plan = gcsolve.solve(model, example, budget=1.0, backward_from="all")
            budget_bytes = plan.minimum_budget(time_limit_s=LEAST_S).one_rerun_bytes
            plan = plan.at(budget=f"{budget_bytes}B", time_limit_s=PLAN_S)
        else:
            plan = gcsolve.solve(model, example, budget="4MB", backward_from="all", solver=KeepNothing())
    assert_same(expected, _trained(plan.module, calls, autocast))
