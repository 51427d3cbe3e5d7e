"""What is printed while a step is traced.

When a trace fails, torch logs and prints the half-made graph; the error says it in one line instead. What forward prints
appears once, without numbers, and never in a planned step: a warning names the line.
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
_SPEAK_FOR_THEMSELVES = (warnings.__file__, str(Path(logging.__file__).parent))  # their words are meant for one time


class Heard:
    """`at`: file and line where the user's code first printed, None where it did not. `hush()`: it has been heard."""

    def __init__(self, is_user_file: Callable[[str], bool]) -> None:
        self._is_user_file = is_user_file
        self._hushed = False
        self.at: tuple[str, int] | None = None
        self.aside = io.StringIO()

    def stream(self, stream: Any, aside: Any) -> Any:
        """What stands for a stream of this process, in this thread: what torch and others have to say goes `aside`."""
        return _Stream(self, stream, aside)

    def hush(self) -> None:
        """Drop what the user's code prints from now on: the same forward runs again."""
        self._hushed = True

    def write(self, text: str, stream: Any, aside: Any) -> int:
        """Put `text` where it belongs: what torch and others have to say `aside`."""
        at = self._user_line()
        if at is None:
            return aside.write(text)
        self.at = self.at or at
        return len(text) if self._hushed else stream.write(text)

    def _user_line(self) -> tuple[str, int] | None:
        """Where the user's code printed what is being written now; None: it was someone else."""
        frame: Any = sys._getframe(3)
        while frame is not None and frame.f_code.co_filename.startswith(_STDLIB):
            name = frame.f_code.co_filename
            if "site-packages" in name or name.startswith(_SPEAK_FOR_THEMSELVES):
                break
            frame = frame.f_back
        if frame is None or frame.f_code.co_filename.startswith(_SPEAK_FOR_THEMSELVES):
            return None
        name = frame.f_code.co_filename
        return (name, frame.f_lineno) if self._is_user_file(name) else None


class _Stream:
    """Stands for a stream of this process while a step is traced."""

    def __init__(self, heard: Heard, stream: Any, aside: Any) -> None:
        self._heard, self._stream, self._aside = heard, stream, aside

    def write(self, text: str) -> int:
        return self._heard.write(text, self._stream, self._aside)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def heard(is_user_file: Callable[[str], bool], shown_path: Callable[[str], str]) -> Iterator[Heard]:
    """In this block torch is quiet, and what the user's code prints is noticed; a warning says so at its end.

    Args:
        is_user_file: whether the code there is the user's; shown_path: its name for people.
    """
    prints = Heard(is_user_file)
    with patched(During.MODEL_CODE, prints=prints):
        yield prints
    sys.stderr.write(prints.aside.getvalue())  # what the model itself had to say
    if prints.at is not None:
        file, line = prints.at
        warnings.warn_explicit(
            f"forward prints at {shown_path(file)}:{line}: that happens while it is planned, where tensors have shapes and no "
            "numbers, and not in a planned step. Print in the training loop, or in a hook on the model itself",
            UserWarning,
            file,
            line,
        )
