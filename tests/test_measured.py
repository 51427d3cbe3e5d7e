"""cost="measured": each distinct op run once a machine, valid made-up inputs, the cache on disk; and register_cost."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import gcsolve
from gcsolve.cost import flops, measured
from gcsolve.cost.devices import get_device
from gcsolve.cost.measured import OpCache, OpRun, cache_directory, op_seconds
from gcsolve.cost.registry import get_cost
from gcsolve.errors import ArgumentError
from gcsolve.ops import facts
from gcsolve.ops import run as alone
from tests.models import MLP
from tests.test_cost import CPU, the, traced

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


def test_operands_and_results_take_turns():
    (node,) = traced(torch.mul, torch.randn(8, 8), torch.randn(8, 8))
    seen: list[tuple[int, ...]] = []
    op = node.target
    node.target = lambda a, b: (seen.append((a.data_ptr(), b.data_ptr())), op(a, b))[1]  # type: ignore[operator]

    def use(run: Any) -> list[torch.Tensor]:
        return [run() for _ in range(6)]

    results = alone.run_alone(node, CPU.kind, (alone.lively,), use, copies=3)
    assert len(set(seen[:3])) == 3
    assert seen[:3] == seen[3:]
    assert len({t.data_ptr() for t in results[:3]}) == 3
    assert all(torch.equal(results[0], t) for t in results)


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


# --- made-up inputs --------------------------------------------------------------------------------------------------


def indexing(x: torch.Tensor, table: torch.Tensor, ids: torch.Tensor, image: torch.Tensor) -> Any:
    x, table, image = (t.detach().requires_grad_() for t in (x, table, image))
    rows = F.embedding(ids, table)
    picked = x.gather(1, ids) + x[ids[0], ids[0]].sum() + x.index_select(0, ids[0]).sum()
    pooled = F.max_pool2d(image, 2)
    loss = F.cross_entropy(x, ids[:, 0]) + rows.sum() + picked.sum() + (pooled * pooled).sum()
    return torch.autograd.grad(loss, [x, table, image])


def test_indices_are_spread_over_all_that_they_may_name():
    nodes = traced(
        indexing, torch.randn(5, 7), torch.randn(50, 4), torch.randint(0, 5, (5, 3)), torch.randn(1, 1, 8, 8)
    )
    seen = set()
    for node in nodes:
        bounds = alone._index_bounds(node)
        if not bounds:
            continue
        seen.add(node.target.overloadpacket)  # type: ignore[union-attr]
        args, kwargs = alone.synthetic_arguments(node, CPU.kind, alone.lively)
        node.target(*args, **kwargs)  # type: ignore[operator]
        fakes, reals = (alone.leaves(t) for t in (facts.fake_arguments(node), (args, kwargs)))
        for fake, real in zip(fakes, reals, strict=True):
            if isinstance(fake, torch.Tensor) and id(fake) in bounds:
                assert 0 <= int(real.min()) <= int(real.max()) < bounds[id(fake)]
                assert real.numel() < 10 or int(real.max()) > 0
    assert seen >= {
        *(aten.embedding, aten.embedding_dense_backward, aten.gather, aten.index, aten.index_put, aten.index_select),
        *(aten.nll_loss_forward, aten.nll_loss_backward, aten.max_pool2d_with_indices_backward),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool])
def test_made_up_numbers_are_ordinary(dtype):
    made = alone.lively(torch.empty(40, 40, dtype=dtype), "cpu", 1)
    values = torch.view_as_real(made) if dtype.is_complex else made.float()
    assert int(values.unique().numel()) > (1 if dtype == torch.bool else 8)
    assert dtype == torch.bool or (float(values.min()) >= 0.49 and float(values.max()) <= 1.51)


# --- register_cost ---------------------------------------------------------------------------------------------------


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
