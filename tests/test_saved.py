"""A saved plan comes back as it was, without solving; a plan for something else is refused by name."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gcsolve
from gcsolve.serialization.schema import SCHEMA, wrong
from tests import models
from tests.training import assert_same, train


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def _mlp(depth: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return models.MLP(depth, 64)


def _mean(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


CALLS: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "tensor": (_mlp, _x(256, 64), {}),
    "optimizer class": (_mlp, _x(256, 64), {"optimizer": torch.optim.AdamW}),
    "optimizer bytes": (_mlp, _x(256, 64), {"optimizer": 6.5, "scope": "step", "cost": "flops"}),
    "activations": (_mlp, _x(256, 64), {"scope": "activations", "device": "h200", "budget": 0.99}),
    "keywords": (models.Nested, {"x": _x(64, 8), "mask": torch.ones(64, 8), "flip": True}, {"budget": 1.0}),
    "dropout": (models.Dropout, _x(16, 16), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_plan_comes_back_without_being_solved(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, example, options = CALLS[name]
    model = make()
    plan = gcsolve.solve(model, example, **{"budget": 0.95, **options})
    plan.save(tmp_path / "plan.json")

    monkeypatch.setattr("gcsolve.session.solve_problem", None)
    monkeypatch.setattr("gcsolve.lowering.costed.workspace", lambda node, device, measure: _unmeasured(measure))
    again = gcsolve.load_plan(tmp_path / "plan.json", model)
    assert again.solution == plan.solution
    assert again.problem == plan.problem
    assert again.summary() == plan.summary()
    assert again.decisions == plan.decisions
    assert again.overhead_flops == plan.overhead_flops
    assert_same(train(copy.deepcopy(plan.module), example), train(copy.deepcopy(again.module), example))


def _unmeasured(measure: bool) -> Any:
    from gcsolve.cost.workspace import Workspace

    assert not measure
    return Workspace(12345, False)  # a wrong estimate: the file's own numbers must be used


def test_another_shape_is_planned_as_was_asked(tmp_path: Path) -> None:
    model = _mlp()
    gcsolve.solve(model, _x(256, 64), budget=0.9).save(tmp_path / "plan.json")
    again = gcsolve.load_plan(tmp_path / "plan.json", model)
    again.module(_x(32, 64)).sum().backward()
    assert again.at(budget=1.0).overhead == 0.0
    assert again.verify(steps=1, repeats=0).ok


def test_loss_and_an_optimizer_instance(tmp_path: Path) -> None:
    model = _mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plan = gcsolve.solve(model, _x(256, 64), budget=0.95, loss=_mean, optimizer=sgd)
    plan.save(tmp_path / "plan.json")
    again = gcsolve.load_plan(tmp_path / "plan.json", model, loss=_mean)
    assert again.breakdown == plan.breakdown
    assert again.breakdown["optimizer"] > 0
    with pytest.raises(gcsolve.ArgumentError, match="loss=_mean; pass that function"):
        gcsolve.load_plan(tmp_path / "plan.json", model)


def test_arguments_that_the_file_cannot_hold_are_asked_for(tmp_path: Path) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = _mlp()

        def forward(self, both: OrderedDict[str, torch.Tensor]) -> torch.Tensor:
            return self.inner(both["x"])

    model, example = Takes(), (OrderedDict(x=_x(64, 64)),)
    plan = gcsolve.solve(model, example, budget=0.95)
    plan.save(tmp_path / "plan.json")
    with pytest.raises(gcsolve.ArgumentError, match=r"OrderedDict .* pass example_input="):
        gcsolve.load_plan(tmp_path / "plan.json", model)
    assert gcsolve.load_plan(tmp_path / "plan.json", model, example).solution == plan.solution


class _Other(models.MLP):
    """Another class of the same make-up."""


class _Relu(models.MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def test_what_differs_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    gcsolve.solve(_mlp(), _x(256, 64), budget=0.9).save(path)

    def refused(model: nn.Module, *given: Any) -> str:
        with pytest.raises(gcsolve.PlanMismatch) as caught:
            gcsolve.load_plan(path, model, *given)
        return str(caught.value)

    assert "class MLP, and here it is _Other" in refused(_Other(6, 64))
    assert "layers.6.weight" not in refused(_mlp(5))
    assert "number of parameters and buffers 12, and here it is 14" in refused(_mlp(7))
    assert "training mode True, and here it is False; call model.train() first" in refused(_mlp().eval())
    frozen = _mlp()
    next(frozen.parameters()).requires_grad_(False)
    assert "parameter layers.0.weight" in refused(frozen)
    relu = _Relu(6, 64)
    relu.__class__.__qualname__ = "MLP"
    assert "was aten.gelu.default and is relu (aten.relu.default) at tests/" in refused(relu)
    narrow = _mlp()
    narrow.layers[0] = nn.Linear(32, 64)
    assert "parameter layers.0.weight float32[64, 64], requires_grad, and here it is float32[64, 32]" in refused(narrow)
    told = refused(_mlp(), _x(128, 64))
    assert "with argument 0 float32[256, 64], and here it is float32[128, 64]" in told
    with torch.autocast("cpu", torch.bfloat16):
        told = refused(_mlp())
    assert 'no autocast, and here is torch.autocast("cpu", torch.bfloat16); call load_plan outside' in told

    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "torch": "1.0"}))
    assert "torch release 1.0" in refused(_mlp())
    path.write_text(json.dumps({**record, "format": 99}))
    assert "format 99" in refused(_mlp())


class _Settings(nn.Module):
    """One module whose plain attributes decide a size and what an op reads."""

    def __init__(self, extra: int = 0, twice: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.extra, self.twice = extra, twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = nn.functional.pad(self.linear(x), (0, self.extra)).sin()
        b = a.exp()
        return (b * (b if self.twice else a)).cos()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"extra": 8},
            r"op 1 of the step, constant_pad_nd \(aten\.constant_pad_nd\.default\) at tests/test_saved\.py:\d+, made "
            r"float32\[256, 65\] \(66560 bytes\) when the plan was saved, and makes float32\[256, 72\] \(73728 bytes\) here",
        ),
        (
            {"extra": 1, "twice": True},
            r"op 4 of the step, mul \(aten\.mul\.Tensor\) at tests/test_saved\.py:\d+, read float32\[256, 65\] \(66560 bytes\)"
            r" of op 2 and float32\[256, 65\] \(66560 bytes\) of op 3 when the plan was saved, and reads float32\[256, 65\] "
            r"\(66560 bytes\) of op 3 here",
        ),
    ],
)
def test_the_first_op_that_differs_is_named_with_both_sizes(
    settings: dict[str, Any], text: str, tmp_path: Path
) -> None:
    gcsolve.solve(_Settings(extra=1), _x(256, 64), budget=1.0).save(tmp_path / "plan.json")
    with pytest.raises(gcsolve.PlanMismatch, match=text):
        gcsolve.load_plan(tmp_path / "plan.json", _Settings(**settings))


def test_what_always_lives_is_compared_too(tmp_path: Path) -> None:
    gcsolve.solve(_mlp(), _x(256, 64), budget=1.0, optimizer=4).save(tmp_path / "plan.json")
    with pytest.raises(gcsolve.PlanMismatch, match=r"with optimizer of 99840 bytes, and here it is 199680 bytes"):
        gcsolve.load_plan(tmp_path / "plan.json", _mlp(), optimizer=8)


def test_planned_under_autocast_saved_and_verified_after_the_block(tmp_path: Path) -> None:
    """What is saved and verified is the step that was planned, wherever that is asked for."""
    model, path = _mlp(), tmp_path / "plan.json"
    with torch.autocast("cpu", torch.bfloat16):
        plan = gcsolve.solve(model, _x(256, 64), budget=0.9)
        inside = plan.verify(steps=2, repeats=0)
    plan.save(path)
    with pytest.raises(gcsolve.PlanMismatch, match=r"inside `with torch\.autocast\(\"cpu\", torch\.bfloat16\):`"):
        gcsolve.load_plan(path, model)
    with torch.autocast("cpu", torch.bfloat16):
        again = gcsolve.load_plan(path, model)
    assert again.schedule == plan.schedule
    for report in (inside, plan.verify(steps=2, repeats=0), again.verify(steps=2, repeats=0)):
        assert report.ok
        assert abs(report.prediction_error) < 0.005  # the predicted peak is that of the step in bfloat16
    assert plan.verify(steps=2, repeats=0).losses == inside.losses
    assert len(plan.module._gcsolve.cache) == 1
    wide = gcsolve.solve(model, _x(256, 64), budget=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        report = wide.verify(steps=2, repeats=0)
    assert report.ok
    assert report.losses != inside.losses
    assert torch.is_autocast_enabled("cpu") is False
    assert torch.get_default_dtype() is torch.float32


def test_planned_in_double_precision(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    torch.set_default_dtype(torch.float64)
    try:
        model = _mlp(2)
        plan = gcsolve.solve(model, _x(32, 64), budget=1.0)
    finally:
        torch.set_default_dtype(torch.float32)
    plan.save(path)
    with pytest.raises(gcsolve.PlanMismatch, match=r"call torch\.set_default_dtype\(torch\.float64\) first"):
        gcsolve.load_plan(path, model)
    assert plan.verify(steps=1, repeats=0).ok
    assert len(plan.module._gcsolve.cache) == 1
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("text", ["", "{}", "[1]", "PK\x03\x04"])
def test_a_file_that_is_no_plan(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(gcsolve.ArgumentError, match=r"x\.json.* is not a plan"):
        gcsolve.load_plan(tmp_path / "x.json", _mlp())


@pytest.mark.parametrize(
    ("path", "model", "text"),
    [
        (None, nn.Linear(2, 2), "path=None is not a path"),
        ("x.json", None, "model=None is not an nn.Module"),
        ("x.json", "m", "model='m' is not an nn.Module"),
    ],
)
def test_what_is_no_path_or_no_model(path: Any, model: Any, text: str) -> None:
    with pytest.raises(gcsolve.ArgumentError, match=text):
        gcsolve.load_plan(path, model)


def _places(record: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key of the record, and the first entry of every list in it."""
    inner = record.items() if isinstance(record, dict) else enumerate(record[:1]) if isinstance(record, list) else ()
    for key, value in inner:
        yield (*at, key)
        yield from _places(value, (*at, key))


