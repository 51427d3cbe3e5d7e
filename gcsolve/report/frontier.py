"""The frontier as a figure: overhead against peak memory, one staircase for each solver, the proven bound shaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gcsolve.report.axes import SMALL, axes, set_title, unit_of
from gcsolve.report.colours import BLACK, BLUE, GREEN, ORANGE, PINK, SKY, YELLOW
from gcsolve.util.sizes import size_text

_MARKERS = "osD^vP<>pHdX"
_PALETTE = (BLUE, ORANGE, GREEN, PINK, SKY, "#7a5195", "#8c8c8c", "#a6761d")


@dataclass(frozen=True)
class Curve:
    """The plans of one solver: (peak in bytes, overhead as a share of the store-all step) of each."""

    solver: str
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Frontier:
    """What `draw_frontier` draws.

    Attributes:
        model, device, cost: the model's class, and the names of the device and of the cost model.
        baseline_peak_bytes: the store-all peak.
        floor_bytes: no schedule has a smaller peak.
        curves: in the order of the legend.
        bounds: budget in bytes -> no schedule has a smaller overhead (a share of the store-all step).
        measured: the peaks of the curves were measured, not predicted.
    """

    model: str
    device: str
    cost: str
    baseline_peak_bytes: int
    floor_bytes: int
    curves: tuple[Curve, ...]
    bounds: Mapping[int, float]
    measured: bool


def draw_frontier(frontier: Frontier, ax: Any = None) -> Any:
    """Draw it on `ax` or on new Axes, which are returned. No schedule lies in the shaded part."""
    ax = axes(ax, 9, 5)
    unit, unit_bytes = unit_of(frontier.baseline_peak_bytes)
    store_all, floor = frontier.baseline_peak_bytes / unit_bytes, frontier.floor_bytes / unit_bytes
    draw_bound(ax, frontier.bounds, frontier.floor_bytes, unit_bytes)
    styles = _styles([curve.solver for curve in frontier.curves])
    drawn: list[tuple[float, float]] = []
    for curve in frontier.curves:
        spots = [(peak / unit_bytes, 100 * overhead) for peak, overhead in sorted(set(curve.points))]
        if spots:
            _draw_staircase(ax, spots, store_all, styles[curve.solver])
        drawn += spots
    corner: dict[str, Any] = {"marker": "s", "color": BLACK, "markersize": 7, "linestyle": "none", "zorder": 5}
    ax.plot(store_all, 0, label="store-all", **corner)
    highest = max((overhead for _, overhead in drawn), default=1.0)
    peaks = [*(peak for peak, _ in drawn), store_all]
    room = 0.04 * (max(peaks) - floor)
    ax.set_xlim(min(*peaks, floor) - room, max(peaks) + room)
    ax.set_ylim(-0.02 * highest, 1.06 * highest + 0.1)
    ax.set_xlabel(f"peak of the step, {unit} ({'measured' if frontier.measured else 'predicted'})", fontsize=9)
    ax.set_ylabel(f"overhead, % of the store-all step ({frontier.cost} costs)", fontsize=9)
    ax.tick_params(labelsize=SMALL)
    ax.grid(color="#ececec", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.legend(fontsize=SMALL, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    set_title(
        ax,
        f"{frontier.model}: recomputation for memory",
        f"store-all {size_text(frontier.baseline_peak_bytes)}; costs for {frontier.device}; lower left is better",
    )
    return ax


def draw_bound(ax: Any, bounds: Mapping[int, float], floor_bytes: int, unit_bytes: float) -> None:
    """Shade what no schedule reaches: overheads below `bounds` (as in `Frontier`), and peaks below the floor.

    A bound proven at one budget holds at every smaller one, so the edge is a staircase.
    """
    budgets = sorted(b for b in bounds if b > floor_bytes)
    heights = [max(bounds[larger] for larger in budgets[i:]) for i in range(len(budgets))]
    grey: dict[str, Any] = {"color": "#d9d9d9", "linewidth": 0, "zorder": 1}
    if budgets:
        x = [floor_bytes / unit_bytes, *(b / unit_bytes for b in budgets)]
        y = [100 * h for h in (heights[0], *heights)]
        ax.fill_between(x, 0, y, step="pre", label="proven: no schedule", **grey)
    ax.axvspan(0, floor_bytes / unit_bytes, **grey)


def _draw_staircase(ax: Any, spots: Sequence[tuple[float, float]], end: float, style: dict[str, Any]) -> None:
    """The (peak, overhead) spots, and the least overhead that they give with so much memory as a staircase up to `end`."""
    least, steps = float("inf"), []
    for peak, overhead in spots:
        least = min(least, overhead)
        steps.append((peak, least))
    steps.append((max(end, steps[-1][0]), least))
    line = {k: v for k, v in style.items() if not k.startswith(("marker", "label"))}
    ax.plot([peak for peak, _ in steps], [overhead for _, overhead in steps], drawstyle="steps-post", **line)
    ax.plot([peak for peak, _ in spots], [overhead for _, overhead in spots], **{**style, "linestyle": "none"})


def _styles(solvers: Sequence[str]) -> dict[str, dict[str, Any]]:
    """How each solver's curve is drawn: auto in black above the others, uniform √L, a single plan, as a star."""
    others = [name for name in solvers if name not in ("auto", "uniform_sqrt")]
    styles: dict[str, dict[str, Any]] = {
        name: {
            "label": name, "color": _PALETTE[i % len(_PALETTE)], "marker": _MARKERS[i % len(_MARKERS)], "markersize": 5,
            "linewidth": 1.1, "zorder": 3,
        }
        for i, name in enumerate(others)
    }  # fmt: skip
    star = {
        "label": "uniform √L", "color": BLACK, "markerfacecolor": YELLOW, "marker": "*", "markersize": 15,
        "linestyle": "none", "zorder": 5,
    }  # fmt: skip
    best = {"label": "auto", "color": BLACK, "marker": "o", "markersize": 5.5, "linewidth": 2, "zorder": 4}
    return {**styles, "uniform_sqrt": star, "auto": best}
