"""Functions of torch that look at values only to raise an error: the same numbers, and plans of models that use them."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gcsolve
from gcsolve.capture.replacements import value_checks
from tests.training import LEAST_S, PLAN_S, Of, assert_same, x

WAYS = list(itertools.product((True, False), (True, False), (None, 300, 700), (False, True)))


@pytest.mark.filterwarnings("ignore:The length of signal", "ignore:A window was not")
@pytest.mark.parametrize(("n_fft", "hop_length", "win_length"), [(64, None, None), (64, 16, 40), (50, 20, None)])
@pytest.mark.parametrize("shape", [(512,), (3, 512)])
def test_istft_is_torchs(shape: tuple[int, ...], n_fft: int, hop_length: int | None, win_length: int | None) -> None:
    signal = x(*shape)
    for window, (center, normalized, length, full) in itertools.product((None, torch.hann_window), WAYS):
        if win_length and (not center or length == 700):
            continue  # a window narrower than the frames would leave gaps at the ends
        shaped = None if window is None else window(win_length or n_fft) + 0.1
        common: Any = {"hop_length": hop_length, "win_length": win_length, "window": shaped, "normalized": normalized}
        frames = torch.stft(signal, n_fft, center=center, onesided=not full, return_complex=True, **common)
        given = [{"return_complex": True}, {"onesided": False}] if full else [{}]
        for more in given:
            keywords = {**common, "center": center, "length": length, **more}
            masks = [torch.ones_like(frames.real, requires_grad=True) for _ in range(2)]
            outputs = [
                istft(frames * mask, n_fft, **keywords)
                for istft, mask in zip((torch.istft, value_checks.istft), masks, strict=True)
            ]
            for output in outputs:
                output.abs().square().mean().backward()
            assert torch.equal(*outputs)
            assert torch.equal(*(mask.grad for mask in masks))  # type: ignore[arg-type]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("variance", [(4, 8), (4,), (4, 1), None])
def test_gaussian_nll_loss_is_torchs(variance: tuple[int, ...] | None, reduction: str) -> None:
    known = value_checks.gaussian_nll_loss
    var: Any = 0.3 if variance is None else x(*variance).square()
    for full in (False, True):
        expected = F.gaussian_nll_loss(x(4, 8), x(4, 8) + 1, var, full=full, eps=0.1, reduction=reduction)
        assert torch.equal(known(x(4, 8), x(4, 8) + 1, var, full, 0.1, reduction), expected)


@pytest.mark.parametrize("call", [{"var": torch.ones(3, 8)}, {"var": torch.ones(4, 8), "reduction": "max"}])
def test_what_gaussian_nll_loss_refuses_without_a_look_is_refused(call: dict[str, Any]) -> None:
    for loss in (F.gaussian_nll_loss, value_checks.gaussian_nll_loss):
        with pytest.raises(ValueError, match=r"^(var is of incorrect size|max is not valid)$"):
            loss(x(4, 8), x(4, 8), **call)


def _denoised(m: Any, x: torch.Tensor) -> torch.Tensor:
    frames = torch.stft(x, 64, 16, window=torch.hann_window(64), return_complex=True)
    mask = m.a(torch.view_as_real(frames).permute(0, 3, 1, 2)).sigmoid().mean(1)
    return torch.istft(frames * mask, 64, 16, window=torch.hann_window(64), length=x.shape[-1])


def _likelihood(m: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.GaussianNLLLoss()(m.a(x), x, F.softplus(m.b(x)))


MODELS: dict[str, tuple[Any, nn.Module, nn.Module, torch.Tensor]] = {
    "spectral mask": (_denoised, nn.Conv2d(2, 4, 3, padding=1), nn.Identity(), x(3, 512)),
    "mean and variance": (_likelihood, nn.Linear(16, 16), nn.Linear(16, 16), x(32, 16)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("budget", ["least", "2MB"])
def test_models_that_use_them(name: str, budget: str) -> None:
    forward, a, b, inputs = MODELS[name]
    torch.manual_seed(0)
    model = Of(forward, a=a, b=b)
    if budget == "least":
        budget = f"{gcsolve.minimum_budget(model, inputs, time_limit_s=LEAST_S).one_rerun_bytes}B"
    plan = gcsolve.solve(copy.deepcopy(model), inputs, budget=budget, time_limit_s=PLAN_S)
    report = plan.verify(steps=3, repeats=0)
    assert report.differences == ()
    assert abs(report.prediction_error) <= 0.02

    def left(module: nn.Module) -> dict[str, Any]:
        output = module(inputs)
        output.square().mean().backward()
        return {"output": output.detach(), **{n: p.grad for n, p in module.named_parameters()}}

    assert_same(left(copy.deepcopy(model)), left(plan.module))
