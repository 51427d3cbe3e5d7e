"""cost/flops.py: FLOPs and bytes moved, from shapes alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from gcsolve.cost import flops
from gcsolve.cost.base import OpInfo
from gcsolve.cost.flops import node_bytes_moved, node_flops, op_info
from gcsolve.cost.measured import OpCache
from tests.tracing import CPU, the, traced

aten = torch.ops.aten


def test_matmul_flops():
    (node,) = traced(torch.mm, torch.randn(3, 5), torch.randn(5, 7))
    assert node_flops(node) == 2 * 3 * 5 * 7


def test_no_formula_is_none_not_zero():
    (node,) = traced(torch.sin, torch.randn(8))
    assert node_flops(node) is None


def test_same_total_as_torchs_counter():
    w1, w2 = torch.randn(8, 3, 3, 3), torch.randn(10, 8 * 6 * 6)

    def step(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> Any:
        w1, w2 = w1.detach().requires_grad_(), w2.detach().requires_grad_()
        y = F.linear(F.relu(F.conv2d(x, w1)).flatten(1), w2).sum()
        return torch.autograd.grad(y, [w1, w2])

    x = torch.randn(2, 3, 8, 8)
    with FlopCounterMode(display=False) as counter:
        step(x, w1, w2)
    ours = sum(node_flops(n) or 0 for n in traced(step, x, w1, w2))
    assert ours == counter.get_total_flops() > 0


def test_attention_with_grouped_heads():
    q, k = torch.randn(2, 8, 16, 4), torch.randn(2, 2, 16, 4)

    def attend(q: torch.Tensor, k: torch.Tensor) -> Any:
        q = q.detach().requires_grad_()
        out = F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        return torch.autograd.grad(out.sum(), q)

    nodes = traced(attend, q, k)
    one = 2 * (2 * 8) * 16 * 16 * 4
    assert node_flops(the(nodes, aten._scaled_dot_product_flash_attention_for_cpu.default)) == 2 * one
    assert node_flops(the(nodes, aten._scaled_dot_product_flash_attention_for_cpu_backward.default)) == 5 * one


# --- bytes moved --------------------------------------------------------------------------------------------------------


def test_views_move_nothing():
    nodes = traced(lambda x: x.t().reshape(2, 6).unsqueeze(0), torch.randn(3, 4).t().contiguous())
    views = [n for n in nodes if "clone" not in str(n.target)]
    assert views
    assert {node_bytes_moved(n) for n in views} == {0}


def test_elementwise_reads_and_writes():
    (node,) = traced(torch.add, torch.randn(100), torch.randn(100))
    assert node_bytes_moved(node) == 3 * 400


def test_same_input_twice_is_read_once():
    (node,) = traced(lambda x: x * x, torch.randn(100))
    assert node_bytes_moved(node) == 2 * 400


def test_broadcast_dimension_is_read_once():
    nodes = traced(lambda x, y: x.expand(50, 100) + y, torch.randn(100), torch.randn(50, 100))
    assert node_bytes_moved(the(nodes, aten.add.Tensor)) == 400 + 2 * 50 * 400


def test_embedding_reads_only_its_rows():
    (node,) = traced(lambda i, t: F.embedding(i, t), torch.zeros(6, dtype=torch.int64), torch.randn(1000, 8))
    assert node_bytes_moved(node) == 6 * 8 + 2 * 6 * 8 * 4


def test_in_place_writes_its_target():
    nodes = traced(lambda x, y: x.clone().mul_(y), torch.randn(100), torch.randn(100))
    assert node_bytes_moved(the(nodes, aten.mul_.Tensor)) == 3 * 400


def test_op_info_names_dtype_and_device():
    (node,) = traced(torch.mm, torch.randn(2, 2).bfloat16(), torch.randn(2, 2).bfloat16())
    assert op_info(node) == OpInfo("aten.mm.default", 16, True, 3 * 8, "bfloat16", "cpu")


def test_a_safe_softmax_moves_more_than_a_softmax():
    """It looks for rows that are masked throughout: input and output once more, a mask twice, and a second output."""
    (node,) = traced(lambda x: aten._safe_softmax(x, -1), torch.randn(10, 100))
    assert node_bytes_moved(node) == (2 + 3) * 4000 + 2 * 1000


# --- tf32 ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def precisions() -> Iterator[Any]:
    """torch's float32 settings, as they were before."""
    backends: Any = torch.backends
    matmul, convolution = backends.cuda.matmul, backends.cudnn.conv
    before = matmul.fp32_precision, convolution.fp32_precision
    yield backends
    matmul.fp32_precision, convolution.fp32_precision = before


def test_tf32_is_what_torch_lets_a_gpu_do(precisions):
    (node,) = traced(torch.mm, torch.randn(3, 3), torch.randn(3, 3))
    conv = the(traced(F.conv2d, torch.randn(1, 1, 4, 4), torch.randn(1, 1, 3, 3)), aten.convolution.default)
    assert flops.op_info(node).dtype == "float32"
    assert flops.op_info(conv).dtype == "tf32"  # torch's default for convolutions
    one = OpCache.of(CPU).path
    precisions.cuda.matmul.fp32_precision = "tf32"  # now torch.get_float32_matmul_precision() raises
    precisions.cudnn.conv.fp32_precision = "ieee"  # and torch.backends.cudnn.allow_tf32
    assert flops.op_info(node).dtype == "tf32"
    assert flops.op_info(conv).dtype == "float32"
    assert OpCache.of(CPU).path != one


def test_tf32_by_torchs_older_setting(precisions):
    (node,) = traced(torch.mm, torch.randn(3, 3), torch.randn(3, 3))
    torch.set_float32_matmul_precision("high")
    try:
        assert flops.op_info(node).dtype == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")
