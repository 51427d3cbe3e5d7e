"""Training loops, modes, dtypes and shapes of outputs as people write them: bitwise the untouched model's results."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import gcsolve
from gcsolve.errors import CallError, TraceError
from gcsolve.ops.peak_meter import PeakMeter
from tests import models
from tests.test_exact import KeepNothing
from tests.training import Of, assert_same, assert_trains_the_same, total, train, x


def _pair(model: nn.Module, example: Any, **options: Any) -> tuple[nn.Module, nn.Module]:
    """The untouched model, and a planned copy of it."""
    return model, gcsolve.solve(copy.deepcopy(model), example, **{"budget": "1MB", **options}).module


def _equal(left: list[list[torch.Tensor | None]]) -> None:
    for a, b in zip(*left, strict=True):
        assert a is b is None or (a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b))


def _gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad for p in module.parameters()]


# --- kinds of computation ----------------------------------------------------------------------------------------------


def _experts(m: Any, x: torch.Tensor) -> torch.Tensor:
    weights, chosen = m.gate(x).softmax(-1).topk(2, -1)
    return sum(e(x) * (weights * (chosen == k)).sum(-1, keepdim=True) for k, e in enumerate(m.experts))  # type: ignore[return-value]


def _choices(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(m.a(x))
    ordered, places = y.sort(1)
    best = y.max(1, keepdim=True).values + y.median(1, keepdim=True).values + y.kthvalue(3, 1, keepdim=True).values
    pooled = F.max_pool1d(y[None], 3, 1, 1)[0] + y.cummax(1).values
    return ordered * y.gather(1, places.flip(1)) + best + pooled + torch.where(y.argmax(1, keepdim=True) > 3, y, -y)


def _spectrum(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.fft.rfft(torch.tanh(m.a(x)).transpose(1, 2))
    y = torch.fft.irfft(torch.einsum("bik,iok->bok", y, m.weight), n=8).transpose(1, 2)
    z = torch.fft.fft2(torch.view_as_complex(torch.stack([y, y.sin()], -1)).to(torch.complex128))
    return torch.tanh(m.a((z.abs() + z.real).float()))


def _outputs(m: Any, x: torch.Tensor) -> dict[str, Any]:
    y = torch.tanh(m.a(x) * m.w)
    views = {
        "transposed": m.a.weight.t(),
        "slice": m.w[2:5],
        "detached": m.w.detach(),
        "detached slice": m.a.weight[1:].detach(),
        "tail": x[1:],
        "spread": y.sum(0, keepdim=True).expand(4, 8),
    }
    return {
        "input": x,
        "parameter": m.w,
        **views,
        "rows": y.unbind(0),
        "halves": y.chunk(2, 1),
        "parts": y.split([3, 5], 1),
    }


def _in_place(m: Any, x: torch.Tensor) -> Any:
    y = m.a(x)
    y[:, 2:4].mul_(2)
    y[:, 0] = y[:, 1] * 3
    y.view(2, 2, 8)[0].add_(1)
    z = F.relu(m.norm(m.conv(y.reshape(1, 4, 8))), inplace=True) * 1
    z.masked_fill_(z > 1, 0.5)
    z += 1
    z[..., ::2] *= 3
    out = torch.zeros(4, 8)
    out[torch.tensor([0, 2])] = z[0, :2]
    return out.scatter_add_(1, torch.zeros(4, 1, dtype=torch.long), z[0, :, :1]).tanh(), z.unbind(1)


def _force(m: Any, x: torch.Tensor) -> torch.Tensor:
    """The gradient of an energy, as in models of molecules."""
    x = x.detach().requires_grad_()
    (force,) = torch.autograd.grad(m.b(torch.tanh(m.a(x))).sum(), x, create_graph=True)
    return force


def _narrow_inside(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.inner(x).float()


def _recurrent(m: Any, x: torch.Tensor) -> torch.Tensor:
    state, out = torch.zeros(x.shape[1], 12), []
    for step in x:
        state = m.cell(step, state)
        out.append(state)
    return torch.stack(out)


COMPUTATIONS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "mixture of experts": lambda: (
        Of(_experts, gate=nn.Linear(16, 4), experts=nn.ModuleList(models.MLP(2, 16) for _ in range(4))),
        x(32, 16),
    ),
    "discrete choices": lambda: (Of(_choices, a=nn.Linear(16, 16)), x(8, 16)),
    "fft, complex64 and complex128": lambda: (
        Of(_spectrum, a=nn.Linear(4, 4), weight=nn.Parameter(torch.randn(4, 4, 5, dtype=torch.complex64))),
        x(3, 8, 4),
    ),
    "every kind of output": lambda: (Of(_outputs, a=nn.Linear(8, 8), w=nn.Parameter(torch.randn(8))), x(4, 8)),
    "every kind of output, input with gradient": lambda: (
        Of(_outputs, a=nn.Linear(8, 8), w=nn.Parameter(torch.randn(8))),
        x(4, 8).requires_grad_(),
    ),
    "in place": lambda: (
        Of(_in_place, a=nn.Linear(8, 8), conv=nn.Conv1d(4, 4, 3, padding=1), norm=nn.BatchNorm1d(4)),
        x(4, 8),
    ),
    "gradient in forward": lambda: (Of(_force, a=nn.Linear(8, 8), b=nn.Linear(8, 1)), x(8, 8)),
    "autocast inside": lambda: (Of(_narrow_inside, inner=models.MLP(2, 16)), x(8, 16)),
    "frozen embedding of integers": lambda: (
        nn.Sequential(nn.Embedding(10, 16).requires_grad_(False), models.MLP(2, 16)),
        torch.arange(10),
    ),
    "eval mode, input with gradient": lambda: (models.BatchNorm().eval(), x(4, 4, 8, 8).requires_grad_()),
}


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_computations(name: str) -> None:
    torch.manual_seed(0)
    assert_trains_the_same(*COMPUTATIONS[name]())


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_a_recurrent_loop_of_50_steps(cell: Any) -> None:
    torch.manual_seed(0)
    if cell is nn.LSTMCell:
        made: nn.Module = Of(lambda m, x, h: m.inner(x, (h, h))[0], inner=cell(8, 12))
    else:
        made = cell(8, 12)
    model, example = Of(_recurrent, cell=made), x(50, 2, 8)
    expected = train(copy.deepcopy(model), example)
    plan = gcsolve.solve(model, example, budget=0.8, solver="greedy")
    assert plan.overhead > 0
    assert_same(expected, train(plan.module, example))


def _chain(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = m.a(x)
    for _ in range(1200):
        x = torch.sin(x)
    return x


@pytest.mark.heavy
def test_a_chain_longer_than_pythons_stack() -> None:
    torch.manual_seed(0)
    model, example = Of(_chain, a=nn.Linear(8, 8)), x(64, 8)
    expected = train(copy.deepcopy(model), example)
    plan = gcsolve.solve(model, example, budget=0.5)
    assert plan.overhead > 0
    assert_same(expected, train(plan.module, example))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("first", [True, False])
def test_recurrent_layers(kind: Any, first: bool) -> None:
    """A width that no vector unit divides, an input with and without gradient, and dropout between the layers."""
    torch.manual_seed(0)
    layers = kind(8, 12, num_layers=2, bidirectional=True, batch_first=first, dropout=0.3)
    model, example = (
        Of(lambda m, x: m.layers(x if first else torch.tanh(m.a(x)))[0], a=nn.Linear(8, 8), layers=layers),
        x(3, 3, 8),
    )
    expected = train(copy.deepcopy(model), example)
    plan = gcsolve.solve(model, example, budget="1MB", solver=KeepNothing())
    assert_same(expected, train(plan.module, example))


def test_the_default_dtype_around_the_call_only() -> None:
    torch.manual_seed(0)
    model = Of(lambda m, x: torch.tanh(m.a(x)) * torch.ones(8) / 3 + torch.rand(4, 8), a=nn.Linear(8, 8))
    left: list[list[torch.Tensor | None]] = []
    example = x(4, 8)
    for module in _pair(model, example):
        torch.manual_seed(1)
        outputs = []
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            try:
                outputs.append(module(example))
            finally:
                torch.set_default_dtype(torch.float32)
            outputs[-1].sum().backward()
        left.append([*outputs, *_gradients(module)])
    _equal(left)


class _SetsDefault(nn.Module):
    def __init__(self, explicit: bool) -> None:
        super().__init__()
        self.a, self.explicit = nn.Linear(8, 8), explicit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.set_default_dtype(torch.float64)
        try:
            places = torch.arange(8, dtype=torch.float64 if self.explicit else None)
            return torch.tanh(self.a(x)).double() * torch.ones(8) + places / 3 + torch.rand(8)
        finally:
            torch.set_default_dtype(torch.float32)


def test_the_default_dtype_inside_forward_only() -> None:
    torch.manual_seed(0)
    assert_trains_the_same(_SetsDefault(explicit=True), x(4, 8))
    with pytest.raises(TraceError, match=r"sets the default dtype, and aten\.div.* \(torch\.float64 in forward"):
        gcsolve.solve(_SetsDefault(explicit=False), x(4, 8), budget=1.0)


def test_grad_scaler_with_float16_and_clipping() -> None:
    torch.manual_seed(0)
    left: list[list[torch.Tensor | None]] = []
    for module in _pair(models.MLP(3, 16), x(8, 16)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = module(x(8, 16)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        left.append([*(p.detach() for p in module.parameters()), torch.tensor(scaler.get_scale())])
    _equal(left)


def test_frozen_layers_keep_nothing_and_the_peak_falls() -> None:
    """Nothing of the frozen half is kept for backward, and the measured peak falls as the predicted one does."""
    torch.manual_seed(0)
    whole, part = models.MLP(8, 64), models.MLP(8, 64)
    part.layers[:4].requires_grad_(False)
    plans = [gcsolve.solve(model, x(256, 64), budget=1.0) for model in (whole, part)]
    assert not [d for d in plans[1].decisions if d.module in {f"layers.{k}" for k in range(4)}]
    reports = [plan.verify(steps=1, repeats=0) for plan in plans]
    assert all(r.ok and abs(r.prediction_error) < 0.005 for r in reports)
    fallen = 4 * (256 * 64 * 4) + 4 * (64 * 64 + 64) * 4  # what four layers keep and their gradients
    assert reports[0].measured_peak_bytes - reports[1].measured_peak_bytes >= 0.9 * fallen


# --- loops -----------------------------------------------------------------------------------------------------------


def test_accumulation_over_four_micro_batches_with_two_modules_interleaved() -> None:
    torch.manual_seed(0)
    one, other = models.Dropout(), models.BatchNorm()
    pairs = [_pair(one, x(4, 8, 16), budget=0.8), _pair(other, x(4, 4, 8, 8), budget=0.9)]
    left: list[list[torch.Tensor | None]] = []
    for a, b in zip(*pairs, strict=True):
        torch.manual_seed(1)
        optimizers = [torch.optim.Adam(m.parameters()) for m in (a, b)]
        for _ in range(3):
            for k in range(4):
                first, second = total(a(x(4, 8, 16) * (k + 1))), total(b(x(4, 4, 8, 8) * (k + 1)))
                first.backward()
                second.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        left.append([*(p.detach() for m in (a, b) for p in m.parameters()), *b.buffers(), torch.get_rng_state()])
    _equal(left)


def test_gradients_of_chosen_inputs_and_weights() -> None:
    torch.manual_seed(0)
    left: list[list[torch.Tensor | None]] = []
    for module in _pair(models.Dropout(), x(4, 8, 16).requires_grad_()):
        torch.manual_seed(1)
        example, weights = x(4, 8, 16).requires_grad_(), list(module.parameters())
        grads = torch.autograd.grad(total(module(example)), [example, weights[2], weights[0]])
        total(module(example)).backward(inputs=[weights[0]])
        assert example.grad is None
        left.append([*grads, *_gradients(module)])
        with pytest.raises(ZeroDivisionError):
            _raise_in_backward(module(example))
        total(module(example)).backward()
        left[-1] += _gradients(module)
    _equal(left)


def _raise_in_backward(output: torch.Tensor) -> None:
    output.register_hook(lambda g: g / 0 if g is None else 1 / 0)  # type: ignore[arg-type, return-value]
    output.sum().backward()


def test_forwards_without_backward_leave_nothing() -> None:
    plan = gcsolve.solve(models.Dropout(), x(4, 8, 16), budget=0.8)
    plan.module(x(4, 8, 16))
    example = x(4, 8, 16)
    with PeakMeter() as meter:
        gc.disable()
        try:
            for _ in range(20):
                plan.module(example)
        finally:
            gc.enable()
    assert meter.end_bytes == 0


def _step(called: list[str], name: str, optimizer: torch.optim.Optimizer, _parameter: torch.Tensor) -> None:
    called.append(name)
    optimizer.step()
    optimizer.zero_grad()


def test_hooks_on_parameters_and_an_optimizer_in_backward() -> None:
    """Once a step each; a planned step has all gradients before the first hook runs, whatever the hooks' order."""
    torch.manual_seed(0)
    left: list[list[torch.Tensor | None]] = []
    for module in _pair(models.MLP(3, 16), x(8, 16)):
        called: list[str] = []
        for name, parameter in module.named_parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
            parameter.register_hook(lambda g: g * 2)
            parameter.register_post_accumulate_grad_hook(functools.partial(_step, called, name, optimizer))
        for _ in range(3):
            total(module(x(8, 16))).backward()
        assert sorted(called) == sorted([name for name, _ in module.named_parameters()] * 3)
        left.append([p.detach() for p in module.parameters()])
    _equal(left)


