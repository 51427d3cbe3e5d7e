"""Figures, with matplotlib (extra `viz`), which is loaded when the first one is drawn.

| figure | shows |
|---|---|
| `memory` | bytes alive over the step by category, store-all beside, budget and peak |
| `schedule` | when the forward values of each module are held, and when their second copies |
| `layers` | what is kept and what is recomputed, module by module |
| `frontier` | overhead against peak memory, one curve a solver, the proven bound shaded |

Each takes an optional Axes and returns the one it drew on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcsolve.errors import ArgumentError, MissingBackend
from gcsolve.report.colours import BLACK, BLUE, COLOURS, GREEN, ORANGE, PINK, SKY, YELLOW
from gcsolve.report.timeline import CATEGORIES, Timeline, common_prefix, module_groups, shown_bytes, timeline
from gcsolve.schedule import schedule_from_order
from gcsolve.util.sizes import size_text

if TYPE_CHECKING:
    from gcsolve.evaluation.compare import Comparison
    from gcsolve.plan import Decision, Plan

_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
_MARKS = "osD^vP<>pHdX"
_SMALL = 8.5
_PLAIN = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}  # behind a text that stands on colours or lines


def _pyplot() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingBackend("figures need matplotlib: pip install 'gcsolve[viz]'") from error
    return pyplot


def refuse_unknown_format(name: str, file: str) -> None:
    """Refuse a file that matplotlib does not know how to write, before the work whose figure it is to hold.

    Args:
        name: the argument that names the file, for the text.
    """
    known = sorted(_pyplot().Figure().canvas.get_supported_filetypes())
    ending = Path(file).suffix.removeprefix(".").lower()
    if ending and ending not in known:
        raise ArgumentError(f"{name} {file}: no figure is written as .{ending}; known endings: {', '.join(known)}")


def _axes(ax: Any, width: float, height: float) -> Any:
    pyplot = _pyplot()  # so that a missing matplotlib is said, even with an Axes of something else
    if ax is not None and not hasattr(ax, "add_patch"):
        raise ArgumentError(
            f"ax={ax!r} is not matplotlib's Axes; without one a figure is made, and .figure.savefig({ax!r}) writes it"
            if isinstance(ax, str)
            else f"ax={ax!r} is not matplotlib's Axes; leave it out, or pass one"
        )
    if ax is not None:
        return ax
    return pyplot.subplots(figsize=(width, height), layout="constrained", dpi=110)[1]


def _unit(largest: float) -> tuple[str, float]:
    """The unit in which the largest number has at least one digit before the point."""
    return next(((name, scale) for name, scale in _UNITS if largest >= scale), _UNITS[-1])


def _title(ax: Any, title: str, below: str) -> None:
    ax.set_title(title, loc="left", fontsize=11, pad=22)
    ax.text(0, 1.02, below, transform=ax.transAxes, fontsize=_SMALL, color="#444444")


def _model_name(plan: Plan) -> str:
    return type(plan.session.model).__name__


def _laid_out(plan: Plan) -> tuple[Timeline, Timeline, float]:
    """The plan and store-all in time, and what makes their times percent of the store-all step."""
    problem = plan.problem
    base = timeline(problem, schedule_from_order(problem.graph, range(len(problem.graph.nodes))))
    return timeline(problem, plan.schedule), base, 100.0 / (problem.total_cost or 1.0)


def _steps(line: Timeline, scale: float) -> list[float]:
    return [scale * run.start for run in line.runs] + [scale * line.runs[-1].end]


def _time_axis(ax: Any, plan: Plan, line: Timeline, x: Sequence[float]) -> None:
    turn = x[line.backward] if line.backward < len(x) else x[-1]
    ax.set_xlim(0, x[-1])
    ax.axvline(turn, color=BLACK, linewidth=0.8)
    unit = {"s": "time", "flops": "FLOPs"}.get(plan.problem.cost_unit, "cost")
    ax.set_xlabel(
        f"{unit} since the step began, % of the store-all step ({plan.cost} costs for {plan.device})", fontsize=9
    )
    ax.tick_params(labelsize=_SMALL)


def memory(plan: Plan, ax: Any = None) -> Any:
    """Bytes alive over the step, stacked by category, with store-all's total, the budget and the peak."""
    line, base, scale = _laid_out(plan)
    ax = _axes(ax, 9, 4.8)
    most = shown_bytes(plan.budget_bytes, max(plan.baseline_peak_bytes, plan.peak_bytes))
    unit, size = _unit(most)
    x = _steps(line, scale)
    rows = list(zip(*(run.bytes for run in line.runs), strict=True))
    drawn = [i for i, row in enumerate(rows) if any(row)]
    heights = [[b / size for b in (*rows[i], rows[i][-1])] for i in drawn]
    ax.stackplot(
        x, heights, step="post", labels=[CATEGORIES[i] for i in drawn],
        colors=[COLOURS[CATEGORIES[i]] for i in drawn], linewidth=0, rasterized=len(x) > 4000,
    )  # fmt: skip
    totals = [run.total_bytes / size for run in base.runs]
    whole: dict[str, Any] = {"drawstyle": "steps-post", "color": BLACK, "linewidth": 1}
    ax.plot(_steps(base, scale), [*totals, totals[-1]], label="store-all, total", **whole)
    allowed: dict[str, Any] = {"color": GREEN, "linewidth": 1.6, "linestyle": (0, (5, 2))}
    if plan.budget_bytes <= most:
        ax.axhline(plan.budget_bytes / size, label=f"budget, {size_text(plan.budget_bytes)}", **allowed)
    else:
        ax.plot([], [], label=f"budget, {size_text(plan.budget_bytes)}: far above", **allowed)

    peak = line.runs[line.peak]
    node = plan.problem.graph.nodes[peak.node]
    where = f"in {node.module}" if node.module else "of the model itself"
    at, high = scale * (peak.start + peak.end) / 2, peak.total_bytes / size
    ax.set_ylim(0, 1.28 * most / size)
    right = at > x[-1] / 2
    ax.annotate(
        f"peak {size_text(peak.total_bytes)}: {_short(node.op or node.name)} {where}",
        xy=(at, high), xytext=(0.985 if right else 0.015, 0.955), textcoords="axes fraction",
        ha="right" if right else "left", va="top", fontsize=_SMALL,
        bbox=_PLAIN,
        arrowprops={"arrowstyle": "-|>", "color": BLACK, "linewidth": 0.9, "shrinkB": 1},
    )  # fmt: skip
    _time_axis(ax, plan, line, x)
    turn = x[line.backward] if line.backward < len(x) else x[-1]
    for text, side, gap in (("forward", "right", -0.6), ("backward", "left", 0.6)):
        ax.text(turn + gap, 0.025, text, transform=ax.get_xaxis_transform(), ha=side, fontsize=_SMALL, bbox=_PLAIN)
    ax.set_ylabel(f"memory, {unit}", fontsize=9)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4, fontsize=_SMALL, frameon=False)
    _title(
        ax, f"{_model_name(plan)}: memory over one training step",
        f"plan {size_text(plan.peak_bytes)}, store-all {size_text(plan.baseline_peak_bytes)} "
        f"({plan.peak_bytes / plan.baseline_peak_bytes:.0%}); overhead {plan.overhead:.2%}",
    )  # fmt: skip
    return ax


