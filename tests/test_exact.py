"""A recomputed value is the value computed; an effect happens once: bitwise, over three optimizer steps."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gcsolve
from gcsolve.errors import CallError
from gcsolve.schedule import order_from_kept, schedule_from_order
from gcsolve.solver.base import judged
from tests import models
from tests.training import Of, assert_same, assert_trains_the_same, call, total, train


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def _needs_grad(x: torch.Tensor) -> torch.Tensor:
    return x.requires_grad_()


CASES: dict[str, tuple[Any, Any]] = {
    "mlp": (lambda: models.MLP(), lambda: _x(64, 32)),
    "input needs gradient": (lambda: models.MLP(), lambda: _needs_grad(_x(64, 32))),
    "random ops": (lambda: models.Dropout(), lambda: _x(4, 8, 16)),
    "batch norm": (lambda: models.BatchNorm(), lambda: _x(4, 4, 8, 8)),
    "buffer read in backward": (lambda: models.BufferReadInBackward(), lambda: _x(4, 8)),
    "in place": (lambda: models.InPlace(), lambda: _x(4, 8)),
    "tied": (lambda: models.Tied(), lambda: torch.arange(12).view(3, 4)),
    "frozen": (lambda: models.Frozen(), lambda: _x(8, 16)),
    "loss and logits": (lambda: models.LossAndLogits(), lambda: (_x(8, 16), torch.arange(8) % 5)),
    "lstm": (lambda: _Lstm(), lambda: _x(6, 3, 8)),
    "batch norm in eval": (lambda: _frozen_norm(), lambda: _x(4, 4, 8, 8)),
    "one block many times": (lambda: _Repeated(), lambda: _x(4, 16)),
    "mixed dtypes": (lambda: _Mixed(), lambda: _x(4, 8)),
    "bfloat16": (lambda: models.MLP(3, 16).bfloat16(), lambda: _x(8, 16).bfloat16()),
}


class _Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.lstm(x)[0], 0.2)


class _Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = self.block(x)
        return x


class _Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(torch.tanh(self.a(x)).double())
        spectrum = torch.fft.rfft(y, dim=-1)
        return (
            torch.where(y.argmax(1, keepdim=True) > 3, y, -y).float() + (spectrum * spectrum.conj()).real.mean().float()
        )


def _frozen_norm() -> nn.Module:
    model = models.BatchNorm()
    model.norms[1].eval()
    return model


@pytest.mark.parametrize("name", CASES)
def test_trains_bitwise_like_the_untouched_model(name: str) -> None:
    make, example = CASES[name]
    torch.manual_seed(0)
    assert_trains_the_same(make(), example())


def test_values_rerun_more_than_once() -> None:
    """Below what one rerun a value can reach, plans rerun more often, and still train the same."""
    torch.manual_seed(0)
    model, x = models.MLP(12, 64), _x(512, 64)
    first = gcsolve.solve(model, x, budget=1.0)
    least = first.minimum_budget()
    assert least.bytes < least.one_rerun_bytes
    plan = first.at(budget=f"{least.bytes}B")
    assert max(plan.schedule.runs(plan.problem.graph)) > 2
    expected = train(copy.deepcopy(model), x)
    assert_same(expected, train(plan.module, x))


def test_a_tight_budget_really_recomputes() -> None:
    torch.manual_seed(0)
    plans = assert_trains_the_same(models.MLP(6, 64), _x(256, 64))
    assert plans[0].overhead == 0.0
    assert plans[-1].overhead > 0.05
    assert plans[-1].peak_bytes < 0.8 * plans[0].peak_bytes


@dataclass(frozen=True)
class KeepNothing:
    """A solver of one's own: rerun whatever can be rerun, random ops included."""

    name: ClassVar[str] = "keep_nothing"

    def solve(self, problem: gcsolve.Problem, *, time_limit_s: float = 60.0, gap: float = 0.005) -> gcsolve.Solution:
        order = order_from_kept(problem.graph, ())
        return judged(self.name, problem, schedule_from_order(problem.graph, order), solve_s=0.0, gap=gap)


@pytest.mark.parametrize("name", ["random ops", "batch norm", "in place", "one block many times", "lstm"])
def test_everything_rerun(name: str) -> None:
    """Random ops replay the generator state of their first run; the generator ends where the untouched model's does."""
    make, example = CASES[name]
    torch.manual_seed(0)
    model = make()
    expected = train(copy.deepcopy(model), example())
    plan = gcsolve.solve(model, example(), budget="1GB", solver=KeepNothing())
    assert plan.overhead > 0
    runs = plan.schedule.runs(plan.problem.graph)
    rerun = {plan.problem.graph.nodes[i].op.split(".")[1] for i, n in enumerate(runs) if n > 1}
    if name == "random ops":
        assert {"native_dropout", "bernoulli", "rand_like", "randn"} <= rerun
    if name == "batch norm":
        assert "_native_batch_norm_legit_functional" in rerun
    assert_same(expected, train(plan.module, example()))


