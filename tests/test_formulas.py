"""Activation memory against the published formula: Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models" (2022). a heads, s tokens, b batch, h width; 16 bits, dropout masks of one byte. A layer stores
s·b·h·(34 + 5·a·s/h) bytes, and with its attention core recomputed 34·s·b·h."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gcsolve

HEADS, WIDTH = 16, 2048
CORE = ("aten.bmm.default", "aten.mul.Tensor", "aten._softmax.default", "aten.native_dropout.default")


class Block(nn.Module):
    """A layer as the paper counts it: attention written out, or as one kernel."""

    def __init__(self, kernel: bool) -> None:
        super().__init__()
        self.kernel = kernel
        self.norm_attention, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm_attention(x)).view(batch, length, 3, HEADS, width // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        if self.kernel:
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        else:
            scores = q @ k.transpose(-1, -2) * (width // HEADS) ** -0.5
            mixed = F.dropout(F.softmax(scores, dim=-1), 0.1) @ v
        x = x + self.drop(self.project(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm_mlp(x)))))


class Layers(nn.Module):
    def __init__(self, layers: int, kernel: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(kernel) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


@functools.cache
def stored(layers: int, length: int, batch: int, kernel: bool = False, cost: str = "auto") -> gcsolve.Plan:
    """Store-all for an H200 that is not here; nothing is allocated."""
    with torch.device("meta"):
        model, x = Layers(layers, kernel).bfloat16(), torch.empty(batch, length, WIDTH, dtype=torch.bfloat16)
    return gcsolve.solve(model, x, budget=1.0, solver="store_all", device="h200", cost=cost)


def layer_bytes(length: int, batch: int, kernel: bool = False, without: tuple[str, ...] = ()) -> int:
    """What one more layer adds to the bytes that backward reads."""

    def total(layers: int) -> int:
        kept = stored(layers, length, batch, kernel).decisions
        return sum(d.size_bytes for d in kept if not (d.op in without and d.module.count(".") == 1))

    return total(3) - total(2)


@pytest.mark.parametrize(("length", "batch"), [(1024, 1), (2048, 4)])
def test_a_layer_with_materialised_attention_stores_what_the_paper_says(length: int, batch: int) -> None:
    sbh = length * batch * WIDTH
    assert layer_bytes(length, batch) == pytest.approx(sbh * (34 + 5 * HEADS * length / WIDTH), rel=0.01)


def test_without_the_attention_core_it_stores_34_sbh() -> None:
    """The core left out of the count, and the kernel that recomputes it by itself."""
    core = ("aten._softmax.default", "aten.native_dropout.default")
    assert layer_bytes(2048, 4, without=core) == pytest.approx(34 * 2048 * 4 * WIDTH, rel=0.01)
    assert layer_bytes(2048, 4, kernel=True) == pytest.approx(34 * 2048 * 4 * WIDTH, rel=0.01)


def run_again(length: int, copies: int, cost: str) -> tuple[gcsolve.Plan, list[gcsolve.graph.Node]]:
    """The plan of four layers with so many times 2·a·s²·b bytes too few, and the nodes that it runs again."""
    plan = stored(4, length, 1, cost=cost)
    budget_bytes = plan.baseline_peak_bytes - copies * 2 * HEADS * length**2
    found = plan.at(budget=f"{budget_bytes}B", solver="auto")
    graph = found.problem.graph
    return found, [n for n, runs in zip(graph.nodes, found.schedule.runs(graph), strict=True) if runs > 1]


@pytest.mark.parametrize(
    ("cost", "length", "copies", "layers"),
    [("auto", 8192, 1, 1), ("auto", 8192, 2, 2), ("auto", 8192, 4, 3), ("flops", 8192, 2, 2)],
)
def test_of_long_sequences_the_solver_recomputes_the_attention_core_first(cost, length, copies, layers) -> None:
    """Where the core is what there is to gain, nothing but the core is run again, in so many of four layers."""
    found, again = run_again(length, copies, cost)
    assert {n.op for n in again} <= set(CORE)
    assert all(n.module.startswith("layers.") and n.module.count(".") == 1 for n in again)  # in the block itself
    assert len({n.module for n in again}) == layers
    assert found.gap <= 0.005


def test_of_shorter_ones_normalizations_and_gelu_go_first_as_they_cost_less_a_byte() -> None:
    _, again = run_again(4096, 2, "auto")
    assert {"aten.gelu.default", "aten.native_layer_norm.default"} <= {n.op for n in again}
    assert "aten._softmax.default" not in {n.op for n in again}