def schedule(plan: Plan, ax: Any = None) -> Any:
    """For each module, the bytes of its forward values alive over the step: first copies, and copies made again."""
    line, _, scale = _laid_out(plan)
    graph = plan.problem.graph
    forward = [life for life in line.lives if not graph.is_backward(graph.values[life.value].producer)]
    paths = [graph.nodes[graph.values[life.value].producer].module for life in forward]
    shown = module_groups(paths)
    rows = list(dict.fromkeys(shown[p] for p in paths))
    held = {(row, again): [0] * (len(line.runs) + 1) for row in rows for again in (False, True)}
    for life, path in zip(forward, paths, strict=True):
        change = held[shown[path], life.copy > 0]
        change[life.first] += graph.values[life.value].size_bytes
        change[life.last + 1] -= graph.values[life.value].size_bytes
    x = _steps(line, scale)
    ax = _axes(ax, 9, 1.7 + 0.27 * len(rows))
    prefix = common_prefix(rows)
    for place, row in enumerate(rows):
        first, second = (_running(held[row, again]) for again in (False, True))
        top = max(a + b for a, b in zip(first, second, strict=True)) or 1
        floor = [float(-place)] * len(x)
        lower = [f + 0.82 * a / top for f, a in zip(floor, first, strict=True)]
        upper = [low + 0.82 * b / top for low, b in zip(lower, second, strict=True)]
        ax.fill_between(x, floor, lower, step="post", color=BLUE, linewidth=0)
        ax.fill_between(x, lower, upper, step="post", color=ORANGE, linewidth=0)
        ax.axhline(-place, color="#d0d0d0", linewidth=0.5)
        ax.text(1.008, -place + 0.4, size_text(top), transform=ax.get_yaxis_transform(), va="center", fontsize=7.5)
    ax.set_yticks([-place + 0.4 for place in range(len(rows))], _row_names(rows, prefix))
    ax.set_ylim(-len(rows) + 0.9, 1.05)
    ax.text(1.008, 1.0, "most", transform=ax.get_yaxis_transform(), va="bottom", fontsize=7.5)
    _time_axis(ax, plan, line, x)
    ax.tick_params(axis="y", length=0)
    handles = [
        ax.fill_between([], [], color=c, label=t) for c, t in ((BLUE, "held since the forward"), (ORANGE, "made again"))
    ]
    low = -0.48 / (0.27 * len(rows))  # of the axes' height: below the axis' own text
    ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, low), ncols=2, fontsize=_SMALL, frameon=False)
    under = f"below {prefix.removesuffix('.')}, " if prefix else ""
    _title(
        ax,
        f"{_model_name(plan)}: whose forward values are alive when",
        f"{under}each row to its own scale; at the line, backward begins",
    )
    return ax


