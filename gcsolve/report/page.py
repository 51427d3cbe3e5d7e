"""A plan for a browser: one self-contained page, and the short form that a notebook shows. No library, no network."""

from __future__ import annotations

import html
import json
import os
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcsolve.report.colours import COLOURS
from gcsolve.report.tables import html_table
from gcsolve.report.timeline import CATEGORIES, Timeline, shown_bytes, timeline
from gcsolve.schedule import schedule_from_order
from gcsolve.util.sizes import size_text

if TYPE_CHECKING:
    from gcsolve.plan import Plan


def save_html(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the page to `path`; `page.html` beside this file is its frame, and the plan's data is put into it."""
    frame = resources.files("gcsolve.report").joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(page_data(plan), separators=(",", ":"), ensure_ascii=False)
    data = data.replace("<", "\\u003c")  # nothing in a name may end the script element
    Path(path).write_text(frame.replace("/*DATA*/", data), encoding="utf-8")


def page_data(plan: Plan) -> dict[str, Any]:
    """What the page shows, as plain JSON values; times in the plan's cost unit."""
    problem, graph = plan.problem, plan.problem.graph
    line, base = timeline(problem, plan.schedule), _store_all(plan)
    return {
        "title": type(plan.session.model).__name__,
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
        "base": [[r.start, r.total_bytes] for r in base.runs],
        "backward": line.backward,
        "peak": line.peak,
        "decisions": [
            [d.action, d.times, d.size_bytes, d.op, d.module, f"{d.dtype}{list(d.shape)}", d.source, d.read_by]
            for d in plan.decisions
        ],
    }


def _top(plan: Plan) -> float:
    """Bytes at the upper edge of a drawing of the plan."""
    return 1.05 * shown_bytes(plan.budget_bytes, max(plan.baseline_peak_bytes, plan.peak_bytes)) or 1.0


def _store_all(plan: Plan) -> Timeline:
    graph = plan.problem.graph
    return timeline(plan.problem, schedule_from_order(graph, range(len(graph.nodes))))


# --- in a notebook -----------------------------------------------------------------------------------------------------

_COLUMNS, _PIXELS, _HEIGHT = 360, 2, 180
_WIDTH = _COLUMNS * _PIXELS


def notebook_html(plan: Plan) -> str:
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
    name = f"{type(plan.session.model).__name__}: {plan.solution.solver}, {plan.status.name.lower()}"
    return html_table([name, ""], rows) + _drawing(plan)


def _drawing(plan: Plan) -> str:
    """Memory by category over the step as SVG: columns of equal time, each at its largest moment."""
    line, base = timeline(plan.problem, plan.schedule), _store_all(plan)
    end = max(line.runs[-1].end, base.runs[-1].end) or 1.0
    top = _top(plan)

    def y(size: float) -> float:
        return round(_HEIGHT * (1 - size / top), 1)

    def stair(levels: list[int]) -> list[str]:
        """Points of a step line over the columns, one pair where the level changes."""
        points: list[str] = []
        for i, level in enumerate(levels):
            if i == 0 or level != levels[i - 1]:
                points += [f"{i * _PIXELS},{y(levels[max(i - 1, 0)])}", f"{i * _PIXELS},{y(level)}"]
        return [*points, f"{len(levels) * _PIXELS},{y(levels[-1])}"]

    parts: list[str] = []
    columns = _columns(line, end)
    below = [0] * _COLUMNS
    for k, category in enumerate(CATEGORIES):
        upper = [b + (row[k] if row else 0) for b, row in zip(below, columns, strict=True)]
        if upper != below:
            points = " ".join(stair(upper) + stair(below)[::-1])
            parts.append(f'<polygon fill="{COLOURS[category]}" points="{points}"><title>{category}</title></polygon>')
        below = upper
    points = " ".join(stair([sum(row) for row in _columns(base, end) if row]))
    parts.append(f'<polyline fill="none" stroke="#000" points="{points}"><title>store-all</title></polyline>')
    level, budget = y(plan.budget_bytes), "budget"
    if level < 0:
        budget += f" {size_text(plan.budget_bytes)}: far above"
    else:
        parts.append(
            f'<line x1="0" x2="{_WIDTH}" y1="{level}" y2="{level}" stroke="#009E73" stroke-width="2" stroke-dasharray="8 4">'
            f"<title>budget {size_text(plan.budget_bytes)}</title></line>"
            f'<text x="4" y="{level - 5}" font-size="11" fill="#00704f">{size_text(plan.budget_bytes)}</text>'
        )
    seen = [i for i, row in enumerate(zip(*(c for c in columns if c), strict=True)) if any(row)]
    keys = [(COLOURS[CATEGORIES[i]], CATEGORIES[i]) for i in seen] + [("#000", "store-all"), ("#009E73", budget)]
    legend = " ".join(
        f'<span style="white-space:nowrap"><span style="color:{c}">■</span> {html.escape(text)}</span>'
        for c, text in keys
    )
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" style="max-width:{_WIDTH}px;background:#fff"'
    svg = f"<svg {size}>{''.join(parts)}</svg>"
    return f'<div>{svg}<div style="font-size:85%">{legend}</div></div>'


def _columns(line: Timeline, end: float) -> list[tuple[int, ...] | None]:
    """Bytes by category in each of `_COLUMNS` equal spans of time, at the span's largest moment; None after the end."""
    found: list[tuple[int, ...] | None] = [None] * _COLUMNS
    for run in line.runs:
        first = min(int(run.start / end * _COLUMNS), _COLUMNS - 1)
        last = min(int(run.end / end * _COLUMNS), _COLUMNS - 1)
        for i in range(first, last + 1):
            held = found[i]
            if held is None or sum(held) < run.total_bytes:
                found[i] = run.bytes
    return found
