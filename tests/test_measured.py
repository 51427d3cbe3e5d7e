"""cost/measured.py: each distinct op is run once a machine and kept on disk; and register_cost."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import gcsolve
from gcsolve.cost import flops, measured
from gcsolve.cost.devices import get_device
from gcsolve.cost.measured import OpCache, OpRun, cache_directory, op_seconds
from gcsolve.cost.registry import get_cost
from gcsolve.errors import ArgumentError
from tests.models import MLP
from tests.tracing import CPU, traced

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "gcsolve"


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ops that were run for their time, none of them longer than it must."""
    found: list[str] = []
    real = measured.measure
    monkeypatch.setattr(measured, "MAX_OP_S", 0.0)
    monkeypatch.setattr(measured, "measure", lambda n, d: (found.append(str(n.target)), real(n, d))[1])
    return found


def planned(depth: int = 4, rows: int = 64) -> gcsolve.Plan:
    return gcsolve.solve(MLP(depth), torch.randn(rows, 32), budget=0.95, cost="measured")


def test_repeated_layers_are_measured_once_and_kept_for_the_next_process(ran, own_cache):
    plan = planned(4)
    first = list(ran)
    assert first.count("aten.gelu.default") == 1
    assert plan.cost == "measured"
    assert plan.problem.cost_unit == "s"
    assert not plan.costed.estimated_cost
    ran.clear()
    planned(6)  # more of the same layers; nothing is kept in the process, so what is known comes from the file
    assert ran == []
    planned(4, rows=65)
    assert sorted(ran) == sorted(first)  # other shapes are other ops
    assert len(list(own_cache.glob("ops-*.json"))) == 1


def test_the_plans_costs_are_those_in_the_cache(ran):
    planned()
    cache = OpCache.of(CPU)
    runs = cache.load()
    cache.save({key: OpRun(7.0, run.workspace_bytes) for key, run in runs.items() if "gelu.default" in key})
    problem = planned().problem
    costs = {c for c, node in zip(problem.cost, problem.graph.nodes, strict=True) if node.op == "aten.gelu.default"}
    assert costs == {7.0}


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: json.dumps({**json.loads(text), "header": {"device": "another"}}),
        lambda text: text.replace('"seconds": ', '"seconds": -'),
        lambda text: text.replace('"seconds"', '"minutes"'),
        lambda text: "[" * 100_000,
        lambda text: re.sub('"seconds": [^,]*', '"seconds": 1' + "0" * 400, text),
        lambda text: re.sub('"workspace_bytes": [^\n]*', '"workspace_bytes": true', text),
    ],
    ids=["cut off", "not ours", "another machine's", "impossible", "other fields", "endless", "huge", "truth"],
)
def test_a_damaged_or_foreign_cache_is_said_and_made_again(ran, damage):
    planned()
    path = OpCache.of(CPU).path
    path.write_text(damage(path.read_text()))
    ran.clear()
    with pytest.warns(UserWarning, match="ignored and made again"):
        planned()
    assert ran
    ran.clear()
    planned()  # no warning (they are errors here), nothing to run
    assert ran == []


def test_a_cache_that_cannot_be_written_is_said(ran, own_cache):
    own_cache.write_text("a file where the directory should be")
    with pytest.warns(UserWarning, match="ignored"), pytest.warns(UserWarning, match="could not be kept"):
        planned()


def test_a_cache_whose_place_is_taken_leaves_nothing_behind(ran, own_cache):
    OpCache.of(CPU).path.mkdir(parents=True)
    with pytest.warns(UserWarning, match="ignored"), pytest.warns(UserWarning, match="could not be kept"):
        planned()
    assert [path.name for path in own_cache.iterdir()] == [OpCache.of(CPU).path.name]


def test_the_file_is_the_devices_torchs_and_the_threads(monkeypatch):
    one = OpCache.of(CPU).path
    monkeypatch.setattr(torch, "__version__", "9.9")
    two = OpCache.of(CPU).path
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    three = OpCache.of(CPU).path
    monkeypatch.setattr(measured, "_processor", lambda: "another")
    four = OpCache.of(CPU).path
    monkeypatch.setattr(measured, "_settings", lambda: {"deterministic": True})
    assert len({one, two, three, four, OpCache.of(CPU).path}) == 5
    assert one.parent == cache_directory()


def test_a_user_without_a_home_directory_has_a_cache_among_temporary_files(monkeypatch, tmp_path):
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert cache_directory() == tmp_path / "gcsolve"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    assert cache_directory().is_relative_to(tmp_path / "tmp")


