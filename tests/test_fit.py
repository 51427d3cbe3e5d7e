"""gcsolve.fit: the largest batch against brute force over every batch, where the peak sits, and what is refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

import gcsolve
from gcsolve.cli import main
from gcsolve.cost.devices import DeviceSpec
from gcsolve.errors import ArgumentError
from gcsolve.evaluation.fit import LOGITS


class Head(nn.Module):
    """A deep narrow body and a head of many classes."""

    def __init__(self, classes: int, depth: int = 3) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))
        self.head = nn.Linear(16, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.body:
            x = F.gelu(layer(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def factory(classes: int, depth: int = 3) -> Any:
    def made(batch: int, seq: int = 8) -> Any:
        return Head(classes, depth), (torch.randn(batch, seq, 16), torch.zeros((batch, seq), dtype=torch.int64))

    return made


def test_a_range_is_searched_to_the_largest_that_fits() -> None:
    small = DeviceSpec("small", 2 * 10**9, 1e11, {"float32": 1e12}, kind="mps")
    found = gcsolve.fit(factory(64), range(1, 40), device=small, budget="200kB", optimizer=optim.AdamW)
    largest = found.largest_batch
    assert largest is not None
    assert len(found.rows) < 12
    beyond = gcsolve.fit(factory(64), [largest, largest + 1], device=small, budget="200kB", optimizer=optim.AdamW)
    assert [row.fits for row in beyond.rows] == [True, False]
    for row in found.rows:
        assert row.floor_bytes <= row.least_bytes <= row.store_all_bytes
        assert row.fits == (row.batch <= largest)
        assert row.peak_bytes is None or row.least_bytes <= row.peak_bytes <= 200_000
        assert (row.overhead == 0.0) == (row.store_all_bytes <= 200_000)
    model, example = factory(64)(largest + 1)
    with pytest.raises(gcsolve.InfeasibleBudget):
        gcsolve.solve(model, example, budget="200kB", device=small, optimizer=optim.AdamW)


def test_the_devices_memory_is_the_budget_and_the_sequence_reaches_the_factory() -> None:
    small = DeviceSpec("small", 4 * 10**9, 1e11, {"float32": 1e12}, kind="mps")
    rows = [gcsolve.fit(factory(10), [4], seq=seq, device=small) for seq in (8, 80)]
    assert rows[0].budget_bytes == 3 * 10**9
    assert rows[1].rows[0].store_all_bytes > 2 * rows[0].rows[0].store_all_bytes


def test_a_budget_below_what_every_schedule_needs_is_answered_without_a_search(monkeypatch) -> None:
    def searched(*_: Any, **__: Any) -> None:
        raise AssertionError("a solver was asked")

    monkeypatch.setattr("gcsolve.evaluation.fit.solve_problem", searched)
    monkeypatch.setattr("gcsolve.session.solve_problem", searched)
    fit = gcsolve.fit(factory(100), [4], device="m1", budget="20kB", optimizer=optim.AdamW)
    (row,) = fit.rows
    assert row.hopeless
    assert row.least_bytes == row.floor_bytes == sum(size for _, size in row.parts)
    assert "short of" in fit.summary()
    assert "whatever is recomputed" in fit.summary()
    assert "≥ " in fit.summary()


@pytest.mark.parametrize(
    ("classes", "depth", "batch", "optimizer", "first"),
    [
        (3000, 1, 64, None, LOGITS),
        (3000, 1, 1, 12, "optimizer"),
        (10, 12, 64, None, "activations"),
        (4000, 1, 1, None, "gradients"),
    ],
)
def test_what_would_lower_the_peak_is_what_takes_most_of_it(classes, depth, batch, optimizer, first) -> None:
    fit = gcsolve.fit(factory(classes, depth), [batch], device="m1", budget="50kB", optimizer=optimizer)
    (row,) = fit.rows
    assert not row.fits
    advised = [line.partition(":")[0] for line in row.advice]
    parts = [kind for kind, _ in row.parts if kind not in ("workspace", "parameters")]
    assert parts[0] == first
    assert first in advised
    assert "none of the batch sizes tried fits" in fit.summary()
    assert "short of" in fit.summary()
    if first == LOGITS:
        assert "chunks of tokens" in fit.summary()


def test_a_factory_that_cannot_be_on_meta_is_called_again() -> None:
    def made(batch: int) -> Any:
        scale = float(torch.ones(1).sum().item())  # no number on meta
        return nn.Linear(4, 4), torch.randn(batch, 4) * scale

    assert gcsolve.fit(made, [2], device="h200").largest_batch == 2


def test_a_backward_inside_the_autocast_block_is_fitted_as_solve_plans_it() -> None:
    def made(batch: int) -> Any:
        return nn.Bilinear(16, 16, 16), (torch.ones(batch, 16), torch.ones(batch, 16))

    with torch.autocast("cpu", torch.bfloat16):
        plan = gcsolve.solve(*made(64), budget="1GB", autocast_backward=True)
        found = gcsolve.fit(made, [64], budget="1GB", autocast_backward=True).rows[0]
        outside = gcsolve.fit(made, [64], budget="1GB").rows[0]
    assert found.peak_bytes == plan.peak_bytes
    assert outside.peak_bytes != plan.peak_bytes


@pytest.mark.parametrize(
    ("made", "options", "text"),
    [
        (lambda: None, {}, "not batch="),
        (lambda batch: None, {"seq": 4}, "not seq="),
        (lambda batch: 7, {}, "returned int"),
        (3, {}, "factory=3"),
        (factory(4), {"batches": []}, "batches"),
        (factory(4), {"batches": [0]}, r"batches\[0\]=0 must be a whole number ≥ 1"),
        (factory(4), {"batches": [2, 1.5]}, r"batches\[1\]=1\.5"),
        (factory(4), {"batches": [True]}, r"batches\[0\]=True"),
        (factory(4), {"batches": 5}, "batches=5 must be a list or range"),
        (factory(4), {"batches": None}, "batches=None must be a list or range"),
        (factory(4), {"batches": "1..4"}, "batches='1..4' must be a list or range"),
        (factory(4), {"seq": 1.5}, r"seq=1\.5 must be a whole number ≥ 1"),
        (factory(4), {"gap": "x"}, "gap='x'"),
        (factory(4), {"autocast_backward": 1}, "autocast_backward=1 is neither True nor False"),
        (factory(4), {"solver": "magic"}, "known solvers"),
        (
            lambda batch, seq: None,
            {},
            r"takes batch, seq, and seq was not given: pass seq= \(on the command line --seq\)",
        ),
        (
            lambda batch, width: None,
            {},
            r"takes \(batch, width\), and it is called as .*<lambda>\(batch=1\): missing .*'width'. Give what is missing a",
        ),
        (lambda batch, **more: None, {"seq": 4}, r"the factory .*<lambda>\(batch=1, seq=4\) returned NoneType"),
        (
            functools.partial(lambda width: None, width=3),
            {},
            r"takes width, not batch=: write it as def .*<lambda>\(batch\)",
        ),
        (dict, {}, r"the factory builtins:dict\(batch=1\) returned dict; it must return \(model, example_input\) or"),
        (
            lambda batch: torch.nn.Linear(4, "wide"),
            {"device": "rtx4090"},
            r"the factory .*<lambda>\(batch=1\) raised TypeError at .*test_fit.py:\d+: empty\(\)",
        ),
        (factory(4), {"budget": 0.5}, "budget=0.5 is a share of a peak .* give a size"),
        (factory(4), {"budget": "0.5"}, "budget='0.5' is a share of a peak .* give a size"),
        (factory(4), {"budget": [1]}, r"budget=\[1\] must be"),
    ],
)
def test_what_is_refused(made, options, text) -> None:
    with pytest.raises(ArgumentError, match=text):
        gcsolve.fit(made, **{"batches": [1], **options})


def test_on_the_command_line(capsys, tmp_path, monkeypatch) -> None:
    (tmp_path / "fit_factories.py").write_text(
        "import torch\n\ndef small(batch, seq=8):\n    return torch.nn.Linear(16, 16), torch.randn(batch, seq, 16)\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["fit", "fit_factories:small", "--device", "rtx4090", "--optimizer", "adamw", "--seq", "32"]
    assert main([*words, "--batch", "1..4"]) == 0
    out = capsys.readouterr().out
    assert "rtx4090, 22.80 GB to use: batch 4 fits" in out
    assert main([*words, "--batch", "some"]) == 2
    assert "1..64" in capsys.readouterr().err
    assert main([*words, "--batch", "4..1"]) == 2
    assert "--batch 4..1 names no batch sizes ≥ 1; write the smaller first" in capsys.readouterr().err
