"""Lines of the user's source code: which files are the user's, and the line where an error arose or that runs now."""

from __future__ import annotations

import random
import traceback
from pathlib import Path
from typing import Any

import torch


def user_line(error: BaseException) -> str:
    """ "file:line" of the innermost frame of the error, or of an error that caused it, in a file of the user's.

    If no frame is the user's (a model of torch's own modules alone), the innermost one in those modules; without one: "".
    """
    frames: list[traceback.FrameSummary] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        frames += reversed(traceback.extract_tb(current.__traceback__))
        current = current.__cause__ or current.__context__
    for accepts in (is_user_file, _is_module_of_torch):
        for frame in frames:
            if accepts(frame.filename):
                return f"{shown_path(frame.filename)}:{frame.lineno}"
    return ""


def running_line() -> str:
    """ "file:line" of the innermost call on the stack that is in a file of the user's; "" if there is none."""
    for frame in reversed(traceback.extract_stack()):
        if is_user_file(frame.filename):
            return f"{shown_path(frame.filename)}:{frame.lineno}"
    return ""


_TORCH = str(Path(str(torch.__file__)).parent)
PACKAGE = str(Path(__file__).parents[1])
_STDLIB = str(Path(str(random.__file__)).parent)


def shown_path(filename: str) -> str:
    """A source file's path as error texts show it: relative to site-packages or to the working directory, else in full."""
    _, separator, installed = filename.rpartition("site-packages/")
    if separator:
        return installed
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename


def is_user_file(filename: str) -> bool:
    """Whether the file is the user's or another library's (a model zoo's), so not torch's, gcsolve's or Python's own."""
    if filename.startswith((_TORCH, PACKAGE, "<")):
        return False
    return not filename.startswith(_STDLIB) or "site-packages" in filename


def _is_module_of_torch(filename: str) -> bool:
    """Whether the file holds torch's modules and functions that models are built of; `nn.Module` itself does not count."""
    folders = (f"{_TORCH}/nn/", f"{_TORCH}/functional.py", f"{_TORCH}/distributions/")
    return filename.startswith(folders) and not filename.endswith("modules/module.py")


def code_name(code: Any) -> str:
    """A callable's name with its file and line, as in "half (models.py:12)"; its name alone if it is not written in Python."""
    function = getattr(code, "__func__", getattr(code, "func", code))
    name = getattr(function, "__qualname__", type(function).__name__)
    compiled = getattr(function, "__code__", None)
    return f"{name} ({shown_path(compiled.co_filename)}:{compiled.co_firstlineno})" if compiled else name