def test_sampling_ends_when_the_three_fastest_agree(monkeypatch):
    samples = iter([1.0, 1.0, 9.0, 5.0, 8.0, 5.1, 7.0, 5.05, 1.0])
    monkeypatch.setattr(measured, "_host_seconds", lambda run, calls: next(samples))
    assert op_seconds(lambda: None, CPU) == pytest.approx((5.0 + 5.1 + 5.05) / 3)


def test_what_is_run_has_left_the_caches(monkeypatch):
    """Twice the last cache passes between two runs of a large op on the same operands; a small one has 32 sets."""
    monkeypatch.setattr(measured, "_cache_bytes", lambda kind: 1 << 20)
    asked: list[int] = []
    monkeypatch.setattr(measured, "run_alone", lambda *_: asked.append(_[-1]))
    for rows in (1, 1024):
        measured.measure(traced(torch.mul, torch.randn(rows, 128), torch.randn(rows, 128))[0], CPU)
    assert asked == [32, 2]


def test_a_device_that_is_not_here_is_refused():
    with pytest.raises(ArgumentError, match=r"mi300x, which is not here.*roofline"):
        get_cost("measured", get_device("mi300x"))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flops, "_registered", {})


def cost_of(plan: gcsolve.Plan, op: str) -> float:
    return next(c for c, n in zip(plan.problem.cost, plan.problem.graph.nodes, strict=True) if n.op == op)


def test_ops_without_a_formula_are_costed_by_bytes_and_named(registry):
    op = "aten.gelu.default"
    plain = gcsolve.solve(MLP(), torch.randn(64, 32), budget=1.0)
    by_bytes = sum(c for c, n in zip(plain.problem.cost, plain.problem.graph.nodes, strict=True) if "mm" not in n.op)
    share = f"{by_bytes / plain.problem.total_cost:.0%}"
    assert f"\ncosted by bytes (no FLOP formula; {share} of the step's time): gelu, gelu_backward" in plain.summary()
    assert cost_of(plain, op) == 2 * 64 * 32 * 4 / CPU.bandwidth_bytes_per_s + CPU.launch_s
    gcsolve.register_cost(aten.gelu, lambda x, **_: 1000 * x.numel())
    told = gcsolve.solve(MLP(), torch.randn(64, 32), budget=1.0)
    assert ": gelu_backward" in told.summary()
    assert cost_of(told, op) == 1000 * 64 * 32 / CPU.peak_flops["float32"] + CPU.launch_s


def test_registered_seconds_are_taken_as_they_are(registry, ran):
    gcsolve.register_cost(aten.gelu.default, lambda x, **_: 3.0, unit="s")
    for cost in ("roofline", "measured"):
        plan = gcsolve.solve(MLP(), torch.randn(64, 32), budget=1.0, cost=cost)
        assert cost_of(plan, "aten.gelu.default") == 3.0
    assert "aten.gelu.default" not in ran
    assert ": gelu, " in gcsolve.solve(MLP(), torch.randn(64, 32), budget=1.0, cost="flops").summary()


@pytest.mark.parametrize("answer", [-1.0, float("nan"), None, True])
def test_a_registered_cost_must_be_one(registry, answer):
    (node,) = traced(torch.sin, torch.randn(3))
    gcsolve.register_cost(aten.sin, lambda x: answer)
    with pytest.raises(ArgumentError, match=r"registered for aten.sin.default"):
        flops.node_flops(node)


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (
            lambda: 3.0,
            r"lambda>, registered as the cost of aten\.sin\.default, raised TypeError: .* 0 positional arguments",
        ),
        (lambda x: x.nothing, r"raised AttributeError: .*nothing.*own arguments: aten::sin\(Tensor self\)"),
        (lambda x: True, r"registered for aten\.sin\.default \(.*lambda>\)=True flops must be"),
        (lambda x: None, r"=None flops must be a finite number ≥ 0"),
    ],
)
def test_a_cost_function_that_fails_is_named_with_its_op(fn, text, monkeypatch):
    monkeypatch.setattr("gcsolve.cost.flops._registered", {})
    gcsolve.register_cost(aten.sin, fn)
    with pytest.raises(ArgumentError, match=text):
        gcsolve.solve(Sines(), torch.ones(4, requires_grad=True), budget=1.0)


class Sines(torch.nn.Module):
    def forward(self, x):
        return x.sin()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(("sin", len), "op='sin'"), ((aten.sin, 3), "fn=3"), ((aten.sin, len, "hours"), "unit='hours'.*flops, s")],
)
def test_bad_registrations_are_refused(arguments, text):
    op, fn, *unit = arguments
    with pytest.raises(ArgumentError, match=text):
        gcsolve.register_cost(op, fn, **({"unit": unit[0]} if unit else {}))
