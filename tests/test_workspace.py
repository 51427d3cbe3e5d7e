"""cost/workspace.py: what ops take while they run, measured alone on this machine or estimated for another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import gcsolve
from gcsolve.cost import workspace as workspace_room
from gcsolve.cost.devices import get_device
from gcsolve.cost.workspace import library_bytes, workspace, workspace_bytes
from gcsolve.ops import run as alone_room
from gcsolve.ops.peak_meter import PeakMeter
from gcsolve.util.memo import Memo
from tests.tracing import CPU, H100, the, traced

aten = torch.ops.aten


def test_mask_product_casts_inside():
    (node,) = traced(torch.mul, torch.randn(64, 64), torch.zeros(64, 64, dtype=torch.bool))
    found = workspace(node, CPU, measure=True)
    assert found.measured
    assert found.size_bytes == 64 * 64 * 4
    assert workspace_bytes(node, CPU, measure=False) == found.size_bytes  # the estimate knows this one


def test_plain_elementwise_needs_none():
    (node,) = traced(torch.exp, torch.randn(64, 64))
    assert workspace(node, CPU, measure=True).size_bytes == 0
    assert workspace_bytes(node, H100, measure=True) == 0


def step_ops(x: torch.Tensor, w: torch.Tensor, table: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> Any:
    """Forward and backward of the ops named as likely to need workspace."""
    w, table = w.detach().requires_grad_(), table.detach().requires_grad_()
    y = F.conv2d(x, w, padding=1)
    y = F.max_pool2d(F.batch_norm(y, None, None, training=True), 2)
    y = F.interpolate(y, scale_factor=2.0, mode="bilinear")
    y = F.dropout(y, 0.5)
    y = torch.cat([y, y], dim=1).flatten(2)
    mean_square = y.var(-1).mean()
    e = F.layer_norm(F.embedding(ids, table), (16,))
    a = F.scaled_dot_product_attention(e[:, None], e[:, None], e[:, None])
    logits = a.flatten(1)[:, :10]
    spd = e[0].T @ e[0] + 3 * torch.eye(16)
    loss = F.cross_entropy(logits, labels) + mean_square + torch.linalg.cholesky(spd).sum()
    return torch.autograd.grad(loss, [w, table])


def likely_inputs() -> list[torch.Tensor]:
    return [
        torch.randn(2, 3, 16, 16),
        torch.randn(8, 3, 3, 3),
        torch.randn(50, 16),
        torch.randint(0, 50, (2, 12)),
        torch.randint(0, 10, (2,)),
    ]


def test_measured_peak_of_each_op_is_its_outputs_plus_workspace(monkeypatch):
    """Run the traced graph's ops one by one under the public meter, with other values than the room itself uses."""
    monkeypatch.setattr("gcsolve.ops.peak_meter.gc.collect", lambda: 0)  # 0.3 s a time, and nothing here makes cycles
    nodes = traced(step_ops, *likely_inputs())
    checked = 0
    for node in nodes:
        found = workspace(node, CPU, measure=True)
        assert found.measured, f"{node.target} was not measured"
        if "getitem" in str(node.target) or node.target is aten.linalg_cholesky_ex.default:
            continue
        args, kwargs = alone_room.synthetic_arguments(node, CPU.kind, alone_room.well_conditioned)
        with torch.no_grad(), PeakMeter() as meter:
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        outputs = sum(alone_room.fresh_output_bytes(node).values())
        assert meter.peak_bytes == outputs + found.size_bytes, str(node.target)
        assert meter.end_bytes == outputs, f"{node.target} holds other sizes than its shapes say"
        checked += 1
        del result
    assert checked > 20