def _row_names(rows: Iterable[str], prefix: str, most: int = 52) -> list[str]:
    """What is written beside each module's row: its path below `prefix`, the middle left out of one that is too long."""
    names = [row.removeprefix(prefix) or "(model)" for row in rows]
    return [name if len(name) <= most else f"{name[: most // 3]}…{name[len(name) - 2 * most // 3 :]}" for name in names]


def _running(changes: Iterable[int]) -> list[int]:
    total, found = 0, []
    for change in changes:
        total += change
        found.append(total)
    return found


def layers(plan: Plan, ax: Any = None) -> Any:
    """One square a forward value that backward reads: kept or recomputed, its area by its bytes, a row a module."""
    shown = module_groups([d.module for d in plan.decisions])
    rows: dict[str, dict[str, list[Decision]]] = {}
    for column in (_with_op, _without_op):
        rows = _map_rows(plan.decisions, shown, column)
        columns = _merged(list(rows.values()))
        if len(columns) <= 44:
            break
    largest = max((sum(d.size_bytes for d in cell) for row in rows.values() for cell in row.values()), default=1)
    prefix = common_prefix(list(rows))
    names = _row_names(rows, prefix)
    # Inches: a square of 0.27 each, letters of the labels, the legend at the right and the title.
    wide = 0.27 * len(columns) + 0.08 * max(map(len, names), default=0) + 2.5
    ax = _axes(ax, min(wide, 14.0), 0.27 * len(rows) + 0.075 * max(map(len, columns), default=0) + 0.9)
    pyplot = _pyplot()
    for y, row in enumerate(rows.values()):
        for label, cell in row.items():
            size = sum(d.size_bytes for d in cell)
            again = sum(d.size_bytes for d in cell if d.action == "recompute")
            side = 0.14 + 0.78 * (size / largest) ** 0.5
            left, low = columns.index(label) - side / 2, y - side / 2
            ax.add_patch(pyplot.Rectangle((left, low), side, side, color=BLUE, linewidth=0))
            share = again / size if size else float(any(d.action == "recompute" for d in cell))
            ax.add_patch(pyplot.Rectangle((left, low), side * share, side, color=ORANGE, linewidth=0))
    ax.set_xlim(-0.7, len(columns) - 0.3)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_aspect("equal", adjustable="box")
    ax.set_xticks(range(len(columns)), columns, rotation=90, fontsize=7.5)
    ax.set_yticks(range(len(rows)), names, fontsize=_SMALL)
    ax.tick_params(length=0)
    ax.set_axisbelow(True)
    ax.grid(color="#ececec", linewidth=0.6)
    for side in ("top", "right", "bottom", "left"):
        ax.spines[side].set_visible(False)
    kept = sum(d.size_bytes for d in plan.decisions if d.action == "keep")
    again = sum(d.size_bytes for d in plan.decisions if d.action == "recompute")
    handles = [
        pyplot.Rectangle((0, 0), 1, 1, color=BLUE, label=f"kept, {size_text(kept)}"),
        pyplot.Rectangle((0, 0), 1, 1, color=ORANGE, label=f"recomputed, {size_text(again)}"),
    ]
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=_SMALL, frameon=False)
    _title(ax, f"{_model_name(plan)}: what backward reads", f"areas by bytes, largest {size_text(largest)}")
    return ax