@pytest.mark.parametrize("before", [True, False])
def test_an_optimizer_made_before_or_after_planning_and_a_state_saved_and_loaded(before: bool) -> None:
    torch.manual_seed(0)
    model = models.Dropout()
    plain = copy.deepcopy(model)
    made = torch.optim.AdamW(model.parameters()) if before else None
    plan = gcsolve.solve(model, x(4, 8, 16), budget=0.8)
    optimizer = made or torch.optim.AdamW(plan.module.parameters())
    left: list[list[torch.Tensor | None]] = []
    for module, opt in ((plain, torch.optim.AdamW(plain.parameters())), (plan.module, optimizer)):
        torch.manual_seed(1)
        for _ in range(2):
            opt.zero_grad()
            total(module(x(4, 8, 16))).backward()
            opt.step()
        file = io.BytesIO()
        torch.save({"model": module.state_dict(), "optimizer": opt.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file)
        with torch.no_grad():
            for p in module.parameters():
                p.zero_()
        module.load_state_dict(saved["model"])
        opt.load_state_dict(saved["optimizer"])
        opt.zero_grad()
        total(module(x(4, 8, 16))).backward()
        opt.step()
        left.append([p.detach() for p in module.parameters()])
    _equal(left)


def test_copying_and_pickling() -> None:
    torch.manual_seed(0)
    plan = gcsolve.solve(models.MLP(3, 16), x(8, 16), budget="1MB")
    twin = copy.deepcopy(plan)
    assert twin.peak_bytes == plan.peak_bytes
    assert torch.equal(copy.deepcopy(plan.module)(x(8, 16)), plan.module(x(8, 16)))
    with pytest.raises(CallError, match=r"cannot be pickled; save its state_dict"):
        pickle.dumps(plan.module)
    with pytest.raises(CallError, match=r"a Plan is not pickled.*plan\.save\(path\)"):
        pickle.dumps(plan)
    with pytest.raises(CallError, match="cannot be pickled"):
        torch.save(plan.module, io.BytesIO())


def test_two_threads_plan_and_train() -> None:
    """At once: no trace disturbs the other thread, traced or training, and no replay of a dropout meets another's draw."""
    problems: list[BaseException] = []

    def work(k: int) -> None:
        try:
            for _ in range(3):  # while one plans, the other trains
                model = models.MLP(3, 16)
                plain = copy.deepcopy(model)
                planned = gcsolve.solve(model, x(8 + k, 16), budget="1MB").module
                for _ in range(5):
                    for module in (plain, planned):
                        total(module(x(8 + k, 16))).backward()
                assert all(
                    torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True)
                )
            drop = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))
            dropped = gcsolve.solve(drop, x(512, 16).requires_grad_(), budget="1GB", solver=KeepNothing()).module
            drop[0].weight.data.copy_(torch.eye(16))
            drop[0].bias.data.zero_()
            for _ in range(30):
                example = x(512, 16).requires_grad_()
                output = dropped(example)
                output.sum().backward()
                assert torch.equal(output == 0, example.grad == 0)
        except BaseException as error:  # handed to the test's own thread
            problems.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_planning_changes_no_kernel_of_another_thread() -> None:
    """torch.export switches whole back ends off while it traces, for all threads."""
    seen: list[bool] = []
    before = torch.backends.mkldnn.enabled

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.backends.mkldnn.enabled)
            return self.linear(x).tanh()

    gcsolve.solve(Looks(), x(4, 8), budget=1.0)
    assert set(seen) == {before}


