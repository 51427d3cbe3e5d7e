"""Planning without the device: the target's kernels in the trace, and its memory as the default budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import gcsolve
from gcsolve.capture.target_kernels import TargetKernels
from gcsolve.capture.trace import trace
from gcsolve.cost.devices import DeviceSpec, get_device
from gcsolve.errors import ArgumentError, CallError
from tests.models import MLP

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
SOFTMAX = aten._safe_softmax.default


class Attention(nn.Module):
    """One attention of 4 heads of width 16 (or 12) over 24 tokens."""

    def __init__(self, width: int = 16, key_heads: int = 4, masked: bool = False, **options: Any) -> None:
        super().__init__()
        self.width, self.key_heads, self.masked, self.options = width, key_heads, masked, options
        self.qkv = nn.Linear(8, (4 + 2 * key_heads) * width)

    def forward(self, x: Tensor) -> Tensor:
        heads = (4, self.key_heads, self.key_heads)
        q, k, v = (
            t.unflatten(-1, (-1, self.width)).transpose(1, 2)
            for t in self.qkv(x).split([n * self.width for n in heads], -1)
        )
        mask = x[:, :, 0].ge(0)[:, None, None, :] if self.masked else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options).float().sum()


def ops(model: nn.Module, device: str = "h200", dtype: torch.dtype = torch.bfloat16) -> dict[Any, Any]:
    """op → its fake outputs, of the step traced for that device."""
    model = model.to(dtype)
    traced = trace(model, (torch.randn(2, 24, 8, dtype=dtype),), {}, kernels=TargetKernels(get_device(device)))
    return {n.target: n.meta.get("val") for n in traced.joint.graph_module.graph.nodes if n.op == "call_function"}


@pytest.mark.parametrize(
    ("model", "device", "dtype", "kernel"),
    [
        (Attention(is_causal=True), "h200", torch.bfloat16, FLASH),
        (Attention(dropout_p=0.1), "h200", torch.float16, FLASH),
        (Attention(key_heads=2, enable_gqa=True), "rtx4090", torch.bfloat16, FLASH),
        (Attention(width=12), "h200", torch.bfloat16, FLASH),
        (Attention(masked=True, dropout_p=0.1), "h200", torch.bfloat16, EFFICIENT),
        (Attention(), "h200", torch.float32, EFFICIENT),
        (Attention(), "v100", torch.float16, EFFICIENT),
        (Attention(key_heads=2, enable_gqa=True), "h200", torch.float32, SOFTMAX),
        (Attention(), "h200", torch.float64, SOFTMAX),
        (Attention(), "m2", torch.bfloat16, SOFTMAX),
    ],
)
def test_attention_is_the_kernel_that_runs_there(model, device, dtype, kernel):
    found = ops(model, device, dtype)
    assert {FLASH, EFFICIENT, SOFTMAX} & set(found) == {kernel}
    assert not any("for_cpu" in str(op) for op in found)
    backward = {FLASH: aten._scaled_dot_product_flash_attention_backward.default,
                EFFICIENT: aten._scaled_dot_product_efficient_attention_backward.default}.get(kernel)  # fmt: skip
    assert backward is None or backward in found


def test_what_the_kernels_save():
    out, log_sum_exp, *_, seed, _, _ = ops(Attention(is_causal=True))[FLASH]
    assert (out.shape, out.dtype) == ((2, 4, 24, 16), torch.bfloat16)
    assert (log_sum_exp.shape, log_sum_exp.dtype) == ((2, 4, 24), torch.float32)
    assert seed.nbytes == 16
    _, padded, *_ = ops(Attention(), dtype=torch.float32)[EFFICIENT]
    assert padded.shape == (2, 4, 32)


def test_torchs_switches_are_obeyed():
    with sdpa_kernel(SDPBackend.MATH):
        assert SOFTMAX in ops(Attention())
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        assert EFFICIENT in ops(Attention())


def test_autocast_reaches_the_kernel():
    with torch.autocast("cpu", torch.bfloat16):
        out = ops(Attention(), dtype=torch.float32)[FLASH][0]
    assert out.dtype == torch.bfloat16


def test_attention_inside_torchs_own_modules_is_found_and_nothing_stays_patched():
    before = F.scaled_dot_product_attention
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).bfloat16()
    x = torch.randn(2, 8, 16, dtype=torch.bfloat16)
    traced = trace(layer, (x,), {}, kernels=TargetKernels(get_device("h200")))
    assert FLASH in {n.target for n in traced.joint.graph_module.graph.nodes}
    assert F.scaled_dot_product_attention is before


def test_a_plan_for_elsewhere_is_read_here_and_does_not_run():
    model, x = Attention(dropout_p=0.1).bfloat16(), torch.randn(2, 24, 8, dtype=torch.bfloat16)
    plan = gcsolve.solve(model, x, budget=1.0, device="h200")
    assert "_scaled_dot_product_flash_attention" in plan.module.code
    with pytest.raises(CallError, match=r"_scaled_dot_product_flash_attention.*device='cpu'"):
        plan.module(x)
    with pytest.raises(gcsolve.ArgumentError, match=r"model is \(cpu\), and the plan is for device='h200' \(cuda\)"):
        plan.verify()
    here = gcsolve.solve(model, x, budget=1.0, device="cpu")
    assert here.verify(steps=1, repeats=0).ok


def test_a_plan_for_elsewhere_without_such_kernels_runs_here_too():
    x = torch.randn(64, 32)
    plan = gcsolve.solve(MLP(), x, budget=1.0, device="h200")
    plan.module(x).sum().backward()
    for measure in (plan.verify, lambda: gcsolve.compare(MLP(), x, budgets=[1.0], device="h200", measure=True)):
        with pytest.raises(gcsolve.ArgumentError, match="plan with device='cpu' to measure here"):
            measure()  # a peak of this CPU's says nothing about that GPU


def test_masks_of_half_precision_dropout_are_used_as_cuda_uses_them():
    """The CPU's eager backward makes a 16-bit copy of the mask; CUDA's fused kernel does not."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).bfloat16()
    assert aten.native_dropout_backward.default in ops(model)


# --- the default budget ----------------------------------------------------------------------------------------------


def test_the_device_less_its_reserve_is_the_default_budget():
    spec = DeviceSpec("tiny", 4 * 10**9, 1e11, {"float32": 1e12})
    plan = gcsolve.solve(MLP(), torch.randn(8, 32), device=spec, solver="store_all")
    assert plan.budget_bytes == 3 * 10**9
    assert plan.at().budget_bytes == 3 * 10**9


def test_here_it_is_what_is_free_and_what_the_model_has_already(monkeypatch):
    monkeypatch.setattr("gcsolve.session.free_memory_bytes", lambda spec: 9 * 10**9)
    monkeypatch.setattr("gcsolve.cost.devices.DeviceSpec.reserve_bytes", 10**9)
    weights = sum(p.nbytes for p in MLP().parameters())
    assert gcsolve.solve(MLP(), torch.randn(8, 32), solver="store_all").budget_bytes == 8 * 10**9 + weights


def test_activations_alone_have_no_default_budget():
    with pytest.raises(ArgumentError, match=r"scope='activations' has no default budget.*budget_gb"):
        gcsolve.solve(MLP(), torch.randn(8, 32), scope="activations")
