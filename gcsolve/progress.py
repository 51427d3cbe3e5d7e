"""What long work shows while it runs: on standard error, and only to a person (a terminal, or a notebook with ipywidgets)."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gcsolve.errors import ArgumentError


def _watched(progress: bool | None) -> bool:
    if not isinstance(progress, (bool, type(None))):
        raise ArgumentError(f"progress={progress!r} must be True, False or None (shown to a terminal or notebook only)")
    if progress is None:
        # In a notebook rich draws by ipywidgets, and warns in every cell where there is none.
        notebook = "ipykernel" in sys.modules and importlib.util.find_spec("ipywidgets") is not None
        return sys.stderr.isatty() or notebook
    return progress


@contextmanager
def shown(progress: bool | None, text: str) -> Iterator[None]:
    """`text` stands there while the block runs.

    Args:
        progress: True or False; None: only when somebody watches.
    """
    if not _watched(progress):
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


@contextmanager
def bar(progress: bool | None, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar of `total` steps; call what it gives with the name of each step as it begins."""
    if not _watched(progress):
        yield lambda _text: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as shown_bar:
        task = shown_bar.add_task("", total=total)
        begun = False

        def begin(text: str) -> None:
            nonlocal begun
            shown_bar.update(task, advance=int(begun), description=text)
            begun = True

        yield begin
