"""Timeline and figures: the simulator's own numbers, nothing written over anything else."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import gcsolve
from gcsolve.report.page import page_data
from gcsolve.report.tables import html_table, text_table
from gcsolve.report.timeline import CATEGORIES, common_prefix, module_groups, timeline
from gcsolve.schedule import Compute, order_from_kept, schedule_from_order
from tests import models
from tests.strategies import problems


@pytest.fixture(scope="module")
def plan() -> gcsolve.Plan:
    torch.manual_seed(0)
    return gcsolve.solve(models.MLP(6, 64), torch.randn(256, 64), budget=0.7, optimizer=torch.optim.AdamW)


@pytest.fixture(scope="module")
def comparison() -> gcsolve.Comparison:
    torch.manual_seed(0)
    solvers = ("uniform_sqrt", "uniform", "chen", "greedy", "auto")
    return gcsolve.compare(models.MLP(6, 64), torch.randn(256, 64), budgets=[0.9, 0.8, 0.7], solvers=solvers)


@settings(max_examples=50, deadline=None)
@given(problems())
def test_the_timeline_has_the_simulators_bytes(problem: gcsolve.Problem) -> None:
    schedule = schedule_from_order(problem.graph, order_from_kept(problem.graph, ()))
    replay = gcsolve.simulate(problem, schedule)
    line = timeline(problem, schedule)
    computed = [b for a, b in zip(schedule.actions, replay.bytes_at, strict=True) if isinstance(a, Compute)]
    assert [run.total_bytes for run in line.runs] == computed
    assert line.runs[line.peak].total_bytes == replay.peak_bytes or replay.peak_bytes == problem.graph.external_bytes
    sizes = [v.size_bytes for v in problem.graph.values]
    for r, run in enumerate(line.runs):
        outside = run.bytes[CATEGORIES.index("workspace")] + problem.graph.external_bytes
        assert sum(sizes[life.value] for life in line.alive(r)) + outside == run.total_bytes
        for v in problem.graph.nodes[run.node].inputs:
            assert any(life.value == v and r in life.reads for life in line.alive(r))
    assert line.runs[-1].end == pytest.approx(replay.cost)


def test_categories_of_a_plan(plan: gcsolve.Plan) -> None:
    line = timeline(plan.problem, plan.schedule)
    peak = dict(zip(CATEGORIES, line.runs[line.peak].bytes, strict=True))
    assert peak["parameters"] == plan.breakdown["parameters"]
    assert peak["optimizer state"] == plan.breakdown["optimizer"]
    assert peak["gradients"] == plan.breakdown.get("gradients", 0)
    assert any(run.bytes[CATEGORIES.index("recomputed activations")] for run in line.runs)
    assert sum(run.again for run in line.runs) == sum(n - 1 for n in plan.schedule.runs(plan.problem.graph))
    assert not line.runs[line.backward - 1].again


def test_modules_are_cut_at_one_depth() -> None:
    paths = [f"h.{i}.{part}" for i in range(12) for part in ("attn.q", "attn.k", "mlp.up")] + ["", "head"]
    assert set(module_groups(paths, most=14).values()) == {f"h.{i}" for i in range(12)} | {"", "head"}
    assert module_groups(["a.b", ""], most=5) == {"a.b": "a.b", "": ""}
    assert common_prefix(["model.a.b", "model.c", ""]) == "model."
    assert common_prefix(["model", "model.c", "model.d"]) == "model."
    assert common_prefix(["a", "a.b", "a.b.c.d", "a.b.c.e", ""]) == "a.b.c."
    assert common_prefix(["model", "head"]) == ""


def test_tables() -> None:
    assert text_table(["a", "bc"], [["x", "1"], ["yyy", "22"]], right=[1]).splitlines() == [
        "a    bc", "───  ──", "x     1", "yyy  22",
    ]  # fmt: skip
    assert '<td style="text-align:left">&lt;x&gt;</td>' in html_table(["a"], [["<x>"]])


def _texts(ax: Any) -> list[Any]:
    axes = [ax.title, ax._left_title, ax.xaxis.label, ax.yaxis.label, *ax.texts, *ax.get_legend().get_texts()]
    x, y = sorted(ax.get_xlim()), sorted(ax.get_ylim())
    ticks = [t for t in ax.get_xticklabels() if x[0] <= t.get_position()[0] <= x[1]]
    ticks += [t for t in ax.get_yticklabels() if y[0] <= t.get_position()[1] <= y[1]]
    return [t for t in (*axes, *ticks) if t.get_text().strip() and t.get_visible()]


@pytest.mark.parametrize("kind", ["memory", "schedule", "layers", "frontier"])
def test_no_text_lies_on_another_or_outside(kind: str, plan: gcsolve.Plan, comparison: gcsolve.Comparison) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    ax = comparison.plot() if kind == "frontier" else getattr(plan, f"plot_{kind}")()
    figure = ax.figure
    figure.draw_without_rendering()
    boxes = [(t.get_text(), t.get_window_extent()) for t in _texts(ax)]
    assert len(boxes) > 8
    for (a, box), (b, other) in itertools.combinations(boxes, 2):
        inner = (min(box.x1, other.x1) - max(box.x0, other.x0), min(box.y1, other.y1) - max(box.y0, other.y0))
        assert min(inner) < 1.5, f"{a!r} and {b!r} overlap by {inner}"
    for text, box in boxes:
        assert figure.bbox.x0 - 1 <= box.x0, text
        assert box.x1 <= figure.bbox.x1 + 1, text
        assert figure.bbox.y0 - 1 <= box.y0, text
        assert box.y1 <= figure.bbox.y1 + 1, text
    pyplot.close(figure)


def test_figures_say_what_they_show(plan: gcsolve.Plan, comparison: gcsolve.Comparison) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    ax = plan.plot_memory()
    said = " ".join(t.get_text() for t in _texts(ax))
    for expected in ("MLP", "memory, MB", "budget", "store-all, total", "recomputed activations", "peak", "in layers."):
        assert expected in said
    handed = pyplot.subplots()[1]
    assert plan.plot_schedule(ax=handed) is handed
    said = " ".join(t.get_text() for t in _texts(comparison.plot()))
    for expected in ("uniform √L", "auto", "proven: no schedule", "overhead, %", "peak of the step, MB (predicted)"):
        assert expected in said
    pyplot.close("all")


def test_a_budget_far_above_the_step_leaves_the_step_to_be_seen(plan: gcsolve.Plan) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    roomy = plan.at(20)
    ax = roomy.plot_memory()
    assert ax.get_ylim()[1] * 1e6 < 2 * roomy.baseline_peak_bytes  # in MB
    assert "budget, 20.00 GB: far above" in [text.get_text() for text in ax.get_legend().get_texts()]
    pyplot.close(ax.figure)
    assert page_data(roomy)["top"] < 2 * roomy.baseline_peak_bytes
    assert "budget 20.00 GB: far above" in roomy._repr_html_()
    assert page_data(plan)["top"] > plan.budget_bytes


def test_a_frontier_is_drawn_from_its_figures_alone() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    from gcsolve.report.frontier import Curve, Frontier, draw_frontier

    curves = (Curve("auto", ((80_000_000, 0.02), (60_000_000, 0.1))), Curve("chen", ()))
    frontier = Frontier(
        model="GPT", device="a100-80gb", cost="roofline", baseline_peak_bytes=100_000_000, floor_bytes=40_000_000,
        curves=curves, bounds={60_000_000: 0.08}, measured=True,
    )  # fmt: skip
    ax = draw_frontier(frontier)
    said = " ".join(t.get_text() for t in _texts(ax))
    for expected in ("GPT", "a100-80gb", "roofline", "peak of the step, MB (measured)", "auto"):
        assert expected in said
    assert "chen" not in said  # it has no plan
    (stair,) = [line for line in ax.lines if line.get_drawstyle() == "steps-post"]
    assert [list(line) for line in stair.get_data()] == [[60.0, 80.0, 100.0], [10.0, 2.0, 2.0]]
    pyplot.close("all")


def test_the_bound_of_a_larger_budget_holds_at_a_smaller_one() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    from gcsolve.report.frontier import draw_bound

    ax = pyplot.subplots()[1]
    draw_bound(ax, {60: 0.1, 80: 0.2, 100: 0.0}, 50, 1.0)
    vertices = ax.collections[0].get_paths()[0].vertices
    assert max(y for x, y in vertices if x < 60) == pytest.approx(20)
    assert max((y for x, y in vertices if x > 80), default=0) == 0
    pyplot.close("all")


def test_what_is_no_axes_is_refused(plan: gcsolve.Plan) -> None:
    pytest.importorskip("matplotlib.pyplot")
    with pytest.raises(gcsolve.ArgumentError, match=r"ax='x\.png' is not .*\.figure\.savefig\('x\.png'\) writes it"):
        plan.plot_memory("x.png")
    with pytest.raises(gcsolve.ArgumentError, match=r"ax=3 is not matplotlib's Axes"):
        plan.plot_layers(3)


def test_without_matplotlib_the_error_says_what_to_install(plan: gcsolve.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (plan.plot_memory, plan.plot_schedule, plan.plot_layers):
        with pytest.raises(gcsolve.MissingBackend, match=r"pip install 'gcsolve\[viz\]'"):
            draw()
