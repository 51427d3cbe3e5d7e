"""Figures of a plan.

| figure | shows |
|---|---|
| `memory` | bytes alive over the step by category, store-all beside, budget and peak |
| `schedule` | when the forward values of each module are alive, and when their recomputed copies are |
| `layers` | what is kept and what is recomputed, module by module |

Each takes an optional Axes and returns the one it drew on. (`frontier.py` draws a comparison of solvers.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from gcsolve.plan_record import Decision, PlanRecord
from gcsolve.report.axes import SMALL, axes, pyplot, set_title, unit_of
from gcsolve.report.colours import BLACK, BLUE, COLOURS, GREEN, ORANGE
from gcsolve.report.timeline import (
    CATEGORIES,
    Timeline,
    common_prefix,
    module_groups,
    shown_bytes,
    store_all_timeline,
    timeline,
)
from gcsolve.util.sizes import size_text

_BEHIND_TEXT = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
"""Of a text that stands on colours or lines."""

_MOST_COLUMNS = 44
"""Of the `layers` figure, as long as leaving the ops' names out makes fewer."""


# --- time -----------------------------------------------------------------------------------------------------------------


def _percent_of(plan: PlanRecord) -> float:
    """What makes times of the plan percent of the store-all step."""
    return 100.0 / (plan.problem.total_cost or 1.0)


def _times(line: Timeline, scale: float) -> list[float]:
    """When each run begins, and when the last one ends."""
    return [scale * run.start for run in line.runs] + [scale * line.runs[-1].end]


def _turn(line: Timeline, x: Sequence[float]) -> float:
    """When the backward begins."""
    return x[line.backward] if line.backward < len(x) else x[-1]


def _time_axis(ax: Any, plan: PlanRecord, line: Timeline, x: Sequence[float]) -> None:
    ax.set_xlim(0, x[-1])
    ax.axvline(_turn(line, x), color=BLACK, linewidth=0.8)
    unit = {"s": "time", "flops": "FLOPs"}.get(plan.problem.cost_unit, "cost")
    ax.set_xlabel(
        f"{unit} since the step began, % of the store-all step ({plan.cost} costs for {plan.device})", fontsize=9
    )
    ax.tick_params(labelsize=SMALL)


# --- memory ---------------------------------------------------------------------------------------------------------------


def memory(plan: PlanRecord, ax: Any = None) -> Any:
    """Bytes alive over the step, stacked by category, with store-all's total, the budget and the peak."""
    line, scale = timeline(plan.problem, plan.schedule), _percent_of(plan)
    ax = axes(ax, 9, 4.8)
    top_bytes = shown_bytes(plan.budget_bytes, max(plan.baseline_peak_bytes, plan.peak_bytes))
    unit, unit_bytes = unit_of(top_bytes)
    x = _times(line, scale)
    _draw_categories(ax, line, x, unit_bytes)
    store_all = store_all_timeline(plan.problem)
    totals = [run.total_bytes / unit_bytes for run in store_all.runs]
    solid: dict[str, Any] = {"drawstyle": "steps-post", "color": BLACK, "linewidth": 1}
    ax.plot(_times(store_all, scale), [*totals, totals[-1]], label="store-all, total", **solid)
    dashed: dict[str, Any] = {"color": GREEN, "linewidth": 1.6, "linestyle": (0, (5, 2))}
    if plan.budget_bytes <= top_bytes:
        ax.axhline(plan.budget_bytes / unit_bytes, label=f"budget, {size_text(plan.budget_bytes)}", **dashed)
    else:
        ax.plot([], [], label=f"budget, {size_text(plan.budget_bytes)}: far above", **dashed)
    ax.set_ylim(0, 1.28 * top_bytes / unit_bytes)
    _annotate_peak(ax, plan, line, scale, x[-1], unit_bytes)
    _time_axis(ax, plan, line, x)
    for text, side, gap in (("forward", "right", -0.6), ("backward", "left", 0.6)):
        ax.text(
            _turn(line, x) + gap, 0.025, text, transform=ax.get_xaxis_transform(), ha=side, fontsize=SMALL,
            bbox=_BEHIND_TEXT,
        )  # fmt: skip
    ax.set_ylabel(f"memory, {unit}", fontsize=9)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4, fontsize=SMALL, frameon=False)
    set_title(
        ax,
        f"{plan.model_name}: memory over one training step",
        f"plan {size_text(plan.peak_bytes)}, store-all {size_text(plan.baseline_peak_bytes)} "
        f"({plan.peak_bytes / plan.baseline_peak_bytes:.0%}); overhead {plan.overhead:.2%}",
    )
    return ax


def _draw_categories(ax: Any, line: Timeline, x: Sequence[float], unit_bytes: float) -> None:
    """The bytes of each category that there are any of, one upon the other."""
    rows = list(zip(*(run.bytes for run in line.runs), strict=True))
    drawn = [i for i, row in enumerate(rows) if any(row)]
    ax.stackplot(
        x,
        [[b / unit_bytes for b in (*rows[i], rows[i][-1])] for i in drawn],
        step="post",
        labels=[CATEGORIES[i] for i in drawn],
        colors=[COLOURS[CATEGORIES[i]] for i in drawn],
        linewidth=0,
        rasterized=len(x) > 4000,
    )