class Bags(torch.nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bags = torch.nn.EmbeddingBag(500, 8, mode=mode)
        self.head = torch.nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return self.head(self.bags(ids, starts)).square().mean()


class LaidOutAnew(torch.nn.Module):
    """The convolution's gradient comes with its channels last, and is copied when all gradients are there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = torch.nn.Linear(650, 96 * 16), torch.nn.Conv2d(96, 256, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).view(-1, 96, 4, 4)
        return self.conv(y.contiguous(memory_format=torch.channels_last)).square().mean()


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation": True}, {"scope": "activations"}])
def test_gradients_that_autograd_copies_keep_the_budget(options):
    plan = gcsolve.solve(LaidOutAnew(), torch.randn(1, 650), budget=1.0, **options)
    report = plan.verify(steps=1, repeats=0)
    assert report.ok
    assert abs(report.prediction_error) < 0.001


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_embeddings_keep_their_budget(mode):
    plan = gcsolve.solve(Bags(mode), (torch.randint(0, 500, (5120,)), torch.arange(0, 5120, 10)), budget=1.0)
    report = plan.verify(steps=1, repeats=0)
    assert report.ok
    assert abs(report.prediction_error) < 0.01


def test_a_matrix_exponential_keeps_its_budget_whatever_its_norm():
    (node,) = traced(torch.linalg.matrix_exp, torch.zeros(48, 48))
    found = workspace(node, CPU, measure=True)
    for scale in (0, 1e-4, 0.1, 1, 5, 40):
        matrix = torch.full((48, 48), scale / 48)
        with torch.no_grad(), PeakMeter() as meter:
            torch.linalg.matrix_exp(matrix)
        assert meter.peak_bytes <= 4 * 48 * 48 + found.size_bytes, scale


@pytest.mark.parametrize(
    ("left", "right"),
    [((64, 32), (4, 32, 48)), ((32, 64), (64, 48)), ((4, 48, 32), (32, 64))],
    ids=["rows", "sum", "columns"],
)
def test_a_matmul_of_groups_keeps_its_budget_however_they_are_filled(left, right):
    a, b = torch.randn(left).bfloat16(), torch.randn(right).bfloat16()
    ends = torch.tensor([16, 32, 48, 64], dtype=torch.int32)
    (node,) = traced(lambda a, b, ends: aten._grouped_mm(a, b, ends), a, b, ends)
    found = workspace(node, CPU, measure=True)
    for filled in ([16, 32, 48, 64], [64, 64, 64, 64], [0, 0, 0, 64], [1, 50, 51, 64]):
        ends = torch.tensor(filled, dtype=torch.int32)
        with torch.no_grad(), PeakMeter() as meter:
            result = aten._grouped_mm(a, b, ends)
        assert meter.peak_bytes <= result.untyped_storage().nbytes() + found.size_bytes, filled


def test_measuring_leaves_no_trace():
    nodes = traced(lambda x: F.dropout(torch.rand_like(x), 0.3), torch.randn(33, 7))
    before = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for node in nodes:
            workspace(node, CPU, measure=True)
        assert torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before)


def test_each_signature_runs_once(monkeypatch):
    ran: list[str] = []
    real_run = workspace_room._run
    monkeypatch.setattr(workspace_room, "_measured", Memo(size=100))
    monkeypatch.setattr(workspace_room, "_run", lambda n, d: (ran.append(str(n.target)), real_run(n, d))[1])
    nodes = traced(lambda x, y: torch.tanh(torch.tanh(x)) + torch.tanh(y), torch.randn(4, 6), torch.randn(4, 6).T.T)
    for node in nodes:
        workspace(node, CPU, measure=True)
    assert ran == ["aten.tanh.default", "aten.add.Tensor"]


def test_strides_are_part_of_the_signature(monkeypatch):
    monkeypatch.setattr(workspace_room, "_measured", Memo(size=100))
    nodes = traced(lambda x, y: x.exp() * 0 + y.t().exp(), torch.randn(8, 8), torch.randn(8, 8))
    for node in nodes:
        workspace(node, CPU, measure=True)
    assert sum("exp" in signature for _, _, signature in workspace_room._measured) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_matmuls_taken_to_need_none_need_none(dtype):
    """The shortcut for large matmuls: every layout that it accepts is run here after all."""
    a, b, bias = torch.randn(96, 80, dtype=dtype), torch.randn(80, 64, dtype=dtype), torch.randn(64, dtype=dtype)
    wide = torch.randn(96, 200, dtype=dtype)[:, :80]
    nodes = [
        *traced(lambda a, b: a @ b, a, b),
        *traced(lambda a, b: a @ b, a.t().contiguous().t(), b),
        *traced(lambda a, b: a @ b, a, b.t().contiguous().t()),
        *traced(lambda a, b: a @ b, wide, b),
        *traced(lambda a, b: a[:, :1] @ b[:1], a, b),
        *traced(lambda c, a, b: torch.addmm(c, a, b), bias, a, b),
        *traced(lambda c, a, b: torch.addmm(c, a, b), torch.randn(96, 64, dtype=dtype), a, b),
        *traced(torch.bmm, a.expand(3, 96, 80), b.expand(3, 80, 64)),
        *traced(torch.bmm, torch.stack([a, a]), torch.stack([b, b]).mT.contiguous().mT),
        *traced(lambda c, a, b: torch.baddbmm(c, a, b), bias, torch.stack([a, a]), torch.stack([b, b])),
        *traced(lambda q, k: q.transpose(1, 2) @ k.transpose(1, 2).mT, *torch.randn(2, 2, 9, 4, 8, dtype=dtype)),
    ]
    checked = [n for n in nodes if workspace_room._is_plain_matmul(n)]
    assert len(checked) >= 10
    for node in checked:
        found = workspace_room._run(node, CPU)
        assert found is not None
        assert found.size_bytes == 0, f"{node.target} {node.args}"


def test_other_matmuls_are_run(monkeypatch):
    monkeypatch.setattr(workspace_room, "_measured", Memo(size=100))
    overlapping = torch.randn(16).as_strided((8, 8), (1, 1))
    (node,) = traced(torch.mm, overlapping, torch.randn(8, 8))
    assert not workspace_room._is_plain_matmul(node)
    assert workspace(node, CPU, measure=True).size_bytes >= 8 * 8 * 4


def test_too_large_is_estimated(monkeypatch):
    monkeypatch.setattr(workspace_room, "_measured", Memo(size=100))
    monkeypatch.setattr(workspace_room, "free_memory_bytes", lambda device: 1000)
    (node,) = traced(lambda x, w: F.conv2d(x, w), torch.randn(1, 2, 8, 8), torch.randn(2, 2, 3, 3))
    found = workspace(node, CPU, measure=True)
    assert not found.measured
    assert found.size_bytes == 4 * (2 * 64 + 2 * 2 * 9 + 2 * 36)


def test_too_slow_is_estimated(monkeypatch):
    monkeypatch.setattr(workspace_room, "_measured", Memo(size=100))
    monkeypatch.setattr(workspace_room, "MAX_SECONDS", 0.0)
    (node,) = traced(torch.exp, torch.randn(4, 4))
    assert not workspace(node, CPU, measure=True).measured


def test_other_device_is_estimated():
    node = the(traced(F.conv2d, torch.randn(1, 1, 4, 4), torch.randn(1, 1, 3, 3)), aten.convolution.default)
    found = workspace(node, H100, measure=True)
    assert not found.measured
    assert found.size_bytes == 4 * (16 + 9 + 4)


@pytest.mark.parametrize(
    ("device", "mib"), [("a100-80gb", 2 * 8.125), ("h200", 64), ("rtx5090", 64), ("cpu", 0), ("m2", 0)]
)
def test_what_matmuls_work_in_lives_through_the_step(device, mib):
    """cuBLAS has a buffer of each thread that calls it, forward's and backward's, and torch never gives it back."""
    nodes = traced(torch.mm, torch.randn(4, 4), torch.randn(4, 4))
    assert library_bytes(nodes, get_device(device)) == mib * 2**20
    assert workspace_bytes(nodes[0], get_device(device), measure=False) == 0
    assert library_bytes(traced(torch.exp, torch.randn(4)), get_device(device)) == 0


def test_attention_backward_for_a_gpu_that_is_not_here():
    """Flash attention's float32 gradient of the query: rows padded to 128, width to 32, and one float32 a row."""
    q = torch.randn(2, 4, 100, 40)

    def attend(q: torch.Tensor, k: torch.Tensor) -> Any:
        q = q.detach().requires_grad_()
        return torch.autograd.grad(aten._scaled_dot_product_flash_attention(q, k, k)[0].sum(), q)

    node = the(traced(attend, q, q), aten._scaled_dot_product_flash_attention_backward.default)
    assert workspace_bytes(node, H100, measure=False) == 4 * (2 * 4) * 128 * (64 + 1)


@torch.library.custom_op("gcsolve_test::loud", mutates_args=())
def loud(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("an op of somebody else's was run")


@loud.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_ops_that_may_have_effects_are_not_run():
    (node,) = traced(loud, torch.randn(3))
    assert workspace(node, CPU, measure=True) == workspace_room.Workspace(0, measured=False)