def test_batch_norms_rerun_after_another_forward() -> None:
    """The second call has written the running statistics by the time the first one's backward reruns the layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    plain, images = copy.deepcopy(model), _x(4, 3, 8, 8)
    plan = gcsolve.solve(model, images, budget="1GB", solver=KeepNothing())
    assert any(
        n > 1 and "batch_norm" in plan.problem.graph.nodes[i].op
        for i, n in enumerate(plan.schedule.runs(plan.problem.graph))
    )
    for m in (plan.module, plain):
        (total(m(images)) + total(m(2 * images))).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    assert_same(dict(model.state_dict()), dict(plain.state_dict()))


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_around_the_call_backward_outside(dtype: torch.dtype) -> None:
    def under(model: nn.Module) -> Any:
        class Under(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = model

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                with torch.autocast("cpu", dtype):
                    y = self.inner(x)
                return y.float()

        return Under()

    torch.manual_seed(0)
    model, x = models.MLP(3, 16), _x(8, 16)
    plain, planned = copy.deepcopy(model), copy.deepcopy(model)
    with torch.autocast("cpu", dtype):
        plan = gcsolve.solve(planned, x, budget=1.0)
    assert_same(train(under(plain), x), train(under(plan.module), x))
    assert len(plan.module._gcsolve.cache) == 1  # planned under autocast: no second plan was needed


@pytest.mark.parametrize("around", [True, False])
def test_autocast_casts_a_shared_weight_once(around: bool) -> None:
    """So its gradients are summed in the lower precision; not that of a cast that the model writes itself."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=not around):
            for _ in range(3):
                x = torch.tanh(m.a(x))
            x = x @ m.a.weight.to(torch.bfloat16) + m.rnn(x.float())[0]
            with torch.autocast("cpu", enabled=False):
                x = m.a(x.float())
        return x

    torch.manual_seed(0)
    model = Of(
        forward if not around else lambda m, x: sum(m.a(torch.tanh(m.a(x))) for _ in range(3)), a=nn.Linear(8, 8)
    )
    model.rnn = nn.GRU(8, 8)
    left = []
    for module in (copy.deepcopy(model), None):
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            module = module or gcsolve.solve(model, _x(16, 8), budget="1GB", solver=KeepNothing()).module
            output = module(_x(16, 8))
        output.float().square().mean().backward()
        left.append({name: p.grad for name, p in module.named_parameters()})
    assert_same(*left)


class _Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return (x.float() @ w) ** 3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, w = ctx.saved_tensors
        inner = gradient.float() * 3 * (x.float() @ w) ** 2
        return (inner @ w.t()).to(x.dtype), x.float().t() @ inner


@pytest.mark.parametrize("around", [True, False])
@pytest.mark.parametrize("kind", ["attention", "own backward"])
def test_backward_outside_the_autocast_block_is_not_under_autocast(kind: str, around: bool) -> None:
    """Backward formulas made of ops that autocast would cast: torch's, of attention with dropout, and an author's own."""

    def ops(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.a(x)
        if kind == "own backward":
            return _Cubed.apply(y, m.a.weight)
        heads = y.view(2, 4, 4, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, m.b(heads), heads, dropout_p=0.1)

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=not around):
            return ops(m, x)

    torch.manual_seed(0)
    model = Of(ops if around else forward, a=nn.Linear(16, 16), b=nn.Linear(4, 4))
    x = _needs_grad(_x(8, 16))

    def gradients(module: nn.Module | None, inside: bool = False) -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=around or inside):
            module = module or gcsolve.solve(model, x, budget="1MB", solver=KeepNothing()).module
            torch.manual_seed(1)
            loss = module(x).float().square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        left = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        left["x"], x.grad = x.grad, None
        return left

    expected = gradients(copy.deepcopy(model))
    other = gradients(copy.deepcopy(model), inside=True)
    assert any(not torch.equal(expected[name], other[name]) for name in expected)  # else nothing is shown below
    assert_same(expected, gradients(None))


def test_planned_without_autocast_then_called_under_it_plans_again() -> None:
    torch.manual_seed(0)
    model, x = models.MLP(3, 16), _x(8, 16)
    plain, plan = copy.deepcopy(model), gcsolve.solve(model, x, budget=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = plain(x), plan.module(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(found, expected)


def test_nested_arguments_and_outputs_keep_their_types() -> None:
    torch.manual_seed(0)
    model = models.Nested()
    example = {"x": _needs_grad(_x(5, 8)), "mask": torch.ones(5, 8), "flip": True, "scale": 0.5}
    plan = gcsolve.solve(model, example, budget=1.0)
    output, expected = plan.module(**example), model(**example)
    assert type(output) is models.Output
    assert output.missing is None
    assert output.note == "note"
    assert output.extra["x"] is example["x"]
    assert output.extra["mask"] is example["mask"]
    assert output.extra["best"].dtype == torch.int64
    assert not output.extra["best"].requires_grad
    assert torch.equal(output.main, expected.main)
    assert torch.equal(output.extra["pair"][1], expected.extra["pair"][1])
    total(output).backward()
    grads, example["x"].grad = [p.grad for p in model.parameters()], None
    model.zero_grad()
    total(expected).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, model.parameters(), strict=True))


