"""emit: the schedule written out, in the planned order, every value forgotten at its planned point."""

from __future__ import annotations

import re

import torch
from torch import nn

import gcsolve
from gcsolve.execution.draws import draw, replay, rng_state
from gcsolve.ops.peak_meter import PeakMeter
from tests import models
from tests.test_exact import KeepNothing
from tests.training import assert_trains_the_same


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.a(x)).sin().sum()


def _body(code: str) -> list[str]:
    """The op lines of generated code, module prefixes and the dropping of names left out."""
    lines = [line.split(";")[0].strip().replace("torch.ops.aten.", "") for line in code.splitlines()]
    return [line for line in lines if line and not re.match(r"def|args|\w+ = next|from|import", line)]


BACKWARD = [
    "cos = cos.default(tanh)",
    "expand = expand.default(tangents_1, [4, 8])",
    "mul = mul.Tensor(expand, cos)",
    "tanh_backward = tanh_backward.default(mul, tanh)",
    "t_1 = t.default(tanh_backward)",
    "mm_1 = mm.default(t_1, primals_2)",
    "t_2 = t.default(mm_1)",
    "t_3 = t.default(t_2)",
    "return (t_3,)",
]


def test_golden_text_of_a_plan_that_keeps_everything() -> None:
    plan = gcsolve.solve(_Two(), _x(4, 8), budget=1.0, solver="store_all")
    step = next(iter(plan.module._gcsolve.cache.values()))
    assert _body(step.emitted.forward.code) == [
        "t = t.default(primals_1)",
        "mm = mm.default(primals_2, t)",
        "tanh = tanh.default(mm)",
        "sin = sin.default(tanh)",
        "sum_1 = sum.default(sin)",
        "return (sum_1, tanh)",
    ]
    assert _body(step.emitted.backward.code) == BACKWARD


def test_golden_text_of_a_plan_that_keeps_nothing() -> None:
    plan = gcsolve.solve(_Two(), _x(4, 8), budget="1MB", solver=KeepNothing())
    step = next(iter(plan.module._gcsolve.cache.values()))
    assert _body(step.emitted.forward.code)[-1] == "return (sum_1,)"
    again = ["t = t.default(primals_1)", "mm = mm.default(primals_2, t)", "tanh = tanh.default(mm)"]
    assert _body(step.emitted.backward.code) == [*again, *BACKWARD]


def test_no_name_outlives_its_value() -> None:
    """The code's own drops, replayed: at every op the bytes of the names alive are what the simulator says."""
    torch.manual_seed(0)
    plan = gcsolve.solve(models.MLP(4, 64), _x(256, 64), budget=0.8)
    step = next(iter(plan.module._gcsolve.cache.values()))
    for graph in (step.emitted.forward, step.emitted.backward):
        alive: set[str] = set()
        for line in graph.code.splitlines():
            match = re.match(r"\s+(\w+) = ", line)
            if match:
                alive.add(match[1])
            for dropped in re.findall(r"; +((?:\w+ = )+)None", line):
                alive -= set(re.findall(r"\w+", dropped))
        returned = re.search(r"return \((.*)\)", graph.code)
        assert returned
        assert alive - {"args_iter"} <= set(re.findall(r"\w+", returned[1]))


def test_both_graphs_can_be_read() -> None:
    plan = gcsolve.solve(_Two(), _x(4, 8), budget=1.0)
    assert "# forward" in plan.module.code
    assert "# backward" in plan.module.code
    assert "tanh_backward" in plan.module.code


class _Shared(nn.Module):
    """Values with several readers, so that gradients are summed; one gradient is summed and handed out as well."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.a(x + y)
        parts = [z[0].exp(), z[1].cos(), z.sin()[2], self.b(z).tanh()[3], (y * y)[0], self.a(z)[1]]
        return sum(parts, torch.zeros(64)).square() * y.mean()


def test_gradients_are_summed_in_place_as_autograd_sums_them() -> None:
    torch.manual_seed(0)
    example = (_x(64, 64).requires_grad_(), (0.1 * _x(64, 64)).requires_grad_())
    plans = assert_trains_the_same(_Shared(), example)
    lines = _body(plans[0].module.code)
    assert sum("add_.Tensor" in line for line in lines) >= 4
    report = plans[0].verify(steps=1, repeats=0)
    assert report.measured_peak_bytes <= report.eager_peak_bytes
    assert abs(report.prediction_error) < 0.005


def test_a_gradient_that_is_handed_out_too_is_not_summed_in_place() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return y.sin() * (x + y).exp()  # the gradient of the sum is x's, and the first part of y's

    example = (_x(8, 8).requires_grad_(), (2 * _x(8, 8)).requires_grad_())
    plan = gcsolve.solve(Twice(), example, budget=1.0)
    assert "add_.Tensor" not in plan.module.code
    assert plan.verify(steps=2, repeats=0).differences == ()


def test_a_replay_takes_the_memory_of_the_first_run_and_leaves_the_generator_as_it_was() -> None:
    x, here = _x(100, 100), torch.device("cpu")
    op = torch.ops.aten.native_dropout.default
    with PeakMeter() as first:
        kept = draw(op, x, 0.5, True)
    torch.manual_seed(1)
    state = rng_state(here)
    kept = draw(op, x, 0.5, True)
    now = rng_state(here)
    with PeakMeter() as again:
        made = replay(state, here, op, x, 0.5, True)
    assert again.peak_bytes == first.peak_bytes
    assert torch.equal(made[0], kept[0])
    assert torch.equal(rng_state(here), now)
