"""A plan for a browser: one self-contained page, and the short form that a notebook shows. No library, no network."""

from __future__ import annotations

import html
import json
import os
from importlib import resources
from pathlib import Path
from typing import Any

from gcsolve.plan_record import PlanRecord
from gcsolve.report.colours import COLOURS
from gcsolve.report.tables import html_table
from gcsolve.report.timeline import CATEGORIES, Timeline, shown_bytes, store_all_timeline, timeline
from gcsolve.util.sizes import size_text


def save_html(plan: PlanRecord, path: str | os.PathLike[str]) -> None:
    """Write the page to `path`: `page.html`, which lies beside this file, with the plan's data put into it.

    Raises:
        OSError: the file cannot be written.
    """
    frame = resources.files("gcsolve.report").joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(page_data(plan), separators=(",", ":"), ensure_ascii=False)
    data = data.replace("<", "\\u003c")  # nothing in a name may end the script element
    Path(path).write_text(frame.replace("/*DATA*/", data), encoding="utf-8")


def page_data(plan: PlanRecord) -> dict[str, Any]:
    """What the page shows, as plain JSON values; times in the plan's cost unit."""
    problem, graph = plan.problem, plan.problem.graph
    line, store_all = timeline(problem, plan.schedule), store_all_timeline(problem)
    return {
        "title": plan.model_name,
        "summary": plan.summary(),
        "budget": plan.budget_bytes,
        "top": _top(plan),
        "total": problem.total_cost,
        "categories": CATEGORIES,
        "colours": [COLOURS[c] for c in CATEGORIES],
        "external": [list(e) for e in graph.external],
        "nodes": [[n.name, n.op, n.module, n.source, c] for n, c in zip(graph.nodes, problem.cost, strict=True)],
        "nodeIsForward": [int(not graph.is_backward(i)) for i in range(len(graph.nodes))],
        "rerunnable": [int(n.rerunnable) for n in graph.nodes],
        "values": [[v.name, v.size_bytes, v.producer, int(v.pinned), v.kind] for v in graph.values],
        "runs": [[r.node, int(r.again), r.start, r.end, r.bytes] for r in line.runs],
        "lives": [[x.value, x.copy, x.category, x.first, x.last, x.reads] for x in line.lives],
        "base": [[r.start, r.total_bytes] for r in store_all.runs],
        "backward": line.backward,
        "peak": line.peak,
        "decisions": [
            [d.action, d.times, d.size_bytes, d.op, d.module, f"{d.dtype}{list(d.shape)}", d.source, d.read_by]
            for d in plan.decisions
        ],
    }


def _top(plan: PlanRecord) -> float:
    """Bytes at the upper edge of a drawing of the plan."""
    return 1.05 * shown_bytes(plan.budget_bytes, max(plan.baseline_peak_bytes, plan.peak_bytes)) or 1.0


# --- in a notebook -----------------------------------------------------------------------------------------------------

_COLUMNS, _PIXELS, _HEIGHT = 360, 2, 180
_WIDTH = _COLUMNS * _PIXELS
_BUDGET_COLOUR = "#009E73"


def notebook_html(plan: PlanRecord) -> str:
    """The plan's figures as a table and its memory over the step as a small drawing."""
    rows = [
        ["peak", f"{size_text(plan.peak_bytes)} of budget {size_text(plan.budget_bytes)}"],
        [
            "store-all",
            f"{size_text(plan.baseline_peak_bytes)} (plan: {plan.peak_bytes / plan.baseline_peak_bytes:.0%})",
        ],
        ["overhead", f"{plan.overhead:.2%} ({plan.cost} costs for {plan.device}); {plan.overhead_flops:.2%} of FLOPs"],
        [
            "proven",
            f"at least {plan.lower_bound:.2%}; by any schedule at least {plan.any_bound:.2%}; gap {plan.gap:.2%}",
        ],
        ["peak set by", plan.peak_at],
    ]
    name = f"{plan.model_name}: {plan.solution.solver}, {plan.status.name.lower()}"
    return html_table([name, ""], rows) + _drawing(plan)


