"""Real models at reduced size: the number promised is the number measured, and every result is bitwise the original's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gcsolve
from benchmarks import models as zoo

pytestmark = pytest.mark.heavy


def _lora() -> tuple[nn.Module, Any, None]:
    import peft

    model, example, _ = zoo.gpt2(layers=2, width=128, batch=2, length=64)
    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
    return peft.get_peft_model(model, config), example, None  # type: ignore[arg-type]


CASES: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: zoo.gpt2(layers=3, width=192, batch=2, length=128),
    "llama": lambda: zoo.llama(layers=3, width=128, batch=2, length=128),
    "resnet50": lambda: zoo.resnet50(batch=2, size=96),
    "vit_small": lambda: zoo.vit_small(batch=2, size=96),
    "unet": lambda: zoo.unet(batch=1, size=96),
    "mlp": lambda: zoo.mlp(layers=4, width=256, batch=512),
    "lora": _lora,
}


@pytest.mark.parametrize("name", CASES)
def test_peak_kept_and_results_equal(name: str) -> None:
    model, example, loss = CASES[name]()
    store_all = gcsolve.solve(model, example, budget=1.0, loss=loss)
    least = store_all.minimum_budget(time_limit_s=8).one_rerun_bytes
    for budget, steps in (((store_all.baseline_peak_bytes + least) // 2, 1), (int(least * 1.02), 3)):
        plan = store_all.at(budget=f"{budget}B")
        report = plan.verify(steps=steps, repeats=0)
        assert report.differences == ()
        assert report.measured_peak_bytes <= budget
        assert -0.01 <= report.prediction_error <= 0.02
        for solver in ("uniform", "uniform_sqrt", "blocks", "chen"):
            try:
                other = store_all.at(budget=f"{budget}B", solver=solver)
            except gcsolve.InfeasibleBudget:
                continue
            assert plan.overhead <= other.overhead


def test_frozen_base_keeps_nothing_for_its_weights() -> None:
    """With LoRA adapters only, no gradient of the base lives, and the peak falls by more than those gradients."""
    full, example, _ = zoo.gpt2(layers=2, width=128, batch=2, length=64)
    adapted, _, _ = _lora()
    whole = gcsolve.solve(full, example, budget=1.0)
    part = gcsolve.solve(adapted, example, budget=1.0)
    trainable = sum(p.numel() * 4 for p in adapted.parameters() if p.requires_grad)
    held = [
        sum(v.size_bytes for v in p.problem.graph.values if v.kind == "gradients" and v.pinned) for p in (whole, part)
    ]
    assert trainable <= held[1] <= trainable + 64 * 100
    assert held[0] > 10 * held[1]
    assert part.baseline_peak_bytes < whole.baseline_peak_bytes


@pytest.mark.gpu
def test_on_cuda() -> None:
    """The same code on a GPU: within budget there, and equal to eager within eager's own noise."""
    model, example, _ = zoo.gpt2(layers=3, width=192, batch=2, length=128)
    model, example = model.cuda(), {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in example.items()}
    plan = gcsolve.solve(model, example, budget=0.7)
    report = plan.verify(steps=2, repeats=0)
    assert report.measured_peak_bytes <= report.budget_bytes * 1.01
    assert report.rng_equal
    assert all(abs(a - b) <= 1e-3 * abs(b) for a, b in zip(report.losses, report.eager_losses, strict=True))
