"""fakes: what is traced lies in memory, and takes the kernels, as what eager runs."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gcsolve
from gcsolve.capture.fake_mode import TrueFakes
from gcsolve.errors import TraceError
from tests.training import Of, since_213

# Ops for which torch's tracing has other kernels or other strides than eager; each gets a convolution's 2x4x24x24 output.
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x, size=(13, 15), mode="bicubic"),
    "linear": lambda x: F.interpolate(x.flatten(2), size=77, mode="linear"),
    "trilinear": lambda x: F.interpolate(x[:, :, None], size=(3, 5, 6), mode="trilinear"),
    "matmul": lambda x: x.transpose(1, 3) @ torch.ones(4),
    "multi_margin_loss": lambda x: x * F.multi_margin_loss(x.flatten(2).mean(2), torch.tensor([1, 2])),
    "batch_norm of a transposed": lambda x: F.batch_norm(x.flatten(2).mT.contiguous().mT, None, None, training=True),
    "group_norm of channels last": lambda x: F.group_norm(x.to(memory_format=torch.channels_last), 2),
    "mse_loss of transposed": lambda x: F.mse_loss(x.transpose(1, 2), 0.5 * x.transpose(1, 2), reduction="none"),
    "huber_loss of a transposed": lambda x: F.huber_loss(x.transpose(1, 2), torch.ones(2, 24, 4, 24), reduction="none"),
    "dropout of a transposed": lambda x: F.dropout(x.transpose(1, 3), 0.3),
    "rand_like of a transposed": lambda x: x + torch.rand_like(x.transpose(1, 3)).transpose(1, 3),
    "grouped_mm in float32": lambda x: torch.nn.functional.grouped_mm(
        x.reshape(-1, 16), torch.ones(2, 16, 16), offs=torch.tensor([100, 288], dtype=torch.int32)
    ),
}


class OneOp(nn.Module):
    def __init__(self, op: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.op = nn.Conv2d(3, 4, 3, padding=1), op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.conv(x)).tanh()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=since_213 if n == "dropout of a transposed" else ()) for n in OPS]
)
def test_traced_as_eager_runs_it(name: str) -> None:
    torch.manual_seed(0)
    plan = gcsolve.solve(
        OneOp(OPS[name]), torch.randn(2, 3, 24, 24), budget=1.0, solver="store_all", scope="activations"
    )
    report = plan.verify(steps=2, repeats=0)
    assert report.differences == ()
    assert report.within_budget
    assert abs(report.prediction_error) <= 0.02
    assert plan.baseline_peak_bytes <= 1.05 * report.eager_peak_bytes


@pytest.mark.parametrize(
    "settings", [{}, {"num_layers": 2, "bidirectional": True, "dropout": 0.3}, {"bias": False}], ids=str
)
def test_what_an_lstm_keeps_for_its_backward_is_counted(settings: dict[str, Any], tmp_path: Path) -> None:
    """oneDNN alone knows that buffer's size: torch's rule says nothing, and it is the most of the step."""
    torch.manual_seed(0)
    layers = nn.LSTM(32, 32, batch_first=True, **settings)
    model = Of(lambda m, x: m.layers(x)[0].square().mean(), layers=layers)
    plan = gcsolve.solve(model, torch.randn(8, 20, 32), budget=1.0, solver="store_all")
    report = plan.verify(steps=1, repeats=0)
    assert report.differences == ()
    assert report.within_budget
    assert abs(report.prediction_error) <= 0.02
    nodes, values = plan.problem.graph.nodes, plan.problem.graph.values
    runs = [node for node in nodes if node.op == "aten.mkldnn_rnn_layer.default"]
    assert len(runs) == layers.num_layers * (1 + layers.bidirectional)
    assert all(values[run.outputs[-1]].size_bytes > 10 * values[run.outputs[0]].size_bytes for run in runs)
    plan.save(tmp_path / "plan.json")  # traced again, the same tensors share their storage
    assert gcsolve.load_plan(tmp_path / "plan.json", model).schedule == plan.schedule


def test_an_lstm_on_meta_is_planned_as_the_real_one() -> None:
    """What its kernel keeps and works in is all that a plan knows by running it, weights or not."""

    def plan(device: str) -> gcsolve.Plan:
        layers = nn.LSTM(32, 48, num_layers=2, batch_first=True, device=device)
        model = Of(lambda m, x: m.layers(x)[0].square().mean(), layers=layers)
        return gcsolve.solve(model, torch.empty(8, 20, 32, device=device), budget=1.0, solver="store_all")

    real, meta = plan("cpu"), plan("meta")
    assert real.breakdown["workspace"] > 100_000
    assert meta.breakdown == real.breakdown


def test_an_op_that_neither_rule_nor_kernel_takes_is_refused() -> None:
    with pytest.raises(TraceError, match=r"^RuntimeError: .* at .*test_fakes.py:\d+"):
        gcsolve.solve(OneOp(lambda x: F.conv2d(x, torch.ones(4, 7, 3, 3))), torch.randn(2, 3, 24, 24), budget=1.0)


@functools.lru_cache(maxsize=3)
def _positions(size: int) -> tuple[Tensor, list[Tensor]]:
    return torch.arange(float(size)), [torch.ones(size)]


@pytest.mark.parametrize("frozen", [False, True])
def test_no_fake_tensor_stays_in_a_cache(frozen: bool) -> None:
    class Positioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            positions, (ones,) = _positions(8)
            return self.linear(x + positions * ones).tanh()

    torch.manual_seed(0)
    _positions.cache_clear()
    if frozen:
        gc.freeze()  # as servers do; the test session may have
    model, x = Positioned(), torch.randn(4, 8)
    plan = gcsolve.solve(model, x, budget=1.0)  # before the cache is filled, so that the trace would fill it
    assert torch.equal(model(x), plan.module(x))
    again = gcsolve.solve(model, x, budget=1.0)  # and from a filled one
    assert torch.equal(model(x), again.module(x))


# What eager refuses for its dtypes; each gets float32[2, 3, 24, 24].
REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "float64 input of a linear layer": lambda x: F.linear(x.double(), torch.ones(24, 24), torch.ones(24)),
    "integers in a matmul": lambda x: x.long() @ torch.ones(24, 24),
    "transposed convolution": lambda x: F.conv_transpose2d(x.double(), torch.ones(3, 3, 3, 3)),
    "layer norm": lambda x: F.layer_norm(x.double(), (24,), torch.ones(24), torch.ones(24)),
    "gelu of integers": lambda x: x * F.gelu(x.long()),
    "softmax of integers": lambda x: x * F.softmax(x.long(), -1),
    "labels of int32": lambda x: F.cross_entropy(x, torch.zeros(2, 24, 24, dtype=torch.int32)),
    "targets in float64": lambda x: F.binary_cross_entropy(x.sigmoid(), torch.zeros(2, 3, 24, 24).double()),
}


class _Applied(nn.Module):
    def __init__(self, op: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.op = nn.Conv2d(3, 3, 1), op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.conv(x))


@pytest.mark.parametrize("name", REFUSED)
def test_dtypes_that_the_kernel_refuses_are_refused_with_its_own_error(name: str) -> None:
    model, x = _Applied(REFUSED[name]), torch.randn(2, 3, 24, 24)
    with pytest.raises((RuntimeError, NotImplementedError)) as eager:
        model(x)
    with pytest.raises(TraceError, match=r"test_fakes.py:\d+") as ours:
        gcsolve.solve(model, x, budget=1.0)
    assert str(eager.value).splitlines()[0].rstrip(".") in str(ours.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_an_input_of_another_dtype_is_no_matter_of_the_budget(dtype: torch.dtype) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(4, 8)
    for budget in (0.1, 1.0):
        with pytest.raises(TraceError, match="mat1 and mat2 must have the same dtype"):
            gcsolve.solve(model, x.to(dtype), budget=budget)
    with pytest.raises(TraceError, match="mat1 and mat2 must have the same dtype"):
        gcsolve.solve(model, x, budget=1.0).module(x.to(dtype))
    with torch.device("meta"):
        absent = nn.Linear(8, 8)
    with pytest.raises(TraceError, match="mat1 and mat2 must have the same dtype"):
        gcsolve.solve(absent, x.to(dtype), budget=1.0, device="h200")


def test_dtypes_that_the_kernel_mixes_are_planned() -> None:
    def mixes(x: Tensor) -> Tensor:
        x = F.layer_norm(x.bfloat16(), (24,), torch.ones(24), torch.ones(24)) + x.double()
        return x.float() * torch.einsum("ij,jk->ik", torch.eye(3).long(), torch.ones(3, 24).long())[:, None].float()

    torch.manual_seed(0)
    model, x = _Applied(mixes), torch.randn(2, 3, 24, 24)
    assert torch.equal(gcsolve.solve(model, x, budget=1.0).module(x), model(x))


aten = torch.ops.aten
COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": lambda v: aten.copy.default(v, torch.ones(v.shape)),
    "select_scatter": lambda v: aten.select_scatter.default(v, torch.ones(8), 1, 0),
    "slice_scatter": lambda v: aten.slice_scatter.default(v, torch.ones(8, 2), 1, 0, 2),
    "diagonal_scatter": lambda v: aten.diagonal_scatter.default(v, torch.ones(8)),
    "as_strided_scatter": lambda v: aten.as_strided_scatter.default(v, torch.ones(8), [8], [384], 120),
}


@pytest.mark.parametrize("place", [0, 5])
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_a_view_takes_the_whole_storage(name: str, place: int) -> None:
    """Every time: torch's cache of fakes forgets after the first how large the storage was."""

    def lies() -> tuple[int, int, tuple[int, ...]]:
        made = COPIES[name](torch.zeros(8, 16, 24).select(1, place))
        return made.untyped_storage().nbytes(), made.storage_offset(), made.stride()

    with TrueFakes(True):
        faked = [lies() for _ in range(3)]
    assert faked == [lies()] * 3
    assert faked[0][0] == 8 * 16 * 24 * 4


