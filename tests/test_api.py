"""Bad input gets a clear error and nothing is lost; the plan says what it promises."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import gcsolve
from gcsolve.errors import ArgumentError, GcsolveError, InfeasibleBudget, TraceError
from tests import models
from tests.plans import mlp_minimum, mlp_plan
from tests.training import LEAST_S
from tests.training import x as _x


def _fingerprint(model: nn.Module) -> Any:
    return (
        {k: v.clone() for k, v in model.state_dict().items()},
        [(id(p), p.requires_grad, p.grad) for p in model.parameters()],
        [(type(m), m.training, dict(m._forward_hooks), sorted(vars(m))) for m in model.modules()],
        torch.get_rng_state(),
    )


def _assert_untouched(model: nn.Module, before: Any) -> None:
    after = _fingerprint(model)
    assert all(torch.equal(a, b) for a, b in zip(before[0].values(), after[0].values(), strict=True))
    assert before[1:3] == after[1:3]
    assert torch.equal(before[3], after[3])


BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "zero": ({"budget_gb": 0}, "budget_gb=0"),
    "negative": ({"budget_gb": -3}, "budget_gb=-3"),
    "nan": ({"budget_gb": math.nan}, "budget_gb=nan"),
    "inf": ({"budget_gb": math.inf}, "budget_gb=inf"),
    "no number": ({"budget_gb": "20"}, "budget_gb='20'"),
    "no size": ({"budget": "twenty"}, "budget='twenty'"),
    "number as text": ({"budget": "0.5"}, r"write for example .* budget=0\.5"),
    "zero size": ({"budget": "0GB"}, "budget=0"),
    "fraction above 1": ({"budget": 20}, "budget_gb=20"),
    "both": ({"budget_gb": 1, "budget": 0.5}, "both were given"),
    "neither": ({"scope": "activations"}, "no default budget"),
    "solver": ({"budget": 0.5, "solver": "magic"}, "known solvers: auto"),
    "cost": ({"budget": 0.5, "cost": "magic"}, "known cost models: auto"),
    "device": ({"budget": 0.5, "device": "abacus"}, "known devices: .*h200"),
    "scope": ({"budget": 0.5, "scope": "all"}, 'known scopes: "step"'),
    "loss": ({"budget": 0.5, "loss": 3}, "loss=3 is not callable"),
    "loss not scalar": (
        {"budget": 0.5, "loss": lambda y: y},
        r"loss must return a scalar tensor; <lambda> \(.*test_api\.py:\d+\) returned shape \(8, 32\)",
    ),
    "optimizer": (
        {"budget": 0.5, "optimizer": "adamm"},
        "optimizer='adamm' is no class of torch.optim; known: .*AdamW",
    ),
    "optimizer bool": ({"budget": 0.5, "optimizer": True}, "optimizer=True"),
    "bool": ({"budget": True}, "budget=True must be a finite number above 0, not of type bool"),
    "tensor": ({"budget": torch.tensor(0.5)}, "must be a finite number above 0, not of type Tensor"),
    "text GB": ({"budget_gb": "20"}, "budget_gb='20' must be .*not of type str; it is in GB: .*budget=\"20GiB\""),
    "text limit": ({"budget": 0.5, "time_limit_s": "a"}, "time_limit_s='a' must be a finite number"),
    "time limit": ({"budget": 0.5, "time_limit_s": -1}, "time_limit_s=-1"),
    "gap": ({"budget": 0.5, "gap": math.nan}, "gap=nan"),
    "progress": ({"budget": 0.5, "progress": "yes"}, "progress='yes'"),
    "backward from": ({"budget": 0.5, "backward_from": "some"}, "backward_from='some'"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments_name_themselves(name: str) -> None:
    keywords, message = BAD_ARGUMENTS[name]
    model = models.MLP()
    before = _fingerprint(model)
    with pytest.raises(ArgumentError, match=message):
        gcsolve.solve(model, _x(8, 32), **keywords)
    _assert_untouched(model, before)


def test_a_loss_that_carries_a_tensor_is_refused() -> None:
    model, x, target = models.MLP(), _x(8, 32), _x(8, 32)
    losses = (
        lambda y: (y - target).square().mean(),
        lambda y, t=target: (y - t).square().mean(),
        functools.partial(nn.functional.mse_loss, target=target),
    )
    for loss in losses:
        with pytest.raises(ArgumentError, match="make it an input of the model"):
            gcsolve.solve(model, x, budget=1.0, loss=loss)
    assert gcsolve.solve(model, x, budget=1.0, loss=lambda y: y.square().mean()).overhead == 0.0


def test_an_argument_that_cannot_be_compared_is_refused() -> None:
    import numpy

    class Scaled(models.MLP):
        def forward(self, x: torch.Tensor, scale: Any = None) -> torch.Tensor:
            return super().forward(x) * float(scale[0])

    with pytest.raises(ArgumentError, match=r"example_input\[0\]\[1\] is of type ndarray.*torch\.as_tensor"):
        gcsolve.solve(Scaled(), (_x(8, 32), numpy.ones(1)), budget=1.0)
    with pytest.raises(ArgumentError, match=r"example_input\[1\]\['scale'\] is of type ndarray"):
        gcsolve.solve(Scaled(), {"x": _x(8, 32), "scale": numpy.ones(1)}, budget=1.0)


def test_an_input_changed_in_place_that_needs_a_gradient_is_refused() -> None:
    class Changes(models.MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 1
            x.mul_(2)
            return super().forward(y)

    x = _x(8, 32)
    plain, plan = x.clone(), gcsolve.solve(Changes(), x, budget=1.0)
    plan.module(x)
    assert torch.equal(x, plain * 2)  # once, and not by planning
    y = _x(8, 32).requires_grad_() * 1
    with pytest.raises(TraceError, match=r"in.place"):
        gcsolve.solve(Changes(), y, budget=1.0)


def test_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="budgets"):
        gcsolve.solve(models.MLP(), _x(8, 32), budgets=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("example", [3, "text", None, {1: 2}])
def test_example_input_of_no_accepted_form(example: Any) -> None:
    with pytest.raises(ArgumentError, match="example_input"):
        gcsolve.solve(models.MLP(), example, budget=1.0)


def test_no_module() -> None:
    with pytest.raises(ArgumentError, match="not an nn\\.Module"):
        gcsolve.solve(lambda x: x, _x(2), budget=1.0)  # type: ignore[arg-type]


def test_a_branch_on_a_value_names_the_users_line() -> None:
    model = models.Branches()
    before = _fingerprint(model)
    with open(models.__file__) as lines:
        line = next(i for i, text in enumerate(lines, 1) if "the line that errors must name" in text)
    with pytest.raises(TraceError, match=rf"models\.py:{line}"):
        gcsolve.solve(model, _x(2, 4), budget=1.0)
    _assert_untouched(model, before)


def test_a_failed_trace_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TraceError):
        gcsolve.solve(models.Branches(), _x(2, 4), budget=1.0)
    out, err = capfd.readouterr()
    assert out == ""
    assert err == ""


def test_nothing_to_differentiate() -> None:
    model = models.MLP().requires_grad_(False)
    with pytest.raises(TraceError, match="no output of MLP needs a gradient"):
        gcsolve.solve(model, _x(8, 32), budget=1.0)


def test_an_input_that_the_model_rejects_gives_the_models_own_words() -> None:
    model = models.MLP()
    before = _fingerprint(model)
    with pytest.raises(TraceError, match=r"Error: .*\[8, 31\].*MLP\(float32\[8, 31\]\) at .*models\.py:\d+") as caught:
        gcsolve.solve(model, _x(8, 31), budget=1.0)
    assert caught.value.__cause__ is not None
    with pytest.raises(TraceError, match="unexpected keyword argument 'y'"):
        gcsolve.solve(model, {"x": _x(8, 32), "y": 1}, budget=1.0)
    _assert_untouched(model, before)


def test_host_randomness_is_refused_by_name_and_its_generators_are_left_alone() -> None:
    import random

    import numpy

    class LayerDrop(models.MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if random.random() < 2 and numpy.random.rand() < 2 else x

    random.seed(1)
    numpy.random.seed(1)
    states = random.getstate(), numpy.random.get_state()[1].tobytes()  # type: ignore[index, union-attr]
    with pytest.raises(TraceError, match=r"draws from random \(random\) at .*test_api\.py:\d+"):
        gcsolve.solve(LayerDrop(), _x(8, 32), budget=1.0)
    assert states == (random.getstate(), numpy.random.get_state()[1].tobytes())  # type: ignore[index, union-attr]


def test_recurrent_dropout_is_refused_for_a_device_that_is_not_here() -> None:
    model = nn.LSTM(4, 4, num_layers=2, dropout=0.1)
    with pytest.raises(TraceError, match="dropout"):
        gcsolve.solve(model, _x(3, 2, 4), budget=1.0, device="h200")


def test_budget_below_what_always_lives_says_so_with_the_breakdown() -> None:
    model = models.MLP()
    before = _fingerprint(model)
    with pytest.raises(InfeasibleBudget, match=r"parameters .* \+ .*gradients") as caught:
        gcsolve.solve(model, _x(8, 32), budget="10kB", optimizer=torch.optim.Adam)
    assert caught.value.budget_bytes == 10_000
    assert caught.value.least_bytes is not None
    assert caught.value.least_bytes > 10_000
    _assert_untouched(model, before)


def test_an_infeasible_budget_names_the_least_that_can_be_met_and_what_sets_it() -> None:
    model, x = models.MLP(6, 64), _x(256, 64)
    least = gcsolve.minimum_budget(model, x, time_limit_s=LEAST_S)
    plan = gcsolve.solve(model, x, budget=f"{least.one_rerun_bytes}B")
    assert plan.peak_bytes <= least.one_rerun_bytes
    assert least.floor_bytes <= min(least.one_rerun_floor_bytes, least.bytes)
    assert max(least.one_rerun_floor_bytes, least.bytes) <= least.one_rerun_bytes
    assert gcsolve.solve(model, x, budget=f"{least.bytes}B").peak_bytes <= least.bytes
    with pytest.raises(InfeasibleBudget) as caught:
        gcsolve.solve(model, x, budget=f"{least.floor_bytes - 1}B")
    error = caught.value
    assert error.least_bytes is not None
    assert error.least_bytes <= least.one_rerun_bytes * 1.01
    assert "models.py" in error.source
    assert error.op
    assert str(error.budget_bytes)[:3] in str(error).replace(".", "")


_SMALL = {
    "mlp": lambda: (models.MLP(4, 32), _x(64, 32), None),
    "batch norm": lambda: (models.BatchNorm(), _x(4, 4, 8, 8), torch.optim.AdamW),
    "gelu": lambda: (nn.Sequential(*[k for _ in range(6) for k in (nn.Linear(64, 64), nn.GELU())]), _x(256, 64), None),
}


@pytest.mark.parametrize("name", _SMALL)
def test_what_a_refusal_and_minimum_budget_name_is_planned(name: str) -> None:
    model, x, optimizer = _SMALL[name]()
    plan = gcsolve.solve(model, x, budget=1.0, loss=lambda o: o.square().mean(), optimizer=optimizer)
    with pytest.raises(InfeasibleBudget) as caught:
        plan.at(budget="1B")
    error, least = caught.value, plan.minimum_budget(time_limit_s=3)
    assert error.least_bytes is not None
    assert least.floor_bytes >= error.floor_bytes > 1
    assert least.bytes <= least.one_rerun_bytes
    assert f"({error.floor_bytes} bytes) is needed (proven), to run {error.op}" in str(error)
    assert f"a plan was found is {error.least_bytes / 1e3:.2f} kB ({error.least_bytes} bytes)" in str(error)
    for enough in {error.least_bytes, least.bytes}:
        assert plan.at(budget=f"{enough}B").peak_bytes <= enough
    assert min(error.least_bytes, least.bytes) == error.floor_bytes  # here the floor is the least
    with pytest.raises(InfeasibleBudget):
        plan.at(budget=f"{error.floor_bytes - 1}B")


def test_errors_share_one_root() -> None:
    for name in ("InfeasibleBudget", "TraceError", "ArgumentError", "CallError", "InvalidSchedule", "InvalidGraph"):
        assert issubclass(getattr(gcsolve, name), GcsolveError)


def test_plan_attributes_agree_with_each_other() -> None:
    plan = mlp_plan(0.7)
    assert sum(plan.breakdown.values()) == plan.peak_bytes <= plan.budget_bytes < plan.baseline_peak_bytes
    assert plan.any_bound <= plan.lower_bound <= plan.overhead
    assert 0 <= plan.gap < 1
    assert plan.overhead > 0
    assert plan.overhead_flops > 0
    kept = [d for d in plan.decisions if d.action == "keep"]
    rerun = [d for d in plan.decisions if d.action == "recompute"]
    assert kept
    assert rerun
    assert all(d.times == 1 for d in rerun)
    assert any(d.module == "layers.3" and d.op == "aten.addmm.default" and d.shape == (256, 64) for d in plan.decisions)
    assert all("models.py" in d.source for d in rerun)
    text = plan.summary()
    assert "overhead" in text
    assert "any schedule" in text


def test_scope_activations_leaves_out_what_always_lives() -> None:
    torch.manual_seed(0)
    model, x = models.MLP(6, 64), _x(256, 64)
    step = gcsolve.solve(model, x, budget=1.0, optimizer=torch.optim.Adam)
    bare = gcsolve.solve(model, x, budget=1.0, scope="activations")
    outside = sum(
        size for kind, size in step.breakdown.items() if kind in ("parameters", "buffers", "inputs", "optimizer")
    )
    assert step.baseline_peak_bytes - bare.baseline_peak_bytes == outside
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert step.breakdown["parameters"] == weights
    assert 2 * weights <= step.breakdown["optimizer"] <= 2 * weights + 64 * 12


@pytest.mark.parametrize(
    ("optimizer", "per_parameter"),
    [
        (None, 0),
        (torch.optim.SGD, 0),
        (torch.optim.AdamW, 8),
        (12, 12),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 4),
    ],
)
def test_optimizer_state_counts(optimizer: Any, per_parameter: int) -> None:
    model = models.MLP()
    if callable(optimizer) and not isinstance(optimizer, type):
        optimizer = optimizer(model.parameters())
    plan = gcsolve.solve(model, _x(8, 32), budget=1.0, optimizer=optimizer)
    elements = sum(p.numel() for p in model.parameters())
    found = plan.breakdown["optimizer"]
    assert per_parameter * elements <= found <= per_parameter * elements + 64 * len(list(model.parameters()))


def test_meta_weights_are_planned_and_say_that_they_cannot_run() -> None:
    with torch.device("meta"):
        model = models.MLP(6, 64)
    plan, same = gcsolve.solve(model, torch.empty(256, 64, device="meta"), budget=0.7), mlp_plan(0.7)
    assert plan.peak_bytes == same.peak_bytes
    assert plan.schedule == same.schedule
    with pytest.raises(gcsolve.CallError, match="meta"):
        plan.module(torch.empty(256, 64, device="meta"))


def test_the_same_budget_again_without_tracing_again() -> None:
    assert mlp_plan(0.7).schedule == gcsolve.solve(models.MLP(6, 64), _x(256, 64), budget=0.7).schedule
    assert mlp_plan(0.7).at(budget=1.0, solver="store_all").overhead == 0.0


def test_peaks_and_overheads_follow_falling_budgets() -> None:
    first, least = mlp_plan(1.0), mlp_minimum().one_rerun_bytes
    budgets = [first.baseline_peak_bytes - k * (first.baseline_peak_bytes - least) // 7 for k in range(8)]
    plans = [first.at(budget=f"{b}B") for b in budgets]
    peaks, overheads = [p.peak_bytes for p in plans], [p.overhead for p in plans]
    assert peaks == sorted(peaks, reverse=True)
    assert overheads == sorted(overheads)


def test_verify_reports_equality_and_the_peak_it_measured() -> None:
    torch.manual_seed(0)
    model, x = models.MLP(6, 256), _x(1024, 256)
    before = _fingerprint(model)
    plan = gcsolve.solve(model, x, budget=0.7)
    report = plan.verify(steps=3, repeats=1)
    _assert_untouched(model, before)
    assert report.ok
    assert report.differences == ()
    assert abs(report.prediction_error) < 0.005
    assert report.measured_peak_bytes < 0.75 * report.eager_peak_bytes
    assert report.losses == report.eager_losses
    assert len(report.losses) == 3
    assert report.step_s > 0
    assert "bitwise equal" in report.summary()


def test_what_verify_and_at_refuse_and_how_a_plan_is_shown_and_copied() -> None:
    plan = gcsolve.solve(models.MLP(2, 16), _x(8, 16), budget=1.0, optimizer="adamw", solver="STORE_ALL")
    assert plan.breakdown["optimizer"] > 0
    for given, text in (
        ({"steps": "a"}, "steps='a' must be a whole number ≥ 1"),
        ({"steps": 1.5}, r"steps=1\.5 must be"),
        ({"steps": 0}, "steps=0 must be"),
        ({"steps": True}, "steps=True must be"),
        ({"repeats": -1}, "repeats=-1 must be a whole number ≥ 0"),
        ({"repeats": None}, "repeats=None must be"),
    ):
        with pytest.raises(ArgumentError, match=text):
            plan.verify(**given)
    with pytest.raises(ArgumentError, match=r"budget_gb=0 must be .*; it is in GB: .* budget=0\.5"):
        plan.at(0)
    with pytest.raises(ArgumentError, match="time_limit_s=None must be"):
        plan.minimum_budget(None)  # type: ignore[arg-type]
    report = plan.verify(steps=1, repeats=0)
    assert repr(report) == report.summary()
    with pytest.raises(gcsolve.CallError, match=r"plan\.save\(path\) writes it"):
        pickle.dumps(plan)
    assert copy.copy(plan).schedule is plan.schedule


def test_times_of_small_steps_have_digits() -> None:
    report = gcsolve.solve(models.MLP(), _x(8, 32), budget=1.0).verify(steps=1)
    text = dataclasses.replace(report, step_s=0.00123, eager_step_s=1.5).summary()
    assert "step time: 1.230 ms, untouched model 1.500 s (x 0.001)" in text


def test_verify_sees_a_wrong_gradient() -> None:
    """The check can fail: a backward graph spoiled on purpose is reported, by name."""
    torch.manual_seed(0)
    model, x = models.MLP(2, 16), _x(8, 16)
    plan = gcsolve.solve(model, x, budget=1.0)
    step = next(iter(plan.module._gcsolve.cache.values()))
    honest = step.emitted.backward.forward
    step.emitted.backward.forward = lambda boxed: [g * (1 + 1e-6) if k == 1 else g for k, g in enumerate(honest(boxed))]
    report = plan.verify(steps=1, repeats=0)
    assert "step time: not taken" in report.summary()
    assert not report.ok
    assert not report.gradients_equal
    assert report.differences[0] == "step 1: gradient of layers.0.bias"


def test_a_wrapped_forward_is_refused() -> None:
    model = models.MLP()
    model.forward = copy.copy(model.forward)  # type: ignore[method-assign]
    with pytest.raises(ArgumentError, match="before it is wrapped"):
        gcsolve.solve(model, _x(8, 32), budget=1.0)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_torchscript_and_compiled_modules_are_refused_by_path() -> None:
    scripted: Any = torch.jit.trace(nn.Linear(32, 32), _x(8, 32))
    compiled: Any = torch.compile(nn.Linear(32, 32), backend="eager")
    in_place = nn.Linear(32, 32)
    in_place.compile(backend="eager")
    for module, words in (
        (scripted, "is TorchScript"),
        (compiled, "is compiled with torch.compile"),
        (in_place, "was compiled in place"),
    ):
        for model, path in ((nn.Sequential(nn.ReLU(), module), "model.1"), (module, "model")):
            with pytest.raises(TraceError, match=f"^{path} {words}"):
                gcsolve.solve(model, _x(8, 32), budget=1.0)


@pytest.mark.parametrize("which", ["model", "planned module"])
def test_a_module_compiled_in_place_after_planning_runs_as_planned(which: str) -> None:
    """The two share their attributes, and torch calls what `compile()` leaves in one of them in place of forward."""
    model = models.MLP()
    plan = gcsolve.solve(model, _x(8, 32), budget="1MB")
    expected = plan.module(_x(8, 32)).grad_fn
    (model if which == "model" else plan.module).compile(backend="eager")
    assert type(plan.module(_x(8, 32)).grad_fn) is type(expected)
    assert plan.verify(steps=1, repeats=0).ok


def test_backward_hooks_of_submodules_are_refused_when_planned_and_when_added_later() -> None:
    model = models.MLP()
    plan = gcsolve.solve(model, _x(8, 32), budget="1MB")
    handle = model.layers[1].register_full_backward_hook(lambda *_: None)
    text = r"layers\.1 \(Linear\) has the backward hook .*<lambda> \(tests/test_api\.py:\d+\).* Remove it"
    with pytest.raises(TraceError, match=text):
        gcsolve.solve(model, _x(8, 32), budget="1MB")
    with pytest.raises(TraceError, match=text):
        plan.module(_x(8, 32))
    handle.remove()
    plan.module(_x(8, 32))


def test_a_planned_module_is_not_planned_again() -> None:
    model = models.MLP()
    planned = gcsolve.solve(model, _x(8, 32), budget=1.0).module
    with pytest.raises(ArgumentError, match=r"plan\.at"):
        gcsolve.solve(planned, _x(8, 32), budget=1.0)
    with pytest.raises(ArgumentError, match="0 is a planned module already"):
        gcsolve.solve(nn.Sequential(planned), _x(8, 32), budget=1.0)


def test_a_planned_submodule_takes_the_place_of_the_original() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(models.MLP(), nn.Linear(32, 2)), _x(8, 32)
    plain = copy.deepcopy(model)
    keys = list(model.state_dict())
    model[0] = gcsolve.solve(model[0], x, budget=1.0).module
    assert list(model.state_dict()) == keys
    for m in (plain, model):
        m(x).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_a_call_that_no_plan_serves_says_so_when_it_does_not_fit() -> None:
    plan = gcsolve.solve(models.MLP(), _x(64, 32), budget=0.9)
    with pytest.raises(InfeasibleBudget, match="this call differs from those planned so far"):
        plan.module(_x(640, 32))


def test_a_solver_that_does_not_take_the_graph_is_no_infeasible_budget() -> None:
    with pytest.raises(gcsolve.UnsuitedSolver, match="brute_force"):
        gcsolve.solve(models.MLP(12, 64), _x(256, 64), budget=0.8, solver="brute_force")