def _with_op(below: str, op: str) -> str:
    return f"{below} {op}".strip()


def _without_op(below: str, op: str) -> str:
    return below or op


def _map_rows(
    decisions: Sequence[Decision], shown: dict[str, str], column: Any
) -> dict[str, dict[str, list[Decision]]]:
    """row -> column -> the decisions there; what stands twice in one row gets a number."""
    rows: dict[str, dict[str, list[Decision]]] = {}
    seen: dict[tuple[str, str], int] = {}
    for d in decisions:
        group = shown[d.module]
        label = column(d.module.removeprefix(group).removeprefix("."), _short(d.op))
        if column is _with_op:
            count = seen[group, label] = seen.get((group, label), 0) + 1
            label += f" {count}" if count > 1 else ""
        rows.setdefault(group, {}).setdefault(label, []).append(d)
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
    found: list[str] = []
    for i in sorted(range(len(listed)), key=lambda i: (-len(listed[i]), i)):
        known = [found.index(label) for label in listed[i] if label in found]
        place = known[0] if known else len(found) if i > longest else 0
        for label in listed[i]:
            if label in found:
                place = found.index(label) + 1
            else:
                found.insert(place, label)
                place += 1
    return found


def frontier(comparison: Comparison, ax: Any = None) -> Any:
    """Overhead against peak, one staircase a solver; no schedule is in the shaded part. Measured peaks where known."""
    ax = _axes(ax, 9, 5)
    points: dict[str, list[tuple[float, float]]] = {name: [] for name in comparison.solvers}
    bounds: dict[int, float] = {}
    for row in comparison.rows:
        bounds[row.budget_bytes] = max(bounds.get(row.budget_bytes, 0.0), row.any_bound)
        if row.overhead is not None and row.peak_bytes is not None:
            points[row.solver].append((row.measured_peak_bytes or row.peak_bytes, row.overhead))
    unit, size = _unit(comparison.baseline_peak_bytes)
    draw_bound(ax, bounds, comparison.floor_bytes, size)
    for name, style in _styles(comparison.solvers).items():
        spots = sorted(set(points[name]))
        if spots:
            draw_steps(ax, [(p / size, 100 * o) for p, o in spots], comparison.baseline_peak_bytes / size, style)
    corner: dict[str, Any] = {"marker": "s", "color": BLACK, "markersize": 7, "linestyle": "none", "zorder": 5}
    ax.plot(comparison.baseline_peak_bytes / size, 0, label="store-all", **corner)
    highest = max((100 * o for spots in points.values() for _, o in spots), default=1.0)
    peaks = [p / size for spots in points.values() for p, _ in spots] + [comparison.baseline_peak_bytes / size]
    room = 0.04 * (max(peaks) - comparison.floor_bytes / size)
    ax.set_xlim(min(*peaks, comparison.floor_bytes / size) - room, max(peaks) + room)
    ax.set_ylim(-0.02 * highest, 1.06 * highest + 0.1)
    ax.set_xlabel(f"peak of the step, {unit} ({'measured' if comparison.measured else 'predicted'})", fontsize=9)
    ax.set_ylabel(f"overhead, % of the store-all step ({comparison.cost} costs)", fontsize=9)
    ax.tick_params(labelsize=_SMALL)
    ax.grid(color="#ececec", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.legend(fontsize=_SMALL, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _title(
        ax, f"{comparison.model}: recomputation for memory",
        f"store-all {size_text(comparison.baseline_peak_bytes)}; costs for {comparison.device}; lower left is better",
    )  # fmt: skip
    return ax


def draw_steps(ax: Any, spots: Sequence[tuple[float, float]], end: float, style: dict[str, Any]) -> None:
    """The (peak, overhead) spots, and the least overhead that they give with so much memory as a staircase up to `end`."""
    best, least = [], float("inf")
    for peak, overhead in spots:
        least = min(least, overhead)
        best.append((peak, least))
    stair = {k: v for k, v in style.items() if not k.startswith(("marker", "label"))}
    ax.plot(
        [*(p for p, _ in best), max(end, best[-1][0])], [*(o for _, o in best), least], drawstyle="steps-post", **stair
    )
    ax.plot([p for p, _ in spots], [o for _, o in spots], **{**style, "linestyle": "none"})


def _styles(solvers: Sequence[str]) -> dict[str, dict[str, Any]]:
    """How each solver's curve is drawn: auto in black above the others, uniform √L, a single plan, as a star."""
    palette = (BLUE, ORANGE, GREEN, PINK, SKY, "#7a5195", "#8c8c8c", "#a6761d")
    others = [name for name in solvers if name not in ("auto", "uniform_sqrt")]
    styles: dict[str, dict[str, Any]] = {
        name: {
            "label": name, "color": palette[i % len(palette)], "marker": _MARKS[i % len(_MARKS)], "markersize": 5,
            "linewidth": 1.1, "zorder": 3,
        }
        for i, name in enumerate(others)
    }  # fmt: skip
    star = {
        "label": "uniform √L", "color": BLACK, "markerfacecolor": YELLOW, "marker": "*", "markersize": 15,
        "linestyle": "none", "zorder": 5,
    }  # fmt: skip
    best = {"label": "auto", "color": BLACK, "marker": "o", "markersize": 5.5, "linewidth": 2, "zorder": 4}
    return {name: {"uniform_sqrt": star, "auto": best}.get(name) or styles[name] for name in solvers}


def draw_bound(ax: Any, bounds: dict[int, float], floor_bytes: int, size: float) -> None:
    """Shade what no schedule reaches: overheads below `bounds` (budget in bytes -> share), and peaks below the floor.

    A bound proven at one budget holds at every smaller one, so the edge is a staircase.
    """
    budgets = sorted(b for b in bounds if b > floor_bytes)
    heights = [max(bounds[c] for c in budgets[i:]) for i in range(len(budgets))]
    grey: dict[str, Any] = {"color": "#d9d9d9", "linewidth": 0, "zorder": 1}
    if budgets:
        x = [floor_bytes / size, *(b / size for b in budgets)]
        y = [100 * h for h in (heights[0], *heights)]
        ax.fill_between(x, 0, y, step="pre", label="proven: no schedule", **grey)
    ax.axvspan(0, floor_bytes / size, **grey)