def test_a_changed_flag_or_shape_is_planned_again_never_baked_in() -> None:
    torch.manual_seed(0)
    model = models.Nested()
    plan = gcsolve.solve(model, {"x": _x(5, 8)}, budget="1MB")
    for changed in ({"x": _x(5, 8), "flip": True}, {"x": _x(5, 8), "scale": 2.0}, {"x": _x(7, 8)}):
        assert torch.equal(plan.module(**changed).main, model(**changed).main)
    assert len(plan.module._gcsolve.cache) == 4
    plan.module(x=_x(7, 8))
    assert len(plan.module._gcsolve.cache) == 4


def test_eval_and_no_grad_run_the_original_forward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
    plan = gcsolve.solve(model, _x(4, 4, 8, 8), budget=1.0)
    other = _x(2, 4, 6, 6)
    plan.module.eval()
    assert not model.training
    assert torch.equal(plan.module(other), model(other))
    plan.module.train()
    with torch.no_grad():
        assert plan.module(other).grad_fn is None
    assert len(plan.module._gcsolve.cache) == 1


def test_the_planned_module_is_the_model_in_all_but_its_forward() -> None:
    model = models.Tied()
    plan = gcsolve.solve(model, torch.arange(12).view(3, 4), budget=1.0)
    assert isinstance(plan.module, models.Tied)
    assert plan.module.embed.weight is model.embed.weight
    assert list(plan.module.state_dict()) == list(model.state_dict())
    model.note = "set later"
    assert plan.module.note == "set later"
    clone = copy.deepcopy(plan.module)
    assert clone.embed.weight is not model.embed.weight
    assert torch.equal(clone(torch.arange(12).view(3, 4)), model(torch.arange(12).view(3, 4)))
    assert "aten.embedding.default" in plan.module.code


def test_loss_traced_with_the_model() -> None:
    torch.manual_seed(0)
    model, x = models.MLP(3, 16), _x(8, 16)
    plain = copy.deepcopy(model)
    plan = gcsolve.solve(model, x, budget=1.0, loss=lambda y: y.square().mean())
    value = plan.module(x)
    value.backward()
    expected = plain(x).square().mean()
    expected.backward()
    assert torch.equal(value, expected)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


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


def test_hooks_on_the_model_run_once_a_call() -> None:
    model, x = models.MLP(2, 8), _x(8, 8)
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    plan = gcsolve.solve(model, x, budget=1.0)
    assert calls == []
    call(plan.module, x)
    assert calls == [1]


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


def test_a_setting_changed_after_planning_is_planned_again() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.BatchNorm1d(8), nn.Dropout(0.1))
    plan, x = gcsolve.solve(model, _x(16, 8), budget="1MB"), _x(16, 8)
    plain = copy.deepcopy(model)
    for change in (
        lambda m: setattr(m[3], "p", 0.9),
        lambda m: setattr(m[2], "eps", 0.1),
        lambda m: setattr(m[1], "approximate", "tanh"),
        lambda m: m.__setitem__(1, nn.ReLU()),
    ):
        for m in (plain, model):
            change(m)
        torch.manual_seed(1)
        expected = plain(x)
        torch.manual_seed(1)
        assert torch.equal(plan.module(x), expected)
    assert len(plan.module._gcsolve.cache) == 5


def test_a_partial_function_is_a_setting_with_its_arguments() -> None:
    torch.manual_seed(0)
    model = Of(lambda m, x: m.act(m.a(x)), a=nn.Linear(8, 8), act=partial(F.leaky_relu, negative_slope=0.1))
    plan, x = gcsolve.solve(model, _x(16, 8), budget="1MB"), _x(16, 8)
    for act in (partial(F.leaky_relu, negative_slope=0.5), partial(F.elu, alpha=0.5)):
        model.act = act
        assert torch.equal(plan.module(x), model(x))
    assert len(plan.module._gcsolve.cache) == 3


def test_a_function_made_anew_in_every_call_is_the_same() -> None:
    def distance(margin: float) -> Any:
        return lambda a, b: margin - F.cosine_similarity(a, b)

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        a, b, c = m.a(x).chunk(3)
        return F.triplet_margin_with_distance_loss(a, b, c, distance_function=distance(1.5))

    torch.manual_seed(0)
    assert_trains_the_same(Of(forward, a=nn.Linear(8, 8)), _x(12, 8))


def test_sum_backward_sends_one_number_spread_out() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.BatchNorm1d(8))
    plain, x = copy.deepcopy(model), _x(64, 8)
    plan = gcsolve.solve(model, x, budget=1.0)
    for m in (plain, plan.module):
        m(x).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
