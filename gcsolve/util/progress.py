"""What long work shows while it runs, and only to a person: on standard error in a terminal, below the cell in a notebook.

In a notebook rich draws by ipywidgets; where these are not installed, one line of text stands in the cell's output and is
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


def _watched(progress: bool | None) -> bool:
    if not isinstance(progress, (bool, type(None))):
        raise ArgumentError(f"progress={progress!r} must be True, False or None (shown to a terminal or notebook only)")
    return progress if progress is not None else sys.stderr.isatty() or _notebook_is_watched()


def _shell() -> Any:
    """The notebook's shell; None elsewhere."""
    if "ipykernel" not in sys.modules:
        return None
    shell: Any = sys.modules["IPython"].get_ipython()  # type: ignore[attr-defined]
    return shell if hasattr(shell, "kernel") else None


def _notebook_is_watched() -> bool:
    """A front end with a person before it can be asked for input; what runs notebooks by itself (nbclient) cannot."""
    shell = _shell()
    return shell is not None and getattr(shell.kernel, "_allow_stdin", True)


def _draws_text() -> bool:
    return _shell() is not None and importlib.util.find_spec("ipywidgets") is None


@contextmanager
def _line() -> Iterator[Callable[[str], None]]:
    """A line of text below the notebook's cell; call what it gives with the text to stand there."""
    from IPython.display import display

    def shown_as(text: str) -> dict[str, str]:
        return {"text/plain": text}

    line: Any = display(shown_as(""), raw=True, display_id=True)
    try:
        yield lambda text: line.update(shown_as(text), raw=True)
    finally:
        line.update(shown_as(""), raw=True)


@contextmanager
def shown(progress: bool | None, text: str) -> Iterator[None]:
    """`text` stands there while the block runs.

    Args:
        progress: True or False; None: only when somebody watches.
    """
    if not _watched(progress):
        yield
        return
    if _draws_text():
        with _line() as write:
            write(f"{text} …")
            yield
        return
    from rich.console import Console

    with Console(file=sys.stderr).status(text):
        yield


@contextmanager
def bar(progress: bool | None, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar of `total` steps; call what it gives with the name of each step as it begins."""
    if not _watched(progress):
        yield lambda _text: None
        return
    if _draws_text():
        with _line() as write:
            yield _counted(lambda done, text: write(f"{_bar_text(done, total)} {done}/{total} {text}"))
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(file=sys.stderr), transient=True) as shown_bar:
        task = shown_bar.add_task("", total=total)
        yield _counted(lambda done, text: shown_bar.update(task, completed=done, description=text))


def _counted(draw: Callable[[int, str], Any]) -> Callable[[str], None]:
    """What is called as each step begins: draws how many are done, and its name."""
    done = itertools.count()
    return lambda text: draw(next(done), text)


def _bar_text(done: int, total: int) -> str:
    filled = _BAR_WIDTH * done // max(1, total)
    return "█" * filled + "░" * (_BAR_WIDTH - filled)
