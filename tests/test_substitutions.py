"""substitutions: every row is needed; without it a plan would train otherwise than eager, or not be made in words."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gcsolve
from gcsolve._torch import PACK_PADDED_SEQUENCE
from gcsolve.capture import substitutions
from gcsolve.capture.substitutions import SUBSTITUTIONS, Substitution, When, substitutes
from gcsolve.capture.target_kernels import TargetKernels
from gcsolve.capture.trace import trace
from gcsolve.cost.devices import get_device
from gcsolve.errors import TraceError
from tests.training import Of, assert_same, train, x

aten = torch.ops.aten


def _same(model: nn.Module, inputs: Any) -> None:
    """A plan that keeps what eager keeps trains as eager does."""
    expected = train(copy.deepcopy(model), inputs)
    assert_same(expected, train(gcsolve.solve(model, inputs, budget=1.0).module, inputs))


def _same_under_autocast(model: nn.Module, inputs: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(inputs)
        output = gcsolve.solve(model, inputs, budget=1.0).module(inputs)
    assert torch.equal(expected, output)


def _refused(model: nn.Module, inputs: Any, text: str, *, autocast: bool = False) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), pytest.raises(TraceError, match=text):
        trace(model, inputs, {})


def _traced_as(model: nn.Module, inputs: Any, op: Any, *, device: str = "") -> None:
    kernels = TargetKernels(get_device(device)) if device else None
    assert op in {node.target for node in trace(model, inputs, {}, kernels=kernels).joint.graph_module.graph.nodes}


def _inverse(method: bool) -> Callable[..., Any]:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        frames = torch.stft(x, 64, 16, window=torch.hann_window(64), return_complex=True)
        masked = frames * m.a(torch.view_as_real(frames).permute(0, 3, 1, 2)).sigmoid().mean(1)
        inverse = masked.istft if method else lambda *args, **kwargs: torch.istft(masked, *args, **kwargs)
        return inverse(64, 16, window=torch.hann_window(64), length=x.shape[-1])

    return forward


def _ctc(loss: Callable[..., Any]) -> Callable[..., Any]:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor([5]), torch.tensor([2])
        return loss(m.a(x)[:, None].log_softmax(-1), torch.tensor([[1, 2]]), *lengths)

    return forward


def _packed(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.a(nn.utils.rnn.pack_padded_sequence(x[:, None], torch.tensor([5]))[0])


def _attention(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x)[None, None]
    return F.scaled_dot_product_attention(y, y, y)


def _linear(forward: Callable[..., Any], width: int = 8) -> nn.Module:
    return Of(forward, a=nn.Linear(width, width))


CHECKS: dict[Any, Callable[[], None]] = {
    torch.istft: lambda: _same(Of(_inverse(False), a=nn.Conv2d(2, 4, 3, padding=1)), x(3, 512)),
    torch.Tensor.istft: lambda: _same(Of(_inverse(True), a=nn.Conv2d(2, 4, 3, padding=1)), x(3, 512)),
    F.gaussian_nll_loss: lambda: _same(_linear(lambda m, x: F.gaussian_nll_loss(m.a(x), x, m.a(x).exp())), x(4, 8)),
    F.ctc_loss: lambda: _refused(
        _linear(_ctc(F.ctc_loss)), (x(5, 8),), "forward uses ctc_loss at .*Return the log-prob"
    ),
    torch.ctc_loss: lambda: _refused(_linear(_ctc(torch.ctc_loss)), (x(5, 8),), "forward uses ctc_loss at "),
    PACK_PADDED_SEQUENCE: lambda: _refused(
        _linear(_packed), (x(5, 8),), "forward uses a packed sequence at .*Pad and mask"
    ),
    getattr(torch.linalg, "polar", None): lambda: _refused(
        _linear(lambda m, x: torch.linalg.polar(m.a(x).float())[0]), (x(8, 8),), "torch.linalg.polar at", autocast=True
    ),
    F.scaled_dot_product_attention: lambda: _traced_as(
        _linear(_attention).bfloat16(),
        (x(4, 8).bfloat16(),),
        aten._scaled_dot_product_flash_attention.default,
        device="h200",
    ),
    aten.gru.input: lambda: _same(Of(lambda m, x: m.a(x)[0], a=nn.GRU(13, 13)), x(5, 3, 13)),
    aten.gru_cell.default: lambda: _same(Of(lambda m, x: m.a(x, x), a=nn.GRUCell(13, 13)), x(3, 13)),
    aten.bilinear.default: lambda: _same_under_autocast(Of(lambda m, x: m.a(x, x), a=nn.Bilinear(8, 8, 8)), x(4, 8)),
    aten.native_dropout.default: lambda: _same(_linear(lambda m, x: F.dropout(m.a(x), 0.15), 64), x(64, 64)),
    aten.native_dropout_backward.default: lambda: _same(
        _linear(lambda m, x: F.dropout(m.a(x), 0.1), 64).bfloat16(), x(64, 64).bfloat16()
    ),
}


@pytest.mark.filterwarnings("ignore:Raw SymInt")
@pytest.mark.parametrize(
    "row",
    [row for row in SUBSTITUTIONS if row.target is not None],
    ids=lambda row: getattr(row.target, "__qualname__", str(row.target)),  # without addresses
)
def test_every_row_is_needed(row: Substitution, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    CHECKS[row.target]()
    monkeypatch.setattr(substitutions, "SUBSTITUTIONS", tuple(other for other in SUBSTITUTIONS if other is not row))
    torch.manual_seed(0)
    with pytest.raises((AssertionError, TraceError, pytest.fail.Exception)):
        CHECKS[row.target]()


def test_a_target_is_replaced_once_at_a_moment() -> None:
    for when in When:
        targets = [row.target for row in SUBSTITUTIONS if row.when is when]
        assert len(targets) == len(set(targets))
        assert substitutes(when).keys() == {target for target in targets if target is not None}
    assert all(row.reason.endswith(".") for row in SUBSTITUTIONS)