def _drawing(plan: PlanRecord) -> str:
    """Memory by category over the step as SVG: columns of equal time, each at its largest moment."""
    line, store_all = timeline(plan.problem, plan.schedule), store_all_timeline(plan.problem)
    end = max(line.runs[-1].end, store_all.runs[-1].end) or 1.0
    top = _top(plan)
    columns = _columns(line, end)
    totals = [sum(column) for column in _columns(store_all, end) if column]
    points = " ".join(_stair(totals, top))
    parts = [
        *_layers(columns, top),
        f'<polyline fill="none" stroke="#000" points="{points}"><title>store-all</title></polyline>',
    ]
    level, budget = _y(plan.budget_bytes, top), "budget"
    if level < 0:
        budget += f" {size_text(plan.budget_bytes)}: far above"
    else:
        parts.append(_budget_line(plan.budget_bytes, level))
    drawn = [i for i, row in enumerate(zip(*(c for c in columns if c), strict=True)) if any(row)]
    keys = [(COLOURS[CATEGORIES[i]], CATEGORIES[i]) for i in drawn] + [("#000", "store-all"), (_BUDGET_COLOUR, budget)]
    legend = " ".join(
        f'<span style="white-space:nowrap"><span style="color:{c}">■</span> {html.escape(text)}</span>'
        for c, text in keys
    )
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" style="max-width:{_WIDTH}px;background:#fff"'
    svg = f"<svg {size}>{''.join(parts)}</svg>"
    return f'<div>{svg}<div style="font-size:85%">{legend}</div></div>'


def _layers(columns: list[tuple[int, ...] | None], top: float) -> list[str]:
    """A polygon for each category that there are any bytes of, one upon the other."""
    polygons: list[str] = []
    below = [0] * _COLUMNS
    for k, category in enumerate(CATEGORIES):
        upper = [b + (column[k] if column else 0) for b, column in zip(below, columns, strict=True)]
        if upper != below:
            points = " ".join(_stair(upper, top) + _stair(below, top)[::-1])
            polygons.append(
                f'<polygon fill="{COLOURS[category]}" points="{points}"><title>{category}</title></polygon>'
            )
        below = upper
    return polygons


def _budget_line(budget_bytes: int, level: float) -> str:
    return (
        f'<line x1="0" x2="{_WIDTH}" y1="{level}" y2="{level}" stroke="{_BUDGET_COLOUR}" stroke-width="2" '
        f'stroke-dasharray="8 4"><title>budget {size_text(budget_bytes)}</title></line>'
        f'<text x="4" y="{level - 5}" font-size="11" fill="#00704f">{size_text(budget_bytes)}</text>'
    )


def _y(size_bytes: float, top: float) -> float:
    return round(_HEIGHT * (1 - size_bytes / top), 1)


def _stair(levels: list[int], top: float) -> list[str]:
    """Points of a step line over the columns, one pair where the level changes."""
    points: list[str] = []
    for i, level in enumerate(levels):
        if i == 0 or level != levels[i - 1]:
            points += [f"{i * _PIXELS},{_y(levels[max(i - 1, 0)], top)}", f"{i * _PIXELS},{_y(level, top)}"]
    return [*points, f"{len(levels) * _PIXELS},{_y(levels[-1], top)}"]


def _columns(line: Timeline, end: float) -> list[tuple[int, ...] | None]:
    """Bytes by category in each of `_COLUMNS` equal spans of time, at the span's largest moment; None after the end."""
    columns: list[tuple[int, ...] | None] = [None] * _COLUMNS
    for run in line.runs:
        first = min(int(run.start / end * _COLUMNS), _COLUMNS - 1)
        last = min(int(run.end / end * _COLUMNS), _COLUMNS - 1)
        for i in range(first, last + 1):
            largest = columns[i]
            if largest is None or sum(largest) < run.total_bytes:
                columns[i] = run.bytes
    return columns