def _annotate_peak(ax: Any, plan: PlanRecord, line: Timeline, scale: float, end: float, unit_bytes: float) -> None:
    """An arrow to the peak, with its bytes and its op; on the far side of the figure, where there is room."""
    peak = line.runs[line.peak]
    node = plan.problem.graph.nodes[peak.node]
    where = f"in {node.module}" if node.module else "of the model itself"
    middle = scale * (peak.start + peak.end) / 2
    right = middle > end / 2
    ax.annotate(
        f"peak {size_text(peak.total_bytes)}: {_short(node.op or node.name)} {where}",
        xy=(middle, peak.total_bytes / unit_bytes),
        xytext=(0.985 if right else 0.015, 0.955),
        textcoords="axes fraction",
        ha="right" if right else "left",
        va="top",
        fontsize=SMALL,
        bbox=_BEHIND_TEXT,
        arrowprops={"arrowstyle": "-|>", "color": BLACK, "linewidth": 0.9, "shrinkB": 1},
    )


# --- schedule -------------------------------------------------------------------------------------------------------------


def schedule(plan: PlanRecord, ax: Any = None) -> Any:
    """For each module, the bytes of its forward values alive over the step: first copies, and recomputed ones."""
    line = timeline(plan.problem, plan.schedule)
    rows = _forward_bytes(plan, line)
    x = _times(line, _percent_of(plan))
    ax = axes(ax, 9, 1.7 + 0.27 * len(rows))
    prefix = common_prefix(list(rows))
    for place, (first, again) in enumerate(rows.values()):
        most = max(a + b for a, b in zip(first, again, strict=True)) or 1
        floor = [float(-place)] * len(x)
        lower = [f + 0.82 * a / most for f, a in zip(floor, first, strict=True)]
        upper = [low + 0.82 * b / most for low, b in zip(lower, again, strict=True)]
        ax.fill_between(x, floor, lower, step="post", color=BLUE, linewidth=0)
        ax.fill_between(x, lower, upper, step="post", color=ORANGE, linewidth=0)
        ax.axhline(-place, color="#d0d0d0", linewidth=0.5)
        ax.text(1.008, -place + 0.4, size_text(most), transform=ax.get_yaxis_transform(), va="center", fontsize=7.5)
    ax.set_yticks([-place + 0.4 for place in range(len(rows))], _row_names(rows, prefix))
    ax.set_ylim(-len(rows) + 0.9, 1.05)
    ax.text(1.008, 1.0, "most", transform=ax.get_yaxis_transform(), va="bottom", fontsize=7.5)
    _time_axis(ax, plan, line, x)
    ax.tick_params(axis="y", length=0)
    handles = [
        ax.fill_between([], [], color=c, label=t) for c, t in ((BLUE, "held since the forward"), (ORANGE, "made again"))
    ]
    below = -0.48 / (0.27 * len(rows))  # of the axes' height: below the axis' own text
    ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, below), ncols=2, fontsize=SMALL, frameon=False)
    under = f"below {prefix.removesuffix('.')}, " if prefix else ""
    set_title(
        ax,
        f"{plan.model_name}: whose forward values are alive when",
        f"{under}each row to its own scale; at the line, backward begins",
    )
    return ax


def _forward_bytes(plan: PlanRecord, line: Timeline) -> dict[str, tuple[list[int], list[int]]]:
    """For each module shown: the bytes of its forward values alive in each run and after the last one, of first copies and of
    recomputed ones."""
    graph = plan.problem.graph
    forward = [life for life in line.lives if not graph.is_backward(graph.values[life.value].producer)]
    paths = [graph.nodes[graph.values[life.value].producer].module for life in forward]
    row_of = module_groups(paths)
    changes = {row_of[path]: ([0] * (len(line.runs) + 1), [0] * (len(line.runs) + 1)) for path in paths}
    for life, path in zip(forward, paths, strict=True):
        change = changes[row_of[path]][life.copy > 0]
        change[life.first] += graph.values[life.value].size_bytes
        change[life.last + 1] -= graph.values[life.value].size_bytes
    return {row: (list(accumulate(first)), list(accumulate(again))) for row, (first, again) in changes.items()}


def _row_names(rows: Iterable[str], prefix: str, most: int = 52) -> list[str]:
    """What is written beside each module's row: its path below `prefix`, the middle left out of one that is too long."""
    names = [row.removeprefix(prefix) or "(model)" for row in rows]
    return [name if len(name) <= most else f"{name[: most // 3]}…{name[len(name) - 2 * most // 3 :]}" for name in names]


# --- layers ---------------------------------------------------------------------------------------------------------------


