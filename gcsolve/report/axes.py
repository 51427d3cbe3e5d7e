"""What all figures share: matplotlib (extra `viz`), loaded when the first one is drawn; axes, units and titles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gcsolve.errors import ArgumentError, MissingBackend

SMALL = 8.5
"""Font size of labels."""

_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


def pyplot() -> Any:
    """matplotlib.pyplot.

    Raises:
        MissingBackend: matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingBackend("figures need matplotlib: pip install 'gcsolve[viz]'") from error
    return pyplot


def refuse_unknown_format(name: str, file: str) -> None:
    """Refuse a file that matplotlib does not know how to write, before the work whose figure it is to hold.

    Args:
        name: the argument that names the file, for the text.

    Raises:
        ArgumentError: it is such a file.
    """
    formats = sorted(pyplot().Figure().canvas.get_supported_filetypes())
    ending = Path(file).suffix.removeprefix(".").lower()
    if ending and ending not in formats:
        raise ArgumentError(f"{name} {file}: no figure is written as .{ending}; known endings: {', '.join(formats)}")


def axes(ax: Any, width: float, height: float) -> Any:
    """The Axes to draw on: `ax`, or those of a new figure of so many inches.

    Raises:
        MissingBackend: matplotlib is not installed, even where `ax` is something else.
        ArgumentError: `ax` is neither None nor an Axes.
    """
    plotting = pyplot()
    if ax is None:
        return plotting.subplots(figsize=(width, height), layout="constrained", dpi=110)[1]
    if not hasattr(ax, "add_patch"):
        raise ArgumentError(
            f"ax={ax!r} is not matplotlib's Axes; without one a figure is made, and .figure.savefig({ax!r}) writes it"
            if isinstance(ax, str)
            else f"ax={ax!r} is not matplotlib's Axes; leave it out, or pass one"
        )
    return ax


def unit_of(largest_bytes: float) -> tuple[str, float]:
    """The unit in which the largest number has at least one digit before the point, and its bytes."""
    return next(((name, scale) for name, scale in _UNITS if largest_bytes >= scale), _UNITS[-1])


def set_title(ax: Any, title: str, subtitle: str) -> None:
    ax.set_title(title, loc="left", fontsize=11, pad=22)
    ax.text(0, 1.02, subtitle, transform=ax.transAxes, fontsize=SMALL, color="#444444")