LOSSES = (F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy, F.soft_margin_loss)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_lies_in_the_storage_of_its_terms(loss: Callable[..., Tensor], reduction: str) -> None:
    def size() -> int:
        return loss(torch.full((8, 24), 0.5), torch.ones(8, 24), reduction=reduction).untyped_storage().nbytes()

    with TrueFakes(True):
        faked = [size() for _ in range(3)]
    assert faked == [size()] * 3 == [8 * 24 * 4] * 3


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_the_peak_of_a_model_that_returns_its_loss(loss: Callable[..., Tensor]) -> None:
    class Fitted(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return loss(super().forward(x), torch.full_like(x, 0.5))

    model = Fitted(nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 64), nn.Sigmoid())
    report = gcsolve.solve(model, torch.rand(512, 64), budget=1.0, progress=False).verify(steps=1, repeats=0)
    assert not report.differences
    assert 0 <= report.predicted_peak_bytes - report.measured_peak_bytes < 64 * 20  # rounded up, value by value


class Scan(nn.Module):
    """States written one by one into a tensor, as recurrent models in plain torch do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        state = x[:, 0]
        for t in range(x.shape[1]):
            state = torch.tanh(self.linear(state) * x[:, t])
            out[:, t] = state
        return (out * x).sum()


def test_writing_into_slices_takes_what_is_promised() -> None:
    x = torch.randn(8, 8, 48)
    store_all = gcsolve.solve(Scan(), x, budget=1.0, solver="store_all", progress=False)
    for share in (1.0, 0.95, 0.91):
        plan = store_all.at(budget=share, solver="greedy", progress=False)
        report = plan.verify(steps=2, repeats=0)
        assert not report.differences
        assert 0 <= plan.peak_bytes - report.measured_peak_bytes <= 64 * 20  # rounded up, value by value