def layers(plan: PlanRecord, ax: Any = None) -> Any:
    """One square a forward value that backward reads: kept or recomputed, its area by its bytes, a row a module."""
    rows, columns = _layer_rows(plan.decisions)
    largest = max((_bytes_of(cell) for row in rows.values() for cell in row.values()), default=1)
    names = _row_names(rows, common_prefix(list(rows)))
    # Inches: a square of 0.27 each, letters of the labels, the legend at the right and the title.
    width = 0.27 * len(columns) + 0.08 * max(map(len, names), default=0) + 2.5
    ax = axes(ax, min(width, 14.0), 0.27 * len(rows) + 0.075 * max(map(len, columns), default=0) + 0.9)
    for y, row in enumerate(rows.values()):
        for label, cell in row.items():
            _draw_square(ax, columns.index(label), y, cell, largest)
    ax.set_xlim(-0.7, len(columns) - 0.3)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_aspect("equal", adjustable="box")
    ax.set_xticks(range(len(columns)), columns, rotation=90, fontsize=7.5)
    ax.set_yticks(range(len(rows)), names, fontsize=SMALL)
    ax.tick_params(length=0)
    ax.set_axisbelow(True)
    ax.grid(color="#ececec", linewidth=0.6)
    for side in ("top", "right", "bottom", "left"):
        ax.spines[side].set_visible(False)
    kept, recomputed = (_bytes_of(plan.decisions, action) for action in ("keep", "recompute"))
    rectangle = pyplot().Rectangle
    handles = [
        rectangle((0, 0), 1, 1, color=BLUE, label=f"kept, {size_text(kept)}"),
        rectangle((0, 0), 1, 1, color=ORANGE, label=f"recomputed, {size_text(recomputed)}"),
    ]
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=SMALL, frameon=False)
    set_title(ax, f"{plan.model_name}: what backward reads", f"areas by bytes, largest {size_text(largest)}")
    return ax


def _draw_square(ax: Any, x: int, y: int, cell: Sequence[Decision], largest: int) -> None:
    """The values of a cell as one square, the share that is recomputed in its own colour."""
    size, recomputed = _bytes_of(cell), _bytes_of(cell, "recompute")
    side = 0.14 + 0.78 * (size / largest) ** 0.5
    left, low = x - side / 2, y - side / 2
    share = recomputed / size if size else float(any(d.action == "recompute" for d in cell))
    rectangle = pyplot().Rectangle
    ax.add_patch(rectangle((left, low), side, side, color=BLUE, linewidth=0))
    ax.add_patch(rectangle((left, low), side * share, side, color=ORANGE, linewidth=0))


def _bytes_of(decisions: Iterable[Decision], action: str = "") -> int:
    return sum(d.size_bytes for d in decisions if not action or d.action == action)


def _layer_rows(decisions: Sequence[Decision]) -> tuple[dict[str, dict[str, list[Decision]]], list[str]]:
    """row -> column -> the decisions there, and all columns; the ops' names are left out where there would be too many."""
    rows = _cells(decisions, with_op=True)
    columns = _merged(list(rows.values()))
    if len(columns) > _MOST_COLUMNS:
        rows = _cells(decisions, with_op=False)
        columns = _merged(list(rows.values()))
    return rows, columns


def _cells(decisions: Sequence[Decision], *, with_op: bool) -> dict[str, dict[str, list[Decision]]]:
    """row -> column -> the decisions there.

    Args:
        with_op: columns are named by op too, and numbered from the second of that name in a row: each has one decision.
    """
    row_of = module_groups([d.module for d in decisions])
    rows: dict[str, dict[str, list[Decision]]] = {}
    count: Counter[tuple[str, str]] = Counter()
    for d in decisions:
        row, op = row_of[d.module], _short(d.op)
        below = d.module.removeprefix(row).removeprefix(".")
        if with_op:
            column = f"{below} {op}".strip()
            count[row, column] += 1
            column += f" {count[row, column]}" if count[row, column] > 1 else ""
        else:
            column = below or op
        rows.setdefault(row, {}).setdefault(column, []).append(d)
    return rows


def _short(op: str) -> str:
    """ "aten.native_layer_norm.default" -> "layer_norm"."""
    return (
        (op.split(".")[1] if op.count(".") >= 2 else op)
        .strip("_")
        .removeprefix("native_")
        .removeprefix("scaled_dot_product_")
        .removesuffix("_for_cpu")
        .removesuffix("_legit_functional")
    )


def _merged(rows: Sequence[Iterable[str]]) -> list[str]:
    """All labels once: the longest row's in its order, what only rows before it have in front, after it behind."""
    listed = [list(row) for row in rows]
    longest = max(range(len(listed)), key=lambda i: (len(listed[i]), -i), default=0)
    merged: list[str] = []
    for i in sorted(range(len(listed)), key=lambda i: (-len(listed[i]), i)):
        shared = [merged.index(label) for label in listed[i] if label in merged]
        place = shared[0] if shared else len(merged) if i > longest else 0
        for label in listed[i]:
            if label in merged:
                place = merged.index(label) + 1
            else:
                merged.insert(place, label)
                place += 1
    return merged
