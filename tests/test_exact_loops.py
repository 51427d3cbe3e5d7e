"""Training loops as people write them: scaled, accumulated, interleaved, hooked, saved, in threads."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from ortools.math_opt.python import mathopt
from torch import nn

import gcsolve
from gcsolve.errors import CallError
from gcsolve.ops.peak_meter import PeakMeter
from tests import models
from tests.training import PLAN_S, KeepNothing, assert_equal, planned_pair, total, x


def test_grad_scaler_with_float16_and_clipping() -> None:
    torch.manual_seed(0)
    left: list[list[torch.Tensor | None]] = []
    for module in planned_pair(models.MLP(3, 16), x(8, 16)):
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
    assert_equal(left)


def test_accumulation_over_four_micro_batches_with_two_modules_interleaved() -> None:
    torch.manual_seed(0)
    one, other = models.Dropout(), models.BatchNorm()
    pairs = [planned_pair(one, x(4, 8, 16), budget=0.8), planned_pair(other, x(4, 4, 8, 8), budget=0.9)]
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
    assert_equal(left)


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
    for module in planned_pair(models.MLP(3, 16), x(8, 16)):
        called: list[str] = []
        for name, parameter in module.named_parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
            parameter.register_hook(lambda g: g * 2)
            parameter.register_post_accumulate_grad_hook(functools.partial(_step, called, name, optimizer))
        for _ in range(3):
            total(module(x(8, 16))).backward()
        assert sorted(called) == sorted([name for name, _ in module.named_parameters()] * 3)
        left.append([p.detach() for p in module.parameters()])
    assert_equal(left)


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
    assert_equal(left)


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


def test_two_threads_plan_and_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, with mixed-integer programs running: no trace disturbs the other thread, whether it traces or trains, and no
    replay of a dropout meets another's draw."""
    errors: list[BaseException] = []
    programs: Counter[int] = Counter()
    run_program = mathopt.solve

    def counted(*args: Any, **kwargs: Any) -> Any:
        programs[threading.get_ident()] += 1
        return run_program(*args, **kwargs)

    def work(k: int) -> None:
        try:
            for _ in range(3):  # while one plans, the other trains
                model, example = models.MLP(6, 32), x(128 + k, 32)
                plain = copy.deepcopy(model)
                planned = gcsolve.solve(model, example, budget=0.8, gap=1e-4, time_limit_s=PLAN_S).module
                for _ in range(5):
                    for module in (plain, planned):
                        total(module(example)).backward()
                assert all(
                    torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True)
                )
            assert programs[threading.get_ident()] >= 3
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
            errors.append(error)

    monkeypatch.setattr(mathopt, "solve", counted)
    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


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