# --- modes -----------------------------------------------------------------------------------------------------------


def test_functional_call() -> None:
    torch.manual_seed(0)
    left: list[list[torch.Tensor | None]] = []
    for module in _pair(models.MLP(3, 16), x(8, 16)):
        other = {name: (p.detach() * 2).requires_grad_() for name, p in module.named_parameters()}
        output = torch.func.functional_call(module, other, (x(8, 16),))
        output.sum().backward()
        fixed = torch.func.functional_call(module, {name: p.detach() for name, p in other.items()}, (x(8, 16),))
        assert not fixed.requires_grad
        left.append([output, fixed, *(p.grad for p in other.values()), *_gradients(module)])
    _equal(left)


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
    for module in _pair(models.Dropout(), x(4, 8, 16), budget=0.8):
        torch.manual_seed(1)
        whole = Of(lambda m, x: m.head(m.part(x.sin())).tanh(), part=module, head=nn.Linear(16, 16))
        nn.init.eye_(whole.head.weight)
        nn.init.zeros_(whole.head.bias)
        run = torch.compile(whole, backend=backend) if left else whole
        for _ in range(2):
            total(run(x(4, 8, 16))).backward()
        left.append(_gradients(module))
    _equal(left)
    torch.compiler.reset()
    with pytest.raises(Exception, match="a gcsolve plan runs as it was planned"):
        torch.compile(whole, backend=backend, fullgraph=True)(x(4, 8, 16))


def test_requires_grad_changed_after_planning() -> None:
    torch.manual_seed(0)
    left: list[list[torch.Tensor | None]] = []
    for module in _pair(models.MLP(3, 16), x(8, 16)):
        total(module(x(8, 16))).backward()
        module.layers[0].requires_grad_(False)
        total(module(x(8, 16))).backward()
        left.append(_gradients(module))
        module.requires_grad_(False)
        output = module(x(8, 16))
        assert not output.requires_grad
        left[-1] += [output]
        module.layers[2].requires_grad_(True)
        total(module(x(8, 16))).backward()
        left[-1] += _gradients(module)
    _equal(left)


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
        for module in _pair(model, x(4, 8)):
            module.zero_grad()
            criterion(module(x(4, 8))).backward()
            left.append([torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()])
        _equal(left)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_planned_and_verified_where_gradients_are_off(around: Any) -> None:
    torch.manual_seed(0)
    model, example = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Linear(8, 8)), x(16, 8)
    with around():
        plan = gcsolve.solve(model, example, budget=1.0)
        assert plan.at(budget=f"{plan.minimum_budget().one_rerun_bytes}B").verify(steps=2, repeats=1).ok
    assert_same(train(copy.deepcopy(model), example), train(plan.module, example))
