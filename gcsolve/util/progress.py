"""Progress of long work, shown to a person only: on standard error in a terminal, below the cell in a notebook.

In a notebook, rich draws with ipywidgets. Without ipywidgets, one line of text in the cell's output takes its place, and is
emptied at the end.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gcsolve.errors import ArgumentError

_BAR_WIDTH = 30


def _is_shown(progress: bool | None) -> bool:
    """Whether to show progress: as `progress` says, and for None if standard error is a terminal or a watched notebook."""
    if not isinstance(progress, (bool, type(None))):
        raise ArgumentError(f"progress={progress!r} must be True, False or None (shown to a terminal or notebook only)")
    return progress if progress is not None else sys.stderr.isatty() or _notebook_is_watched()


def _shell() -> Any:
    """IPython's shell if this process is a notebook's kernel, else None."""
    if "ipykernel" not in sys.modules:
        return None
    shell: Any = sys.modules["IPython"].get_ipython()  # type: ignore[attr-defined]
    return shell if hasattr(shell, "kernel") else None


def _notebook_is_watched() -> bool:
    """Whether a person sees this notebook: its front end then answers requests for input, which nbclient does not."""
    shell = _shell()
    return shell is not None and getattr(shell.kernel, "_allow_stdin", True)


def _uses_text_line() -> bool:
    """Whether this is a notebook in which rich cannot draw."""
    return _shell() is not None and importlib.util.find_spec("ipywidgets") is None


@contextmanager
def _text_line() -> Iterator[Callable[[str], None]]:
    """A line of text below the notebook's cell; yields the function that replaces its text."""
    from IPython.display import display

    def as_plain(text: str) -> dict[str, str]:
        return {"text/plain": text}

    line: Any = display(as_plain(""), raw=True, display_id=True)
    try:
        yield lambda text: line.update(as_plain(text), raw=True)
    finally:
        line.update(as_plain(""), raw=True)


@contextmanager
def shown(progress: bool | None, text: str) -> Iterator[None]:
    """Show `text` while the block runs.

    Args:
        progress: True, False, or None: only in a terminal or a notebook that a person watches.
    """
    if not _is_shown(progress):
        yield
        return
    if _uses_text_line():
        with _text_line() as write:
            write(f"{text} …")
            yield
        return
    from rich.console import Console

    with Console(file=sys.stderr).status(text):
        yield


@contextmanager
def bar(progress: bool | None, total: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar of `total` steps; yields a function to call with the name of each step when it begins."""
    if not _is_shown(progress):
        yield lambda _text: None
        return
    if _uses_text_line():
        with _text_line() as write:
            yield _counted(lambda done, text: write(f"{_bar_text(done, total)} {done}/{total} {text}"))
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(file=sys.stderr), transient=True) as shown_bar:
        task = shown_bar.add_task("", total=total)
        yield _counted(lambda done, text: shown_bar.update(task, completed=done, description=text))


def _counted(draw: Callable[[int, str], Any]) -> Callable[[str], None]:
    """A function of a step's name that calls `draw(number of steps begun before, name)`."""
    steps_done = itertools.count()
    return lambda text: draw(next(steps_done), text)


def _bar_text(done: int, total: int) -> str:
    """The bar of the text line, `_BAR_WIDTH` characters."""
    filled = _BAR_WIDTH * done // max(1, total)
    return "█" * filled + "░" * (_BAR_WIDTH - filled)
