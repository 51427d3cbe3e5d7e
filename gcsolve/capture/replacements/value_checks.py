"""Functions of torch that look at the values of their arguments only to raise an error, without that look.

They are composed of the same ops as in torch, in the same order, so that their results are the same numbers. Where eager
raises (a window whose overlaps leave a gap, a negative variance), a planned step gives inf or nan.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten


def istft(
    input: Tensor,  # noqa: A002 -- as torch names it
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Tensor:
    """`torch.istft`: the inverse transforms of the frames, times the window, summed where they overlap, and divided by the sum
    of the windows' squares there."""
    win_length = n_fft if win_length is None else win_length
    hop_length = n_fft // 4 if hop_length is None else hop_length
    onesided = input.shape[-2] != n_fft if onesided is None else onesided
    real = torch.view_as_real(input.resolve_conj())
    window = torch.ones(win_length, dtype=real.dtype, device=real.device) if window is None else window
    if win_length != n_fft:
        left = (n_fft - win_length) // 2
        window = F.pad(window, [left, n_fft - win_length - left])
    frames = torch.view_as_complex((real if input.dim() == 3 else real.unsqueeze(0)).transpose(1, 2))
    scale = 1 if normalized else 2  # by sqrt(n_fft), by n_fft
    if return_complex:
        frames = aten._fft_c2c(frames, [frames.dim() - 1], scale, False)
    else:
        half = frames if onesided else frames[..., : n_fft // 2 + 1]
        frames = aten._fft_c2r(half, [frames.dim() - 1], scale, n_fft)
    count = frames.shape[1]
    whole = n_fft + hop_length * (count - 1)
    start = n_fft // 2 if center else 0
    end = start + length if length is not None else whole - n_fft // 2 if center else whole
    windowed = frames * window.view(1, 1, n_fft)
    signal = aten.unfold_backward(windowed, [windowed.shape[0], whole], 1, n_fft, hop_length)
    squares = window.pow(2).expand(1, count, n_fft)
    envelope = aten.unfold_backward(squares, [1, whole], 1, n_fft, hop_length)
    signal = signal[:, start:end] / envelope[:, start:end]
    signal = signal.squeeze(0) if input.dim() == 2 else signal
    return F.pad(signal, [0, end - whole]) if end > whole else signal


def gaussian_nll_loss(
    input: Tensor,  # noqa: A002
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """`F.gaussian_nll_loss`: half of log(variance) + squared error / variance. The variance is at least `eps` there; its
    gradient is computed as if that were not so."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{reduction} is not valid")
    if not isinstance(var, Tensor):
        return F.gaussian_nll_loss(input, target, var, full=full, eps=eps, reduction=reduction)
    if var.shape != input.shape:
        if var.shape == input.shape[:-1]:
            var = var.unsqueeze(-1)
        elif var.dim() != input.dim() or sum(n for m, n in zip(input.shape, var.shape, strict=True) if m != n) != 1:
            raise ValueError("var is of incorrect size")
    at_least = var.clone()
    with torch.no_grad():
        at_least.clamp_(min=eps)
    loss = 0.5 * (torch.log(at_least) + (input - target) ** 2 / at_least)
    if full:
        loss += 0.5 * math.log(2 * math.pi)
    return {"mean": loss.mean, "sum": loss.sum, "none": lambda: loss}[reduction]()
