"""Threads: one that trains, draws and prints, while others plan, is as undisturbed as if it were alone."""

from __future__ import annotations

import io
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gcsolve
from gcsolve.demo import GPT
from gcsolve.ops.peak_meter import PeakMeter
from tests.models import Dropout
from tests.training import Of, assert_same, x


class Everything(nn.Module):
    """Attention with dropout, a GRU, interpolation, BatchNorm, a distribution: what a trace replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.gru = nn.GRU(16, 16, 2, dropout=0.1, batch_first=True)
        self.conv, self.norm = nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.gru(self.encoder(x))
        y = F.scaled_dot_product_attention(y, y, y, dropout_p=0.1)
        image = F.interpolate(self.norm(self.conv(y[:, None])), scale_factor=1.7, mode="bilinear")
        noise = torch.distributions.Normal(0.0, y.detach().std()).sample()
        with torch.inference_mode():
            scale = max(torch.ones(()), torch.full((), 2.0))
        return image.square().mean() + F.dropout(y + noise, 0.3).sum() * float(scale)


def _trained(go_on: Callable[[int], bool], text: Any) -> dict[str, torch.Tensor]:
    """Everything that a run leaves, of as many steps as `go_on` wants."""
    torch.manual_seed(5)
    numpy.random.seed(5)
    random.seed(5)
    own = torch.Generator().manual_seed(7)
    model = Everything()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    left: dict[str, torch.Tensor] = {}
    step = 0
    while go_on(step):
        optimizer.zero_grad()
        inputs = torch.randn(2, 6, 16, generator=own) + random.random() + float(numpy.random.rand())
        loss = model(inputs)
        loss.backward()
        optimizer.step()
        left[f"loss {step}"] = loss.detach()
        print("step", step, file=text or sys.stdout)
        step += 1
    left |= model.state_dict() | {
        f"gradient {name}": p.grad for name, p in model.named_parameters() if p.grad is not None
    }
    left["generators"] = torch.cat([torch.get_rng_state(), own.get_state()])
    left["host"] = torch.tensor([random.random(), float(numpy.random.rand())], dtype=torch.float64)
    return left


@contextmanager
def _in_threads(*work: Callable[[], Any]) -> Iterator[list[threading.Thread]]:
    """Runs them in threads of their own; what one raises is raised at the end."""
    errors: list[BaseException] = []

    def run(one: Callable[[], Any]) -> None:
        try:
            one()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    yield threads
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.heavy
def test_a_thread_that_trains_is_as_undisturbed_as_alone(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    gpt = GPT(vocabulary=64, layers=2, width=32, heads=2).to(torch.bfloat16)
    here, tokens = Dropout(), torch.arange(32).view(2, 16)
    interval, left = sys.getswitchinterval(), {}
    sys.setswitchinterval(1e-4)
    try:
        with _in_threads(
            lambda: [gcsolve.solve(gpt, tokens, budget=1.0, device="h200") for _ in range(2)],
            lambda: [gcsolve.solve(here, x(2, 8, 16), budget=share, time_limit_s=5) for share in (1.0, 0.95)],
        ) as planners:
            left = _trained(lambda step: step < 5 or any(p.is_alive() for p in planners), None)
    finally:
        sys.setswitchinterval(interval)
    printed = capsys.readouterr().out
    steps = sum(name.startswith("loss") for name in left)
    alone = io.StringIO()
    assert_same(left, _trained(lambda step: step < steps, alone))
    assert printed == alone.getvalue()


def test_plans_made_at_once_are_the_plans_made_one_after_the_other() -> None:
    def plan(width: int, plans: dict[int, gcsolve.Plan]) -> None:
        model = Of(lambda m, x: F.gelu(m.b(F.gelu(m.a(x)))), a=nn.Linear(width, width), b=nn.Linear(width, width))
        plans[width] = gcsolve.solve(model, x(64, width), budget=1.0)

    widths = (8, 12, 16, 24)
    alone: dict[int, gcsolve.Plan] = {}
    at_once: dict[int, gcsolve.Plan] = {}
    for width in widths:
        plan(width, alone)
    with _in_threads(*(lambda w=width: plan(w, at_once) for width in widths)):
        pass
    assert [at_once[w].peak_bytes for w in widths] == [alone[w].peak_bytes for w in widths]
    assert [at_once[w].module.code for w in widths] == [alone[w].module.code for w in widths]


def test_peaks_are_measured_one_at_a_time() -> None:
    """Two recordings at once would lose each other's events."""
    peaks: list[int] = []

    def measure() -> None:
        for _ in range(50):
            with PeakMeter() as meter:
                y = torch.ones(1000)
                del y
            peaks.append(meter.peak_bytes)

    with _in_threads(*[measure] * 4):
        pass
    assert peaks == [4000] * 200


PLANS = """
import sys, threading
import torch
import gcsolve
from gcsolve.demo import GPT

def plan(seed):
    tokens = torch.arange(96).view(2, 48)
    gcsolve.solve(GPT(vocabulary=96, layers=3, width=32, heads=2), tokens, budget=0.7, time_limit_s=5, gap=1e-6)

out, err, filters = sys.stdout, sys.stderr, len(__import__("warnings").filters)
threads = [threading.Thread(target=plan, args=(seed,)) for seed in range(3)]
[thread.start() for thread in threads]
for line in range(200):
    print("line", line, flush=True)
    threads[0].join(0.01)
[thread.join() for thread in threads]
assert (sys.stdout, sys.stderr) == (out, err)
print("after", flush=True)
"""


@pytest.mark.heavy
def test_nothing_that_other_threads_print_is_lost() -> None:
    """In a process of its own, whose descriptors are its own too; with programs that HiGHS solves."""
    result = subprocess.run([sys.executable, "-c", PLANS], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n") == [*(f"line {n}" for n in range(200)), "after", ""]
