"""gcsolve.compare: every row is what solve would answer, infeasible ones keep their reason, an interrupt keeps the rest."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, ClassVar

import pytest
import torch

import gcsolve
import gcsolve.session
from gcsolve.evaluation import compare as compare_room
from gcsolve.plan_record import PlanRecord
from gcsolve.session import Session
from gcsolve.solver.uniform import Uniform
from tests import models


def _case() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return models.MLP(6, 64), torch.randn(256, 64)


def test_rows_are_what_solve_answers() -> None:
    model, x = _case()
    found = gcsolve.compare(model, x, budgets=[0.9, "769484B"], solvers=("store_all", "uniform_sqrt", "auto"))
    assert found.complete
    assert not found.measured
    assert [(r.solver, r.budget_bytes) for r in found.rows] == [
        (s, b) for b in found.budgets_bytes for s in ("store_all", "uniform_sqrt", "auto")
    ]
    plan = gcsolve.solve(model, x, budget="769484B")
    row = found.row("auto", 769484)
    assert row is not None
    assert row.fits
    assert (row.peak_bytes, row.overhead, row.overhead_flops) == (plan.peak_bytes, plan.overhead, plan.overhead_flops)
    assert (row.any_bound, row.gap, row.certificate) == (plan.any_bound, plan.gap, str(plan.certificate))
    over = found.row("store_all", 769484)
    assert over is not None
    assert not over.fits
    assert over.status == "OVER_BUDGET"
    assert over.peak_bytes == found.baseline_peak_bytes == plan.baseline_peak_bytes
    assert "cannot be met by store_all" in over.reason


def test_one_trace_serves_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[int] = []
    real = gcsolve.session.trace  # type: ignore[attr-defined]
    monkeypatch.setattr("gcsolve.session.trace", lambda *given: (traced.append(1), real(*given))[1])
    gcsolve.compare(*_case(), budgets=[0.9, 0.8, 0.7], solvers=("uniform", "chen"))
    assert len(traced) == 1


def test_measured_rows() -> None:
    found = gcsolve.compare(*_case(), budgets=[0.7], solvers=("store_all", "auto"), measure=True, repeats=1)
    assert found.measured
    no, row = found.rows
    assert no.measured_peak_bytes is None
    assert no.exact is None
    assert row.exact is True
    assert row.measured_peak_bytes is not None
    assert row.peak_bytes is not None
    assert abs(row.measured_peak_bytes - row.peak_bytes) < 0.01 * row.peak_bytes
    assert row.time_ratio is not None
    assert row.time_ratio > 0
    text = found.summary()
    assert "untouched model" in text
    assert text in found.summary()


def test_budgets_and_solvers_come_in_any_row() -> None:
    import numpy

    found = gcsolve.compare(*_case(), budgets=numpy.array([1.0, 0.9]), solvers=(s for s in ("store_all", "greedy")))
    assert [r.fits for r in found.rows] == [True, True, False, True]


def test_summary_json_and_html_say_the_same() -> None:
    found = gcsolve.compare(*_case(), budgets=[1.0, "1kB"], solvers=("store_all", "brute_force"))
    text, html, record = found.summary(), found._repr_html_(), json.loads(found.to_json())
    for expected in ("0.00% (1.10 MB)", "no plan (graph not taken)", "no plan"):
        assert expected in text
        assert expected in html
    assert record["rows"][0]["overhead"] == 0.0
    assert [r["status"] for r in record["rows"]] == ["OPTIMAL", "UNSUITED", "INFEASIBLE", "INFEASIBLE"]
    assert all(r["reason"] for r in record["rows"][1:])


@dataclasses.dataclass(frozen=True)
class _Interrupted:
    name: ClassVar[str] = "interrupted"

    def solve(self, problem: gcsolve.Problem, **_: Any) -> gcsolve.Solution:
        raise KeyboardInterrupt


def test_an_interrupt_keeps_the_rows_so_far() -> None:
    found = gcsolve.compare(*_case(), budgets=[0.9, 0.8], solvers=("uniform", _Interrupted()))  # type: ignore[arg-type]
    assert not found.complete
    assert [r.solver for r in found.rows] == ["uniform"]
    assert "INTERRUPTED, 3 rows missing" in found.summary()
    assert "not run" in found.summary()
    assert "interrupted" in repr(found)


@dataclasses.dataclass(frozen=True)
class _Broken:
    name: ClassVar[str] = "broken"
    answer: Any = None

    def solve(self, problem: gcsolve.Problem, **_: Any) -> gcsolve.Solution:
        if self.answer is None:
            raise ZeroDivisionError("no <bytes>")
        return self.answer


@pytest.mark.parametrize("answer", [None, 7], ids=["raises", "rubbish"])
def test_a_solver_that_fails_is_a_row_with_its_error(answer: Any) -> None:
    told = "raised ZeroDivisionError at test_comparison.py" if answer is None else "answered with int"
    found = gcsolve.compare(*_case(), budgets=[0.9, 0.8], solvers=("uniform", _Broken(answer), "auto"))
    assert found.complete
    assert [(r.solver, r.fits) for r in found.rows] == 2 * [("uniform", True), ("broken", False), ("auto", True)]
    failed = [r for r in found.rows if r.solver == "broken"]
    assert {r.status for r in failed} == {"FAILED"}
    assert all(told in r.reason and r.peak_bytes is None for r in failed)
    text = found.summary()
    assert text.count("failed (see below)") == 2
    assert text.splitlines()[-1] == f"broken at 989.34 kB failed: {failed[0].reason}"
    assert "no &lt;bytes&gt;" in found._repr_html_() or answer == 7
    assert json.loads(found.to_json())["rows"][1]["reason"] == failed[0].reason
    found.plot()


def test_a_plan_that_fails_while_measured_keeps_the_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    real = compare_room.verify

    def verify(plan: PlanRecord, session: Session, **options: Any) -> Any:
        if plan.solution.solver == "uniform":
            raise MemoryError("40 GB")
        return real(plan, session, **options)

    monkeypatch.setattr(compare_room, "verify", verify)
    found = gcsolve.compare(*_case(), budgets=[0.9], solvers=("uniform", "auto"), measure=True, repeats=0)
    failed, row = found.rows
    assert (failed.fits, failed.exact, failed.measured_peak_bytes) == (True, None, None)
    assert failed.measure_error == "MemoryError: 40 GB"
    assert row.exact is True
    assert "uniform at 989.34 kB failed: MemoryError: 40 GB" in found.summary()


def test_two_settings_of_one_solver_are_told_apart() -> None:
    found = gcsolve.compare(*_case(), budgets=[1.0], solvers=(Uniform(2), Uniform(3)))
    assert found.solvers == ("Uniform(k=2)", "Uniform(k=3)")
    assert found.rows[0].overhead != found.rows[1].overhead


def test_a_solver_asked_for_twice_is_run_once() -> None:
    found = gcsolve.compare(*_case(), budgets=[1.0, 1.0], solvers=("uniform", "store_all", "UNIFORM"))
    assert found.solvers == ("uniform", "store_all")
    assert len(found.rows) == 2


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"budgets": [0.5], "budgets_gb": [1]}, "both were given"),
        ({"budgets": 0.5}, "budgets=0.5 must be a list"),
        ({"budgets": []}, r"budgets=\[\] must be a list"),
        ({"budgets": [2.0]}, "budget=2.0 is above 1"),
        ({"budgets_gb": [-1]}, "budget_gb=-1"),
        ({"solvers": "auto"}, "solvers='auto' must be a list"),
        ({"solvers": ["magic"]}, "known solvers"),
        ({"solvers": None}, "solvers=None must be a list"),
        ({"budgets": {"a": 1}}, r"budgets=\{'a': 1\} must be a list"),
        ({"budgets": "0.8"}, "budgets='0.8' must be a list"),
        ({"measure": "yes"}, "measure='yes' is neither True nor False"),
        ({"repeats": -1}, "repeats=-1 must be a whole number ≥ 0"),
        ({"steps": 0}, "steps=0 must be a whole number ≥ 1"),
        ({"time_limit_s": "a"}, "time_limit_s='a'"),
    ],
)
def test_bad_arguments_name_themselves(given: dict[str, Any], text: str) -> None:
    with pytest.raises(gcsolve.ArgumentError, match=text):
        gcsolve.compare(*_case(), **given)


def test_meta_weights_are_compared_but_not_measured() -> None:
    with torch.device("meta"):
        model = models.MLP(6, 64)
    x = torch.empty(256, 64, device="meta")
    assert gcsolve.compare(model, x, budgets=[0.9], solvers=["auto"]).rows[0].fits
    with pytest.raises(gcsolve.ArgumentError, match="on meta"):
        gcsolve.compare(model, x, budgets=[0.9], measure=True)
