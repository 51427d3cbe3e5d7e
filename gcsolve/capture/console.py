"""What is printed while a step is traced.

torch logs and prints half a graph when a trace fails; the error that follows says it in one line instead. What forward
prints is shown once, for the first run of several, and a warning names the line: tensors have no values then, and a planned
step prints nothing.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gcsolve.capture.patches import During, patched

_STDLIB = str(Path(logging.__file__).parent.parent)
# A warning or a log record is not a print: it says itself where it comes from, and is meant for one time.
_WARN_OR_LOG = (warnings.__file__, str(Path(logging.__file__).parent))


class Prints:
    """What this thread prints during a trace.

    `first_line`: file and line where the user's code first printed; None: it has not. `others`: what torch and other
    libraries wrote to stderr.
    """

    def __init__(self, is_user_file: Callable[[str], bool]) -> None:
        self.first_line: tuple[str, int] | None = None
        self.others = io.StringIO()
        self._is_user_file = is_user_file
        self._muted = False

    def mute(self) -> None:
        """Drop what the user's code prints from now on, since the same forward runs again."""
        self._muted = True

    def stream(self, stream: Any, of_others: Any) -> Any:
        """A stream in place of one of the process's: what the user's code writes goes there, the rest to `of_others`."""
        return _Stream(self, stream, of_others)

    def write(self, text: str, stream: Any, of_others: Any) -> int:
        line = self._user_line()
        if line is None:
            return of_others.write(text)
        self.first_line = self.first_line or line
        return len(text) if self._muted else stream.write(text)

    def _user_line(self) -> tuple[str, int] | None:
        """File and line of the user's code that prints what is being written now; None: other code prints it."""
        frame: Any = sys._getframe(3)  # above `write` here and in `_Stream`
        while frame is not None and frame.f_code.co_filename.startswith(_STDLIB):
            name = frame.f_code.co_filename
            if "site-packages" in name or name.startswith(_WARN_OR_LOG):
                break
            frame = frame.f_back
        if frame is None or frame.f_code.co_filename.startswith(_WARN_OR_LOG):
            return None
        name = frame.f_code.co_filename
        return (name, frame.f_lineno) if self._is_user_file(name) else None


class _Stream:
    def __init__(self, prints: Prints, stream: Any, of_others: Any) -> None:
        self._prints, self._stream, self._of_others = prints, stream, of_others

    def write(self, text: str) -> int:
        return self._prints.write(text, self._stream, self._of_others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def watched_prints(is_user_file: Callable[[str], bool], shown_path: Callable[[str], str]) -> Iterator[Prints]:
    """In this block, the user's code runs: what it prints is noticed, and torch is quiet. A warning at the end says where the
    user's code printed. After an error, what torch wrote is dropped.

    Args:
        is_user_file: whether a file is the user's.
        shown_path: a file's path as the warning shows it.
    """
    prints = Prints(is_user_file)
    with patched(During.MODEL_CODE, prints=prints):
        yield prints
    if sys.stderr is not None:
        sys.stderr.write(prints.others.getvalue())
    if prints.first_line is not None:
        file, line = prints.first_line
        warnings.warn_explicit(
            f"forward prints at {shown_path(file)}:{line}: that happens while it is planned, where tensors have shapes and no "
            "numbers, and not in a planned step. Print in the training loop, or in a hook on the model itself",
            UserWarning,
            file,
            line,
        )