def _changed(record: Any, at: tuple[Any, ...], change: Any) -> Any:
    record = copy.deepcopy(record)
    inside = record
    for key in at[:-1]:
        inside = inside[key]
    if change is _GONE:
        del inside[at[-1]]
    else:
        inside[at[-1]] = change
    return record


_GONE = object()
# What may be null, or any text: the first is not in the plan then, the second compared or looked up when it is loaded.
NULLS = {"loss", "optimizer", "least_bytes", "least_node", "max_runs"}
TEXTS = {"gcsolve", "torch", "class", "device", "cost", "solver", "loss", "cost_unit"}


def test_a_damaged_file_names_the_key(tmp_path: Path) -> None:
    path, model = tmp_path / "plan.json", models.MLP(1, 8)
    gcsolve.solve(model, _x(4, 8), budget=1.0).save(path)
    record = json.loads(path.read_text())
    assert wrong(SCHEMA, record) == ""
    seen = 0
    for at in _places(record):
        key = [k for k in at if isinstance(k, str)][-1]
        for change, fine in ((_GONE, set()), (None, NULLS), ("x", TEXTS)):
            if (
                (change is _GONE and isinstance(at[-1], int))
                or (change == "x" and isinstance(at[-1], int))
                or key == "path"
            ):
                continue
            told = wrong(SCHEMA, _changed(record, at, change))
            assert bool(told) == (key not in fine), (at, change, told)
            assert not told or str(at[0]) in told
            seen += 1
    assert seen > 100
    for at, change, text in (
        (("settings", "gap"), _GONE, r"key settings\.gap is missing"),
        (("solution", "status"), "x", r"key solution\.status is 'x', not the name of a status"),
        (("graph", "ops", 0, 1), 1.5, r"key graph\.ops\[0\]\[1\] is 1\.5, not a whole number"),
        (("budget_bytes",), True, "key budget_bytes is True"),
        (("solution", "schedule"), [0], "its schedule cannot be run"),
    ):
        path.write_text(json.dumps(_changed(record, at, change)))
        with pytest.raises(gcsolve.ArgumentError, match=rf"plan\.json.* damaged: {text}"):
            gcsolve.load_plan(path, model)


def test_meta_weights(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = models.MLP(6, 64)
    plan = gcsolve.solve(model, torch.empty(256, 64, device="meta"), budget=0.9)
    plan.save(tmp_path / "plan.json")
    assert gcsolve.load_plan(tmp_path / "plan.json", model).solution == plan.solution
